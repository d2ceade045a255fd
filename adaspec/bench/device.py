"""What a GPU makes of the decoding core, in one run of under eight minutes.

python -m adaspec.bench.device
python -m adaspec.bench.device --device cpu --tiny

Needs torch, transformers, numpy, scipy and nothing else: weights are random in real shapes (1.1B and 8B Llamas), and
the drafter agrees with its target by construction (``device_models``). Measures eager against graph passes, the share
of the bandwidth floor, the curve T(k)/T(1), the anatomy of a round, graphs and what they hold, greedy equality, the
sampled law, batches, and what a controller ends on. A section that fails is reported with its error and the rest runs.
Prints a table and, as its last line, one JSON object; ``--output`` also writes that to a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from adaspec.bench.batches import batches
from adaspec.bench.device_models import REAL, TINY, Size
from adaspec.bench.device_sections import (
    SMALL,
    Bench,
    Loaded,
    Scale,
    adaptation,
    attention,
    equality,
    law,
    load,
    passes,
    prepared,
    rounds,
)

SECONDS = 420.0  # of all sections; what is begun may run over, hence under eight minutes
SHARES = {"law": 0.04, "load": 0.15, "passes": 0.1, "rounds": 0.1, "equality": 0.06, "batches": 0.06, "adaptation": 0.1}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures everything on one device; exit code 1 when a section failed."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    began = time.perf_counter()
    bench = Bench.on(arguments.device, SMALL if arguments.tiny else Scale())
    result: dict[str, Any] = {"command": " ".join(["python -m adaspec.bench.device", *argv]), **_machine(bench)}
    run = Sections(bench, arguments.seconds, result)
    run("law", "law", law)
    for size in TINY if arguments.tiny else REAL:
        _family(run, size)
    result["seconds"] = time.perf_counter() - began
    _show(result)
    line = json.dumps(result)
    if arguments.output:
        arguments.output.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if result["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: the whole host side in under a minute")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all sections (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes too")
    return parser


def _machine(bench: Bench) -> dict[str, Any]:
    cuda = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "graphs": "CUDA" if cuda else "a rehearsal: the same buffers, computed again at every replay",
        "failed": {},
        "skipped": [],
    }


class Sections:
    """Runs sections one after the other: each has its share of the time, and a failure is noted, not raised.

    Args:
        bench: where and how.
        seconds: of all of them together.
        result: what they find, by name; "failed" holds the errors, "skipped" what there was no time for.
    """

    def __init__(self, bench: Bench, seconds: float, result: dict[str, Any]) -> None:
        self._bench, self._seconds, self._result = bench, seconds, result
        self._end = time.perf_counter() + seconds

    def __call__(self, name: str, kind: str, section: Callable[..., Any], *arguments: Any) -> Any:
        """What ``section(bench, *arguments)`` returns, None when it failed or was skipped."""
        began = time.perf_counter()
        if began > self._end:
            self._result["skipped"].append(name)
            return None
        until = min(began + SHARES[kind] * self._seconds, self._end)
        try:
            found = section(replace(self._bench, until=until), *arguments)
        except Exception as error:  # whatever a device and its drivers raise: the other sections still tell something
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = (str(error).splitlines() or [""])[0]
            place = f"{Path(where.filename).name}:{where.lineno}"
            self._result["failed"][name] = f"{type(error).__name__}: {reason} ({place})"
            found = None
        if isinstance(found, dict):
            self._result[name] = found | {"section_seconds": time.perf_counter() - began}
        print(f"{time.perf_counter() - began:6.1f} s  {name}", flush=True)
        return found


def _family(run: Sections, size: Size) -> None:
    """All that is measured with one shape; its memory is given back at the end."""
    run(f"{size.name} attention", "passes", attention, size)
    loaded: Loaded | None = run(f"{size.name} load", "load", load, size)
    if loaded is not None:
        for kind, section in (
            ("passes", passes),
            ("rounds", rounds),
            ("equality", equality),
            ("adaptation", adaptation),
        ):
            run(f"{size.name} {kind}", kind, section, loaded)
        run(f"{size.name} prepared", "load", prepared, loaded)
        family = loaded.family
        del loaded
        gc.collect()
        run(f"{size.name} batches", "batches", batches, family)
        del family
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _show(result: Mapping[str, Any]) -> None:
    """The table."""
    print(f"\n{result['device']}, torch {result['torch']}, {result['dtype']}, graphs: {result['graphs']}")
    for name, found in result.items():
        if isinstance(found, dict) and name != "failed":
            print(f"\n{name}")
            for key, value in found.items():
                print(f"  {key:<28} {_cell(value)}")
    for name, reason in result["failed"].items():
        print(f"\nFAILED {name}: {reason}")
    if result["skipped"]:
        print(f"\nno time for: {', '.join(result['skipped'])}")
    print()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "  ".join(f"{key} {_cell(each)}" for key, each in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
