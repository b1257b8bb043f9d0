"""What a range's name means: the grammar of our own ranges, of Transformer Engine's (TE), and of common steps.

Ours are in the NVTX domain `lowprec`, or begin with `lowprec|` where there are no domains (torch.profiler):

| name                          | means                                                                         |
|-------------------------------|-------------------------------------------------------------------------------|
| `fp8_delayed step`            | an optimizer step under that recipe; its payload is the step's number         |
| `step 3`, `step|3`            | an optimizer step whose recipe is not named                                   |
| `fp8_delayed settle`          | a step that does not count, because the recipe was switched on just before it |
| `data`, `forward`, `backward`, `optimizer`, `phase|NAME` | a phase of the step, on the thread that trains     |
| `module|DIRECTION|PATH`       | a module's forward or backward, on whatever thread runs it                    |
| `gemm|ROLE|PATH`              | one GEMM call of a linear layer                                               |

TE's own say less: `transformer_engine._Linear.backward.proj.dgrad_gemm` names a role, but `proj` is every layer's;
`LayerNormMLP forward` and `_LayerNormMLP_backward` name a class, as do the autograd nodes of a torch.profiler trace
(`_LayerNormMLPBackward`); `nvte_cublas_gemm_v2` is a call of its GEMM library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lowprec_callback.facts.traces import ENGINE
from lowprec_callback.recording import ROLES

DOMAIN = "lowprec"
PREFIX = "lowprec|"
PHASES = ("data", "forward", "backward", "optimizer")
DIRECTIONS = ("forward", "backward")

_SHORT = {"fwd": "forward", "bwd": "backward", "opt": "optimizer"}
_OUR_STEP = re.compile(r"(?:(?P<recipe>\S+) )?step(?:[ |]?(?P<number>\d+))?")
_TE_PYTHON = re.compile(r"transformer_engine\.(?P<cls>\w+)\.(?P<way>forward|backward)(?:\.(?P<rest>.+))?")
_TE_CLASS = re.compile(r"(?P<cls>\w+) forward|_?(?P<back>\w+?)[_.](?P<way>backward|wgrad)")
_TE_NODE = re.compile(r"_(?P<cls>(?:Grouped|LayerNorm)?Linear|LayerNormMLP)(?P<back>Backward)?")
_TE_GEMM = re.compile(r"nvte_\w*(?:gemm|matmul)\w*")
_TE_PARTS = {"gemm": "fprop", "dgrad_gemm": "dgrad", "wgrad_gemm": "wgrad"}
_TE_OTHERS = frozenset(
    {
        "norm",
        "norm_input_cast",
        "gemm_input_cast_comm",
        "input_cast_comm",
        "row_parallel_comm",
        "fsdp_scatter",
        "fsdp_gather",
        "grad_output_preprocess",
        "column_parallel_comm_input",
        "column_parallel_comm_dgrad",
        "reduce_and_update_fp8_tensors",
    }
)
_TE_MODULES = re.compile(r"\w*(?:Linear|LayerNormMLP|Attention|MLP|LayerNorm|RMSNorm|BasicLinear|Attn\w*)")
_ATTENTION = re.compile(r"(?i)nvte_\w*(?:softmax|flash)\w*|\w*(?:attention|attn)\w*")
_ANY_STEP = re.compile(
    r"(?i)(?:profilerstep|(?:train(?:ing)?[ _]?)?(?:step|iter(?:ation)?|batch|micro_?batch))[ _#:=.-]*(?P<number>\d+)?"
    r"|\[pl\]\[(?:profile|module)\]run_training_batch|(?:global|optimizer)[ _]step[ _#:=.-]*(?P<other>\d+)?"
)
_OPTIMIZER = re.compile(r"Optimizer\.step#\w+\.step")
_DATA = re.compile(r"enumerate\(DataLoader\)#\S+__next__|\[pl\]\[\w+\]\S*(?:train_dataloader_next|batch_to_device)")
"""The ranges of PyTorch's DataLoader and of Lightning's profiler in which the next batch is fetched."""
_EMIT_NVTX = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)


@dataclass(frozen=True)
class Meaning:
    """What is known of everything inside a range; the empty text is not known."""

    ours: bool = False
    step: bool = False
    recipe: str = ""
    number: int | None = None
    phase: str = ""
    module: str = ""
    role: str = ""
    direction: str = ""
    op: str = ""
    """The framework's or the library's operation, where the range is one."""
    te_gemm: bool = False
    """A call of TE's GEMM library."""
    te_node: bool = False
    """A node of TE in the autograd graph: a GEMM that it launches itself is its library's too."""
    attention: bool = False
    iteration: bool = False
    """Not ours, but called like a step."""
    optimizer: bool = False
    """PyTorch's own range around an optimizer."""


def meaning(text: str, domain: str = "") -> Meaning:
    """What a range's name says; a name that says nothing is an operation of that name. Raises nothing."""
    text = text.strip()
    if domain == DOMAIN or text.startswith(PREFIX):
        return _ours(text.removeprefix(PREFIX))
    return _transformer_engine(text) or _other(text)


def _ours(text: str) -> Meaning:
    kind, _, rest = text.partition("|")
    if kind == "gemm" and "|" in rest:
        role, _, path = rest.partition("|")
        direction = "forward" if role == "fprop" else "backward"
        if role in ROLES:
            return Meaning(ours=True, role=role, module=path, direction=direction)
    if kind == "module" and "|" in rest:
        direction, _, path = rest.partition("|")
        if direction in DIRECTIONS:
            return Meaning(ours=True, module=path, direction=direction)
    phase = rest if kind == "phase" else _SHORT.get(text, text)
    if phase in PHASES:
        return Meaning(ours=True, phase=phase)
    step = _OUR_STEP.fullmatch(text)
    if step:
        number = int(step["number"]) if step["number"] else None
        return Meaning(ours=True, step=True, recipe=step["recipe"] or "", number=number)
    return Meaning(ours=True)


def _transformer_engine(text: str) -> Meaning | None:
    if text.startswith("nvte_"):
        gemm = _TE_GEMM.fullmatch(text) is not None
        return Meaning(op=text, te_gemm=gemm, attention=_ATTENTION.fullmatch(text) is not None)
    python = _TE_PYTHON.fullmatch(text)
    if python:
        cls, direction = python["cls"].lstrip("_"), python["way"]
        name, _, part = (python["rest"] or "").rpartition(".")
        if part not in _TE_PARTS and part not in _TE_OTHERS:
            name, part = python["rest"] or "", ""
        found = Meaning(module=f"{cls}.{name}" if name else cls, direction=direction, op=text)
        return replace(found, role=_TE_PARTS.get(part, ""), attention=_ATTENTION.fullmatch(cls) is not None)
    node = _TE_NODE.fullmatch(text)
    if node:
        return Meaning(module=node["cls"], direction="backward" if node["back"] else "forward", op=text, te_node=True)
    found_class = _TE_CLASS.fullmatch(text)
    cls = (found_class["cls"] or found_class["back"]) if found_class else ""
    if found_class is None or not _TE_MODULES.fullmatch(cls):
        return None
    direction = "forward" if found_class["cls"] else "backward"
    role = "wgrad" if found_class["way"] == "wgrad" else ""
    attention = _ATTENTION.fullmatch(cls) is not None
    return Meaning(module=cls, direction=direction, role=role, op=text, attention=attention)


def _other(text: str) -> Meaning:
    step = _ANY_STEP.fullmatch(text)
    if step:
        number = step["number"] or step["other"]
        return Meaning(iteration=True, number=int(number) if number else None)
    op = _EMIT_NVTX.sub("", text)
    if op.startswith(ENGINE):
        return Meaning(direction="backward", op=op)
    return Meaning(op=op, phase="data" if _DATA.fullmatch(op) else "", optimizer=_OPTIMIZER.fullmatch(op) is not None)
