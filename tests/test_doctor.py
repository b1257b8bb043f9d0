"""Doctor, on machines that are played: an H200 in several states, newer and older GPUs, a laptop, broken installs."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

import lowprec_callback.engines
from lowprec_callback import cli, doctor
from lowprec_callback.doctor import Cudnn, Diagnosis, Finding, Machine, RecipeFinding
from lowprec_callback.doctor_page import page
from lowprec_callback.measure import device, libraries
from lowprec_callback.recipes import RecipeCard

SHIPPED = Cudnn("/venv/lib/python3.12/site-packages/nvidia/cudnn/lib/libcudnn.so.9", "9.19.0")
SYSTEM = Cudnn("/usr/lib/x86_64-linux-gnu/libcudnn.so", "9.14.0", "the system's loader")
GATES: dict[str, str | None] = {
    "bf16": None,
    "fp8_delayed": None,
    "fp8_current": None,
    "fp8_block": None,
    "mxfp8": "Device compute capability 10.0 or higher required for MXFP8 execution. (te.is_mxfp8_available)",
    "nvfp4": "Device compute capability 10.0 or higher required for NVFP4 execution. (te.is_nvfp4_available)",
}
H200 = Machine(
    python="3.12.3",
    cpu="INTEL(R) XEON(R) PLATINUM 8580",
    cpu_bf16=("avx512_bf16", "amx_bf16"),
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    gpu="NVIDIA H200",
    gpu_count=1,
    gpu_memory="139.8 GiB",
    compute_capability=(9, 0),
    driver="580.159.04",
    driver_cuda="13.0",
    cudnn_of_torch=SHIPPED,
    cudnn_of_te=dataclasses.replace(SHIPPED, found_by="CUDNN_HOME"),
    te="2.20.2",
    gates=GATES,
)
LAPTOP = Machine(
    python="3.11.7",
    cpu="Intel(R) Core(TM) i7-8550U",
    torch="2.13.0+cpu",
    driver_problem="NVML is not available: NVML Shared Library Not Found",
    te_problem="ModuleNotFoundError: No module named 'transformer_engine'",
)


def h200(**changes: Any) -> Diagnosis:
    return doctor.diagnose(dataclasses.replace(H200, **changes))


def finding(diagnosis: Diagnosis, subject: str) -> Finding:
    [found] = [each for each in diagnosis.findings if each.subject == subject]
    return found


def recipe(diagnosis: Diagnosis, name: str) -> RecipeFinding:
    [found] = [each for each in diagnosis.recipes if each.recipe == name]
    return found


def rendered(diagnosis: Diagnosis, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(page(diagnosis))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


# --- The page --------------------------------------------------------------------------------------------


def test_the_page_of_an_h200_with_an_old_cudnn(snapshot: SnapshotAssertion) -> None:
    diagnosis = h200(cudnn_of_te=SYSTEM, variables={"NVTE_LOG_LEVEL": "1", "CUDA_VISIBLE_DEVICES": "0"})
    diagnosis = dataclasses.replace(diagnosis, tool_version="0.0.0")
    assert rendered(diagnosis) == snapshot


def test_the_page_of_a_laptop(snapshot: SnapshotAssertion) -> None:
    diagnosis = dataclasses.replace(doctor.diagnose(LAPTOP), tool_version="0.0.0")
    assert rendered(diagnosis) == snapshot


def test_the_page_is_ascii_and_keeps_its_width() -> None:
    text = rendered(h200(cudnn_of_te=SYSTEM), width=60)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 60


# --- Recipes ---------------------------------------------------------------------------------------------


def test_an_h200_runs_four_recipes_and_says_why_not_the_rest() -> None:
    diagnosis = h200()
    te = ("transformer_engine",)
    assert {each.recipe: each.engines for each in diagnosis.recipes if each.runs} == {
        "fp32": ("plain_torch",),
        "bf16": ("transformer_engine", "plain_torch"),
        "fp8_delayed": te,
        "fp8_current": te,
        "fp8_block": te,
    }
    assert recipe(diagnosis, "mxfp8").reason == (
        "compute capability 9.0, needs 10.0; TE says: Device compute capability 10.0 or higher required for "
        "MXFP8 execution. (te.is_mxfp8_available)"
    )
    assert recipe(diagnosis, "nvfp4").reason.startswith("compute capability 9.0, needs 10.0; TE says: ")


def test_te_has_the_last_word() -> None:
    diagnosis = h200(gates={**GATES, "fp8_block": "needs something else (te.is_fp8_block_scaling_available)"})
    assert recipe(diagnosis, "fp8_block").reason == ("needs something else (te.is_fp8_block_scaling_available)")


def test_blackwell_emulates_block_scaling() -> None:
    diagnosis = h200(gpu="NVIDIA B300", compute_capability=(10, 3), gates=dict.fromkeys(GATES))
    assert all(each.runs for each in diagnosis.recipes)
    assert recipe(diagnosis, "fp8_block").reason == ("runs as MXFP8: emulated from compute capability 10.0")
    assert recipe(diagnosis, "mxfp8").reason == ""


def test_without_te_a_gpu_still_runs_bf16() -> None:
    diagnosis = h200(te=None, te_problem="OSError: libcudart.so.12: cannot open", gates={})
    assert recipe(diagnosis, "bf16").engines == ("plain_torch",)
    assert recipe(diagnosis, "fp8_delayed").reason == "Transformer Engine cannot be imported"
    assert recipe(diagnosis, "mxfp8").reason == "compute capability 9.0, needs 10.0"
    te = finding(diagnosis, "Transformer Engine")
    assert te.level == "warning"
    assert te.found == "cannot be imported: OSError: libcudart.so.12: cannot open"
    assert "--no-build-isolation" in te.advice


def test_an_old_te() -> None:
    diagnosis = h200(te="2.7.0")
    assert recipe(diagnosis, "fp8_delayed").reason == "Transformer Engine 2.7.0, needs 2.8"


def test_a_laptop_runs_fp32_and_bf16() -> None:
    diagnosis = doctor.diagnose(LAPTOP)
    assert [each.recipe for each in diagnosis.recipes if each.runs] == ["fp32", "bf16"]
    assert "no BF16 instructions" in recipe(diagnosis, "bf16").reason
    assert recipe(diagnosis, "nvfp4").reason == "needs a CUDA GPU, the device is cpu"
    assert {each.level for each in diagnosis.findings} == {"ok", "absent"}
    assert finding(diagnosis, "GPU").found == "none that CUDA can use"


def test_nothing_runs_without_torch() -> None:
    machine = dataclasses.replace(
        LAPTOP, torch=None, torch_problem="OSError: libtorch.so: no such file", te_problem=None
    )
    diagnosis = doctor.diagnose(machine)
    assert not any(each.runs for each in diagnosis.recipes)
    assert recipe(diagnosis, "fp32").reason == "torch cannot be used"
    assert finding(diagnosis, "torch").found == "cannot be used: OSError: libtorch.so: no such file"
    assert finding(diagnosis, "Transformer Engine").found == "not asked"


def test_a_card_of_ones_own_is_judged_too() -> None:
    from lowprec_callback.recipes import load_cards

    mine: RecipeCard = dataclasses.replace(load_cards()["fp8_block"], name="mine")
    assert [each.recipe for each in doctor.diagnose(H200, {"mine": mine}).recipes] == ["mine"]


# --- Findings --------------------------------------------------------------------------------------------


def test_an_older_cudnn_than_torchs_costs_attention() -> None:
    found = finding(h200(cudnn_of_te=SYSTEM), "cuDNN")
    assert found.level == "warning"
    assert "takes 9.14.0 (/usr/lib/x86_64-linux-gnu/libcudnn.so, by the system's loader); torch ships 9.19.0" in (
        found.found
    )
    assert "6% of a BF16 step and 11% of an FP8 step" in found.advice
    assert found.advice.endswith("where D is /venv/lib/python3.12/site-packages/nvidia/cudnn")


@pytest.mark.parametrize(
    ("of_te", "of_torch", "level"),
    [
        (dataclasses.replace(SYSTEM, version="9.19.0"), SHIPPED, "ok"),
        (dataclasses.replace(SYSTEM, version="9.20.1"), SHIPPED, "ok"),
        (dataclasses.replace(SYSTEM, version="9.9.0"), SHIPPED, "warning"),
        (dataclasses.replace(SYSTEM, version=None), SHIPPED, "note"),
        (SYSTEM, None, "ok"),
        (None, SHIPPED, "warning"),
    ],
)
def test_cudnns(of_te: Cudnn | None, of_torch: Cudnn | None, level: str) -> None:
    assert finding(h200(cudnn_of_te=of_te, cudnn_of_torch=of_torch), "cuDNN").level == level


def test_cudnn_is_nothing_to_a_cpu() -> None:
    assert "cuDNN" not in [each.subject for each in doctor.diagnose(LAPTOP).findings]


def test_nothing_reads_nvte_log_level() -> None:
    found = finding(h200(variables={"NVTE_LOG_LEVEL": "1"}), "NVTE_LOG_LEVEL")
    assert (found.level, found.found) == ("warning", "is set to '1'")
    assert "Nothing reads it" in found.advice


def test_a_backward_override_takes_the_backward_pass_to_bf16() -> None:
    diagnosis = h200(variables={"NVTE_BACKWARD_OVERRIDE": "high_precision"})
    assert "Every dgrad and wgrad GEMM runs in BF16" in finding(diagnosis, "NVTE_BACKWARD_OVERRIDE").advice
    assert recipe(diagnosis, "fp8_current").runs
    assert recipe(diagnosis, "fp8_delayed").reason == (
        "DelayedScaling refuses to be built while NVTE_BACKWARD_OVERRIDE is set"
    )


def test_a_variable_set_to_zero_is_only_a_note() -> None:
    assert finding(h200(variables={"CUDA_LAUNCH_BLOCKING": "0"}), "CUDA_LAUNCH_BLOCKING").level == "note"
    assert finding(h200(variables={"CUDA_LAUNCH_BLOCKING": "1"}), "CUDA_LAUNCH_BLOCKING").level == "warning"
    assert finding(h200(variables={"OMP_NUM_THREADS": "8"}), "OMP_NUM_THREADS").advice == ""


def test_every_variable_with_advice_is_on_the_allow_list() -> None:
    assert set(doctor._VARIABLES) <= set(device.ALLOWED_VARIABLES)


def test_a_driver_without_a_usable_gpu() -> None:
    cpu_build = doctor.diagnose(dataclasses.replace(LAPTOP, driver="580.1", driver_cuda="13.0"))
    assert "this torch is a CPU build" in finding(cpu_build, "GPU").found
    hidden = doctor.diagnose(dataclasses.replace(LAPTOP, driver="580.1", driver_cuda="13.0", torch_cuda="13.0"))
    assert "torch sees no GPU" in finding(hidden, "GPU").found
    assert finding(h200(gpu_count=8), "GPU").found.endswith("; 8 GPUs")


# --- Asking ----------------------------------------------------------------------------------------------


def play_te(monkeypatch: pytest.MonkeyPatch, loaded: SimpleNamespace, gates: dict[str, str | None]) -> None:
    """Put a played `engines.transformer_engine` in the real one's place."""
    name = "lowprec_callback.engines.transformer_engine"
    fake = ModuleType(name)
    vars(fake).update(load=lambda: loaded, gate=lambda card: gates[card.name])
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(lowprec_callback.engines, "transformer_engine", fake, raising=False)


def no_te(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    play_te(monkeypatch, SimpleNamespace(ok=False, reason=reason, version=None), {})


def test_looking_at_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tex = SimpleNamespace(get_cudnn_version=lambda: 91400)
    play_te(monkeypatch, SimpleNamespace(ok=True, reason=None, version="2.20.2", tex=tex), GATES)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(libraries, "torch_cudnn_file", lambda: SHIPPED.path)
    monkeypatch.setattr(libraries, "te_cudnn_candidate", lambda: libraries.Candidate(SYSTEM.path, "the loader"))  # type: ignore[arg-type]
    monkeypatch.setattr(device, "torch_cudnn_version", lambda: "9.19.0")
    machine = doctor.look()
    assert (machine.gpu, machine.compute_capability, machine.gpu_memory) == ("NVIDIA H200", (9, 0), "139.0 GiB")
    assert machine.cudnn_of_te == Cudnn(SYSTEM.path, "9.14.0", "the loader"), "TE's own answer"
    assert machine.cudnn_of_torch == Cudnn(SHIPPED.path, "9.19.0")
    assert machine.gates == GATES


def test_looking_at_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    no_te(monkeypatch, "RuntimeError: Found empty meta package")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = doctor.look()
    assert machine.device_type == "cpu"
    assert machine.torch == str(torch.__version__)
    assert machine.te_problem == "RuntimeError: Found empty meta package"
    assert machine.cudnn_of_te is None


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("CUDA driver\n  initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert doctor.look().torch_problem == "RuntimeError: CUDA driver initialization failed"


def test_doctor_prints_a_page_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "look", lambda: dataclasses.replace(H200, cudnn_of_te=SYSTEM))
    assert cli.main(["doctor"]) == 0
    assert "fp8_delayed" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["version"] == doctor.VERSION
    assert {each["recipe"]: each["runs"] for each in body["recipes"]}["mxfp8"] is False
