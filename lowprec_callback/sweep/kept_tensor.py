"""One tensor: its bits, and whatever else of it a step can change, kept on the host and put back in place.

Most tensors are a block of memory, which is copied away and back. Some are not, and each kind has its own way here:

- a quantized tensor of Transformer Engine is made of other tensors, which are kept one by one, unrounded;
- a lazy module's parameter has neither shape nor values before the first forward, and has none again afterwards;
- a DTensor is spread over ranks: each rank keeps and puts back its own part;
- an expanded tensor repeats its memory, which is kept once.

`Snapshot` keeps parameters, buffers and optimizer state so, `PythonState` all other tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


@dataclass(slots=True)
class KeptTensor:
    """One tensor object: its bits on the host, and what else can change of it. Values go back in place."""

    tensor: torch.Tensor
    values: torch.Tensor | None
    """None for a quantized tensor, and for one that is not initialized."""
    parts: dict[str, Any]
    """What a quantized tensor of Transformer Engine is made of."""
    form: tuple[type, torch.device, torch.dtype, torch.Size | None]
    """Class, device, type and shape (of a DTensor's local part). A lazy module's parameter has no shape yet."""
    leaf: bool
    requires_grad: bool
    gradient: KeptTensor | None

    @staticmethod
    def of(tensor: torch.Tensor) -> KeptTensor:
        """Copy to the host."""
        cls, mine = type(tensor), local_part(tensor)
        form: tuple[type, torch.device, torch.dtype, torch.Size | None]
        parts: dict[str, Any] = {}
        values: torch.Tensor | None = None
        gradient = tensor.grad if tensor.is_leaf else None
        if is_lazy(tensor):
            data = tensor.data
            form = (cls, data.device, data.dtype, None)
        elif hasattr(mine, "_quantizer"):
            # Copying a quantized tensor through its own arithmetic would round again, so its buffers and flags are
            # kept as they are, and its quantizer by reference.
            parts = {
                name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in vars(mine).items()
                if isinstance(value, torch.Tensor | bool) or value is None or name == "_quantizer"
            }
            form = (cls, mine.device, mine.dtype, mine.shape)
        else:
            values = _each_once(mine.detach()).to("cpu", copy=True)
            form = (cls, mine.device, mine.dtype, mine.shape)
        kept_gradient = None if gradient is None else KeptTensor.of(gradient)
        return KeptTensor(tensor, values, parts, form, tensor.grad_fn is None, tensor.requires_grad, kept_gradient)

    @property
    def nbytes(self) -> int:
        """Host memory that the copy takes, with its gradient's."""
        tensors = [self.values, *self.parts.values()]
        own = sum(_bytes_of(each) for each in tensors if isinstance(each, torch.Tensor))
        return own + (0 if self.gradient is None else self.gradient.nbytes)

    def put_back(self) -> None:
        """Values, gradient and `requires_grad`; a lazy module's parameter is without values again."""
        tensor, gradient = self.tensor, self.gradient
        with torch.no_grad():
            # A gradient must fit its parameter: what the steps left goes first.
            stale = tensor.grad if tensor.is_leaf else None
            if stale is not None and (gradient is None or stale is not gradient.tensor):
                tensor.grad = None
            if self.form[3] is None:
                self._make_lazy_again()
            elif self.values is not None:
                self._put_values(self.values)
            else:
                self._put_parts()
            if self.leaf and tensor.grad_fn is not None:
                tensor.detach_()  # `self.total += loss` on a plain tensor draws it into the graph
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad = self.requires_grad
            if gradient is not None:
                gradient.put_back()
                if tensor.grad is not gradient.tensor:
                    tensor.grad = gradient.tensor

    def _make_lazy_again(self) -> None:
        """The next forward gives it shape and values as the first one would have, from the same random numbers."""
        cls, device, dtype, _ = self.form
        if type(self.tensor) is not cls:
            self.tensor.__class__ = cls
            self.tensor.data = torch.empty(0, device=device, dtype=dtype)

    def _put_values(self, values: torch.Tensor) -> None:
        _, device, dtype, shape = self.form
        mine = local_part(self.tensor)
        if (mine.device, mine.dtype, mine.shape) != (device, dtype, shape) or _is_freed(mine, values):
            # Moved, converted or resized meanwhile: the object gets memory as it was.
            assert shape is not None
            again = values.to(device, copy=True)
            mine.data = again if again.shape == shape else again.expand(shape)
            return
        target = _each_once(mine.detach())
        if device.type == "cpu" and same_bits(target, values):
            return
        target.copy_(values)

    def _put_parts(self) -> None:
        mine = local_part(self.tensor)
        for name, value in self.parts.items():
            current = getattr(mine, name, None)
            if not isinstance(value, torch.Tensor):
                setattr(mine, name, value)
            elif isinstance(current, torch.Tensor) and current.shape == value.shape:
                current.copy_(value)
            else:
                setattr(mine, name, value.to(mine.device))


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer of a lazy module that has not run yet (`nn.LazyLinear`)."""
    mro = type(tensor).__mro__
    return UninitializedParameter in mro or UninitializedBuffer in mro


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is spread over ranks (a DTensor); any other tensor as it is.

    Each rank keeps and puts back its own part: nothing is gathered, and no rank waits for another.
    """
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits (NaNs and signed zeros too); False also where that cannot be told."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        if one.dtype.is_complex:
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        return torch.equal(one.view(whole), other.view(whole))
    except Exception:
        return False


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions of an expanded one, which cannot be written to."""
    if tensor.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_freed(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or not values.numel():
        return False
    return tensor.untyped_storage().nbytes() < values.element_size()


def _bytes_of(tensor: torch.Tensor) -> int:
    """Sparse tensors have no `nbytes`: what they hold is their indices and values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes if tensor.layout is torch.strided else 0


def span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(storage, first byte, end) of the memory that a strided tensor lies in."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.untyped_storage().data_ptr(), start, start + elements * tensor.element_size()


def can_be_kept(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that is copied and written plainly."""
    if is_lazy(tensor):
        return True
    part = local_part(tensor)
    if hasattr(part, "_quantizer"):
        return True
    cls = type(part)
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False  # a subclass that computes for itself what a copy is
    if part.layout is not torch.strided or part.device.type == "meta":
        return False
    return part.untyped_storage().size() > 0
