"""The GPU kernels of a few steps, by torch.profiler, each with the module, role, phase and operator that launched it.

While a recipe is traced we annotate the host's timeline with ranges of our own. A kernel is joined to them through
its launch: kernel --correlation--> launch call (thread, time) --> the innermost of our ranges, and the innermost
operator, open on that thread at that time. This holds for backward kernels too, which the autograd threads launch.

The profiler's Chrome trace is the interface: a documented, stable format, and the one in which users send traces.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lowprec_callback.facts.traces import ENGINE
from lowprec_callback.measure.dispatch import AtenProduct, product_of
from lowprec_callback.measure.host_calls import blocking, plain_name
from lowprec_callback.measure.scopes import Scope
from lowprec_callback.recording import ROLES, HostPhases, HostWaits, Role, StepProducts, Trace

PREFIX = "lowprec|"
"""Our ranges are called `lowprec|step|3`, `lowprec|phase|forward`, `lowprec|module|DIRECTION|PATH`,
`lowprec|gemm|ROLE|PATH`, and `lowprec|own|WHAT` around what the step does only because it is traced."""

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
HOST_CATEGORIES = ("cpu_op", "user_annotation")


def step_range(index: int) -> AbstractContextManager[Any]:
    """The range of one step, boundary to boundary."""
    return record_function(f"{PREFIX}step|{index}")


def phase_range(name: str) -> AbstractContextManager[Any]:
    """data, forward, backward or optimizer, on the main thread."""
    return record_function(f"{PREFIX}phase|{name}")


def module_range(scope: Scope) -> AbstractContextManager[Any]:
    """A module's forward or backward, on whatever thread runs it."""
    return record_function(f"{PREFIX}module|{scope.direction}|{scope.module}")


def gemm_range(module: str, role: Role) -> AbstractContextManager[Any]:
    """One GEMM call of the library, for the linear layer `module`."""
    return record_function(f"{PREFIX}gemm|{role}|{module}")


def own_range(what: str) -> AbstractContextManager[Any]:
    """What the step does only because it is traced: no wait in it is the user's."""
    return record_function(f"{PREFIX}own|{what}")


class Tracer:
    """One torch.profiler session. `start`, run steps under `step_range`, `stop`, then `traces` or `products`.

    Args:
        device: whose work is traced.
        shapes: record the operators' sizes and types, and nothing of the GPU: for `products`. On a CPU, where operators
            are all there is, they are recorded anyway.
    """

    def __init__(self, device: torch.device, *, shapes: bool = False) -> None:
        self._device = device
        # Kineto writes a line to the terminal at each start and stop, since torch 2.13 at level 5, above its errors.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda" and not shapes:
            activities.append(ProfilerActivity.CUDA)
        self._read: _Events | None = None
        self._ended = False
        """Whether another profiler has ended the session."""
        shapes = shapes or device.type != "cuda"
        self._profile: Any = profile(activities=activities, record_shapes=shapes, acc_events=True)

    def start(self) -> None:
        """Begin. The first step under a new session can lose kernels: do not count it."""
        self._profile.start()

    def stop(self) -> None:
        """End. A session that somebody else's profiler has ended meanwhile is not touched: reading it would crash."""
        self._ended = not torch._C._autograd._profiler_enabled()
        if not self._ended:
            self._profile.stop()

    def traces(self, recipe: str, expected_gemms: int | None, steps: Collection[int] | None = None) -> list[Trace]:
        """One `Trace` for each step range of the session; `steps`: of these numbers only."""
        on_gpu = self._device.type == "cuda"
        return _traces(self._events(), recipe, on_gpu, expected_gemms, steps)

    def step_products(self, recipe: str, compiled: Sequence[str], steps: Collection[int]) -> list[StepProducts]:
        """What may be a product in the steps of these numbers; all of them are called `ranged`."""
        on_gpu = self._device.type == "cuda"
        return _products_by_step(self._events(), recipe, on_gpu, tuple(compiled), steps)

    def gemm_kernels(self) -> dict[tuple[str, Role], tuple[str, ...]]:
        """What `gemm_range`s launched: (module, role) to kernel names."""
        return _gemm_kernels(self._events())

    def products(self) -> list[AtenProduct]:
        """PyTorch's own matrix products in the session."""
        return _products(self._events())

    def _events(self) -> _Events:
        if self._ended:
            raise RuntimeError("another profiler of PyTorch's, opened inside the step, has ended this one's session")
        if self._read is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(path))
                self._read = _Events(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        return self._read


class _Events:
    """A Chrome trace's events, sorted once for all who read them."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event.get("ph") == "X":
                self.by_category[event.get("cat", "")].append(event)
        self.host = self._of(HOST_CATEGORIES)
        self.calls = self._of(LAUNCH_CATEGORIES)
        self.launches = _launches(self.calls)
        self.places = _Places(self.host)

    def _of(self, categories: Iterable[str]) -> list[dict[str, Any]]:
        return [event for category in categories for event in self.by_category[category]]

    def work(self, categories: Iterable[str]) -> list[_Work]:
        """What the GPU did of these kinds, each where the host launched it."""
        return [_gpu_work(event, self.launches, self.places) for event in self._of(categories)]

    def steps(self, numbers: Collection[int] | None) -> list[tuple[int, float, float]]:
        """(number, begin, end) of the step ranges; of these numbers only, if any are given."""
        found = sorted(
            (int(event["name"].rsplit("|", 1)[1]), event["ts"], _end(event))
            for event in self.by_category["user_annotation"]
            if event["name"].startswith(f"{PREFIX}step|")
        )
        return [step for step in found if numbers is None or step[0] in numbers]


def read_events(
    events: Iterable[dict[str, Any]], recipe: str, *, on_gpu: bool, expected_gemms: int | None = None
) -> list[Trace]:
    """Turn a Chrome trace's events into one `Trace` per `lowprec|step|N` range (times there are microseconds)."""
    return _traces(_Events(events), recipe, on_gpu, expected_gemms)


def _traces(
    events: _Events,
    recipe: str,
    on_gpu: bool,
    expected_gemms: int | None,
    numbers: Collection[int] | None = None,
) -> list[Trace]:
    copies = {
        event["args"].get("correlation"): _end(event) for event in events.by_category["gpu_memcpy"] if "args" in event
    }
    places, own = events.places, _own(events.host)
    watch = _Host(places, own, _waits(events.calls, copies, places, own) if on_gpu else None)
    work = events.work(GPU_CATEGORIES) if on_gpu else list(places.own_times())
    work.sort(key=lambda item: item.start)
    steps = events.steps(numbers)
    return [_trace(recipe, index, begin, end, work, expected_gemms, watch) for index, begin, end in steps]


def read_step_products(
    events: Iterable[dict[str, Any]], recipe: str, *, on_gpu: bool, steps: Collection[int]
) -> list[StepProducts]:
    """One `StepProducts` for each of these step ranges: every kernel, or on a CPU every matrix product."""
    return _products_by_step(_Events(events), recipe, on_gpu, (), steps)


def _products_by_step(
    events: _Events, recipe: str, on_gpu: bool, compiled: tuple[str, ...], numbers: Collection[int]
) -> list[StepProducts]:
    found: list[tuple[float, str, _Place, str]] = []
    if on_gpu:
        for work in events.work(("kernel",)):
            # A kernel whose launch is not in the trace stands where it ran.
            when = work.start if math.isnan(work.launch) else work.launch
            found.append((when, work.name, _Place(work.module, work.role, work.op, work.phase), ""))
    else:
        for event in events.by_category["cpu_op"]:
            product = product_of(event, None)
            if product is not None:
                formats = f"{product.first} x {product.second}"
                place = events.places.at(event["tid"], event["ts"])
                found.append((event["ts"], event["name"], place, formats))
    # Launch by launch: kernels of several streams may overtake each other, their launches do not.
    found.sort(key=lambda item: item[0])
    return [
        _step_products(recipe, index, [item for item in found if begin <= item[0] < end], compiled)
        for index, begin, end in events.steps(numbers)
    ]


def _step_products(
    recipe: str, index: int, found: Sequence[tuple[float, str, _Place, str]], compiled: tuple[str, ...]
) -> StepProducts:
    names: dict[str, int] = {}
    labels: dict[str, int] = {"": 0}

    def column(texts: Iterable[str]) -> tuple[int, ...]:
        return tuple(labels.setdefault(text, len(labels)) for text in texts)

    return StepProducts(
        recipe=recipe,
        step=index,
        ranged=True,
        name=tuple(names.setdefault(name, len(names)) for _, name, _, _ in found),
        module=column(place.module for _, _, place, _ in found),
        role=column(place.role for _, _, place, _ in found),
        op=column(place.op for _, _, place, _ in found),
        phase=column(place.phase for _, _, place, _ in found),
        formats=column(formats for _, _, _, formats in found),
        names=tuple(names),
        labels=tuple(labels),
        compiled=compiled,
    )


def read_gemm_kernels(events: Iterable[dict[str, Any]]) -> dict[tuple[str, Role], tuple[str, ...]]:
    """The names of the kernels launched inside our GEMM ranges of a Chrome trace, each once, by (module, role)."""
    return _gemm_kernels(_Events(events))


def _gemm_kernels(events: _Events) -> dict[tuple[str, Role], tuple[str, ...]]:
    found: dict[tuple[str, Role], dict[str, None]] = {}
    for work in sorted(events.work(("kernel",)), key=lambda work: work.start):
        role = next((role for role in ROLES if role == work.role), None)
        if role is not None:
            found.setdefault((work.module, role), {})[work.name] = None
    return {key: tuple(names) for key, names in found.items()}


def read_products(events: Iterable[dict[str, Any]]) -> list[AtenProduct]:
    """PyTorch's matrix products in a Chrome trace with shapes, each with the module that ran it.

    Those inside a range of `gemm_range` are left out: they are how one call of the library multiplies, and the call
    was seen.
    """
    return _products(_Events(events))


def _products(events: _Events) -> list[AtenProduct]:
    found = []
    for event in events.by_category["cpu_op"]:
        product = product_of(event, None)
        place = events.places.at(event["tid"], event["ts"])
        if product is not None and not place.role:
            found.append(replace(product, scope=place.scope()))
    return found


class _Work:
    """One kernel, or on a CPU one stretch of an operator's own time."""

    __slots__ = ("duration", "launch", "module", "name", "op", "phase", "role", "start", "stream")

    def __init__(self, name: str, start: float, duration: float, stream: int, launch: float, place: _Place) -> None:
        self.name, self.start, self.duration, self.stream, self.launch = name, start, duration, stream, launch
        self.module, self.role, self.op, self.phase = place.module, place.role, place.op, place.phase


class _Place:
    """What was going on where the host launched something."""

    __slots__ = ("direction", "module", "op", "phase", "role")

    def __init__(self, module: str = "", role: str = "", op: str = "", phase: str = "", direction: str = "") -> None:
        self.module, self.role, self.op, self.phase, self.direction = module, role, op, phase, direction

    def scope(self) -> Scope | None:
        """The module and direction, if any module ran."""
        return Scope(self.module, "backward" if self.direction == "backward" else "forward") if self.module else None


class _Places:
    """Finds the innermost ranges and operators around an instant on a thread.

    Host events nest on each thread. One pass over them in order of time keeps the stack of open ones and cuts the
    thread's time into segments in which the stack does not change; an instant is then found by bisection.
    """

    def __init__(self, host: list[dict[str, Any]]) -> None:
        self._segments: dict[Any, tuple[list[float], list[tuple[dict[str, Any], ...]]]] = {}
        self._nodes: dict[int, dict[str, Any]] = {}
        """The backward range of ours inside each of the autograd engine's ranges around one node, by that one's id."""
        by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        phases: list[tuple[float, float, str]] = []
        for event in host:
            if event["name"].startswith(f"{PREFIX}phase|"):
                phases.append((event["ts"], event["ts"] + event["dur"], event["name"].split("|", 2)[2]))
            by_thread[event["tid"]].append(event)
        self.phases = sorted(phases)
        """(begin, end, name) of the step's phases."""
        for thread, events in by_thread.items():
            self._segments[thread] = _segments(events)
            self._nodes |= _nodes(self._segments[thread][1])

    def knows(self, thread: Any) -> bool:
        """Whether any range or operator ran on the thread."""
        return thread in self._segments

    def at(self, thread: Any, instant: float) -> _Place:
        """The place at an instant (microseconds) on a thread."""
        stack: tuple[dict[str, Any], ...] = ()
        if thread in self._segments:
            starts, stacks = self._segments[thread]
            position = _last_at_or_before(starts, instant)
            if position >= 0:
                stack = stacks[position]
        return self._place(stack, instant)

    def _place(self, stack: tuple[dict[str, Any], ...], instant: float) -> _Place:
        place = _Place(phase=self._phase(instant))
        for event in reversed(stack):
            name = event["name"]
            if not place.module and id(event) in self._nodes:
                # The engine is done with the node, and sums its gradients with others of the same tensor.
                name = self._nodes[id(event)]["name"]
                place.op = place.op or event["name"]
            if name.startswith(f"{PREFIX}gemm|"):
                _, _, role, module = name.split("|", 3)
                place.role = place.role or role
                place.module = place.module or module
            elif name.startswith(f"{PREFIX}module|"):
                _, _, direction, module = name.split("|", 3)
                place.module, place.direction = place.module or module, place.direction or direction
            elif not name.startswith(PREFIX) and not place.op:
                place.op = name
        return place

    def _phase(self, instant: float) -> str:
        position = _last_at_or_before(self.phases, (instant, math.inf, ""))
        if position >= 0 and instant <= self.phases[position][1]:
            return self.phases[position][2]
        return ""

    def own_times(self) -> Iterable[_Work]:
        """Each operator's own time (without the operators inside it), for machines where the host does the work."""
        for thread, (starts, stacks) in self._segments.items():
            for begin, end, stack in zip(starts, starts[1:], stacks, strict=False):
                innermost = next((event for event in reversed(stack) if not event["name"].startswith(PREFIX)), None)
                if innermost is not None and end > begin:
                    place = self._place(stack, begin)
                    yield _Work(innermost["name"], begin, end - begin, _thread_number(thread), begin, place)


def _thread_number(thread: Any) -> int:
    return thread if isinstance(thread, int) else 0


def _segments(events: list[dict[str, Any]]) -> tuple[list[float], list[tuple[dict[str, Any], ...]]]:
    """Cut a thread's timeline where its stack of open events changes."""
    # At equal times the longer event is the outer one.
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    starts: list[float] = []
    stacks: list[tuple[dict[str, Any], ...]] = []
    open_events: list[dict[str, Any]] = []

    def cut(instant: float) -> None:
        starts.append(instant)
        stacks.append(tuple(open_events))

    def close_until(instant: float) -> None:
        # Events that nest end innermost first. Those that do not (a user's own ranges) end when they end.
        while open_events:
            first = min(range(len(open_events)), key=lambda i: (_end(open_events[i]), -i))
            end = _end(open_events[first])
            if end > instant:
                return
            del open_events[first]
            cut(end)

    for event in events:
        close_until(event["ts"])
        open_events.append(event)
        cut(event["ts"])
    close_until(math.inf)
    return starts, stacks


def _nodes(stacks: Iterable[tuple[dict[str, Any], ...]]) -> dict[int, dict[str, Any]]:
    """Our module's backward range directly inside each range of the engine around one node, by the latter's id."""
    found: dict[int, dict[str, Any]] = {}
    for stack in stacks:
        # Each event begins a stack that ends with it, so that the last two show every pair.
        if len(stack) > 1 and stack[-2]["name"].startswith(ENGINE):
            outer, inner = stack[-2:]
            if inner["name"].startswith(f"{PREFIX}module|backward|"):
                found[id(outer)] = inner
    return found


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _last_at_or_before(values: list[Any], instant: Any) -> int:
    from bisect import bisect_right

    return bisect_right(values, instant) - 1


def _launches(events: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Launch calls by the number that their kernels bear too."""
    return {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }


class _Wait:
    """One call in which the host was blocked."""

    __slots__ = ("duration", "module", "name", "op", "phase", "start")

    def __init__(self, name: str, start: float, duration: float, place: _Place) -> None:
        self.name, self.start, self.duration = name, start, duration
        self.module, self.op, self.phase = place.module, place.op, place.phase


class _Host(NamedTuple):
    """What the host did beside launching."""

    places: _Places
    own: list[tuple[float, float]]
    """(begin, end) of what only the tracing does."""
    waits: list[_Wait] | None


def _own(host: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(event["ts"], _end(event)) for event in host if event["name"].startswith(f"{PREFIX}own|")]


def _waits(
    calls: Iterable[dict[str, Any]], copies: dict[Any, float], places: _Places, own: Sequence[tuple[float, float]]
) -> list[_Wait]:
    """The calls in which the host was blocked, in order of time, but for our own.

    `copies` gives the end of each copy on the GPU by its correlation. Threads without ranges or operators of the
    framework are left out: nobody trains there.
    """
    found = []
    for event in calls:
        kind = blocking(event["name"])
        if kind is None or not places.knows(event["tid"]):
            continue
        if kind != "always" and _end(event) < copies.get(event.get("args", {}).get("correlation"), math.inf):
            continue
        if not any(begin <= event["ts"] < end for begin, end in own):
            place = places.at(event["tid"], event["ts"])
            found.append(_Wait(plain_name(event["name"]), event["ts"], event["dur"], place))
    return sorted(found, key=lambda wait: wait.start)


def _gpu_work(event: dict[str, Any], launches: dict[int, dict[str, Any]], places: _Places) -> _Work:
    args = event.get("args", {})
    launch = launches.get(args.get("correlation"))
    place = places.at(launch["tid"], launch["ts"]) if launch else _Place()
    return _Work(
        event["name"],
        event["ts"],
        event["dur"],
        int(args.get("stream", 0) or 0),
        launch["ts"] if launch else math.nan,
        place,
    )


def _trace(
    recipe: str, index: int, begin: float, end: float, work: list[_Work], expected_gemms: int | None, host: _Host
) -> Trace:
    inside = [item for item in work if begin <= item.start < end]
    names: dict[str, int] = {}
    labels: dict[str, int] = {"": 0}

    def number(table: dict[str, int], text: str) -> int:
        return table.setdefault(text, len(table))

    name = tuple(number(names, item.name) for item in inside)

    def column(field: str) -> tuple[int, ...]:
        return tuple(number(labels, getattr(item, field)) for item in inside)

    module, role, op, phase = (column(field) for field in ("module", "role", "op", "phase"))
    own = [start for start, _ in host.own if begin <= start < end]
    waits = None
    if host.waits is not None:
        waiting = [wait for wait in host.waits if begin <= wait.start < end]
        calls: dict[str, int] = {}
        waits = HostWaits(
            name=tuple(number(calls, wait.name) for wait in waiting),
            names=tuple(calls),
            start_us=tuple(round(wait.start - begin, 3) for wait in waiting),
            duration_us=tuple(round(wait.duration, 3) for wait in waiting),
            module=tuple(number(labels, wait.module) for wait in waiting),
            op=tuple(number(labels, wait.op) for wait in waiting),
            phase=tuple(number(labels, wait.phase) for wait in waiting),
        )
    phases = [(name, max(start, begin), min(stop, end)) for start, stop, name in host.places.phases]
    phases = [(name, start, stop) for name, start, stop in phases if start < stop]
    return Trace(
        recipe=recipe,
        step=index,
        wall_ms=(end - begin) / 1e3,
        names=tuple(names),
        labels=tuple(labels),
        name=name,
        start_us=tuple(round(item.start - begin, 3) for item in inside),
        duration_us=tuple(round(item.duration, 3) for item in inside),
        stream=tuple(item.stream for item in inside),
        launch_us=tuple(round(item.launch - begin, 3) for item in inside),
        module=module,
        role=role,
        op=op,
        phase=phase,
        expected_gemms=expected_gemms,
        waits=waits,
        phases=HostPhases(
            name=tuple(name for name, _, _ in phases),
            start_us=tuple(round(start - begin, 3) for _, start, _ in phases),
            end_us=tuple(round(stop - begin, 3) for _, _, stop in phases),
        )
        if phases
        else None,
        host_end_us=round(min(own) - begin, 3) if own else None,
    )
