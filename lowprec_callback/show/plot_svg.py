"""A plot as SVG text to stand inside an HTML page."""

from __future__ import annotations

import io
import re

import matplotlib
from matplotlib.figure import Figure as Canvas

from lowprec_callback.show.plots import save

_HEAD = re.compile(r"<svg\b[^>]*?\bviewBox=\"([^\"]*)\"[^>]*>", re.DOTALL)
_STYLE = re.compile(r"<style\b.*?</style>", re.DOTALL)
_PATH = re.compile(r' d="([^"]*)"')
_FINE = re.compile(r"(\.\d\d)\d+")
"""A coordinate beyond hundredths of a point, which no screen shows."""
_GROUP = re.compile(r'<g id="(?:patch|line2d|xtick|ytick|text|PathCollection)_\d+">\s*(<path\b[^>]*/>)\s*</g>')
"""matplotlib's group around a single bar, to which nothing refers."""
_NAMED = re.compile(r"(\bid=\"|\bxlink:href=\"#|url\(#)")


def svg(figure: Canvas, name: str) -> str:
    """An `<svg>` element without width and height, so that the page sizes it.

    `name` (letters, digits, `_`) begins every id in it: several plots can stand in one page. Texts stay texts, so they
    can be searched and read aloud. Nothing in it refers to anything outside it.
    """
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        save(figure, out, "svg", nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # Its style sheet would hold for the whole page: the page's own has the same rules, for plots only.
    text = _STYLE.sub("", text, count=1)
    text = _GROUP.sub(r"\1", text)
    text = _PATH.sub(_shorter, text)
    # White space between elements, and the corners of hairlines: half of the text, and nothing that can be seen.
    text = re.sub(r">\s+<", "><", text).replace("; stroke-linejoin: miter", "")
    text = _NAMED.sub(rf"\g<1>{name}-", text)
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"matplotlib wrote an SVG without a viewBox: {text[:200]!r}")
    return f'<svg viewBox="{head[1]}" role="img" aria-labelledby="{name}-caption">{text[head.end() :].strip()}'


def _shorter(path: re.Match[str]) -> str:
    return ' d="' + " ".join(_FINE.sub(r"\1", path[1]).split()) + '"'
