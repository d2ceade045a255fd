"""What is measured side by side: fixed plans and policies of ours, each answering one request at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adaspec.assemble import Assembly
from adaspec.bench.tournament import Entrant
from adaspec.compare import Pinned
from adaspec.controller import Controller
from adaspec.decoding.generate import Chooser, Request
from adaspec.outcome import Decision, RoundOutcome, described
from adaspec.plan import Context, Plan


@dataclass(frozen=True, slots=True)
class Round:
    """One round of ours. ``forecast``: tokens/s believed of its plan before the request; ``pulled``: chosen anew."""

    decision: Decision
    outcome: RoundOutcome
    forecast: float | None
    pulled: bool

    def json(self) -> dict[str, Any]:
        """As a JSON-able dict."""
        passes = [
            {
                "model": one.model,
                "query_len": one.query_len,
                "batch_size": one.batch_size,
                "seq_len": one.seq_len,
                "seconds": one.seconds,
            }
            for one in self.outcome.passes
        ]
        own = described(self.decision, self.outcome)
        return {**own, "pulled": self.pulled, "forecast": self.forecast, "passes": passes}


@dataclass(frozen=True, slots=True)
class Answer:
    """One request answered. ``seconds``: by the wall, the prompt and every decision included.

    ``prefill_seconds``: of that, reading the prompt; None where it cannot be told apart. ``passes``: of the target
    that brought tokens. ``rounds``: of ours, one record each.
    """

    tokens: tuple[int, ...]
    seconds: float
    prefill_seconds: float | None
    passes: int
    rounds: tuple[Round, ...] = ()


class Method(Protocol):
    """Something that continues text. ``start`` forgets what was learned; ``state`` is what was learned, if anything."""

    @property
    def name(self) -> str: ...
    def start(self, seed: int) -> None: ...
    def answer(self, request: Request, tag: str = "") -> Answer: ...
    def state(self) -> dict[str, Any] | None: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Stateless:
    """A method that learns nothing from one request to the next."""

    def __init__(self, name: str, answer: Callable[[Request, str], Answer]) -> None:
        self.name, self._answer = name, answer

    def start(self, seed: int) -> None:
        """Nothing is there to forget."""

    def answer(self, request: Request, tag: str = "") -> Answer:
        """Continues the request."""
        return self._answer(request, tag)

    def state(self) -> None:
        """Nothing was learned."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing is there to take up."""


def fixed(assembly: Assembly, plan: Plan, name: str | None = None) -> Stateless:
    """One plan throughout."""
    return Stateless(name or str(plan), lambda request, tag: _play(assembly, request, tag, Pinned(plan)))


class Adaptive:
    """A policy that goes on learning from request to request.

    Args:
        assembly: what decodes.
        given: the choice of ``conf/policy``, see ``Entrant.of``.
        cold: whether it forgets everything with every request.

    Raises:
        ValueError: a policy that only a simulation can play.
    """

    def __init__(self, assembly: Assembly, given: Mapping[str, Any], *, cold: bool = False) -> None:
        if given["follow"]:
            raise ValueError(f"the policy {given['name']} has every drafter fed and scored; only simulate does that")
        self.name: str = given["name"]
        self._assembly, self._given, self._cold = assembly, given, cold
        self.start(0)

    def start(self, seed: int) -> None:
        """Knows the profile and nothing else."""
        self._seed = seed
        assembly, entrant = self._assembly, Entrant.of(self._given)
        self._controller = entrant.controller(assembly.space, assembly.one_pass, seed, assembly.acceptance)
        self._controller.profile(self._assembly.profile)

    def answer(self, request: Request, tag: str = "") -> Answer:
        """Continues the request and learns from it. What is forecast is read beforehand, off the clock."""
        if self._cold:
            self.start(self._seed)
        rows = self._controller.table(Context(1, len(request.prompt), tag))
        chooser = _Noting(self._controller)
        found = _play(self._assembly, request, tag, chooser, {row.plan: row.forecast for row in rows})
        rounds = [
            Round(one.decision, one.outcome, one.forecast, pulled) for one, pulled in zip(found.rounds, chooser.pulled)
        ]
        return Answer(found.tokens, found.seconds, found.prefill_seconds, found.passes, tuple(rounds))

    def state(self) -> dict[str, Any]:
        """What the controller knows."""
        return self._controller.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state`` left off."""
        self._controller.load_state_dict(state)


class _Noting:
    """A controller, and whether each of its choices was a new one."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.pulled: list[bool] = []

    def choose(self, context: Context) -> Decision:
        pulls = self._controller.pulls
        decision = self._controller.choose(context)
        self.pulled.append(self._controller.pulls > pulls)
        return decision

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        self._controller.observe(decision, outcome)


def _play(
    assembly: Assembly, request: Request, tag: str, chooser: Chooser, forecasts: Mapping[Plan, float] | None = None
) -> Answer:
    began = time.perf_counter()
    done = assembly.generator.generate([request], tag=tag, controller=chooser)
    seconds = time.perf_counter() - began
    rounds = [Round(one, outcome, (forecasts or {}).get(one.plan), False) for one, outcome in done.steps]
    return Answer(done.completions[0].tokens, seconds, done.prefill_seconds, len(rounds), tuple(rounds))


def sweep(
    assembly: Assembly, plans: Sequence[Plan], requests: Sequence[Request], tell: Callable[[str], None]
) -> dict[Plan, float]:
    """Tokens/s of fixed plans, interleaved request by request; after each the slower half drops out, down to four.

    Returned are the plans that played to the end, the fastest first.
    """
    tokens, seconds = dict.fromkeys(plans, 0), dict.fromkeys(plans, 0.0)
    left = list(plans)
    for number, request in enumerate(requests):
        for plan in left[number % len(left) :] + left[: number % len(left)]:
            tell(f"sweep {plan}")
            found = _play(assembly, request, "", Pinned(plan))
            tokens[plan] += len(found.tokens)
            seconds[plan] += found.seconds
        left.sort(key=lambda plan: -tokens[plan] / seconds[plan])
        if number + 1 < len(requests):
            left = left[: max(4, (len(left) + 1) // 2)]
    return {plan: tokens[plan] / seconds[plan] for plan in left}
