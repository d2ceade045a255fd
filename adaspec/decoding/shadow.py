"""Free information: a lookup drafter that is not in the plan is scored on what is committed anyway."""

from __future__ import annotations

import torch

from adaspec.decoding.drafter import Batch, EdgeTally
from adaspec.decoding.lookup import LookupDrafter
from adaspec.outcome import EdgeOutcome


class Shadow:
    """Replays the verifications that a lookup drafter would have had, ``window`` tokens at a time.

    Committed tokens have the target's law whatever plan drew them, so a deterministic proposal is accepted as often
    here as it would be in play: its next tokens are compared, counted up to the first difference, and the drafter
    goes on behind it.

    Args:
        drafter: the lookup.
        window, stop: of the plans it is scored for.
    """

    def __init__(self, drafter: LookupDrafter, window: int, stop: float = 0.0) -> None:
        self._drafter = drafter
        self._window, self._stop = window, stop
        self._tally = EdgeTally(window)
        self._open: dict[int, tuple[int, list[int]]] = {}  # row -> (position, tokens proposed there)

    def skip(self) -> None:
        """The drafter plays itself: what is open cannot be judged any more."""
        self._open.clear()

    def score(self, batch: Batch, verifier: str, drafter: str) -> EdgeOutcome:
        """Judges what the tokens committed up to the end of this round decide; the names are those of the edge."""
        for row, began in enumerate(batch.committed.tolist()):
            self._score_row(batch, row, began)
        return self._tally.drain(verifier, drafter)

    def _score_row(self, batch: Batch, row: int, began: int) -> None:
        """Goes on at the open position; without one at ``began``, where the round that just ended began."""
        position, proposed = self._open.get(row) or (began, self._propose(batch, row, began))
        while True:
            known = batch.sequence.row(row, position)
            matches = (guess == token for guess, token in zip(proposed, known))
            accepted = next((count for count, same in enumerate(matches) if not same), min(len(proposed), len(known)))
            if accepted >= len(known):  # not decided yet: the token behind the accepted ones is still to come
                break
            self._tally.add(*(torch.tensor([count]) for count in (self._window, len(proposed), accepted)))
            position += accepted + 1
            proposed = self._propose(batch, row, position)
        self._open[row] = (position, proposed)

    def _propose(self, batch: Batch, row: int, position: int) -> list[int]:
        return self._drafter.guess(row, batch.sequence.tokens[row], position, position, self._window, self._stop)[0]
