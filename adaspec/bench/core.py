"""The decoding core against the machine and against Hugging Face, interleaved in one process.

adaspec bench experiment=core
adaspec bench experiment=core sampling=t0.7
adaspec bench experiment=core_qwen_coder workload.read.path=humaneval.jsonl models.target=T.gguf models.draft=D.gguf

Prints what it measures while it goes and returns one JSON-able object: what a pass over k tokens costs against a
pass over one, per precision (``pass_ratio``), the share of a plain step outside the matrix products, the share of the
machine's memory bandwidth that plain decoding reaches, and our tokens/s over those of ``transformers``' ``generate``,
of its assisted generation with the same pair and window, and of its prompt lookup, each time the fastest of its
settings here. ``vs_plain``: our fixed plans over our own plain decoding, by kind of prompt (medians of the ratios), as
the sampling asked for has it; ``texts_equal``: whether they wrote the same, None when sampled. ``round_anatomy``:
where the rounds of our first fixed plan spend their time, in milliseconds; ``adaptive_anatomy``: those of the
controller, from nothing and with the same texts again. Of the latter the shares: ``controller_share`` (choose and
observe), ``bookkeeping_share`` (what it is told: contexts, outcomes, how idle drafters would have fared),
``host_share`` (all else between passes).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from adaspec.assemble import TARGET, Assembly, Setup, assemble
from adaspec.bench.journal import machine
from adaspec.bench.lineup import asking, fitting, questions, setup
from adaspec.bench.methods import Answer, Stateless, fixed
from adaspec.bench.peers import constant, generating, load
from adaspec.bench.timing import (
    BOOKKEEPING,
    PROMPTS,
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
from adaspec.decoding.generate import Request
from adaspec.decoding.load import load_model
from adaspec.decoding.model import Model
from adaspec.decoding.native.model import NativeModel
from adaspec.decoding.store import resolve
from adaspec.plan import Plan

PASSES = 31
STREAM_BYTES = 1 << 29
PEERS = (  # ours over the fastest of theirs
    ("vs_hf_generate", "plain", "hf generate"),
    ("vs_hf_assisted", "pair", "hf assisted"),
    ("vs_hf_lookup", "lookup", "hf lookup"),
)


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
    result |= _plain_step(target)
    ask = asking(config, assembly)
    requests = [(question.kind, ask.request(question.turns[0])) for question in fitting(config, ask, questions(config))]
    return result | _texts(assembly, own, source, requests, config.core)


def _show(result: Mapping[str, Any]) -> None:
    for name, ratios in result["pass_ratios"].items():
        shown = "  ".join(f"x{k} {ratio:.2f}" for k, ratio in ratios.items())
        print(f"{name:8} T(1) {result['pass_ms'][name]:6.1f} ms   {shown}", flush=True)


def _passes(models: Mapping[str, Model]) -> dict[str, Any]:
    """Median seconds of passes; precisions and lengths take turns, so that a noisy neighbour disturbs all alike."""
    runs = {f"{name} {k}": step(model, k) for name, model in models.items() for k in QUERY_LENS}
    median = medians(runs, PASSES)
    ratios = {name: {str(k): median[f"{name} {k}"] / median[f"{name} 1"] for k in QUERY_LENS[1:]} for name in models}
    first = next(iter(models))
    milliseconds = {name: 1e3 * median[f"{name} 1"] for name in models}
    return {"pass_ratio": ratios[first], "pass_ratios": ratios, "pass_ms": milliseconds}


def _plain_step(target: Model) -> dict[str, Any]:
    """Where a plain step's time goes, and how much of the machine's bandwidth it uses; native runner only."""
    if not isinstance(target, NativeModel):
        return {"outside_matrix_share": None, "bandwidth_share": None}
    products = partial(target.decoder.products, 1)
    median = medians({"step": step(target, 1), "products": products, "stream": stream_sum("cpu", STREAM_BYTES)}, PASSES)
    attainable, reached = STREAM_BYTES / median["stream"], target.decoder.weight_bytes / median["step"]
    print(f"plain step {1e3 * median['step']:.1f} ms, of which products {1e3 * median['products']:.1f} ms", flush=True)
    print(f"bandwidth {reached / 1e9:.1f} GB/s of {attainable / 1e9:.1f} GB/s", flush=True)
    return {
        "outside_matrix_share": 1.0 - median["products"] / median["step"],
        "bandwidth_share": reached / attainable,
        "gigabytes_per_second": {"stream": attainable / 1e9, "plain": reached / 1e9},
    }


def _texts(
    assembly: Assembly, own: Setup, source: Path, requests: Sequence[tuple[str, Request]], config: DictConfig
) -> dict[str, Any]:
    """Tokens/s of every method, medians over the prompts, and the ratios of ours to theirs."""
    ours = _ours(assembly, config.window)
    methods = [*ours, *_theirs(own, source, config)]
    found: dict[str, list[Answer]] = defaultdict(list)
    for method in methods:
        method.answer(Request(requests[0][1].prompt, 4))  # a warm-up
    for number, (kind, request) in enumerate(requests, 1):
        for method in methods:
            found[method.name].append(method.answer(request))
        shown = "  ".join(f"{name} {_rate(answers[-1]):.1f}" for name, answers in found.items())
        print(f"{number:3d} {kind:<10} {shown}", flush=True)
    median = {name: statistics.median(map(_rate, answers)) for name, answers in found.items()}
    ratios = {key: _over(median, mine, theirs) for key, mine, theirs in PEERS}
    names = [method.name for method in ours[1:]]
    greedy = requests[0][1].sampling.temperature == 0.0
    texts = [[answer.tokens for answer in found[method.name]] for method in ours]
    pinned = _fixed(assembly, names, config.window)
    adaptive = {
        told: _anatomy(assembly, assembly.controller, requests, f"the controller, {told}")
        for told in ("from nothing", "the same texts again")
    }
    settled = adaptive["the same texts again"]
    whole = sum(settled.values())
    return {
        "tokens_per_second": median,
        **ratios,
        "vs_plain": _vs_plain(found, [kind for kind, _ in requests], names),
        "texts_equal": all(each == texts[0] for each in texts) if greedy else None,
        "round_anatomy": pinned and _anatomy(assembly, pinned, requests, f"{pinned.plan}"),
        "adaptive_anatomy": adaptive,
        "controller_share": settled["controller"] / whole,
        "bookkeeping_share": settled["bookkeeping"] / whole,
        "host_share": settled["host"] / whole,
    }


def _rate(answer: Answer) -> float:
    return len(answer.tokens) / answer.seconds


def _over(median: Mapping[str, float], ours: str, theirs: str) -> float | None:
    """Our tokens/s over those of the fastest of their settings whose name begins so."""
    peers = [rate for name, rate in median.items() if name.startswith(theirs)]
    return median[ours] / max(peers) if ours in median and peers else None


def _vs_plain(
    found: Mapping[str, Sequence[Answer]], kinds: Sequence[str], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Of each of our methods the median speed-up over plain decoding, by kind of prompt."""
    ratios: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    for name in names:
        for kind, plain, answer in zip(kinds, found["plain"], found[name], strict=True):
            ratios[name][kind].append(_rate(answer) / _rate(plain))
    return {name: {kind: statistics.median(each) for kind, each in of.items()} for name, of in ratios.items()}


def _anatomy(assembly: Assembly, chooser: Any, requests: Sequence[tuple[str, Request]], told: str) -> dict[str, float]:
    """Milliseconds per round, part by part, and printed as a table: what drafts, verifies, decides, the rest."""
    timed, outcomes, began = Timed(chooser), [], time.perf_counter()
    with inside(SAMPLING) as sampling, inside(BOOKKEEPING) as books, inside(PROMPTS) as prompts:
        for _, request in requests:
            outcomes += [outcome for _, outcome in assembly.generator.generate([request], controller=timed).steps]
    whole = time.perf_counter() - began - prompts.seconds
    parts = anatomy(
        outcomes,
        TARGET,
        whole,
        sampling=sampling.seconds,
        bookkeeping=books.seconds,
        controller=timed.seconds,
    )
    total = sum(parts.values())
    print(f"{told}: a round takes {total:.2f} ms", flush=True)
    for name, spent in parts.items():
        print(f"  {name:<12} {spent:8.3f} ms {spent / total:6.1%}", flush=True)
    return parts


def _fixed(assembly: Assembly, names: Sequence[str], window: int) -> Pinned | None:
    """Always the pair, or else the lookup."""
    models = _models(assembly)
    return Pinned(Plan((TARGET, models[0] if models else "lookup"), (window,))) if names else None


def _models(assembly: Assembly) -> list[str]:
    members = assembly.generator.chain.members
    return [name for name, member in members.items() if isinstance(member, Model) and name != TARGET]


def _ours(assembly: Assembly, window: int) -> list[Stateless]:
    methods = [fixed(assembly, assembly.space.plain, "plain")]
    members = assembly.generator.chain.members
    for name, key in (*((each, "pair") for each in _models(assembly)[:1]), ("lookup", "lookup")):
        if name in members:
            methods.append(fixed(assembly, Plan((TARGET, name), (window,)), key))
    return methods


def _theirs(own: Setup, source: Path, config: DictConfig) -> list[Stateless]:
    """`transformers` on the same weights, per type of weights: eager, static cache, assisted, prompt lookup."""
    models = [resolve(smaller, offline=True) for smaller in own.smaller_models]
    methods = []
    for dtype in config.dtypes:
        model = load(source, dtype)
        methods += [
            generating(f"hf generate {dtype}", model),
            generating(f"hf generate static {dtype}", model, cache_implementation="static", disable_compile=True),
            generating(f"hf lookup {dtype}", model, prompt_lookup_num_tokens=config.window),
        ]
        for folder in models[:1]:
            assistant, name = load(folder, dtype), f"hf assisted {dtype}"
            methods.append(generating(name, model, assistant_model=assistant, schedule=constant(config.window)))
    gc.collect()
    return methods
