"""How often drafted tokens are accepted, and how long drafts are: per edge, position and tag."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import le
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from adaspec.outcome import EdgeOutcome
from adaspec.plan import PlanSpace
from adaspec.priors import CostPriors
from adaspec.theory import Edge, Floats

_TAGS = 64  # tags kept apart; the one unused for longest is given up, what it taught all stays
_SURE = 20.0  # verifications before an edge can be surprised


class Acceptance:
    """Discounted counts per edge and position, right-censored through ``reached``; kept per tag.

    The hazard of a position is a Beta, shrunk to one rate per edge and extrapolated geometrically. A tag's counts are
    its own, plus those of all other tags scaled down so that they weigh at most ``tag_strength`` positions per edge: a
    new tag starts from what the others have shown, and a tag on its own is left alone. Older counts fade twice: by
    what replaces them (``keep``) and, slowly, by the rounds that pass (``idle_keep``).

    Attributes:
        rows: row of each edge.
        sums: everything ever counted, without discount (whole numbers); [4, edges, positions] reached, accepted, asked,
            drafted.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        positions: int,
        priors: CostPriors,
        known: Mapping[Edge, float],
        space: PlanSpace,
    ) -> None:
        self._priors = priors
        self.rows = {edge: row for row, edge in enumerate(edges)}
        self._mean = np.array([known.get(edge, priors.acceptance) for edge in edges])  # [edges]
        known_edges = np.array([edge in known for edge in edges], dtype=bool)
        self._weight = np.where(known_edges, priors.known_strength, priors.acceptance_strength)  # [edges]
        self._caution = np.where(known_edges, 1.0, priors.caution)[:, None]  # [edges, 1]
        self._length = _lengths(edges, positions, space)  # [edges, positions]
        self._varies = bool((self._length < 1.0).any())  # whether some draft was or may be shorter than asked for
        self.sums = np.zeros((4, len(edges), positions))
        self._all = np.zeros((4, len(edges), positions))  # over all tags, discounted
        self._tags: dict[str, _Counts] = {}
        self._rest = False  # whether a tag was given up
        self._clock = 0

    def forget(self, rounds: int) -> None:
        """Lets rounds pass."""
        self._clock += rounds
        self._all *= self._priors.idle_keep**rounds

    def learn(self, tag: str, outcomes: Iterable[EdgeOutcome]) -> list[int]:
        """Adds the counts of some rounds, one outcome per edge and round.

        Returns the rows of edges that changed; what they had shown before is mostly forgotten.
        """
        alike: dict[Edge, list[EdgeOutcome]] = {}
        for one in outcomes:
            alike.setdefault((one.verifier, one.drafter), []).append(one)
        known = [(self.rows[edge], group) for edge, group in alike.items() if edge in self.rows]
        if not known:
            return []
        own, found = self._own(tag), []
        new, keep = np.zeros(self._all.shape), [1.0] * len(self.rows)
        for row, group in known:
            counts = [column[: new.shape[2]] for column in _summed(group)]
            for kind, column in enumerate(counts):
                new[kind, row, : len(column)] = column
            keep[row] = self._priors.keep ** len(group)
            if self._surprised(own, row, counts, len(group)):
                found.append(row)
                own.doubts[row] += 1.0
                keep[row] = min(self._priors.acceptance_strength / float(own.table[0, row].sum()), 1.0)
        self._varies = self._varies or bool((new[3] < new[2]).any())
        self.sums += new
        after = own.table * np.array(keep)[:, None] + new
        self._all += after - own.table
        own.table = after
        return found

    def _surprised(self, own: _Counts, row: int, counts: Sequence[Sequence[int]], rounds: int) -> bool:
        """Compares the recent rounds of an edge with what is believed of it, where that rests on more than those.

        ``counts``: reached and accepted per position in so many ``rounds``, and more.
        """
        weight, surprise = self._priors.position_strength, self._priors.surprise
        reached, accepted = own.table[:2, row].tolist()
        sure, fade = reached[0] >= _SURE, 0.9**rounds
        level = weight * sum(accepted) / max(sum(reached), 1e-9)
        excess, variance = fade * own.excess[row], fade * own.variance[row]
        for tries, hits, before, kept in zip(counts[0], counts[1], reached, accepted):
            hazard = min(max((level + kept) / (weight + before), 0.02), 0.98)
            excess += hits - tries * hazard
            variance += tries * hazard * (1.0 - hazard)
        changed = sure and abs(excess) > surprise * math.sqrt(variance + 0.25)
        going = sure and not changed
        own.excess[row], own.variance[row] = (excess, variance) if going else (0.0, 0.0)
        return changed

    def _own(self, tag: str) -> _Counts:
        """The counts of a tag, up to date; it becomes the latest used."""
        own = self._tags.pop(tag, None) or _Counts(self._all.shape[1:], self._clock)
        self._tags[tag] = own
        self._age(own)
        if len(self._tags) > _TAGS:
            self._tags.pop(next(iter(self._tags)))
            self._rest = True
        return own

    def _age(self, own: _Counts) -> None:
        if own.clock < self._clock:
            own.table *= self._priors.idle_keep ** (self._clock - own.clock)
            own.clock = self._clock

    def _pooled(self, tag: str) -> Floats:
        """Counts that speak about a tag; [4, edges, positions]."""
        own = self._tags.get(tag)
        if own is not None:
            self._age(own)
            if len(self._tags) == 1 and not self._rest:
                return own.table
        strength = self._priors.tag_strength
        others: Floats = self._all if own is None else np.maximum(self._all - own.table, 0.0)
        weight = strength / (strength + others[0].sum(axis=-1))  # [edges]
        heard: Floats = others * (weight if own is None else weight * (own.doubts == 0.0))[:, None]
        if own is not None:
            heard += own.table
        return heard

    def _rate(self, counts: Floats) -> tuple[Floats, Floats]:
        """Beta parameters of the one rate of each edge; [edges] each."""
        weight = self._weight
        reached, accepted = counts[:2].sum(axis=-1)
        return weight * self._mean + accepted, weight * (1.0 - self._mean) + reached - accepted

    def _positions(self, counts: Floats, rate: Floats) -> tuple[Floats, Floats]:
        """Beta parameters per position, given rates [..., edges]; [..., edges, positions] each."""
        weight, (reached, accepted) = self._priors.position_strength, counts[:2]
        unknown = (weight / (weight + reached)).cumsum(axis=-1)
        rate = np.minimum(np.maximum(rate[..., None] * self._caution**unknown, 0.001), 0.999)
        return weight * rate + accepted, weight * (1.0 - rate) + (reached - accepted)

    def mean(self, tag: str) -> Floats:
        """Believed hazards; [edges, positions]."""
        counts = self._pooled(tag)
        yes, no = self._rate(counts)
        above, below = self._positions(counts, yes / (yes + no))
        hazards: Floats = above / (above + below)
        return hazards

    def sample(self, tag: str, rng: np.random.Generator, draws: int, sharpness: float) -> Floats:
        """Draws from the posterior with its counts multiplied by ``sharpness``; [draws, edges, positions].

        Rates are exact; positions, whose Betas rest on ``position_strength`` or more, are normal on the arcsine scale,
        where the variance of a share does not depend on the share.
        """
        counts = self._pooled(tag)
        yes, no = self._rate(counts)
        rate = rng.beta(sharpness * yes, sharpness * no, size=(draws, len(yes)))
        above, below = self._positions(counts, rate)
        total = above + below
        angle = np.arcsin(np.sqrt(above / total))
        angle += rng.standard_normal(angle.shape) / (2.0 * np.sqrt(sharpness * total + 1.0))
        hazards: Floats = np.sin(np.minimum(np.maximum(angle, 0.0), 0.5 * np.pi)) ** 2
        return hazards

    def upper(self, tag: str, delta: float) -> Floats:
        """The 1 - delta quantile of each edge's rate, carried to its positions; [edges, positions]."""
        return self.outlook(tag, delta)[1]

    def outlook(self, tag: str, delta: float) -> tuple[Floats, Floats, Floats, Floats]:
        """Believed hazards, with each edge's rate at its 1 - delta quantile, and without caution; what a rate rests on.

        Returns:
            Three times [edges, positions], and positions that were reached, the prior's included; [edges].
        """
        counts = self._pooled(tag)
        yes, no = self._rate(counts)
        rates = np.array((yes / (yes + no), betaincinv(yes, no, 1.0 - delta)))
        above, below = self._positions(counts, rates)
        mean, upper = above / (above + below)
        weight = self._priors.position_strength
        bold = (weight * rates[0][:, None] + counts[1]) / (weight + counts[0])
        return mean, np.maximum(upper, mean), np.maximum(bold, mean), yes + no

    def drafted(self, tag: str) -> Floats | None:
        """Chance that a draft holds each position, where asked for; [edges, positions]; None: drafts are full.

        Shrunk per edge to one factor on what is believed beforehand.
        """
        if not self._varies:
            return None
        strength, (asked, drafted) = self._priors.drafted_strength, self._pooled(tag)[2:]
        factor = (strength + drafted.sum(axis=-1)) / (strength + (asked * self._length).sum(axis=-1))
        believed = self._length * np.minimum(factor, 1.0)[:, None]
        return np.minimum.accumulate((strength * believed + drafted) / (strength + asked), axis=-1)

    def state_dict(self) -> dict[str, Any]:
        """Counts by name; all numbers add up over replicas."""
        for own in self._tags.values():
            self._age(own)
        return {
            "sums": self._named(self.sums.astype(np.int64)),
            "all": self._named(self._all),
            "rest": int(self._rest),
            "tags": {
                tag: {
                    "counts": self._named(own.table),
                    "surprise": self._named(np.stack((own.excess, own.variance, own.doubts))),
                }
                for tag, own in self._tags.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._read(state["sums"], self.sums)
        self._read(state["all"], self._all)
        self._rest, self._tags, self._clock = bool(state["rest"]), {}, 0
        for tag, kept in state["tags"].items():
            own = self._tags[tag] = _Counts(self._all.shape[1:], 0)
            self._read(kept["counts"], own.table)
            surprise = np.stack((own.excess, own.variance, own.doubts))
            self._read(kept["surprise"], surprise)
            own.excess, own.variance = surprise[:2].tolist()
            own.doubts = surprise[2]
        tables = (self._all, *(own.table for own in self._tags.values()))
        short = any(bool((table[3] < table[2]).any()) for table in tables)
        self._varies = short or bool((self._length < 1.0).any())

    def _named(self, table: NDArray[Any]) -> dict[str, list[Any]]:
        """``table`` [n, edges, ...] by the edges' names, without edges of zeros."""
        return {"/".join(edge): table[:, row].tolist() for edge, row in self.rows.items() if table[:, row].any()}

    def _read(self, named: Mapping[str, Any], table: NDArray[Any]) -> None:
        """The inverse of ``_named``, into ``table``; longer or shorter windows are cut or padded with zeros."""
        table[:] = 0
        for edge, row in self.rows.items():
            held = np.array(named.get("/".join(edge), np.zeros(table[:, row].shape)), dtype=table.dtype)
            if held.ndim == 1:
                table[:, row] = held
            else:
                table[:, row, : held.shape[1]] = held[:, : table.shape[2]]


class _Counts:
    """What one tag has shown, by edge. ``excess``: recent accepted tokens over the expected, ``variance``: of that.

    ``doubts``: changes noticed so far, each of which ended what other tags had to say.
    """

    __slots__ = ("clock", "doubts", "excess", "table", "variance")

    def __init__(self, shape: tuple[int, ...], clock: int) -> None:
        self.table = np.zeros((4, *shape))  # reached, accepted, asked, drafted
        self.excess, self.variance = [0.0] * shape[0], [0.0] * shape[0]
        self.doubts = np.zeros(shape[0])
        self.clock = clock


def _summed(group: Sequence[EdgeOutcome]) -> Iterator[list[int]]:
    """Counts per position over some rounds: reached, accepted, asked, drafted."""
    for lists in (
        [one.reached for one in group],
        [one.accepted for one in group],
        [one.asked for one in group],
        [one.drafted for one in group],
    ):
        yield [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def check_edge(edge: EdgeOutcome) -> None:
    """Refuses counts that contradict themselves.

    Raises:
        ValueError: other numbers of positions reached and accepted or asked and drafted, or more of the latter.
    """
    if not _within(edge.accepted, edge.reached):
        raise ValueError(f"per position, accepted <= reached; got {edge.accepted} of {edge.reached}")
    if not _within(edge.drafted, edge.asked):
        raise ValueError(f"per position, drafted <= asked; got {edge.drafted} of {edge.asked}")


def _within(below: tuple[int, ...], above: tuple[int, ...]) -> bool:
    return len(below) == len(above) and all(map(le, below, above)) and (not below or min(below) >= 0)


def imputed(verifier: str, drafter: str, window: int, rows: int, accepted: int) -> EdgeOutcome:
    """The counts behind a round of which only the number of accepted tokens is known.

    Exact for one row. Of several rows the counts fall off geometrically, at the rate that explains the total.
    """
    accepted = min(max(accepted, 0), rows * window)
    if rows == 1:
        alive = [1] * (accepted + 1) + [0] * (window - accepted)
    else:
        rate = _geometric(accepted / rows, window)
        alive = [round(rows * rate**position) for position in range(window + 1)]
    reached, kept = tuple(alive[:-1]), tuple(alive[1:])
    return EdgeOutcome(verifier, drafter, reached, reached, kept)


def _geometric(mean: float, window: int) -> float:
    """The constant hazard at which ``mean`` tokens of a window are accepted, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = 0.5 * (low + high)
        if sum(middle**position for position in range(1, window + 1)) < mean:
            low = middle
        else:
            high = middle
    return high if mean else 0.0


def _lengths(edges: Sequence[Edge], positions: int, space: PlanSpace) -> Floats:
    """Chance that a draft holds each position, before anything is seen; [edges, positions]."""
    stops = {}
    for plan in space:
        if plan.stop:
            *_, (verifier, drafter, _) = plan.edges()
            stops[verifier, drafter] = plan.stop
    go_on = np.array([1.0 - stops.get(edge, 0.0) / 2.0 for edge in edges])
    held: Floats = go_on.reshape(-1, 1) ** np.arange(positions)
    return held
