"""What guard and telemetry add to a round: microseconds of CPU time, and their share of a round.

python -m adaspec.bench.telemetry
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from adaspec.bench.overhead import SECONDS, play, space_of
from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.guard import Guard, Note
from adaspec.outcome import Decision, Pass, RoundOutcome
from adaspec.plan import Context, Override
from adaspec.telemetry import Telemetry


def main() -> int:
    """Prints a line per layer, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4096)
    parser.add_argument("--round-ms", type=float, default=20.0, help="of a round that this is a share of")
    arguments = parser.parse_args()
    found = measure(arguments.plans, arguments.rounds)
    for layer, microseconds in found.items():
        share = microseconds / (1e3 * arguments.round_ms)
        print(f"{layer:>10} {microseconds:8.1f} us per round, {share:.3%} of {arguments.round_ms:g} ms")
    print(json.dumps({"plans": arguments.plans, "rounds": arguments.rounds, "microseconds": found}))
    return 0


def measure(plans: int, rounds: int, seed: int = 0) -> dict[str, float]:
    """Mean microseconds per round of each layer, all in one run: what a layer calls beneath it is not its own."""
    space, rng = space_of(plans), np.random.default_rng(seed)
    controller = _TimedController(space, costs=CostModel(space, one_pass=("lookup",)), seed=seed)
    controller.profile(Pass(name, q, 1, 32, SECONDS[name]) for name in space.models for q in (1, 3, 5, 9))
    telemetry = _TimedTelemetry()
    guard, spent = Guard(controller, listener=telemetry), 0.0
    for number in range(rounds):
        began = time.thread_time()
        decision = guard.choose(Context(1, 64 + number % 64))
        spent += time.thread_time() - began
        outcome = play(decision.plan, rng)
        began = time.thread_time()
        guard.observe(decision, outcome)
        spent += time.thread_time() - began
    seconds = {
        "controller": controller.spent,
        "guard": spent - controller.spent - telemetry.spent,
        "telemetry": telemetry.spent,
    }
    return {layer: round(1e6 * each / rounds, 1) for layer, each in seconds.items()}


class _TimedController(Controller):
    spent = 0.0

    def choose(self, context: Context, override: Override | None = None) -> Decision:
        began = time.thread_time()
        decision = super().choose(context, override)
        self.spent += time.thread_time() - began
        return decision

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        began = time.thread_time()
        super().observe(decision, outcome)
        self.spent += time.thread_time() - began


class _TimedTelemetry(Telemetry):
    spent = 0.0

    def round(self, decision: Decision, outcome: RoundOutcome, note: Note) -> None:
        began = time.thread_time()
        super().round(decision, outcome, note)
        self.spent += time.thread_time() - began


if __name__ == "__main__":
    raise SystemExit(main())
