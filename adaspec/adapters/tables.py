"""What was learned as the static tables that engines read: the best window per batch size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from adaspec.adapters.windows import expected_window
from adaspec.controller import Controller
from adaspec.plan import Context, Plan, PlanSpace

Range = tuple[int, int, int]
"""(first, last) batch size and the window for them."""


def learned_ranges(
    state: Mapping[str, Any], largest: int, *, drafter: str = "", seq_len: int = 512
) -> tuple[Range, ...]:
    """The window of the best forecast for every batch size from 1 to ``largest``, equal neighbours joined.

    Only the plans that were played take part, and of those only plain decoding and chains of two. Batch sizes that
    were never seen are forecast like all others, from what the passes of the seen ones took.

    Args:
        state: of a controller.
        largest: batch size up to which the table goes.
        drafter: whose windows; needed when the plans name several.
        seq_len: tokens per row that the forecast is made for.

    Raises:
        ValueError: a largest batch size below 1, a state of no controller, or no drafter of that name.
    """
    if largest < 1:
        raise ValueError(f"a table goes up to a batch size of at least 1, got {largest}")
    Controller.merge([state])  # refuses what is no state
    plans = [Plan.parse(text) for text in state["totals"]]
    pairs = [plan for plan in plans if plan.depth == 2 and not plan.stop]
    known = sorted({plan.models[1] for plan in pairs})
    chosen = drafter or (known[0] if len(known) == 1 else "")
    if chosen not in known:
        raise ValueError(f"name one drafter of the state ({', '.join(known) or 'it has none'}), got {drafter!r}")
    controller = Controller(PlanSpace([Plan((state["target"],)), *(p for p in pairs if p.models[1] == chosen)]))
    controller.load_state_dict(state)
    windows = [(size, expected_window(controller, Context(size, seq_len))) for size in range(1, largest + 1)]
    groups = [(window, list(sizes)) for window, sizes in groupby(windows, lambda entry: entry[1])]
    return tuple((sizes[0][0], sizes[-1][0], window) for window, sizes in groups)


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
