"""Free information: drafters that the target has not verified are scored on what is committed anyway."""

from __future__ import annotations

from collections.abc import Iterable

from adaspec.decoding.batch import Batch
from adaspec.decoding.cache import numbers
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.tally import EdgeTally, Proposal, agreement
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
        for row, (began, end) in enumerate(zip(*numbers(batch.committed, batch.sequence.lengths))):
            self._score_row(row, batch.text(row, end), began, end)
        return self._tally.drain(verifier, drafter)

    def _score_row(self, row: int, text: list[int], began: int, end: int) -> None:
        """Goes on at the open position; without one at ``began``, where the round that just ended began.

        Of ``text`` what is in front of ``end`` is committed.
        """
        position, proposed = self._open.get(row) or (began, self._propose(row, text, began))
        known = text[position:end]
        while True:
            accepted = agreement(proposed, known)
            if accepted >= len(known):  # not decided yet: the token behind the accepted ones is still to come
                break
            self._tally.add(self._window, len(proposed), accepted)
            position += accepted + 1
            known = known[accepted + 1 :]
            proposed = self._propose(row, text, position)
        self._open[row] = (position, proposed)

    def _propose(self, row: int, text: list[int], position: int) -> list[int]:
        return self._drafter.guess(row, text, position, [], self._window, self._stop)[0]


def overhear(batch: Batch, proposals: Iterable[Proposal], tally: EdgeTally) -> None:
    """Adds what committed tokens say of deterministic proposals that a middle stage has verified.

    A proposal behind a prefix that was then committed is what the drafter would have told the target there, and the
    tokens committed next have the target's law: where they agree it would have been accepted. What is behind the
    committed text stays undecided; where that ends depends on nothing behind it.
    """
    ends = batch.sequence.lengths.tolist()
    for proposal in (each for each in proposals if each.deterministic):
        for row, (start, asked, tokens) in enumerate(zip(proposal.start, proposal.asked, proposal.tokens)):
            known = batch.text(row, ends[row])[start : ends[row]]  # none too where its prefix was rejected
            offered = tokens[: len(known)]
            tally.add(min(asked, len(known)), len(offered), agreement(offered, known))
