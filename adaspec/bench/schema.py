"""What the configuration of ``adaspec bench`` and ``adaspec simulate`` may hold; Hydra checks keys and types by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class PolicyConfig:
    """A policy and how a controller runs it; ``rule`` names its class and arguments. See ``tournament.Entrant``."""

    name: str = MISSING
    hold: int = 4
    collapse: float = 0.8
    learns: bool = True
    follow: bool = False
    rule: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScenarioConfig:
    """A scenario; ``make`` names a function of ``adaspec.bench.scenarios`` and its arguments but the seed."""

    name: str = MISSING
    make: dict[str, Any] = field(default_factory=dict)


@dataclass
class SimulateConfig:
    """What ``adaspec simulate`` can be told; ``conf/simulate.yaml`` explains the keys."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    scenario: ScenarioConfig = field(default_factory=ScenarioConfig)
    policies: list[str] = field(default_factory=list)
    scenarios: list[str] = field(default_factory=list)
    rounds: int = 1000
    seeds: int = 20
    first_seed: int = 0
    workers: int | None = None
    plots: bool = True


@dataclass
class ModelsConfig:
    """Target and drafters, each written as for ``adaspec generate``, or ``random:SEED`` for tiny random weights.

    ``draft``: a name that ``drafters`` may refer to. ``offline``: use only what is on this machine.
    """

    name: str = MISSING
    target: str = MISSING
    draft: str | None = None
    drafters: list[str] = field(default_factory=lambda: ["lookup"])
    corpus: str | None = None
    offline: bool = False
    trust_remote_code: bool = False


@dataclass
class PlansConfig:
    """Which plans may be chosen. ``sweep_prompts``, ``sweep_tokens``: what the sweep for the best fixed plan plays."""

    name: str = MISSING
    windows: list[int] = field(default_factory=lambda: [2, 4, 8])
    inner_windows: list[int] = field(default_factory=lambda: [2, 4])
    stops: list[float] = field(default_factory=lambda: [0.0])
    max_depth: int = 3
    sweep_prompts: int = 4
    sweep_tokens: int = 32


@dataclass
class SamplingConfig:
    """How tokens are drawn; see ``SamplingParams``."""

    name: str = MISSING
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class WorkloadConfig:
    """Which prompts; ``read`` names a function of ``adaspec.bench.workload`` and its arguments.

    ``kinds``: only these; ``per_kind``, ``limit``: the first so many of every kind, and of all. ``raw``: without the
    chat template. ``max_prompt_tokens``: longer ones are not asked. ``tagged``: the controller is told the kind.
    """

    name: str = MISSING
    read: dict[str, Any] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    per_kind: int | None = None
    limit: int | None = None
    raw: bool = False
    max_new_tokens: int = 128
    max_prompt_tokens: int = 2048
    tagged: bool = False


@dataclass
class RunnerConfig:
    """What computes, and where. ``hf_dtype``, ``hf_window``: of the weights and drafts of `transformers`' methods."""

    name: str = MISSING
    runner: str = "auto"
    device: str = "cpu"
    precision: str = "fp16"
    threads: int | None = None
    cache_length: int = 4096
    hf_dtype: str = "float32"
    hf_window: int = 5


@dataclass
class RecordConfig:
    """Where records go besides the run's folder. ``mode``: offline or online. ``group``: by default the multirun."""

    name: str = MISSING
    wandb: bool = False
    mode: str = "offline"
    project: str = "adaspec"
    entity: str | None = None
    group: str | None = None
    job_type: str = "bench"


@dataclass
class CoreConfig:
    """For ``measure=core``: the window of the pair and the lookup, the precisions whose passes are timed, and the types
    of the weights of `transformers`, of which the fastest counts.
    """

    window: int = 4
    precisions: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)


@dataclass
class BenchConfig:
    """What ``adaspec bench`` can be told; ``conf/config.yaml`` explains the keys."""

    models: ModelsConfig = field(default_factory=ModelsConfig)
    plans: PlansConfig = field(default_factory=PlansConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    core: CoreConfig = field(default_factory=CoreConfig)
    measure: str = "texts"
    methods: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    repeats: int = 3
    warmups: int = 3
    cold: bool = False
    seed: int = 0


def register() -> None:
    """Makes the schemas known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="bench_schema", node=BenchConfig)
    store.store(name="simulate_schema", node=SimulateConfig)
