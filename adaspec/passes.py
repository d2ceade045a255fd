"""Seconds of a pass: per model, query length, batch size and cached length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from adaspec.outcome import Pass
from adaspec.plan import Context, PlanSpace
from adaspec.priors import CostPriors
from adaspec.regression import CONTEXT, KNOWN, SHAPE, Kind, Regression, dot
from adaspec.theory import Floats

_SLOTS = ("count", "log", "batch", "cached")  # of a cell: sums over passes


class Passes:
    """A regression per model (``Regression``), corrected per query length seen.

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
        self._ratio = [1.0, *below]
        self._steps = np.arange(query_lens, dtype=np.float64)
        self._reset()

    def _reset(self) -> None:
        self._models = [Regression(self._priors) for _ in self.rows]
        self._cells: dict[int, Floats] = {}  # per bucket [4, models, query_lens], see _SLOTS

    def _at(self, bucket: int) -> Floats:
        if bucket not in self._cells:
            self._cells[bucket] = np.zeros((len(_SLOTS), len(self.rows), self.query_lens))
        return self._cells[bucket]

    def forget(self, bucket: int, rounds: int) -> None:
        """Lets rounds pass: what is not played again is trusted less."""
        keep = self._priors.idle_keep**rounds
        self._at(bucket)[:] *= keep
        for model in self._models:
            model.played *= keep

    def profile(self, passes: Iterable[Pass]) -> None:
        """Takes start-up measurements, as they are; the median of like passes."""
        for row, kinds in self._kinds([tuple(passes)]).items():
            self._add(row, kinds)

    def learn(self, rounds: Sequence[Sequence[Pass]]) -> list[float]:
        """Takes the passes of some rounds; returns the seconds of outliers in each.

        The (lower) median of like passes is one observation, pulled in when it is far from what is expected.
        """
        outliers = [0.0] * len(rounds)
        alike = self._kinds(rounds)
        for row, kinds in alike.items():
            for kind in kinds:
                self._expect(row, kind)
        for row, kinds in alike.items():
            model = self._models[row]
            if off := model.misled(kinds):
                self._rescale(row, off)
                for kind in kinds:
                    kind.expected += off
            model.clip(kinds)
            model.played += sum([kind.weight for kind in kinds])
            self._add(row, kinds)
            for kind in kinds:
                _count_outliers(kind, outliers)
        return outliers

    def _kinds(self, rounds: Sequence[Sequence[Pass]]) -> dict[int, list[Kind]]:
        """Like passes of some rounds, by row of their model."""
        alike: dict[tuple[str, int, int], list[tuple[float, int, int]]] = {}
        for number, passes in enumerate(rounds):
            for one in passes:
                key, entry = (one.model, one.query_len, one.batch_size), (one.seconds, number, one.seq_len)
                if key in alike:
                    alike[key].append(entry)
                else:
                    alike[key] = [entry]
        found: dict[int, list[Kind]] = {}
        for (name, query_len, batch), group in alike.items():
            if name in self.rows and 1 <= query_len < self.query_lens:
                kind = Kind.of(query_len, batch, Context(batch).bucket, group)
                found.setdefault(self.rows[name], []).append(kind)
        return found

    def _expect(self, row: int, kind: Kind) -> None:
        """Notes the log seconds that are expected of a kind of passes, and whether its cell knows."""
        count, log = self._at(kind.bucket)[:2, row, kind.query_len].tolist()
        kind.known = count >= KNOWN
        line = self._coefficients(row)
        kind.expected = log / count if kind.known else math.log(max(dot(kind.features, line), 1e-9))

    def _rescale(self, row: int, off: float) -> None:
        """Takes the level of a profile from the first rounds, by a log factor."""
        self._models[row].rescale(off)
        for cells in self._cells.values():
            cells[1, row] += cells[0, row] * off

    def _add(self, row: int, kinds: Sequence[Kind]) -> None:
        """One observation of each kind into the regression and the cells."""
        self._models[row].add(kinds)
        rounds = {(kind.bucket, kind.query_len): kind.rounds for kind in kinds}  # batch sizes may share a bucket
        for (bucket, query_len), number in rounds.items():
            self._at(bucket)[:, row, query_len] *= self._priors.pass_keep**number
        for kind in kinds:
            sums = (1.0, kind.seen, kind.batch, kind.cached)  # see _SLOTS
            self._at(kind.bucket)[:, row, kind.query_len] += [kind.weight * one for one in sums]

    def _coefficients(self, row: int) -> Sequence[float]:
        """Seconds per regressor of a model."""
        model, target = self._models[row], self._models[0]
        if model.count:
            return model.coefficients()
        like = target.coefficients() if target.count else [self._priors.target_seconds * one for one in SHAPE]
        return [self._ratio[row] * one for one in like]

    def table(self, context: Context) -> tuple[Floats, Floats, Floats]:
        """Log seconds [models, query_lens], their spread per model [models, 1] and per cell [models, query_lens]."""
        count, log, batch, cached = self._at(context.bucket)
        known = [(*self._coefficients(row), one.doubt, one.spread) for row, one in enumerate(self._models)]
        base, each, each_row, each_cached, doubt, spread = np.array(known).T[:, :, None]  # [models, 1] each
        steps = self._steps
        here = (each + each_row * context.batch_size) * steps
        here += base + each_cached * (context.batch_size * context.seq_len / CONTEXT)
        logs = np.log(np.maximum(here, 1e-9))
        passes = np.maximum(count, 1e-9)
        there = base + (each + each_row * (batch / passes)) * steps + each_cached * (cached / (passes * CONTEXT))
        moved = log / passes - np.log(np.maximum(there, 1e-9))
        trusted = count + self._priors.pass_strength
        logs += count / trusted * moved
        return logs, doubt, spread / np.sqrt(trusted)

    @property
    def evidence(self) -> Floats:
        """What the seconds of each model rest on, in rounds; [models]. Below 1 before any round has shown it."""
        return np.array([model.played for model in self._models])

    @property
    def profiled(self) -> Floats:
        """What a start-up profile counts for, in the same unit; [models]."""
        return np.array([(model.spread / self._priors.profile_spread) ** 2 for model in self._models])

    def state_dict(self) -> dict[str, Any]:
        """Sums by model; all numbers but ``fitted`` add up over replicas."""
        return {
            "models": {name: self._models[row].state_dict() for name, row in self.rows.items()},
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
                self._models[self.rows[name]].load_state_dict(kept)
        for bucket, models in state["cells"].items():
            cells = self._at(int(bucket))
            for name, kept in models.items():
                for query_len, sums in kept.items():
                    if name in self.rows and int(query_len) < self.query_lens:
                        cells[:, self.rows[name], int(query_len)] = sums


def _count_outliers(kind: Kind, outliers: list[float]) -> None:
    """Adds what the passes of a kind took beyond twice the usual to the seconds ``outliers`` of their rounds."""
    usual = 2.0 * math.exp(kind.seen)
    for seconds, number, _ in reversed(kind.spent):
        if seconds <= usual:
            break
        outliers[number] += seconds - usual


def check_passes(passes: Sequence[Pass]) -> None:
    """Refuses impossible times.

    Raises:
        ValueError: a pass whose seconds are negative or no number.
    """
    for one in passes:
        if not 0.0 <= one.seconds < math.inf:
            raise ValueError(f"a pass takes time, got {one.seconds} s of {one.model}")
