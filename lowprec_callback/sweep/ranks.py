"""Several processes that train one model: what is decided, is decided once for all of them.

Every process (rank) runs the same plan in lockstep; a decision that one made alone would leave the others waiting in
training's own collectives for ever. So all decide from what all found: `together` and `gather`. Both are collectives,
and stand only where every rank comes by in ordinary training (its start, the end of an optimizer step, its end), never
on the way of an exception: a rank that raises leaves the others to what training itself does about a missing rank.

Communication goes through Lightning's strategy, whatever launched the processes and wherever they are; this file
imports no Lightning.
"""

from __future__ import annotations

import json
import socket
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

_T = TypeVar("_T")

SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
"""Lightning's strategies that are known to keep what a sweep needs: every rank's `training_step` runs each step, and
parameters and optimizer state can be set aside and put back on each rank by itself."""

REFUSED = {
    "DeepSpeedStrategy": "its engine owns the optimizer and the partitions of the parameters, which cannot be put back",
    "XLAStrategy": "its steps are traced and run later, so that they cannot be timed one by one",
    "XLAFSDPStrategy": "its steps are traced and run later, so that they cannot be timed one by one",
    "SingleDeviceXLAStrategy": "its steps are traced and run later, so that they cannot be timed one by one",
    "MegatronStrategy": "its pipeline runs training_step by a schedule of its own",
}
"""Strategies by class name, and why no sweep runs under them."""


class RankError(RuntimeError):
    """Another rank failed; the message names it."""


class Strategy(Protocol):
    """What is asked of a Lightning strategy."""

    @property
    def root_device(self) -> torch.device:
        """This process's device."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor of each rank, stacked."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object on all."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether it is true on all ranks, or on any."""


class Ranks(ABC):
    """The processes that train together, seen from one of them."""

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that JSON can carry), in the order of ranks. Waits for all ranks."""

    @abstractmethod
    def from_zero(self, value: _T) -> _T:
        """Rank zero's value on all ranks. Waits for all ranks."""

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether it is true on one rank at least. Waits for all ranks."""

    @property
    def host(self) -> str:
        """The name of this process's machine."""
        return socket.gethostname()

    @property
    def name(self) -> str:
        """`rank 3 (node-b)`."""
        return name_of(self.rank, self.host)

    def together(self, work: Callable[[], _T], tell: Callable[[_T], Any] = lambda _: None) -> tuple[_T, list[Any]]:
        """(what `work` returned here, what `tell` makes of it on each rank). Waits for all ranks.

        If `work` fails anywhere, nobody goes on.

        Args:
            work: done by every rank at the same time; no collectives.
            tell: what the other ranks need to know of it.

        Raises:
            Exception: whatever `work` raised on this rank.
            RankError: it raised on another.
        """
        result, failure = None, None
        try:
            result = work()
            said = tell(result)
        except Exception as error:
            if self.size == 1:
                raise
            failure, said = error, None
        text = None if failure is None else f"{self.name}: {type(failure).__name__}: {' '.join(str(failure).split())}"
        answers = self.gather([text, said])
        if failure is not None:
            raise failure
        for other, _ in answers:
            if other is not None:
                raise RankError(other)
        return result, [answer for _, answer in answers]  # type: ignore[return-value]


def name_of(rank: int, host: str) -> str:
    """`rank 3 (node-b)`."""
    return f"rank {rank} ({host})"


class Alone(Ranks):
    """A single process."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """See `Ranks.gather`."""
        return [value]

    def from_zero(self, value: _T) -> _T:
        """See `Ranks.from_zero`."""
        return value

    def any(self, flag: bool) -> bool:
        """See `Ranks.any`."""
        return flag


class StrategyRanks(Ranks):
    """The ranks of a Lightning strategy."""

    def __init__(self, strategy: Strategy, rank: int, size: int) -> None:
        self._strategy = strategy
        self.rank = rank
        self.size = size

    def gather(self, value: Any) -> list[Any]:
        """See `Ranks.gather`. Texts travel as bytes, compressed, padded to the longest."""
        packed = zlib.compress(json.dumps(value).encode())
        mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        lengths = self._all(torch.tensor([len(mine)], dtype=torch.int64))[:, 0].tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = self._all(padded).numpy()
        return [json.loads(zlib.decompress(row[:length].tobytes())) for row, length in zip(rows, lengths, strict=True)]

    def from_zero(self, value: _T) -> _T:
        """See `Ranks.from_zero`."""
        return self._strategy.broadcast(value, 0)  # type: ignore[no-any-return]

    def any(self, flag: bool) -> bool:
        """See `Ranks.any`."""
        return bool(self._strategy.reduce_boolean_decision(flag, all=False))

    def _all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, length], on the host."""
        return self._strategy.all_gather(tensor.to(self._strategy.root_device)).reshape(self.size, -1).cpu()


def ranks_of(strategy: Strategy, rank: int, size: int) -> Ranks:
    """The ranks that a strategy trains with."""
    return StrategyRanks(strategy, rank, size) if size > 1 else Alone()


def why_not(strategy: object) -> str | None:
    """Why no sweep can run under a strategy, as a sentence that names it; None where it can.

    A strategy is known by the names of its class and of the classes that it is made from.
    """
    names = [cls.__name__ for cls in type(strategy).__mro__]
    own = names[0]
    for name in names:
        if name in REFUSED:
            return f"the strategy {own} is not supported: {REFUSED[name]}; nothing was profiled"
    if not set(names) & set(SUPPORTED):
        known = ", ".join(SUPPORTED)
        return f"the strategy {own} is not known (known are {known}, and what is made from them); nothing was profiled"
    return None


def first_reason(answers: Sequence[dict[str, str]], hosts: Sequence[str], key: str) -> str | None:
    """The reason that the lowest rank has for `key`, with that rank's name unless all ranks say the same.

    None if no rank has one.
    """
    having = [(rank, answer[key]) for rank, answer in enumerate(answers) if key in answer]
    if not having:
        return None
    rank, reason = having[0]
    if len(having) == len(answers) and len({text for _, text in having}) == 1:
        return reason
    return f"{name_of(rank, hosts[rank])}: {reason}"
