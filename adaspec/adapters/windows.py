"""Engines with one drafter, where a plan is a window: how many tokens are drafted for the next verification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.outcome import Decision, EdgeOutcome, RoundOutcome
from adaspec.plan import Context, Plan, PlanSpace
from adaspec.priors import CostPriors

TARGET, DRAFTER = "target", "draft"
PRIORS = CostPriors(residual_spread=0.3, residual_strength=8.0)
"""An engine tells the seconds of whole steps alone, so no pass is measured and the forecast of a window that was not
played is a guess: what a window itself brought counts after a hold."""
HOLD = 8  # rounds per pull: an engine's step is timed with the draft of the next one, so a change blurs a round


def window_space(windows: Iterable[int]) -> PlanSpace:
    """Plain decoding and one plan per window; a window of 0 is plain decoding."""
    return PlanSpace([Plan((TARGET,)), *(Plan((TARGET, DRAFTER), (window,)) for window in sorted(windows) if window)])


def window_controller(windows: Iterable[int], *, one_pass: bool = False, hold: int = HOLD, seed: int = 0) -> Controller:
    """A controller that chooses a window. ``one_pass``: the drafter costs the same whatever the window (n-grams).

    Raises:
        ValueError: a window below 0.
    """
    space = window_space(windows)
    return Controller(space, costs=CostModel(space, PRIORS, (DRAFTER,) if one_pass else ()), hold=hold, seed=seed)


def load_context(batch_size: int, seq_len: int = 0) -> Context:
    """What a step of an engine looks like to the controller; ``seq_len``: mean tokens of its requests.

    The tag is that of the load: quiet hours have other requests than busy ones, and what busy steps show of acceptance,
    eight rows at a time, must not outvote what a single row shows.
    """
    return Context(batch_size, seq_len, f"rows:{Context(batch_size).bucket}")


def window_of(plan: Plan) -> int:
    """Tokens drafted per verification; 0 for plain decoding."""
    return plan.windows[0] if plan.windows else 0


def round_outcome(
    decision: Decision, drafted: Sequence[int], accepted: Sequence[int], seconds: float
) -> RoundOutcome | None:
    """One verification of every row: tokens drafted and accepted per row. None: it says nothing about the decision.

    A batch that has grown or shrunk out of its bucket since the decision does not speak for it.
    """
    rows = len(drafted)
    if not rows or seconds <= 0.0 or Context(rows).bucket != decision.context.bucket:
        return None
    edges = tuple(edge_outcome(*edge, drafted, accepted) for edge in decision.plan.edges())
    return RoundOutcome(rows + sum(accepted), seconds, rows, edges=edges)


def edge_outcome(
    verifier: str, drafter: str, window: int, drafted: Sequence[int], accepted: Sequence[int]
) -> EdgeOutcome:
    """One verification per row of up to ``window`` tokens each, counted per position."""
    rows = [(min(offer, window), min(kept, offer, window)) for offer, kept in zip(drafted, accepted)]
    steps = range(window)
    return EdgeOutcome(
        verifier,
        drafter,
        reached=tuple(sum(kept >= step for _, kept in rows) for step in steps),
        offered=tuple(sum(kept >= step and offer > step for offer, kept in rows) for step in steps),
        accepted=tuple(sum(kept > step for _, kept in rows) for step in steps),
        asked=(len(rows),) * window,
        drafted=tuple(sum(offer > step for offer, _ in rows) for step in steps),
    )
