"""Pure mathematics of speculative chains: accepted length, passes, the forecast of a round, the paper's formulas.

A *hazard* is the chance that position k of a window is accepted, given that it was reached: ``hazards[k]``, k from 0.
Beyond the end of an array its last value holds (geometric extrapolation). The *accepted length* of a verification
counts the token that the verifier adds itself (correction or bonus), so it is at least 1.

A drafter may be silent or stop before its window is full. ``drafted[k]`` is the chance that a draft which was asked for
position k holds a token there; where it holds none the position counts as not accepted, so hazards include silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from adaspec.plan import Plan

Floats: TypeAlias = NDArray[np.float64]
Edge: TypeAlias = tuple[str, str]
Seconds: TypeAlias = Callable[[str, int], float]


def survival(hazards: ArrayLike, window: int) -> Floats:
    """P(at least k tokens accepted) for k = 0 .. window; shape [window + 1].

    Raises:
        ValueError: no hazard for a window above 0, a hazard outside [0, 1], or a negative window.
    """
    given = np.asarray(hazards, dtype=np.float64).reshape(-1)
    if window < 0:
        raise ValueError(f"a window is not negative, got {window}")
    if window and not given.size:
        raise ValueError(f"a window of {window} needs at least one hazard, got none")
    if not np.all((given >= 0.0) & (given <= 1.0)):
        raise ValueError(f"a hazard is a probability, got {given.tolist()}")
    steps = given[np.minimum(np.arange(window), given.size - 1)] if window else given[:0]
    return np.concatenate(([1.0], np.cumprod(steps)))


def accepted_distribution(hazards: ArrayLike, window: int) -> Floats:
    """P(exactly k of ``window`` drafted tokens are accepted) for k = 0 .. window; shape [window + 1]."""
    alive = survival(hazards, window)
    stops: Floats = alive - np.append(alive[1:], 0.0)
    return stops


def accepted_length(hazards: ArrayLike, window: int | None = None) -> float:
    """Expected tokens per verification, the verifier's own token included; the window defaults to ``len(hazards)``.

    For a constant hazard a this is (1 - a^(window+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    return float(survival(hazards, np.size(hazards) if window is None else window).sum())


def accepted_variance(hazards: ArrayLike, window: int | None = None) -> float:
    """Variance of the tokens per verification; the window defaults to ``len(hazards)``.

    With S_k = P(at least k accepted) the second moment of a count is sum_k (2k - 1) S_k.
    """
    alive = survival(hazards, np.size(hazards) if window is None else window)[1:]
    second = float((2.0 * np.arange(alive.size) + 1.0) @ alive)
    return max(second - float(alive.sum()) ** 2, 0.0)


def expected_passes(need: int, window: int, hazards: ArrayLike, *, cut: bool = True) -> float:
    """Expected verifications until a stage has emitted ``need`` tokens: R(n) = 1 + sum_k P(k) R(n - k - 1).

    ``cut``: with n tokens to go a block holds min(window, n - 1) tokens, so that nothing overshoots; otherwise
    always ``window`` tokens. The recursion is the same, since a cut block differs only where R is 0 anyway.
    """
    chain = Plan(("above", "stage", "drafter"), (max(need, 1), window))
    block = _Renewal(chain, {("stage", "drafter"): hazards}, frozenset(), cut, {}).fill(1, need)
    return sum(count for (model, _), count in block.passes.items() if model == "stage")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one round of a plan is expected to bring, per row.

    ``tokens``: committed; ``seconds``: the whole round; ``passes``: expected forwards per (model, query length).
    """

    tokens: float
    seconds: float
    passes: Mapping[tuple[str, int], float]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def passes_of(self, model: str) -> float:
        """Expected forwards of ``model``, over all query lengths."""
        return sum(count for (name, _), count in self.passes.items() if name == model)


def forecast(
    plan: Plan,
    hazards: Mapping[Edge, ArrayLike],
    seconds: Seconds,
    cut: bool = True,
    one_pass: Collection[str] = (),
    drafted: Mapping[Edge, ArrayLike] | None = None,
) -> Forecast:
    """The exact forecast of one round under independent acceptance, for any depth.

    A stage that must hand over n tokens repeats draft - verify until it has them; every verification drafts its
    whole window anew. The law that a stage emits is its model's own, so an edge has one acceptance whatever drafts
    beneath it. Expected seconds are linear in the expected passes, which follow the renewal recursion of the design.

    Args:
        plan: the chain.
        hazards: per (verifier, drafter), the acceptance per position.
        seconds: (model, query length) -> seconds of one forward.
        cut: True, as our decoder does: with n tokens to go a stage drafts min(window, n - 1) tokens (n = 1 is a plain
            pass over one position) and hands over exactly what was asked for. False: blocks keep their size and are
            shipped whole once the window above is reached, so that stage above verifies more than its window.
        one_pass: drafters that propose a whole window in one pass (prompt lookup).
        drafted: per pair of a chain's last two models, the chance that a draft holds each position; a pair that is
            missing always fills its window. A drafter takes a pass per token it drafts, and the verifier's pass is over
            what was drafted and one more, so the round's seconds follow the law of the draft's length.

    Raises:
        ValueError: an edge of the plan without hazards, hazards that are no probabilities, or a ``drafted`` that is
            none or rises.
    """
    for verifier, drafter, _ in plan.edges():
        if (verifier, drafter) not in hazards:
            raise ValueError(f"plan {plan} needs the acceptance of {verifier}/{drafter}, which is missing")
    tokens, passes = _Renewal(plan, hazards, frozenset(one_pass), cut, drafted or {}).round()
    spent = sum(count * seconds(model, query_len) for (model, query_len), count in passes.items())
    return Forecast(tokens, float(spent), passes)


@dataclass(frozen=True, slots=True)
class _Block:
    """What a drafter or stage hands over: P(length), and the expected passes spent on it."""

    lengths: Mapping[int, float]
    passes: Mapping[tuple[str, int], float]


class _Renewal:
    """The recursion behind ``forecast``: follows the expected number of visits to "n tokens to go", stage by stage."""

    def __init__(
        self,
        plan: Plan,
        hazards: Mapping[Edge, ArrayLike],
        one_pass: frozenset[str],
        cut: bool,
        drafted: Mapping[Edge, ArrayLike],
    ) -> None:
        self._plan, self._hazards, self._one_pass, self._cut = plan, hazards, one_pass, cut
        self._drafted = drafted
        self._edges = [(verifier, drafter) for verifier, drafter, _ in plan.edges()]
        self._blocks: dict[tuple[int, int], _Block] = {}

    def round(self) -> tuple[float, dict[tuple[str, int], float]]:
        """Expected (tokens, passes) of one verification by the target."""
        passes: dict[tuple[str, int], float] = defaultdict(float)
        window = self._plan.windows[0] if self._plan.windows else 0
        emitted = self._verify(0, window, 1.0, passes)
        return sum(count * chance for count, chance in emitted.items()), dict(passes)

    def fill(self, stage: int, need: int) -> _Block:
        """Tokens and passes of ``models[stage]`` when ``need`` tokens are asked for."""
        key = (stage, need)
        if key not in self._blocks:
            drafter = stage == self._plan.depth - 1
            self._blocks[key] = self._draft(need) if drafter else self._verify_until(stage, need)
        return self._blocks[key]

    def _draft(self, need: int) -> _Block:
        model, alive = self._plan.models[-1], _draft_survival(self._drafted.get(self._edges[-1], 1.0), need)
        lengths = (alive - np.append(alive[1:], 0.0)).tolist()
        passes = 1.0 if model in self._one_pass else float(alive[1:].sum())
        return _Block({length: chance for length, chance in enumerate(lengths) if chance}, {(model, 1): passes})

    def _verify_until(self, stage: int, need: int) -> _Block:
        visits = dict.fromkeys(range(need, 0, -1), 0.0) | {need: 1.0}
        lengths: dict[int, float] = defaultdict(float)
        passes: dict[tuple[str, int], float] = defaultdict(float)
        for left in range(need, 0, -1):
            window = min(self._plan.windows[stage], left - 1) if self._cut else self._plan.windows[stage]
            for count, mass in self._verify(stage, window, visits[left], passes).items():
                if count < left:
                    visits[left - count] += mass
                else:
                    lengths[need - left + count] += mass
        return _Block(dict(lengths), dict(passes))

    def _verify(self, stage: int, window: int, mass: float, passes: dict[tuple[str, int], float]) -> dict[int, float]:
        """One verification, weighted by ``mass``: adds its passes, returns the mass per number of emitted tokens."""
        model = self._plan.models[stage]
        if window == 0:
            passes[model, 1] += mass
            return {1: mass}
        block = self.fill(stage + 1, window)
        for key, count in block.passes.items():
            passes[key] += mass * count
        emitted: dict[int, float] = defaultdict(float)
        hazards = self._hazards[self._edges[stage]]
        for length, chance in block.lengths.items():
            passes[model, length + 1] += mass * chance
        bare = stage + 2 == self._plan.depth  # a short draft is in the hazards; a stage hands over all it was asked for
        for length, chance in ({window: 1.0} if bare else block.lengths).items():
            for accepted, share in enumerate(accepted_distribution(hazards, length).tolist()):
                emitted[accepted + 1] += mass * chance * share
        return emitted


def _draft_survival(drafted: ArrayLike, window: int) -> Floats:
    """P(a draft of up to ``window`` tokens has at least k) for k = 0 .. window; the last value given holds on."""
    given = np.asarray(drafted, dtype=np.float64).reshape(-1)
    if not (given.size and np.all((given >= 0.0) & (given <= 1.0)) and np.all(given[1:] <= given[:-1])):
        raise ValueError(f"drafted is one probability per position, none above that before it, got {given.tolist()}")
    return np.concatenate(([1.0], given[np.minimum(np.arange(window), given.size - 1)]))


def polybasic_seconds(tokens: float, lengths: Sequence[float], seconds: Sequence[float], beta: float) -> float:
    """The paper's inference time, T = sum_{i<n} (N / L_i) T_i + beta (N / L_{n-1}) T_n (arXiv 2510.26527).

    With L_i in *final* tokens per pass of model i this is an identity. With L_i = tokens that model i emits itself it
    ignores what a higher stage rejects later and is optimistic.

    Args:
        tokens: N, the final tokens.
        lengths: L_1 .. L_{n-1}.
        seconds: T_1 .. T_n, of one pass.
        beta: passes of the drafter per verification of model n - 1.

    Raises:
        ValueError: not exactly one more model than lengths, or no length.
    """
    if not lengths or len(seconds) != len(lengths) + 1:
        raise ValueError(f"n models have n - 1 >= 1 lengths, got {len(seconds)} times and {len(lengths)} lengths")
    verifying = sum(tokens / length * spent for length, spent in zip(lengths, seconds))
    return verifying + beta * tokens / lengths[-1] * seconds[-1]


def insertion_pays_published(new_seconds: float, upper_seconds: float, new: float, before: float, after: float) -> bool:
    """The paper's test for a model between M_i and M_{i+1}: T_new / T_i < L_new (1 / L_i - 1 / L_{i,new}).

    ``new``, ``before``, ``after``: L_new, L_i without and L_{i,new} with the new model. Silent on what happens to the
    drafter's own share; see ``insertion_pays``.
    """
    return new_seconds / upper_seconds < new * (1.0 / before - 1.0 / after)


def insertion_pays(
    new_seconds: float,
    upper_seconds: float,
    drafter_seconds: float,
    new: float,
    before: float,
    after: float,
    beta_before: float,
    beta_after: float,
) -> bool:
    """The exact test for a model between M_i and the drafter, all L in final tokens per pass.

    T_new < L_new [T_i (1/L_i - 1/L_{i,new}) + T_n (beta/L_i - beta'/L_new)]: equivalent to a smaller total time by
    ``polybasic_seconds``. ``beta_*``: drafter passes per verification of the model right above the drafter.
    """
    saved = upper_seconds * (1.0 / before - 1.0 / after)
    saved += drafter_seconds * (beta_before / before - beta_after / new)
    return new_seconds < new * saved


@dataclass(frozen=True, slots=True)
class Insertion:
    """What one more model does to a chain. ``before``, ``after``: the forecasts without and with it.

    ``published``: what the paper's test says; None for a new last model, which verifies nothing and so has no L_new.
    """

    before: Forecast
    after: Forecast
    published: bool | None

    @property
    def gain(self) -> float:
        """Factor on the tokens per second; above 1 the model pays."""
        return self.after.rate / self.before.rate

    @property
    def pays(self) -> bool:
        return self.gain > 1.0


def insertion_gain(
    before: Plan,
    after: Plan,
    hazards: Mapping[Edge, ArrayLike],
    seconds: Seconds,
    cut: bool = True,
    one_pass: Collection[str] = (),
    drafted: Mapping[Edge, ArrayLike] | None = None,
) -> Insertion:
    """Whether one more model in a chain pays, and by how much: exactly, and by the published test beside it.

    The gain compares two forecasts, so windows may change together with the model. The published test reads L as the
    paper does, as tokens per pass of the model itself, and takes each pass over its whole window.

    Raises:
        ValueError: ``after`` is not ``before`` with one more model behind the target, or anything ``forecast`` refuses.
    """
    new = [name for name in after.models if name not in before.models]
    if len(new) != 1 or tuple(name for name in after.models if name != new[0]) != before.models:
        raise ValueError(f"{after} is not {before} with one more model")
    place = after.models.index(new[0])
    if not place:
        raise ValueError(f"{after} puts {new[0]!r} above the target of {before}")
    old_round, new_round = (forecast(plan, hazards, seconds, cut, one_pass, drafted) for plan in (before, after))
    published = None
    if place < after.depth - 1:
        (upper, above, wide), (_, below, narrow) = list(after.edges())[place - 1 : place + 1]
        _, old, window = list(before.edges())[place - 1]
        lengths = [
            accepted_length(hazards[new[0], below], narrow),
            accepted_length(hazards[upper, old], window),
            accepted_length(hazards[upper, above], wide),
        ]
        published = insertion_pays_published(seconds(new[0], narrow + 1), seconds(upper, wide + 1), *lengths)
    return Insertion(old_round, new_round, published)
