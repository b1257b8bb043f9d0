"""Compiled modules run as they were written, for as long as their modules and operands are watched.

`torch.compile` traces through a module, and what hooks on its parts would tell is no longer told. The GEMMs of a step
are the same without it, so the steps that watch operands run without; timed and traced ones run compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def compiled_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that `torch.compile` or `Module.compile` has wrapped; the model itself is `(the model)`."""
    return [
        path or "(the model)"
        for path, module in model.named_modules()
        if type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_compiler_ctx", None) is not None  # Lightning's, after torch.compile of a LightningModule
    ]


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, nothing runs compiled. Where nothing was ever compiled, nothing happens."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def compiled_graphs() -> int:
    """How many graphs `torch.compile` has made in this process so far; 0 where it was never used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def forget_compiled(before: int) -> None:
    """Have compiled functions begin anew, if graphs were made since there were `before` of them.

    What was compiled for other recipes counts towards the limit of recompilations, beyond which a function runs
    eagerly, with other random numbers in its dropout (Transformer Engine has such functions); and sizes that were seen
    make what is compiled next dynamic. After this the next call compiles as the first one does.
    """
    if compiled_graphs() > before:
        torch.compiler.reset()
