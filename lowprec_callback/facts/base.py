"""The words that facts share, and what every fact is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Role = Literal["fprop", "dgrad", "wgrad"]
ROLES: tuple[Role, ...] = ("fprop", "dgrad", "wgrad")
"""The three GEMMs of a linear layer: Y = X W^T, dX = dY W, dW = dY^T X."""


Mode = Literal["kernel", "autocast"]
MODES: tuple[Mode, ...] = ("kernel", "autocast")
"""kernel: the GEMM alone, operands already quantized. autocast: with all the quantization that training does."""


Method = Literal["role-true", "te-tutorial"]
"""role-true: what training does. te-tutorial: forward calls of a re-shaped layer, as Transformer Engine's published
benchmark_gemm.py times them."""


@dataclass(frozen=True)
class Fact:
    """Something that was seen, once. Subclasses say what."""

    kind: ClassVar[str] = "fact"
