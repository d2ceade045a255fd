"""adaspec: an online controller for speculative decoding. This package's core needs only numpy and scipy.

The names below are imported when they are first used, so that the command line answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaspec.controller import Controller, Row
    from adaspec.costs import CostModel
    from adaspec.explanation import EdgePart, Explanation, PassPart
    from adaspec.forecaster import Forecaster
    from adaspec.outcome import Decision, EdgeOutcome, Pass, RoundOutcome
    from adaspec.plan import Context, Override, Plan, PlanSpace
    from adaspec.policy import EpsilonGreedy, Exp3, Fixed, KnowledgeGradient, Optimistic, Policy, ThompsonSampling
    from adaspec.priors import CostPriors
    from adaspec.theory import Forecast, Insertion, accepted_length, accepted_variance, forecast, insertion_gain

__all__ = [
    "Context",
    "Controller",
    "CostModel",
    "CostPriors",
    "Decision",
    "EdgeOutcome",
    "EdgePart",
    "EpsilonGreedy",
    "Exp3",
    "Explanation",
    "Fixed",
    "Forecast",
    "Forecaster",
    "Insertion",
    "KnowledgeGradient",
    "Optimistic",
    "Override",
    "Pass",
    "PassPart",
    "Plan",
    "PlanSpace",
    "Policy",
    "RoundOutcome",
    "Row",
    "ThompsonSampling",
    "accepted_length",
    "accepted_variance",
    "forecast",
    "insertion_gain",
]
_HOMES = {
    "adaspec.controller": ("Controller", "Row"),
    "adaspec.costs": ("CostModel",),
    "adaspec.explanation": ("EdgePart", "Explanation", "PassPart"),
    "adaspec.forecaster": ("Forecaster",),
    "adaspec.outcome": ("Decision", "EdgeOutcome", "Pass", "RoundOutcome"),
    "adaspec.plan": ("Context", "Override", "Plan", "PlanSpace"),
    "adaspec.policy": (
        "EpsilonGreedy",
        "Exp3",
        "Fixed",
        "KnowledgeGradient",
        "Optimistic",
        "Policy",
        "ThompsonSampling",
    ),
    "adaspec.priors": ("CostPriors",),
    "adaspec.theory": ("Forecast", "Insertion", "accepted_length", "accepted_variance", "forecast", "insertion_gain"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'adaspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
