"""Which module runs: in forward, in backward, on any thread, under checkpointing, and after things went wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec_callback.measure.scopes import CLAIMED, ModuleScopes, Scope, nodes_behind, own_nodes, tensors_in

seen: list[tuple[str, Scope | None]] = []
"""What a `Witness` saw around it, by direction."""

asked: list[ModuleScopes] = []
"""The scopes that a `Witness` asks."""


class Witness(torch.autograd.Function):
    """Does nothing, and says which module runs while it does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(("forward", asked[0].current()))
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors  # noqa: B018  (where a checkpointed piece is computed again)
        seen.append(("backward", asked[0].current()))
        return grad


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    seen.clear()
    yield
    seen.clear()
    asked.clear()


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Witness.apply(x * self.weight)


class Block(nn.Module):
    """Leaves with something of its own between them."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return x


class Log:
    """Scopes over every module of a model, and who entered and left."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.threads: set[int] = set()
        self.scopes = ModuleScopes(dict(model.named_modules()), self._note("+"), self._note("-"))
        asked[:] = [self.scopes]

    def _note(self, sign: str) -> Any:
        def note(scope: Scope) -> None:
            self.events.append((sign, scope.direction, scope.module))
            self.threads.add(threading.get_ident())

        return note

    def of(self, direction: str) -> list[str]:
        return [f"{sign}{module}" for sign, way, module in self.events if way == direction]

    def assert_nested(self) -> None:
        """Every entry has its exit, innermost first."""
        stack: list[tuple[str, str]] = []
        for sign, *scope in self.events:
            if sign == "+":
                stack.append(tuple(scope))
            else:
                assert stack
                assert stack.pop() == tuple(scope)
        assert stack == []


def hooks_of(model: nn.Module) -> int:
    names = [name for name in vars(model) if "hook" in name]
    assert "_forward_hooks_always_called" in names
    return sum(
        len(value)
        for module in model.modules()
        for name in names
        if isinstance(value := getattr(module, name), dict | set)
    )


def input_() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def graph_of(output: torch.Tensor) -> set[Any]:
    waiting, found = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return {node for node in found if not node.name().endswith("AccumulateGrad")}


# -- order and ownership --------------------------------------------------------------------------------------------


def test_nested_modules_enter_and_leave_in_order() -> None:
    model = Block(Leaf(), Block(Leaf()))
    log = Log(model)
    with log.scopes.installed():
        model(input_()).sum().backward()
    assert log.of("forward") == [
        "+",
        "+parts.0",
        "-parts.0",
        "+parts.1",
        "+parts.1.parts.0",
        "-parts.1.parts.0",
        "-parts.1",
        "-",
    ]
    entered = [event[1:] for event in log.of("backward") if event[0] == "+"]
    assert list(dict.fromkeys(entered)) == ["", "parts.1", "parts.1.parts.0", "parts.0"]
    log.assert_nested()
    assert log.scopes.current() is None
    assert seen == [
        ("forward", Scope("parts.0", "forward")),
        ("forward", Scope("parts.1.parts.0", "forward")),
        ("backward", Scope("parts.1.parts.0", "backward")),
        ("backward", Scope("parts.0", "backward")),
    ]


trees = st.recursive(
    st.builds(Leaf), lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda p: Block(*p)), max_leaves=6
)


@given(trees, st.booleans())
def test_each_node_belongs_to_the_innermost_module(model: nn.Module, with_grad: bool) -> None:
    seen.clear()
    root = nn.Sequential(model)
    log = Log(root)
    with log.scopes.installed():
        output = root(torch.ones(2, requires_grad=with_grad))
        for node in graph_of(output):
            owner = root.get_submodule(node.metadata[CLAIMED])
            kinds = {"TanhBackward0": Block, "MulBackward0": Leaf, "WitnessBackward": Leaf}
            assert type(owner) is kinds[node.name()]
        output.sum().backward()
    log.assert_nested()
    leaves = [path for path, module in root.named_modules() if isinstance(module, Leaf)]
    assert [scope.module for way, scope in seen if way == "forward" and scope] == leaves
    assert [scope.module for way, scope in seen if way == "backward" and scope] == leaves[::-1]
    assert all(scope is not None and scope.direction == way for way, scope in seen)
    assert hooks_of(root) == 0


def test_a_shared_module_is_seen_each_time() -> None:
    leaf = Leaf()
    model = Block(leaf, nn.Identity(), leaf)
    log = Log(model)
    with log.scopes.installed():
        model(input_()).sum().backward()
    assert [way for way, scope in seen if scope and scope.module == "parts.0"] == ["forward"] * 2 + ["backward"] * 2
    log.assert_nested()


def test_modules_that_are_not_watched_belong_to_the_one_around_them() -> None:
    model = Block(Leaf())
    scopes = ModuleScopes({"": model})
    asked[:] = [scopes]
    with scopes.installed():
        model(input_()).sum().backward()
    assert seen == [("forward", Scope("", "forward")), ("backward", Scope("", "backward"))]


class Structured(nn.Module):
    """Takes and gives nested structures."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, batch: dict[str, Any], *, scale: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        x = self.leaf(batch["x"][0])
        return x * scale, {"twice": [x * 2, None, "text"], "number": 3}


def test_modules_that_take_and_give_tuples_and_dicts() -> None:
    model = Structured()
    log = Log(model)
    x = input_().exp()
    scale = (input_() * 3).sum()
    with log.scopes.installed():
        first, second = model({"x": (x,)}, scale=scale)
        owners = {(node.name(), node.metadata.get(CLAIMED)) for node in graph_of(first + second["twice"][0])}
        (first + second["twice"][0]).sum().backward()
    outside = {(name, None) for name in ("AddBackward0", "ExpBackward0", "SumBackward0", "MulBackward0")}
    assert owners == {("WitnessBackward", "leaf"), ("MulBackward0", "leaf"), ("MulBackward0", ""), *outside}
    assert seen[-1] == ("backward", Scope("leaf", "backward"))
    log.assert_nested()


@pytest.mark.parametrize("output", [None, 3, "text", [], {"a": None}])
def test_modules_that_give_no_tensor(output: Any) -> None:
    class Silent(nn.Module):
        def forward(self, _x: torch.Tensor) -> Any:
            return output

    model = Silent()
    log = Log(model)
    with log.scopes.installed():
        assert model(input_()) is output
    log.assert_nested()


def test_an_input_changed_in_place_is_still_the_input() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    model = Block(Leaf(), InPlace(), nn.ReLU(inplace=True))
    log = Log(model)
    with log.scopes.installed():
        output = model(input_())
    owners = {node.name(): node.metadata[CLAIMED] for node in graph_of(output) if node.name() != "TanhBackward0"}
    assert owners["AddBackward0"] == "parts.1"
    assert owners["ReluBackward0"] == "parts.2"


def test_the_backward_of_what_is_outside_belongs_to_nobody() -> None:
    model = Leaf()
    log = Log(model)
    with log.scopes.installed():
        Witness.apply(model(input_()).exp()).sum().backward()
    assert seen == [
        ("forward", Scope("", "forward")),
        ("forward", None),
        ("backward", None),
        ("backward", Scope("", "backward")),
    ]


def test_without_gradients_only_forward_is_seen() -> None:
    model = Block(Leaf())
    log = Log(model)
    with log.scopes.installed(), torch.no_grad():
        model(torch.ones(2))
    assert {way for _, way, _ in log.events} == {"forward"}
    log.assert_nested()


# -- activation checkpointing --------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = Block(Leaf(), Leaf())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    log = Log(model)
    with log.scopes.installed():
        model(input_()).sum().backward()
    first, second = "block.parts.0", "block.parts.1"
    assert [scope.module for way, scope in seen if way == "forward" and scope] == [first, second, first, second]
    assert [scope for way, scope in seen if way == "backward"] == [Scope(second, "backward"), Scope(first, "backward")]
    assert all(scope is not None and scope.direction == way for way, scope in seen)
    log.assert_nested()
    assert log.scopes.current() is None
    assert hooks_of(model) == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- threads -----------------------------------------------------------------------------------------------------


def test_a_backward_on_another_thread() -> None:
    model = Block(Leaf(), Leaf())
    log = Log(model)
    with log.scopes.installed():
        loss = model(input_()).sum()
        log.threads.clear()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert log.threads == {thread.ident}
        assert log.scopes.current() is None
    assert [scope.module for way, scope in seen if way == "backward" and scope] == ["parts.1", "parts.0"]
    log.assert_nested()


def test_each_thread_has_its_own_stack() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(30)
            return x

    model = nn.ModuleDict({"waiting": Waiting(), "leaf": Leaf()})
    log = Log(model)
    with log.scopes.installed():
        thread = threading.Thread(target=model["waiting"], args=(torch.ones(2),))
        thread.start()
        assert inside.wait(30)
        assert log.scopes.current() is None
        model["leaf"](input_())
        go_on.set()
        thread.join()
    assert seen == [("forward", Scope("leaf", "forward"))]


# -- when things go wrong ----------------------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


def test_an_exception_in_a_forward_leaves_nothing_behind() -> None:
    model = Block(Leaf(), Block(Failing(RuntimeError("mine"))))
    log = Log(model)
    with log.scopes.installed():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mine"):
                model(input_())
            assert log.scopes.current() is None
    log.assert_nested()
    assert hooks_of(model) == 0


def test_what_an_interrupt_left_open_ends_with_the_call_around_it() -> None:
    """PyTorch runs no hook at all after a KeyboardInterrupt."""

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(Failing(KeyboardInterrupt()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.inner(x)
            except KeyboardInterrupt:
                return x

    model = Catching()
    log = Log(model)
    with log.scopes.installed():
        model(input_())
        assert log.scopes.current() is None
    log.assert_nested()


def test_an_exception_in_a_backward_is_forgotten_when_told() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mine")

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Broken.apply(x)

    model = Module()
    log = Log(model)
    with log.scopes.installed():
        loss = model(input_()).sum()
        with pytest.raises(RuntimeError, match="mine"):
            loss.backward()
        assert log.scopes.current() == Scope("", "backward")
        log.scopes.clear()
        assert log.scopes.current() is None


def test_an_exception_inside_the_context_removes_every_hook() -> None:
    model = Block(Leaf())
    log = Log(model)

    def fail() -> None:
        assert hooks_of(model) > 0
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), log.scopes.installed():
        fail()
    assert hooks_of(model) == 0
    assert not log.scopes.active


def test_a_graph_that_outlives_the_hooks_is_silent() -> None:
    model = Block(Leaf())
    log = Log(model)
    with log.scopes.installed():
        loss = model(input_()).sum()
    before = len(log.events)
    loss.backward()
    assert len(log.events) == before
    assert log.scopes.current() is None


def test_hooks_of_others_stay() -> None:
    model = Leaf()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("theirs"))
    before = hooks_of(model)
    with Log(model).scopes.installed():
        model(input_())
    assert hooks_of(model) == before
    assert calls == ["theirs"]


# -- parts -----------------------------------------------------------------------------------------------------------


def test_tensors_in_nested_values() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert list(tensors_in((a, [b, {"k": c}], None, 3, "text"))) == [a, b, c]


def test_own_nodes_end_at_the_inputs_and_leave_accumulators_out() -> None:
    x = input_().exp()
    weight = nn.Parameter(torch.ones(2))
    y = (x * weight).tanh()
    assert {node.name() for node in own_nodes(y, nodes_behind(x))} == {"TanhBackward0", "MulBackward0"}
    assert {node.name() for node in own_nodes(y, ())} == {"TanhBackward0", "MulBackward0", "ExpBackward0"}
    assert own_nodes(x, nodes_behind(x)) == []
    assert own_nodes(torch.ones(1), ()) == []
