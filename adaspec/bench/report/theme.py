"""How figures look: matplotlib, drawn once with marked colours that the page turns into its own, light or dark.

Why matplotlib and not plotly: a picture is 10 to 100 kB of SVG in the page instead of 4 MB of script, it needs no
script at all, prints, and the same call makes the PNG of a paper. Text stays text, in the page's font.

Colours are told apart by people who see few of them (after Okabe and Ito, 2008), with a contrast of at least 3:1 on
their background (a test computes it); markers say the same as colours.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, FAINT, PAPER = "#1b2127", "#68727c", "#ffffff"
SERIES = ("#0a6cad", "#b84a00", "#00785a", "#a04079", "#856500", "#515c66")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")  # one more than colours, so that no pair of both comes twice soon
DARK = {
    INK: "#e6eaee",
    FAINT: "#98a3ae",
    PAPER: "#1b2128",
    **dict(zip(SERIES, ("#62b3f0", "#ff9a5c", "#3fcaa0", "#e89bc8", "#e0bd45", "#b3bec8"))),
}
VARIABLES = {light: f"--plot-{number}" for number, light in enumerate(DARK)}
NARROW, WIDE = 4.0, 11.0  # inches: a phone held upright, a desk
_DPI = 200  # of a PNG

_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.22,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": INK,
    "text.parse_math": False,  # a name with two dollars is a name
    "axes.formatter.use_mathtext": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.markersize": 5.0,
    "svg.fonttype": "none",
}


@contextmanager
def style() -> Iterator[None]:
    """Figures made and saved inside look like this."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the page's font may have it
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def color(number: int) -> str:
    """Of a series, in its light form."""
    return SERIES[number % len(SERIES)]


def marker(number: int) -> str:
    """Of a series."""
    return MARKERS[number % len(MARKERS)]


def label(text: str, longest: int = 34) -> str:
    """A name as one short line that SVG can hold."""
    whole = "".join(sign if sign.isprintable() else " " for sign in text)
    whole = " ".join(whole.split())
    return whole if len(whole) <= longest else f"{whole[: longest - 1]}…"


def svg(drawn: Figure, key: str) -> str:
    """The figure as an ``svg`` element without size, names or colours of its own; ``key`` makes its ids unique."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": key}):
        FigureCanvasSVG(drawn).print_svg(text, metadata=nothing)
    found = text.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', found, count=1)
    found = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", found, count=1, flags=re.DOTALL)
    found = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), found)
    found = re.sub(r'\bid="', f'id="{key}-', found)
    found = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{key}-", found).replace("xlink:href", "href")
    found = re.sub(r"font-family: [^;\"]*;? ?|font: [\d.]+px [^;\"]*(?=[;\"])", _size, found)
    for light, variable in VARIABLES.items():
        found = found.replace(light, f"var({variable})")
    return found


def _size(match: re.Match[str]) -> str:
    """A font's size alone."""
    size = re.match(r"font: ([\d.]+px)", match.group())
    return f"font-size: {size.group(1)}" if size else ""


def save_png(drawn: Figure, path: Path) -> None:
    """The figure on white, for papers."""
    FigureCanvasAgg(drawn).print_figure(path, dpi=_DPI, facecolor=PAPER)
