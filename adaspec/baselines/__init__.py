"""Published rules for choosing a window or a drafter, as baselines: each faithful to its source, none uses the theorem.

They keep their own statistics and read from the cost model only its space (and, where their source profiles costs at
the start, the profile), so that a tournament compares rules and not what they were given.
"""

from adaspec.baselines.banditspec import EXP3Spec, UCBSpec
from adaspec.baselines.engines import EmaTiers, HuggingFaceHeuristic, ThroughputAware
from adaspec.baselines.hedge import HedgeSpec
from adaspec.baselines.onthefly import (
    CachedStateMachine,
    DrafterByPrompt,
    MaximumLikelihoodWindow,
    QLearning,
    StateMachine,
)

__all__ = [
    "CachedStateMachine",
    "DrafterByPrompt",
    "EXP3Spec",
    "EmaTiers",
    "HedgeSpec",
    "HuggingFaceHeuristic",
    "MaximumLikelihoodWindow",
    "QLearning",
    "StateMachine",
    "ThroughputAware",
    "UCBSpec",
]
