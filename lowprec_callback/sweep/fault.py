"""Whose fault an exception in the user's step is: the recipe's, or the user's own.

A recipe that cannot run what the model asks of it fails inside a library, in the middle of the user's step. Such an
exception must not end the training, which would have been fine without the recipe. The user's own exceptions must,
as they would without us. An exception comes from a library if it was raised in a file of PyTorch or Transformer
Engine, or by their compiled code, which has no Python frame: then the innermost frame stands at a call, not at a
`raise`. That alone does not tell a wrong recipe from a wrong call; running the same batch in the baseline does.
"""

from __future__ import annotations

import dis
from pathlib import Path
from types import TracebackType

import torch

from lowprec_callback.recipes import RecipeCard

LIBRARIES = ("transformer_engine", "torch")


class RecipeFailed(Exception):
    """The recipe cannot run this model; thrown into the sweep's script, to end the part that it runs in."""

    def __init__(self, card: RecipeCard, reason: str) -> None:
        super().__init__(reason)
        self.card = card
        self.reason = reason


def raised_by_library(error: BaseException) -> bool:
    """Whether PyTorch or Transformer Engine raised it (see the module's docstring). Never for what ends a process."""
    if not isinstance(error, Exception) or error.__traceback__ is None:
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    innermost: TracebackType = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    code = innermost.tb_frame.f_code
    if any(name in Path(code.co_filename).parts for name in LIBRARIES):
        return True
    return isinstance(error, RuntimeError) and dis.opname[code.co_code[innermost.tb_lasti]] not in _RAISES


def passed_through_us(error: BaseException) -> bool:
    """Whether it came out of a function of this package that the user's step called without knowing.

    Those are our hooks on the model's modules and what stands around the library's entries. The first frame is the
    one that caught the exception: ours in any case.
    """
    here = Path(__file__).parents[1]
    frame = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while frame is not None:
        if here in Path(frame.tb_frame.f_code.co_filename).parents:
            return True
        frame = frame.tb_next
    return False


_RAISES = ("RAISE_VARARGS", "RERAISE")
