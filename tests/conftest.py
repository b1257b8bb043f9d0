"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every machine, however slow it is.
settings.register_profile("lowprec", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("lowprec")
