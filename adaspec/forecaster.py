"""The forecast of every plan of a space at once, from arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
        self._pair_edge = _rows(edge[pair] for pair, _ in pairs)
        self._pair_models = _rows(model[names[0]] for _, names in pairs), _rows(model[names[1]] for _, names in pairs)
        self._at_once = np.array([names[1] in one_pass for _, names in pairs], dtype=np.float64)
        row_of = {pair: row for row, pair in enumerate(pairs)}
        inner = {stage: row_of[_outer(stage), stage.models] for stage in stages if stage.depth == 2}
        inner |= {stage: stages[_tail(stage)] for stage in stages if stage.depth > 2}
        self._need = max((chain.windows[0] for chain in chains if chain.depth > 2), default=0)
        depths = sorted({stage.depth for stage in stages})
        steps = np.arange(self._need + 1)
        self._levels = [_Level.of([s for s in stages if s.depth == d], inner, model, edge, steps) for d in depths]
        self._token_at = _rows(edge[_outer(c)] * (self.positions + 1) + c.windows[0] for c in chains)
        self._bare = _rows(arm for arm, plan in enumerate(space) if plan.depth == 2)
        self._bare_at = _rows(
            row_of[_outer(c), c.models] * (self.positions + 1) + c.windows[0] for c in chains if c.depth == 2
        )
        self._deep = _rows(arm for arm, plan in enumerate(space) if plan.depth > 2)
        deep = [chain for chain in chains if chain.depth > 2]
        self._deep_at = _rows(stages[_tail(c)] * (self._need + 1) + c.windows[0] for c in deep)
        self._deep_len = _rows(c.windows[0] + 1 for c in deep)
        self._plans = len(space)

    def __call__(self, hazards: Floats, seconds: Floats, drafted: Floats | None = None) -> tuple[Floats, Floats]:
        """Expected tokens and seconds of a round, per row of a batch and per plan.

        Args:
            hazards: [..., edges, positions], acceptance of each edge per position.
            seconds: [..., models, query_lens], seconds of one forward; column 0 is not read.
            drafted: [edges, positions], chance that a draft holds each position; None: drafts fill their window.
                Read only for the last two models of a chain.

        Returns:
            tokens [..., plans] and seconds [..., plans].
        """
        plain = seconds[..., :1, 1]
        if not self.positions:
            return np.ones_like(plain), plain
        lead = np.broadcast_shapes(hazards.shape[:-2], seconds.shape[:-2])
        alive = np.ones((*hazards.shape[:-1], self.positions + 1))
        np.cumprod(hazards, axis=-1, out=alive[..., 1:])
        tokens = np.ones((*hazards.shape[:-2], self._plans))
        lengths = np.cumsum(alive, axis=-1)
        tokens[..., 1:] = lengths.reshape(*lengths.shape[:-2], -1).take(self._token_at, axis=-1)
        spent = np.empty((*lead, self._plans))
        spent[..., :1] = plain
        pairs = self._pairs(seconds, drafted)
        spent[..., self._bare] = pairs.reshape(*pairs.shape[:-2], -1).take(self._bare_at, axis=-1)
        if self._levels:
            filled = self._fill(alive, seconds, pairs, lead).reshape(*lead, -1)
            top = seconds[..., 0, :].take(self._deep_len, axis=-1)
            spent[..., self._deep] = filled.take(self._deep_at, axis=-1) + top
        return tokens, spent

    def _pairs(self, seconds: Floats, drafted: Floats | None) -> Floats:
        """Cost of one draft and its verification per bare pair and window; [..., pairs, positions + 1]."""
        verify, draft = (seconds[..., rows, :] for rows in self._pair_models)
        step = verify[..., 2:] - verify[..., 1:-1] + draft[..., 1:2] * (1.0 - self._at_once[:, None])
        if drafted is not None:
            step *= drafted[self._pair_edge]
        step[..., 0] += draft[..., 1] * self._at_once
        costs = np.empty((*step.shape[:-1], self.positions + 1))
        costs[..., 0] = verify[..., 1]
        costs[..., 1:] = step
        return np.cumsum(costs, axis=-1)

    def _fill(self, alive: Floats, seconds: Floats, pairs: Floats, lead: tuple[int, ...]) -> Floats:
        """Expected seconds W until a stage has handed over n = 0 .. need tokens; [..., stages, need + 1]."""
        done: list[Floats] = []
        for level in self._levels:
            if level.bare:
                block = pairs[..., level.inner[:, None], level.take]
            else:
                below = np.concatenate(done, axis=-2)
                block = below[..., level.inner[:, None], level.take]
                block = block + seconds[..., level.model[:, None], level.take + 1]
            stops = np.moveaxis(level.stops(alive), -1, 0)  # [need, ..., stages]
            stops = np.ascontiguousarray(np.broadcast_to(stops, (self._need, *lead, len(level.model))))
            filled = np.zeros((self._need + 1, *lead, len(level.model)))
            filled[1:] = np.moveaxis(block, -1, 0)[1:]
            for need in range(2, self._need + 1):
                filled[need] += np.einsum("k...,k...->...", stops[: need - 1], filled[need - 1 : 0 : -1])
            done.append(np.moveaxis(filled, 0, -1))
        return np.concatenate(done, axis=-2)


@dataclass(frozen=True, slots=True)
class _Level:
    """All stages with the same number of models beneath them, as index arrays over the stages."""

    bare: bool  # the model beneath them is the drafter
    model: NDArray[np.intp]  # [stages] row of the verifying model
    edge: NDArray[np.intp]  # [stages]
    inner: NDArray[np.intp]  # [stages] row of the pair (bare), else of the stage beneath
    take: NDArray[np.intp]  # [stages, need + 1] block size with n tokens to go
    held: NDArray[np.bool_]  # [stages, need] k <= window

    @classmethod
    def of(
        cls,
        stages: Sequence[Plan],
        inner: Mapping[Plan, int],
        model: Mapping[str, int],
        edge: Mapping[Edge, int],
        steps: NDArray[np.intp],
    ) -> _Level:
        windows = _rows(stage.windows[0] for stage in stages)[:, None]
        return cls(
            bare=stages[0].depth == 2,
            model=_rows(model[stage.models[0]] for stage in stages),
            edge=_rows(edge[_outer(stage)] for stage in stages),
            inner=_rows(inner[stage] for stage in stages),
            take=np.minimum(windows, np.maximum(steps - 1, 0)),
            held=steps[:-1] <= windows,
        )

    def stops(self, alive: Floats) -> Floats:
        """P(exactly k accepted of a whole window) per stage, k below the longest need; [..., stages, need]."""
        within: Floats = np.where(self.held, alive[..., self.edge, : self.held.shape[1]], 0.0)
        within[..., :-1] -= within[..., 1:].copy()
        return within


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
