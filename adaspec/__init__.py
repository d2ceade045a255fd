"""adaspec: an online controller for speculative decoding. This package's core needs only numpy and scipy."""

from adaspec.outcome import Decision, EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context, Plan, PlanSpace

__all__ = [
    "Context",
    "Decision",
    "EdgeOutcome",
    "Pass",
    "Plan",
    "PlanSpace",
    "RoundOutcome",
]
