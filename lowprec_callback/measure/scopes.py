"""Which module is running, in forward and in backward, on whatever thread autograd runs it.

A range pushed around a module's forward call says nothing about its backward: autograd runs that later, on a
thread of its own. But the forward call shows us its piece of the autograd graph: the nodes between its output
and its inputs. A pair of hooks on each of these nodes marks the module's backward wherever it runs, also under
activation checkpointing, where the piece that counts is the recomputed one.

Everything here costs host time. It is attached for captured and traced steps only, never for timed ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

Direction = Literal["forward", "backward"]

MAX_NODES = 1024
"""Nodes of one module's piece of the graph that are looked at; attention without fused kernels has about 20."""


class Scope(NamedTuple):
    """A module that is running now."""

    module: str
    direction: Direction


class _Running(NamedTuple):
    """A scope on the stack, and for a forward call the nodes behind its inputs, as they were when it began."""

    scope: Scope
    behind: frozenset[Any] = frozenset()


class ModuleScopes:
    """Keeps a stack of running modules for each thread, and tells listeners who enters and leaves.

    Args:
        modules: path to module, for the modules to watch.
        on_enter: called with (scope) on the thread that runs it.
        on_exit: likewise, in reverse order.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        on_enter: Callable[[Scope], None] | None = None,
        on_exit: Callable[[Scope], None] | None = None,
    ) -> None:
        self._modules = dict(modules)
        self._on_enter = on_enter
        self._on_exit = on_exit
        self._stacks: dict[int, list[_Running]] = {}
        self._handles: list[Any] = []
        self.active = False

    def current(self) -> Scope | None:
        """The innermost running module on this thread."""
        stack = self._stacks.get(threading.get_ident())
        return stack[-1].scope if stack else None

    def clear(self) -> None:
        """Forget who runs: an exception in a backward leaves its module on the stack."""
        self._stacks.clear()

    def install(self) -> None:
        """Attach the forward hooks."""
        self.active = True
        for path, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._before_forward(path), with_kwargs=True))
            # always_call: an exception inside the module must not leave it on the stack.
            self._handles.append(
                module.register_forward_hook(self._after_forward(path), always_call=True, with_kwargs=True)
            )

    def remove(self) -> None:
        """Take every hook away. Hooks on graph nodes die with their graph, and do nothing once this ran."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    @contextmanager
    def installed(self) -> Iterator[ModuleScopes]:
        """`install` on entry, `remove` on exit."""
        self.install()
        try:
            yield self
        finally:
            self.remove()

    def _enter(self, running: _Running) -> None:
        self._stacks.setdefault(threading.get_ident(), []).append(running)
        if self._on_enter:
            self._on_enter(running.scope)

    def _exit(self, scope: Scope) -> _Running | None:
        """Leave a scope, and with it what an exception left open inside it."""
        stack = self._stacks.get(threading.get_ident(), [])
        if not any(running.scope == scope for running in stack):
            return None
        while True:
            running = stack.pop()
            if self._on_exit:
                self._on_exit(running.scope)
            if running.scope == scope:
                return running

    def _before_forward(self, path: str) -> Callable[..., None]:
        scope = Scope(path, "forward")

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(_Running(scope, nodes_behind((args, kwargs))))

        return hook

    def _after_forward(self, path: str) -> Callable[..., None]:
        forward, backward = Scope(path, "forward"), Scope(path, "backward")

        def enter(_grads: Any) -> None:
            if self.active:
                self._enter(_Running(backward))

        def leave(_grads: Any, _outputs: Any) -> None:
            if self.active:
                self._exit(backward)

        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            begun = self._exit(forward)
            for node in own_nodes(output, begun.behind if begun else nodes_behind((args, kwargs))):
                node.metadata[CLAIMED] = path
                node.register_prehook(enter)
                node.register_hook(leave)

        return hook


CLAIMED = "lowprec_module"
"""Key in a node's metadata: the module that the node belongs to."""


def nodes_behind(value: Any) -> frozenset[Any]:
    """The autograd nodes that made the tensors in a value."""
    return frozenset(tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None)


def own_nodes(outputs: Any, behind: Collection[Any]) -> list[Any]:
    """The autograd nodes that a module's forward call added: those behind its outputs, not behind its inputs.

    `behind` is what was behind the inputs when the call began; an operation in place changes that.

    A node that a module inside this one has claimed already is that module's: inner calls end first. Leaves'
    gradient accumulators are left out: they are shared by every use of a parameter.
    """
    waiting: list[Any] = list(nodes_behind(outputs))
    found: dict[Any, None] = {}
    while waiting and len(found) < MAX_NODES:
        node = waiting.pop(0)
        if node is None or node in found or node in behind or node.name().endswith("AccumulateGrad"):
            continue
        found[node] = None
        waiting.extend(following for following, _ in node.next_functions if following)
    return [node for node in found if CLAIMED not in node.metadata]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
