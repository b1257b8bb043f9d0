"""The engine without Transformer Engine: FP32 and BF16 on any device, by `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from lowprec_callback.engines.base import Engine, LinearLayer, NotRun, Weight
from lowprec_callback.engines.wrappers import named_modules
from lowprec_callback.failures import in_words
from lowprec_callback.recipes import RecipeCard, static_refusal


class PlainTorchEngine(Engine):
    """Runs a recipe by turning `torch.autocast` on or off around `training_step`."""

    name: Literal["transformer_engine", "plain_torch"] = "plain_torch"

    def __init__(self, model: nn.Module, device: torch.device, why: str) -> None:
        super().__init__(model, device, why)
        self._weights: set[torch.dtype] | None = None

    @property
    def default_baseline(self) -> str:
        """FP32 parameters are compared from FP32; a model that is BF16 already cannot run FP32."""
        return "fp32" if self.dtype() == torch.float32 else "bf16"

    def refusal(self, card: RecipeCard) -> NotRun | None:
        """See `Engine.refusal`."""
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        reason = static_refusal(
            card,
            engine=self.name,
            device_type=self.device.type,
            compute_capability=capability,
            cuda_version=torch.version.cuda,
            te_version=None,
        )
        if reason is None and card.autocast_dtype is None and self.dtype() != torch.float32:
            reason = f"the model's parameters are {self.dtype()}: without autocast it cannot run in FP32"
        return NotRun(reason, "the recipe card's requirements") if reason else None

    def probe(self, card: RecipeCard) -> NotRun | None:
        """See `Engine.probe`."""
        every = {(weight.k, weight.n) for layer in self.linear_layers() for weight in layer.weights}
        # A layer without inputs or outputs multiplies nothing; a lazy one has no size before its first batch.
        sizes = {(k, n) for k, n in every if k and n}
        for k, n in sorted(sizes)[:4]:
            try:
                layer = self.make_linear(k, n, bias=False)
                x = torch.randn(16, k, device=self.device, dtype=self.dtype(), requires_grad=True)
                with self.region(card):
                    y = layer(x)
                y.float().square().mean().backward()
            except Exception as error:
                return NotRun(f"a linear layer {k} -> {n} failed: {in_words(error)}", "our probe")
            for what, grad in (("input", x.grad), ("weight", next(layer.parameters()).grad)):
                if grad is None or not bool(torch.isfinite(grad).all()) or not bool(grad.any()):
                    return NotRun(
                        f"a linear layer {k} -> {n} gave a {what} gradient that is zero or not finite", "our probe"
                    )
        return None

    def region(self, card: RecipeCard) -> AbstractContextManager[Any]:
        """`torch.autocast`, on for a card with an autocast type, explicitly off for one without.

        A model that is stored in the card's type multiplies in it by itself: its step is the user's own, as it stands
        (under `bf16-true` no region is open, and the loss is computed in BF16).
        """
        if card.autocast_dtype is None:
            return torch.autocast(self.device.type, enabled=False)
        dtype = getattr(torch, card.autocast_dtype)
        if self._stored_in() == dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def _stored_in(self) -> torch.dtype | None:
        """The type of all linear layers' weights; None if they differ."""
        if self._weights is None:
            self._weights = {
                module.weight.dtype for _, module in named_modules(self.model) if isinstance(module, nn.Linear)
            } or {self.dtype()}
        return next(iter(self._weights)) if len(self._weights) == 1 else None

    def switch(self) -> None:
        """Autocast keeps nothing between regions."""

    def save(self) -> None:
        """Nothing to save."""

    def restore(self) -> None:
        """Nothing to restore."""

    def linear_layers(self) -> list[LinearLayer]:
        """Every `nn.Linear`."""
        return plain_linears(self.model, quantizable=True)

    def make_linear(self, k: int, n: int, bias: bool, groups: int = 1) -> nn.Module:
        """An `nn.Linear`."""
        if groups > 1:
            raise ValueError("PyTorch has no grouped linear layer")
        return nn.Linear(k, n, bias=bias, device=self.device, dtype=self.dtype())


def plain_linears(model: nn.Module, quantizable: bool) -> list[LinearLayer]:
    """The `nn.Linear` modules of a model (not their subclasses in other libraries, which bring their own GEMMs)."""
    return [
        LinearLayer(
            path=path,
            family="nn.Linear",
            weights=(Weight("", module.in_features, module.out_features),),
            bias=module.bias is not None,
            quantizable=quantizable,
        )
        for path, module in named_modules(model)
        if isinstance(module, nn.Linear) and not type(module).__module__.startswith("transformer_engine")
    ]
