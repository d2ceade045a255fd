"""The decoding core against the machine and against Hugging Face, interleaved in one process.

adaspec bench experiment=core
adaspec bench experiment=core models=qwen_coder models.target=T.gguf models.draft=D.gguf workload.raw=true

Prints what it measures while it goes and returns one JSON-able object: what a pass over k tokens costs against a
pass over one, per precision (``pass_ratio``), the share of a plain step outside the matrix products, the share of the
machine's memory bandwidth that plain decoding reaches, and our tokens/s over those of ``transformers``' ``generate``
(the fastest of its settings here), of its assisted generation with the same pair and window, and of its prompt lookup.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from adaspec.assemble import TARGET, Assembly, Setup, assemble
from adaspec.bench.journal import machine
from adaspec.bench.lineup import asking, questions, setup
from adaspec.bench.methods import Stateless, fixed
from adaspec.bench.peers import constant, generating, load
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.generate import Request
from adaspec.decoding.load import load_model
from adaspec.decoding.model import Model
from adaspec.decoding.native.model import NativeModel
from adaspec.decoding.store import resolve
from adaspec.plan import Plan

QUERY_LENS = (1, 2, 3, 5, 9)
CONTEXT = 128  # cached tokens while passes are timed
PASSES = 15
STREAM_BYTES = 1 << 29


def core(config: DictConfig, out: Path) -> dict[str, Any]:
    """Measures passes, then whole texts.

    Raises:
        ValueError: models or options that do not fit together.
    """
    own = setup(config, out)
    assembly = assemble(own, lambda what, share: None)
    source = resolve(own.target, offline=own.offline)
    target = assembly.generator.chain.target
    assert isinstance(target, Model)
    result: dict[str, Any] = {"machine": machine(own.device), "runner": target.runner}
    precisions = {name: load_model(TARGET, source, precision=name) for name in config.core.precisions}
    result |= _passes(precisions or {"": target})
    _show(result)
    result |= _anatomy(target)
    ask = asking(config, assembly)
    requests = [(question.kind, ask.request(question.turns[0])) for question in questions(config)]
    return result | _texts(assembly, own, source, requests, config.core.window)


def _show(result: Mapping[str, Any]) -> None:
    for name, ratios in result["pass_ratios"].items():
        shown = "  ".join(f"x{k} {ratio:.2f}" for k, ratio in ratios.items())
        print(f"{name:8} T(1) {result['pass_ms'][name]:6.1f} ms   {shown}", flush=True)


def _step(model: Model, query_len: int) -> Callable[[], object]:
    """A pass over ``query_len`` tokens behind ``CONTEXT`` cached ones, to be repeated."""
    buffer = TokenBuffer(1, CONTEXT + query_len)
    buffer.append(torch.arange(CONTEXT + query_len)[None] % 1000, torch.tensor([CONTEXT + query_len]))
    start, active = torch.tensor([CONTEXT]), torch.ones(1, dtype=torch.bool)

    def step() -> None:
        model.rollback(start)
        model.logits(buffer, start, query_len, active)

    model.start(1, CONTEXT + max(QUERY_LENS))
    model.catch_up(buffer, start)
    return step


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _passes(models: Mapping[str, Model]) -> dict[str, Any]:
    """Median seconds of passes; the precisions take turns, so that a noisy neighbour disturbs all alike."""
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    for query_len in QUERY_LENS:
        steps = {name: _step(model, query_len) for name, model in models.items()}
        for _ in range(PASSES):
            for name, step in steps.items():
                spent[name, query_len].append(_seconds(step))
    median = {key: statistics.median(times) for key, times in spent.items()}
    ratios = {name: {str(k): median[name, k] / median[name, 1] for k in QUERY_LENS[1:]} for name in models}
    first = next(iter(models))
    milliseconds = {name: 1e3 * median[name, 1] for name in models}
    return {"pass_ratio": ratios[first], "pass_ratios": ratios, "pass_ms": milliseconds}


def _anatomy(target: Model) -> dict[str, Any]:
    """Where a plain step's time goes, and how much of the machine's bandwidth it uses; native runner only."""
    if not isinstance(target, NativeModel):
        return {"outside_matrix_share": None, "bandwidth_share": None}
    step, stream = _step(target, 1), torch.ones(STREAM_BYTES // 4)
    runs = {"step": step, "products": lambda: target.decoder.products(1), "stream": lambda: stream.sum()}
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(PASSES):
        for name, run in runs.items():
            times[name].append(_seconds(run))
    median = {name: statistics.median(each) for name, each in times.items()}
    attainable, reached = STREAM_BYTES / median["stream"], target.decoder.weight_bytes / median["step"]
    print(f"plain step {1e3 * median['step']:.1f} ms, of which products {1e3 * median['products']:.1f} ms", flush=True)
    print(f"bandwidth {reached / 1e9:.1f} GB/s of {attainable / 1e9:.1f} GB/s", flush=True)
    return {
        "outside_matrix_share": 1.0 - median["products"] / median["step"],
        "bandwidth_share": reached / attainable,
        "gigabytes_per_second": {"stream": attainable / 1e9, "plain": reached / 1e9},
    }


def _texts(
    assembly: Assembly, own: Setup, source: Path, requests: Sequence[tuple[str, Request]], window: int
) -> dict[str, Any]:
    """Tokens/s of every method, medians over the prompts, and the ratios of ours to theirs."""
    methods = [*_ours(assembly, window), *_theirs(own, source, window)]
    rates: dict[str, list[float]] = defaultdict(list)
    for method in methods:
        method.answer(Request(requests[0][1].prompt, 4))  # a warm-up
    for number, (kind, request) in enumerate(requests, 1):
        for method in methods:
            found = method.answer(request)
            rates[method.name].append(len(found.tokens) / found.seconds)
        shown = "  ".join(f"{name} {rate[-1]:.1f}" for name, rate in rates.items())
        print(f"{number:3d} {kind:<10} {shown}", flush=True)
    median = {name: statistics.median(each) for name, each in rates.items()}
    ratios: dict[str, float | None] = {
        "vs_hf_generate": median["plain"] / max(median[name] for name in ("hf float32", "hf static", "hf bf16"))
    }
    for ours, theirs, key in (("pair", "hf assisted", "vs_hf_assisted"), ("lookup", "hf lookup", "vs_hf_lookup")):
        ratios[key] = median[ours] / median[theirs] if ours in median and theirs in median else None
    return {"tokens_per_second": median, **ratios, "controller_share": _controller_share(assembly, requests[:3])}


def _ours(assembly: Assembly, window: int) -> list[Stateless]:
    methods = [fixed(assembly, assembly.space.plain, "plain")]
    members = assembly.generator.chain.members
    models = [name for name, member in members.items() if isinstance(member, Model) and name != TARGET]
    for name, key in (("lookup", "lookup"), *((each, "pair") for each in models[:1])):
        if name in members:
            methods.append(fixed(assembly, Plan((TARGET, name), (window,)), key))
    return methods


def _theirs(own: Setup, source: Path, window: int) -> list[Stateless]:
    """`transformers` on the same weights: eager and static cache in float32, bf16, assisted, prompt lookup."""
    eager = load(source)
    methods = [
        generating("hf float32", eager),
        generating("hf static", eager, cache_implementation="static", disable_compile=True),
        generating("hf bf16", load(source, "bfloat16")),
        generating("hf lookup", eager, prompt_lookup_num_tokens=window),
    ]
    models = [spec for spec in own.drafters if spec.kind == "model"]
    if models:
        assistant = load(resolve(models[0].source, offline=True))
        methods.append(generating("hf assisted", eager, assistant_model=assistant, schedule=constant(window)))
    gc.collect()
    return methods


def _controller_share(assembly: Assembly, requests: Sequence[tuple[str, Request]]) -> float:
    """The share of a generation's decoding that choose and observe take."""
    spent, total = 0.0, 0.0
    controller = assembly.controller

    class Timed:
        def choose(self, context: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            decision = controller.choose(context)
            spent += time.perf_counter() - began
            return decision

        def observe(self, decision: Any, outcome: Any) -> None:
            nonlocal spent
            began = time.perf_counter()
            controller.observe(decision, outcome)
            spent += time.perf_counter() - began

    for _, request in requests:
        total += assembly.generator.generate([request], controller=Timed()).decode_seconds
    return spent / (total + spent)
