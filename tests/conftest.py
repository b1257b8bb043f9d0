"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Models here are tiny: a second thread costs more than it does, also in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every machine, however slow it is.
settings.register_profile("lowprec", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("lowprec")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
