"""What a lookup costs: microseconds per proposal, per idle score and per appended token, at several lengths of context.

python -m adaspec.bench.lookup
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from adaspec.decoding.batch import Batch
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.sampling import GREEDY, Sampler
from adaspec.decoding.shadow import Shadow

VOCABULARY = 50_000
TEXTS = ("random", "phrases", "periodic")
WEIGHTS = 8 * 2**20  # float64 numbers that are read to stand for a pass over a model's weights: 64 MiB


def text(kind: str, length: int, seed: int = 0) -> list[int]:
    """A made-up text: of random tokens, of 60 phrases in any order with one token in 20 replaced, or of one period."""
    rng = random.Random(seed)
    if kind == "random":
        return [rng.randrange(VOCABULARY) for _ in range(length)]
    phrases = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(5, 40))] for _ in range(60)]
    if kind == "periodic":
        return (phrases[0] * length)[:length]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += [one if rng.random() > 0.05 else rng.randrange(VOCABULARY) for one in rng.choice(phrases)]
    return tokens[:length]


def measure(kind: str, context: int, window: int, rounds: int, weights: NDArray[np.float64] | None) -> dict[str, float]:
    """Medians over ``rounds`` of one token each behind ``context`` tokens, in microseconds of this thread's CPU time.

    Read before each round where given: ``weights``, which leaves the processor's caches as a model's pass does.
    """
    tokens = text(kind, context + rounds + 1)
    buffer = TokenBuffer(1, len(tokens) + window)
    buffer.append(torch.tensor([tokens[:context]]), torch.tensor([context]))
    batch = Batch(buffer, Sampler([GREEDY]), torch.full((1, 1), -1), buffer.lengths)
    drafter, idle = LookupDrafter("lookup"), LookupDrafter("idle")
    for each in (drafter, idle):
        each.start(1, buffer.capacity)
    shadow, limits, one = Shadow(idle, window), torch.tensor([window]), torch.tensor([1])
    appended = _micros(lambda: drafter.guess(0, batch.text(0, context), context, [], 1)) / context
    shadow.follow(batch, [context], [context], [False])
    shadow.settle(batch, [context])
    proposals, scores, drafted = [], [], 0
    for token in tokens[context : context + rounds]:
        if weights is not None:
            weights.sum()
        batch.committed = buffer.lengths
        buffer.append(torch.tensor([[token]]), one)
        began, ends = batch.committed.tolist(), buffer.lengths.tolist()
        scores.append(_micros(partial(shadow.follow, batch, began, ends, [False])))
        batch.committed = start = buffer.lengths
        proposals.append(_micros(lambda: drafter.propose(batch, limits)))
        drafted += int((buffer.lengths - start)[0])
        buffer.truncate(start)
    return {
        "proposal": statistics.median(proposals),
        "mean_proposal": statistics.mean(proposals),
        "score": statistics.mean(scores),
        "append": appended,
        "drafted": drafted / rounds,
    }


def _micros(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return 1e6 * (time.thread_time() - began)


def main() -> int:
    """Prints a line per text, length and window, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cold", action="store_true", help="read 64 MiB before every round, as a model's pass would")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights = np.ones(WEIGHTS) if arguments.cold else None
    print(f"{'text':>9} {'context':>8} {'window':>7} {'us/proposal':>12} {'mean':>7} {'us/score':>9} {'us/append':>10}")
    found = []
    for kind in TEXTS:
        for context in arguments.contexts:
            for window in arguments.windows:
                row = measure(kind, context, window, arguments.rounds, weights)
                numbers = (
                    f"{row['proposal']:12.1f} {row['mean_proposal']:7.1f} {row['score']:9.1f} {row['append']:10.2f}"
                )
                print(f"{kind:>9} {context:8d} {window:7d} {numbers}", flush=True)
                found.append({"text": kind, "context": context, "window": window, **row})
    print(json.dumps({"cold": arguments.cold, "rounds": arguments.rounds, "microseconds": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
