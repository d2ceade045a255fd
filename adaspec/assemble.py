"""From names to a generator: loads target and drafters, spans the plans, times the passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.decoding.chain import Chain
from adaspec.decoding.clock import CudaClock, WallClock
from adaspec.decoding.device import check_device, check_threads, use_fastest, use_threads
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.feature_load import feature_folder, is_feature_drafter, load_feature_drafter
from adaspec.decoding.generate import Generator, Request
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.lookup import CorpusCounts, LookupDrafter
from adaspec.decoding.model import (
    Model,
    PlainModel,
    check_precision,
    check_same_tokenizer,
    load_module,
    load_tokenizer,
    sequence_limit,
    stop_token_ids,
)
from adaspec.decoding.packed import PRECISIONS
from adaspec.decoding.sampling import SamplingParams
from adaspec.decoding.store import resolve
from adaspec.outcome import Pass
from adaspec.plan import Plan, PlanSpace
from adaspec.policy import Fixed

DEFAULT_TARGET = "smollm2-135m"
TARGET = "target"  # the target's name in plans
Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One ``--drafter``: its name in plans and its source, written ``[NAME=]SOURCE``.

    Sources: ``lookup`` or ``lookup:MIN-MAX`` (n-gram range); a precision (the target's own weights in it); ``head``
    or a folder with a feature drafter; else anything the model store resolves.
    """

    name: str
    source: str

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Reads ``[NAME=]SOURCE``.

        Raises:
            ValueError: an empty source or a name no plan could hold.
        """
        name, sign, source = text.rpartition("=")
        if not source:
            raise ValueError(f"a drafter is written [NAME=]SOURCE, got {text!r}")
        if not sign:
            base = "lookup" if source.partition(":")[0] == "lookup" else Path(source).name.removesuffix(".gguf")
            name = base.partition("@")[0].replace(":", "-").replace(",", "-")
        Plan((name,))  # refuses what a plan could not hold
        spec = cls(name, source)
        if spec.is_lookup:
            _ngram_range(source)
        return spec

    @property
    def is_lookup(self) -> bool:
        return self.source.partition(":")[0] == "lookup"

    @property
    def is_model(self) -> bool:
        """Whether the source is a model of its own: no lookup, no features, not the target in another precision."""
        return not self.is_lookup and not self.is_feature and self.source not in PRECISIONS

    @property
    def is_feature(self) -> bool:
        return is_feature_drafter(self.source)


@dataclass(frozen=True, slots=True)
class Setup:
    """What to load and what to choose from. ``plan`` pins one plan; else windows and depth span the plans.

    ``threads``: CPU threads; None takes what a short measurement finds fastest.

    Raises:
        ValueError: values that are out of range or contradict each other.
    """

    target: str = DEFAULT_TARGET
    drafters: tuple[DrafterSpec, ...] = (DrafterSpec("lookup", "lookup"),)
    plan: Plan | None = None
    windows: tuple[int, ...] = (2, 4, 8)
    inner_windows: tuple[int, ...] = (2, 4)
    max_depth: int = 3
    precision: str = "fp16"
    device: str = "cpu"
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
        if self.threads is not None:
            check_threads(self.threads)
        if self.corpus is not None and not any(spec.is_lookup for spec in self.drafters):
            raise ValueError(f"the corpus {self.corpus} backs a lookup drafter, and there is none")
        if self.corpus is not None and not self.corpus.is_file():
            raise ValueError(f"the corpus {self.corpus} is no file")
        if self.plain and self.plan is not None and self.plan.depth > 1:
            raise ValueError(f"plain decoding plays no drafter, so it excludes the plan {self.plan}")
        if self.max_depth < 1:
            raise ValueError(f"the longest chain has at least 1 model, got {self.max_depth}")
        if self.cache_length < 2:
            raise ValueError(f"the cache holds at least 2 tokens, got {self.cache_length}")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A generator with what belongs to it. ``profile``: the timed passes; ``profile_seconds``: what that took."""

    generator: Generator
    controller: Controller
    space: PlanSpace
    tokenizer: Any = field(repr=False)
    profile: tuple[Pass, ...] = ()
    profile_seconds: float = 0.0

    def request(
        self, prompt: str, *, raw: bool, max_new_tokens: int, sampling: SamplingParams, stop: tuple[str, ...] = ()
    ) -> Request:
        """Tokenises a prompt, inside the model's chat template when it has one and ``raw`` is off."""
        if not raw and getattr(self.tokenizer, "chat_template", None):
            message = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        return Request(tuple(ids), max_new_tokens, sampling, stop)


def assemble(setup: Setup, tell: Progress) -> Assembly:
    """Loads everything, checks that it fits together and measures the passes once.

    Raises:
        ValueError: a name, file, plan or pair of models that does not work, each in one line.
        OSError: a source that cannot be read.
    """
    names = [spec.name for spec in setup.drafters]
    if len(set(names)) < len(names) or TARGET in names:
        raise ValueError(f"drafters need different names (not {TARGET!r}), got {', '.join(names)}; write NAME=SOURCE")
    space = span(setup)
    check_device(setup.device)
    source = _resolve(setup, setup.target, tell)
    used = [spec for spec in setup.drafters if spec.name in space.models]
    sources = {spec.name: _resolve(setup, spec.source, tell) for spec in used if spec.is_model}
    module, tokenizer = _load(setup, source, setup.precision, tell), _tokenizer(setup, source)
    target: LanguageModel = PlainModel(TARGET, module) if setup.plain else Model(TARGET, module)
    members = {
        spec.name: _drafter(setup, spec, sources.get(spec.name, source), target, tokenizer, tell) for spec in used
    }
    capacity, reason = _capacity(setup, target, members)
    for plan in space:
        if max(plan.windows, default=0) >= capacity:
            raise ValueError(f"plan {plan} has a window of {max(plan.windows)}, the cache holds {capacity} ({reason})")
    clock = CudaClock() if setup.device.startswith("cuda") else WallClock()
    chain = Chain(target, members, capacity=capacity, capacity_reason=reason, clock=clock)
    chain.prepare(space)
    controller = _controller(setup, space, members)
    generator = Generator(chain, controller, tokenizer, stop_token_ids(module, tokenizer))
    tell("time the passes", None)
    began = clock.now()
    if setup.threads is not None:
        use_threads(setup.threads)
    elif setup.device == "cpu" and not setup.plain:
        use_fastest(lambda: chain.profile({TARGET: [1]})[0].seconds)
    profile = tuple(chain.profile(space.shapes()))
    controller.profile(profile)
    return Assembly(generator, controller, space, tokenizer, profile, clock.now() - began)


def _capacity(setup: Setup, target: LanguageModel, members: Mapping[str, LanguageModel | Drafter]) -> tuple[int, str]:
    """Tokens that every model can hold, and what limits them."""
    limits = [(setup.cache_length, "as asked for")]
    for model in (target, *members.values()):
        if isinstance(model, Model | PlainModel):
            limit = sequence_limit(model.module.config.get_text_config(), rollback=not setup.plain)
            limits += [(limit[0], f"{model.name}: {limit[1]}")] if limit else []
    return min(limits, key=lambda limit: limit[0])


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
    features = {spec.name for spec in setup.drafters if spec.is_feature}
    middles = [spec.name for spec in setup.drafters if not spec.is_lookup and not spec.is_feature]
    space = PlanSpace.grid(
        TARGET,
        known[1:],
        setup.windows,
        middles=middles,
        inner_windows=setup.inner_windows,
        max_depth=setup.max_depth,
    )
    return PlanSpace(plan for plan in space if plan.depth < 3 or plan.models[-1] not in features)  # of the target


def _controller(setup: Setup, space: PlanSpace, members: dict[str, LanguageModel | Drafter]) -> Controller:
    lookups = tuple(name for name, member in members.items() if isinstance(member, LookupDrafter))
    policy = Fixed(setup.plan) if setup.plan is not None else None
    return Controller(space, policy, CostModel(space, one_pass=lookups), seed=setup.seed % 2**63)


def _drafter(
    setup: Setup, spec: DrafterSpec, source: Path, target: LanguageModel, tokenizer: Any, tell: Progress
) -> LanguageModel | Drafter:
    if spec.is_lookup:
        return _lookup(setup, spec, tokenizer, tell)
    if spec.is_feature:
        assert isinstance(target, Model)  # plain decoding has no drafter
        return load_feature_drafter(spec.name, feature_folder(spec.source, setup.target), target)
    if not spec.is_model:
        return Model(spec.name, _load(setup, source, spec.source, tell), target.vocab_size)
    check_same_tokenizer(tokenizer, _tokenizer(setup, source), setup.target, spec.source)
    return Model(spec.name, _load(setup, source, setup.precision, tell), target.vocab_size)


def _lookup(setup: Setup, spec: DrafterSpec, tokenizer: Any, tell: Progress) -> LookupDrafter:
    low, high = _ngram_range(spec.source)
    corpus = None
    if setup.corpus is not None:
        tell(f"count {setup.corpus.name}", None)
        try:
            text = setup.corpus.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the corpus {setup.corpus} is no UTF-8 text: {error}") from None
        corpus = CorpusCounts(tokenizer(text, add_special_tokens=False)["input_ids"])
    return LookupDrafter(spec.name, min_ngram=low, max_ngram=high, corpus=corpus)


def _ngram_range(source: str) -> tuple[int, int]:
    """MIN and MAX of ``lookup`` or ``lookup:MIN-MAX``."""
    found = re.fullmatch(r"lookup(?::(\d{1,3})-(\d{1,3}))?", source, re.ASCII)
    if not found:
        raise ValueError(f"a lookup drafter is written lookup or lookup:MIN-MAX, got {source!r}")
    low, high = int(found[1] or 2), int(found[2] or 4)
    if not 1 <= low <= high:
        raise ValueError(f"the n-gram range must satisfy 1 <= min <= max, got {low} .. {high}")
    return low, high


def _tokenizer(setup: Setup, source: Path) -> Any:
    return load_tokenizer(source, trust_remote_code=setup.trust_remote_code)


def _resolve(setup: Setup, name: str, tell: Progress) -> Path:
    return resolve(name, offline=setup.offline, progress=tell, cache_dir=setup.cache_dir)


def _load(setup: Setup, source: Path, precision: str, tell: Progress) -> Any:
    tell(f"load {source.name} ({precision})", None)
    return load_module(source, precision=precision, device=setup.device, trust_remote_code=setup.trust_remote_code)
