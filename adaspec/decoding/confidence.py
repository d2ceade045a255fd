"""How sure a drafter is of a token it drafts, and where it therefore ends its window.

A drafter that stops early ends its window *behind* the first token of which it was less sure than a plan's ``stop``:
the token is kept, so no pass is wasted. Losslessness rests on what the decision looks at. The confidence of position
j is a function of the logits at j, hence of the tokens before j alone: it does not know which token was drawn there,
and the token is kept either way. Given the kept prefix, every drafted token still has exactly the recorded law. To
look at the *probability of the drawn token* and drop it would be wrong: the tokens that are left would be likelier
than their law says.
"""

from __future__ import annotations

import torch
from torch import Tensor

ENTROPY_WEIGHT = 0.2  # c below, the value of AdaEDL


def confidence(logits: Tensor) -> Tensor:
    """1 - sqrt(c H(q)), at least 0, of the laws q = softmax(logits); logits [..., V], result [...].

    A lower bound on the chance that a token of q is accepted, up to the constant c: by Pinsker's inequality
    1 - sqrt(KL(q, p) / 2), where the divergence from the verifier's law p is taken to grow with the entropy of q.
    Taken before penalties and temperature, so that it says something of greedy drafts too. References: AdaEDL
    (Agrawal et al., arXiv 2410.18351); SVIP (Zhang et al., arXiv 2411.18462).
    """
    entropy = torch.special.entr(torch.softmax(logits.float(), -1)).sum(-1)
    bound: Tensor = (1.0 - (ENTROPY_WEIGHT * entropy.clamp(min=0.0)).sqrt()).clamp(min=0.0)
    return bound


def sure_enough(logits: Tensor, stop: float) -> Tensor:
    """Which rows of logits [B, V] may draft on behind the token drawn from them, [B] bool; all of them for stop 0."""
    if not stop:
        return torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    return confidence(logits) >= stop


def largest_entropy(stop: float) -> float:
    """The entropy up to which ``sure_enough`` lets a row draft on, infinite for stop 0."""
    return (1.0 - stop) ** 2 / ENTROPY_WEIGHT if stop else float("inf")
