"""From a configuration to what is measured: the setup, its questions as requests, and the methods side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import LlamaConfig

from adaspec.assemble import Assembly, Setup, assemble, parse_drafters
from adaspec.bench import peers
from adaspec.bench.config import build, several
from adaspec.bench.methods import Adaptive, Method, Stateless, fixed, sweep
from adaspec.bench.tiny import SIZES, save_model
from adaspec.bench.workload import Question, choose
from adaspec.decoding.generate import Request
from adaspec.decoding.sampling import SamplingParams
from adaspec.decoding.store import resolve
from adaspec.plan import Plan

OURS = ("plain", "best_fixed", "policy")
THEIRS = ("hf", "hf_lookup", "hf_assisted", "hf_assisted_heuristic")
MEASURES = ("texts", "core", "chains")
RANDOM = "random:"  # source of tiny random weights, then their seed
Tell = Callable[[str], None]


def setup(config: DictConfig, out: Path) -> Setup:
    """What to load and what to choose from; random models are made in ``out``.

    Raises:
        ValueError: a value that is out of range, or a source that is written wrongly.
    """
    models, plans, runner = config.models, config.plans, config.runner
    return Setup(
        target=_source(models.target, out),
        drafters=parse_drafters(_drafter(text, out) for text in models.drafters),
        windows=tuple(plans.windows),
        inner_windows=tuple(plans.inner_windows),
        stops=tuple(plans.stops),
        max_depth=plans.max_depth,
        precision=runner.precision,
        device=runner.device,
        runner=runner.runner,
        threads=runner.threads,
        cache_length=runner.cache_length,
        corpus=models.corpus and Path(models.corpus),
        seed=config.seed,
        offline=models.offline,
        trust_remote_code=models.trust_remote_code,
    )


def _drafter(text: str, out: Path) -> str:
    name, sign, source = text.rpartition("=")
    return f"{name}{sign}{_source(source, out)}"


def _source(source: str, out: Path) -> str:
    if not source.startswith(RANDOM):
        return source
    seed = source.removeprefix(RANDOM)
    if not seed.isdigit():
        raise ValueError(f"random weights are written random:SEED, got {source!r}")
    folder = out / "models" / f"random-{seed}"
    if not folder.is_dir():
        save_model(folder, config=LlamaConfig(**SIZES | {"max_position_embeddings": 4096}), seed=int(seed))
    return str(folder)


@dataclass(frozen=True, slots=True)
class Asking:
    """How questions become requests: template, length, sampling."""

    assembly: Assembly
    raw: bool
    max_new_tokens: int
    sampling: SamplingParams

    def request(
        self, prompt: str, before: Sequence[tuple[str, str]] = (), *, tokens: int | None = None, seed: int = 0
    ) -> Request:
        """One turn; ``before``: earlier turns with their answers. ``seed`` is added to that of the sampling."""
        own = self.sampling
        drawn = SamplingParams(own.temperature, own.top_k, own.top_p, own.min_p, seed=own.seed + seed)
        length = min(tokens or self.max_new_tokens, self.max_new_tokens)
        return self.assembly.request(prompt, raw=self.raw, max_new_tokens=length, sampling=drawn, before=before)

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as the next turn quotes it."""
        found: str = self.assembly.tokenizer.decode(tokens, skip_special_tokens=True)
        return found


def asking(config: DictConfig, assembly: Assembly) -> Asking:
    """As the configuration says.

    Raises:
        ValueError: sampling parameters that are out of range, or fewer than 1 token.
    """
    own, workload = config.sampling, config.workload
    if workload.max_new_tokens < 1:
        raise ValueError(f"workload.max_new_tokens is at least 1, got {workload.max_new_tokens}")
    sampling = SamplingParams(own.temperature, own.top_k, own.top_p, own.min_p, seed=config.seed)
    return Asking(assembly, workload.raw, workload.max_new_tokens, sampling)


def questions(config: DictConfig) -> list[Question]:
    """All that the workload reads.

    Raises:
        ValueError: a path that is not given, a broken line, an unknown kind, or none left.
        OSError: a file that cannot be read.
    """
    own = config.workload
    if OmegaConf.is_missing(own.read, "path"):
        raise ValueError(f"workload={own.name} needs a file: workload.read.path=FILE")
    found: list[Question] = build(own.read)
    choose(found, own.kinds, own.per_kind, own.limit)  # before anything is loaded
    return found


def fitting(config: DictConfig, ask: Asking, read: Sequence[Question]) -> list[Question]:
    """Of what was ``read``, the questions asked for, chosen among those that are short enough.

    Raises:
        ValueError: no question is.
    """
    own = config.workload
    fit = [question for question in read if _fits(question, ask, own.max_prompt_tokens)]
    if not fit:
        raise ValueError("every question is longer than workload.max_prompt_tokens or the cache")
    return choose(fit, own.kinds, own.per_kind, own.limit)


def _fits(question: Question, ask: Asking, longest: int) -> bool:
    """Whether all turns are within ``longest`` tokens of prompt, were every answer as long as it may be."""
    spoken = sum(len(ask.request(turn).prompt) for turn in question.turns)
    whole = spoken + (len(question.turns) - 1) * ask.max_new_tokens
    return whole <= min(longest, ask.assembly.generator.chain.capacity - ask.max_new_tokens - 1)


def lineup(config: DictConfig, assembly: Assembly, own: Setup, best: Plan | None) -> list[Method]:
    """The methods, in the order of the configuration; ``best``: the sweep's winner.

    Raises:
        ValueError: a method that is not known or cannot be, a policy that only a simulation plays, or two of one name.
    """
    methods: list[Method] = []
    theirs = _theirs(config, assembly, own)
    for name in config.methods:
        if name == "policy":
            given = several(config, "policy", config.policies)
            methods += [Adaptive(assembly, one, cold=config.cold) for one in given]
        elif name == "best_fixed":
            assert best is not None
            methods.append(fixed(assembly, best, name))
        elif name in theirs:
            methods.append(theirs[name])
        else:
            methods.append(fixed(assembly, _plan(name, assembly), name))
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"two methods have one name: {', '.join(names)}")
    return methods


def check_methods(config: DictConfig) -> None:
    """Refuses, before anything is loaded, what could not be measured.

    Raises:
        ValueError: no method, or counts that make no sense.
    """
    if config.measure not in MEASURES:
        raise ValueError(f"measure is one of {', '.join(MEASURES)}, got {config.measure!r}")
    if not config.methods:
        raise ValueError("methods is empty: there is nothing to measure")
    if config.repeats < 1 or config.warmups < 0:
        raise ValueError(f"repeats is at least 1 and warmups at least 0, got {config.repeats} and {config.warmups}")
    if config.record.mode not in ("offline", "online"):
        raise ValueError(f"record.mode is offline or online, got {config.record.mode!r}")
    for name in config.methods:
        if name not in (*OURS, *THEIRS) and not _is_chain(name):
            known = ", ".join((*OURS, *THEIRS))
            raise ValueError(f"the method {name!r} is not known; known are {known}, plans like a/b:4")


def _is_chain(name: str) -> bool:
    try:
        return Plan.parse(name).depth > 1
    except ValueError:
        return False


def best_plan(
    config: DictConfig, ask: Asking, asked: Sequence[Question], tell: Tell, plans: Sequence[Plan] = ()
) -> dict[Plan, float]:
    """The sweep over ``plans`` (none given: all), on first turns spread over the workload; see ``methods.sweep``."""
    count = min(max(config.plans.sweep_prompts, 1), len(asked))
    spread = [asked[index * len(asked) // count] for index in range(count)]
    requests = [ask.request(question.turns[0], tokens=config.plans.sweep_tokens) for question in spread]
    return sweep(ask.assembly, plans or list(ask.assembly.space), requests, tell)


def _plan(name: str, assembly: Assembly) -> Plan:
    plan = assembly.space.plain if name == "plain" else Plan.parse(name)
    if plan not in assembly.space:
        raise ValueError(f"the method {name} is no plan of this run; its windows are set by plans.windows")
    return plan


def _theirs(config: DictConfig, assembly: Assembly, own: Setup) -> dict[str, Stateless]:
    wanted = [name for name in config.methods if name in THEIRS]
    if not wanted:
        return {}
    model, window = _peer(config, own.target, own), config.runner.hf_window
    options: dict[str, dict[str, Any]] = {"hf": {}, "hf_lookup": {"prompt_lookup_num_tokens": window}}
    if any("assisted" in name for name in wanted):
        smaller = own.smaller_models
        if not smaller:
            raise ValueError("hf_assisted needs a smaller model among models.drafters, and there is none")
        assistant = _peer(config, smaller[0], own)
        options["hf_assisted"] = {"assistant_model": assistant, "schedule": peers.constant(window)}
        options["hf_assisted_heuristic"] = {"assistant_model": assistant, "schedule": peers.HEURISTIC}
    stops = assembly.generator.stop_ids
    return {name: peers.generating(name, model, stops, **options[name]) for name in wanted}


def _peer(config: DictConfig, source: str, own: Setup) -> Any:
    return peers.load(resolve(source, offline=own.offline), config.runner.hf_dtype, own.device)


def assembled(config: DictConfig, own: Setup, tell: Tell) -> Assembly:
    """Everything loaded and timed; see ``assemble``."""
    return assemble(own, lambda what, share: tell(what))
