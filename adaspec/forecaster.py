"""The forecast of every plan of a space at once, from arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from adaspec.plan import Plan, PlanSpace
from adaspec.theory import Edge, Floats


class Forecaster:
    """The forecast (``cut=True``) of every plan of a space at once, from arrays; built once per space.

    Sub-chains that plans share are evaluated once. All arrays may carry leading axes (posterior draws). The sum over
    the accepted count needs no care for cut windows: a block cut to n - 1 tokens differs from a whole one only in
    terms that multiply W(0) = 0, so W(n) = C(n) + sum_k c[k] W(n - 1 - k) with c free of n. For the last two models of
    a chain C(n) is the expected cost of one draft and its verification, by summation over the draft's length.

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
        chains, stages = space[1:], _stages(space)
        pairs = list(dict.fromkeys((_outer(c), c.models) for c in (*chains, *stages) if c.depth == 2))
        row_of = {pair: row for row, pair in enumerate(pairs)}
        self._pair_edge = _rows(edge[pair] for pair, _ in pairs)
        self._verifier, self._drafter = (_rows(model[names[place]] for _, names in pairs) for place in (0, 1))
        self._at_once = np.array([float(names[1] in one_pass) for _, names in pairs])[:, None]
        self._one_by_one = 1.0 - self._at_once
        inner = {stage: row_of[_outer(stage), stage.models] for stage in stages if stage.depth == 2}
        inner |= {stage: stages[_tail(stage)] for stage in stages if stage.depth > 2}
        self._need = max((chain.windows[0] for chain in chains if chain.depth > 2), default=0)
        depths = sorted({stage.depth for stage in stages})
        groups = [[stage for stage in stages if stage.depth == depth] for depth in depths]
        widths = [len(pairs), *accumulate(map(len, groups))]  # of what is beneath each
        self._levels = [_Level.of(group, inner, model, edge, self._need, width) for group, width in zip(groups, widths)]
        bare, deep = ([chain for chain in chains if (chain.depth == 2) == short] for short in (True, False))
        order = [space.arm(chain) for chain in (space.plain, *bare, *deep)]
        self._place = np.argsort(order)  # of each plan in (plain, bare, deep)
        self._token_at = _rows([0, *(c.windows[0] * len(self.edges) + edge[_outer(c)] for c in chains)])
        self._bare_at = _rows(c.windows[0] * len(pairs) + row_of[_outer(c), c.models] for c in bare)
        self._deep_at = _rows(c.windows[0] * len(stages) + stages[_tail(c)] for c in deep)
        self._deep_len = _rows(c.windows[0] + 1 for c in deep)

    def __call__(self, hazards: Floats, seconds: Floats, drafted: Floats | None = None) -> tuple[Floats, Floats]:
        """Expected tokens and seconds of a round, per row of a batch and per plan.

        Args:
            hazards: [..., edges, positions], acceptance of each edge per position.
            seconds: [..., models, query_lens], seconds of one forward; column 0 is not read. The same leading axes.
            drafted: [edges, positions], chance that a draft holds each position; None: drafts fill their window.
                Read only for the last two models of a chain.

        Returns:
            tokens [..., plans] and seconds [..., plans].
        """
        lead = seconds.shape[:-2]
        times = _positions_first(seconds)  # [query_lens, models, D], D draws
        plain = times[1, :1]  # [1, D]
        if not self.positions:
            return np.ones((*lead, 1)), plain.T.reshape(*lead, 1)
        alive = np.empty((self.positions + 1, len(self.edges), times.shape[-1]))
        alive[0] = 1.0
        np.multiply.accumulate(_positions_first(hazards), axis=0, out=alive[1:])
        tokens = alive.cumsum(axis=0).reshape(-1, times.shape[-1]).take(self._token_at, axis=0)
        pairs = self._pairs(times, drafted)
        parts = [plain, pairs.reshape(-1, times.shape[-1]).take(self._bare_at, axis=0)]
        if self._levels:
            filled = self._fill(alive, times, pairs).reshape(-1, times.shape[-1])
            parts.append(filled.take(self._deep_at, axis=0) + times[:, 0].take(self._deep_len, axis=0))
        spent = np.concatenate(parts).take(self._place, axis=0)
        return tokens.T.reshape(*lead, -1), spent.T.reshape(*lead, -1)

    def _pairs(self, times: Floats, drafted: Floats | None) -> Floats:
        """Cost of one draft and its verification per window and bare pair; [positions + 1, pairs, D]."""
        verify, draft = times.take(self._verifier, axis=1), times[1].take(self._drafter, axis=0)
        costs = np.empty((self.positions + 1, *draft.shape))
        costs[0] = verify[1]
        costs[1:] = verify[2:] - verify[1:-1] + draft * self._one_by_one
        if drafted is not None:
            costs[1:] *= drafted.take(self._pair_edge, axis=0).T[:, :, None]
        costs[1] += draft * self._at_once
        return costs.cumsum(axis=0)

    def _fill(self, alive: Floats, times: Floats, pairs: Floats) -> Floats:
        """Expected seconds W until a stage has handed over n = 0 .. need tokens; [need + 1, stages, D]."""
        below, done, draws = pairs, [], times.shape[-1]
        for level in self._levels:
            filled = below.reshape(-1, draws).take(level.inner, axis=0)
            if not level.bare:
                filled += times.reshape(-1, draws).take(level.verify, axis=0)
            stops = level.stops(alive)
            for left in range(1, self._need):  # a block with k accepted leaves n - 1 - k = left to go
                filled[left + 1 :] += stops[: self._need - left] * filled[left]
            filled[0] = 0.0
            done.append(filled)
            below = np.concatenate(done, axis=1) if len(self._levels) > 1 else filled
        return below


@dataclass(frozen=True, slots=True)
class _Level:
    """All stages with the same number of models beneath them, as index arrays over the stages.

    ``inner`` and ``verify`` are indices into [sizes x rows]: the block with n tokens to go, of what is beneath.
    """

    bare: bool  # the model beneath them is the drafter
    edge: NDArray[np.intp]  # [stages]
    inner: NDArray[np.intp]  # [need + 1, stages] cost of the draft: of the pair (bare), else of the stage beneath
    verify: NDArray[np.intp]  # [need + 1, stages] seconds of its verification, where ``inner`` does not hold them
    held: Floats  # [need, stages, 1] whether k <= window

    @classmethod
    def of(
        cls,
        stages: Sequence[Plan],
        inner: Mapping[Plan, int],
        model: Mapping[str, int],
        edge: Mapping[Edge, int],
        need: int,
        width: int,
    ) -> _Level:
        windows, steps = _rows(stage.windows[0] for stage in stages), np.arange(need + 1)[:, None]
        block = np.minimum(windows, np.maximum(steps - 1, 0))
        return cls(
            bare=stages[0].depth == 2,
            edge=_rows(edge[_outer(stage)] for stage in stages),
            inner=block * width + _rows(inner[stage] for stage in stages),
            verify=(block + 1) * len(model) + _rows(model[stage.models[0]] for stage in stages),
            held=(steps[:-1] <= windows)[:, :, None].astype(np.float64),
        )

    def stops(self, alive: Floats) -> Floats:
        """P(exactly k accepted of a whole window) per stage, k below the longest need less 1; [need, stages, D]."""
        within: Floats = alive[: len(self.held)].take(self.edge, axis=1)
        within *= self.held
        within[:-1] -= within[1:]
        return within


def _positions_first(table: Floats) -> Floats:
    """[..., rows, positions] -> [positions, rows, D]."""
    flat = table.reshape(-1, *table.shape[-2:])
    return np.ascontiguousarray(flat.transpose(2, 1, 0))


def _rows(values: Iterable[int]) -> NDArray[np.intp]:
    return np.array(list(values), dtype=np.intp)


def _tail(plan: Plan) -> Plan:
    """The chain beneath the first model, as a plan of its own."""
    return Plan(plan.models[1:], plan.windows[1:], plan.stop if plan.depth > 2 else 0.0)


def _outer(plan: Plan) -> Edge:
    """The pair at the top of a chain."""
    verifier, drafter, _ = next(plan.edges())
    return verifier, drafter


def _stages(space: PlanSpace) -> dict[Plan, int]:
    """Every chain of two models or more beneath some model of some plan, numbered by depth."""
    found: dict[Plan, None] = {}
    for plan in space:
        while plan.depth > 2:
            plan = _tail(plan)
            found[plan] = None
    return {stage: row for row, stage in enumerate(sorted(found, key=lambda stage: stage.depth))}
