"""adaspec: an online controller for speculative decoding. This package's core needs only numpy and scipy."""

from adaspec.controller import Controller, Row
from adaspec.costs import CostModel
from adaspec.estimators import CostPriors
from adaspec.outcome import Decision, EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context, Plan, PlanSpace
from adaspec.policy import EpsilonGreedy, Fixed, Policy, ThompsonSampling
from adaspec.theory import Forecast, Forecaster, accepted_length, forecast

__all__ = [
    "Context",
    "Controller",
    "CostModel",
    "CostPriors",
    "Decision",
    "EdgeOutcome",
    "EpsilonGreedy",
    "Fixed",
    "Forecast",
    "Forecaster",
    "Pass",
    "Plan",
    "PlanSpace",
    "Policy",
    "RoundOutcome",
    "Row",
    "ThompsonSampling",
    "accepted_length",
    "forecast",
]
