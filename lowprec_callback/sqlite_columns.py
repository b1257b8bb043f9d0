"""Columns of an SQLite table straight from the file's pages, for tables of millions of rows.

Through SQLite a million rows cost seconds, because each value becomes an object or a text on its way. The file format
(https://www.sqlite.org/fileformat2.html, frozen since 2004) is simple enough to be read by whole columns:

- a table is a tree of pages. Inner ones (type 5) hold the numbers of the pages below, leaves (type 13) hold rows;
- a leaf has the number of its rows in bytes 3-4, and from byte 8 on a pointer of two bytes to each of them;
- a row is: its length, its number, then the record: the header's length, a type for each column, the values;
- lengths, row numbers and types are varints: seven bits a byte, the high bit set in all bytes but the last;
- types: 0 NULL; 1-6 a signed whole number of 1, 2, 3, 4, 6, 8 bytes, high byte first; 7 a double; 8 and 9 the numbers
  0 and 1 themselves, without a value; from 12 on a blob of (type - 12) / 2 bytes if even, a text of (type - 13) / 2.

What is rare is not read here but refused with `Unusual`, and the caller asks SQLite: rows so long that they go on in
other pages, texts in another encoding than UTF-8, tables without row numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

PAGES = 512
"""Leaves that are read at a time."""

_SIZES = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0], dtype=np.int64)
"""Bytes of a value by type, below 12."""

_PAD = 16
"""Bytes after the last page, so that looking ahead never leaves the array."""


class Unusual(Exception):
    """Something that is better left to SQLite."""


class Table:
    """One table of a file. `root` is its `rootpage` in `sqlite_master`."""

    def __init__(self, file: Path, root: int) -> None:
        self._file = file
        with file.open("rb") as raw:
            header = raw.read(100)
            size = int.from_bytes(header[16:18], "big")
            self._page = 65536 if size == 1 else size
            self._usable = self._page - header[20]
            if int.from_bytes(header[56:60], "big") != 1:
                raise Unusual("texts are not in UTF-8")
            self._leaves = list(self._find_leaves(raw.fileno(), root))

    def _find_leaves(self, file: int, root: int) -> Iterator[int]:
        """Page numbers of the leaves, in order of row number."""
        stack = [root]
        left = os.fstat(file).st_size // self._page
        while stack:
            left -= 1
            if left < 0:
                raise Unusual("pages point in a circle")
            number = stack.pop()
            page = os.pread(file, self._page, (number - 1) * self._page)
            start = 100 if number == 1 else 0
            kind = page[start]
            if kind == 13:
                yield number
                continue
            if kind != 5:
                raise Unusual(f"page {number} is of type {kind}")
            count = int.from_bytes(page[start + 3 : start + 5], "big")
            pointers = np.frombuffer(page, dtype=">u2", count=count, offset=start + 12)
            below = [int.from_bytes(page[at : at + 4], "big") for at in pointers]
            last = int.from_bytes(page[start + 8 : start + 12], "big")
            below.append(last)
            child = os.pread(file, 1, (last - 1) * self._page)
            if child == b"\x0d":  # all pages of one level are of one type: no need to look at each leaf
                yield from below
            else:
                stack.extend(reversed(below))

    def read(
        self, numbers: Sequence[int], text: int | None = None, only: tuple[int, Sequence[int], bool] | None = None
    ) -> tuple[list[Ints], Ints, list[bytes]]:
        """Columns of whole numbers by their position in the table, in order of row number; NULL becomes -1.

        Args:
            numbers: positions of the columns.
            text: position of a column of text, or None.
            only: (position, values, whether rows with one of these values are kept, or those without).

        Returns the columns; for each row the index of its text; the distinct texts (NULL is the empty text).

        Raises:
            Unusual: see the module's docstring.
        """
        found: list[list[Ints]] = [[] for _ in numbers]
        indices: list[Ints] = []
        known: dict[bytes, int] = {}
        wanted = {*numbers, *([text] if text is not None else []), *([only[0]] if only else [])}
        with self._file.open("rb") as raw:
            for begin in range(0, len(self._leaves), PAGES):
                flat = self._pages(raw.fileno(), self._leaves[begin : begin + PAGES])
                types, places = self._records(flat, max(wanted), wanted)
                keep = None
                if only is not None:
                    column = _whole_numbers(flat, types[only[0]], places[only[0]])
                    keep = np.flatnonzero(np.isin(column, np.array(only[1], dtype=np.int64)) == only[2])
                for kept, position in zip(found, numbers, strict=True):
                    pair = (types[position], places[position])
                    kept.append(_whole_numbers(flat, *(pair if keep is None else (pair[0][keep], pair[1][keep]))))
                if text is not None:
                    pair = (types[text], places[text])
                    indices.append(_texts(flat, *(pair if keep is None else (pair[0][keep], pair[1][keep])), known))
        nothing = np.zeros(0, dtype=np.int64)
        columns = [np.concatenate(kept) if kept else nothing for kept in found]
        return columns, np.concatenate(indices) if indices else nothing, list(known)

    def _pages(self, file: int, leaves: Sequence[int]) -> Bytes:
        """The leaves one after the other; neighbours are read at once."""
        pieces = []
        for _, run in groupby(enumerate(leaves), key=lambda pair: pair[1] - pair[0]):
            pages = [page for _, page in run]
            pieces.append(os.pread(file, len(pages) * self._page, (pages[0] - 1) * self._page))
        together = b"".join([*pieces, bytes(_PAD)])
        if len(together) != len(leaves) * self._page + _PAD:
            raise Unusual("the file ends before its last page")
        return np.frombuffer(together, dtype=np.uint8)

    def _records(self, flat: Bytes, last: int, wanted: set[int]) -> tuple[dict[int, Ints], dict[int, Ints]]:
        """For each wanted column the type and the place of its value in every row."""
        starts = np.arange(0, len(flat) - _PAD, self._page)
        if not bool(np.all(flat[starts] == 13)):
            raise Unusual("a leaf is none")
        counts = flat[starts + 3].astype(np.int64) * 256 + flat[starts + 4]
        page = np.repeat(starts, counts)
        slot = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        pointer = page + 8 + 2 * slot
        at = page + flat[pointer].astype(np.int64) * 256 + flat[pointer + 1]
        length, at = _varint(flat, at)
        if len(length) and int(length.max()) > self._usable - 35:
            raise Unusual("a row goes on in other pages")
        at = _after_varint(flat, at)  # the row's number
        size, head = _varint(flat, at)
        end, place = at + size, at + size
        types: dict[int, Ints] = {}
        places: dict[int, Ints] = {}
        for position in range(last + 1):
            kind, after = _varint(flat, head)
            missing = head >= end  # a column that was added to the table later
            if bool(missing.any()):
                kind, after = np.where(missing, 0, kind), np.where(missing, head, after)
            head = after
            if position in wanted:
                types[position], places[position] = kind, place
            place = place + np.where(kind < 12, _SIZES[np.minimum(kind, 11)], (kind - 12) >> 1)
        return types, places


def _varint(flat: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """(values, where they end) of varints of at most two bytes."""
    first = flat[at].astype(np.int64)
    long = np.flatnonzero(first & 0x80)
    after = at + 1
    if len(long):
        second = flat[after[long]].astype(np.int64)
        if bool((second & 0x80).any()):
            raise Unusual("a length of more than two bytes")
        first[long] = ((first[long] & 0x7F) << 7) | second
        after[long] += 1
    return first, after


def _after_varint(flat: Bytes, at: Ints) -> Ints:
    """Where varints of up to nine bytes end."""
    after, going = at.copy(), np.arange(len(at))
    for _ in range(8):
        going = going[flat[after[going]] >= 0x80]
        if not len(going):
            break
        after[going] += 1
    return after + 1


def _whole_numbers(flat: Bytes, kind: Ints, place: Ints) -> Ints:
    """The values of one column; what is no whole number becomes -1."""
    found = np.full(len(kind), -1, dtype=np.int64)
    for number in np.flatnonzero(np.bincount(np.minimum(kind, 12), minlength=13)):
        if number in (8, 9):
            found[kind == number] = number - 8
        if not 1 <= number <= 6:
            continue
        rows = np.flatnonzero(kind == number)
        at, size = place[rows], int(_SIZES[number])
        value = flat[at].astype(np.int8).astype(np.int64)  # the high byte bears the sign
        for offset in range(1, size):
            value = (value << 8) | flat[at + offset]
        found[rows] = value
    return found


def _texts(flat: Bytes, kind: Ints, place: Ints, known: dict[bytes, int]) -> Ints:
    """For each row the index of its text in `known`, which grows."""
    raw: Any = flat.tobytes()
    size = np.where((kind >= 13) & (kind % 2 == 1), (kind - 13) >> 1, 0)
    ends = (place + size).tolist()
    return np.array(
        [known.setdefault(raw[begin:end], len(known)) for begin, end in zip(place.tolist(), ends, strict=True)],
        dtype=np.int64,
    )
