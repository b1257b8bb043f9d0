from __future__ import annotations

import pytest

from lowprec_callback.analyze.provenance import lines_of


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ()),
        ([4], ("loss line 4",)),
        ([7, 5, 6, 6], ("loss lines 5-7",)),
        ([1, 3, 4, 9], ("loss lines 1, 3-4, 9",)),
    ],
)
def test_lines(numbers: list[int], text: tuple[str, ...]) -> None:
    assert lines_of("loss", numbers) == text
