"""Words for what a GEMM was asked to multiply in and what it did multiply in, and how to compare the two."""

from __future__ import annotations

from dataclasses import dataclass

from lowprec_callback.recording import Card, Operand, Role

BITS = {
    "nvfp4": 4,
    "fp8": 8,
    "fp8-block": 8,
    "mxfp8": 8,
    "int8": 8,
    "bf16": 16,
    "fp16": 16,
    "tf32": 19,
    "fp32": 32,
    "fp64": 64,
}
"""Bits of one operand element by precision; more bits than asked is a fallback."""

_FORMAT_BITS = {
    "e2m1": 4,
    "e4m3": 8,
    "e5m2": 8,
    "int8": 8,
    "bf16": 16,
    "fp16": 16,
    "tf32": 19,
    "fp32": 32,
    "fp64": 64,
}

_BY_SCALING = {"block-128": "fp8-block", "mx-32": "mxfp8", "nvfp4-16": "nvfp4"}

_SHOWN = {
    "nvfp4": "NVFP4",
    "fp8": "FP8",
    "fp8-block": "FP8 with block scales",
    "mxfp8": "MXFP8",
    "int8": "INT8",
    "bf16": "BF16",
    "fp16": "FP16",
    "tf32": "TF32",
    "fp32": "FP32",
    "fp64": "FP64",
}

UNKNOWN = "unknown"


def shown(precision: str) -> str:
    """A precision as a reader knows it: `FP8`."""
    return _SHOWN.get(precision, precision)


@dataclass(frozen=True)
class Operands:
    """Formats and scalings of a GEMM's two operands, in the order (weight or input, the other)."""

    formats: tuple[str, str]
    scalings: tuple[str, str]

    @staticmethod
    def asked(card: Card, role: Role) -> Operands:
        """What a recipe card asks of this role."""
        formats: tuple[str, str] = {"fprop": card.fprop, "dgrad": card.dgrad, "wgrad": card.wgrad}[role]
        return Operands(formats, (_scaling_of(formats[0], card.scaling), _scaling_of(formats[1], card.scaling)))

    @staticmethod
    def seen(first: Operand, second: Operand) -> Operands:
        """What the operand witness saw."""
        return Operands((first.format, second.format), (first.scaling, second.scaling))

    @property
    def precision(self) -> str:
        """The precision of the product, in the words of `kernels.KernelClass.precision`; `unknown` if a
        format is.

        Operands of different kinds multiply in the wider one: a library has to widen the other first.
        """
        each = [_precision(form, scaling) for form, scaling in zip(self.formats, self.scalings, strict=True)]
        if UNKNOWN in each:
            return UNKNOWN
        return max(each, key=lambda name: BITS[name])

    @property
    def quantized(self) -> bool:
        """Whether both operands hold at most eight bits an element."""
        return all(_FORMAT_BITS.get(form, 99) <= 8 for form in self.formats)

    def __str__(self) -> str:
        product = " x ".join(self.formats)
        if self.scalings[0] == self.scalings[1]:
            return product if self.scalings[0] == "none" else f"{product}, {self.scalings[0]}"
        return f"{product}, {' x '.join(self.scalings)}"


def _scaling_of(form: str, scaling: str) -> str:
    """A card has one scaling for all operands; an operand that is not quantized has none."""
    return scaling if _FORMAT_BITS.get(form, 0) <= 8 else "none"


def _precision(form: str, scaling: str) -> str:
    bits = _FORMAT_BITS.get(form)
    if bits is None:
        return UNKNOWN
    if bits > 8:
        return form
    if form == "int8":
        return "int8"
    if scaling in _BY_SCALING:
        return _BY_SCALING[scaling]
    return "fp8" if bits == 8 else UNKNOWN


def same(asked: Operands, ran: Operands) -> bool:
    """Whether formats and scalings are those asked for. `tensor` (delayed or current) matches either."""
    return asked.formats == ran.formats and all(
        have == want or (have == "tensor" and want.startswith("tensor-"))
        for want, have in zip(asked.scalings, ran.scalings, strict=True)
    )


def scaled_alike(asked: Operands, ran: Operands) -> bool:
    """Whether operands of unknown format are scaled, and just as asked: then kernel names can tell the format."""
    unknown = all(form not in _FORMAT_BITS for form in ran.formats)
    return unknown and "none" not in ran.scalings and same(asked, Operands(asked.formats, ran.scalings))


def kernel_fits(operands: Operands, precision: str) -> bool:
    """Whether a kernel of this precision can have multiplied these operands. TF32 multiplies FP32."""
    expected = operands.precision
    return precision == expected or (expected == "fp32" and precision == "tf32")
