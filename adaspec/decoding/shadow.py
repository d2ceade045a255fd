"""Free information: drafters that the target has not verified are scored on what is committed anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adaspec.decoding.batch import Batch
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.tally import EdgeTally, Proposal, agreement
from adaspec.outcome import GATHERED, EdgeOutcome


class Shadow:
    """Replays the verifications that a lookup drafter would have had, ``window`` tokens at a time.

    Committed tokens have the target's law whatever plan drew them, so a deterministic proposal is accepted as often
    here as it would be in play: its next tokens are compared, counted up to the first difference, and the drafter
    goes on behind it. It does so several rounds later, where nothing is lost by it: the first steps behind a pass,
    which leaves nothing in the processor's caches, take many times as long as those that follow.

    Args:
        drafter: the lookup.
        window, stop: of the plans it is scored for.
    """

    def __init__(self, drafter: LookupDrafter, window: int, stop: float = 0.0) -> None:
        self._drafter = drafter
        self._window, self._stop = window, stop
        self._tally = EdgeTally(window)
        self._open: dict[int, tuple[int, list[int] | None]] = {}  # row -> position, tokens proposed there if asked yet

    def skip(self) -> None:
        """What is open cannot be judged any more."""
        self._open.clear()

    def follow(self, batch: Batch, began: Sequence[int], ends: Sequence[int], done: Sequence[bool]) -> None:
        """Goes on behind a round in which the drafter did not play.

        ``began``, ``ends``: committed tokens of each row before and after it; ``done``: whether the row has ended.
        """
        for row, (start, end) in enumerate(zip(began, ends)):
            position, _ = self._open.setdefault(row, (start, None))
            if start < end and (done[row] or end - position >= GATHERED):
                self._judge(row, batch, end)

    def settle(self, batch: Batch, ends: Sequence[int]) -> None:
        """Judges all that is decided; to be called before the drafter itself reads what is committed."""
        for row in list(self._open):
            self._judge(row, batch, ends[row])

    def drain(self, verifier: str, drafter: str) -> EdgeOutcome | None:
        """What was judged since the last call, None for nothing; the names are those of the edge."""
        return self._tally.drain(verifier, drafter) if self._tally else None

    def _judge(self, row: int, batch: Batch, end: int) -> None:
        """Goes on at the open position of a row, of which ``end`` tokens are committed."""
        position, proposed = self._open[row]
        text = batch.text(row, end)
        if proposed is None:
            proposed = self._propose(row, text, position)
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
