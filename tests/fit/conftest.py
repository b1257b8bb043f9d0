"""Lightning on a shared machine: few threads, and its own warnings are not ours to fix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

LIGHTNINGS_OWN = (
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*is deprecated.*",
    "ignore:.*treespec.*:FutureWarning",
    "ignore:.*`lr_scheduler.step\\(\\)` before.*",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/fit/" in item.path.as_posix():
            for line in LIGHTNINGS_OWN:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
