"""Made-up worlds, for what traces cannot give: changes, load, dependence, noise, 500 plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtr

from adaspec.bench.traces import LONGEST, Ints, runs
from adaspec.bench.worlds import Segment, Speed, World, sequences
from adaspec.plan import PlanSpace
from adaspec.theory import Edge, Floats

Chances = Mapping[Edge, float | Sequence[float]]
"""Per (verifier, drafter) the chance of acceptance, or one per position of the window (the last one goes on)."""

SEQUENCE, PROMPT = 256, 32  # tokens of one sequence, and of its prompt
EDGES: tuple[Edge, ...] = (
    *(("t", drafter) for drafter in "dmel"),
    *(("m", drafter) for drafter in "del"),
    *(("d", drafter) for drafter in "el"),
)


def chances(*values: float) -> dict[Edge, float]:
    """The chances of the pairs t/d, t/m, t/e, t/l, m/d, m/e, m/l, d/e, d/l."""
    return dict(zip(EDGES, values, strict=True))


GOOD = chances(0.75, 0.85, 0.60, 0.15, 0.70, 0.60, 0.20, 0.70, 0.20)
HOPELESS = dict.fromkeys(EDGES, 0.05)
CHAIN = chances(0.55, 0.92, 0.45, 0.15, 0.75, 0.60, 0.20, 0.65, 0.20)
SPEEDS = {
    "t": Speed.line(0.178, 0.010),
    "m": Speed.line(0.100, 0.002),
    "d": Speed.line(0.030, 0.001),
    "e": Speed.line(0.015, 0.001),
    "l": Speed.line(3e-5, 0.0),
}
CHAIN_SPEEDS = SPEEDS | {"t": Speed.line(0.400, 0.005), "m": Speed.line(0.060, 0.002), "d": Speed.line(0.020, 0.001)}


@dataclass(frozen=True, slots=True)
class Regime:
    """A stretch of text of one character: its tokens, chances, rows and factors on seconds.

    ``silent``: drafters that propose nothing. ``dependence``: correlation of what is hard for one pair and for
    another, from token to token (0: every pair has its own luck).
    """

    tokens: int
    chances: Chances
    tag: str = ""
    rows: int = 1
    slower: Mapping[str, float] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    dependence: float = 0.0


def space(plans: int) -> PlanSpace:
    """The first so many plans of target t, middles m and d, drafters d, e and l: pairs first, then chains.

    Raises:
        ValueError: more plans than there are.
    """
    if plans <= 5:
        return PlanSpace.grid("t", ["d"], [1, 2, 4, 8][: plans - 1])
    windows = [2, 3, 4, 5, 6, 8] if plans <= 50 else list(range(1, 10 if plans <= 139 else 17))
    whole = PlanSpace.grid("t", ["d", "e", "l"], windows, middles=["m", "d"])
    if plans > len(whole):
        raise ValueError(f"a simulated space has at most {len(whole)} plans, got {plans}")
    return PlanSpace(whole[:plans])


def world(
    regimes: Sequence[Regime],
    seed: int,
    speeds: Mapping[str, Speed] = SPEEDS,
    noise: float = 0.05,
    outliers: float = 0.02,
    tagged: bool = False,
) -> World:
    """Draws a text that goes through the regimes one after the other."""
    rng = np.random.default_rng(seed)
    lengths = [_cut(regime) for regime in regimes]
    drawn = [_draw(regime, own, rng) for regime, own in zip(regimes, lengths)]
    pairs = {edge: _joined([each[edge] for each in drawn]) for edge in regimes[0].chances}
    flat = [length for own in lengths for length in own]
    left, seq_len = sequences(flat, [PROMPT] * len(flat))
    stops = np.cumsum([regime.tokens for regime in regimes]).tolist()
    segments = tuple(
        Segment(stop - one.tokens, stop, one.tag, one.rows, one.slower) for stop, one in zip(stops, regimes)
    )
    return World("t", pairs, speeds, frozenset({"l"}), left, seq_len, segments, noise, outliers, tagged)


def _cut(regime: Regime) -> list[int]:
    """Lengths of the sequences of a regime; several rows read one long text in turn."""
    if regime.rows > 1:
        return [regime.tokens]
    whole, rest = divmod(regime.tokens, SEQUENCE)
    return [SEQUENCE] * whole + ([rest] if rest else [])


def _draw(regime: Regime, lengths: list[int], rng: np.random.Generator) -> dict[Edge, tuple[Ints, Ints]]:
    shared = rng.standard_normal(regime.tokens)
    found = {}
    for edge, chance in regime.chances.items():
        own = rng.standard_normal(regime.tokens)
        luck = ndtr(np.sqrt(regime.dependence) * shared + np.sqrt(1.0 - regime.dependence) * own)
        if isinstance(chance, float):
            accepted = runs(luck < chance, np.array(lengths))
        else:
            accepted = _by_position(np.array(chance), regime.tokens, rng)
        offered = np.full(regime.tokens, 0 if edge[1] in regime.silent else LONGEST)
        found[edge] = (offered, np.minimum(accepted, offered))
    return found


def _by_position(chances: Floats, tokens: int, rng: np.random.Generator) -> Ints:
    """Accepted lengths when the chance depends on the position in the window; drawn anew at every position."""
    steps = chances[np.minimum(np.arange(LONGEST), len(chances) - 1)]
    accepted: Ints = np.cumprod(rng.random((tokens, LONGEST)) < steps, axis=1).sum(axis=1)
    return accepted


def _joined(parts: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    offered, accepted = (np.concatenate(column) for column in zip(*parts))
    return offered, accepted
