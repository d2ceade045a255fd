"""Guard rails around a controller: it stays free to learn, and cannot do much harm while it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from adaspec.controller import Controller
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, Override, Plan

_CONTEXTS = 256  # contexts watched; the one unused for longest is forgotten
_OPEN_TICKETS = 4096
_LONGEST = 16  # pauses and benchings double up to this many times their first length
_FRESH = 16, 256  # rounds of a context after which its forecasts are read again, growing from the one to the other


@dataclass(frozen=True, slots=True)
class Rules:
    """What a guard holds a controller to.

    Attributes:
        floor: share of the speed of plain decoding that the plans must reach; 0: none is asked for.
        rounds: speculative rounds of a context over which that is judged.
        pause: rounds of plain decoding after a fall, doubled with each fall that follows at once.
        probe: rounds in which speculation then has to show itself, before it is judged as ever.
        exploration: share of a tag's rounds that may go to another plan than the best by forecast; 1: any.
        budgets: the same for single tags.
        bench: seconds for which a drafter that failed is left out, doubled with each failure that follows at once.
        read_only: play what is known to be best and learn nothing.

    Raises:
        ValueError: a share outside [0, 1], fewer than 1 round, or a time that is not above 0.
    """

    floor: float = 0.8
    rounds: int = 32
    pause: int = 64
    probe: int = 8
    exploration: float = 1.0
    budgets: Mapping[str, float] = field(default_factory=dict)
    bench: float = 30.0
    read_only: bool = False

    def __post_init__(self) -> None:
        for name, share in {"floor": self.floor, "exploration": self.exploration, **self.budgets}.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} is a share in [0, 1], got {share}")
        if min(self.rounds, self.pause, self.probe) < 1:
            raise ValueError(f"rounds, pause and probe are at least 1, got {self.rounds}, {self.pause}, {self.probe}")
        if not self.bench > 0.0:
            raise ValueError(f"a drafter is benched for more than 0 seconds, got {self.bench}")


@dataclass(frozen=True, slots=True)
class Note:
    """What went with a choice: tokens per second forecast over all rows, the reason ("" for a free choice), and whether
    the plan was pulled anew, not held.
    """

    forecast: float = 0.0
    reason: str = ""
    pulled: bool = False


class Listener(Protocol):
    """Is told what a guard sees."""

    def round(self, decision: Decision, outcome: RoundOutcome, note: Note) -> None: ...
    def fallback(self, context: Context, reason: str, detail: str) -> None: ...
    def benched(self, drafter: str, reason: str, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Without(Override):
    """What a request demands, less the plans that use a benched model."""

    benched: frozenset[str] = frozenset()

    def allows(self, plan: Plan) -> bool:
        return self.benched.isdisjoint(plan.models) and Override.allows(self, plan)


@dataclass(slots=True)
class _Watch:
    """One context (bucket of batch sizes, tag): forecasts as last read, and the speculative rounds being judged."""

    rates: dict[Plan, float] = field(default_factory=dict)  # tokens per second and row, best first
    seen: int = 0  # rounds so far
    due: int = 0  # rounds after which the rates are old
    rounds: int = 0  # being judged
    seconds: float = 0.0  # of those
    plain: float = 0.0  # seconds that plain decoding would have taken for their tokens
    pause: int = 0  # rounds of plain decoding left
    falls: int = 0  # at once after each other
    probing: bool = False

    def restart(self) -> None:
        self.rounds, self.seconds, self.plain = 0, 0.0, 0.0


@dataclass(frozen=True, slots=True)
class _Bench:
    reason: str
    until: float
    times: int


class Guard:
    """Chooses and observes as its controller does, within rules. All methods may be called from several threads.

    A floor: when the plans of a context fall below a share of plain decoding's speed, plain decoding is played for a
    while, then speculation is probed. A budget: a tag may spend only so many rounds on other plans than the best by
    forecast. A bench: plans with a drafter that failed are left out for a while. Read-only: nothing is learned.

    Args:
        controller: decides within the rules.
        rules: see there.
        listener: is told of rounds, fallbacks and benched drafters.
        clock: seconds, for the bench.
    """

    def __init__(
        self,
        controller: Controller,
        rules: Rules | None = None,
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller = controller
        self.rules = rules or Rules()
        self._listener, self._clock = listener, clock
        self._lock = threading.RLock()
        self._watches: dict[tuple[int, str], _Watch] = {}
        self._open: dict[int, Note] = {}  # by ticket
        self._bench: dict[str, _Bench] = {}
        self._spent: dict[str, float] = {}  # rounds of exploration per tag, less what was granted since
        self._tickets = count()

    def choose(self, context: Context, override: Override | None = None) -> Decision:
        """The plan of the next round; see ``Controller.choose``.

        Raises:
            ValueError: a pinned plan that the space does not hold.
        """
        with self._lock:
            watch, pulls = self._watch(context), self.controller.pulls
            demand, reason = self._demand(context, watch, override)
            if self.rules.read_only:
                decision = Decision(self._best(watch, demand), context, 1.0, next(self._tickets))
            else:
                decision = self.controller.choose(context, demand)
            forecast = watch.rates.get(decision.plan, 0.0) * context.batch_size
            self._open[decision.id] = Note(forecast, reason, self.controller.pulls > pulls)
            if len(self._open) > _OPEN_TICKETS:
                del self._open[next(iter(self._open))]
            return decision

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        """Learns from a round; see ``Controller.observe``."""
        with self._lock:
            note = self._open.pop(decision.id, Note())
            if not self.rules.read_only:
                self.controller.observe(decision, outcome)
            watch = self._watch(decision.context)
            watch.seen += 1
            self._account(decision, watch)
            self._judge(decision, outcome, watch)
            self._forgive(decision.plan)
        if self._listener:
            self._listener.round(decision, outcome, note)

    def bench(self, drafter: str, reason: str) -> None:
        """Leaves out all plans with a drafter for a while: it raised, or proposed what no drafter may."""
        with self._lock:
            known, now = self._bench.get(drafter), self._clock()
            if known and now < known.until:
                return
            times = known.times + 1 if known else 0
            seconds = self.rules.bench * min(2**times, _LONGEST)
            self._bench[drafter] = _Bench(reason, now + seconds, times)
        if self._listener:
            self._listener.benched(drafter, reason, seconds)

    @property
    def benched(self) -> dict[str, str]:
        """Drafters that are left out now, each with its reason."""
        with self._lock:
            now = self._clock()
            return {name: bench.reason for name, bench in self._bench.items() if now < bench.until}

    def rates(self, context: Context) -> dict[Plan, float]:
        """Forecasts as last read, tokens per second over all rows, best first."""
        with self._lock:
            return {plan: rate * context.batch_size for plan, rate in self._watch(context).rates.items()}

    def _watch(self, context: Context) -> _Watch:
        key = (context.bucket, context.tag)
        watch = self._watches.pop(key, None) or _Watch()
        self._watches[key] = watch
        if len(self._watches) > _CONTEXTS:
            del self._watches[next(iter(self._watches))]
        if not watch.rates or watch.seen >= watch.due:
            watch.due = watch.seen + min(max(watch.seen, _FRESH[0]), _FRESH[1])
            watch.rates = {row.plan: row.forecast / context.batch_size for row in self.controller.table(context)}
        return watch

    def _demand(self, context: Context, watch: _Watch, wanted: Override | None) -> tuple[Override | None, str]:
        """The override under which the controller chooses, and why it is not just what was wanted."""
        benched = frozenset(self.benched) if self._bench else frozenset()
        pinned = wanted.plan if wanted else None
        if pinned is not None:
            return (wanted, "") if benched.isdisjoint(pinned.models) else (Override(speculation=False), "bench")
        if watch.pause:
            return Override(speculation=False), "floor"
        if benched:
            asked = wanted or Override()
            wanted = Without(None, asked.max_depth, asked.speculation, benched)
        if self._spent and self._spent.get(context.tag, 0.0) > 0.0:
            return Override(plan=self._best(watch, wanted)), "budget"
        return wanted, "bench" if benched else ""

    def _best(self, watch: _Watch, demand: Override | None) -> Plan:
        """The best plan by forecast among those that a demand leaves."""
        allowed = (plan for plan in watch.rates if demand is None or demand.allows(plan))
        return next(allowed, self.controller.space.plain)

    def _forgive(self, plan: Plan) -> None:
        """A drafter that has been back for a while and plays is trusted as before."""
        for name in self._bench.keys() & set(plan.models) if self._bench else ():
            if self._bench[name].until + self.rules.bench < self._clock():
                del self._bench[name]

    def _account(self, decision: Decision, watch: _Watch) -> None:
        """Books a round against the exploration budget of its tag."""
        tag = decision.context.tag
        share = self.rules.budgets.get(tag, self.rules.exploration)
        if share < 1.0 and not self.rules.read_only:
            explored = decision.plan != next(iter(watch.rates)) and not watch.pause
            self._spent[tag] = max(self._spent.pop(tag, 0.0) + explored - share, -1.0)
            if len(self._spent) > _CONTEXTS:
                del self._spent[next(iter(self._spent))]

    def _judge(self, decision: Decision, outcome: RoundOutcome, watch: _Watch) -> None:
        """Holds the speculative rounds of a context to the floor, and ends pauses."""
        if watch.pause:
            watch.pause -= 1
            watch.probing = not watch.pause
            return
        plain = watch.rates.get(self.controller.space.plain, 0.0) * max(outcome.rows, 1)
        if decision.plan.depth == 1 or not self.rules.floor or not plain:
            return
        watch.rounds += 1
        watch.plain += outcome.tokens / plain
        watch.seconds += outcome.seconds - (outcome.catch_up_seconds if watch.probing else 0.0)
        if watch.rounds < (self.rules.probe if watch.probing else self.rules.rounds):
            return
        if watch.plain < self.rules.floor * watch.seconds:
            self._fall(decision.context, watch)
        elif not watch.probing:
            watch.falls = 0
        watch.probing = False
        watch.restart()

    def _fall(self, context: Context, watch: _Watch) -> None:
        watch.pause = self.rules.pause * min(2**watch.falls, _LONGEST)
        watch.falls += 1
        if self._listener:
            share = watch.plain / watch.seconds
            detail = f"{share:.2f} of plain decoding over {watch.rounds} rounds: plain for {watch.pause} rounds"
            self._listener.fallback(context, "floor", detail)
