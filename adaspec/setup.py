"""What to load and what to choose from, as values: the command line and the benchmarks are read into these."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaspec.decoding.device import check_threads
from adaspec.decoding.feature_load import is_feature_drafter
from adaspec.decoding.load import check_runner
from adaspec.decoding.lookup import check_ngrams
from adaspec.decoding.model import check_precision
from adaspec.decoding.native.library import can_compile
from adaspec.decoding.packed import CPU_PRECISIONS
from adaspec.plan import Plan, PlanSpace

DEFAULT_TARGET = "smollm2-135m"
TARGET = "target"  # the target's name in plans


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One ``--drafter``: its name in plans and its source, written ``[NAME=]SOURCE``.

    Sources: ``lookup`` or ``lookup:MIN-MAX`` (n-gram range); a precision (the target's own weights in it); ``head`` or
    a folder with a feature drafter (which reads the target's hidden states);
    ``a+b`` (a hybrid of drafters named before, ``parts``); ``bridge:SOURCE`` (a model of another tokenizer);
    ``python:module.Class`` (a drafter of one's own); else anything the model store resolves, in the target's precision
    or, as ``int8:SOURCE``, in one of its own.
    """

    name: str
    source: str
    parts: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, known: Iterable[str] = ()) -> DrafterSpec:
        """Reads ``[NAME=]SOURCE``; ``known``: the names of the drafters before it.

        Raises:
            ValueError: an empty source, a name no plan could hold, or a source that is written wrongly.
        """
        name, sign, source = text.rpartition("=")
        if not source:
            raise ValueError(f"a drafter is written [NAME=]SOURCE, got {text!r}")
        names, parts = set(known), tuple(source.split("+"))
        _check_parts(source, parts, names)
        spec = cls(name, source, parts if len(parts) > 1 and names.issuperset(parts) else ())
        if not sign:
            spec = cls(spec._short_name(), source, spec.parts)
        spec._check()
        Plan((spec.name,))  # refuses what a plan could not hold
        return spec

    @property
    def kind(self) -> str:
        """One of lookup, hybrid, bridge, python, feature, precision, model."""
        prefix = self.source.partition(":")[0]
        if self.parts:
            return "hybrid"
        if prefix in ("lookup", "bridge", "python"):
            return prefix
        if is_feature_drafter(self.source):
            return "feature"
        return "precision" if self.source in CPU_PRECISIONS else "model"

    @property
    def precision(self) -> str | None:
        """The precision of its weights; None: the target's."""
        prefix = self.source.partition(":")[0]
        return prefix if prefix in CPU_PRECISIONS else None

    @property
    def can_verify(self) -> bool:
        """Whether it may stand in the middle of a chain."""
        return self.kind in ("precision", "model")

    @property
    def model_source(self) -> str | None:
        """What the model store has to resolve for it, None for what is no model of its own."""
        prefix = {"model": f"{self.precision}:", "bridge": "bridge:"}.get(self.kind)
        return None if prefix is None else self.source.removeprefix(prefix)

    @property
    def ngrams(self) -> tuple[int, int]:
        """MIN and MAX of a lookup.

        Raises:
            ValueError: another form than ``lookup`` or ``lookup:MIN-MAX``, or an empty range.
        """
        found = re.fullmatch(r"lookup(?::(\d{1,3})-(\d{1,3}))?", self.source, re.ASCII)
        if not found:
            raise ValueError(f"a lookup drafter is written lookup or lookup:MIN-MAX, got {self.source!r}")
        low, high = int(found[1] or 2), int(found[2] or 4)
        check_ngrams(low, high)
        return low, high

    def _short_name(self) -> str:
        if self.kind in ("hybrid", "lookup"):
            return self.source.partition(":")[0]
        if self.kind == "python":
            return self.source.rpartition(".")[2]
        base = Path(self.model_source or self.source).name.removesuffix(".gguf")
        return base.partition("@")[0].replace(":", "-").replace(",", "-")

    def _check(self) -> None:
        if self.kind == "lookup":
            _ = self.ngrams
        if self.model_source == "":
            raise ValueError(f"a drafter is written {self.source}SOURCE, got {self.source!r}")
        if self.kind == "python" and not re.fullmatch(r"python:\w+(\.\w+)+", self.source):
            raise ValueError(f"a drafter of one's own is written python:module.Class, got {self.source!r}")


def parse_drafters(texts: Iterable[str]) -> tuple[DrafterSpec, ...]:
    """Reads ``--drafter`` options in order, so that a hybrid may name those before it.

    Raises:
        ValueError: see ``DrafterSpec.parse``.
    """
    specs: list[DrafterSpec] = []
    for text in texts:
        specs.append(DrafterSpec.parse(text, [spec.name for spec in specs]))
    return tuple(specs)


def usual_drafters(target: str, device: str = "cpu", runner: str = "auto") -> tuple[DrafterSpec, ...]:
    """The drafters of a target when none are named.

    Any target has lookup. Where passes are computed in C the default one has an int4 copy of itself as well, and both
    together; others may have them too (``--drafter int4``), but nobody has measured what they are worth there.
    """
    native = device == "cpu" and runner in ("auto", "native") and can_compile()
    return parse_drafters(["lookup", "int4", "lookup+int4"] if native and target == DEFAULT_TARGET else ["lookup"])


@dataclass(frozen=True, slots=True)
class Setup:
    """What to load and what to choose from. ``plan`` pins one plan; else windows, stops and depth span the plans.

    ``drafters``: none given takes ``usual_drafters``.
    ``threads``: CPU threads; None takes what a short measurement finds fastest.

    Raises:
        ValueError: values that are out of range or contradict each other.
    """

    target: str = DEFAULT_TARGET
    drafters: tuple[DrafterSpec, ...] = ()
    plan: Plan | None = None
    windows: tuple[int, ...] = (2, 4, 8)
    inner_windows: tuple[int, ...] = (2, 4)
    stops: tuple[float, ...] = (0.0,)
    max_depth: int = 3
    precision: str = "fp16"
    device: str = "cpu"
    runner: str = "auto"
    threads: int | None = None
    cache_length: int = 2048
    corpus: Path | None = None
    plain: bool = False
    seed: int = 0
    offline: bool = False
    trust_remote_code: bool = False
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision, self.device)
        check_runner(self.runner, self.precision, self.device)
        if not self.drafters:
            object.__setattr__(self, "drafters", usual_drafters(self.target, self.device, self.runner))
        if self.threads is not None:
            check_threads(self.threads)
        if self.corpus is not None and not any(spec.kind == "lookup" for spec in self.drafters):
            raise ValueError(f"the corpus {self.corpus} backs a lookup drafter, and there is none")
        if self.corpus is not None and not self.corpus.is_file():
            raise ValueError(f"the corpus {self.corpus} is no file")
        if self.plain and self.plan is not None and self.plan.depth > 1:
            raise ValueError(f"plain decoding plays no drafter, so it excludes the plan {self.plan}")
        if self.max_depth < 1:
            raise ValueError(f"the longest chain has at least 1 model, got {self.max_depth}")
        if self.cache_length < 2:
            raise ValueError(f"the cache holds at least 2 tokens, got {self.cache_length}")
        names = [spec.name for spec in self.drafters]
        if len(set(names)) < len(names) or TARGET in names:
            raise ValueError(
                f"drafters need different names (not {TARGET!r}), got {', '.join(names)}; write NAME=SOURCE"
            )

    @property
    def identity(self) -> str:
        """What a state of these models is about: what another target has taught is of no use to it."""
        name = Path(self.target).name if Path(self.target).exists() else self.target
        return f"{name} ({self.precision} on {self.device})"

    @property
    def smaller_models(self) -> tuple[str, ...]:
        """Sources of the drafters that are models of the target's tokenizer, whatever precision they are asked in."""
        return tuple(spec.model_source or "" for spec in self.drafters if spec.kind == "model")

    def closure(self, names: Iterable[str]) -> tuple[DrafterSpec, ...]:
        """The drafters of these names and the parts they are made of, parts first."""
        wanted = set(names)
        for spec in reversed(self.drafters):  # parts stand before their hybrids
            wanted.update(spec.parts if spec.name in wanted else ())
        return tuple(spec for spec in self.drafters if spec.name in wanted)


def _check_parts(source: str, parts: Sequence[str], known: Collection[str]) -> None:
    """Refuses what reads as a hybrid of drafters that are not there yet.

    Raises:
        ValueError: a part that no drafter before it has as its name.
    """
    missing = [part for part in parts if part not in known]
    usual = {"lookup", "head", *CPU_PRECISIONS, *known}
    if missing and len(parts) > 1 and not usual.isdisjoint(parts) and not Path(source).exists():
        raise ValueError(f"the drafter {source} is made of drafters given before it, and {missing[0]} is not one")


def span(setup: Setup) -> PlanSpace:
    """The plans of a setup: the pinned one, or every chain of its models; plain decoding is always among them.

    Raises:
        ValueError: the pinned plan has another target or names a model that is not there.
    """
    known = (TARGET, *(spec.name for spec in setup.drafters))
    if setup.plan is not None:
        for name in setup.plan.models:
            if name not in known:
                raise ValueError(f"plan {setup.plan} names {name!r}; known are {', '.join(known)}")
        if setup.plan.target != TARGET:
            raise ValueError(f"a plan begins with {TARGET!r}, got {setup.plan}")
        return PlanSpace([setup.plan])
    if setup.plain:
        return PlanSpace([Plan((TARGET,))])
    space = PlanSpace.grid(
        TARGET,
        known[1:],
        setup.windows,
        middles=[spec.name for spec in setup.drafters if spec.can_verify],
        inner_windows=setup.inner_windows,
        max_depth=setup.max_depth,
        stops=setup.stops,
    )
    features = {spec.name for spec in setup.drafters if spec.kind == "feature"}
    made_of = {name: {spec.name for spec in setup.closure([name])} for name in known[1:]}
    plans = (plan for plan in space if made_of.get(plan.models[-1], set()).isdisjoint(plan.models[1:-1]))
    return PlanSpace(  # a feature drafter reads the target, so nothing may stand between them
        plan for plan in plans if plan.depth < 3 or features.isdisjoint(made_of[plan.models[-1]])
    )
