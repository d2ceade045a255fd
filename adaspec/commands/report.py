"""``adaspec report``: runs of ``adaspec bench`` as one HTML page, and as PNG."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from adaspec.files import check_file, check_folder


def add(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser("report", help="what runs measured, as one HTML page: adaspec report runs/...")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html in the first RUN)")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write the figures there as PNG too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.bench.report import page, records

    if arguments.out is not None:
        check_file(arguments.out, "--out")
    if arguments.png is not None:
        check_folder(arguments.png, "--png")
    found = page.report(records.read_all(records.find(arguments.runs), lambda why: print(why, file=sys.stderr)))
    if arguments.png is not None:
        for path in page.save_pngs(found, arguments.png):
            print(path)
    out = arguments.out or arguments.runs[0] / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.html(found), "utf-8")
    print(out)
    return 0
