"""What guard and telemetry add to a round: microseconds on top of the controller's own, and as a share of a round.

python -m adaspec.bench.telemetry
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from adaspec.bench.overhead import SECONDS, play, space_of
from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.guard import Guard
from adaspec.outcome import Pass
from adaspec.plan import Context
from adaspec.telemetry import Telemetry

BLOCK = 64  # rounds that are timed together: metrics take in as many at once


def main() -> int:
    """Prints a line per layer, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2048)
    parser.add_argument("--round-ms", type=float, default=20.0, help="of a round that this is a share of")
    arguments = parser.parse_args()
    bare = measure(arguments.plans, arguments.rounds, "controller")
    found = {"controller": bare} | {
        layer: measure(arguments.plans, arguments.rounds, layer) - bare for layer in ("guard", "guard and telemetry")
    }
    for layer, microseconds in found.items():
        share = microseconds / (1e3 * arguments.round_ms)
        print(f"{layer:>20} {microseconds:8.1f} us per round, {share:.3%} of {arguments.round_ms:g} ms")
    print(json.dumps({"plans": arguments.plans, "rounds": arguments.rounds, "microseconds": found}))
    return 0


def measure(plans: int, rounds: int, layer: str, seed: int = 0) -> float:
    """Median over blocks of the mean microseconds of choose + observe."""
    space, rng = space_of(plans), np.random.default_rng(seed)
    controller = Controller(space, costs=CostModel(space, one_pass=("lookup",)), seed=seed)
    controller.profile(Pass(name, q, 1, 32, SECONDS[name]) for name in space.models for q in (1, 3, 5, 9))
    listener = Telemetry() if "telemetry" in layer else None
    chooser = controller if layer == "controller" else Guard(controller, listener=listener)
    blocks = []
    for _ in range(max(rounds // BLOCK, 1)):
        spent = 0.0
        for number in range(BLOCK):
            began = time.perf_counter()
            decision = chooser.choose(Context(1, 64 + number))
            spent += time.perf_counter() - began
            outcome = play(decision.plan, rng)
            began = time.perf_counter()
            chooser.observe(decision, outcome)
            spent += time.perf_counter() - began
        blocks.append(1e6 * spent / BLOCK)
    return statistics.median(blocks[len(blocks) // 10 :])


if __name__ == "__main__":
    raise SystemExit(main())
