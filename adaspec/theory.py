"""Pure mathematics of speculative chains: accepted length, passes, the forecast of a round, the paper's formulas.

A *hazard* is the chance that position k of a window is accepted, given that it was reached: ``hazards[k]``, k from 0.
Beyond the end of an array its last value holds (geometric extrapolation). The *accepted length* of a verification
counts the token that the verifier adds itself (correction or bonus), so it is at least 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from adaspec.plan import Plan, PlanSpace

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


def expected_passes(need: int, window: int, hazards: ArrayLike, *, cut: bool = True) -> float:
    """Expected verifications until a stage has emitted ``need`` tokens: R(n) = 1 + sum_k P(k) R(n - k - 1).

    ``cut``: with n tokens to go a block holds min(window, n - 1) tokens, so that nothing overshoots; otherwise
    always ``window`` tokens. The recursion is the same, since a cut block differs only where R is 0 anyway.
    """
    chain = Plan(("above", "stage", "drafter"), (max(need, 1), window))
    block = _Renewal(chain, {("stage", "drafter"): hazards}, frozenset(), cut).fill(1, need)
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

    Raises:
        ValueError: an edge of the plan without hazards, or hazards that are no probabilities.
    """
    for verifier, drafter, _ in plan.edges():
        if (verifier, drafter) not in hazards:
            raise ValueError(f"plan {plan} needs the acceptance of {verifier}/{drafter}, which is missing")
    tokens, passes = _Renewal(plan, hazards, frozenset(one_pass), cut).round()
    spent = sum(count * seconds(model, query_len) for (model, query_len), count in passes.items())
    return Forecast(tokens, float(spent), passes)


@dataclass(frozen=True, slots=True)
class _Block:
    """What a drafter or stage hands over: P(length), and the expected passes spent on it."""

    lengths: Mapping[int, float]
    passes: Mapping[tuple[str, int], float]


class _Renewal:
    """The recursion behind ``forecast``: follows the expected number of visits to "n tokens to go", stage by stage."""

    def __init__(self, plan: Plan, hazards: Mapping[Edge, ArrayLike], one_pass: frozenset[str], cut: bool) -> None:
        self._plan, self._hazards, self._one_pass, self._cut = plan, hazards, one_pass, cut
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
        model = self._plan.models[-1]
        return _Block({need: 1.0}, {(model, 1): 1.0 if model in self._one_pass else float(need)})

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
            for accepted, share in enumerate(accepted_distribution(hazards, length).tolist()):
                emitted[accepted + 1] += mass * chance * share
        return emitted


class Forecaster:
    """The forecast (``cut=True``) of every plan of a space at once, from arrays; built once per space.

    Sub-chains that plans share are evaluated once. All arrays may carry leading axes (posterior draws). The sum over
    the accepted count needs no care for cut windows: a block cut to n - 1 tokens differs from a whole one only in
    terms that multiply W(0) = 0, so W(n) = C(n) + sum_k c[k] W(n - 1 - k) with c free of n.

    Attributes:
        edges: (verifier, drafter) per row of ``hazards``; ``positions``: its columns, the longest window.
        models: model per row of ``seconds``; ``query_lens``: its columns are query lengths 0 .. query_lens - 1.
    """

    def __init__(self, space: PlanSpace, one_pass: Collection[str] = ()) -> None:
        self.models = space.models
        self.edges = tuple(dict.fromkeys((v, d) for plan in space for v, d, _ in plan.edges()))
        self.positions = max((window for plan in space for window in plan.windows), default=0)
        self.query_lens = self.positions + 2
        model = {name: row for row, name in enumerate(self.models)}
        edge = {pair: row for row, pair in enumerate(self.edges)}
        tails = _tails(space)
        self._tails = len(tails)
        drafts = [(row, tail.models[0]) for tail, row in tails.items() if tail.depth == 1]
        steps = np.arange(self.positions + 1)
        self._drafter = np.array([model[name] for _, name in drafts], dtype=np.intp)
        self._drafts = np.array([np.minimum(steps, 1) if name in one_pass else steps for _, name in drafts])
        depths = sorted({tail.depth for tail in tails} - {1})
        self._levels = [_Level.of([t for t in tails if t.depth == d], tails, model, edge, steps) for d in depths]
        chains = space[1:]
        self._edge = np.array([edge[_outer(p)] for p in chains], dtype=np.intp)
        self._window = np.array([p.windows[0] for p in chains], dtype=np.intp)
        self._tail = np.array([tails[_tail(p)] for p in chains], dtype=np.intp)

    def __call__(self, hazards: Floats, seconds: Floats) -> tuple[Floats, Floats]:
        """Expected tokens and seconds of a round, per row of a batch and per plan.

        Args:
            hazards: [..., edges, positions], acceptance of each edge per position.
            seconds: [..., models, query_lens], seconds of one forward; column 0 is not read.

        Returns:
            tokens [..., plans] and seconds [..., plans].
        """
        plain = seconds[..., :1, 1]
        if not self.positions:
            return np.ones_like(plain), plain
        alive = np.concatenate((np.ones((*hazards.shape[:-1], 1)), np.cumprod(hazards, axis=-1)), axis=-1)
        spent = self._fill(alive, seconds)
        tokens = np.cumsum(alive, axis=-1)[..., self._edge, self._window]
        rounds = spent[..., self._tail, self._window] + seconds[..., 0, self._window + 1]
        ones = np.ones((*tokens.shape[:-1], 1))
        return np.concatenate((ones, tokens), axis=-1), np.concatenate((plain, rounds), axis=-1)

    def _fill(self, alive: Floats, seconds: Floats) -> Floats:
        """Expected seconds W [..., tails, n] until a tail of a chain has handed over n = 0 .. positions tokens."""
        lead = np.broadcast_shapes(alive.shape[:-2], seconds.shape[:-2])
        spent = np.zeros((*lead, self._tails, self.positions + 1))
        spent[..., : len(self._drafter), :] = seconds[..., self._drafter, 1, None] * self._drafts
        for level in self._levels:
            stops = level.stops(alive)  # [..., stages, positions + 1]
            block = spent[..., level.inner[:, None], level.take] + seconds[..., level.model[:, None], level.take + 1]
            filled = np.zeros((*lead, len(level.model), self.positions + 1))
            for need in range(1, self.positions + 1):
                again = np.einsum("...k,...k->...", stops[..., : need - 1], filled[..., need - 1 : 0 : -1])
                filled[..., need] = block[..., need] + again
            spent[..., level.start : level.start + len(level.model), :] = filled
        return spent


@dataclass(frozen=True, slots=True)
class _Level:
    """All stages with the same number of models beneath them, as index arrays over the stages."""

    start: int  # their first row among the tails
    model: NDArray[np.intp]  # [stages] row of the verifying model
    edge: NDArray[np.intp]  # [stages]
    inner: NDArray[np.intp]  # [stages] row of the tail beneath
    take: NDArray[np.intp]  # [stages, positions + 1] block size with n tokens to go
    held: NDArray[np.bool_]  # [stages, positions + 1] k <= window

    @classmethod
    def of(
        cls,
        stages: Sequence[Plan],
        tails: Mapping[Plan, int],
        model: Mapping[str, int],
        edge: Mapping[Edge, int],
        steps: NDArray[np.intp],
    ) -> _Level:
        def rows(values: list[int]) -> NDArray[np.intp]:
            return np.array(values, dtype=np.intp)

        windows = rows([stage.windows[0] for stage in stages])[:, None]
        return cls(
            start=tails[stages[0]],
            model=rows([model[stage.models[0]] for stage in stages]),
            edge=rows([edge[_outer(stage)] for stage in stages]),
            inner=rows([tails[_tail(stage)] for stage in stages]),
            take=np.minimum(windows, np.maximum(steps - 1, 0)),
            held=steps <= windows,
        )

    def stops(self, alive: Floats) -> Floats:
        """P(exactly k accepted of a whole window) per stage; [..., stages, positions + 1]."""
        within: Floats = np.where(self.held, alive[..., self.edge, :], 0.0)
        within[..., :-1] -= within[..., 1:].copy()
        return within


def _tail(plan: Plan) -> Plan:
    """The chain beneath the first model, as a plan of its own."""
    return Plan(plan.models[1:], plan.windows[1:], plan.stop if plan.depth > 2 else 0.0)


def _outer(plan: Plan) -> Edge:
    """The pair at the top of a chain."""
    verifier, drafter, _ = next(plan.edges())
    return verifier, drafter


def _tails(space: PlanSpace) -> dict[Plan, int]:
    """Every chain beneath some model of some plan, numbered by depth: bare drafters first."""
    found: dict[Plan, None] = {}
    for plan in space:
        while plan.depth > 1:
            plan = _tail(plan)
            found[plan] = None
    return {tail: row for row, tail in enumerate(sorted(found, key=lambda tail: tail.depth))}


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
