"""What may be chosen: a plan is a value, a plan space is the list of plans that a controller chooses from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from typing import overload


@dataclass(frozen=True, slots=True)
class Plan:
    """A chain of models, target first and drafter last, with one window between neighbours.

    ``windows[i]`` is the number of tokens that ``models[i + 1]`` hands to ``models[i]`` for one verification.
    ``stop``: the last model, the drafter, ends its window behind a token of which it was less sure than this, so that
    its window is only a cap; 0: it never does. ``Plan(("target",))`` is plain autoregressive decoding.

    Raises:
        ValueError: no model, a model twice, a name that a plan's text form could not hold, a window below 1, another
            number of windows than of neighbours, a stop outside [0, 1), or one without a drafter.
    """

    models: tuple[str, ...]
    windows: tuple[int, ...] = ()
    stop: float = 0.0

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("a plan needs at least the target")
        for name in self.models:
            if not name or any(sign in name for sign in "/:,?") or name != name.strip():
                raise ValueError(f"a model's name in a plan holds no '/', ':', ',', '?' or outer space, got {name!r}")
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"a plan names each model once, got {'/'.join(self.models)}")
        if len(self.windows) != len(self.models) - 1:
            raise ValueError(
                f"a plan of {len(self.models)} models needs {len(self.models) - 1} windows, got {len(self.windows)}"
            )
        for window in self.windows:
            if window < 1:
                raise ValueError(f"a window is at least 1 token, got {window}")
        if not 0.0 <= self.stop < 1.0:
            raise ValueError(f"a drafter's stop lies in [0, 1), got {self.stop}")
        if self.stop and not self.windows:
            raise ValueError(f"a stop is the drafter's, and {self.models[0]} has none")

    @property
    def target(self) -> str:
        return self.models[0]

    @property
    def depth(self) -> int:
        """Number of models; 1 is plain decoding."""
        return len(self.models)

    def edges(self) -> Iterator[tuple[str, str, int]]:
        """Yields (verifier, drafter, window), outermost first.

        A drafter that stops early goes by a name of its own, ``draft?0.4``: what it does propose is accepted more
        often than what it would propose at full length, so the two are learned apart.
        """
        drafters = (*self.models[1:-1], f"{self.models[-1]}?{self.stop}" if self.stop else self.models[-1])
        return zip(self.models, drafters, self.windows)

    def query_lens(self, varying: Collection[str] = ()) -> Iterator[tuple[str, int]]:
        """Yields every (model, positions in one of its forwards) that a round can ask for, 1 for the drafter.

        The target verifies whole windows. A stage beneath it cuts its last block to what is still asked for, and the
        verifier of a drafter that stops early, or may be silent (``varying``: their names), gets drafts of any length:
        those see 1 .. window + 1 positions.
        """
        need = 0
        for stage, (model, window) in enumerate(zip(self.models, self.windows)):
            longest = min(window, need - 1) if stage else window
            varies = stage > 0 or (self.depth == 2 and (self.stop > 0.0 or self.models[1] in varying))
            for query_len in range(1 if varies else longest + 1, longest + 2):
                yield model, query_len
            need = longest
        yield self.models[-1], 1

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads the text form, ``target/mid/draft:8,3?0.4``; no windows for plain decoding, no ``?`` for no stop.

        Raises:
            ValueError: a window or stop that is no number, or anything the constructor refuses.
        """
        names, _, numbers = text.strip().partition(":")
        lengths, sign, stop = numbers.partition("?")
        try:
            windows = tuple(int(window.encode("ascii")) for window in lengths.split(",")) if numbers else ()
            early = float(stop.encode("ascii")) if sign else 0.0
        except ValueError:
            raise ValueError(f"a plan reads like target/mid/draft:8,3 or target/draft:8?0.4, got {text!r}") from None
        try:
            return cls(tuple(names.split("/")), windows, early)
        except ValueError as error:
            raise ValueError(f"plan {text!r}: {error}") from None

    def __str__(self) -> str:
        names = "/".join(self.models)
        stop = f"?{self.stop}" if self.stop else ""
        return f"{names}:{','.join(map(str, self.windows))}{stop}" if self.windows else names


LACKING = 8  # tokens from which a context tells that a model lacks them; fewer go with the next pass


@dataclass(frozen=True, slots=True)
class Context:
    """What is known before a round: running rows, their (mean) length in tokens, and a free tag (task, tenant).

    ``lacking``: models that have been idle, each with the tokens (mean over rows) that it must be fed before it can
    play; empty where an engine does not tell.
    """

    batch_size: int = 1
    seq_len: int = 0
    tag: str = ""
    lacking: tuple[tuple[str, int], ...] = ()

    @property
    def bucket(self) -> int:
        """The batch size rounded down to 1, 2, 3, 4, 6, 8, 12, 16, ...: what is learned per batch size goes by it."""
        power = 1 << (max(self.batch_size, 1).bit_length() - 1)
        return power + (power >> 1 if power > 1 and self.batch_size >= power + (power >> 1) else 0)


@dataclass(frozen=True, slots=True)
class Override:
    """What one request demands of its plans: one plan, no chain longer than ``max_depth`` models, no speculation.

    Raises:
        ValueError: a depth below 1, or a pinned plan that the rest forbids.
    """

    plan: Plan | None = None
    max_depth: int | None = None
    speculation: bool = True

    def __post_init__(self) -> None:
        if self.max_depth is not None and self.max_depth < 1:
            raise ValueError(f"a chain has at least 1 model, got max_depth {self.max_depth}")
        if self.plan is not None and not self.allows(self.plan):
            raise ValueError(f"plan {self.plan} is pinned and forbidden at once: {self!r}")

    def allows(self, plan: Plan) -> bool:
        """Whether a round may be played with ``plan``."""
        longest = (self.max_depth or plan.depth) if self.speculation else 1
        return plan.depth <= longest and self.plan in (None, plan)


class PlanSpace(Sequence[Plan]):
    """The plans to choose from, without repeats; plain decoding of the target is always the first.

    Raises:
        ValueError: no plan, or plans of different targets.
    """

    def __init__(self, plans: Iterable[Plan]) -> None:
        given = tuple(plans)
        targets = sorted({plan.target for plan in given})
        if len(targets) != 1:
            raise ValueError(f"the plans of a space share one target, got {', '.join(targets) or 'no plan'}")
        self._plans = tuple(dict.fromkeys((Plan((targets[0],)), *given)))
        self._arms = {plan: arm for arm, plan in enumerate(self._plans)}

    @classmethod
    def grid(
        cls,
        target: str,
        drafters: Sequence[str],
        windows: Sequence[int],
        *,
        middles: Sequence[str] = (),
        inner_windows: Sequence[int] | None = None,
        max_depth: int = 3,
        stops: Sequence[float] = (0.0,),
    ) -> PlanSpace:
        """Every chain of the target, up to ``max_depth - 2`` ordered ``middles`` and one of ``drafters``.

        The outermost window is taken from ``windows``, those beneath from ``inner_windows`` (default: ``windows``);
        an inner window is kept smaller than the one above it, since a longer one could never be used up.
        """
        inner = windows if inner_windows is None else inner_windows
        plans = [Plan((target,))]
        for count in range(min(len(middles), max_depth - 2) + 1 if max_depth > 1 else 0):
            for between, drafter in product(permutations(middles, count), drafters):
                if drafter in between:
                    continue
                for chosen, stop in product(product(windows, *[inner] * count), stops):
                    if all(lower < upper for upper, lower in pairwise(chosen)):
                        plans.append(Plan((target, *between, drafter), chosen, stop))
        return cls(plans)

    @property
    def target(self) -> str:
        return self._plans[0].target

    @property
    def plain(self) -> Plan:
        """The plan of plain decoding, always arm 0."""
        return self._plans[0]

    @property
    def models(self) -> tuple[str, ...]:
        """Every model of any plan, target first, in order of appearance."""
        return tuple(dict.fromkeys(name for plan in self._plans for name in plan.models))

    def shapes(self, varying: Collection[str] = ()) -> Mapping[str, frozenset[int]]:
        """The query lengths that the plans can ask of each model, to be prepared before the first round.

        ``varying``: drafters whose drafts may be shorter than asked for, though their plans have no ``stop``.
        """
        shapes: dict[str, set[int]] = {}
        for plan in self._plans:
            for model, query_len in plan.query_lens(varying):
                shapes.setdefault(model, set()).add(query_len)
        return {model: frozenset(lengths) for model, lengths in shapes.items()}

    def arm(self, plan: Plan) -> int:
        """The index of ``plan``; KeyError when the space does not hold it."""
        return self._arms[plan]

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self._plans[index]

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, plan: object) -> bool:
        return plan in self._arms

    def __repr__(self) -> str:
        return f"PlanSpace({len(self)} plans of {', '.join(self.models)})"
