"""Exact toy models: small vocabularies, table-driven, no network. Their joint laws can be written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Chain
from adaspec.decoding.drafter import Drafter, ModelDrafter
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.sampling import GREEDY, Sampler, SamplingParams, Uniforms
from adaspec.plan import Plan

VOCAB = 4
PROMPT = (1, 2)


class TableModel(LanguageModel):
    """Logits looked up by the last two tokens. What it was fed is its cache, so that a wrong rollback shows.

    ``table`` is [V, V, V] float32: logits of the next token after (token before last, last).
    """

    def __init__(self, name: str, table: Tensor) -> None:
        super().__init__(name, table.shape[-1])
        self.table = table

    def start(self, batch_size: int, capacity: int) -> None:
        super().start(batch_size, capacity)
        self._seen = torch.zeros(batch_size, capacity + 1, dtype=torch.long)

    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        last = self._seen.shape[1] - 1
        self._seen.scatter_(1, slots.clamp(max=last), tokens)
        at = slots.gather(1, rows).clamp(max=last)  # [B, n]
        return self.table[self._seen.gather(1, (at - 1).clamp(min=0)), self._seen.gather(1, at)]


def table_model(name: str, seed: int, *, like: Tensor | None = None, noise: float = 1.0) -> TableModel:
    """A random table, or a noisy copy of another one (a drafter that often agrees)."""
    random = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return TableModel(name, 1.5 * random if like is None else like + noise * random)


def toy_chain(**drafters: Drafter) -> Chain:
    """target, a, b, c: each a noisy copy of the one before; extra drafters by name."""
    target = table_model("target", 0)
    a = table_model("a", 1, like=target.table, noise=0.7)
    b = table_model("b", 2, like=a.table, noise=0.7)
    c = table_model("c", 3, like=b.table, noise=0.9)
    return Chain(target, {"a": a, "b": b, "c": c, **drafters}, capacity=64)


class ArgmaxDrafter(ModelDrafter):
    """A model that always proposes its most likely token: deterministic, as a lookup is."""

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        return super().propose(dataclasses.replace(batch, sampler=Sampler([GREEDY])), limits, stop)


class SureArgmaxDrafter(ArgmaxDrafter):
    """An ``ArgmaxDrafter`` that says how sure it is, as a lookup does: by the probability of its choice."""

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        start = batch.sequence.lengths
        draft = super().propose(batch, limits, stop)
        width = draft.tokens.shape[1]
        before = [batch.sequence.slice(start - offset, width) for offset in (2, 1)]
        sure = self.model.table[before[0], before[1]].softmax(-1).amax(-1)
        return dataclasses.replace(draft, confidence=sure)


def reference_law(table: np.ndarray, text: Sequence[int], params: SamplingParams) -> np.ndarray:
    """The processed law after ``text``, written down again without tensors: the oracle of the law tests."""
    logits = table[text[-2], text[-1]].astype(float).copy()
    for token in set(text):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    law = np.exp(logits / params.temperature - (logits / params.temperature).max())
    law /= law.sum()
    if params.top_k:
        law[law < np.sort(law)[-params.top_k]] = 0
        law /= law.sum()
    if params.top_p < 1:
        order = np.argsort(-law)
        before = np.concatenate(([0.0], np.cumsum(law[order])[:-1]))
        law[order[before >= params.top_p]] = 0
        law /= law.sum()
    law[law < params.min_p * law.max()] = 0
    return law / law.sum()


def joint_law(
    table: np.ndarray, length: int, params: SamplingParams, stop: int = -1, prompt: Sequence[int] = PROMPT
) -> np.ndarray:
    """Probability of every continuation of ``prompt``, flat over VOCAB ** length; a stop token repeats itself."""
    law = np.zeros((VOCAB,) * length)
    for tokens in product(range(VOCAB), repeat=length):
        probability, text = 1.0, list(prompt)
        for token in tokens:
            ended = len(text) > len(prompt) and text[-1] == stop
            probability *= float(token == stop) if ended else reference_law(table, text, params)[token]
            text.append(token)
            if not probability:
                break
        law[tokens] = probability
    return law.ravel()


def draw(
    chain: Chain,
    plans: Plan | Sequence[Plan],
    length: int,
    params: SamplingParams,
    *,
    draws: int = 200_000,
    stop: int = -1,
    extra: int = 1,
    own_history: bool = False,
) -> np.ndarray:
    """Counts of the first ``length`` tokens over ``draws`` rows of one batch; see ``play``."""
    batch = toy_batch(params, draws, length + extra, stop)
    return count(play(chain, plans, batch, length, extra=extra, own_history=own_history), length)


def play(
    chain: Chain,
    plans: Plan | Sequence[Plan],
    batch: Batch,
    length: int,
    *,
    extra: int = 1,
    own_history: bool = False,
) -> Tensor:
    """Decodes every row to ``length`` tokens or its stop token; [B, length], filled up with the stop token.

    Args:
        chain: the models.
        plans: one plan; or several, of which each round plays the one that the tokens emitted in row 0 point to.
        batch: the rows, fresh.
        length: tokens wanted.
        extra: budget beyond ``length``, so that windows overlap it.
        own_history: every row plays the plan that its own emitted tokens point to.
    """
    choices = [plans] if isinstance(plans, Plan) else list(plans)
    chain.prepare(choices)
    start = batch.sequence.lengths
    chain.begin(batch)
    left = torch.full_like(start, length + extra)
    while bool((left > 0).any()):
        emitted = batch.sequence.lengths - start
        turn = (emitted if own_history else emitted[0]) % len(choices)
        for index, plan in enumerate(choices):
            limits = torch.where(turn == index, left, 0)
            if bool((limits > 0).any()):
                chain.emit(plan, limits.tolist())
        emitted = batch.sequence.lengths - start
        ended = batch.is_stop(batch.sequence.slice(batch.sequence.lengths - 1, 1))[:, 0] | (emitted >= length)
        left = torch.where(ended, 0, length + extra - emitted)
    behind = torch.arange(length) >= (batch.sequence.lengths - start)[:, None]
    return torch.where(behind, batch.stop_ids[:, :1], batch.sequence.slice(start, length))


def count(tokens: Tensor, length: int) -> np.ndarray:
    """How often each continuation occurs among ``tokens`` [B, length], flat over VOCAB ** length."""
    flat = (tokens * VOCAB ** torch.arange(length - 1, -1, -1)).sum(1)
    return np.bincount(flat.numpy(), minlength=VOCAB**length)


def toy_batch(
    params: SamplingParams, rows: int, new_tokens: int, stop: int = -1, prompts: Sequence[Sequence[int]] = (PROMPT,)
) -> Batch:
    """``rows`` rows, row b with seed ``params.seed + b`` and the prompts in turn."""
    longest = max(map(len, prompts))
    sequence = TokenBuffer(rows, longest + new_tokens)
    turn = torch.arange(rows) % len(prompts)
    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    sequence.append(padded[turn], torch.tensor([len(prompt) for prompt in prompts])[turn])
    sampler = Sampler([params])  # one entry stands for all rows; only the random streams differ
    sampler.uniforms = Uniforms(params.seed + torch.arange(rows))
    return Batch(sequence, sampler, torch.full((rows, 1), stop), sequence.lengths)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square p-value of counts against a law; cells with an expected count under 10 are pooled."""
    expected = law * counts.sum()
    if (counts[law == 0] > 0).any():
        return 0.0
    small = (expected < 10) & (law > 0)
    keep = (expected >= 10) & (law > 0)
    observed, wanted = list(counts[keep]), list(expected[keep])
    if small.any() and expected[small].sum() > 0:
        observed.append(counts[small].sum())
        wanted.append(expected[small].sum())
    wanted = np.array(wanted) * (np.sum(observed) / np.sum(wanted))
    return float(chisquare(observed, wanted).pvalue)
