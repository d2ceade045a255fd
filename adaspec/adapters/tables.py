"""What was learned as the static tables that engines read: the best window per batch size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from adaspec.adapters.windows import window_of
from adaspec.controller import Controller
from adaspec.plan import Plan

_SHARE = 0.05  # of a bucket's rounds, below which a plan's rate is chance
Range = tuple[int, int, int]
"""(first, last) batch size and the window for them."""


def learned_ranges(state: Mapping[str, Any], largest: int, *, drafter: str = "") -> tuple[Range, ...]:
    """The window that was measured as fastest for every batch size from 1 to ``largest``, equal neighbours joined.

    Of plain decoding and the chains of two, those count that make up ``_SHARE`` of what is remembered of a bucket of
    batch sizes, over all tags: a table has no exploration that would correct a forecast. A bucket that was never
    played takes the window of the next smaller one that was, or else of the smallest.

    Args:
        state: of a controller.
        largest: batch size up to which the table goes.
        drafter: whose windows; needed when the plans name several.

    Raises:
        ValueError: a largest batch size below 1, what is no controller's state or has no rounds, an unknown drafter.
    """
    if largest < 1:
        raise ValueError(f"a table goes up to a batch size of at least 1, got {largest}")
    Controller.merge([state])  # refuses what is no state
    known = sorted({plan.models[1] for plan in map(Plan.parse, state["totals"]) if plan.depth == 2})
    chosen = drafter or (known[0] if len(known) == 1 else "")
    if chosen not in known:
        raise ValueError(f"name one drafter of the state ({', '.join(known) or 'it has none'}), got {drafter!r}")
    contexts = state["costs"]["rounds"]["contexts"]
    played = {int(bucket): _fastest(tags.values(), chosen) for bucket, tags in contexts.items()}
    windows = {bucket: window for bucket, window in played.items() if window is not None}
    if not windows:
        raise ValueError(f"no round with {chosen} or without a drafter is in the state")
    smallest = min(windows)
    sizes = range(1, largest + 1)
    table = [(size, windows[max((b for b in windows if b <= size), default=smallest)]) for size in sizes]
    groups = [(window, list(entries)) for window, entries in groupby(table, lambda entry: entry[1])]
    return tuple((entries[0][0], entries[-1][0], window) for window, entries in groups)


def _fastest(tags: Iterable[Mapping[str, Sequence[float]]], drafter: str) -> int | None:
    """The window of the most tokens per second, from (tokens, seconds, rounds) per plan and tag."""
    sums: dict[int, list[float]] = {}
    for plans in tags:
        for text, told in plans.items():
            plan = Plan.parse(text)
            if plan.depth == 1 or (plan.depth == 2 and plan.models[1] == drafter and not plan.stop):
                own = sums.setdefault(window_of(plan), [0.0, 0.0, 0.0])
                own[:] = (old + new for old, new in zip(own, told))
    enough = _SHARE * sum(rounds for _, _, rounds in sums.values())
    timed = {window: own for window, own in sums.items() if own[1] and own[2] >= enough}
    rates = {window: tokens / seconds for window, (tokens, seconds, _) in timed.items()}
    return max(rates, key=rates.__getitem__) if rates else None


def vllm_table(ranges: Sequence[Range]) -> str:
    """Part of vLLM's ``--speculative-config``, JSON: inclusive ranges, of which the last holds for larger batches."""
    longest = max(max(window for _, _, window in ranges), 1)
    return json.dumps(
        {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges]}
    )


def sglang_config(ranges: Sequence[Range]) -> str:
    """A ``--speculative-adaptive-config`` file of SGLang, JSON: one candidate from each batch size on."""
    return json.dumps({str(first): {"candidate_steps": [window]} for first, _, window in ranges}, indent=2)


def tensorrt_schedule(ranges: Sequence[Range]) -> str:
    """``max_draft_len`` and ``draft_len_schedule`` of TensorRT-LLM, YAML.

    A key is the largest batch size of its draft length, and behind the last one nothing is drafted. TensorRT-LLM wants
    the longest drafts at the smallest key: longer ones are cut to that.

    Raises:
        ValueError: nothing is drafted at batch size 1, for which TensorRT-LLM has no schedule.
    """
    longest = ranges[0][2]
    if not longest:
        raise ValueError("the state advises plain decoding at batch size 1, and TensorRT-LLM's schedule starts there")
    cut = [(last, min(window, longest)) for _, last, window in ranges]
    joined = [list(group)[-1] for _, group in groupby(cut, lambda entry: entry[1])]
    while not joined[-1][1]:
        joined.pop()
    lines = [f"max_draft_len: {longest}", "draft_len_schedule:", *(f"  {last}: {window}" for last, window in joined)]
    return "\n".join(lines)
