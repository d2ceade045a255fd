"""Slow: the page in a real browser, on a phone and on a desk, light and dark."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import look, screenshot
from run_folders import exploring, write_run

from adaspec.cli import main

pytestmark = pytest.mark.slow

FIGURES = ("speedup", "timeline", "forecast", "acceptance", "passes", "regret")
FRAME = """<!doctype html><body style="margin:0">
<iframe src="report.html" style="border:0;width:{width}px;height:6000px"></iframe>
<script>
document.querySelector("iframe").onload = event => {{
  const inner = event.target.contentDocument, rows = [];
  inner.querySelectorAll("details").forEach(one => one.open = true);
  inner.querySelectorAll("figure").forEach(one => {{
    const drawn = [...one.querySelectorAll("svg")].filter(svg => svg.getClientRects().length);
    const texts = drawn.flatMap(svg => [...svg.querySelectorAll("text")]);
    const least = Math.min(...texts.map(text => text.getBoundingClientRect().height));
    rows.push(`${{one.id}} drawn=${{drawn.length}} least=${{least.toFixed(1)}}`);
  }});
  const page = inner.documentElement;
  document.body.dataset.seen = `width=${{page.clientWidth}} needed=${{page.scrollWidth}} | ${{rows.join(" | ")}}`;
}};
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with report.html, and its address."""
    run = write_run(tmp_path_factory.mktemp("runs") / "one", players=exploring(0, 0.2), prompts=6)
    assert main(["report", str(run)]) == 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(run)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield run, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_opens_from_disk_without_a_complaint(site: tuple[Path, str], chromium: str, tmp_path: Path) -> None:
    seen = look(chromium, (site[0] / "report.html").as_uri(), tmp_path / "profile")
    assert not seen.complaints
    for name in FIGURES:
        assert f'<figure id="{name}">' in seen.dom


@pytest.mark.parametrize("width", [360, 1200])
def test_every_figure_is_drawn_once_and_nothing_overflows(
    site: tuple[Path, str], chromium: str, tmp_path: Path, width: int
) -> None:
    (site[0] / "frame.html").write_text(FRAME.format(width=width))
    seen = look(chromium, f"{site[1]}/frame.html", tmp_path / "profile", size=f"{max(width, 600)},900")
    assert not seen.complaints
    found = re.search(r'data-seen="([^"]*)"', seen.dom)
    assert found is not None
    size, *rows = found.group(1).split(" | ")
    has, needs = (int(part.split("=")[1]) for part in size.split())
    assert needs == has > width - 20  # a scrollbar may take some
    assert [row.split()[:2] for row in rows] == [[name, "drawn=1"] for name in FIGURES]
    for row in rows:
        assert float(row.split("least=")[1]) >= 9.0  # px: text stays readable


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_light_or_dark_as_the_reader_likes(
    site: tuple[Path, str], chromium: str, tmp_path: Path, dark: bool
) -> None:
    """Screenshots go to ``ADASPEC_SCREENSHOTS`` too, to be looked at."""
    from PIL import Image

    folder = Path(os.environ.get("ADASPEC_SCREENSHOTS", tmp_path))
    for width in (360, 1200):
        (site[0] / "frame.html").write_text(FRAME.format(width=width))
        out = folder / f"report-{width}-{'dark' if dark else 'light'}.png"
        size = f"{max(width, 600)},{4200 if width == 360 else 2600}"
        screenshot(chromium, f"{site[1]}/frame.html", tmp_path / f"profile{width}", out, size=size, dark=dark)
        with Image.open(out) as image:
            levels = image.convert("L").crop((0, 0, width, 2000)).histogram()
        most = max(range(256), key=levels.__getitem__)
        assert most < 60 if dark else most > 200
