"""The estimators that a cost model is made of: acceptance per edge, seconds per pass, measured rounds per plan.

All are discounted twice: by what replaces them (``keep``) and, slowly, by the rounds that pass (``idle_keep``), so
that nothing unplayed stays condemned for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import betaincinv

from adaspec.outcome import EdgeOutcome, Pass
from adaspec.plan import Context, Plan, PlanSpace
from adaspec.theory import Edge, Floats


@dataclass(frozen=True, slots=True)
class CostPriors:
    """What is believed before anything is measured, and how fast measurements are believed and forgotten.

    Attributes:
        acceptance: acceptance of a pair that nobody has seen, a Beta mean.
        acceptance_strength: its weight, in verified positions.
        position_strength: weight, in positions, of the edge's one rate in the acceptance of each position.
        caution: factor on that rate per position of the window of which nothing is known yet: a soft slow start, so
            that a new pair is tried with short windows first. It fades as positions are reached.
        target_seconds: of a pass of the target over one position, until one is measured.
        middle_ratio, drafter_ratio: seconds of a model that verifies somewhere beneath the target, and of one that
            only drafts, relative to the target, until one is measured.
        pass_spread: standard deviation of the log of one pass's seconds, until it is learned.
        unmeasured_spread: standard deviation of the log of an unmeasured model's seconds.
        pass_strength: weight, in passes, of the regression in the seconds of one (model, query length).
        residual_spread: standard deviation of log(true rate / forecast rate) over plans.
        residual_strength: rounds of a plan after which measured and forecast rate weigh the same.
        keep, pass_keep, round_keep: weight that older observations keep when a new one arrives: of an edge; of a kind
            of pass; of a plan's own rounds and of a model's regression.
        surprise: standard errors of an edge's recent acceptance (about ten rounds) against what is believed beyond
            which a change is assumed and the edge is forgotten but for ``acceptance_strength`` positions.
        idle_keep: weight that every observation keeps per round, so that what is not played is forgotten slowly.
    """

    acceptance: float = 0.5
    acceptance_strength: float = 2.0
    position_strength: float = 8.0
    caution: float = 0.85
    target_seconds: float = 0.03
    middle_ratio: float = 0.3
    drafter_ratio: float = 0.1
    pass_spread: float = 0.1
    unmeasured_spread: float = 0.5
    pass_strength: float = 4.0
    residual_spread: float = 0.05
    residual_strength: float = 40.0
    keep: float = 0.998
    pass_keep: float = 0.97
    round_keep: float = 0.99
    surprise: float = 3.5
    idle_keep: float = 0.994

    def __post_init__(self) -> None:
        for name in ("acceptance", "caution", "keep", "pass_keep", "round_keep", "idle_keep"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0 - (name == "acceptance") * 1e-6:
                raise ValueError(f"{name} lies between 0 and 1, got {value}")
        for name in self.__slots__:
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} is above 0, got {getattr(self, name)}")


def _fitted(values: Sequence[float], size: int) -> Floats:
    """``values`` cut or padded with zeros to ``size``, for a state saved from another space."""
    held = np.zeros(size)
    held[: len(values)] = values[:size]
    return held


class Acceptance:
    """Discounted Beta counts per edge and position, shrunk to one rate per edge; right-censored through ``reached``."""

    def __init__(self, edges: Sequence[Edge], positions: int, priors: CostPriors, known: Mapping[Edge, float]) -> None:
        self._priors = priors
        self.rows = {edge: row for row, edge in enumerate(edges)}
        self._mean = np.array([known.get(edge, priors.acceptance) for edge in edges])  # [edges]
        self.reached = np.zeros((len(edges), positions))
        self.accepted = np.zeros((len(edges), positions))
        self.excess, self.variance = np.zeros((2, len(edges)))  # of recent accepted tokens over the expected ones

    def learn(self, edge: EdgeOutcome) -> bool:
        """Adds the counts of a round; returns whether they speak for a change, on which the edge is mostly forgotten.

        Raises:
            ValueError: other numbers of positions reached and accepted, or more accepted than reached.
        """
        row = self.rows.get((edge.verifier, edge.drafter))
        if len(edge.reached) != len(edge.accepted) or any(a > r for a, r in zip(edge.accepted, edge.reached)):
            raise ValueError(f"per position, accepted <= reached; got {edge.accepted} of {edge.reached}")
        if row is None:
            return False
        positions = self.reached.shape[1]
        reached, accepted = _fitted(edge.reached, positions), _fitted(edge.accepted, positions)
        changed = self._surprised(row, reached, accepted)
        keep = self._priors.acceptance_strength / self.reached[row].sum() if changed else self._priors.keep
        self.reached[row] = self.reached[row] * keep + reached
        self.accepted[row] = self.accepted[row] * keep + accepted
        return changed

    def _surprised(self, row: int, reached: Floats, accepted: Floats) -> bool:
        """Compares the recent rounds of an edge with its belief, once the belief rests on more than those."""
        if self.reached[row, :1].sum() < 20.0:
            return False
        weight = self._priors.position_strength
        rate = self.accepted[row].sum() / self.reached[row].sum()
        hazards = np.clip((weight * rate + self.accepted[row]) / (weight + self.reached[row]), 0.02, 0.98)
        self.excess[row] = 0.9 * self.excess[row] + (accepted - reached * hazards).sum()
        self.variance[row] = 0.9 * self.variance[row] + (reached * hazards * (1.0 - hazards)).sum()
        changed = bool(abs(self.excess[row]) > self._priors.surprise * math.sqrt(self.variance[row] + 0.25))
        if changed:
            self.excess[row] = self.variance[row] = 0.0
        return changed

    def forget(self) -> None:
        self.reached *= self._priors.idle_keep
        self.accepted *= self._priors.idle_keep

    def state_dict(self) -> dict[str, Any]:
        return {
            "/".join(edge): {"reached": self.reached[row].tolist(), "accepted": self.accepted[row].tolist()}
            for edge, row in self.rows.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for edge, row in self.rows.items():
            counts = state.get("/".join(edge), {"reached": [], "accepted": []})
            self.reached[row] = _fitted(counts["reached"], self.reached.shape[1])
            self.accepted[row] = _fitted(counts["accepted"], self.reached.shape[1])
        self.excess, self.variance = np.zeros((2, len(self.rows)))

    def _rate(self) -> tuple[Floats, Floats]:
        """Beta parameters of the one rate of each edge; [edges] each."""
        weight, accepted = self._priors.acceptance_strength, self.accepted.sum(axis=1)
        missed = self.reached.sum(axis=1) - accepted
        return weight * self._mean + accepted, weight * (1.0 - self._mean) + missed

    def _positions(self, rate: Floats) -> tuple[Floats, Floats]:
        """Beta parameters per position, given rates [..., edges]; [..., edges, positions] each."""
        weight = self._priors.position_strength
        unknown = np.cumsum(weight / (weight + self.reached), axis=-1)
        rate = np.clip(rate[..., None] * self._priors.caution**unknown, 0.001, 0.999)
        return weight * rate + self.accepted, weight * (1.0 - rate) + self.reached - self.accepted

    def mean(self) -> Floats:
        yes, no = self._rate()
        above, below = self._positions(yes / (yes + no))
        hazards: Floats = above / (above + below)
        return hazards

    def sample(self, rng: np.random.Generator, draws: int, sharpness: float) -> Floats:
        """Draws from the posterior with its counts multiplied by ``sharpness``; [draws, edges, positions]."""
        yes, no = self._rate()
        above, below = self._positions(rng.beta(sharpness * yes, sharpness * no, size=(draws, len(yes))))
        return rng.beta(sharpness * above, sharpness * below)

    def upper(self, delta: float) -> Floats:
        yes, no = self._rate()
        above, below = self._positions(betaincinv(yes, no, 1.0 - delta))
        hazards: Floats = np.maximum(above / (above + below), self.mean())
        return hazards


_RIDGE = 0.01  # weight of the shape below, in passes
_SHAPE = np.array([1.0, 0.02, 0.02, 0.05])  # relative seconds: per pass, per position, per batch x position, per ...
_CONTEXT = 1024.0  # ... this many cached tokens of the batch


def _features(query_len: int, batch_size: int, seq_len: float) -> Floats:
    """Regressors (1, query length, batch x query length, batch x cached tokens); [4]."""
    return np.array([1.0, query_len, batch_size * query_len, batch_size * seq_len / _CONTEXT])


class _Line:
    """Seconds of one model as a robust, discounted, non-negative regression in relative errors."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self.count = 0.0  # effective passes
        self.fresh = 0.0  # of those, not yet in the coefficients
        self.scale = 0.0  # mean of log(seconds / shape)
        self.moments = np.zeros((4, 4))
        self.sums = np.zeros(4)
        self.fitted: Floats | None = None

    def add(self, row: Floats, seconds: float, weight: float = 1.0) -> None:
        relative = row / seconds
        self.count = self.count * self._keep + weight
        self.fresh += weight
        self.scale += weight / self.count * (math.log(seconds / float(row @ _SHAPE)) - self.scale)
        self.moments = self.moments * self._keep + weight * np.outer(relative, relative)
        self.sums = self.sums * self._keep + weight * relative

    def state_dict(self) -> dict[str, Any]:
        state = {"count": self.count, "fresh": self.fresh, "scale": self.scale}
        fitted = None if self.fitted is None else self.fitted.tolist()
        return state | {"moments": self.moments.tolist(), "sums": self.sums.tolist(), "fitted": fitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.fresh, self.scale = state["count"], state["fresh"], state["scale"]
        self.moments, self.sums = np.array(state["moments"]), np.array(state["sums"])
        self.fitted = None if state["fitted"] is None else np.array(state["fitted"])

    def coefficients(self) -> Floats | None:
        """Seconds per regressor, or None before any pass; refitted once an eighth of the passes is new."""
        if self.count and (self.fitted is None or self.fresh > self.count / 8.0):
            prior = math.exp(self.scale) * _SHAPE
            moments = self.moments * np.outer(prior, prior) + _RIDGE * np.eye(4)  # in units of the prior
            root = np.linalg.cholesky(moments)
            goal = np.linalg.solve(root, self.sums * prior + _RIDGE)
            self.fitted = nnls(root.T, goal)[0] * prior
            self.fresh = 0.0
        return self.fitted


class _Cells:
    """Per (model, query length), at one batch size: effective passes, mean log seconds, mean cached length."""

    def __init__(self, models: int, query_lens: int) -> None:
        self.count, self.mean, self.seq_len = np.zeros((3, models, query_lens))

    def state_dict(self, models: Iterable[str]) -> dict[str, Any]:
        """Per model and query length seen: [count, mean, seq_len]."""
        table = np.stack((self.count, self.mean, self.seq_len), axis=-1)
        return {
            name: {str(column): cell.tolist() for column, cell in enumerate(row) if cell[0] > 0.0}
            for name, row in zip(models, table)
        }

    def load_state_dict(self, state: Mapping[str, Any], rows: Mapping[str, int]) -> None:
        for name, cells in state.items():
            for column, cell in cells.items():
                if name in rows and int(column) < self.count.shape[1]:
                    at = rows[name], int(column)
                    self.count[at], self.mean[at], self.seq_len[at] = cell


class Passes:
    """Seconds per (model, query length, batch size, cached length): a regression per model, corrected per cell."""

    def __init__(self, space: PlanSpace, query_lens: int, priors: CostPriors) -> None:
        self._priors = priors
        self.rows = {name: row for row, name in enumerate(space.models)}
        self.query_lens = query_lens
        verifiers = {verifier for plan in space for verifier, _, _ in plan.edges()}
        below = [priors.middle_ratio if name in verifiers else priors.drafter_ratio for name in space.models[1:]]
        self._ratio = np.array([1.0, *below])
        self.lines = [_Line(priors.round_keep) for _ in self.rows]
        self.spread = np.full(len(self.rows), priors.pass_spread)  # of log seconds, per model
        self.cells: dict[int, _Cells] = {}

    def at(self, batch_size: int) -> _Cells:
        if batch_size not in self.cells:
            self.cells[batch_size] = _Cells(len(self.rows), self.query_lens)
        return self.cells[batch_size]

    def learn(self, passes: Iterable[Pass], clip: bool = True) -> float:
        """Takes the median of like passes as one robust observation; returns the seconds of outliers.

        ``clip``: pull a median that is far from what is expected towards it.

        Raises:
            ValueError: a pass whose seconds are negative or no number.
        """
        alike: dict[tuple[int, int, int], list[Pass]] = {}
        for one in passes:
            if not 0.0 <= one.seconds < math.inf:
                raise ValueError(f"a pass takes time, got {one.seconds} s of {one.model}")
            row = self.rows.get(one.model)
            if row is not None and 1 <= one.query_len < self.query_lens:
                alike.setdefault((row, one.query_len, one.batch_size), []).append(one)
        return sum(self._learn(*key, group, clip) for key, group in alike.items())

    def _learn(self, row: int, query_len: int, batch_size: int, group: list[Pass], clip: bool) -> float:
        spent = [one.seconds for one in group]
        seq_len = sum(one.seq_len for one in group) / len(group)
        features = _features(query_len, batch_size, seq_len)
        seen = math.log(max(sorted(spent)[len(spent) // 2], 1e-9))
        if clip:
            seen = self._clipped(row, query_len, batch_size, features, seen)
        self.lines[row].add(features, math.exp(seen), len(group))
        cells, at = self.at(batch_size), (row, query_len)
        cells.count[at] = cells.count[at] * self._priors.pass_keep + len(group)
        step = len(group) / cells.count[at]
        cells.mean[at] += step * (seen - cells.mean[at])
        cells.seq_len[at] += step * (seq_len - cells.seq_len[at])
        return max(sum(spent) - 2.0 * math.exp(seen) * len(group), 0.0)

    def _clipped(self, row: int, query_len: int, batch_size: int, features: Floats, seen: float) -> float:
        """Pulls an outlier to three spreads (log scale) from what is expected; the spread follows the residuals."""
        fitted = self.lines[row].coefficients() if self.lines[row].count >= 3.0 else None
        if fitted is None:
            return seen
        cells, at = self.at(batch_size), (row, query_len)
        known = bool(cells.count[at] >= 3.0)
        expected = cells.mean[at] if known else math.log(max(float(features @ fitted), 1e-9))
        limit = max(3.0 * float(self.spread[row]), 0.15 if known else 1.0)
        residual = min(max(seen - expected, -limit), limit)
        self.spread[row] += 0.05 * (1.25 * abs(residual) - self.spread[row])
        return float(expected + residual)

    def state_dict(self) -> dict[str, Any]:
        return {
            "lines": {name: self.lines[row].state_dict() for name, row in self.rows.items()},
            "spread": {name: float(self.spread[row]) for name, row in self.rows.items()},
            "cells": {str(batch_size): cells.state_dict(self.rows) for batch_size, cells in self.cells.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, row in self.rows.items():
            self.lines[row] = _Line(self._priors.round_keep)
            if name in state["lines"]:
                self.lines[row].load_state_dict(state["lines"][name])
            self.spread[row] = state["spread"].get(name, self._priors.pass_spread)
        self.cells = {}
        for batch_size, cells in state["cells"].items():
            self.at(int(batch_size)).load_state_dict(cells, self.rows)

    def forget(self, batch_size: int) -> None:
        self.at(batch_size).count *= self._priors.idle_keep

    def table(self, context: Context) -> tuple[Floats, Floats, Floats]:
        """Log seconds [models, query_lens], their spread per model [models, 1] and per cell [models, query_lens]."""
        priors, cells = self._priors, self.at(context.batch_size)
        target = self.lines[0].coefficients()
        target = priors.target_seconds * _SHAPE if target is None else target
        known = [line.coefficients() for line in self.lines]
        rows = [ratio * target if line is None else line for ratio, line in zip(self._ratio, known)]
        coefficients = np.stack(rows)  # [models, 4]
        base, per_position, per_row_position, per_cached = coefficients.T[:, :, None]  # [models, 1] each
        positions = np.arange(self.query_lens)
        line = base + per_position * positions + per_row_position * context.batch_size * positions
        line = line + per_cached * (context.batch_size * context.seq_len / _CONTEXT)
        moved = context.batch_size * (cells.seq_len - context.seq_len) / _CONTEXT
        there = np.log(np.maximum(line + per_cached * moved, 1e-9))
        trust = cells.count / (cells.count + priors.pass_strength)
        logs: Floats = np.log(np.maximum(line, 1e-9)) + trust * (cells.mean - there)
        counts = np.array([[one.count] for one in self.lines])
        spread = np.maximum(self.spread, 0.02)[:, None]
        common = 1.0 / np.sqrt(priors.unmeasured_spread**-2 + counts * spread**-2)
        return logs, common, spread / np.sqrt(priors.pass_strength + cells.count)


class Rounds:
    """Measured rounds at one batch size, discounted: tokens, seconds and rounds per plan; overhead per depth."""

    def __init__(self, plans: int, depth: int) -> None:
        self.tokens, self.seconds, self.rounds = np.zeros((3, plans))
        self.overhead, self.depth_rounds = np.zeros((2, depth + 1))

    def add(self, arm: int, tokens: float, seconds: float, keep: float) -> None:
        for sums, new in ((self.tokens, tokens), (self.seconds, seconds), (self.rounds, 1.0)):
            sums[arm] = sums[arm] * keep + new

    def add_overhead(self, depth: int, seconds: float, keep: float) -> None:
        for sums, new in ((self.overhead, seconds), (self.depth_rounds, 1.0)):
            sums[depth] = sums[depth] * keep + new

    def forget(self, keep: float) -> None:
        for sums in (self.tokens, self.seconds, self.rounds):
            sums *= keep

    def state_dict(self, plans: Iterable[Plan]) -> dict[str, Any]:
        played = zip(plans, np.stack((self.tokens, self.seconds, self.rounds), axis=-1).tolist())
        depths = np.stack((self.overhead, self.depth_rounds), axis=-1).tolist()
        return {"plans": {str(plan): sums for plan, sums in played if sums[2] > 0.0}, "depths": depths}

    def load_state_dict(self, state: Mapping[str, Any], plans: Iterable[Plan]) -> None:
        for arm, plan in enumerate(plans):
            if str(plan) in state["plans"]:
                self.tokens[arm], self.seconds[arm], self.rounds[arm] = state["plans"][str(plan)]
        for depth, sums in enumerate(state["depths"][: len(self.overhead)]):
            self.overhead[depth], self.depth_rounds[depth] = sums

    def doubt(self, arms: NDArray[np.bool_]) -> None:
        """Forgets the rounds of some plans; [plans]."""
        for sums in (self.tokens, self.seconds, self.rounds):
            sums[arms] = 0.0

    def overheads(self) -> Floats:
        """Seconds of a round outside its passes, per depth; a depth that was not played takes the mean of the rest."""
        pooled = self.overhead.sum() / max(self.depth_rounds.sum(), 1.0)
        seconds: Floats = (self.overhead + 4.0 * pooled) / (self.depth_rounds + 4.0)
        return seconds
