"""Decodes in a world: round by round for a policy, and for all fixed plans at once for the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from adaspec.bench.traces import Ints
from adaspec.bench.worlds import Segment, World
from adaspec.outcome import EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context, Plan, PlanSpace
from adaspec.theory import Edge, Floats

_NOISE = 1 << 14  # factors on the seconds of passes, drawn once and used in turn


class Replay:
    """Plays rounds in a world, with outcomes as the decoder reports them.

    A pass is charged what the world says for its length, positions and rows. A drafter's pass over the one token it
    lacks after a wholly accepted draft counts as a pass over one. A model that was idle catches up first.

    Args:
        world: where.
        space: the plans that may be played; its longest windows are those that idle lookup drafters are scored with.
        seed: of the noise on what is measured.
        follow: every drafter is fed what is committed, and scored on it, at the cost of a pass (HedgeSpec's setting).

    Raises:
        ValueError: a plan that the world knows nothing of, or of more than two models with several rows.
    """

    def __init__(self, world: World, space: PlanSpace, seed: int = 0, follow: bool = False) -> None:
        check(world, space)
        self.world, self._follow = world, follow
        self.position = 0
        self.true_seconds = 0.0  # of all rounds, without noise
        self._pairs: dict[Edge, tuple[list[int], list[int]]] = {
            edge: (offered.tolist(), accepted.tolist()) for edge, (offered, accepted) in world.pairs.items()
        }
        self._left: list[int] = world.left.tolist()
        self._seq_len: list[int] = world.seq_len.tolist()
        self._base: dict[str, list[float]] = {model: speed.base.tolist() for model, speed in world.speeds.items()}
        self._cached = {model: speed.cached for model, speed in world.speeds.items()}
        rng = np.random.default_rng(seed)
        noise = np.exp(world.noise * rng.standard_normal(_NOISE)) * np.where(
            rng.random(_NOISE) < world.outliers, 8.0, 1.0
        )
        self._noise: list[float] = noise.tolist()
        self._turn = 0
        self._segments, self._segment = list(world.segments), world.segments[0]
        self._fed: dict[str, int] = {}
        self._scored = _shadow_windows(world, space, follow)
        self._open: dict[str, int] = {}
        self._passes: list[Pass] = []
        self._edges: list[list[tuple[int, int, int]]] = []
        self._spent: list[list[float]] = []
        self._true = 0.0

    @property
    def over(self) -> bool:
        return self.position >= self.world.positions

    @property
    def segment(self) -> Segment:
        """The one that the next round begins in."""
        while self.position >= self._segment.stop and self._segments:
            self._segment = self._segments.pop(0)
        return self._segment

    def context(self) -> Context:
        segment = self.segment
        return Context(segment.rows, self._seq_len[self.position], segment.tag if self.world.tagged else "")

    def round(self, plan: Plan) -> RoundOutcome:
        """Plays one round of ``plan`` and moves on."""
        segment, first = self.segment, self.position
        if first == 0 or self._left[first - 1] == 1:
            self._fed, self._open = {}, {}
        self._passes, self._true = [], 0.0
        self._edges, self._spent = [[] for _ in plan.windows], [[0.0, 0.0] for _ in plan.windows]
        catch_up, true_catch_up = self._catch_up(plan, first, segment)
        if segment.rows == 1:
            self.position += self._verify(plan, 0, first, self._left[first], segment)
        else:
            self.position = self._batch(plan, first, segment)
        tokens = self.position - first
        for model in plan.models[1:]:
            self._fed[model] = self._seq_len[first] + tokens - 1
        if self._follow:
            true_catch_up += self._feed(plan, first, tokens, segment)
        scored = self._score(plan, first)
        self.true_seconds += self._true + true_catch_up
        seconds = sum(one.seconds for one in self._passes) + catch_up
        edges = tuple(
            _edge(*pair, asked, tuple(verifications), *spent)
            for pair, asked, verifications, spent in zip(_pairs_of(plan), plan.windows, self._edges, self._spent)
        )
        return RoundOutcome(tokens, seconds, segment.rows, catch_up, edges, tuple(self._passes), scored)

    def _pass(self, model: str, query_len: int, at: int, segment: Segment) -> float:
        """Adds a pass; returns the seconds that are measured."""
        seq_len = self._seq_len[at]
        true = self._base[model][min(query_len * segment.rows, 256)] + self._cached[model] * seq_len * segment.rows
        true *= segment.slower.get(model, 1.0)
        self._turn = (self._turn + 1) % _NOISE
        seconds = true * self._noise[self._turn]
        self._true += true
        self._passes.append(Pass(model, query_len, segment.rows, seq_len, seconds))
        return seconds

    def _verify(self, plan: Plan, stage: int, at: int, limit: int, segment: Segment) -> int:
        """One verification by ``models[stage]`` at position ``at``; returns the tokens it emits, at most ``limit``."""
        model = plan.models[stage]
        asked = min(plan.windows[stage], limit - 1) if plan.windows else 0
        if not asked:
            spent = self._pass(model, 1, at, segment)
            if plan.windows:
                self._spent[stage][1] += spent
            return 1
        offered, accepted = self._pairs[model, plan.models[stage + 1]]
        held = min(offered[at], asked)
        kept = min(accepted[at], held)
        before = self._draft(plan, stage + 1, at, asked, segment)
        self._spent[stage][0] += before
        self._spent[stage][1] += self._pass(model, held + 1, at, segment)
        self._edges[stage].append((asked, held, kept))
        return kept + 1

    def _draft(self, plan: Plan, stage: int, at: int, need: int, segment: Segment) -> float:
        """Lets ``models[stage]`` hand over ``need`` tokens; returns the seconds that are measured."""
        model = plan.models[stage]
        if stage == len(plan.models) - 1:
            steps = 1 if model in self.world.lookups else need
            return sum([self._pass(model, 1, at, segment) for _ in range(steps)])
        before, last = len(self._passes), self.world.positions - 1
        while need > 0:
            emitted = self._verify(plan, stage, min(at, last), need, segment)
            at, need = at + emitted, need - emitted
        spent: float = sum(one.seconds for one in self._passes[before:])
        return spent

    def _batch(self, plan: Plan, first: int, segment: Segment) -> int:
        """A round of several rows, plans of at most two models; returns the position behind it."""
        at, longest = first, 0
        window = plan.windows[0] if plan.windows else 0
        for _ in range(segment.rows):
            if at >= segment.stop:
                break
            asked, held, kept = _single(
                self._pairs.get(_pairs_of(plan)[0]) if window else None, at, min(window, self._left[at] - 1)
            )
            if asked:
                self._edges[0].append((asked, held, kept))
            at, longest = at + kept + 1, max(longest, held)
        if window:
            self._spent[0][0] = self._draft(plan, 1, first, window, segment)
        spent = self._pass(plan.target, longest + 1, first, segment)
        if window:
            self._spent[0][1] = spent
        return at

    def _catch_up(self, plan: Plan, first: int, segment: Segment) -> tuple[float, float]:
        """Feeds the plan's models what they lack; (measured, true) seconds."""
        true, length = 0.0, self._seq_len[first]
        for model in plan.models[1:]:
            lacking = length - self._fed.get(model, 0)
            if lacking > 2 and model not in self.world.lookups:
                true += self.world.catch_up(model, lacking - 1, length, segment.slower.get(model, 1.0))
        self._turn = (self._turn + 1) % _NOISE
        return true * self._noise[self._turn], true

    def _feed(self, plan: Plan, first: int, tokens: int, segment: Segment) -> float:
        """Every model that did not play takes in what was committed."""
        true, end = 0.0, self._seq_len[first] + tokens
        for model in self._scored:
            if model not in plan.models and model not in self.world.lookups:
                lacking = end - 1 - self._fed.get(model, 0)
                true += self.world.catch_up(model, lacking, end - 1, segment.slower.get(model, 1.0))
                self._fed[model] = end - 1
        return true

    def _score(self, plan: Plan, first: int) -> tuple[EdgeOutcome, ...]:
        """Judges idle drafters on what was committed: whole verifications only, the last one stays open."""
        found = []
        for drafter, window in self._scored.items():
            if drafter in plan.models:
                self._open.pop(drafter, None)
                continue
            offered, accepted = self._pairs[self.world.target, drafter]
            at, verifications = self._open.get(drafter, first), []
            while at < self.position:
                held = min(offered[at], window)
                kept = min(accepted[at], held)
                if kept >= self.position - at:
                    break
                verifications.append((window, held, kept))
                at += kept + 1
            self._open[drafter] = at
            if verifications:
                found.append(_edge(self.world.target, drafter, window, tuple(verifications), None, None))
        return tuple(found)


def check(world: World, space: PlanSpace) -> None:
    """Tells whether every plan of a space can be played in a world.

    Raises:
        ValueError: a plan with a pair or model that the world does not have, or too deep for several rows.
    """
    batched = any(segment.rows > 1 for segment in world.segments)
    for plan in space:
        missing = [f"{v}/{d}" for v, d in _pairs_of(plan) if (v, d) not in world.pairs]
        missing += [model for model in plan.models if model not in world.speeds]
        if missing or plan.target != world.target or plan.stop:
            raise ValueError(
                f"the world cannot play plan {plan}: it lacks {', '.join(missing) or 'its target or stop'}"
            )
        if batched and plan.depth > 2:
            raise ValueError(f"several rows are replayed for plans of two models, got {plan}")


@lru_cache(maxsize=4096)
def _pairs_of(plan: Plan) -> tuple[tuple[str, str], ...]:
    return tuple(zip(plan.models, plan.models[1:]))


def _single(pair: tuple[list[int], list[int]] | None, at: int, asked: int) -> tuple[int, int, int]:
    """(asked, offered, accepted) of one verification."""
    if pair is None or not asked:
        return 0, 0, 0
    held = min(pair[0][at], asked)
    return asked, held, min(pair[1][at], held)


def _shadow_windows(world: World, space: PlanSpace, follow: bool) -> dict[str, int]:
    """Drafters that are scored while idle, with their longest window beneath the target."""
    found: dict[str, int] = {}
    for plan in space:
        if plan.windows and (follow or plan.models[1] in world.lookups):
            found[plan.models[1]] = max(plan.windows[0], found.get(plan.models[1], 0))
    return found


def _edge(
    verifier: str,
    drafter: str,
    window: int,
    verifications: tuple[tuple[int, int, int], ...],
    draft_seconds: float | None,
    verify_seconds: float | None,
) -> EdgeOutcome:
    reached, offered, accepted, asked, drafted = _tally(window, verifications)
    return EdgeOutcome(verifier, drafter, reached, offered, accepted, asked, drafted, draft_seconds, verify_seconds)


@lru_cache(maxsize=65536)
def _tally(window: int, verifications: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Reached, offered, accepted, asked, drafted per position, summed over (asked, offered, accepted)."""
    rows = [[0] * window for _ in range(5)]
    for asked, held, kept in verifications:
        for position in range(min(asked, window)):
            reached = kept >= position
            rows[0][position] += reached
            rows[1][position] += reached and held > position
            rows[2][position] += kept > position
            rows[3][position] += 1
            rows[4][position] += held > position
    return tuple(map(tuple, rows))


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
        world, at = self._world, np.arange(self._last + 1)
        offered, accepted = world.pairs[_pairs_of(plan)[0]]
        asked = np.minimum(plan.windows[0], world.left - 1)
        held = np.minimum(offered, asked)
        kept = np.minimum(accepted, held)
        seconds = self._fill(_beneath(plan))[asked, at] + self._time(plan.target, held + 1)
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

    def _fill(self, tail: Plan) -> Floats:
        """Seconds until a tail of a chain has handed over n = 0 .. longest tokens; [longest + 1, positions]."""
        if tail not in self._fills:
            self._fills[tail] = self._filled(tail)
        return self._fills[tail]

    def _filled(self, tail: Plan) -> Floats:
        model, spent = tail.models[0], np.zeros((self._longest + 1, self._last + 1))
        one = self._time(model, 1)
        if tail.depth == 1:
            for need in range(1, self._longest + 1):
                spent[need] = one * (1 if model in self._world.lookups else need)
            return spent
        inner, blocks = self._fill(_beneath(tail)), dict[int, tuple[Ints, Floats]]()
        for need in range(1, self._longest + 1):
            asked = min(tail.windows[0], need - 1)
            if asked not in blocks:
                blocks[asked] = self._block(tail, asked, inner) if asked else (np.ones_like(self._rows), one)
            emitted, seconds = blocks[asked]
            behind = np.minimum(np.arange(self._last + 1) + emitted, self._last)
            spent[need] = seconds + spent[need - emitted, behind]
        return spent

    def _block(self, tail: Plan, asked: int, inner: Floats) -> tuple[Ints, Floats]:
        """Tokens and seconds of one verification of ``asked`` tokens; [positions] each."""
        offered, accepted = self._world.pairs[_pairs_of(tail)[0]]
        held = np.minimum(offered, asked)
        return np.minimum(accepted, held) + 1, inner[asked] + self._time(tail.models[0], held + 1)

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
        drafts = self._fill(_beneath(plan))[plan.windows[0]]
        several = drafts + self._time(plan.target, longest + 1)
        return at - begin, np.where(self._rows > 1, several, single)


def _per_position(world: World, model: str) -> Floats:
    """The factor on a model's seconds at every position."""
    return np.concatenate([np.full(one.stop - one.start, one.slower.get(model, 1.0)) for one in world.segments])


def seconds_to(marks: tuple[Ints, Floats], positions: Iterable[int] | Sequence[int] | Ints) -> Floats:
    """Seconds at which a plan has committed up to each of ``positions``, linear within a round."""
    spent: Floats = np.interp(np.asarray(positions, dtype=float), *marks)
    return spent
