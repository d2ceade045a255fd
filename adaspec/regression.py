"""Seconds of one model's passes: a robust, discounted, non-negative regression in relative errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from adaspec.priors import CostPriors

_RIDGE = 0.01  # weight of the shape below, in passes
SHAPE = (1.0, 0.02, 0.02, 0.05)  # relative seconds: per pass, per position, per batch x position, per ...
CONTEXT = 1024.0  # ... this many cached tokens of the batch
KNOWN = 3.0  # passes before an observation can be an outlier
_MEDIAN = 2.0 / math.pi  # variance of one over that of a median, per value
_GROSS = 0.4  # log factor from which a profile is not noisy but wrong
_MANY = 10.0  # beyond it, what moves a median is no noise of its passes
_NARROW = 0.02  # least spread of log seconds


@dataclass(slots=True)
class Kind:
    """Like passes (same model, query length and batch size) as one observation: the (lower) median of their seconds.

    Attributes:
        bucket: of the batch size.
        weight: passes; ``rounds``: in which there was one.
        seen: log of the median seconds.
        cached: mean tokens over the batch.
        spent: (seconds, round, cached tokens of a row) of each pass; by seconds.
        expected: log seconds, where something is expected; ``known``: by the cell, not the regression.
    """

    query_len: int
    batch: int
    bucket: int
    weight: int
    rounds: int
    seen: float
    cached: float
    spent: Sequence[tuple[float, int, int]]
    expected: float = 0.0
    known: bool = False

    @classmethod
    def of(cls, query_len: int, batch: int, bucket: int, passes: list[tuple[float, int, int]]) -> Kind:
        passes.sort()
        count = len(passes)
        seen = math.log(max(passes[(count - 1) // 2][0], 1e-9))
        cached = batch * sum([one[2] for one in passes]) / count
        rounds = len({one[1] for one in passes})
        return cls(query_len, batch, bucket, count, rounds, seen, cached, passes)

    @property
    def features(self) -> tuple[float, float, float, float]:
        """The regressors: 1, query length, batch x query length, batch x cached tokens."""
        return 1.0, self.query_len, self.batch * self.query_len, self.cached / CONTEXT


class Regression:
    """What is known of one model's passes, whatever their query length.

    Attributes:
        count: passes, discounted; 0: never measured.
        played: of those, seen in rounds.
    """

    __slots__ = ("_fitted", "_fresh", "_moments", "_priors", "_scale", "_spread", "_sums", "count", "played")

    def __init__(self, priors: CostPriors) -> None:
        self._priors = priors
        self.count = self.played = self._fresh = self._scale = 0.0
        self._moments, self._sums, self._fitted = [0.0] * 16, [0.0] * 4, [0.0] * 4
        self._spread = [priors.pass_spread, 1.0]  # of log seconds: sum and weight

    def add(self, kinds: Sequence[Kind]) -> None:
        """Takes one observation of each kind."""
        keep = self._priors.round_keep ** max([kind.rounds for kind in kinds])
        self.count, self._scale = self.count * keep, self._scale * keep
        self._sums = [keep * total for total in self._sums]
        self._moments = [keep * total for total in self._moments]
        for kind in kinds:
            features, weight = kind.features, kind.weight
            self.count += weight
            self._fresh += weight
            self._scale += weight * (kind.seen - math.log(dot(features, SHAPE)))
            factor = math.exp(-kind.seen)
            relative = [factor * value for value in features]
            self._sums = [total + weight * value for total, value in zip(self._sums, relative)]
            squares = product(relative, relative)
            self._moments = [total + weight * one * other for total, (one, other) in zip(self._moments, squares)]

    def misled(self, kinds: Sequence[Kind]) -> float:
        """Log factor by which the profile of a model that no round had shown is grossly wrong, else 0."""
        if not self.count or self.played >= 1.0:
            return 0.0
        off = median([kind.seen - kind.expected for kind in kinds])
        return off if abs(off) > _GROSS else 0.0

    def rescale(self, off: float) -> None:
        """Takes the level of a profile from the first rounds, by a log factor; its shape stays."""
        factor = math.exp(off)
        self._scale += off * self.count
        self._sums = [total / factor for total in self._sums]
        self._moments = [total / factor / factor for total in self._moments]
        self._fitted = [factor * value for value in self._fitted]

    def clip(self, kinds: Sequence[Kind]) -> None:
        """Pulls what was seen to three spreads from what is expected, per round that it takes to move a median.

        Residuals teach the spread.
        """
        if self.count < KNOWN:
            return
        wide, told, size = 3.0 * self._spread[0] / self._spread[1], 0, 0.0
        for kind in kinds:
            limit = max(wide, 0.15 if kind.known else 1.0) * ((kind.rounds + 1) // 2)
            residual = min(max(kind.seen - kind.expected, -limit), limit)
            single = abs(residual) * math.sqrt(min(max(_MEDIAN * kind.weight, 1.0), _MANY))  # of a pass, not a median
            told += kind.rounds
            size += kind.rounds * single
            kind.seen = kind.expected + residual
        fade = 0.95**told
        self._spread[0] = self._spread[0] * fade + (1.0 - fade) * 1.25 * size / told
        self._spread[1] = self._spread[1] * fade + (1.0 - fade)

    def coefficients(self) -> Sequence[float]:
        """Seconds per regressor; fitted again once half of the passes are new."""
        if self._fresh > self.count / 2.0:
            prior = math.exp(self._scale / self.count) * np.array(SHAPE)
            moments = np.array(self._moments).reshape(4, 4) * np.outer(prior, prior)
            root = np.linalg.cholesky(moments + _RIDGE * np.eye(4))  # in units of the prior
            goal = np.linalg.solve(root, np.array(self._sums) * prior + _RIDGE)
            self._fitted = (nnls(root.T, goal)[0] * prior).tolist()
            self._fresh = 0.0
        return self._fitted

    @property
    def spread(self) -> float:
        """Of the log of one pass's seconds."""
        return max(self._spread[0] / self._spread[1], _NARROW)

    @property
    def doubt(self) -> float:
        """Standard deviation of the level of all log seconds."""
        priors = self._priors
        profiled = (self.count > 0.0) * priors.profile_spread**-2
        return 1.0 / math.sqrt(priors.unmeasured_spread**-2 + profiled + self.played * self.spread**-2)

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "played": self.played,
            "fresh": self._fresh,
            "scale": self._scale,
            "moments": [self._moments[row : row + 4] for row in (0, 4, 8, 12)],
            "sums": list(self._sums),
            "spread": list(self._spread),
            "fitted": list(self._fitted),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.played = state["count"], state["played"]
        self._fresh, self._scale = state["fresh"], state["scale"]
        self._moments, self._sums = [value for row in state["moments"] for value in row], list(state["sums"])
        self._spread, self._fitted = list(state["spread"]), list(state["fitted"])


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    """The sum of products."""
    return sum([left * right for left, right in zip(one, other)])
