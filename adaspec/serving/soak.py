"""A soak of the service: many clients of mixed kinds, hang-ups, a drafter that fails for a while; nothing may be lost.

python -m adaspec.serving.soak --minutes 10

Starts the service in this process on a free port, talks to it over HTTP, and prints one JSON object as the last line.
It fails (exit code 1) when an answer is lost or differs from the one decoded offline.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx

from adaspec.assemble import Assembly, DrafterSpec, Setup, assemble
from adaspec.decoding.generate import Request
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.sampling import GREEDY
from adaspec.faults import told
from adaspec.guard import Note, Rules
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, Plan
from adaspec.serving.engine import Limits
from adaspec.serving.server import Server
from adaspec.serving.service import Service, Settings

PROMPTS = (
    "The capital of France is",
    "def quicksort(items):",
    "Repeat after me: red, green, blue, red, green, blue, red, green,",
    "Once upon a time there was a river that",
    "One two three four five six seven eight",
    "The three laws of motion say that",
    "for row in range(10):\n    for column in range(10):\n        print(row, column)\n",
    "Dear Sir or Madam, I am writing to",
)
KINDS = ("greedy", "stream", "stop", "sampled", "logprobs", "ids")


@dataclass(slots=True)
class Tally:
    """What the clients saw; shared by their threads under its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def add(self, what: str, seconds: float | None = None, fault: str = "") -> None:
        """Notes how one request ended."""
        with self.lock:
            self.ended[what] += 1
            if seconds is not None:
                self.latencies.append(seconds)
            if fault:
                self.faults.append(fault)


class Client:
    """One client: asks, checks, asks again until the time is up."""

    def __init__(
        self, number: int, url: str, answers: dict[tuple[str, int], str], tally: Tally, *, hangs_up: bool, seed: int
    ) -> None:
        self._url, self._answers, self._tally, self._hangs_up = url, answers, tally, hangs_up
        self._random = random.Random(f"{seed}/{number}")
        self._ids: dict[str, list[int]] = {}

    def run(self, until: float, quiet: Callable[[], bool], ids: dict[str, list[int]]) -> None:
        """``quiet``: whether this client pauses now, so that the load changes."""
        self._ids = ids
        with httpx.Client(base_url=self._url, timeout=600.0) as http:
            while time.monotonic() < until:
                if quiet():
                    time.sleep(0.2)
                    continue
                began = time.monotonic()
                try:
                    self._ask(http, began)
                except Exception as error:  # whatever it is, it is a lost request
                    self._tally.add("lost", fault=told(error))
                time.sleep(self._random.random() * 0.1)

    def _ask(self, http: httpx.Client, began: float) -> None:
        kind = "hang-up" if self._hangs_up and self._random.random() < 0.5 else self._random.choice(KINDS)
        prompt, count = self._random.choice(list(self._answers))
        wanted = self._answers[prompt, count]
        body: dict[str, Any] = {"model": "soak", "prompt": prompt, "max_tokens": count, "temperature": 0}
        if kind == "sampled":
            body |= {"temperature": 0.8, "top_p": 0.9, "seed": self._random.randrange(1000)}
        elif kind == "logprobs":
            body["logprobs"] = 0
        elif kind == "ids":
            body["prompt"] = self._ids[prompt]
        elif kind == "stop" and len(wanted) > 4:
            start = self._random.randrange(len(wanted) - 2)
            body["stop"] = [wanted[start : start + 3]]
            wanted = wanted[: wanted.index(body["stop"][0])]
        if kind in ("stream", "hang-up"):
            text = self._stream(http, body, kind == "hang-up")
        else:
            answer = http.post("/v1/completions", json=body)
            if answer.status_code == 429:
                self._tally.add("refused")
                return
            choice = answer.raise_for_status().json()["choices"][0]
            text = choice["text"]
        if text is None:
            self._tally.add(kind)
            return
        garbled = kind != "sampled" and text != wanted
        fault = f"{kind} {prompt!r} {count}: {text!r} instead of {wanted!r}" if garbled else ""
        self._tally.add("garbled" if garbled else kind, time.monotonic() - began, fault)

    def _stream(self, http: httpx.Client, body: dict[str, Any], hang_up: bool) -> str | None:
        """The joined text; None when it was not read to its end on purpose."""
        pieces: list[str] = []
        after = self._random.randrange(4)
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code == 429:
                return None
            answer.raise_for_status()
            for line in answer.iter_lines():
                if hang_up and len(pieces) >= after:
                    return None
                if line == "data: [DONE]":
                    return "".join(pieces)
                if line.startswith("data: "):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
        raise RuntimeError("the stream ended early")


class Faults:
    """Makes the lookup drafter fail while ``on``."""

    def __init__(self, drafter: LookupDrafter) -> None:
        self.on = False
        self._guess = drafter.guess
        drafter.guess = self._maybe  # type: ignore[method-assign, assignment]

    def _maybe(self, *arguments: Any) -> tuple[list[int], list[float]]:
        if self.on:
            raise RuntimeError("made to fail")
        return self._guess(*arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak; 0 when nothing was lost or garbled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", metavar="[NAME=]SOURCE", help="(default: lookup)")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 24, 48])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the summary")
    arguments = parser.parse_args(argv)
    drafters = tuple(DrafterSpec.parse(text) for text in arguments.drafter or ["lookup"])
    setup = Setup(
        arguments.target,
        drafters,
        precision=arguments.precision,
        threads=arguments.threads,
        seed=arguments.seed,
        offline=arguments.offline,
    )
    assembly = assemble(setup, lambda what, share: None)
    summary = soak(
        assembly,
        minutes=arguments.minutes,
        clients=arguments.clients,
        tokens=arguments.tokens,
        max_batch=arguments.max_batch,
        seed=arguments.seed,
    )
    setting = {"target": arguments.target, "drafters": [spec.source for spec in drafters], "tokens": arguments.tokens}
    line = json.dumps({**setting, "max_batch": arguments.max_batch, **summary})
    if arguments.out:
        arguments.out.write_text(line + "\n", "utf-8")
    print(line)  # noqa: T201 - a command
    return 0 if summary["ok"] else 1


def soak(
    assembly: Assembly, *, minutes: float, clients: int, tokens: Sequence[int], max_batch: int, seed: int = 0
) -> dict[str, Any]:
    """Serves an assembly to ``clients`` for some minutes and tells what happened.

    In the third quarter all clients but one pause, so that the load changes; in the second the lookup drafter fails
    for a minute (a quarter of the time if that is less).
    """
    answers = _offline(assembly, tokens)
    ids = {prompt: list(assembly.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS}
    lookups = [each for each in assembly.generator.chain.members.values() if isinstance(each, LookupDrafter)]
    faults = [Faults(each) for each in lookups]
    limits = Limits(max_batch=max_batch, queue=4 * clients)
    service = Service(assembly, Settings("soak", limits, timeout=600.0), Rules(bench=5.0))
    urls: list[str] = []
    ready = threading.Event()

    def tell(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(service, "127.0.0.1", 0, tell)
    thread = threading.Thread(target=server.run)
    thread.start()
    if not ready.wait(60.0):
        raise RuntimeError("the service did not start")
    tally, began, length = Tally(), time.monotonic(), 60.0 * minutes
    watch = Watch(service)
    with ThreadPoolExecutor(clients) as pool:

        def pause() -> bool:
            return 0.5 < (time.monotonic() - began) / length < 0.75

        asking = [Client(number, urls[0], answers, tally, hangs_up=number == 1, seed=seed) for number in range(clients)]
        runs = [
            pool.submit(each.run, began + length, pause if number else _never, ids)
            for number, each in enumerate(asking)
        ]
        while not all(run.done() for run in runs):
            spent = time.monotonic() - began
            for fault in faults:
                fault.on = 0.25 * length < spent < 0.25 * length + min(60.0, 0.25 * length)
            phase = f"{clients} clients"
            if pause():
                phase = "1 client" if sum(service.engine.load()) <= 1 else f"{phase} stop asking"
            watch.look(spent, f"{phase}, a drafter fails" if any(fault.on for fault in faults) else phase)
            time.sleep(0.2)
        for run in runs:
            run.result()
    metrics = service.telemetry.exposition().decode()
    server.drain()
    thread.join()
    return _summary(tally, watch, metrics, minutes, clients)


def _never() -> bool:
    return False


@dataclass(slots=True)
class Mix:
    """Rounds per plan, with the rows and tokens of all of them."""

    plans: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, plan: str, outcome: RoundOutcome) -> None:
        """Takes in a round."""
        self.plans[plan] += 1
        self.rows += outcome.rows
        self.tokens += outcome.tokens
        self.seconds += outcome.seconds

    def told(self) -> dict[str, Any]:
        """In numbers."""
        rounds = self.plans.total()
        return {
            "rounds": rounds,
            "rows_per_round": round(self.rows / rounds, 2),
            "tokens_per_row_and_round": round(self.tokens / self.rows, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "plan_shares": {plan: round(count / rounds, 3) for plan, count in self.plans.most_common()},
        }


def difference(one: Mix, other: Mix) -> float:
    """Total variation between the plans of two mixes: 0 for the same shares, 1 for no plan in common."""
    ours, theirs = one.plans.total(), other.plans.total()
    plans = one.plans.keys() | other.plans.keys()
    return 0.5 * sum(abs(one.plans[plan] / ours - other.plans[plan] / theirs) for plan in plans)


class Watch:
    """Looks at the service from time to time: memory, and which plans were played in which phase and batch size."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._phase = ""
        self.memory: list[tuple[float, float]] = []  # seconds, MB
        self.batches: dict[int, Mix] = {}  # by bucket of batch sizes
        self.phases: dict[str, Mix] = {}
        self.benched: list[float] = []
        listener = service.telemetry.round

        def heard(decision: Decision, outcome: RoundOutcome, note: Note) -> None:
            plan = str(decision.plan)
            self.batches.setdefault(decision.context.bucket, Mix()).add(plan, outcome)
            self.phases.setdefault(self._phase, Mix()).add(plan, outcome)
            listener(decision, outcome, note)

        service.telemetry.round = heard  # type: ignore[method-assign]

    def look(self, spent: float, phase: str) -> None:
        """Notes the state after ``spent`` seconds; what is played from now on belongs to ``phase``."""
        self._phase = phase
        self.memory.append((spent, resident()))
        if self._service.guard.benched:
            self.benched.append(spent)


def resident() -> float:
    """Megabytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024.0
    return 0.0


def _offline(assembly: Assembly, tokens: Sequence[int]) -> dict[tuple[str, int], str]:
    """The plain greedy text of every prompt and length, each decoded alone."""
    texts = {}
    for prompt in PROMPTS:
        ids = tuple(assembly.tokenizer(prompt)["input_ids"])
        for count in tokens:
            request = Request(ids, count, GREEDY)
            generation = assembly.generator.generate([request], controller=_Plainly(assembly.space.plain))
            texts[prompt, count] = generation.completions[0].text
    return texts


@dataclass(frozen=True, slots=True)
class _Plainly:
    """Plays one plan and learns nothing."""

    plan: Plan

    def choose(self, context: Context) -> Decision:
        return Decision(self.plan, context, 1.0, 0)

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        """Nothing is learned."""


def _summary(tally: Tally, watch: Watch, metrics: str, minutes: float, clients: int) -> dict[str, Any]:
    latencies = sorted(tally.latencies)
    settled = watch.memory[len(watch.memory) // 5 :]  # by then every cache has met its longest request
    quiet, busy = watch.phases.get("1 client"), watch.phases.get(f"{clients} clients")
    lost, garbled = tally.ended["lost"], tally.ended["garbled"]
    return {
        "ok": not (lost or garbled) and bool(tally.latencies),
        "minutes": minutes,
        "clients": clients,
        "requests": tally.ended.total(),
        "ended": dict(tally.ended),
        "lost": lost,
        "garbled": garbled,
        "faults": tally.faults[:10],
        "latency_seconds": {name: _quantile(latencies, share) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "memory_mb": {
            "after_a_fifth": round(settled[0][1], 1),
            "end": round(settled[-1][1], 1),
            "most": round(max(mb for _, mb in settled), 1),
            "growth_per_minute": round(60.0 * linear_regression(*zip(*settled)).slope, 2),
        },
        "benched_from_to": [round(watch.benched[0], 1), round(watch.benched[-1], 1)] if watch.benched else None,
        "by_phase": {phase: mix.told() for phase, mix in watch.phases.items()},
        "plan_mix_difference": round(difference(quiet, busy), 3) if quiet and busy else None,
        "by_batch_size": {str(bucket): mix.told() for bucket, mix in sorted(watch.batches.items())},
        "fallbacks": [line for line in metrics.splitlines() if line.startswith("adaspec:fallbacks_total")],
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[int(share * (len(ordered) - 1))], 3) if ordered else None


if __name__ == "__main__":
    raise SystemExit(main())
