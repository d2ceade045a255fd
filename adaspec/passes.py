"""Seconds of a pass: per model, query length, batch size and cached length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from adaspec.outcome import Pass
from adaspec.plan import Context, PlanSpace
from adaspec.priors import CostPriors
from adaspec.theory import Floats

_RIDGE = 0.01  # weight of the shape below, in passes
_SHAPE = np.array([1.0, 0.02, 0.02, 0.05])  # relative seconds: per pass, per position, per batch x position, per ...
_CONTEXT = 1024.0  # ... this many cached tokens of the batch
_KNOWN = 3.0  # passes before an observation can be an outlier
_SLOTS = ("count", "log", "batch", "cached")  # of a cell: sums over passes


class Passes:
    """A robust, discounted, non-negative regression per model in relative errors, corrected per query length seen.

    The regressors are (1, query length, batch x query length, batch x cached tokens). A *cell* holds the passes of one
    model and query length at one bucket of batch sizes; its mean corrects the regression there. A model that was never
    measured takes the target's coefficients, scaled by its place in the chains.
    """

    def __init__(self, space: PlanSpace, query_lens: int, priors: CostPriors) -> None:
        self._priors = priors
        self.rows = {name: row for row, name in enumerate(space.models)}
        self.query_lens = query_lens
        verifiers = {verifier for plan in space for verifier, _, _ in plan.edges()}
        below = [priors.middle_ratio if name in verifiers else priors.drafter_ratio for name in space.models[1:]]
        self._ratio = np.array([1.0, *below])[:, None]
        self._reset()

    def _reset(self) -> None:
        models = len(self.rows)
        self._count, self._played, self._fresh, self._scale = np.zeros((4, models))
        self._moments, self._sums = np.zeros((models, 4, 4)), np.zeros((models, 4))
        self._fitted = np.zeros((models, 4))
        self._spread = np.tile([[self._priors.pass_spread], [1.0]], (1, models))  # of log seconds: sum and weight
        self._cells: dict[int, Floats] = {}  # per bucket [4, models, query_lens], see _SLOTS

    def _at(self, bucket: int) -> Floats:
        if bucket not in self._cells:
            self._cells[bucket] = np.zeros((len(_SLOTS), len(self.rows), self.query_lens))
        return self._cells[bucket]

    def forget(self, bucket: int, rounds: int) -> None:
        """Lets rounds pass: what is not played again is trusted less."""
        keep = self._priors.idle_keep**rounds
        self._at(bucket)[:] *= keep
        self._played *= keep

    def profile(self, passes: Iterable[Pass]) -> None:
        """Takes start-up measurements, as they are; the median of like passes."""
        for key, group in self._alike(passes).items():
            self._learn(*key, group, 1, profile=True)

    def learn(self, passes: Iterable[Pass], rounds: int) -> float:
        """Takes the passes of some rounds; returns the seconds of outliers.

        The median of like passes is one observation, pulled in when it is far from what is expected.
        """
        return sum(self._learn(*key, group, rounds) for key, group in self._alike(passes).items())

    def _alike(self, passes: Iterable[Pass]) -> dict[tuple[int, int, int], list[Pass]]:
        alike: dict[tuple[int, int, int], list[Pass]] = {}
        for one in passes:
            row = self.rows.get(one.model)
            if row is not None and 1 <= one.query_len < self.query_lens:
                key = (row, one.query_len, one.batch_size)
                if key in alike:
                    alike[key].append(one)
                else:
                    alike[key] = [one]
        return alike

    def _learn(
        self, row: int, query_len: int, batch_size: int, group: list[Pass], rounds: int, profile: bool = False
    ) -> float:
        spent, weight = [one.seconds for one in group], float(len(group))
        cached = batch_size * sum(one.seq_len for one in group) / weight
        features = np.array([1.0, query_len, batch_size * query_len, cached / _CONTEXT])
        seen = math.log(max(sorted(spent)[len(spent) // 2], 1e-9))
        cell = self._at(Context(batch_size).bucket)[:, row, query_len]
        if not profile:
            seen = self._clipped(row, cell, features, seen, rounds)
            self._played[row] += weight
        self._add(row, features, seen, weight, self._priors.round_keep**rounds)
        cell *= self._priors.pass_keep**rounds
        cell += [weight, weight * seen, weight * batch_size, weight * cached]
        usual = 2.0 * math.exp(seen)
        return sum(seconds - usual for seconds in spent if seconds > usual)

    def _add(self, row: int, features: Floats, seen: float, weight: float, keep: float) -> None:
        """One observation into a model's regression."""
        relative = features * math.exp(-seen)
        self._count[row] = self._count[row] * keep + weight
        self._scale[row] = self._scale[row] * keep + weight * (seen - math.log(float(features @ _SHAPE)))
        self._fresh[row] += weight
        self._moments[row] = self._moments[row] * keep + weight * relative[:, None] * relative
        self._sums[row] = self._sums[row] * keep + weight * relative

    def _clipped(self, row: int, cell: Floats, features: Floats, seen: float, rounds: int) -> float:
        """Pulls an outlier to three spreads per round (log scale) from what is expected.

        The spread follows the residuals.
        """
        if self._count[row] < _KNOWN:
            return seen
        known = bool(cell[0] >= _KNOWN)
        expected = cell[1] / cell[0] if known else math.log(max(float(features @ self._coefficients()[row]), 1e-9))
        total, weight = self._spread[:, row]
        limit = max(3.0 * total / weight, 0.15 if known else 1.0) * rounds
        residual = min(max(seen - expected, -limit), limit)
        fade = 0.95**rounds
        self._spread[:, row] = fade * total + (1.0 - fade) * 1.25 * abs(residual), fade * weight + 1.0 - fade
        return float(expected + residual)

    def _coefficients(self) -> Floats:
        """Seconds per regressor, [models, 4]; a model is fitted again once an eighth of its passes is new."""
        for row in np.flatnonzero(self._fresh > self._count / 8.0):
            prior = math.exp(self._scale[row] / self._count[row]) * _SHAPE
            moments = self._moments[row] * np.outer(prior, prior) + _RIDGE * np.eye(4)  # in units of the prior
            root = np.linalg.cholesky(moments)
            goal = np.linalg.solve(root, self._sums[row] * prior + _RIDGE)
            self._fitted[row] = nnls(root.T, goal)[0] * prior
            self._fresh[row] = 0.0
        if self._count.all():
            return self._fitted
        target = self._fitted[0] if self._count[0] else self._priors.target_seconds * _SHAPE
        return np.where(self._count[:, None] > 0.0, self._fitted, self._ratio * target)

    def table(self, context: Context) -> tuple[Floats, Floats, Floats]:
        """Log seconds [models, query_lens], their spread per model [models, 1] and per cell [models, query_lens]."""
        priors, (count, log, batch, cached) = self._priors, self._at(context.bucket)
        base, each, each_row, each_cached = self._coefficients().T[:, :, None]  # [models, 1] each
        positions = np.arange(self.query_lens)
        here = base + (each + each_row * context.batch_size) * positions
        here = np.log(np.maximum(here + each_cached * (context.batch_size * context.seq_len / _CONTEXT), 1e-9))
        passes = np.maximum(count, 1e-9)
        there = base + (each + each_row * (batch / passes)) * positions + each_cached * (cached / passes / _CONTEXT)
        moved = log / passes - np.log(np.maximum(there, 1e-9))
        logs: Floats = here + count / (count + priors.pass_strength) * moved
        spread = np.maximum(self._spread[0] / self._spread[1], 0.02)
        profiled = np.where(self._count > 0.0, priors.profile_spread**-2, 0.0)
        common = 1.0 / np.sqrt(priors.unmeasured_spread**-2 + profiled + self._played * spread**-2)
        return logs, common[:, None], spread[:, None] / np.sqrt(priors.pass_strength + count)

    def state_dict(self) -> dict[str, Any]:
        """Sums by model; all numbers but ``fitted`` add up over replicas."""
        return {
            "models": {
                name: {
                    "count": float(self._count[row]),
                    "played": float(self._played[row]),
                    "fresh": float(self._fresh[row]),
                    "scale": float(self._scale[row]),
                    "moments": self._moments[row].tolist(),
                    "sums": self._sums[row].tolist(),
                    "spread": self._spread[:, row].tolist(),
                    "fitted": self._fitted[row].tolist(),
                }
                for name, row in self.rows.items()
            },
            "cells": {
                str(bucket): {
                    name: {str(q): cells[:, row, q].tolist() for q in range(self.query_lens) if cells[0, row, q]}
                    for name, row in self.rows.items()
                }
                for bucket, cells in self._cells.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reset()
        for name, kept in state["models"].items():
            if name in self.rows:
                self._read(self.rows[name], kept)
        for bucket, models in state["cells"].items():
            cells = self._at(int(bucket))
            for name, kept in models.items():
                for query_len, sums in kept.items():
                    if name in self.rows and int(query_len) < self.query_lens:
                        cells[:, self.rows[name], int(query_len)] = sums

    def _read(self, row: int, kept: Mapping[str, Any]) -> None:
        self._count[row], self._played[row] = kept["count"], kept["played"]
        self._fresh[row], self._scale[row] = kept["fresh"], kept["scale"]
        self._moments[row], self._sums[row] = kept["moments"], kept["sums"]
        self._spread[:, row] = kept["spread"]
        self._fitted[row] = kept["fitted"]


def check_passes(passes: Sequence[Pass]) -> None:
    """Refuses impossible times.

    Raises:
        ValueError: a pass whose seconds are negative or no number.
    """
    for one in passes:
        if not 0.0 <= one.seconds < math.inf:
            raise ValueError(f"a pass takes time, got {one.seconds} s of {one.model}")
