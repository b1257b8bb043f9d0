"""The machine: what it is, which libraries are loaded, and how fast the GPU was allowed to run.

Nothing here can fail a training run. What the driver (NVML), torch or the system will not say is left out
with a reason, never with a zero.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

from lowprec_callback.measure import libraries
from lowprec_callback.measure.libraries import loaded_library as loaded_library
from lowprec_callback.recording import Clocks, Environment

ALLOWED_VARIABLES = (
    # Transformer Engine: what it computes.
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_NVFP4_DISABLE_RHT",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    "NVTE_NVFP4_4OVER6",
    "NVTE_FP8_DPA_BWD",
    "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_FORMAT",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    # Transformer Engine: which kernels it takes.
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_NORM_FWD_USE_CUDNN",
    "NVTE_USE_FAST_MATH",
    "NVTE_FWD_LAYERNORM_SM_MARGIN",
    "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "NVTE_EXT_MARGIN_SM",
    "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM",
    "NVTE_ENABLE_CUTEDSL_BACKEND",
    # Transformer Engine: how it is loaded and what it tells.
    "NVTE_FRAMEWORK",
    "NVTE_NVTX_ENABLED",
    "NVTE_DEBUG",
    "NVTE_DEBUG_LEVEL",
    "NVTE_LOG_LEVEL",  # read by nothing; recorded so that a user who set it can be told
    # CUDA, cuBLAS, torch and the CPU's libraries.
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
)
"""The only environment variables that are ever recorded: an environment also holds tokens and passwords."""

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""CPU flags that mean BF16 products in hardware: two of x86, and `bf16` of Arm."""

THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability voltage",
}
"""NVML's bits for why the clock is not higher (`nvmlClocksEventReason*`), in words.

Bit 0x1 is left out: it says that the GPU is idle, which is no throttling.
"""


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The allow-listed variables that are set."""
    return {name: environ[name] for name in ALLOWED_VARIABLES if name in environ}


def environment(device_type: Literal["cuda", "cpu"], te_version_text: str | None) -> Environment:
    """The machine and its libraries. With "cuda" the current CUDA device is meant."""
    processor, flags = cpu()
    versions = _versions(te_version_text)
    facts = {
        "cpu cores": str(_cores()),
        "bf16 instructions of the cpu": ", ".join(flags) or "none",
        "world size": str(_world_size()),
    }
    if device_type == "cpu":
        facts["threads of torch"] = _or_reason(lambda: str(_torch().get_num_threads()))
        return Environment(processor, "cpu", None, versions, facts, variables())
    import torch

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    facts |= {
        "cpu": processor,
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
        "gpus": str(torch.cuda.device_count()),
    }
    with ClockReader() as reader:
        versions |= reader.versions()
        facts |= reader.facts()
        name = reader.name() or torch.cuda.get_device_name(index)
    return Environment(
        device=name,
        device_type="cuda",
        compute_capability=torch.cuda.get_device_capability(index),
        versions=versions,
        facts=facts,
        variables=variables(),
    )


def _torch() -> Any:
    import torch

    return torch


def _or_reason(ask: Callable[[], str]) -> str:
    """The answer, or "unknown" with the reason: a fact about the machine is never worth a crash."""
    try:
        return ask()
    except Exception as error:
        return f"unknown ({error})"


def _versions(te_version_text: str | None) -> dict[str, str]:
    """Versions of what is installed and loaded; a library that is absent has no entry."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found["torch"] = _installed("torch")
    found["lightning"] = _installed("lightning") or _installed("pytorch-lightning")
    found["transformer_engine"] = te_version_text
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch_cudnn_version()
    lt = loaded_library("cublasLt")
    found["cublasLt"] = libraries.cublaslt_version(lt) if lt else None
    return {name: version for name, version in found.items() if version}


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_cudnn_version() -> str | None:
    """Version of the cuDNN that torch itself has loaded; None for a torch without one."""
    try:
        number = _torch().backends.cudnn.version()
    except Exception:  # torch raises when it finds a cuDNN other than the one that it was built with
        return None
    return libraries.decode_cudnn_version(number) if number else None


def _world_size() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size())


def _cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """The CPU's model name, and its BF16 instructions by name."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model.group(1).strip() if model else platform.processor() or platform.machine() or "CPU"
    has = set(flags.group(1).split()) if flags else set()
    return name, tuple(flag for flag in BF16_INSTRUCTIONS if flag in has)


class ClockReader:
    """Reads clock, power and temperature of the current CUDA device from NVML, the driver's own interface.

    A reading does not touch the GPU's queue, but it takes the host's time: it belongs between timed blocks,
    not into them. Where NVML is unavailable every reading is None and `why_not` says why.
    """

    def __init__(self) -> None:
        self.why_not: str | None = None
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no package, no driver, no permission
            self.why_not = f"NVML is not available: {error or type(error).__name__}"
            return
        self._nvml = pynvml
        try:
            self._handle = _handle_of_current_device(pynvml)
        except Exception as error:
            self.why_not = f"NVML does not know the current CUDA device: {error}"

    def read(self, recipe: str, round: int) -> Clocks | None:
        """Clock (MHz), power (W, averaged by NVML over about a second), temperature (C), what throttles."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return None
        try:
            return Clocks(
                recipe=recipe,
                round=round,
                sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                temperature_c=int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                throttle=throttle_words(_throttle_bits(nvml, handle)),
            )
        except Exception as error:
            self.why_not = f"NVML gave no reading: {error}"
            return None

    def name(self) -> str | None:
        """The GPU's name as NVML gives it."""
        if self._nvml is None or self._handle is None:
            return None
        try:
            return str(self._nvml.nvmlDeviceGetName(self._handle))
        except Exception:
            return None

    def versions(self) -> dict[str, str]:
        """Version of the driver, and the newest CUDA that it supports."""
        if self._nvml is None:
            return {}
        return {
            "driver": self._ask("nvmlSystemGetDriverVersion"),
            "driver's cuda": self._ask("nvmlSystemGetCudaDriverVersion_v2", as_text=_cuda_version),
        }

    def facts(self) -> dict[str, str]:
        """Power limits (W) and the highest SM clock (MHz), as text; or the one reason why there are none."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return {"power and clocks": f"unknown ({self.why_not})"}
        ask, clock = self._ask, nvml.NVML_CLOCK_SM
        return {
            "power limit": ask("nvmlDeviceGetEnforcedPowerLimit", handle, as_text=_watts),
            "default power limit": ask("nvmlDeviceGetPowerManagementDefaultLimit", handle, as_text=_watts),
            "highest sm clock": ask("nvmlDeviceGetMaxClockInfo", handle, clock, as_text="{} MHz".format),
        }

    def _ask(self, function: str, *arguments: Any, as_text: Callable[[Any], str] = str) -> str:
        return _or_reason(lambda: as_text(getattr(self._nvml, function)(*arguments)))

    def close(self) -> None:
        """Let go of NVML. Idempotent."""
        if self._nvml is not None:
            nvml, self._nvml, self._handle = self._nvml, None, None
            self.why_not = self.why_not or "closed"
            try:
                nvml.nvmlShutdown()
            except Exception as error:
                self.why_not = f"NVML did not shut down: {error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _handle_of_current_device(nvml: ModuleType) -> Any:
    """NVML's handle for torch's current device, by UUID, else by PCI address.

    Never by index: CUDA numbers the devices of CUDA_VISIBLE_DEVICES, and by speed; NVML numbers all, by slot.
    """
    gpu = _torch().cuda.get_device_properties(_torch().cuda.current_device())
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}")
    except (nvml.NVMLError, AttributeError):  # a MIG slice; a torch before 2.4 has no `uuid`
        address = f"{gpu.pci_domain_id:08X}:{gpu.pci_bus_id:02X}:{gpu.pci_device_id:02X}.0"
        return nvml.nvmlDeviceGetHandleByPciBusId(address)


def _throttle_bits(nvml: ModuleType, handle: Any) -> int:
    """The bits of `THROTTLE_REASONS`. Older drivers know the function by its older name only."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (nvml.NVMLError, AttributeError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def throttle_words(bits: int) -> tuple[str, ...]:
    """NVML's bits in words; a bit that we do not know is named by its value."""
    known = [word for bit, word in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~(0x1 | sum(THROTTLE_REASONS))
    return (*known, f"reason {rest:#x}") if rest else tuple(known)


def _watts(milliwatts: int) -> str:
    return f"{milliwatts / 1000:.0f} W"


def _cuda_version(number: int) -> str:
    """NVML's 13000 is CUDA 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
