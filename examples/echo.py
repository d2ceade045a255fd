"""A drafter of one's own: it proposes what followed the last token when that token came up before.

adaspec generate "..." --drafter lookup --drafter python:examples.echo.EchoDrafter
"""

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.drafter import Drafter


class EchoDrafter(Drafter):
    """Made with its name in plans and the target's tokenizer. It keeps nothing, so there is nothing to roll back."""

    one_pass = True  # a whole window in one pass: seconds do not grow with it

    def __init__(self, name: str, tokenizer: object) -> None:
        super().__init__()
        self.name = name

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        """Every choice here is a function of the text so far: that is what ``law=None``, a one-hot law, claims."""
        text = batch.sequence
        with self.clock.measure(self.name, 1, text.batch_size, int(text.lengths.max())):
            rows = [_echo(text.row(row), limit) for row, limit in enumerate(limits.tolist())]
            width = max(map(len, rows))
            padded = [row + [0] * (width - len(row)) for row in rows]
            tokens = torch.tensor(padded, dtype=torch.long, device=limits.device).view(len(rows), width)
            counts = batch.cut(tokens, torch.tensor([len(row) for row in rows], device=limits.device))
            text.append(tokens, counts)  # at most limits[b] tokens, none behind a stop token
        return Draft(tokens, counts, law=None)


def _echo(tokens: list[int], limit: int) -> list[int]:
    before = [at for at, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return tokens[before[-1] + 1 :][:limit] if before else []
