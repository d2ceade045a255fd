"""Decodes in a world round by round, with outcomes as a decoder reports them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from adaspec.bench.worlds import Segment, World
from adaspec.outcome import GATHERED, EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import LACKING, Context, Plan, PlanSpace
from adaspec.theory import Edge

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
        self._idle = [name for name in space.models[1:] if name not in world.lookups]  # that may have to catch up
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
        if self._begins:
            self._fed, self._open = {}, {}
        length = self._seq_len[self.position]
        fed = ((name, length - self._fed.get(name, 0) - 1) for name in self._idle)
        lacking = tuple(one for one in fed if one[1] >= LACKING)
        return Context(segment.rows, length, segment.tag if self.world.tagged else "", lacking)

    @property
    def _begins(self) -> bool:
        """Whether a new text begins here."""
        return self.position == 0 or self._left[self.position - 1] == 1

    def round(self, plan: Plan) -> RoundOutcome:
        """Plays one round of ``plan`` and moves on."""
        segment, first = self.segment, self.position
        if self._begins:
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
            fed = self._feed(plan, first, tokens, segment)
            catch_up, true_catch_up = catch_up + fed, true_catch_up + fed
        scored = self._score(plan, first)
        self.true_seconds += self._true + true_catch_up
        seconds = sum(one.seconds for one in self._passes) + catch_up
        edges = tuple(
            _edge(*pair, asked, tuple(verifications), *spent)
            for pair, asked, verifications, spent in zip(pairs_of(plan), plan.windows, self._edges, self._spent)
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
        before = self._draft(plan, stage + 1, at, asked, held, segment)
        self._spent[stage][0] += before
        self._spent[stage][1] += self._pass(model, held + 1, at, segment)
        self._edges[stage].append((asked, held, kept))
        return kept + 1

    def _draft(self, plan: Plan, stage: int, at: int, need: int, held: int, segment: Segment) -> float:
        """Lets ``models[stage]`` hand over ``need`` tokens, ``held`` if it is a drafter; returns measured seconds."""
        model = plan.models[stage]
        if stage == len(plan.models) - 1:
            steps = 1 if model in self.world.lookups else held
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
                self._pairs.get(pairs_of(plan)[0]) if window else None, at, min(window, self._left[at] - 1)
            )
            if asked:
                self._edges[0].append((asked, held, kept))
            at, longest = at + kept + 1, max(longest, held)
        if window:
            self._spent[0][0] = self._draft(plan, 1, first, window, longest, segment)
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
        """Judges drafters the target did not verify on what is committed, when a chain does: see ``Shadow``."""
        found = []
        for drafter, window in self._scored.items():
            at = self._open.pop(drafter, first)
            verifications: list[tuple[int, int, int]] = []
            if drafter in plan.models:
                at = self._judge(drafter, window, at, first, verifications)
            if drafter not in plan.models[1:2]:
                if drafter not in self.world.lookups or self._begins or self.position - at >= GATHERED:
                    at = self._judge(drafter, window, at, self.position, verifications)
                self._open[drafter] = at
            if verifications:
                found.append(_edge(self.world.target, drafter, window, tuple(verifications), None, None))
        return tuple(found)

    def _judge(self, drafter: str, window: int, at: int, end: int, verifications: list[tuple[int, int, int]]) -> int:
        """Adds whole verifications from ``at`` on; returns where the last, which stays open, begins."""
        offered, accepted = self._pairs[self.world.target, drafter]
        while at < end:
            held = min(offered[at], window)
            kept = min(accepted[at], held)
            if kept >= end - at:
                break
            verifications.append((window, held, kept))
            at += kept + 1
        return at


def check(world: World, space: PlanSpace) -> None:
    """Tells whether every plan of a space can be played in a world.

    Raises:
        ValueError: a plan with a pair or model that the world does not have, or too deep for several rows.
    """
    batched = any(segment.rows > 1 for segment in world.segments)
    for plan in space:
        missing = [f"{v}/{d}" for v, d in pairs_of(plan) if (v, d) not in world.pairs]
        missing += [model for model in plan.models if model not in world.speeds]
        if missing or plan.target != world.target or plan.stop:
            raise ValueError(
                f"the world cannot play plan {plan}: it lacks {', '.join(missing) or 'its target or stop'}"
            )
        if batched and plan.depth > 2:
            raise ValueError(f"several rows are replayed for plans of two models, got {plan}")


@lru_cache(maxsize=4096)
def pairs_of(plan: Plan) -> tuple[tuple[str, str], ...]:
    """(verifier, drafter), outermost first."""
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
