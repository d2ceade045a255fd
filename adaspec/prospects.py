"""What a plan may be worth: what it brings now, and what playing it teaches about how fast it could be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from adaspec.theory import Floats

_TRIALS = np.array([[4.0], [16.0], [64.0]])  # rounds that a trial of a plan may last
_NONE = 1e-9  # rise of a rate by a part that a plan does not have, rounding included
_STEEP = 1.0 / np.sqrt(2.0 * np.pi)


@dataclass(frozen=True, slots=True)
class Prospects:
    """Every plan's expected speed in a context, and how it hangs on what is not known yet.

    Attributes:
        rates: tokens per second with what idle models lack spread over the rounds they are going to play; [plans].
        fed: the same with nothing lacking; [plans].
        seconds: of a round; ``feeding``: seconds that feeding its idle models takes at once; [plans] each.
        shared: rise of the log of a plan's rate were a part (a pair's acceptance, a model's seconds, ...) one standard
            deviation better, 0 where the plan lacks it; [parts, plans].
        half: rounds of a plan until half of the variance of a part that it has is gone; [parts, plans].
        own, own_half: the same of what is the plan's alone; [plans] each.
        gross: rate ("fed") of a plan if a model that no round has shown yet is far faster than profiled; 0 where all
            are known; [plans].
    """

    rates: Floats
    fed: Floats
    seconds: Floats
    feeding: Floats
    shared: Floats
    half: Floats
    own: Floats
    own_half: Floats
    gross: Floats

    def values(self, horizon: float, blunder: float) -> Floats:
        """Rounds of the best plan that a trial of each plan is expected to win; [plans], 0 for the best one itself.

        A trial of m rounds shrinks the doubt about the difference to the best plan by a known amount s, so it is worth
        ``horizon`` x E[(s Z - gap)+] with Z a standard normal (the knowledge gradient: Frazier, Powell and Dayanik,
        2008), less what it costs: the time lost while it lasts, and the feeding of idle models. The best m counts, as
        one hold may be too short to teach anything (Frazier and Powell, 2010).

        Args:
            horizon: rounds for which what is learned will be of use.
            blunder: chance that a model's profile is grossly wrong until a round has shown it.
        """
        best = int(self.rates.argmax())
        gap = np.log(self.rates[best] / self.rates)
        apart = (self.shared > _NONE) * (self.shared - self.shared[:, best : best + 1]) ** 2  # [parts, plans]
        trials = _TRIALS[:, :, None]
        told = (apart * (trials / (trials + self.half))).sum(axis=1)  # [trials, plans]
        told += self.own**2 * (_TRIALS / (_TRIALS + self.own_half))
        spread = np.sqrt(told) + 1e-9
        score = gap / spread
        gain = spread * (_STEEP * np.exp(-0.5 * score * score) - score * ndtr(-score))
        gain += blunder * np.maximum(np.log(np.maximum(self.gross, 1e-9) / self.fed[best]), 0.0)
        lost = 1.0 - np.minimum(self.fed / self.fed[best], 1.0)
        cost = _TRIALS * lost * self.seconds + np.maximum(self.feeding - self.feeding[best], 0.0)
        found: Floats = (horizon * gain - cost / self.seconds[best]).max(axis=0)
        found[best] = 0.0
        return found


def half_lives(caution: float, edges: Floats, models: Floats, tokens: Floats) -> Floats:
    """Rounds of each plan that halve the doubt about each part: caution, edges, models; [parts, plans].

    Args:
        caution: what it rests on, in rounds.
        edges: the same in positions, of which a round reaches about as many as it brings tokens; [edges].
        models: the same in rounds; [models].
        tokens: of a round, per row; [plans].
    """
    found = np.empty((1 + len(edges) + len(models), len(tokens)))
    found[0] = caution
    found[1 : 1 + len(edges)] = edges[:, None] / tokens
    found[1 + len(edges) :] = models[:, None]
    return found


def each_own(tables: Floats) -> Floats:
    """Row i of table i, as a view: [n, n, columns] -> [n, columns]."""
    count, rows, columns = tables.shape
    return tables.reshape(count * rows, columns)[:: rows + 1]
