"""Calls of the CUDA API in which the host may be blocked until the GPU has done something."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

Blocking = Literal["always", "if it ends after its copy"]

_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds)+$")
_ALWAYS = re.compile(r"cu(?:da)?(?:Device|Ctx|Stream|Event)Synchronize|cu(?:da)?Memcpy(?!\w*Async)\w*|cudaFree")
_COPY = re.compile(r"cu(?:da)?Memcpy\w*Async")


def plain_name(call: str) -> str:
    """The call without the version that profilers append (`cudaMemcpyAsync_v3020` -> `cudaMemcpyAsync`)."""
    return _SUFFIX.sub("", call)


@cache
def blocking(call: str) -> Blocking | None:
    """Whether the host is blocked in this call.

    The synchronize calls and the copies without `Async` always return when the work is done; `cudaFree` waits for the
    device first. `cudaMemcpyAsync` is as blocking where one side is pageable memory (`.item()`, `.cpu()`, `.to()` of
    a tensor that is not pinned): the call then lasts until its copy is done, which the trace shows. A launch that
    waits for room in a full queue is no wait: the GPU has work then.
    """
    name = plain_name(call)
    if _ALWAYS.fullmatch(name):
        return "always"
    return "if it ends after its copy" if _COPY.fullmatch(name) else None
