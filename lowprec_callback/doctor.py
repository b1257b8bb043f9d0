"""`lowprec doctor`: what this machine can run, and why not the rest.

Three steps: `look` asks the machine, `diagnose` turns what it said into findings (a pure function, so that
every machine can be played through in tests), and `doctor_page` shows them. Whatever is broken here becomes a
finding; nothing of it makes doctor itself fail.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lowprec_callback import __version__
from lowprec_callback.failures import in_words
from lowprec_callback.recipes import RecipeCard, load_cards, static_refusal, version_tuple

if TYPE_CHECKING:
    import argparse

VERSION = 1
"""Schema version of `lowprec doctor --json`."""

Level = Literal["ok", "note", "warning", "absent"]

INSTALL_TE = 'pip install --no-build-isolation "transformer_engine[pytorch]"'

UNFUSED_ATTENTION = (
    "With an older cuDNN than torch's, Transformer Engine leaves attention unfused and says so nowhere: "
    "6% of a BF16 step and 11% of an FP8 step, measured on an H200 (hidden size 4096)."
)
"""Measured: 142.6 against 133.7 ms in BF16 and 94.6 against 85.1 ms in FP8, with cuDNN 9.14 against 9.19."""


@dataclass(frozen=True)
class Cudnn:
    """A cuDNN file."""

    path: str
    version: str | None
    found_by: str = ""


@dataclass(frozen=True)
class Machine:
    """What the machine says of itself. None: there is none, or it would not say (`..._problem` says why)."""

    python: str
    cpu: str
    cpu_bf16: tuple[str, ...] = ()
    torch: str | None = None
    torch_problem: str | None = None
    torch_cuda: str | None = None
    """CUDA runtime that torch was built with; None for a CPU build."""
    gpu: str | None = None
    """The current CUDA device, as torch sees it."""
    gpu_count: int = 0
    gpu_memory: str = ""
    compute_capability: tuple[int, int] | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    """Newest CUDA that the driver supports."""
    driver_problem: str | None = None
    cudnn_of_torch: Cudnn | None = None
    cudnn_of_te: Cudnn | None = None
    """The one that TE has loaded, or would load."""
    te: str | None = None
    te_problem: str | None = None
    gates: dict[str, str | None] = field(default_factory=dict)
    """Recipe name to what TE's own gate says: None for available, else TE's reason."""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def device_type(self) -> Literal["cuda", "cpu"]:
        """What a run would use."""
        return "cpu" if self.gpu is None else "cuda"


@dataclass(frozen=True)
class Finding:
    """One thing about the machine."""

    subject: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True)
class RecipeFinding:
    """Whether a recipe can run here, under which engines, and why not otherwise."""

    recipe: str
    title: str
    runs: bool
    engines: tuple[str, ...]
    reason: str
    """Why it cannot run; or, of one that can, what is special about it here (may be empty)."""


@dataclass(frozen=True)
class Diagnosis:
    """All that doctor has to say."""

    version: int
    tool_version: str
    findings: tuple[Finding, ...]
    recipes: tuple[RecipeFinding, ...]


# --- Asking ----------------------------------------------------------------------------------------------


def look() -> Machine:
    """Ask this machine. Imports torch and, on a GPU, Transformer Engine."""
    from lowprec_callback.measure import device

    cpu, cpu_bf16 = device.cpu()
    machine = Machine(platform.python_version(), cpu, cpu_bf16, variables=device.variables())
    with device.ClockReader() as reader:
        versions = reader.versions()
        machine = dataclasses.replace(
            machine,
            driver=versions.get("driver"),
            driver_cuda=versions.get("driver's cuda"),
            driver_problem=None if versions else reader.why_not,
        )
    try:
        import torch

        machine = dataclasses.replace(machine, torch=str(torch.__version__), torch_cuda=torch.version.cuda)
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            machine = dataclasses.replace(
                machine,
                gpu=properties.name,
                gpu_count=torch.cuda.device_count(),
                gpu_memory=f"{properties.total_memory / 2**30:.1f} GiB",
                compute_capability=(properties.major, properties.minor),
            )
    except Exception as error:  # a broken install raises what it likes: ImportError, OSError, RuntimeError
        return dataclasses.replace(machine, torch_problem=in_words(error))
    return _look_at_te(machine)


def _look_at_te(machine: Machine) -> Machine:
    from lowprec_callback.engines import transformer_engine
    from lowprec_callback.measure import device, libraries

    loaded = transformer_engine.load()
    machine = dataclasses.replace(machine, te=loaded.version, te_problem=loaded.reason)
    if machine.device_type != "cuda":
        return machine
    shipped, candidate = libraries.torch_cudnn_file(), libraries.te_cudnn_candidate()
    of_torch = of_te = None
    if shipped is not None:
        of_torch = Cudnn(str(shipped), device.torch_cudnn_version() or libraries.cudnn_version(shipped))
    if candidate is not None:
        version = _cudnn_that_te_calls(loaded) or libraries.cudnn_version(candidate.path)
        of_te = Cudnn(str(candidate.path), version, candidate.found_by)
    gates: dict[str, str | None] = {}
    if loaded.ok:
        cards = [card for card in load_cards().values() if "transformer_engine" in card.engines]
        gates = {card.name: transformer_engine.gate(card) for card in cards}
    return dataclasses.replace(machine, cudnn_of_torch=of_torch, cudnn_of_te=of_te, gates=gates)


def _cudnn_that_te_calls(loaded: object) -> str | None:
    """TE's own answer, once it is loaded: it beats any search of ours."""
    from lowprec_callback.measure import libraries

    try:
        return libraries.decode_cudnn_version(int(loaded.tex.get_cudnn_version()))  # type: ignore[attr-defined]
    except Exception:
        return None


# --- Judging ---------------------------------------------------------------------------------------------


def diagnose(machine: Machine, cards: Mapping[str, RecipeCard] | None = None) -> Diagnosis:
    """Findings about a machine, and each recipe's chances on it."""
    cards = load_cards() if cards is None else cards
    findings = [_gpu(machine), _driver(machine), _cpu(machine), _torch(machine)]
    findings += [_transformer_engine(machine), *_cudnn(machine), *_variables(machine)]
    recipes = tuple(_recipe(machine, card) for card in cards.values())
    return Diagnosis(VERSION, __version__, tuple(findings), recipes)


def _gpu(machine: Machine) -> Finding:
    if machine.gpu is not None:
        capability = "{}.{}".format(*machine.compute_capability or ("?", "?"))
        more = f"; {machine.gpu_count} GPUs" if machine.gpu_count > 1 else ""
        return Finding("GPU", "ok", f"{machine.gpu}, compute capability {capability}, {machine.gpu_memory}{more}")
    if machine.driver is None:
        return Finding("GPU", "absent", "none that CUDA can use")
    if machine.torch is not None and machine.torch_cuda is None:
        advice = "Install a CUDA build of torch to use it (https://pytorch.org/get-started/locally/)."
        return Finding("GPU", "warning", "there is an NVIDIA driver, but this torch is a CPU build", advice)
    advice = "Look at CUDA_VISIBLE_DEVICES, and at whether the driver is new enough for torch's CUDA."
    return Finding("GPU", "warning", "there is an NVIDIA driver, but torch sees no GPU", advice)


def _driver(machine: Machine) -> Finding:
    if machine.driver is None:
        return Finding("driver", "absent", machine.driver_problem or "none found")
    return Finding("driver", "ok", f"{machine.driver}, for CUDA up to {machine.driver_cuda}")


def _cpu(machine: Machine) -> Finding:
    flags = ", ".join(machine.cpu_bf16)
    return Finding("CPU", "ok", f"{machine.cpu}; {f'BF16 in hardware ({flags})' if flags else 'no BF16 in hardware'}")


def _torch(machine: Machine) -> Finding:
    if machine.torch_problem is not None:
        return Finding("torch", "warning", f"cannot be used: {machine.torch_problem}", "Nothing runs without it.")
    build = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "a CPU build"
    return Finding("torch", "ok", f"{machine.torch}, {build}; Python {machine.python}")


def _transformer_engine(machine: Machine) -> Finding:
    name = "Transformer Engine"
    if machine.te_problem is None:
        return Finding(name, "ok", machine.te) if machine.te else Finding(name, "absent", "not asked")
    found = f"cannot be imported: {machine.te_problem}"
    if machine.device_type == "cpu":
        return Finding(name, "absent", found, "Not needed here: it runs on NVIDIA GPUs only.")
    advice = f"It is built against the torch that is installed: {INSTALL_TE}"
    return Finding(name, "warning", found, advice)


def _cudnn(machine: Machine) -> list[Finding]:
    """The cuDNN that TE takes against the one that torch ships."""
    if machine.device_type == "cpu":
        return []
    of_te, of_torch = machine.cudnn_of_te, machine.cudnn_of_torch
    if of_te is None:
        return [Finding("cuDNN", "warning", "Transformer Engine would find none", "Set CUDNN_HOME to its folder.")]
    version = of_te.version or "an unknown version"
    found = f"Transformer Engine takes {version} ({of_te.path}, by {of_te.found_by})"
    if of_torch is None:
        return [Finding("cuDNN", "ok", f"{found}; torch ships none of its own")]
    found += f"; torch ships {of_torch.version or 'an unknown version'}"
    if of_te.version is None or of_torch.version is None:
        return [Finding("cuDNN", "note", found, UNFUSED_ATTENTION)]
    if version_tuple(of_te.version) >= version_tuple(of_torch.version):
        return [Finding("cuDNN", "ok", found)]
    home = Path(of_torch.path).parents[1]
    cure = f"Start Python with CUDNN_HOME=D and with D/lib first in LD_LIBRARY_PATH, where D is {home}"
    return [Finding("cuDNN", "warning", found, f"{UNFUSED_ATTENTION} {cure}")]


_VARIABLES: dict[str, tuple[Level, str]] = {
    "NVTE_LOG_LEVEL": (
        "warning",
        "Nothing reads it: Transformer Engine keeps no log of its GEMMs. The verdict of a run says what ran.",
    ),
    "NVTE_BACKWARD_OVERRIDE": (
        "warning",
        "Every dgrad and wgrad GEMM runs in BF16 under every recipe but delayed scaling, which cannot be "
        "built while it is set.",
    ),
    "NVTE_FUSED_ATTN": ("note", "0 switches cuDNN's fused attention off."),
    "NVTE_FLASH_ATTN": ("note", "0 switches FlashAttention off."),
    "CUDA_LAUNCH_BLOCKING": (
        "warning",
        "With 1 the host waits for every kernel: step times then mean nothing.",
    ),
    "NVTE_NVFP4_DISABLE_RHT": (
        "note",
        "The card nvfp4 says disable_rht itself, so this changes nothing there.",
    ),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": (
        "note",
        "The card nvfp4 says disable_stochastic_rounding itself, so this changes nothing there.",
    ),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": (
        "note",
        "The card nvfp4 says disable_2d_quantization itself, so this changes nothing there.",
    ),
}
"""What a set variable means for a measurement, where there is something to say."""


def _variables(machine: Machine) -> list[Finding]:
    findings = []
    for name, value in machine.variables.items():
        level, advice = _VARIABLES.get(name, ("note", ""))
        if level == "warning" and value in ("", "0"):
            level, advice = "note", ""
        findings.append(Finding(name, level, f"is set to {value!r}", advice))
    return findings


def _recipe(machine: Machine, card: RecipeCard) -> RecipeFinding:
    refusals = {engine: _refusal(machine, card, engine) for engine in card.engines}
    engines = tuple(engine for engine, refusal in refusals.items() if refusal is None)
    if engines:
        return RecipeFinding(card.name, card.title, True, engines, _special(machine, card))
    reason = "; ".join(dict.fromkeys(refusal for refusal in refusals.values() if refusal))
    return RecipeFinding(card.name, card.title, False, (), reason)


def _refusal(machine: Machine, card: RecipeCard, engine: str) -> str | None:
    if machine.torch_problem is not None:
        return "torch cannot be used"
    static = static_refusal(
        card,
        engine=engine,
        device_type=machine.device_type,
        compute_capability=machine.compute_capability,
        cuda_version=machine.torch_cuda,
        te_version=machine.te,
    )
    if engine == "plain_torch":
        return static
    if machine.device_type != "cuda":
        return static or "Transformer Engine needs a CUDA GPU"
    gate = machine.gates.get(card.name)
    if static is not None:
        return f"{static}; TE says: {gate}" if gate else static
    if machine.te_problem is not None:
        return "Transformer Engine cannot be imported"
    if gate is None and card.te_class == "DelayedScaling" and machine.variables.get("NVTE_BACKWARD_OVERRIDE"):
        return "DelayedScaling refuses to be built while NVTE_BACKWARD_OVERRIDE is set"
    return gate


def _special(machine: Machine, card: RecipeCard) -> str:
    capability = machine.compute_capability
    if card.emulated_from is not None and capability is not None and capability >= card.emulated_from:
        return "runs as MXFP8: emulated from compute capability {}.{}".format(*card.emulated_from)
    if machine.device_type == "cpu" and card.autocast_dtype == "bfloat16" and not machine.cpu_bf16:
        return "this CPU has no BF16 instructions: products are computed through FP32"
    return ""


# --- The command -----------------------------------------------------------------------------------------


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `lowprec doctor` to the command line."""
    parser = subparsers.add_parser("doctor", description="What this machine can run, and why not the rest.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, judge, show. Always 0: what is wrong with the machine is the answer, not a failure."""
    diagnosis = diagnose(look())
    if args.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=1, ensure_ascii=False))
        return 0
    from rich.console import Console

    from lowprec_callback.doctor_page import page

    Console(highlight=False).print(page(diagnosis))
    return 0
