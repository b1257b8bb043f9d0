"""The batches that the sweep's steps use: the user's own data, read so that the fit's own pass does not notice.

A loader that can be read from its beginning again gets a second reader (`Passes`, or Lightning's own fetcher where
`training_step` takes the data's iterator). One that may keep a position of its own (a stream, a loader with an iterator
of its own) is not touched: the sweep goes round copies of the batches that the fit's fetcher has already fetched
(`Copies`), as they came from the loader, before any transfer hook saw them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from lowprec_callback.failures import in_words
from lowprec_callback.sweep.python_state import PythonState
from lowprec_callback.trainer.parts import part

Item = tuple[Any, int, int]
"""(batch, its index, its loader's index), as Lightning's loaders give it."""


class NoBatches(Exception):
    """Why the sweep has no batches to run on."""


class Source(Protocol):
    """What Lightning's loop takes its batches from."""

    words: str
    """Which batches these are, for the page."""

    @property
    def fetcher(self) -> Any:
        """What the loop is given: `next` of it is the next batch, `done` whether that was the last of its pass."""

    @property
    def over(self) -> bool:
        """Whether the pass is over."""

    @property
    def window(self) -> int:
        """Batches in one optimizer step: as many as accumulate, or all that a pass has, if those are fewer."""

    def begin(self) -> None:
        """A new pass over the data."""

    def close(self) -> None:
        """Let go of iterators and worker processes."""


class Passes:
    """A second reader of loaders that can be read again, pass after pass.

    Args:
        loader: a `CombinedLoader` of its own over the user's loaders.
        accumulate: batches in one optimizer step. A pass leaves out what does not fill a step at its end, so that all
            steps hold the same work; unless that would be all of it.
        words: see `Source`.
    """

    def __init__(self, loader: Any, accumulate: int, words: str) -> None:
        self._loader = loader
        self._accumulate = accumulate
        self.words = words
        self.done = False
        self._length: int | None = None
        self._given = 0
        self._ahead: list[Item] = []

    @property
    def fetcher(self) -> Passes:
        """See `Source`."""
        return self

    def begin(self) -> None:
        """See `Source`."""
        iter(self._loader)
        self._given, self.done, self._ahead = 0, False, []
        try:
            whole: int | None = len(self._loader)
        except (TypeError, NotImplementedError):
            whole = None  # its end shows when it comes
        fitting = None if whole is None else whole - whole % self._accumulate
        self._length = fitting or whole

    def __next__(self) -> Item:
        if self._length is not None:
            if self._given >= self._length:
                raise StopIteration
            item: Item = next(self._loader)
            self._given += 1
            # The last batch of the fit's epoch is one that a step must end with; a shorter pass ends between two steps.
            self.done = self._given == self._length and self._length % self._accumulate != 0
            return item
        item = self._ahead.pop() if self._ahead else next(self._loader)
        try:
            self._ahead.append(next(self._loader))
        except StopIteration:
            self.done = True
        return item

    @property
    def window(self) -> int:
        """See `Source`."""
        return min(self._accumulate, self._length or self._accumulate)

    @property
    def over(self) -> bool:
        """See `Source`."""
        return self.done or (self._length is not None and self._given >= self._length)

    def close(self) -> None:
        """See `Source`."""
        self._ahead = []
        self._loader.reset()


class IteratorPasses:
    """The same for a `training_step` that takes the data's iterator: Lightning's own fetcher over a second loader."""

    def __init__(self, fetcher: Any, loader: Any, accumulate: int, words: str) -> None:
        self.fetcher = fetcher
        self.window = accumulate
        self.words = words
        fetcher.setup(loader)

    def begin(self) -> None:
        """See `Source`."""
        iter(self.fetcher)

    @property
    def over(self) -> bool:
        """See `Source`."""
        return bool(self.fetcher.done)

    def close(self) -> None:
        """See `Source`."""
        self.fetcher.teardown()


class Copies:
    """Goes round copies of a few raw batches, for ever.

    Args:
        items: the batches; copies are kept.
        on_cpu: whether the model computes where the batches are, so that it could change them: each step then gets
            copies of its own. Else the transfer to the device makes them.
        accumulate: batches in one optimizer step.
        words: see `Source`.
    """

    done = False
    over = False

    def __init__(self, items: Sequence[Item], on_cpu: bool, accumulate: int, words: str) -> None:
        self._items = list(items)
        self._on_cpu = on_cpu
        self.window = accumulate
        self.words = words
        self._given = 0

    @property
    def fetcher(self) -> Copies:
        """See `Source`."""
        return self

    def begin(self) -> None:
        """See `Source`."""

    def __next__(self) -> Item:
        batch, _, loader = self._items[self._given % len(self._items)]
        self._given += 1
        return (copy.deepcopy(batch) if self._on_cpu else _shell(batch)), self._given - 1, loader

    def close(self) -> None:
        """See `Source`."""
        self._items.clear()


def _shell(batch: Any) -> Any:
    """New containers around the same tensors: what a hook puts into a batch does not stay in it."""
    if type(batch) is dict:
        return {key: _shell(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_shell(value) for value in batch)
    return batch if hasattr(batch, "device") else copy.copy(batch)


class FirstBatch:
    """Remembers, in passing, the first batch that the fit itself fetches from loaders that are not read twice.

    Stands in for the fetcher's iterator until then. A sized stream is fetched from only when its batch is needed, and
    by the time that the sweep begins that batch has been through the transfer hooks.

    Args:
        fetcher: the fit's own.
        why: why the loaders are not read twice, from `reason_for_copies`.
    """

    def __init__(self, fetcher: Any, why: str) -> None:
        self.why = why
        self._fetcher = fetcher
        self._iterator = fetcher.iterator
        self.item: Item | None = None
        self.problem: str | None = None
        self._held = [self._copied(item) for item in getattr(fetcher, "batches", ())]

    @staticmethod
    def watch(fetcher: Any, why: str) -> FirstBatch:
        """Put one in place."""
        watcher = FirstBatch(fetcher, why)
        fetcher.iterator = watcher
        return watcher

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        self.leave()
        item: Item = next(self._iterator)
        self.item = self._copied(item)
        return item

    def leave(self) -> None:
        """Give the fetcher its own iterator back."""
        if self._fetcher.iterator is self:
            self._fetcher.iterator = self._iterator

    @property
    def items(self) -> list[Item]:
        """Copies of the batches known, in order."""
        return [item for item in (*self._held, self.item) if item is not None]

    def _copied(self, item: Item) -> Item | None:
        try:
            return copy.deepcopy(item)
        except Exception as error:  # the batch's own classes take part in this
            self.problem = f"a batch cannot be copied ({in_words(error)})"
            return None


def keeps_its_position(loader: Any) -> str | None:
    """Why a loader is not read a second time while the fit reads it, as a clause; None if it can be."""
    if isinstance(loader, list | tuple):
        return None
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return None if isinstance(loader, Sequence) else f"{name} may keep a position of its own"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{name} has an iterator of its own"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__}, an iterable dataset, may keep a position of its own"
    for sampler in (loader.sampler, loader.batch_sampler):
        if hasattr(sampler, "__next__"):
            return f"{type(sampler).__name__} is an iterator, which goes on from where it is"
    here: dict[str, Any] = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    if loader.num_workers == 0:  # else workers read copies of these, each reader's its own
        here |= {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    unkept = [name for name in PythonState.take(here, tensors=False).unkept if not name.endswith("not kept")]
    return f"{unkept[0]} keeps a position of its own" if unkept else None


def reason_for_copies(loader: Any) -> str | None:
    """`keeps_its_position` of the first of a `CombinedLoader`'s loaders that does."""
    return next((why for each in loader.flattened if (why := keeps_its_position(each)) is not None), None)


def _second_reader(loader: Any) -> Any:
    """A loader that has its own iterator, beside the fit's.

    A DataLoader with persistent workers has one iterator for all who iterate it. A copy's own workers persist, so that
    a new pass does not start them again in the middle of a step.
    """
    if isinstance(loader, list | tuple):
        return copy.deepcopy(loader)  # its batches are the fit's own: a step may change what is in them
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return loader
    mine = copy.copy(loader)
    # Not by attribute: a DataLoader refuses that once it is made.
    mine.__dict__.update(persistent_workers=True, _iterator=None)
    return mine


def source_of(trainer: Any, first: FirstBatch | None, on_cpu: bool) -> Source:
    """The sweep's batches in this fit.

    Args:
        trainer: in the first `on_train_batch_start` of a fit.
        first: what the fit has fetched from loaders that are not read twice; None where they can be.
        on_cpu: see `Copies`.

    Raises:
        NoBatches: there are none that could be used.
    """
    live, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    accumulate = trainer.accumulate_grad_batches
    by_iterator = isinstance(fetcher, part(trainer, "loops.fetchers", "_DataLoaderIterDataFetcher"))
    if first is not None:
        if by_iterator:
            raise NoBatches(f"training_step takes the data's iterator itself, and {first.why}")
        if not first.items:
            raise NoBatches(first.problem or f"no batch is known, and {first.why}")
        count = f"copies of {len(first.items)} batches" if len(first.items) > 1 else "copies of one batch"
        return Copies(first.items, on_cpu, accumulate, f"{count} that the fit had fetched ({first.why})")
    second = type(live)(live.iterables, live._mode)
    second.flattened = [_second_reader(loader) for loader in live.flattened]
    second.limits = live.limits
    words = "a second reading of the training data from its beginning"
    if by_iterator:
        return IteratorPasses(type(fetcher)(), second, accumulate, words)
    return Passes(second, accumulate, words)
