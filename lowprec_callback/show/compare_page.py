"""The page of `lowprec compare`: what changed from A to B, how sure that is, and which gates hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lowprec_callback.analyze.compare import SPEEDUPS, TIMES, Change, Comparison
from lowprec_callback.analyze.gates import GateResult
from lowprec_callback.report import Figure, Report
from lowprec_callback.show import words
from lowprec_callback.show.sections import parts
from lowprec_callback.show.sections.parts import Notes

STYLES = {"faster": parts.GOOD, "slower": parts.BAD, "cannot tell": parts.WARN}
STATES = {"holds": parts.GOOD, "broken": parts.BAD, "missing": parts.WARN}

NAMES = {
    "speedup": "step speedup",
    "speedup.kernel": "GEMM only",
    "speedup.autocast": "+ quantization",
    "speedup.amdahl": "Amdahl",
    "coverage": "ran as asked",
    "peak": "peak memory, GB",
}

TWO_RUNS = (
    "An interval holds what differs between the rounds of a run. What differs between two runs of the same thing "
    "(another day, another GPU of the same name) only more runs show."
)


class ComparePage:
    """Sides, step times, what stands beside them, kinds of work, gates, remarks."""

    def __init__(self, comparison: Comparison, gates: Sequence[GateResult] = (), names: tuple[str, str] = ("A", "B")):
        self._comparison, self._gates, self._names = comparison, gates, names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The page."""
        made = self._comparison
        yield Text("What changed from A to B", style="bold")
        sides = zip("AB", self._names, (made.a, made.b), strict=True)
        yield from parts.entries([(side, f"{name}  {_side(report)}") for side, name, report in sides])
        for difference in made.allowed:
            yield parts.paragraph(f"differs, as allowed: {words.one_line(str(difference))}", style=parts.WARN)
        yield Text()
        notes = Notes()
        yield parts.heading("Step time, ms")
        yield parts.indented(_relative([each for each in made.changes if each.metric == "step"], notes, recipe=True))
        beside = [each for each in made.changes if each.metric in ("coverage", "peak", *SPEEDUPS)]
        for recipe in made.recipes:
            rows = [each for each in beside if each.recipe == recipe and (each.a.known or each.b.known)]
            work = [parts.indented(_relative(rows, notes, recipe=False))] if rows else []
            yield Text()
            yield parts.heading(recipe)
            yield from parts.stacked(work, _work([each for each in made.changes if each.recipe == recipe], notes))
        footnotes = notes.lines()
        if footnotes:
            yield Text()
            yield from footnotes
        if self._gates:
            yield Text()
            yield parts.heading("Gates")
            yield parts.indented(_gates(self._gates))
        yield Text()
        for remark in made.remarks:
            yield parts.paragraph(words.one_line(remark), 0)
        yield parts.paragraph(_meaning(made.margin), 0, parts.DIM)
        yield parts.paragraph(TWO_RUNS, 0, parts.DIM)


def _side(report: Report) -> str:
    return " · ".join(part for part in (report.model, report.device, words.versions(report), report.created) if part)


def _meaning(margin: float) -> str:
    return (
        f"same: the 95% interval lies within {margin * 100:.3g}% of no change. faster, slower: it leaves out no "
        "change. cannot tell: neither, or no interval. What is counted (ran as asked, peak memory) has no interval and "
        "needs none."
    )


def _relative(changes: Sequence[Change], notes: Notes, *, recipe: bool) -> Table:
    """Rows whose change is a ratio."""
    table = parts.table("recipe" if recipe else "", "A", "B", "change", "95% interval", "")
    table.columns[-1].justify = "left"
    for change in changes:
        write = _writer(change.metric)
        table.add_row(
            Text(change.recipe if recipe else NAMES[change.metric]),
            notes.cell(change.a, write),
            notes.cell(change.b, write),
            Text(_percent(change.ratio.value)),
            Text("counted" if change.counted and change.ratio.known else _interval(change.ratio)),
            _word(change, notes),
        )
    return table


def _writer(metric: str) -> Callable[[Figure], str]:
    if metric in SPEEDUPS:
        return words.times
    return {"coverage": words.share, "peak": words.gb}.get(metric, words.ms)


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{words.fixed((ratio - 1) * 100, 1, signed=True)}%"


def _interval(ratio: Figure) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    return f"{_percent(ratio.low)} to {_percent(ratio.high)}"


def _word(change: Change, notes: Notes) -> Text:
    # A number that is missing has its mark already, where the number would stand; a wide interval stands beside.
    marked = change.why and change.a.known and change.b.known and not change.noisy
    return Text(f"{change.word} {notes.mark(change.why)}" if marked else change.word, STYLES.get(change.word, ""))


def _work(changes: Sequence[Change], notes: Notes) -> Iterable[RenderableType]:
    """Kinds of work of one recipe, by their differences in ms; a kind that neither side has is left out."""
    rows = [each for each in changes if each.metric in TIMES or each.metric.startswith("bucket.")]
    known = [each for each in rows if each.a.known or each.b.known]
    if rows and not known:
        yield parts.paragraph(f"By kind of work: {words.one_line(rows[0].why)}")
        return
    step = next((each for each in changes if each.metric == "step"), None)
    places = words.places_in(step.a) if step else 1
    table = parts.table("ms of a step", "A", "B", "change", "95% interval", "")
    table.columns[-1].justify = "left"
    for change in known:
        if change.a.value == 0 and change.b.value == 0:
            continue
        table.add_row(
            Text(change.metric.removeprefix("bucket.")),
            notes.cell(change.a, lambda figure: words.bare(figure, places)),
            notes.cell(change.b, lambda figure: words.bare(figure, places)),
            Text("" if change.difference.value is None else words.fixed(change.difference.value, places, signed=True)),
            Text(_span(change.difference, places)),
            _word(change, notes),
        )
    if table.rows:
        yield parts.indented(table)


def _span(difference: Figure, places: int) -> str:
    if difference.low is None or difference.high is None:
        return ""
    return f"{words.fixed(difference.low, places, signed=True)} to {words.fixed(difference.high, places, signed=True)}"


def _gates(results: Sequence[GateResult]) -> Table:
    grid = Table.grid(padding=(0, parts.GAP, 0, 0), pad_edge=False)
    for _ in range(3):
        grid.add_column(overflow="fold")
    for result in results:
        state = Text(result.state, style=STATES[result.state])
        grid.add_row(state, Text(str(result.gate)), Text(words.one_line(result.why)))
    return grid
