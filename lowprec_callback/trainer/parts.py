"""Lightning's own classes, of whichever of its two packages the Trainer comes from.

`lightning` and `pytorch_lightning` hold the same code twice, and their classes are not the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def home(trainer: Any) -> str:
    """`lightning.pytorch` or `pytorch_lightning`: where the Trainer's class, or the one it is made from, is defined.

    Raises:
        ImportError: it is neither's.
    """
    for cls in type(trainer).__mro__:
        package, found, _ = cls.__module__.partition(".trainer.")
        if found and cls.__name__ == "Trainer":
            return package
    raise ImportError(f"{type(trainer).__name__} is not made from Lightning's Trainer")


def part(trainer: Any, place: str, name: str) -> Any:
    """A class or function of this Trainer's package, by its module below the package.

    Raises:
        ImportError: this version of Lightning has no such module.
        AttributeError: its module has no such name.
    """
    return getattr(import_module(f"{home(trainer)}.{place}"), name)
