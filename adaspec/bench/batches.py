"""Throughput by batch size with ragged acceptance, and the windows that a controller chooses as a batch grows.

python -m adaspec.bench.batches --device cpu --tiny
python -m adaspec.bench.batches

Every batch size has rows of their own text, which accept different counts in the same round. Per batch size: tokens/s
of each fixed plan, the best of them, and the mean window over the last half of what a controller played. Prints a table
and, as its last line, one JSON object. Random weights in a real shape, see ``device_models``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from adaspec.bench.device_models import REAL, TINY, Family, build
from adaspec.bench.device_sections import FREE, SMALL, Bench, Scale, play
from adaspec.compare import Pinned
from adaspec.controller import Controller
from adaspec.decoding.chain import Chain
from adaspec.decoding.graphs import GraphModel
from adaspec.decoding.sampling import SamplingParams
from adaspec.outcome import Pass
from adaspec.plan import Plan, PlanSpace

SIZES = (1, 4, 16)
SPACE = PlanSpace(Plan(("target", "draft"), (window,)) for window in (1, 2, 4, 8))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    arguments = parser.parse_args(argv)
    bench = Bench.on(arguments.device, SMALL if arguments.tiny else Scale())
    family = build((TINY if arguments.tiny else REAL)[0], bench.device, bench.dtype)
    result = batches(bench, family)
    for name, found in result.items():
        print(name, json.dumps(found))
    print(json.dumps({"device": arguments.device, **result}))
    return 0


def batches(bench: Bench, family: Family, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Tokens/s by batch size and plan, and what one controller plays at each size."""
    models = {name: GraphModel(name, getattr(family, name), bench.capture) for name in ("target", "draft")}
    chain = Chain(models["target"], {"draft": models["draft"]}, capacity=bench.scale.capacity, clock=bench.clock())
    chain.prepare(SPACE)
    chain.prepare_passes(SPACE.shapes(), sizes)
    controller = Controller(SPACE, seed=0)
    controller.profile(profile(chain, sizes))
    found: dict[str, Any] = {}
    for rows in sizes:
        fixed = {str(plan): play(chain, Pinned(plan), FREE, rows, bench.scale.tokens).rate for plan in SPACE}
        played: list[Plan] = []
        while len(played) < bench.scale.rounds // len(sizes) and (not played or time.perf_counter() < bench.until):
            turn = SamplingParams(temperature=1.0, seed=len(played) * rows)
            played += play(chain, controller, turn, rows, bench.scale.tokens).plans
        found[f"batch {rows}"] = {
            "tokens_per_second": fixed,
            "best": max(fixed, key=fixed.__getitem__),
            "mean_window": mean_window(played[len(played) // 2 :]),
        }
    return found


def profile(chain: Chain, sizes: Sequence[int]) -> list[Pass]:
    """The passes that the plans can ask for, timed at every batch size."""
    return [one for rows in sizes for one in chain.profile(SPACE.shapes(), batch_size=rows)]


def mean_window(plans: Sequence[Plan]) -> float:
    """Mean outermost window, 0 for plain decoding."""
    return sum(max(plan.windows[:1], default=0) for plan in plans) / len(plans)


if __name__ == "__main__":
    sys.exit(main())
