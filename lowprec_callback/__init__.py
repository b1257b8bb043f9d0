"""lowprec_callback: what each low-precision recipe really gains per training step, and whether it really ran.

    from lightning import Trainer
    from lowprec_callback import LowPrecisionProfiler

    Trainer(callbacks=[LowPrecisionProfiler()]).fit(model)

Importing this package imports neither torch nor Transformer Engine; `LowPrecisionProfiler` does when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lowprec_callback.analyze.compare import compare
    from lowprec_callback.callback import LowPrecisionProfiler
    from lowprec_callback.report import Report, load_report
    from lowprec_callback.sweep.loop import profile
    from lowprec_callback.sweep.session import FallbackError

_HOMES = {
    "FallbackError": "lowprec_callback.sweep.session",
    "LowPrecisionProfiler": "lowprec_callback.callback",
    "Report": "lowprec_callback.report",
    "compare": "lowprec_callback.analyze.compare",
    "load_report": "lowprec_callback.report",
    "profile": "lowprec_callback.sweep.loop",
}

__all__ = ["FallbackError", "LowPrecisionProfiler", "Report", "__version__", "compare", "load_report", "profile"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
