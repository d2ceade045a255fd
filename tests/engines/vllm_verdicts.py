"""What must hold of a steered engine: verdicts over the phases of `run_vllm.py`, without vLLM."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

OURS, TABLE, EXPORTED = "ours", "table", "exported"
LEARN, MEASURE = "learn", "measure"
TOLERANCE = 0.85  # least share of the best fixed window's rate
LEARNED = 0.5  # least share of our steps that teach something


@dataclass(frozen=True)
class Phase:
    """One batch of requests, decoded to its end by one arm: a fixed window (its number), a table, or ours.

    ``sequence``: (rows, window) of every step; ``same``: the tokens are those of the engine without speculation.
    """

    stage: str
    arm: str
    rows: int
    tokens: int
    seconds: float
    sequence: list = field(default_factory=list)
    same: bool = True


@dataclass(frozen=True)
class Verdict:
    """``holds``: True, False, or None where these measurements do not ask for it."""

    holds: bool | None
    text: str

    def __str__(self):
        word = {True: "PASS", False: "FAIL", None: "not asked"}[self.holds]
        return f"{word}: {self.text}"


def fixed_windows(phases):
    """The fixed windows that were measured."""
    return sorted({int(phase.arm) for phase in phases if phase.stage == MEASURE and phase.arm.isdigit()})


def rate(phases, arm, rows):
    """Tokens/s of an arm at a load, the median of its measured phases; None without any."""
    rates = [each.tokens / each.seconds for each in measured(phases, arm, rows)]
    return median(rates) if rates else None


def measured(phases, arm, rows):
    """The phases of an arm at a load that count."""
    return [each for each in phases if (each.stage, each.arm, each.rows) == (MEASURE, arm, rows)]


def best_fixed(phases, rows):
    """The fixed window with the highest rate at a load; None before one was measured."""
    rates = {window: rate(phases, str(window), rows) for window in fixed_windows(phases)}
    known = {window: value for window, value in rates.items() if value is not None}
    return max(known, key=known.__getitem__) if known else None


def played(phase):
    """The window that most steps of a phase at its full load played."""
    full = Counter(window for rows, window in phase.sequence if rows == phase.rows)
    return full.most_common(1)[0][0] if full else None


def settled(phases, rows):
    """The window that ours played most at a load once it has settled."""
    full = Counter(window for each in measured(phases, OURS, rows) for batch, window in each.sequence if batch == rows)
    return full.most_common(1)[0][0] if full else None


def verdicts(phases, loads, state=None):
    """All of them; ``loads``: rows, the least and the most. ``state``: rounds in the state saved at the end."""
    yield equality(phases)
    yield change(phases)
    for rows in loads:
        yield pays(phases, OURS, rows)
    yield load(phases, *loads)
    yield falls_and_comes_back(phases, *loads)
    yield learns(phases, state)
    for rows in loads:
        yield pays(phases, EXPORTED, rows)


def equality(phases):
    """Every arm gives the tokens that the engine gives without speculation."""
    wrong = sorted({f"{each.arm} at {each.rows} rows" for each in phases if not each.same})
    exceptions = f", but not for {', '.join(wrong)}" if wrong else ""
    return Verdict(not wrong if phases else None, f"greedy tokens are those without speculation{exceptions}")


def change(phases):
    """The window is not stuck."""
    seen = sorted({window for each in phases if each.arm == OURS for _, window in each.sequence})
    return Verdict(len(seen) > 1 if seen else None, f"the window changes: {seen} were played")


def pays(phases, arm, rows):
    """What an arm does is nearly as fast as the best fixed window."""
    own, best = rate(phases, arm, rows), best_fixed(phases, rows)
    if own is None or best is None:
        return Verdict(None, f"at {rows} rows {arm} was not measured beside fixed windows")
    share = own / rate(phases, str(best), rows)
    text = f"at {rows} rows {arm} reaches {share:.2f} of the best fixed window, {best} (at least {TOLERANCE})"
    return Verdict(share >= TOLERANCE, text)


def load(phases, low, high):
    """Under load less is drafted, unless the fixed windows say that drafting less would not be faster there."""
    calm, busy = settled(phases, low), settled(phases, high)
    if calm is None or busy is None:
        return Verdict(None, "ours was not measured at both loads")
    text = f"ours settles at window {calm} with {low} rows, {busy} with {high}"
    if busy < calm:
        return Verdict(True, text)
    own = rate(phases, str(busy), high)
    shorter = [window for window in fixed_windows(phases) if window < busy and rate(phases, str(window), high)]
    if own is None:
        return Verdict(None, f"{text}; fixed windows were not measured")
    faster = [window for window in shorter if own < TOLERANCE * rate(phases, str(window), high)]
    reason = f"though fixed {faster} is faster there" if faster else "and no shorter fixed window is faster there"
    return Verdict(not faster, f"{text}, {reason}")


def falls_and_comes_back(phases, low, high):
    """Where not drafting pays under load alone, ours stops there, and drafts again when the load is gone."""
    best = best_fixed(phases, low), best_fixed(phases, high)
    ours = [each for each in phases if each.stage == MEASURE and each.arm == OURS and each.sequence]
    told = " ".join(f"{each.rows}:{played(each)}" for each in ours)
    if not best[0] or best[1] != 0 or len({each.rows for each in ours}) < 2:
        return Verdict(None, f"drafting stops under load and begins again: the best fixed windows are {best}; {told}")
    good = all((played(each) == 0) == (each.rows == high) for each in ours)
    back = any(before.rows == high and after.rows == low for before, after in pairwise(ours))
    return Verdict(good and back, f"drafting stops under load and begins again (rows:window of each phase): {told}")


def learns(phases, state):
    """The saved state holds what was played."""
    steps = sum(len(each.sequence) for each in phases if each.arm == OURS)
    if state is None:
        return Verdict(None, "the state is saved at the end, which was not reached")
    return Verdict(state >= LEARNED * steps, f"the saved state holds {state} rounds of {steps} steps")
