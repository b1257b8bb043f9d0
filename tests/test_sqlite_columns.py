"""Pages read by whole columns: the same as SQLite says, or left to SQLite."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_callback import sqlite_columns
from lowprec_callback.nsight import _columns, _Only
from lowprec_callback.sqlite_columns import Table, Unusual

integers = (
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300) | st.sampled_from([0, 1, 127, 128, 2**31])
)
texts = st.none() | st.text(max_size=150) | st.sampled_from(["", "nvte_quantize_v2"])
rows = st.lists(st.tuples(integers, texts, integers, st.floats(allow_nan=False) | st.binary(max_size=80)), max_size=40)


def write(path: Path, content: list[tuple[Any, ...]], page: int = 4096, encoding: str = "UTF-8") -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA page_size = {page}")
    db.execute(f"PRAGMA encoding = '{encoding}'")
    db.execute("CREATE TABLE first (x)")
    db.execute("CREATE TABLE t (a, b, c, d)")
    db.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", content)
    db.commit()
    return db


def root(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT rootpage FROM sqlite_master WHERE name = 't'").fetchone()[0])


@given(rows, st.sampled_from([512, 4096, 65536]), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_it_says_what_sqlite_says(content: list[tuple[Any, ...]], page: int, repeat: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_columns, "PAGES", 2)
        db = write(Path(folder) / "x", content * repeat, page)
        (a, c), index, known = _columns(Path(folder) / "x", db, "t", ["a", "c"], None, "b")
        expected = db.execute("SELECT ifnull(a, -1), ifnull(b, ''), ifnull(c, -1) FROM t ORDER BY rowid").fetchall()
        db.close()
    assert list(zip(a.tolist(), [known[i] for i in index], c.tolist(), strict=True)) == expected


@pytest.mark.parametrize("count", [0, 1, 2000])
def test_large_tables_with_holes_and_a_condition(count: int, tmp_path: Path) -> None:
    db = write(tmp_path / "x", [(i, f"text {i % 7}", i * 10**9, None) for i in range(count)], 512)
    db.execute("UPDATE t SET rowid = rowid + 10000000000 WHERE a > 1000")
    db.execute("DELETE FROM t WHERE a % 3 = 0")
    db.commit()
    (c,), index, known = Table(tmp_path / "x", root(db)).read([2], 1, (0, [4, 5, 7], False))
    expected = db.execute("SELECT c, b FROM t WHERE a NOT IN (4, 5, 7) ORDER BY rowid").fetchall()
    assert list(zip(c.tolist(), [known[i].decode() for i in index], strict=True)) == expected
    (c,), *_ = Table(tmp_path / "x", root(db)).read([2], None, (0, [4, 5, 7], True))
    assert c.tolist() == [row[0] for row in db.execute("SELECT c FROM t WHERE a IN (4, 5, 7) ORDER BY rowid")]
    db.close()


def test_a_column_that_was_added_later(tmp_path: Path) -> None:
    db = write(tmp_path / "x", [(1, "a", 2, None)])
    db.execute("ALTER TABLE t ADD COLUMN e")
    db.execute("INSERT INTO t VALUES (3, 'b', 4, NULL, 5)")
    db.commit()
    (e,), *_ = Table(tmp_path / "x", root(db)).read([4])
    assert e.tolist() == [-1, 5]
    db.close()


@pytest.mark.parametrize(
    ("content", "encoding"), [([(1, "long" * 5000, 2, None)], "UTF-8"), ([(1, "short", 2, None)], "UTF-16le")]
)
def test_what_is_unusual_is_left_to_sqlite(content: list[tuple[Any, ...]], encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    db = write(path, content, encoding=encoding)
    with pytest.raises(Unusual):
        Table(path, root(db)).read([0, 2], 1)
    columns, index, known = _columns(path, db, "t", ["a", "c"], _Only("a", (1,)), "b")
    assert [column.tolist() for column in columns] == [[1], [2]]
    assert [known[i] for i in index] == [content[0][1]]
    db.close()


@pytest.mark.parametrize(
    "create", ["CREATE TABLE t (a INTEGER PRIMARY KEY, b, c)", "CREATE TABLE t (a PRIMARY KEY, b, c) WITHOUT ROWID"]
)
def test_tables_with_a_key_of_their_own(create: str, tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "x")
    db.execute(create)
    db.execute("INSERT INTO t VALUES (5, 'x', 7)")
    db.commit()
    if "WITHOUT" in create:
        with pytest.raises(Unusual):
            Table(tmp_path / "x", root(db))
    else:
        (a, c), *_ = _columns(tmp_path / "x", db, "t", ["a", "c"])
        assert (a.tolist(), c.tolist()) == ([5], [7])
    db.close()


def test_pages_that_point_in_a_circle(tmp_path: Path) -> None:
    db = write(tmp_path / "x", [(i, "text", i, None) for i in range(2000)], 512)
    start = (root(db) - 1) * 512
    raw = bytearray((tmp_path / "x").read_bytes())
    db.close()
    raw[start + 8 : start + 12] = (start // 512 + 1).to_bytes(4, "big")
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(Unusual, match="circle"):
        Table(tmp_path / "x", start // 512 + 1)
