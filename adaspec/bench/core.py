"""The decoding core against the machine and against Hugging Face, interleaved in one process.

python -m adaspec.bench.core
python -m adaspec.bench.core --target T.gguf --drafter draft=D.gguf --drafter lookup --raw --limit 3 --threads 1

Prints what it measures while it goes and one JSON object as the last line: what a pass over k tokens costs against a
pass over one, per precision (``pass_ratio``), the share of a plain step outside the matrix products, the share of the
machine's memory bandwidth that plain decoding reaches, and our tokens/s over those of ``transformers``' ``generate``
(the fastest of its settings here), of its assisted generation with the same pair and window, and of its prompt lookup.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from adaspec.assemble import TARGET, Assembly, assemble
from adaspec.bench.common import add_prompts, command, read_prompts
from adaspec.compare import run_fixed
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.generate import Request
from adaspec.decoding.load import load_model
from adaspec.decoding.model import Model
from adaspec.decoding.native.model import NativeModel
from adaspec.decoding.sampling import GREEDY
from adaspec.decoding.store import resolve
from adaspec.options import add_models, read_setup
from adaspec.plan import Plan
from adaspec.setup import Setup

QUERY_LENS = (1, 2, 3, 5, 9)
PRECISIONS = ("fp16", "int8", "int4", "float32")
CONTEXT = 128  # cached tokens while passes are timed
PASSES = 15
STREAM_BYTES = 1 << 29


def main() -> int:
    """Measures passes, then whole texts."""
    arguments = _parser().parse_args()
    setup = read_setup(arguments)
    assembly = assemble(setup, lambda what, share: None)
    source = resolve(setup.target, offline=setup.offline, cache_dir=setup.cache_dir)
    result: dict[str, Any] = {"command": command("adaspec.bench.core"), "threads": torch.get_num_threads()}
    target = assembly.generator.chain.target
    assert isinstance(target, Model)
    result["runner"] = target.runner
    precisions = arguments.precisions.split(",") if arguments.precisions else []
    result |= _passes({name: load_model(TARGET, source, precision=name) for name in precisions} or {"": target})
    _show(result)
    result |= _anatomy(target)
    result |= _texts(assembly, setup, source, arguments)
    print(json.dumps(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    add_prompts(parser, max_new_tokens=64)
    parser.add_argument("--window", type=int, default=4, help="of the pair and the lookup (default: %(default)s)")
    parser.add_argument(
        "--precisions", default=",".join(PRECISIONS), help="whose passes are timed; empty: the target's (default: all)"
    )
    return parser


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


Method = Callable[[Request], tuple[int, float, tuple[int, ...]]]  # -> new tokens, seconds, their ids


def _texts(assembly: Assembly, setup: Setup, source: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of every method, medians over the prompts, and the ratios of ours to theirs."""
    methods = _ours(assembly, arguments.window) | _theirs(assembly, setup, source, arguments.window)
    rates: dict[str, list[float]] = defaultdict(list)
    for number, (kind, prompt) in enumerate(read_prompts(arguments), 1):
        request = assembly.request(prompt, raw=arguments.raw, max_new_tokens=arguments.max_new_tokens, sampling=GREEDY)
        if number == 1:
            for run in methods.values():  # a warm-up
                run(Request(request.prompt, 4))
        for name, run in methods.items():
            tokens, seconds, _ = run(request)
            rates[name].append(tokens / seconds)
        shown = "  ".join(f"{name} {rate[-1]:.1f}" for name, rate in rates.items())
        print(f"{number:3d} {kind:<10} {shown}", flush=True)
    median = {name: statistics.median(each) for name, each in rates.items()}
    peers = [
        rate
        for name, rate in median.items()
        if name.startswith("hf ") and "assisted" not in name and "lookup" not in name
    ]
    ratios = {"vs_hf_generate": median["plain"] / max(peers)}
    for ours, theirs, key in (("pair", "hf assisted", "vs_hf_assisted"), ("lookup", "hf lookup", "vs_hf_lookup")):
        ratios[key] = median[ours] / median[theirs] if ours in median and theirs in median else None  # type: ignore[assignment]
    return {"tokens_per_second": median, **ratios, "controller_share": _controller_share(assembly, arguments)}


def _ours(assembly: Assembly, window: int) -> dict[str, Method]:
    def method(plan: Plan) -> Method:
        def run(request: Request) -> tuple[int, float, tuple[int, ...]]:
            done = run_fixed(assembly.generator, request, plan)
            return done.tokens, done.seconds, done.completions[0].tokens

        return run

    methods = {"plain": method(assembly.space.plain)}
    members = assembly.generator.chain.members
    models = [name for name, member in members.items() if isinstance(member, Model) and name != TARGET]
    for name, key in (("lookup", "lookup"), *((each, "pair") for each in models[:1])):
        if name in members:
            methods[key] = method(Plan((TARGET, name), (window,)))
    return methods


def _theirs(assembly: Assembly, setup: Setup, source: Path, window: int) -> dict[str, Method]:
    """`transformers` on the same weights: eager and static cache in float32, bf16, assisted, prompt lookup."""
    eager = _hugging_face(source, torch.float32)
    small = _hugging_face(source, torch.bfloat16)
    methods = {
        "hf float32": _generating(eager),
        "hf static": _generating(eager, cache_implementation="static", disable_compile=True),
        "hf bf16": _generating(small),
        "hf lookup": _generating(eager, prompt_lookup_num_tokens=window),
    }
    models = [spec for spec in setup.drafters if spec.kind == "model"]
    if models:
        assistant = _hugging_face(resolve(models[0].source, offline=True, cache_dir=setup.cache_dir), torch.float32)
        assistant.generation_config.update(
            num_assistant_tokens=window, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        methods["hf assisted"] = _generating(eager, assistant_model=assistant)
    gc.collect()
    return methods


def _hugging_face(source: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()


def _generating(model: Any, **options: Any) -> Method:
    def run(request: Request) -> tuple[int, float, tuple[int, ...]]:
        prompt = torch.tensor([request.prompt])
        began = time.perf_counter()
        with torch.inference_mode():
            text = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.max_new_tokens,
                do_sample=False,
                **options,
            )
        new = tuple(text[0, prompt.shape[1] :].tolist())
        return len(new), time.perf_counter() - began, new

    return run


def _controller_share(assembly: Assembly, arguments: argparse.Namespace) -> float:
    """The share of a generation's decoding that choose and observe take, over our first prompts."""
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

    for _, prompt in read_prompts(arguments)[:3]:
        request = assembly.request(prompt, raw=arguments.raw, max_new_tokens=arguments.max_new_tokens, sampling=GREEDY)
        total += assembly.generator.generate([request], controller=Timed()).decode_seconds
    return spent / (total + spent)


if __name__ == "__main__":
    sys.exit(main())
