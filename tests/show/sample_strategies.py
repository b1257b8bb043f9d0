"""Random Reports in which anything may be missing."""

from __future__ import annotations

from hypothesis import strategies as st

from lowprec_callback.recording import ROLES
from lowprec_callback.report import (
    BUCKETS,
    Figure,
    Finding,
    Gap,
    GapTerm,
    GemmRow,
    Ledger,
    MemoryReport,
    MemoryTerm,
    NumericsReport,
    RecipeReport,
    Report,
    Speedups,
    Verdict,
    VerdictRow,
)

# Without "n" and "i", so that no reason spells nan, None or inf.
REASONS = st.text(alphabet="abcdeghot []():.,;=<>/_-±é\n\t", min_size=1, max_size=90).filter(str.strip)
NAMES = ("bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "my_recipe")


def figures(unit: str = "ms", largest: float = 5000.0, signed: bool = False) -> st.SearchStrategy[Figure]:
    """Known with or without an interval, estimated or not; or missing."""

    def known(value: float, half: float | None, estimated: bool) -> Figure:
        low, high = (None, None) if half is None else (value - half, value + half)
        return Figure(value, unit, "estimated" if estimated else "measured", low, high, 3)

    values = st.floats(-largest if signed else 0.0, largest)
    numbers = st.builds(known, values, st.none() | st.floats(0, 50), st.booleans())
    return numbers | st.builds(Figure.missing, st.just(unit), REASONS)


SPEEDUPS = st.builds(Speedups, *(figures("x", 9.0) for _ in range(4)))

LEDGERS = st.builds(
    Ledger,
    wall=figures(),
    buckets=st.dictionaries(st.sampled_from(BUCKETS), figures()),
    idle=figures(),
    residual=figures(signed=True),
    busy=figures(),
    complete=st.booleans(),
    complaints=st.lists(REASONS, max_size=2).map(tuple),
    note=st.none() | REASONS,
    unknown_kernels=st.lists(REASONS, max_size=5).map(tuple),
)

VERDICT_ROWS = st.builds(
    VerdictRow,
    module=st.integers(0, 5).map(lambda layer: f"layers.{layer}.mlp.fc1"),
    role=st.sampled_from(ROLES),
    m=st.just(16),
    k=st.just(32),
    n=st.just(64),
    calls=st.just(1),
    asked=st.just("e4m3"),
    ran=st.sampled_from(["e4m3", "bf16", "unknown"]),
    verdict=st.sampled_from(["confirmed", "fallback", "by_request", "outside", "emulated", "unproven"]),
    why=REASONS | st.just(""),
    witnesses=st.dictionaries(st.sampled_from(["operands", "kernels"]), st.just("e4m3")),
    share=st.floats(0, 0.2),
)

VERDICTS = st.builds(
    Verdict,
    coverage=figures("share", 1.0),
    te_coverage=figures("share", 1.0),
    rows=st.lists(VERDICT_ROWS, max_size=6).map(tuple),
    summary=REASONS,
    disagreements=st.lists(REASONS, max_size=2).map(tuple),
    slow_paths=st.lists(REASONS, max_size=2).map(tuple),
)

PHASES = ("start", "forward", "backward", "optimizer", "peak")

MEMORIES = st.builds(
    MemoryReport,
    state=st.sampled_from(["agrees", "contradicts", "silent"]),
    why=REASONS,
    phases=st.dictionaries(st.sampled_from(PHASES), figures("GB", 200.0)),
    terms=st.lists(
        st.builds(
            MemoryTerm,
            name=st.sampled_from(["copies of weights", "saved inputs", "forward, against bf16"]),
            expected=figures("GB", 9.0, signed=True),
            measured=figures("GB", 9.0, signed=True),
        ),
        max_size=3,
    ).map(tuple),
    note=st.none() | REASONS,
)

GEMMS = st.builds(
    GemmRow,
    operation=st.sampled_from(["layers.*.mlp.fc1", "layers.*.mlp.fc2", "head"]),
    role=st.sampled_from(ROLES),
    m=st.just(16),
    k=st.just(32),
    n=st.just(64),
    calls=st.integers(1, 9),
    kernel_ms=figures(),
    autocast_ms=figures(),
    launch_bound=st.booleans(),
)


GUARDS = st.builds(
    NumericsReport,
    state=st.sampled_from(["ok", "far", "frozen scales", "zero gradients", "not finite", "unknown"]),
    why=REASONS,
    steps=st.integers(0, 4),
    loss_baseline=figures("nats", 9.0),
    loss=figures("nats", 9.0),
    distance=figures("%", 200.0),
    limit=figures("%", 2.0),
    gradient_ratio=figures("x", 3.0),
    zero=figures("parameters", 300.0),
    not_finite=figures("parameters", 300.0),
    scales=st.none() | REASONS,
)


def gaps(recipe: str) -> st.SearchStrategy[Gap]:
    """A gap of up to four terms, any of them missing."""
    term = st.builds(GapTerm, st.sampled_from(["GEMM kernels", "quantization", "idle"]), figures(signed=True), REASONS)
    return st.builds(
        Gap,
        baseline=st.just(NAMES[0]),
        recipe=st.just(recipe),
        start=figures(),
        end=figures(),
        terms=st.lists(term, max_size=4).map(tuple),
        missing=st.none() | REASONS,
    )


def recipes(name: str) -> st.SearchStrategy[RecipeReport]:
    """Refused, or run with any part missing."""
    baseline = name == NAMES[0]
    steps = st.tuples(st.integers(0, 3), st.lists(st.floats(0.1, 1000), min_size=1, max_size=4).map(tuple))
    ran = st.builds(
        RecipeReport,
        name=st.just(name),
        title=st.just(name),
        baseline=st.just(baseline),
        step_ms=figures(),
        host_ms=figures(),
        speedups=st.none() | SPEEDUPS,
        peak_gb=figures("GB", 200.0),
        samples=st.lists(steps, max_size=3).map(tuple),
        ledger=st.none() | LEDGERS,
        no_ledger=st.none() | REASONS,
        gap=st.none() if baseline else st.none() | gaps(name),
        gemms=st.lists(GEMMS, max_size=5).map(tuple),
        gemm_kernel_ms=figures(),
        gemm_autocast_ms=figures(),
        verdict=st.none() | VERDICTS,
        memory=st.none() | MEMORIES,
        loss=figures("nats", 9.0),
        clocks=st.none() | REASONS,
        numerics=st.none() | REASONS,
        guard=st.none() | GUARDS,
    )
    refused = st.builds(RecipeReport, st.just(name), st.just(name), st.just(baseline), REASONS)
    return ran if baseline else ran | refused


FINDINGS = st.builds(
    Finding,
    code=st.sampled_from(["launch-bound", "padding"]),
    recipe=st.sampled_from(["", *NAMES]),
    sentence=REASONS,
    evidence=st.lists(REASONS, max_size=3).map(tuple),
    ms=figures(),
    advice=REASONS,
)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """A Report of a baseline and some recipes."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    return Report(
        version=1,
        tool_version="0.1.0",
        created="2026-01-01T00:00:00+00:00",
        model=draw(st.sampled_from(["gpt", "a model with a rather long name, as file names are at times"])),
        engine="transformer_engine",
        why_engine=draw(REASONS),
        device="GPU",
        versions={"torch": "2.11.0"},
        headline=tuple(draw(st.lists(REASONS, max_size=3))),
        reading=tuple(draw(st.lists(REASONS, max_size=2))),
        baseline=NAMES[0],
        recipes=tuple(draw(recipes(name)) for name in names),
        plan=draw(REASONS | st.just("")),
        shrunk=draw(st.none() | REASONS),
        problems=tuple(draw(st.lists(REASONS, max_size=2))),
        restored=draw(st.none() | REASONS),
        status=draw(st.sampled_from(["finished", "shortened", "interrupted", "failed"])),
        recording=draw(st.none() | st.just("runs/a/recording.jsonl")),
        findings=tuple(draw(st.lists(FINDINGS, max_size=12))),
    )
