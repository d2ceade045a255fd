"""What a decision costs: microseconds of choose + observe per round, at several sizes of the plan space.

python -m adaspec.bench.overhead
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import count

import numpy as np
from numpy.typing import NDArray

from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.outcome import EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context, Plan, PlanSpace

SECONDS = {"target": 0.2, "mid": 0.05, "draft": 0.02, "lookup": 3e-5}
ACCEPTANCE = {"mid": 0.85, "draft": 0.7, "lookup": 0.3}
BLOCK = 32  # rounds that are timed together, so that a ranking is spread over the rounds it serves


def main() -> int:
    """Prints a line per size of the space, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, nargs="+", default=[5, 50, 150, 500])
    parser.add_argument("--rounds", type=int, default=1024, help="per size; the first tenth is not counted")
    arguments = parser.parse_args()
    found = {size: measure(size, arguments.rounds) for size in arguments.plans}
    print(f"{'plans':>6} {'us per round':>13} {'of the CPU':>11} {'slowest tenth of blocks':>24}")
    for size, (wall, cpu, slow) in found.items():
        print(f"{size:6d} {wall:13.1f} {cpu:11.1f} {slow:24.1f}")
    columns = zip(("microseconds", "cpu_microseconds"), zip(*((wall, cpu) for wall, cpu, _ in found.values())))
    medians = {name: dict(zip(map(str, found), values)) for name, values in columns}
    print(json.dumps({"rounds": arguments.rounds, "block": BLOCK, **medians}))
    return 0


def measure(size: int, rounds: int, seed: int = 0) -> tuple[float, float, float]:
    """Microseconds of choose + observe per round at ``size`` plans, as means over blocks.

    Returns:
        The median block by the wall clock and by this thread's CPU time (less what others on the machine take), and
        the 90th percentile by the wall clock.
    """
    space, rng = space_of(size), np.random.default_rng(seed)
    controller = Controller(space, costs=CostModel(space, one_pass=("lookup",)), seed=seed)
    controller.profile(Pass(name, q, 1, 32, SECONDS[name]) for name in space.models for q in (1, 3, 5, 9))
    blocks = []
    for _ in range(max(rounds // BLOCK, 1)):
        spent = np.zeros(2)
        for number in range(BLOCK):
            began = _now()
            decision = controller.choose(Context(1, 64 + number))
            spent += _now() - began
            outcome = play(decision.plan, rng)
            began = _now()
            controller.observe(decision, outcome)
            spent += _now() - began
        blocks.append(1e6 * spent / BLOCK)
    wall, cpu = np.array(blocks[len(blocks) // 10 :]).T
    return statistics.median(wall.tolist()), statistics.median(cpu.tolist()), float(np.quantile(wall, 0.9))


def _now() -> NDArray[np.float64]:
    """Wall clock and CPU time of this thread, in seconds."""
    return np.array((time.perf_counter(), time.thread_time()))


def space_of(size: int) -> PlanSpace:
    """``size`` plans of depth 1 to 3, spread evenly over the smallest grid that has as many.

    Raises:
        ValueError: a size below 2.
    """
    if size < 2:
        raise ValueError(f"a space to choose from has at least 2 plans, got {size}")
    grids = (
        PlanSpace.grid("target", ["draft", "lookup", "mid"], range(1, longest + 1), middles=["mid", "draft"])
        for longest in count(1)
    )
    grid = next(grid for grid in grids if len(grid) >= size)
    step = max((len(grid) - 1) / (size - 1), 1.0)
    return PlanSpace([grid.plain, *(grid[1 + int(step * n)] for n in range(size - 1))])


def play(plan: Plan, rng: np.random.Generator) -> RoundOutcome:
    """A made-up round of a plan: its passes with 5 % noise, its counts by chance."""
    passes: list[Pass] = []
    edges: dict[tuple[str, str], list[list[int]]] = {}

    def forward(model: str, query_len: int) -> None:
        passes.append(Pass(model, query_len, 1, 64, SECONDS[model] * float(np.exp(0.05 * rng.standard_normal()))))

    def fill(stage: int, need: int) -> None:
        if stage == plan.depth - 1:
            for _ in range(1 if plan.models[-1] == "lookup" else need):
                forward(plan.models[-1], 1)
            return
        while need > 0:
            need -= verify(stage, min(plan.windows[stage], need - 1))

    def verify(stage: int, window: int) -> int:
        if window:
            fill(stage + 1, window)
        forward(plan.models[stage], window + 1)
        verifier, drafter, longest = list(plan.edges())[stage]
        reached, accepted = edges.setdefault((verifier, drafter), [[0] * longest, [0] * longest])
        for position in range(window):
            reached[position] += 1
            if rng.random() >= ACCEPTANCE[drafter]:
                return position + 1
            accepted[position] += 1
        return window + 1

    if plan.depth == 1:
        forward(plan.target, 1)
        return RoundOutcome(1, passes[0].seconds, passes=tuple(passes))
    tokens = verify(0, plan.windows[0])
    counts = tuple(EdgeOutcome(*pair, tuple(r), tuple(r), tuple(a)) for pair, (r, a) in edges.items())
    return RoundOutcome(tokens, sum(one.seconds for one in passes), edges=counts, passes=tuple(passes))


if __name__ == "__main__":
    raise SystemExit(main())
