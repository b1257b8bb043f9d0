"""A step in which every GEMM's operands are looked at, and what marks modules and GEMMs in a profiler's trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from lowprec_callback.engines.base import Around, Engine
from lowprec_callback.failures import in_words
from lowprec_callback.measure.dispatch import Sizes
from lowprec_callback.measure.eager import eagerly
from lowprec_callback.measure.held import MemoryWatch
from lowprec_callback.measure.library_log import LibraryListener
from lowprec_callback.measure.scopes import ModuleScopes, Scope
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.measure.trace import Tracer, gemm_range, module_range
from lowprec_callback.recording import Role


@contextmanager
def watched_step(
    engine: Engine,
    log: GemmLog,
    broken: Callable[[str], None],
    library: LibraryListener | None = None,
    held: MemoryWatch | None = None,
    *,
    products: bool = True,
) -> Iterator[None]:
    """Around one step: look at every GEMM's operands, the library's at its entry, PyTorch's by the profiler.

    Args:
        engine: runs the model.
        log: is told of every call.
        broken: told once, in one line, if modules could not be followed to the end of the step.
        library: looks at what the library's own log says of the calls too.
        held: looks at memory as modules begin and end.
        products: whether to look at PyTorch's own products, for which a session of torch.profiler is opened.
    """
    stopped = False

    def boundary(scope: Scope, enters: bool) -> None:
        nonlocal stopped
        if stopped:
            return
        try:
            if library is not None:
                library.boundary(scope)
            if held is not None:
                held.boundary(scope, enters)
        except Exception as error:  # this stands in a hook of the user's module
            stopped = True
            broken(in_words(error))

    scopes = ranged_scopes(engine, boundary)
    tracer = Tracer(engine.device, shapes=True) if products else None
    with ExitStack() as stack:
        stack.enter_context(eagerly())
        if tracer is not None:
            tracer.start()
            stack.callback(stop_quietly, tracer)
        if library is not None:
            stack.enter_context(library.listen(scopes.current))
        # The ranges mark the products inside a call, which are no further ones (TE's reference GEMMs are such).
        around = _both(gemm_ranges(log), library.around) if library else gemm_ranges(log)
        with scopes.installed(), engine.watch(scopes.current, log.add_call, around):
            yield
    for product in tracer.products() if tracer is not None else ():
        log.add_product(product)


def ranged_scopes(engine: Engine, boundary: Callable[[Scope, bool], None] | None = None) -> ModuleScopes:
    """The model's modules, each with a profiler range around its forward and backward.

    `boundary` is told of every module that begins (True) or ends (False).
    """
    enter, leave = _module_ranges(boundary)
    return ModuleScopes(engine.scoped_modules(), enter, leave)


def gemm_ranges(log: GemmLog) -> Around:
    """Puts a profiler range around each GEMM call, with the name of its linear layer."""

    def around(scope: Scope | None, role: Role, sizes: Sizes) -> AbstractContextManager[Any]:
        return gemm_range(log.module_of(scope, sizes), role)

    return around


def stop_quietly(tracer: Tracer) -> None:
    """Stopping a session that an exception interrupted can itself fail; the first exception is the one that counts."""
    try:
        tracer.stop()
    except RuntimeError:
        return


def _both(outer: Around, inner: Around) -> Around:
    """Two contexts around each GEMM call, one inside the other."""

    @contextmanager
    def around(scope: Scope | None, role: Role, sizes: Sizes) -> Iterator[None]:
        with outer(scope, role, sizes), inner(scope, role, sizes):
            yield

    return around


def _module_ranges(
    boundary: Callable[[Scope, bool], None] | None = None,
) -> tuple[Callable[[Scope], None], Callable[[Scope], None]]:
    """Listeners that put a profiler range around each module, on whatever thread runs it, and tell `boundary`."""
    opened: dict[int, list[AbstractContextManager[Any]]] = {}

    def enter(scope: Scope) -> None:
        entered = module_range(scope)
        entered.__enter__()
        opened.setdefault(threading.get_ident(), []).append(entered)
        if boundary is not None:
            boundary(scope, True)

    def leave(scope: Scope) -> None:
        if boundary is not None:
            boundary(scope, False)
        stack = opened.get(threading.get_ident())
        if stack:
            stack.pop().__exit__(None, None, None)

    return enter, leave
