"""Seconds of a pass: per model, query length, batch size and cached length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from adaspec.outcome import Pass
from adaspec.plan import Context, PlanSpace
from adaspec.priors import CostPriors
from adaspec.theory import Floats

_RIDGE = 0.01  # weight of the shape below, in passes
_SHAPE = np.array([1.0, 0.02, 0.02, 0.05])  # relative seconds: per pass, per position, per batch x position, per ...
_CONTEXT = 1024.0  # ... this many cached tokens of the batch
_KNOWN = 3.0  # passes before an observation can be an outlier
_MEDIAN = 2.0 / math.pi  # variance of one over that of a median, per value
_GROSS = 0.4  # log factor from which a profile is not noisy but wrong
_MANY = 10.0  # beyond it, what moves a median is no noise of its passes
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
        self._numbers = np.arange(len(self.rows))[:, None]
        self._steps = np.arange(query_lens, dtype=np.float64)
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
        kinds = self._kinds([tuple(passes)])
        if kinds:
            self._add(kinds, kinds.seen)

    def learn(self, rounds: Sequence[Sequence[Pass]]) -> list[float]:
        """Takes the passes of some rounds; returns the seconds of outliers in each.

        The (lower) median of like passes is one observation, pulled in when it is far from what is expected.
        """
        outliers = [0.0] * len(rounds)
        kinds = self._kinds(rounds)
        if not kinds:
            return outliers
        expected, known = self._expected(kinds)
        off = self._misled(kinds, expected)
        if off.any():
            self._rescale(off)
            expected += off[kinds.row]
        seen = self._clipped(kinds, expected, known)
        self._played += np.bincount(kinds.row, kinds.weight, len(self.rows))
        self._add(kinds, seen)
        for usual, spent in zip((2.0 * np.exp(seen)).tolist(), kinds.spent):
            place = len(spent)
            while place and spent[place - 1][0] > usual:
                place -= 1
                outliers[spent[place][1]] += spent[place][0] - usual
        return outliers

    def _kinds(self, rounds: Sequence[Sequence[Pass]]) -> _Kinds | None:
        alike: dict[tuple[str, int, int], list[tuple[float, int, int]]] = {}
        for number, passes in enumerate(rounds):
            for one in passes:
                key, entry = (one.model, one.query_len, one.batch_size), (one.seconds, number, one.seq_len)
                if key in alike:
                    alike[key].append(entry)
                else:
                    alike[key] = [entry]
        known = [(key, group) for key, group in alike.items() if key[0] in self.rows and 1 <= key[1] < self.query_lens]
        return _Kinds.of(known, self.rows) if known else None

    def _add(self, kinds: _Kinds, seen: Floats) -> None:
        """One observation of each kind into the regressions and cells."""
        features, weight = kinds.features, kinds.weight
        members = (self._numbers == kinds.row) * weight  # [models, kinds]
        relative = features * np.exp(-seen)[:, None]
        keep = self._priors.round_keep ** np.max((members > 0.0) * kinds.rounds, axis=1)
        gained = members.sum(axis=1)
        self._count = self._count * keep + gained
        self._fresh += gained
        self._scale = self._scale * keep + members @ (seen - np.log(features @ _SHAPE))
        self._sums = self._sums * keep[:, None] + members @ relative
        products = (relative[:, :, None] * relative[:, None, :]).reshape(-1, 16)
        self._moments = self._moments * keep[:, None, None] + (members @ products).reshape(-1, 4, 4)
        sums = (weight * np.array((np.ones_like(seen), seen, kinds.batch, kinds.cached))).T  # [kinds, 4], see _SLOTS
        fade = (self._priors.pass_keep**kinds.rounds)[:, None]
        for bucket, held in kinds.buckets():
            cells = self._at(bucket).reshape(len(_SLOTS), -1).T  # [models x query_lens, 4]
            at = kinds.row[held] * self.query_lens + kinds.query_len[held]
            cells[at] *= fade[held]
            if len(set(at.tolist())) == len(at):
                cells[at] += sums[held]
            else:  # several batch sizes in one bucket
                np.add.at(cells, at, sums[held])

    def _expected(self, kinds: _Kinds) -> tuple[Floats, NDArray[np.bool_]]:
        """Log seconds that are expected of kinds of passes, and whether their cells know; [kinds] each."""
        cells = np.empty((2, len(kinds.row)))  # passes, log seconds
        for bucket, held in kinds.buckets():
            cells[:, held] = self._at(bucket)[:2, kinds.row[held], kinds.query_len[held]]
        known = cells[0] >= _KNOWN
        lines = (kinds.features * self._coefficients()[kinds.row]).sum(axis=1)
        expected = np.where(known, cells[1] / np.maximum(cells[0], _KNOWN), np.log(np.maximum(lines, 1e-9)))
        return expected, known

    def _misled(self, kinds: _Kinds, expected: Floats) -> Floats:
        """Log factors by which the profile of models that no round had shown is grossly wrong, else 0; [models]."""
        off = np.zeros(len(self.rows))
        for row in np.flatnonzero((self._played < 1.0) & (self._count > 0.0)):
            apart = (kinds.seen - expected)[kinds.row == row]
            if apart.size and abs(median := float(np.median(apart))) > _GROSS:
                off[row] = median
        return off

    def _rescale(self, off: Floats) -> None:
        """Takes the level of a profile from the first rounds, by log factors [models]; its shape stays."""
        factor = np.exp(off)[:, None]
        self._scale += off * self._count
        self._sums /= factor
        self._moments /= factor[:, None] ** 2
        self._fitted *= factor
        for cells in self._cells.values():
            cells[1] += cells[0] * off[:, None]

    def _clipped(self, kinds: _Kinds, expected: Floats, known: NDArray[np.bool_]) -> Floats:
        """Log seconds, pulled to three spreads from what is expected per round that it takes to move a median; [kinds].

        Residuals teach the spread.
        """
        sure = self._count[kinds.row] >= _KNOWN
        if not sure.any():
            return kinds.seen
        total, weight = self._spread[:, kinds.row]
        limit = np.maximum(3.0 * total / weight, np.where(known, 0.15, 1.0)) * ((kinds.rounds + 1.0) // 2.0)
        residual = np.minimum(np.maximum(kinds.seen - expected, -limit), limit)
        told = np.bincount(kinds.row, sure * kinds.rounds, len(self.rows))
        single = np.abs(residual) * np.sqrt(np.clip(_MEDIAN * kinds.weight, 1.0, _MANY))  # of one pass, not of a median
        size = np.bincount(kinds.row, sure * kinds.rounds * single, len(self.rows))
        fade = 0.95**told
        self._spread[0] = self._spread[0] * fade + (1.0 - fade) * 1.25 * size / np.maximum(told, 1.0)
        self._spread[1] = self._spread[1] * fade + (1.0 - fade)
        return np.where(sure, expected + residual, kinds.seen)

    def _coefficients(self) -> Floats:
        """Seconds per regressor, [models, 4]; a model is fitted again once half of its passes are new."""
        for row in np.flatnonzero(self._fresh > self._count / 2.0):
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
        steps = self._steps
        here = (each + each_row * context.batch_size) * steps
        here += base + each_cached * (context.batch_size * context.seq_len / _CONTEXT)
        logs = np.log(np.maximum(here, 1e-9))
        passes = np.maximum(count, 1e-9)
        there = base + (each + each_row * (batch / passes)) * steps + each_cached * (cached / (passes * _CONTEXT))
        moved = log / passes - np.log(np.maximum(there, 1e-9))
        trusted = count + priors.pass_strength
        logs += count / trusted * moved
        spread = np.maximum(self._spread[0] / self._spread[1], 0.02)
        profiled = (self._count > 0.0) * priors.profile_spread**-2
        common = 1.0 / np.sqrt(priors.unmeasured_spread**-2 + profiled + self._played * spread**-2)
        return logs, common[:, None], spread[:, None] / np.sqrt(trusted)

    @property
    def evidence(self) -> Floats:
        """What the seconds of each model rest on, in rounds; [models]. Below 1 before any round has shown it."""
        return self._played

    @property
    def profiled(self) -> Floats:
        """What a start-up profile counts for, in the same unit; [models]."""
        spread = np.maximum(self._spread[0] / self._spread[1], 0.02)
        weight: Floats = (spread / self._priors.profile_spread) ** 2
        return weight

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


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Like passes (same model, query length and batch size) as one observation each; arrays are [kinds]."""

    row: NDArray[np.intp]
    query_len: NDArray[np.intp]
    batch: NDArray[np.intp]
    weight: Floats  # passes
    rounds: Floats  # in which there was one
    cached: Floats  # mean tokens over the batch
    seen: Floats  # log of the median seconds
    features: Floats  # [kinds, 4]
    spent: list[list[tuple[float, int, int]]]  # seconds, round, cached tokens of a row; by seconds

    @classmethod
    def of(
        cls, known: Sequence[tuple[tuple[str, int, int], list[tuple[float, int, int]]]], rows: Mapping[str, int]
    ) -> _Kinds:
        for _, group in known:
            group.sort()
        row, query_len, batch = np.array([(rows[model], q, size) for (model, q, size), _ in known]).T
        weight, rounds, seen, seq_len = np.array(
            [
                (
                    len(group),
                    len({one[1] for one in group}),
                    group[(len(group) - 1) // 2][0],
                    sum([one[2] for one in group]),
                )
                for _, group in known
            ]
        ).T
        cached = batch * seq_len / weight
        features = np.array((np.ones_like(weight), query_len, batch * query_len, cached / _CONTEXT)).T
        spent = [group for _, group in known]
        return cls(row, query_len, batch, weight, rounds, cached, np.log(np.maximum(seen, 1e-9)), features, spent)

    def buckets(self) -> list[tuple[int, slice | NDArray[np.bool_]]]:
        """Which kinds belong to which bucket of batch sizes."""
        sizes = [Context(size).bucket for size in self.batch.tolist()]
        if len(set(sizes)) == 1:
            return [(sizes[0], slice(None))]
        return [(bucket, np.array(sizes) == bucket) for bucket in dict.fromkeys(sizes)]


def check_passes(passes: Sequence[Pass]) -> None:
    """Refuses impossible times.

    Raises:
        ValueError: a pass whose seconds are negative or no number.
    """
    for one in passes:
        if not 0.0 <= one.seconds < math.inf:
            raise ValueError(f"a pass takes time, got {one.seconds} s of {one.model}")
