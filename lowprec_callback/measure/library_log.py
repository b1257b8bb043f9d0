"""What the GEMM library says that it ran: the witness "library", for untimed steps only.

The library writes its log on the thread that runs the product, so what it writes is of the call that runs on that
thread: a call into Transformer Engine's entry, which tells the module and the role; else the module that runs there,
and then the sizes tell the role. On a GPU cuBLASLt calls back (`cublaslt_log`), on a CPU oneDNN and MKL print
(`stdout_log`). What finds no place is counted and left alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from lowprec_callback.failures import in_words
from lowprec_callback.measure import cublaslt_log
from lowprec_callback.measure.dispatch import AtenProduct, Sizes
from lowprec_callback.measure.library_lines import Product, read_cublaslt, read_mkl, read_onednn
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.measure.shapes import GemmLog
from lowprec_callback.measure.stdout_log import StdoutLog
from lowprec_callback.recording import Fact, LibraryCall, LibraryLog, Role


class _Entry(NamedTuple):
    """A call into Transformer Engine that is under way."""

    scope: Scope | None
    role: Role
    sizes: Sizes


class _Heard(NamedTuple):
    """A product that the library logged, and what ran on that thread."""

    product: Product
    scope: Scope | None
    entry: _Entry | None


class LibraryListener:
    """Listens to the GEMM library during one step. Read `facts` when the step is over.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._entries: dict[int, _Entry] = {}
        self._messages: list[tuple[str, str, Scope | None, _Entry | None]] = []
        self._printed: StdoutLog | None = None
        self.silent: str | None = "the step was not watched to its end"
        """Why nothing was heard; None once a step was listened to."""

    @contextmanager
    def listen(self, current: Callable[[], Scope | None]) -> Iterator[None]:
        """Listen while the context lasts. A library that cannot be listened to is no error: see `silent`.

        Args:
            current: gives the module that runs on the calling thread.
        """
        stack = ExitStack()
        try:
            stack.enter_context(self._on_cuda(current) if self._on_gpu else self._on_cpu(current))
            self.silent = None
        except Exception as error:
            self._give_up(error)
        try:
            yield
        finally:
            try:
                stack.close()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The witness is silent; the user's training goes on."""
        known = isinstance(error, cublaslt_log.LogUnavailable)
        self.silent = str(error) if known else in_words(error)

    def _on_cuda(self, current: Callable[[], Scope | None]) -> AbstractContextManager[None]:
        def hear(function: str, message: str) -> None:
            self._messages.append((function, message, current(), self._entries.get(threading.get_ident())))

        return cublaslt_log.listen(hear)

    def _on_cpu(self, current: Callable[[], Scope | None]) -> AbstractContextManager[None]:
        self._printed = StdoutLog(current)
        return self._printed.listen()

    @contextmanager
    def around(self, scope: Scope | None, role: Role, sizes: Sizes) -> Iterator[None]:
        """Marks a call into Transformer Engine: what the library logs on this thread meanwhile is of that call."""
        thread = threading.get_ident()
        self._entries[thread] = _Entry(scope, role, sizes)
        try:
            yield
        finally:
            self._entries.pop(thread, None)

    def boundary(self, scope: Scope) -> None:
        """A module begins or ends."""
        if self._printed is not None:
            self._printed.boundary(scope)

    def _heard(self) -> Iterator[_Heard]:
        for function, message, scope, entry in self._messages:
            product = read_cublaslt(function, message)
            if product is not None:
                yield _Heard(product, scope, entry)
        for scope, line in self._printed.lines if self._printed else ():
            product = read_onednn(line) or read_mkl(line)
            if product is not None:
                yield _Heard(product, scope, None)

    def facts(self, recipe: str, log: GemmLog) -> list[Fact]:
        """One `LibraryLog`, and the `LibraryCall`s of what found its place among the layers of `log`."""
        heard = list(self._heard())
        counts = Counter(call for each in heard if (call := _place(recipe, each, log)) is not None)
        libraries = ("cuBLASLt",) if self._on_gpu else self._printed.libraries if self._printed else ()
        return [
            LibraryLog(
                recipe=recipe,
                libraries=libraries if self.silent is None else (),
                products=len(heard),
                joined=sum(counts.values()),
                silent=self.silent,
            ),
            *(LibraryCall(**{**vars(call), "calls": calls}) for call, calls in counts.items()),
        ]


def _place(recipe: str, heard: _Heard, log: GemmLog) -> LibraryCall | None:
    """The line as a fact of one call, if its module and role are known."""
    product, entry = heard.product, heard.entry
    if entry is not None and entry.sizes is not None:
        module, role, sizes = log.module_of(entry.scope, entry.sizes), entry.role, entry.sizes
    else:
        asked = AtenProduct(
            scope=heard.scope,
            op=product.function,
            batch=product.batch,
            rows=product.rows,
            inner=product.inner,
            columns=product.columns,
            first=product.left,
            second=product.right,
            first_transposed=product.left_transposed,
        )
        # PyTorch has oneDNN compute some products as BLAS would, column-major: the transpose of the result.
        found = log.place_of(asked) or log.place_of(replace(asked, rows=product.columns, columns=product.rows))
        if found is None:
            return None
        layer, role, sizes = found
        module = layer.path
    _, k, n = sizes
    # Y = X W^T, dX = dY W, dW = dY^T X: the weight or saved input stands on the right, unless the library was asked
    # for the transpose of the result.
    across = n if role == "fprop" else k
    turned = product.columns != across and product.rows == across
    sides = ((product.right, product.right_scale), (product.left, product.left_scale))
    (first, first_scale), (second, second_scale) = sides[::-1] if turned else sides
    return LibraryCall(
        recipe=recipe,
        module=module or "(unknown module)",
        role=role,
        m=sizes[0],
        k=k,
        n=n,
        library=product.library,
        function=product.function,
        weight_or_input=first,
        other=second,
        output=product.output,
        rows=product.rows,
        inner=product.inner,
        columns=product.columns,
        calls=1,
        weight_or_input_scale=first_scale,
        other_scale=second_scale,
        compute=product.compute,
        implementation=product.implementation,
    )
