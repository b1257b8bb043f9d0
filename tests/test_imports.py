"""Imports point one way (see the package's layout), and what should be light to import is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import lowprec_callback

PACKAGE = Path(lowprec_callback.__file__).parent
ROOT = "lowprec_callback"

RANKS = {
    "failures": -2,
    "files": -1,
    "facts": -1,
    "recording": 0,
    "report": 1,
    "recipes": 2,
    "run_folder": 2,
    "analyze": 3,
    "show": 4,
    "publish": 5,
    "engines": 5,
    "measure": 5,
    "sweep": 8,
    "trainer": 10,
    "callback": 11,
}
"""A module imports from its own area and from areas of a lower rank; engines and measure are one layer."""

COMMAND = 12
"""Rank of whatever is not in the table, the command line first of all: it imports what it likes, none imports it."""

READERS = ("analyze", "show")
"""They work on a Recording from any machine, so they know nothing of the one that made it."""


class Import(NamedTuple):
    """One imported module, as it stands in the source."""

    source: str
    target: str
    line: int
    lazy: bool
    """Inside a function, or for type checkers only."""


@cache
def modules() -> dict[str, Path]:
    """Dotted name to file, for every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in imports_of(name, ast.parse(path.read_text())))


def imports_of(source: str, tree: ast.Module) -> Iterator[Import]:
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or for_type_checkers(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = absolute(source, node)
            # `from package import module` names a module, `from module import name` does not.
            full = [f"{home}.{alias.name}" for alias in node.names]
            targets = [name if name in modules() else home for name in full]
        else:
            continue
        for target in targets:
            yield Import(source, target, node.lineno, id(node) in late)


def absolute(source: str, node: ast.ImportFrom) -> str:
    """What `from ... import` names, dots in front resolved."""
    if not node.level:
        return str(node.module)
    package = source.split(".")
    if modules()[source].name != "__init__.py":
        package = package[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def area(module: str) -> str:
    """`lowprec_callback.measure.steps` is in `measure`; the package itself, and what is not ours, is in none."""
    top, *rest = module.split(".")
    return rest[0] if top == ROOT and rest else ""


@cache
def ours() -> frozenset[Import]:
    return frozenset(each for each in imports() if area(each.target))


def rank(module: str) -> int:
    return RANKS.get(area(module), COMMAND)


def shown(wrong: list[Import]) -> str:
    return "\n".join(sorted(f"{each.source}:{each.line} imports {each.target}" for each in wrong))


def test_the_package_was_found() -> None:
    assert {f"{ROOT}.recording", f"{ROOT}.engines.base", f"{ROOT}.callback"} <= set(modules())
    assert set(RANKS) <= {area(module) for module in modules()}
    assert (f"{ROOT}.engines.base", f"{ROOT}.measure.scopes") in {(each.source, each.target) for each in ours()}


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("from ..recording import Fact", f"{ROOT}.recording"),
        ("from .. import recording", f"{ROOT}.recording"),
        ("from . import steps", f"{ROOT}.measure.steps"),
        ("from .steps import StepClock", f"{ROOT}.measure.steps"),
        ("from lowprec_callback.measure.steps import StepClock", f"{ROOT}.measure.steps"),
        ("import torch.nn as nn", "torch.nn"),
    ],
)
def test_every_way_to_write_an_import_is_read(line: str, target: str) -> None:
    assert [each.target for each in imports_of(f"{ROOT}.measure.trace", ast.parse(line))] == [target]


def test_imports_point_one_way() -> None:
    wrong = [
        each
        for each in ours()
        if area(each.source)
        and area(each.source) != area(each.target)
        and rank(each.target) >= rank(each.source)
        and {area(each.source), area(each.target)} != {"engines", "measure"}
        and not rank(each.source) == rank(each.target) == COMMAND
    ]
    assert not wrong, shown(wrong)


def test_readers_know_nothing_of_the_machine_that_measured() -> None:
    libraries = ("torch", "transformer_engine", "transformer_engine_torch", "lightning", "pynvml")
    wrong = [
        each
        for each in imports()
        if area(each.source) in READERS
        and (each.target.split(".")[0] in libraries or (each in ours() and rank(each.target) > RANKS["show"]))
    ]
    assert not wrong, shown(wrong)


def test_what_is_measured_knows_nothing_of_reports() -> None:
    """Nothing flows backwards: measure -> Recording -> analyze -> Report -> show."""
    wrong = [
        each
        for each in ours()
        if area(each.source) in ("recording", "measure", "engines") and area(each.target) in ("report", *READERS)
    ]
    assert not wrong, shown(wrong)


def test_only_one_file_imports_transformer_engine() -> None:
    importers = {each.source for each in imports() if each.target.split(".")[0].startswith("transformer_engine")}
    assert importers == {f"{ROOT}.engines.transformer_engine"}


def test_only_the_callback_and_its_room_import_lightning() -> None:
    found = {area(each.source) for each in imports() if each.target.split(".")[0] in ("lightning", "pytorch_lightning")}
    assert found == {"callback", "trainer"}


def test_there_are_no_cycles() -> None:
    graph = {name: {e.target for e in ours() if e.source == name and not e.lazy} for name in modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_command_line_is_light_at_the_top() -> None:
    allowed = set(sys.stdlib_module_names) | {ROOT}
    wrong = [
        each
        for each in imports()
        if each.source in (ROOT, f"{ROOT}.cli")
        and not each.lazy
        and (each.target.split(".")[0] not in allowed or area(each.target))
    ]
    assert not wrong, shown(wrong)


HEAVY = ("torch", "transformer_engine", "transformer_engine_torch", "lightning", "pydantic", "numpy", "matplotlib")


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh process that ran some code."""
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import lowprec_callback; lowprec_callback.__version__",
        "import lowprec_callback.cli",
        "from lowprec_callback.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "import lowprec_callback.recording, lowprec_callback.report, lowprec_callback.recipes",
        "import lowprec_callback.sweep.plan",
        "import lowprec_callback.publish, lowprec_callback.files",
    ],
)
def test_importing_costs_little(code: str) -> None:
    assert not loaded_after(code) & {*HEAVY, "rich"}


def test_a_recording_is_analysed_and_shown_without_torch() -> None:
    names = [name for name in modules() if area(name) in READERS]
    assert len(names) > 10
    loaded = loaded_after(f"import {', '.join(names)}")
    assert not loaded & {"torch", "transformer_engine", "transformer_engine_torch", "lightning"}


def test_the_public_names_are_there_when_asked_for() -> None:
    assert set(lowprec_callback.__all__) == {*lowprec_callback._HOMES, "__version__"}
    for name, home in lowprec_callback._HOMES.items():
        assert getattr(lowprec_callback, name) is getattr(sys.modules[home], name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lowprec_callback.nothing  # noqa: B018
