"""The machine's facts, with a driver and a GPU that are played."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from lowprec_callback import recording
from lowprec_callback.measure import device, libraries

UUID = "0f1e2d3c-0000-0000-0000-000000000001"


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """One H200 as `pynvml` shows it."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.asked: list[str] = []
        self.bits = 0x4

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        self.asked.append(address)
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 650_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return 1755

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 689_400

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.bits


def refuse(*_: object) -> Any:
    raise NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    properties = SimpleNamespace(
        uuid=UUID,
        pci_domain_id=0,
        pci_bus_id=0x1B,
        pci_device_id=0,
        total_memory=139 * 2**30,
        multi_processor_count=132,
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200 by torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return properties


# --- Clocks ----------------------------------------------------------------------------------------------


def test_a_reading_has_units_and_words(nvml: FakeNvml, gpu: SimpleNamespace) -> None:
    with device.ClockReader() as reader:
        assert reader.why_not is None
        assert reader.read("fp8_block", 2) == recording.Clocks("fp8_block", 2, 1755, 689.4, 61, ("power cap",))
    assert nvml.asked == [f"GPU-{UUID}"]
    assert nvml.open == 0


def test_a_device_without_uuid_is_found_by_its_address(nvml: FakeNvml, gpu: SimpleNamespace) -> None:
    del gpu.uuid
    assert device.ClockReader().why_not is None
    assert nvml.asked == ["00000000:1B:00.0"]


def test_older_drivers_know_the_older_name(nvml: FakeNvml, gpu: SimpleNamespace) -> None:
    setattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", refuse)  # noqa: B010
    setattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: 0x40)  # noqa: B010
    reading = device.ClockReader().read("bf16", 0)
    assert reading is not None
    assert reading.throttle == ("thermal slowdown (hardware)",)


def test_no_driver_is_a_reason(nvml: FakeNvml, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNvml, "nvmlInit", refuse)
    reader = device.ClockReader()
    assert reader.why_not == "NVML is not available: Not Supported"
    assert reader.read("bf16", 0) is None
    assert reader.versions() == {}
    assert reader.name() is None
    assert reader.facts() == {"power and clocks": "unknown (NVML is not available: Not Supported)"}
    reader.close()


def test_no_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    why = device.ClockReader().why_not
    assert why is not None
    assert why.startswith("NVML is not available: ")


def test_an_unknown_device_is_a_reason(nvml: FakeNvml, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetHandleByUUID", refuse)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetHandleByPciBusId", refuse)
    reader = device.ClockReader()
    assert reader.why_not == "NVML does not know the current CUDA device: Not Supported"
    assert reader.read("bf16", 0) is None
    assert reader.versions()["driver"] == "580.159.04"


def test_a_reading_that_fails_is_none_with_a_reason(
    nvml: FakeNvml, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = device.ClockReader()
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetPowerUsage", refuse)
    assert reader.read("bf16", 0) is None
    assert reader.why_not == "NVML gave no reading: Not Supported"


def test_closing_twice_and_reading_after(nvml: FakeNvml, gpu: SimpleNamespace) -> None:
    reader = device.ClockReader()
    reader.close()
    reader.close()
    assert nvml.open == 0
    assert reader.read("bf16", 0) is None
    assert reader.why_not == "closed"


def test_throttle_words() -> None:
    assert device.throttle_words(0) == ()
    assert device.throttle_words(0x1) == (), "an idle GPU is not throttled"
    assert device.throttle_words(0x24) == ("power cap", "thermal slowdown (software)")
    assert device.throttle_words(0x4 | 0x4000) == ("power cap", "reason 0x4000")


def test_the_bits_are_nvmls() -> None:
    by_name = {
        "ApplicationsClocksSetting": "application clocks",
        "SwPowerCap": "power cap",
        "HwSlowdown": "hardware slowdown",
        "SyncBoost": "sync boost",
        "SwThermalSlowdown": "thermal slowdown (software)",
        "HwThermalSlowdown": "thermal slowdown (hardware)",
        "HwPowerBrakeSlowdown": "power brake",
        "DisplayClockSetting": "display clocks",
    }
    for name, word in by_name.items():
        assert device.THROTTLE_REASONS[getattr(pynvml, f"nvmlClocksThrottleReason{name}")] == word


# --- Environment -----------------------------------------------------------------------------------------


def test_a_gpu_environment(nvml: FakeNvml, gpu: SimpleNamespace) -> None:
    found = device.environment("cuda", "2.20.2")
    assert (found.device, found.device_type, found.compute_capability) == ("NVIDIA H200", "cuda", (9, 0))
    assert found.versions["transformer_engine"] == "2.20.2"
    assert found.versions["driver"] == "580.159.04"
    assert found.versions["driver's cuda"] == "13.0"
    assert found.versions["torch"] == str(torch.__version__)
    assert found.facts["power limit"] == "650 W"
    assert found.facts["default power limit"] == "700 W"
    assert found.facts["highest sm clock"] == "1980 MHz"
    assert found.facts["memory"] == "139.0 GiB"
    assert found.facts["multiprocessors"] == "132"
    assert found.facts["world size"] == "1"
    assert nvml.open == 0
    recording.encode(found)


def test_a_fact_that_the_driver_refuses_has_its_reason(
    nvml: FakeNvml, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetEnforcedPowerLimit", refuse)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetName", refuse)
    found = device.environment("cuda", None)
    assert found.facts["power limit"] == "unknown (Not Supported)"
    assert found.facts["default power limit"] == "700 W"
    assert found.device == "NVIDIA H200 by torch"
    assert "transformer_engine" not in found.versions


def test_a_gpu_environment_without_nvml(nvml: FakeNvml, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNvml, "nvmlInit", refuse)
    found = device.environment("cuda", None)
    assert found.device == "NVIDIA H200 by torch"
    assert found.facts["power and clocks"] == "unknown (NVML is not available: Not Supported)"
    assert "driver" not in found.versions


def test_a_cpu_environment() -> None:
    found = device.environment("cpu", None)
    assert found.device_type == "cpu"
    assert found.device == device.cpu()[0]
    assert found.compute_capability is None
    assert found.facts["threads of torch"] == str(torch.get_num_threads())
    assert int(found.facts["cpu cores"]) >= 1
    assert found.versions["python"].startswith("3.")
    recording.encode(found)


def test_the_cpu_of_x86_and_of_arm(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Xeon 6\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16 amx_tile\n")
    assert device.cpu(file) == ("Xeon 6", ("avx512_bf16", "amx_bf16"))
    file.write_text("processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n")
    name, flags = device.cpu(file)
    assert name
    assert flags == ("bf16",)
    file.write_text("model name\t: old\nflags\t\t: fpu not_bf16_really\n")
    assert device.cpu(file) == ("old", ())
    assert device.cpu(tmp_path / "none")[1] == ()


def test_only_allow_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in device.ALLOWED_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    monkeypatch.setenv("NVTE_SECRET", "no")
    monkeypatch.setenv("WANDB_API_KEY", "no")
    assert device.environment("cpu", None).variables == {"NVTE_BACKWARD_OVERRIDE": "dequantized"}
    assert not [name for name in device.ALLOWED_VARIABLES if "KEY" in name or "TOKEN" in name or "*" in name]


# --- Libraries -------------------------------------------------------------------------------------------

MAPS = """\
7f00-7f10 r-xp 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0
7f10-7f20 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0
7f20-7f30 r-xp 00000000 08:01 12 /opt/my env/site-packages/nvidia/cudnn/lib/libcudnn.so.9
7f30-7f40 r-xp 00000000 08:01 13 /opt/my env/site-packages/nvidia/cudnn/lib/libcudnn_graph.so.9
7f40-7f50 rw-p 00000000 00:00 0
7f50-7f60 rw-p 00000000 00:00 0 [heap]
7f60-7f70 r-xp 00000000 08:01 14 /opt/lib/libcublasLt.so.13
"""


def test_loaded_libraries(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert libraries.loaded_libraries("cudnn", maps) == [
        Path("/usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0"),
        Path("/opt/my env/site-packages/nvidia/cudnn/lib/libcudnn.so.9"),
    ]
    assert device.loaded_library("cublasLt", maps) == Path("/opt/lib/libcublasLt.so.13")
    assert device.loaded_library("cublas", maps) is None
    assert libraries.loaded_library("cudnn", tmp_path / "none") is None


@pytest.fixture
def no_system_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose loader knows no cuDNN, whatever this one knows."""
    monkeypatch.setattr(libraries, "_loader_cache", str)
    monkeypatch.setattr(libraries, "torch_cudnn_file", lambda: None)


def library(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.touch()
    return file


@pytest.mark.usefixtures("no_system_cudnn")
def test_te_looks_at_cudnn_home_first(tmp_path: Path) -> None:
    library(tmp_path / "cuda/lib64", "libcudnn.so.9.19.0")
    home = library(tmp_path / "home/deep/lib", "libcudnn.so.9.14.0")
    library(tmp_path / "home/stubs", "libcudnn.so.9.99.0")
    environ = {"CUDNN_HOME": str(tmp_path / "home"), "CUDA_HOME": str(tmp_path / "cuda")}
    assert libraries.te_cudnn_candidate(environ) == libraries.Candidate(home, "CUDNN_HOME")


@pytest.mark.usefixtures("no_system_cudnn")
def test_te_sorts_versions_as_text(tmp_path: Path) -> None:
    newest = library(tmp_path, "libcudnn.so.9.14.0")
    by_text = library(tmp_path, "libcudnn.so.9.9.0")
    found = libraries.te_cudnn_candidate({"CUDA_HOME": str(tmp_path)})
    assert found == libraries.Candidate(by_text, "CUDA_HOME")
    assert newest.exists()


@pytest.mark.usefixtures("no_system_cudnn")
def test_te_then_asks_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_usr_local_cuda: None) -> None:
    cached = tmp_path / "cached/libcudnn.so"
    monkeypatch.setattr(
        libraries,
        "_loader_cache",
        lambda: f"\tlibcudnn.so.9 (libc6,x86-64) => /no/libcudnn.so.9\n\tlibcudnn.so (libc6,x86-64) => {cached}\n",
    )
    library(tmp_path / "versioned", "libcudnn.so.9")
    environ = {"LD_LIBRARY_PATH": f":{tmp_path / 'versioned'}", "CUDNN_HOME": str(tmp_path / "nothing")}
    assert libraries.te_cudnn_candidate(environ) == libraries.Candidate(cached, "the system's loader")
    plain = library(tmp_path / "plain", "libcudnn.so")
    environ["LD_LIBRARY_PATH"] += f":{tmp_path / 'plain'}"
    assert libraries.te_cudnn_candidate(environ) == libraries.Candidate(plain, "the system's loader")


@pytest.fixture
def no_usr_local_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    real = libraries.glob.glob
    monkeypatch.setattr(
        libraries.glob,
        "glob",
        lambda pattern, **options: [] if pattern.startswith("/usr/local/cuda") else real(pattern, **options),
    )
    exists = Path.exists
    monkeypatch.setattr(
        Path,
        "exists",
        lambda self, **options: not str(self).startswith(("/lib", "/usr/lib")) and exists(self, **options),
    )


def test_te_takes_what_torch_ships_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_system_cudnn: None, no_usr_local_cuda: None
) -> None:
    assert libraries.te_cudnn_candidate({}) is None
    monkeypatch.setattr(libraries, "torch_cudnn_file", lambda: tmp_path / "libcudnn.so.9")
    assert libraries.te_cudnn_candidate({}) == libraries.Candidate(tmp_path / "libcudnn.so.9", "Python wheels")


def test_the_cudnn_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path / "torch", "__init__.py")
    shipped = library(tmp_path / "nvidia/cudnn/lib", "libcudnn.so.9")
    library(tmp_path / "nvidia/cudnn/lib", "libcudnn_graph.so.9")
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: spec)
    assert libraries.torch_cudnn_file() == shipped


def test_a_version_from_a_file_name(tmp_path: Path) -> None:
    real = library(tmp_path, "libcudnn.so.9.14.0")
    link = tmp_path / "libcudnn.so"
    link.symlink_to(real)
    assert libraries.cudnn_version(link) == "9.14.0"
    assert libraries.cudnn_version(library(tmp_path, "libcudnn.so.9")) is None, "no library, so it cannot answer"


def test_versions_from_numbers() -> None:
    assert libraries.decode_cudnn_version(91400) == "9.14.0"
    assert libraries.decode_cudnn_version(91901) == "9.19.1"
    assert libraries.decode_cudnn_version(8902) == "8.9.2"
    assert libraries.cublaslt_version(Path("/no/such/libcublasLt.so.13")) is None
