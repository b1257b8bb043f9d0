"""How long it takes to merge what the ranks of a large run measured, and how much memory.

    python benchmarks/merging_ranks.py                      (4,096 ranks, 6 recipes, 3 rounds of 8 timed steps)
    python benchmarks/merging_ranks.py --ranks 256

The summaries are synthetic, as they travel: text by text, compressed. What rank zero does with them is timed: unpack
and read each, merge them, look for stragglers, and make the page's rows. One rank is slow and must be found.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
import zlib
from collections.abc import Iterator

from lowprec_callback.analyze.ranks import merge
from lowprec_callback.recording import RankRecipe, RankSummary, decode, encode

RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


def packed(rank: int, slow: int) -> bytes:
    """One rank's summary as it is sent."""
    rng = random.Random(rank)
    pace = 1.06 if rank == slow else 1.0

    def rounds(ms: float) -> tuple[tuple[int, tuple[float, ...]], ...]:
        return tuple((number, tuple(ms * rng.gauss(1, 0.005) for _ in range(8))) for number in range(3))

    recipes = {
        name: RankRecipe(
            rounds=rounds(800.0),
            forward=rounds(250.0 * pace),
            host_ms=tuple(rng.gauss(30, 1) for _ in range(3)),
            peak_bytes=90_000_000_000 + rng.randrange(10**6),
            sm_mhz=tuple(rng.randrange(1700, 1980) for _ in range(3)),
            power_w=tuple(rng.gauss(690, 5) for _ in range(3)),
            gemm_ms=400.0 * pace * rng.gauss(1, 0.002),
            communication_ms=20.0 * rng.gauss(1, 0.1),
            coverage=1.0,
        )
        for name in RECIPES
    }
    return zlib.compress(json.dumps(encode(RankSummary(rank, f"node-{rank // 8}", "GPU", recipes))).encode())


def read(texts: list[bytes]) -> Iterator[tuple[int, RankSummary]]:
    """The summaries, one after the other."""
    for line, text in enumerate(texts, start=1):
        fact = decode(json.loads(zlib.decompress(text)))
        assert isinstance(fact, RankSummary)
        yield line, fact


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    ranks = parser.parse_args().ranks
    slow = ranks // 3
    texts = [packed(rank, slow) for rank in range(ranks)]
    next(read(texts[:1]))  # loads what reading needs
    sent, before, begin = sum(map(len, texts)), megabytes(), time.perf_counter()
    merged = merge(read(texts))
    read_s = time.perf_counter() - begin
    report, found = merged.report(ranks), merged.stragglers("bf16")
    total_s = time.perf_counter() - begin
    assert report.heard == ranks
    assert [each.rank for each in found] == [slow], found
    print(f"{ranks} ranks, {sent / 1e6:.1f} MB sent ({sent / ranks / 1e3:.1f} kB a rank)")
    print(f"read and merged in {read_s:.2f} s, with rows and stragglers {total_s:.2f} s; straggler found: rank {slow}")
    print(f"peak memory of the process {megabytes():.0f} MB, {megabytes() - before:.0f} MB more than before")


if __name__ == "__main__":
    main()
