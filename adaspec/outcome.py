"""What was chosen, and what happened: the tickets that a controller hands out and the reports it gets back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adaspec.plan import Context, Plan

GATHERED = 16  # committed tokens that an idle lookup leaves unjudged at most, see ``RoundOutcome.scored``


@dataclass(frozen=True, slots=True)
class Decision:
    """The ticket of one choice: it goes out with the plan and comes back, maybe late, with the outcome.

    ``propensity`` is the probability with which the policy took this plan, for off-policy questions later.
    """

    plan: Plan
    context: Context
    propensity: float
    id: int


@dataclass(frozen=True, slots=True)
class EdgeOutcome:
    """All verifications of one (verifier, drafter) pair in a round, summed over rows, per position of the window.

    ``reached[k]``: verifications whose window held position k and whose positions before k were all accepted.
    ``offered[k]``: of those, how many had a drafted token there (a lookup drafter may be silent).
    ``accepted[k]``: of those, how many tokens were accepted. ``accepted[k] <= offered[k] <= reached[k]``.
    ``asked[k]``: verifications whose window held position k, reached or not; ``drafted[k]``: of those, how many had a
    drafted token there. Both are empty, and seconds None, where an engine does not tell.
    """

    verifier: str
    drafter: str
    reached: tuple[int, ...]
    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    asked: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    draft_seconds: float | None = None
    verify_seconds: float | None = None

    @property
    def verifications(self) -> int:
        return self.reached[0] if self.reached else 0


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward: ``query_len`` positions for each of ``batch_size`` rows that hold ``seq_len`` tokens (mean)."""

    model: str
    query_len: int
    batch_size: int
    seq_len: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """One round of a plan. Tokens and seconds are kept apart, so that nobody averages their ratios.

    ``tokens``: committed over all rows, trimmed to what was emitted. ``rows``: rows that were running.
    ``seconds``: the whole round, ``catch_up_seconds`` of it (feeding models that had been idle) included.
    ``edges``: what the plan's pairs did. ``scored``: free information, how pairs that did not play would have done,
    in this round or in some before.
    """

    tokens: int
    seconds: float
    rows: int = 1
    catch_up_seconds: float = 0.0
    edges: tuple[EdgeOutcome, ...] = ()
    passes: tuple[Pass, ...] = ()
    scored: tuple[EdgeOutcome, ...] = ()


def described(decision: Decision, outcome: RoundOutcome) -> dict[str, Any]:
    """What was chosen and what came of it, as a JSON-able dict; its passes apart."""
    context = decision.context
    return {
        "plan": str(decision.plan),
        "propensity": decision.propensity,
        "batch_size": context.batch_size,
        "seq_len": context.seq_len,
        "tag": context.tag,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "catch_up_seconds": outcome.catch_up_seconds,
        "edges": [
            {
                "verifier": edge.verifier,
                "drafter": edge.drafter,
                "reached": edge.reached,
                "offered": edge.offered,
                "accepted": edge.accepted,
            }
            for edge in outcome.edges
        ],
    }
