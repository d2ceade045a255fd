"""All fixed plans at once in a world: what the oracle knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from adaspec.bench.replay import check, pairs_of
from adaspec.bench.traces import Ints
from adaspec.bench.worlds import World
from adaspec.plan import Plan, PlanSpace
from adaspec.theory import Floats


def _beneath(plan: Plan) -> Plan:
    """The chain beneath the first model, as a plan of its own."""
    return Plan(plan.models[1:], plan.windows[1:])


@dataclass(frozen=True, slots=True)
class Table:
    """One round of a plan from every position: tokens and true seconds; [positions] each."""

    tokens: Ints
    seconds: Floats


class FixedPlans:
    """What every plan of a space would take on its own, from the first position on: the oracle's knowledge."""

    def __init__(self, world: World, space: PlanSpace) -> None:
        check(world, space)
        self._world = world
        self._last = world.positions - 1
        self._slower = {model: _per_position(world, model) for model in world.speeds}
        self._rows = np.concatenate([np.full(one.stop - one.start, one.rows) for one in world.segments])
        self._longest = max((max(plan.windows, default=0) for plan in space), default=0)
        self._fills: dict[Plan, Floats] = {}
        self.tables = [self._table(plan) for plan in space]

    def marks(self, arm: int, start: int = 0, stop: int | None = None) -> tuple[Ints, Floats]:
        """(positions, seconds) at the ends of the rounds of a plan that begins at ``start``, 0 seconds at first."""
        stop = self._world.positions if stop is None else stop
        tokens, seconds = self.tables[arm].tokens.tolist(), self.tables[arm].seconds.tolist()
        at, spent = start, 0.0
        positions, total = [at], [spent]
        while at < stop:
            spent += seconds[at]
            at += tokens[at]
            positions.append(at)
            total.append(spent)
        return np.array(positions), np.array(total)

    def _time(self, model: str, query_len: Ints | int) -> Floats:
        """Seconds of a pass of ``query_len`` positions per row, at every position; [positions]."""
        speed = self._world.speeds[model]
        flat = speed.base[np.minimum(np.asarray(query_len) * self._rows, len(speed.base) - 1)]
        spent: Floats = (flat + speed.cached * self._world.seq_len * self._rows) * self._slower[model]
        return spent

    def _table(self, plan: Plan) -> Table:
        if plan.depth == 1:
            return self._plain(plan)
        world = self._world
        offered, accepted = world.pairs[pairs_of(plan)[0]]
        asked = np.minimum(plan.windows[0], world.left - 1)
        held = np.minimum(offered, asked)
        kept = np.minimum(accepted, held)
        seconds = self._drafting(_beneath(plan), asked, held) + self._time(plan.target, held + 1)
        tokens = kept + 1
        if (self._rows > 1).any():
            tokens, seconds = self._batched(plan, tokens, held, seconds)
        for start in world.starts():
            seconds[start] += self._first(plan, int(start))
        return Table(tokens, seconds)

    def _plain(self, plan: Plan) -> Table:
        ends = np.concatenate([np.full(one.stop - one.start, one.stop) for one in self._world.segments])
        tokens = np.minimum(self._rows, ends - np.arange(self._last + 1))
        return Table(tokens, self._time(plan.target, 1))

    def _first(self, plan: Plan, start: int) -> float:
        """Seconds to feed the prompt of a new sequence to the plan's drafters."""
        length, spent = int(self._world.seq_len[start]), 0.0
        for model in plan.models[1:]:
            if model not in self._world.lookups and length > 2:
                spent += self._world.catch_up(model, length - 1, length, float(self._slower[model][start]))
        return spent

    def _drafting(self, tail: Plan, asked: Ints, held: Ints) -> Floats:
        """Seconds until a tail has handed over what it was ``asked`` for, a model that only drafts ``held`` tokens."""
        if tail.depth == 1 and tail.target not in self._world.lookups:
            return self._time(tail.target, 1) * held
        spent: Floats = self._fill(tail)[asked, np.arange(self._last + 1)]
        return spent

    def _fill(self, tail: Plan) -> Floats:
        """Seconds until a tail of a chain has handed over n = 0 .. longest tokens; [longest + 1, positions]."""
        if tail not in self._fills:
            self._fills[tail] = self._filled(tail)
        return self._fills[tail]

    def _filled(self, tail: Plan) -> Floats:
        model, spent = tail.models[0], np.zeros((self._longest + 1, self._last + 1))
        one = self._time(model, 1)
        if tail.depth == 1:  # a lookup drafter; what a model drafts depends on who asks
            spent[1:] = one
            return spent
        blocks: dict[int, tuple[Ints, Floats]] = {}
        for need in range(1, self._longest + 1):
            asked = min(tail.windows[0], need - 1)
            if asked not in blocks:
                blocks[asked] = self._block(tail, asked) if asked else (np.ones_like(self._rows), one)
            emitted, seconds = blocks[asked]
            behind = np.minimum(np.arange(self._last + 1) + emitted, self._last)
            spent[need] = seconds + spent[need - emitted, behind]
        return spent

    def _block(self, tail: Plan, asked: int) -> tuple[Ints, Floats]:
        """Tokens and seconds of one verification of ``asked`` tokens; [positions] each."""
        offered, accepted = self._world.pairs[pairs_of(tail)[0]]
        held = np.minimum(offered, asked)
        drafting = self._drafting(_beneath(tail), np.full_like(held, asked), held)
        return np.minimum(accepted, held) + 1, drafting + self._time(tail.target, held + 1)

    def _batched(self, plan: Plan, tokens: Ints, held: Ints, single: Floats) -> tuple[Ints, Floats]:
        """Rows read the text in turn, each from where the one before it ended."""
        stop = np.concatenate([np.full(one.stop - one.start, one.stop) for one in self._world.segments])
        begin = np.arange(self._last + 1)
        at, longest = begin.copy(), np.zeros_like(begin)
        for row in range(int(self._rows.max())):
            here = np.minimum(at, self._last)
            active = (row < self._rows) & (at < stop)
            longest = np.where(active, np.maximum(longest, held[here]), longest)
            at = np.where(active, at + tokens[here], at)
        drafts = self._drafting(_beneath(plan), np.full_like(longest, plan.windows[0]), longest)
        several = drafts + self._time(plan.target, longest + 1)
        return at - begin, np.where(self._rows > 1, several, single)


def _per_position(world: World, model: str) -> Floats:
    """The factor on a model's seconds at every position."""
    return np.concatenate([np.full(one.stop - one.start, one.slower.get(model, 1.0)) for one in world.segments])


def seconds_to(marks: tuple[Ints, Floats], positions: Iterable[int] | Sequence[int] | Ints) -> Floats:
    """Seconds at which a plan has committed up to each of ``positions``, linear within a round."""
    spent: Floats = np.interp(np.asarray(positions, dtype=float), *marks)
    return spent
