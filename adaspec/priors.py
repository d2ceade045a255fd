"""What is believed before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOKUP_ACCEPTANCE = 0.25
COPY_ACCEPTANCE = {"float32": 0.99, "fp16": 0.99, "stock": 0.99, "int8": 0.95, "int4": 0.93}
"""Of copies of the target by precision: a little less than `adaspec.bench.drafters` finds with SmolLM2-135M (0.98)."""


def one_rate(hazards: Sequence[float]) -> float:
    """The acceptance of all positions together, each weighing as often as it is reached."""
    reached, total, accepted = 1.0, 0.0, 0.0
    for hazard in hazards:
        total += reached
        reached *= hazard
        accepted += reached
    return accepted / total


@dataclass(frozen=True, slots=True)
class CostPriors:
    """What is believed before anything is measured, and how fast measurements are believed and forgotten.

    Attributes:
        acceptance: acceptance of a pair that nobody has seen, a Beta mean.
        acceptance_strength: its weight, in verified positions.
        known_strength: the same of a pair of which something is known beforehand (a copy of the target, a drafter whose
            card tells); such a pair needs no ``caution``.
        position_strength: weight, in positions, of the edge's one rate in the acceptance of each position.
        caution: factor on that rate per position of the window of which nothing is known yet: a soft slow start, so
            that a new pair is tried with short windows first. It fades as positions are reached.
        tag_strength: weight, in positions of an edge, of what other tags have shown, once one of them has shown more.
        drafted_strength: weight, in verifications, of the believed length of drafts: full, but for drafters with a
            ``stop``, which go on behind each token with chance 1 - stop / 2.
        target_seconds: of a pass of the target over one position, until one is measured.
        middle_ratio, drafter_ratio: seconds of a model that verifies somewhere beneath the target, and of one that
            only drafts, relative to the target, until one is measured.
        pass_spread: standard deviation of the log of one pass's seconds, until it is learned.
        unmeasured_spread: standard deviation of the log of an unmeasured model's seconds.
        profile_spread: the same for a model that was measured at the start and not played yet: a profile is made under
            other conditions than the rounds.
        pass_strength: weight, in passes, of the regression in the seconds of one (model, query length).
        residual_spread: standard deviation of log(true rate / forecast rate) over plans.
        residual_strength: rounds of a plan after which measured and forecast rate weigh the same.
        keep, pass_keep, round_keep: weight that older observations keep when those of a round arrive: of an edge; of a
            kind of pass; of a plan's own rounds and of a model's regression.
        feeding: seconds of feeding an idle model one token, as a share of its pass over one.
        stays: rounds that a model plays once it was fed, over which a plan must earn back what the feeding costs.
        surprise: standard errors of an edge's recent acceptance (about ten rounds) against what is believed beyond
            which a change is assumed and the edge is forgotten but for ``acceptance_strength`` positions.
        idle_keep: weight that every observation keeps per round, so that what is not played is forgotten slowly.
    """

    acceptance: float = 0.5
    acceptance_strength: float = 2.0
    known_strength: float = 8.0
    position_strength: float = 8.0
    caution: float = 0.95
    tag_strength: float = 30.0
    drafted_strength: float = 4.0
    target_seconds: float = 0.03
    middle_ratio: float = 0.3
    drafter_ratio: float = 0.1
    pass_spread: float = 0.1
    unmeasured_spread: float = 0.5
    profile_spread: float = 0.05
    pass_strength: float = 4.0
    residual_spread: float = 0.03
    residual_strength: float = 150.0
    keep: float = 0.998
    pass_keep: float = 0.985
    round_keep: float = 0.998
    feeding: float = 0.2
    stays: float = 24.0
    surprise: float = 3.5
    idle_keep: float = 0.997

    def __post_init__(self) -> None:
        for name in ("acceptance", "caution", "keep", "pass_keep", "round_keep", "idle_keep"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0 - (name == "acceptance") * 1e-6:
                raise ValueError(f"{name} lies between 0 and 1, got {value}")
        for name in self.__slots__:
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} is above 0, got {getattr(self, name)}")
