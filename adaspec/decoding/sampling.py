"""From logits to laws, samples and verdicts: pure functions of tensors, and the random numbers they consume.

A law is a processed next-token distribution: repetition penalty, temperature, top-k, top-p, min-p, in this order, as
`transformers` applies them. Temperature 0 is the one-hot law of the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled. The defaults are greedy decoding.

    Raises:
        ValueError: a value outside its range, named.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is a finite number of at least 0, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is at least 0 (0: off) and below 2**31, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p lies in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p lies in [0, 1], got {self.min_p}")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ValueError(f"repetition_penalty lies in [0.01, 100], got {self.repetition_penalty}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is a 64-bit integer, got {self.seed}")


GREEDY = SamplingParams()
_COLDEST = torch.finfo(torch.float32).tiny  # a smaller temperature would be 0 as a float32, and every law nan


class Uniforms:
    """Uniform numbers, one independent stream per sequence: a counter-based generator (SplitMix64 finaliser).

    A row's stream depends on its own seed and on how many numbers it has drawn, never on the rest of the batch, and
    no number is used twice (a redrafted position must meet fresh randomness). Reference: Steele, Lea, Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014.
    """

    def __init__(self, seeds: Tensor) -> None:
        self._keys = _mix(_mix(seeds) + _GOLDEN)  # [B] int64
        self._counters = torch.zeros_like(seeds)  # numbers used before the block
        self._used = torch.zeros_like(seeds)  # of the block
        self._block = torch.zeros(len(seeds), 0, dtype=torch.float64, device=seeds.device)
        self._drawn = 0  # the most that a row can have used of it

    def draw(self, count: int, used: Tensor) -> Tensor:
        """The next ``count`` numbers of every row, [B, count] float64 in [0, 1); row b uses up ``used[b]`` of them.

        They are computed in blocks, as that takes twenty operations.
        """
        if self._drawn + count > self._block.shape[1]:
            self._counters = self._counters + self._used
            self._used = torch.zeros_like(self._used)
            self._block, self._drawn = self._numbers(max(count, _BLOCK)), 0
        at = self._used[:, None]
        if count > 1:
            at = at + torch.arange(count, device=at.device)
        self._used, self._drawn = self._used + used, self._drawn + count
        return self._block.gather(1, at)

    def _numbers(self, count: int) -> Tensor:
        steps = torch.arange(1, count + 1, device=self._keys.device)
        bits = _mix(self._keys[:, None] + (self._counters[:, None] + steps) * _GOLDEN)
        return ((bits >> 16) & ((1 << 48) - 1)).to(torch.float64) * 2.0**-48


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_BLOCK = 64  # random numbers computed at once


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser over int64, whose product wraps and whose right shift must be made logical."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - 2**64)
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


Processor = Callable[[Tensor, TokenBuffer, Tensor], Tensor]
"""(logits [B, n, V] at positions first .. first + n - 1, the sequences, first [B]) -> processed logits [B, n, V].

A pure function of each position's own logits and of its history, everything up to and including it: drafts count.
"""


class Sampler:
    """The sampling parameters of a batch, one entry per row, with the random stream of every row.

    ``processor`` takes the place of the penalties: see ``Processor``.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        device: torch.device | str = "cpu",
        processor: Processor | None = None,
    ) -> None:
        def column(values: list[float] | list[int] | list[bool]) -> Tensor:
            return torch.tensor(values, device=device)[:, None, None]  # [B, 1, 1]

        self._processor = processor
        self.uniforms = Uniforms(torch.tensor([p.seed for p in params], dtype=torch.long, device=device))
        temperatures = [p.temperature for p in params]
        self.greedy = not any(temperatures)
        self._greedy_rows = column([p.temperature == 0.0 for p in params]) if 0.0 in temperatures else None
        self._divisor = column([max(each, _COLDEST) if each else 1.0 for each in temperatures])
        self._top_k = column([p.top_k for p in params]) if any(p.top_k for p in params) else None
        self._top_p = column([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None
        self._min_p = column([p.min_p for p in params]) if any(p.min_p for p in params) else None
        penalised = any(p.repetition_penalty != 1 for p in params)
        self._penalty = column([p.repetition_penalty for p in params]) if penalised else None

    @property
    def takes_largest(self) -> bool:
        """Whether every token is that of its largest logit, as the model gives it."""
        return self.greedy and self._processor is None and self._penalty is None

    def penalise(self, logits: Tensor, sequence: TokenBuffer, first: Tensor) -> Tensor:
        """Applies the repetition penalty to logits [B, n, V] at positions first .. first + n - 1.

        The history of a position is everything up to and including it: the drafted prefix counts.
        """
        if self._processor is not None:
            return self._processor(logits, sequence, first)
        if self._penalty is None:
            return logits
        seen = history(sequence, first, logits.shape[1], logits.shape[2])
        penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
        return torch.where(seen, penalised, logits)

    def law(self, logits: Tensor) -> Tensor:
        """The law of penalised logits [B, n, V], float32 rows that sum to 1."""
        logits = logits.float()
        above = logits - logits.amax(-1, keepdim=True)  # at most 0: no temperature overflows it
        scaled = _filter(above.div_(self._divisor), self._top_k, self._top_p, self._min_p)
        law = torch.softmax(scaled, dim=-1)
        if self._greedy_rows is not None:
            law = torch.where(self._greedy_rows, _one_hot(logits.argmax(-1), logits.shape[-1]), law)
        return law

    def choose(
        self, logits: Tensor, sequence: TokenBuffer, first: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """One token per row from logits [B, 1, V] at position ``first`` [B], and the law it was drawn from.

        Returns:
            tokens [B], and their law [B, V]; None for the law when every row is greedy (a deterministic choice).
        """
        logits = self.penalise(logits, sequence, first)
        if self.greedy:
            return logits[:, 0].argmax(-1), None
        law = self.law(logits)[:, 0]
        return sample(law, self.uniforms.draw(1, active.long())[:, 0]), law

    def verify(
        self,
        tokens: Tensor,
        counts: Tensor,
        draft_law: Tensor | None,
        logits: Tensor,
        sequence: TokenBuffer,
        first: Tensor,
        active: Tensor,
    ) -> tuple[Acceptance, Tensor | None]:
        """Verifies drafted tokens [B, m] against logits [B, m + 1, V] at the positions from ``first`` [B] on.

        Returns:
            what was accepted and what follows, and the verifier's law [B, m + 1, V] (None when all rows are greedy).
        """
        logits = self.penalise(logits, sequence, first)
        if self.greedy:
            return verify_greedy(tokens, counts, logits.argmax(-1)), None
        law = self.law(logits)
        uniforms = self.uniforms.draw(tokens.shape[1] + 1, torch.where(active, counts + 1, 0))
        return verify_sampled(tokens, counts, draft_law, law, uniforms), law


def history(sequence: TokenBuffer, first: Tensor, count: int, vocab_size: int) -> Tensor:
    """Which tokens occur up to each of the positions first .. first + count - 1; [B, count, V] bool."""
    steps = torch.arange(sequence.tokens.shape[1], device=first.device)
    inside = steps <= first[:, None]  # [B, capacity + 1]
    start = torch.zeros(first.shape[0], vocab_size + 1, dtype=torch.bool, device=first.device)
    start.scatter_(1, torch.where(inside, sequence.tokens, vocab_size).clamp(max=vocab_size), True)
    seen = [start[:, :vocab_size]]
    for token in sequence.slice(first + 1, count - 1).unbind(1):
        seen.append(seen[-1].scatter(1, token.clamp(max=vocab_size - 1)[:, None], True))
    return torch.stack(seen, 1)


def _filter(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    if top_k is not None:
        ranked = logits.sort(dim=-1, descending=True).values
        size = logits.shape[-1]
        last = torch.where(top_k == 0, size, top_k).clamp(max=size) - 1
        logits = logits.masked_fill(logits < ranked.gather(-1, last.expand(*logits.shape[:2], 1)), -torch.inf)
    if top_p is not None:
        ranked, order = logits.sort(dim=-1, descending=False)
        drop = (ranked.softmax(-1).cumsum(-1) <= 1 - top_p) & (top_p < 1)
        drop[..., -1] = False
        logits = logits.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)
    if min_p is not None:
        law = logits.softmax(-1)
        logits = logits.masked_fill(law < min_p * law.amax(-1, keepdim=True), -torch.inf)
    return logits


def _one_hot(tokens: Tensor, size: int) -> Tensor:
    return torch.zeros(*tokens.shape, size, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)


def sample(law: Tensor, uniforms: Tensor) -> Tensor:
    """Draws from unnormalised laws [B, V] with one uniform number [B] each; never a token of probability 0."""
    mass = law.to(torch.float64).cumsum(-1)
    return torch.searchsorted(mass, (uniforms * mass[:, -1])[:, None], right=True).squeeze(1)


class Acceptance(NamedTuple):
    """The result of one verification per row: drafted tokens accepted [B], and the token after them [B]."""

    accepted: Tensor
    following: Tensor


def verify_greedy(tokens: Tensor, counts: Tensor, top: Tensor) -> Acceptance:
    """Accepts drafted tokens [B, m] (``counts`` [B] of them) while they are the verifier's own ``top`` [B, m + 1]."""
    accepted = _leading(tokens == top[:, :-1], counts)
    return Acceptance(accepted, top.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(
    tokens: Tensor, counts: Tensor, draft_law: Tensor | None, law: Tensor, uniforms: Tensor
) -> Acceptance:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): the emitted tokens have the verifier's law.

    Accepts drafted token y at position j with probability min(1, p_j(y) / q_j(y)); after the first rejection at j
    the following token is drawn from the residual (p_j - q_j)+, after full acceptance from the bonus row.

    Args:
        tokens: drafted tokens [B, m].
        counts: how many of them are real, [B].
        draft_law: the rows q [B, m, V] that the tokens were sampled from; None: proposed deterministically (one-hot).
        law: the verifier's rows p [B, m + 1, V].
        uniforms: [B, m + 1] numbers in [0, 1): row b uses one per real token and the next for what follows, so that
            its draws do not depend on how many tokens the rest of the batch has.
    """
    chosen = law[:, :-1].gather(-1, tokens[..., None]).squeeze(-1)  # p_j(y_j) [B, m]
    proposed = 1.0 if draft_law is None else draft_law.gather(-1, tokens[..., None]).squeeze(-1)
    accepted = _leading(uniforms[:, :-1] * proposed < chosen, counts)
    rejected = accepted < counts
    row = law[torch.arange(law.shape[0], device=law.device), accepted]  # [B, V]
    if tokens.shape[1]:
        at = accepted.clamp(max=tokens.shape[1] - 1)[:, None]
        if draft_law is None:
            excess = row.scatter(1, tokens.gather(1, at), 0.0)
        else:
            drafted = draft_law.gather(1, at[..., None].expand(-1, 1, law.shape[-1])).squeeze(1)
            excess = (row - drafted).clamp(min=0)
        usable = rejected & (excess.sum(-1) > 0)  # rounding may leave no residual where p = q
        row = torch.where(usable[:, None], excess, row)
    return Acceptance(accepted, sample(row, uniforms.gather(1, counts[:, None]).squeeze(1)))


def _leading(passed: Tensor, counts: Tensor) -> Tensor:
    """How many leading entries of ``passed`` [B, m] hold among the first ``counts`` [B]."""
    steps = torch.arange(passed.shape[1], device=passed.device)
    return (passed & (steps < counts[:, None])).long().cumprod(1).sum(1)
