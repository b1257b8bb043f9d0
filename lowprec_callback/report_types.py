"""Plain data back into dataclasses by their type hints, without checking: for what this package itself has written.

`report.load_report` checks a file that may come from anywhere, with pydantic, whose import alone takes longer than a
report takes to show.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def rebuild(kind: Any, value: Any) -> Any:
    """`value`, as `json` read it, as the type `kind`: dataclasses, tuples, dicts, unions with None, plain values."""
    if value is None:
        return None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: rebuild(hints[name], item) for name, item in value.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        (only,) = (part for part in inner if part is not NoneType)
        return rebuild(only, value)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            plain = inner[0] in (int, float, str, bool)
            return tuple(value) if plain and "NaN" not in value else tuple(rebuild(inner[0], item) for item in value)
        return tuple(rebuild(part, item) for part, item in zip(inner, value, strict=True))
    if origin is dict:
        return {key: rebuild(inner[1], item) for key, item in value.items()}
    return float(value) if kind is float else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
