"""From names to a generator: loads target and drafters, spans the plans, times the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.decoding.chain import Chain
from adaspec.decoding.clock import CudaClock, WallClock
from adaspec.decoding.device import check_device, use_fastest, use_threads
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.feature import FeatureReader
from adaspec.decoding.generate import Generator, Request
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.model import Model, PlainModel, sequence_limit, stop_token_ids
from adaspec.decoding.sampling import SamplingParams
from adaspec.faults import words
from adaspec.members import Loader, Member
from adaspec.outcome import Pass
from adaspec.plan import PlanSpace
from adaspec.policy import Fixed
from adaspec.priors import COPY_ACCEPTANCE, LOOKUP_ACCEPTANCE, one_rate
from adaspec.setup import DEFAULT_TARGET, TARGET, DrafterSpec, Setup, parse_drafters, span

__all__ = ["DEFAULT_TARGET", "TARGET", "Assembly", "DrafterSpec", "Setup", "assemble", "parse_drafters", "span"]

Progress = Callable[[str, float | None], None]
EFFORT = 0.005  # of the controller, see there


@dataclass(frozen=True, slots=True)
class Assembly:
    """A generator with what belongs to it. ``profile``: the timed passes; ``profile_seconds``: what that took.

    ``known``: acceptance of drafters that is known beforehand, by name.
    """

    generator: Generator
    controller: Controller
    space: PlanSpace
    tokenizer: Any = field(repr=False)
    profile: tuple[Pass, ...] = ()
    profile_seconds: float = 0.0
    one_pass: tuple[str, ...] = ()
    acceptance: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def runners(self) -> dict[str, str]:
        """What computes the passes of each model, by its name in plans, and why not something faster."""
        members = self.generator.chain.members.items()
        return {name: member.runner for name, member in members if isinstance(member, Model | PlainModel)}

    def fresh_controller(self, seed: int) -> Controller:
        """A controller over the same space that knows what was known at the start and nothing else."""
        costs = CostModel(self.space, None, self.one_pass, self.acceptance)
        controller = Controller(
            self.space, None, costs, seed=seed % 2**63, identity=self.controller.identity, effort=EFFORT
        )
        controller.profile(self.profile)
        return controller

    def request(
        self,
        prompt: str,
        *,
        raw: bool,
        max_new_tokens: int,
        sampling: SamplingParams,
        stop: tuple[str, ...] = (),
        before: Sequence[tuple[str, str]] = (),
    ) -> Request:
        """Tokenises a prompt, inside the model's chat template when it has one and ``raw`` is off.

        ``before``: earlier turns of the talk, each with its answer; without a template a turn is a paragraph.

        Raises:
            ValueError: the template fails.
        """
        if not raw and getattr(self.tokenizer, "chat_template", None):
            said = [text for turn in before for text in turn]
            talk = [
                {"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), [*said, prompt])
            ]
            try:
                text = self.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # a template is a program, and may raise what it likes
                raise ValueError(f"the model's chat template fails, do without it (raw): {words(error)}") from error
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer("".join(f"{asked}{answer}\n\n" for asked, answer in before) + prompt)["input_ids"]
        return Request(tuple(ids), max_new_tokens, sampling, stop)


def assemble(setup: Setup, tell: Progress) -> Assembly:
    """Loads everything, checks that it fits together and measures the passes once.

    Raises:
        ValueError: a name, file, plan or pair of models that does not work, each in one line.
        OSError: a source that cannot be read.
    """
    space = span(setup)
    check_device(setup.device)
    loader = Loader(setup, tell)
    source = loader.resolve(setup.target)
    used = setup.closure(space.models)
    sources = {spec: loader.resolve(spec.model_source) if spec.model_source else source for spec in used}
    target = loader.plain_model(TARGET, source) if setup.plain else loader.model(TARGET, source)
    tokenizer = loader.tokenizer(source)
    members = loader.members(sources, target, tokenizer)
    capacity, reason = _capacity(setup, target, members)
    for plan in space:
        if max(plan.windows, default=0) >= capacity:
            raise ValueError(f"plan {plan} has a window of {max(plan.windows)}, the cache holds {capacity} ({reason})")
    clock = CudaClock() if setup.device.startswith("cuda") else WallClock()
    chain = Chain(target, members, capacity=capacity, capacity_reason=reason, clock=clock)
    chain.prepare(space)
    policy = Fixed(setup.plan) if setup.plan is not None else None
    one_pass = tuple(name for name, member in members.items() if isinstance(member, Drafter) and member.one_pass)
    acceptance = _acceptance(space, used, members)
    costs = CostModel(space, None, one_pass, acceptance)
    controller = Controller(space, policy, costs, seed=setup.seed % 2**63, identity=setup.identity, effort=EFFORT)
    generator = Generator(chain, controller, tokenizer, stop_token_ids(target.module, tokenizer))
    tell("time the passes", None)
    began = clock.now()
    chain.prepare_passes(space.shapes())
    if setup.threads is not None:
        use_threads(setup.threads)
    elif setup.device == "cpu" and target.rollback_obstacle is None:
        use_fastest(lambda: chain.profile({TARGET: [1]})[0].seconds)
    profile = tuple(chain.profile(space.shapes()))
    controller.profile(profile)
    return Assembly(generator, controller, space, tokenizer, profile, clock.now() - began, one_pass, acceptance)


def _acceptance(
    space: PlanSpace, specs: Iterable[DrafterSpec], members: Mapping[str, Member]
) -> dict[tuple[str, str], float]:
    """What is known of the acceptance of (verifier, drafter) pairs before they are used."""
    known = {}
    for spec in specs:
        member = members[spec.name]
        if spec.kind == "precision":
            known[spec.name] = COPY_ACCEPTANCE[spec.source]
        elif spec.kind == "lookup":
            known[spec.name] = LOOKUP_ACCEPTANCE
        elif isinstance(member, FeatureReader) and member.acceptance:
            known[spec.name] = one_rate(member.acceptance)
    edges = {(verifier, drafter): drafter.partition("?")[0] for plan in space for verifier, drafter, _ in plan.edges()}
    return {edge: known[name] for edge, name in edges.items() if name in known}


def _capacity(setup: Setup, target: LanguageModel, members: Mapping[str, Member]) -> tuple[int, str]:
    """Tokens that every model can hold, and what limits them."""
    limits = [(setup.cache_length, "cache_length")]
    for model in (target, *members.values()):
        if isinstance(model, Model | PlainModel):
            limit = sequence_limit(model.module.config.get_text_config(), rollback=isinstance(model, Model))
            limits += [(limit[0], f"{model.name}: {limit[1]}")] if limit else []
    return min(limits, key=lambda limit: limit[0])
