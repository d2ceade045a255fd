"""A feature drafter over a whole text at once: what it would draft from every position, several tokens deep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.decoding.feature import Layer
from adaspec.decoding.feature_net import FeatureNet
from adaspec.training.collect import Text


class _Attend:
    """Attention of the s-th call: true entries up to s - 1 places back, and one entry of each step since.

    The first call's keys and values come from the verifier's states, those of later calls from the drafter's own: at
    entry j the chain began at j - s + 1, and step r has left its entry at j - s + r.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._steps.append((key, value))
        step, count = len(self._steps), query.shape[2]
        query = (query * query.shape[-1] ** -0.5).view(1, key.shape[1], -1, count, query.shape[-1])  # [1, Hkv, G, m, D]
        keys, values = (each[:, :, None] for each in self._steps[0])
        back = torch.arange(count, device=query.device)
        seen = back <= back[:, None] - (step - 1)
        scores = [(query @ keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)]
        own = [
            tuple(_later(each, step - number)[:, :, None] for each in entry)
            for number, entry in enumerate(self._steps[1:], 2)
        ]
        scores += [(query * keys).sum(-1, keepdim=True) for keys, _ in own]
        law = torch.cat(scores, -1).softmax(-1)
        mixed = law[..., :count] @ values
        for at, (_, values) in enumerate(own):
            mixed = mixed + law[..., count + at, None] * values
        return mixed.flatten(1, 2).transpose(1, 2).flatten(2)


def _later(entries: Tensor, places: int) -> Tensor:
    """Entries [..., m, D] moved back, so that j holds what j - ``places`` held."""
    return F.pad(entries, (0, 0, places, 0))[..., : entries.shape[-2], :] if places else entries


def unroll(net: FeatureNet, embed: Layer, text: Text, steps: int) -> list[Tensor]:
    """What the head reads after 1 .. ``steps`` drafted tokens at each entry; every element is [n - 1, size].

    Entry j of element s - 1 predicts token j + 2 of the text, given the verifier's states up to position j - s + 1 and
    the text's own tokens since. Entries before s - 1 mean nothing.
    """
    embeds = embed(text.tokens[None, 1:])
    states = net.fuse(text.features[None, :-1].to(embeds.dtype))
    positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
    attend, tops = _Attend(), []
    for _ in range(steps):
        states, top = net(embeds, states, positions, attend)
        states = _later(states, 1)
        tops.append(top[0])
    return tops


@dataclass(frozen=True, slots=True)
class Head:
    """The rows of the verifier's head that a drafter uses, [D, size], and the verifier's token of each, [D]."""

    rows: Tensor
    token_map: Tensor

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.rows)


def loss(net: FeatureNet, embed: Layer, head: Head, text: Text, steps: int, decay: float = 0.8) -> Tensor:
    """Cross-entropy of the drafter's laws from the verifier's own, over the reduced vocabulary, summed over the text.

    Only tokens to be learned count; the s-th step weighs ``decay`` ** (s - 1).
    """
    chosen = text.learn[2:].nonzero()[:, 0]  # entries that predict such a token
    total = torch.zeros((), device=head.rows.device)
    if not len(chosen):
        return total
    with torch.no_grad():
        wanted = head.logits(text.features[1:-1][chosen].to(head.rows.dtype)).softmax(-1)
    for step, top in enumerate(unroll(net, embed, text, steps)):
        there = chosen >= step
        law = head.logits(top[chosen[there]]).log_softmax(-1)
        total = total - decay**step * (wanted[there] * law).sum()
    return total


@torch.no_grad()
def acceptance(net: FeatureNet, embed: Layer, head: Head, text: Text, window: int) -> Tensor:
    """Greedy drafts from every position against the text: reached and accepted by position, [2, window] int64."""
    learned = torch.cat((text.learn[2:], text.learn.new_zeros(1)))  # [n - 1]; what follows the text is not known
    truth = torch.cat((text.tokens[2:], text.tokens.new_full((1,), -1)))
    alive, counts = learned, []
    for top in unroll(net, embed, text, window):
        matches = torch.zeros_like(alive)
        matches[alive] = head.token_map[head.logits(top[alive]).argmax(-1)] == truth[alive]
        counts.append(torch.stack((alive.sum(), matches.sum())))
        alive = F.pad(matches[:-1], (1, 0)) & learned
    return torch.stack(counts, 1)


def curve(counts: Tensor) -> list[float]:
    """Acceptance rates by position of counts [2, window]: of the drafted tokens that were reached, those accepted."""
    rates: list[float] = (counts[1] / counts[0].clamp(min=1)).tolist()
    return rates


def accepted_length(rates: list[float]) -> float:
    """Drafted tokens accepted per draft of this window, from the acceptance rates by position."""
    total, chance = 0.0, 1.0
    for rate in rates:
        chance *= rate
        total += chance
    return total
