"""The scenarios of the tournament: each draws, from a seed, a world, a space of plans and what is believed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from adaspec.bench import simulators
from adaspec.bench.simulators import Chances, Regime
from adaspec.bench.traces import Trace
from adaspec.bench.worlds import Speed, World, replayed
from adaspec.plan import PlanSpace
from adaspec.theory import Edge

POSITIONS = 6000  # tokens of a text; a thousand rounds seldom need more
DATA = Path(__file__).parent / "data"
CHANCES: Mapping[str, Chances] = {
    "good": simulators.GOOD,
    "hopeless": simulators.HOPELESS,
    "chain": simulators.CHAIN,
    "falling": {edge: [min(a + 0.15, 0.97) * 0.8**k for k in range(8)] for edge, a in simulators.GOOD.items()},
    "other": simulators.chances(0.30, 0.60, 0.75, 0.15, 0.50, 0.80, 0.20, 0.50, 0.20),
    "quoting": simulators.chances(0.75, 0.85, 0.60, 0.90, 0.70, 0.60, 0.90, 0.70, 0.90),
    "broken": simulators.GOOD | {edge: 0.0 for edge in simulators.EDGES if "d" in edge},
}
SPEEDS: Mapping[str, Mapping[str, Speed]] = {
    "usual": simulators.SPEEDS,
    "chain": simulators.CHAIN_SPEEDS,
    "loaded": {
        "t": Speed.line(0.030, 0.0001, knee=32, steep=0.001),
        "d": Speed.line(0.004, 0.0000, knee=64, steep=0.0001),
        "e": Speed.line(0.002, 0.0000, knee=64, steep=0.0001),
        "m": Speed.line(0.010, 0.0001, knee=32, steep=0.0005),
        "l": Speed.line(3e-5, 0.0),
    },
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A world, the plans to choose from, the acceptance believed beforehand, and factors on the start-up profile."""

    world: World
    space: PlanSpace
    acceptance: Mapping[Edge, float] = field(default_factory=dict)
    profile_scale: Mapping[str, float] = field(default_factory=dict)


def steady(
    seed: int,
    plans: int,
    chances: str = "good",
    speeds: str = "usual",
    noise: float = 0.05,
    outliers: float = 0.02,
    dependence: float = 0.0,
) -> Setting:
    """Nothing changes."""
    regime = Regime(POSITIONS, CHANCES[chances], dependence=dependence)
    made = simulators.world([regime], seed, SPEEDS[speeds], noise, outliers)
    return Setting(made, simulators.space(plans))


def misled(seed: int, plans: int, acceptance_off: float, times_off: float, chances: str = "good") -> Setting:
    """A steady world of which everything believed is wrong: acceptances by a difference, seconds by a factor."""
    rng = np.random.default_rng(seed)
    base = steady(seed, plans, chances)
    wrong = {
        edge: float(np.clip(a + acceptance_off * rng.choice((-1, 1)), 0.02, 0.98))
        for edge, a in CHANCES[chances].items()
        if isinstance(a, float)
    }
    scale = {model: float(times_off ** rng.choice((-1, 1))) for model in base.world.speeds}
    return Setting(base.world, base.space, wrong, scale)


def changing(
    seed: int, plans: int, chances: Sequence[str], tokens: int, speeds: str = "usual", tagged: bool = False
) -> Setting:
    """Regimes that take turns, each for so many tokens."""
    turns = [chances[turn % len(chances)] for turn in range(max(POSITIONS // tokens, 1))]
    regimes = [Regime(tokens, CHANCES[name], tag=name) for name in turns]
    return Setting(simulators.world(regimes, seed, SPEEDS[speeds], tagged=tagged), simulators.space(plans))


def loaded(seed: int, rows: Sequence[int], tokens_per_row: int, windows: Sequence[int]) -> Setting:
    """Load that comes and goes: the batch size changes, and with it what a window costs."""
    turns = [rows[turn % len(rows)] for turn in range(12)]
    regimes = [Regime(tokens_per_row * count, CHANCES["good"], rows=count) for count in turns]
    made = simulators.world(regimes, seed, SPEEDS["loaded"])
    return Setting(made, PlanSpace.grid("t", ["d", "e", "l"], list(windows)))


def breaking(seed: int, plans: int, healthy: int, slower: float) -> Setting:
    """After so many tokens the best drafter is never right any more, and slower."""
    regimes = [
        Regime(healthy, CHANCES["good"]),
        Regime(POSITIONS - healthy, CHANCES["broken"], slower={"d": slower}),
    ]
    return Setting(simulators.world(regimes, seed), simulators.space(plans))


def appearing(seed: int, plans: int, without: int) -> Setting:
    """The best drafter is silent for so many tokens, then there."""
    regimes = [
        Regime(without, CHANCES["broken"], silent=frozenset({"d"})),
        Regime(POSITIONS - without, CHANCES["good"]),
    ]
    return Setting(simulators.world(regimes, seed), simulators.space(plans))


def find(trace: str) -> Path:
    """The file of a trace, given as a path or as the name of one that comes with the package.

    Raises:
        FileNotFoundError: neither is there.
    """
    for path in (Path(trace), DATA / f"{trace}.npz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no trace {trace!r}; python -m adaspec.bench.record makes one")


def traced(
    seed: int,
    trace: str,
    kinds: Sequence[str],
    drafters: Sequence[str],
    middles: Sequence[str],
    windows: Sequence[int],
    block: int = 4,
    tagged: bool = False,
) -> Setting:
    """Texts of a recorded trace in a random order, ``block`` of one kind before the next.

    Args:
        seed: of the order.
        trace: a file, or the name of one that comes with the package.
        kinds: kinds of prompts, taken in turn.
        drafters: of the space, the one that rules for one window use first.
        middles: of the space.
        windows: of the space, at every stage.
        block: texts of one kind in a row.
        tagged: whether the controller is told the kind.

    Raises:
        ValueError: a kind that the trace has no text of, or what the trace does not hold.
        FileNotFoundError: no such trace.
    """
    found = Trace.load(find(trace))
    rng, order, total = np.random.default_rng(seed), list[int](), 0
    texts = {kind: [index for index, own in enumerate(found.kinds) if own == kind] for kind in kinds}
    for kind, own in texts.items():
        if not own:
            raise ValueError(f"{trace} has no text of kind {kind!r}; it has {', '.join(sorted(set(found.kinds)))}")
    turns = list(rng.permutation(list(kinds)))
    while total < POSITIONS:
        kind = turns[len(order) // block % len(turns)]
        order.append(int(rng.choice(texts[kind])))
        total += int(found.lengths[order[-1]])
    made = replayed(found, order, seed, tagged)
    chains = PlanSpace.grid(found.target, drafters, windows, middles=middles)
    return Setting(made, chains)
