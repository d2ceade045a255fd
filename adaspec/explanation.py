"""Why a plan was chosen, as a value that reads well."""

from __future__ import annotations

from dataclasses import dataclass

from adaspec.outcome import Decision
from adaspec.plan import Plan


@dataclass(frozen=True, slots=True)
class EdgePart:
    """One pair of a plan: believed acceptance per position, and the chance that a draft holds it (1: always full)."""

    verifier: str
    drafter: str
    acceptance: tuple[float, ...]
    drafted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PassPart:
    """What one model does in a round: expected passes, and seconds in all of them."""

    model: str
    passes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is believed now about the plan of a decision, and about the best other plan.

    ``rate`` = ``tokens`` / (seconds of all ``passes`` + ``overhead``) x ``factor``, in tokens per second over all rows.

    Attributes:
        tokens: expected per round over all rows.
        edges: acceptance, outermost pair first; passes: per model, target first.
        overhead: seconds of a round outside its passes.
        factor: what the plan's own rounds made of the theorem's forecast.
        measured: tokens per second of the plan's recent rounds, and how many count; None when it was not played.
        runner_up: the best other plan by forecast with its rate; None when there is no other.
    """

    decision: Decision
    rate: float
    tokens: float
    edges: tuple[EdgePart, ...]
    passes: tuple[PassPart, ...]
    overhead: float
    factor: float
    measured: tuple[float, float] | None
    runner_up: tuple[Plan, float] | None

    def __str__(self) -> str:
        context = self.decision.context
        tag = f", tag {context.tag!r}" if context.tag else ""
        lines = [
            f"{self.decision.plan}: {self.rate:.4g} tokens/s (batch {context.batch_size}, "
            f"{context.seq_len} tokens cached{tag}; chosen with probability {self.decision.propensity:.3g})",
            f"  {self.tokens:.3g} tokens a round",
            *(self._edge(edge) for edge in self.edges),
            *(f"  {part.model}: {part.passes:.3g} passes, {1e3 * part.seconds:.4g} ms" for part in self.passes),
            f"  outside the passes: {1e3 * self.overhead:.4g} ms",
            f"  by measurement: x {self.factor:.3f}{self._history()}",
        ]
        if self.runner_up:
            plan, rate = self.runner_up
            lines.append(f"  next best {plan}: {rate:.4g} tokens/s ({100.0 * (rate / self.rate - 1.0):+.1f} %)")
        return "\n".join(lines)

    @staticmethod
    def _edge(edge: EdgePart) -> str:
        accepted = " ".join(f"{chance:.2f}" for chance in edge.acceptance)
        there = "" if min(edge.drafted) == 1.0 else f"; drafted {' '.join(f'{chance:.2f}' for chance in edge.drafted)}"
        return f"  {edge.verifier} accepts {edge.drafter}: {accepted}{there}"

    def _history(self) -> str:
        if self.measured is None:
            return " (not played yet)"
        return f" ({self.measured[0]:.4g} tokens/s over {self.measured[1]:.3g} recent rounds)"
