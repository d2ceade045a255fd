"""What the device script measures, one function per section; each returns what goes into the JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import chisquare
from torch.nn import functional as F

from adaspec.bench.device_models import Family, Size, build
from adaspec.bench.timing import (
    BOOKKEEPING,
    CONTEXT,
    QUERY_LENS,
    SAMPLING,
    Timed,
    anatomy,
    inside,
    medians,
    step,
    stream_sum,
)
from adaspec.compare import Pinned
from adaspec.controller import Controller
from adaspec.decoding import gpu_attention
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.clock import CudaClock, WallClock
from adaspec.decoding.graphs import Capture, CudaCapture, GraphModel, Rehearsal
from adaspec.decoding.model import Model
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.outcome import RoundOutcome
from adaspec.plan import Context, Plan, PlanSpace

SPACE = PlanSpace(map(Plan.parse, ("target/draft:2", "target/draft:4", "target/draft:8", "target/middle/draft:8,4")))
PAIR, CHAIN = SPACE[2], SPACE[4]
FREE = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: cache slots, repeats, tokens per text, draws of the law test, rounds of the adaptation."""

    capacity: int = 1024
    repeats: int = 20
    tokens: int = 128
    draws: int = 4096
    rounds: int = 400
    stream: int = 1 << 30


SMALL = Scale(192, 3, 12, 1024, 24, 1 << 20)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how to measure. ``until``: the moment of ``time.perf_counter`` at which the section should be over."""

    device: torch.device
    scale: Scale
    capture: Capture
    until: float = float("inf")

    @classmethod
    def on(cls, device: str, scale: Scale) -> Bench:
        place = torch.device(device)
        return cls(place, scale, CudaCapture(place) if place.type == "cuda" else Rehearsal())

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def clock(self) -> WallClock:
        return CudaClock() if self.device.type == "cuda" else WallClock()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A family as chains: eager, and on graphs."""

    size: Size
    family: Family
    eager: Chain
    graphs: Chain


def load(bench: Bench, size: Size, batch_sizes: Sequence[int] = (1,)) -> Loaded:
    """Builds the models and prepares every pass that the plans can ask for."""
    family = build(size, bench.device, bench.dtype)
    modules = {"target": family.target, "middle": family.middle, "draft": family.draft}
    chains = []
    for models in (
        {name: Model(name, module) for name, module in modules.items()},
        {name: GraphModel(name, module, bench.capture) for name, module in modules.items()},
    ):
        target, *drafters = models.values()
        named = {each.name: each for each in drafters}
        chain = Chain(target, named, capacity=bench.scale.capacity, clock=bench.clock())
        chain.prepare(SPACE)
        chains.append(chain)
    shapes = {name: {*lengths, *QUERY_LENS} if name != "draft" else lengths for name, lengths in SPACE.shapes().items()}
    chains[1].prepare_passes(shapes, batch_sizes)
    return Loaded(size, family, *chains)


def texts(bench: Bench, chain: Chain, plan: Plan, params: SamplingParams, rows: int = 1, tokens: int = 0) -> Played:
    """Decodes made-up prompts of ``CONTEXT`` tokens with one plan, each row its own, to the same length."""
    return play(chain, Pinned(plan), params, rows, tokens or bench.scale.tokens)


@dataclass(frozen=True, slots=True)
class Played:
    """Texts, the rounds that made them, and seconds: of the whole loop, and of the chooser."""

    tokens: list[list[int]]
    outcomes: list[RoundOutcome]
    seconds: float
    chooser_seconds: float
    plans: list[Plan]

    @property
    def rate(self) -> float:
        """Tokens per second of rounds."""
        return sum(each.tokens for each in self.outcomes) / sum(each.seconds for each in self.outcomes)


def play(chain: Chain, chooser: Any, params: SamplingParams, rows: int, tokens: int) -> Played:
    """One batch, round by round, as ``chooser`` says."""
    draws = torch.randint(chain.target.vocab_size, (rows, CONTEXT), generator=torch.Generator().manual_seed(2)).tolist()
    each = tuple(SamplingParams(temperature=params.temperature, seed=params.seed + row) for row in range(rows))
    chain.start(Sequences(tuple(map(tuple, draws)), each, (tokens,) * rows, ((),) * rows))
    timed, found = Timed(chooser), [list[int]() for _ in range(rows)]
    outcomes, plans, began = [], [], time.perf_counter()
    while chain.running:
        decision = timed.choose(chain.context())
        result = chain.round(decision.plan)
        timed.observe(decision, result.outcome)
        outcomes.append(result.outcome)
        plans.append(decision.plan)
        for text, new in zip(found, result.tokens, strict=True):
            text += new
    return Played(found, outcomes, time.perf_counter() - began, timed.seconds, plans)


def passes(bench: Bench, loaded: Loaded) -> dict[str, Any]:
    """Eager against graph: milliseconds of a pass, the curve T(k)/T(1), and the share of the bandwidth floor."""
    found: dict[str, Any] = {}
    stream = medians({"stream": stream_sum(bench.device, bench.scale.stream)}, bench.scale.repeats)["stream"]
    found["gigabytes_per_second"] = bench.scale.stream / stream / 1e9
    models = {f"{name} {kind}": chain.members[name] for kind, chain in _kinds(loaded) for name in ("target", "middle")}
    models |= {f"draft {kind}": chain.members["draft"] for kind, chain in _kinds(loaded)}
    for query_len in QUERY_LENS:
        runs = {name: step(model, query_len) for name, model in models.items() if isinstance(model, Model)}
        if query_len > 2:
            runs = {name: run for name, run in runs.items() if not name.startswith("draft")}
        for name, spent in medians(runs, bench.scale.repeats, bench.until).items():
            found.setdefault("pass_ms", {}).setdefault(name, {})[str(query_len)] = 1e3 * spent
    ms: Mapping[str, Mapping[str, float]] = found["pass_ms"]
    found["pass_ratio"] = {name: {k: each / of["1"] for k, each in of.items()} for name, of in ms.items()}
    found["graph_speed_up"] = ms["target eager"]["1"] / ms["target graph"]["1"]
    floor = _weight_bytes(loaded.family.target) / bench.scale.stream * stream
    found["bandwidth_share"] = {kind: floor / (ms[f"target {kind}"]["1"] / 1e3) for kind in ("eager", "graph")}
    return found


def _kinds(loaded: Loaded) -> tuple[tuple[str, Chain], ...]:
    return ("eager", loaded.eager), ("graph", loaded.graphs)


def _weight_bytes(module: Any) -> int:
    """What a pass must read: every weight but the embedding, of which it reads a row."""
    read = sum(each.numel() * each.element_size() for each in module.parameters())
    return int(read - module.model.embed_tokens.weight.numel() * module.model.embed_tokens.weight.element_size())


def prepared(bench: Bench, loaded: Loaded) -> dict[str, Any]:
    """What was captured: graphs, seconds, bytes (cache included), and what was not and why."""
    reports = {name: model.report for name, model in loaded.graphs.members.items() if isinstance(model, GraphModel)}
    return {
        name: {
            "graphs": len(report.shapes),
            "seconds": report.seconds,
            "bytes": report.bytes,
            "failed": {str(shape): reason for shape, reason in report.failed.items()},
            "eager_passes": dict(report.eager),
        }
        for name, report in reports.items()
    } | {"middle_kernel": loaded.family.middle_kernel, "overlap": loaded.family.overlap}


def rounds(bench: Bench, loaded: Loaded) -> dict[str, Any]:
    """Tokens/s and the anatomy of a round, plan by plan, eager and on graphs, sampled from the free law."""
    found: dict[str, Any] = {}
    for kind, chain in _kinds(loaded):
        for plan in (SPACE.plain, PAIR, CHAIN):
            if found and time.perf_counter() > bench.until:
                break
            texts(bench, chain, plan, FREE, tokens=4)
            with inside(SAMPLING) as sampling, inside(BOOKKEEPING) as books:
                played = texts(bench, chain, plan, FREE)
            parts = anatomy(
                played.outcomes,
                "target",
                played.seconds,
                sampling=sampling.seconds,
                bookkeeping=books.seconds,
                controller=played.chooser_seconds,
            )
            length = sum(each.tokens for each in played.outcomes) / len(played.outcomes)
            found[f"{plan} {kind}"] = {"tokens_per_second": played.rate, "accepted_length": length, "round_ms": parts}
    return found


def equality(bench: Bench, loaded: Loaded) -> dict[str, Any]:
    """Greedy texts, eager against graph and plan against plan: equal tokens before the first difference.

    In bf16 another kernel may settle a near-tie the other way; in float32 they are equal.
    """
    reference = texts(bench, loaded.eager, SPACE.plain, GREEDY).tokens[0]
    found = {}
    for kind, chain in _kinds(loaded):
        for plan in (SPACE.plain, PAIR, CHAIN):
            own = texts(bench, chain, plan, GREEDY).tokens[0]
            same = next((at for at, pair in enumerate(zip(own, reference)) if pair[0] != pair[1]), len(reference))
            found[f"{plan} {kind}"] = same / len(reference)
    return {"equal_share": found, "all_equal": all(share == 1.0 for share in found.values())}


def law(bench: Bench) -> dict[str, Any]:
    """Two tokens sampled through speculation on graphs against the target's exact joint law: chi-square."""
    size = Size("law", 64, 128, 3, 4, 2, 8, 1)
    family, rows = build(size, bench.device, torch.float32, overlap=0.7), 256
    target = GraphModel("target", family.target, bench.capture)
    chain = Chain(target, {"draft": GraphModel("draft", family.draft, bench.capture)}, capacity=32)
    plan = Plan.parse("target/draft:2")
    space = PlanSpace([plan])
    chain.prepare(space)
    chain.prepare_passes(space.shapes(), (rows,))
    prompt, counts = (1, 5, 2), torch.zeros(size.vocab**2)
    for turn in range(bench.scale.draws // rows):
        params = tuple(SamplingParams(temperature=1.0, seed=turn * rows + row) for row in range(rows))
        chain.start(Sequences((prompt,) * rows, params, (4,) * rows, ((),) * rows))
        found: list[list[int]] = [[] for _ in range(rows)]
        while chain.running:
            for text, new in zip(found, chain.round(plan).tokens, strict=True):
                text += new
        for text in found:
            counts[text[0] * size.vocab + text[1]] += 1
    prompts = torch.tensor([[*prompt, token] for token in range(size.vocab)], device=bench.device)
    with torch.inference_mode():
        laws = family.target(prompts).logits.double().softmax(-1).cpu()  # [V, 4, V]
    joint = (laws[0, 2][:, None] * laws[:, 3]).flatten()
    kept = joint * counts.sum() >= 5
    expected = joint[kept] / joint[kept].sum() * counts[kept].sum()
    p_value = float(chisquare(counts[kept].double().numpy(), expected.numpy()).pvalue)
    eager = dict(target.report.eager)
    return {"draws": int(counts.sum()), "p_value": p_value, "holds": p_value > 1e-4, "eager_passes": eager}


def adaptation(bench: Bench, loaded: Loaded) -> dict[str, Any]:
    """A controller over five plans: what it plays in its last quarter, and what that is worth."""
    chain, scale = loaded.graphs, bench.scale
    fixed = {plan: texts(bench, chain, plan, FREE).rate for plan in SPACE}
    controller = Controller(SPACE, seed=0)
    controller.profile(chain.profile(SPACE.shapes()))
    played: list[Plan] = []
    spent = chooser = 0.0
    while len(played) < scale.rounds and time.perf_counter() < bench.until:
        own = play(chain, controller, SamplingParams(temperature=1.0, seed=len(played)), 1, scale.tokens)
        played += own.plans
        chooser += own.chooser_seconds
        spent += sum(each.seconds for each in own.outcomes)
    last = played[-(-3 * len(played) // 4) :] or played
    most = max(set(last), key=last.count)
    return {
        "fixed_tokens_per_second": {str(plan): rate for plan, rate in fixed.items()},
        "best_fixed": str(max(fixed, key=fixed.__getitem__)),
        "most_played_at_the_end": str(most),
        "worth_of_the_best": fixed[most] / max(fixed.values()),
        "rounds": len(played),
        "controller_share": chooser / (spent + chooser),
        "recommended": str(controller.choose(Context(1, CONTEXT)).plan),
    }


def attention(bench: Bench, size: Size) -> dict[str, Any]:
    """Microseconds of one layer's cached attention: grouped, with repeated heads, and as two plain products."""
    found: dict[str, Any] = {}
    width, group = size.hidden // size.heads, size.heads // size.shared_heads
    for slots in (512, bench.scale.capacity):
        for count in (1, 5):
            query = torch.randn(1, size.heads, count, width, device=bench.device, dtype=bench.dtype)
            key = torch.randn(1, size.shared_heads, slots, width, device=bench.device, dtype=bench.dtype)
            mask = torch.ones(1, 1, count, slots, dtype=torch.bool, device=bench.device)
            rows = query.reshape(size.shared_heads, group * count, width)
            runs: dict[str, Callable[[], object]] = {
                "grouped": lambda q=query, k=key, m=mask: gpu_attention.attention(q, k, k, m, 0.1),  # type: ignore[misc]
                "repeated": lambda q=query, k=key, m=mask: F.scaled_dot_product_attention(  # type: ignore[misc]
                    q, k.repeat_interleave(group, 1), k.repeat_interleave(group, 1), attn_mask=m
                ),
                "products": lambda r=rows, k=key[0]: torch.bmm(r, k.transpose(1, 2)).softmax(-1) @ k,  # type: ignore[misc]
            }
            spent = medians({name: _many(run) for name, run in runs.items()}, bench.scale.repeats, bench.until)
            found[f"{slots} slots, {count} queries"] = {name: 1e6 * each / 20 for name, each in spent.items()}
    return found


def _many(run: Callable[[], object]) -> Callable[[], object]:
    """Twenty calls, so that a device is kept busy."""

    def twenty() -> None:
        for _ in range(20):
            run()

    return twenty
