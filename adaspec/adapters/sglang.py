"""SGLang's adaptive speculation, with this project's controller as its policy.

``--speculative-adaptive`` lets SGLang switch between prepared numbers of draft steps; its policy is an object of the
protocol ``AdaptiveSpecPolicy`` (sglang.srt.speculative.adaptive_runtime_state). ``register`` is the plug-in entry
point, group ``sglang.srt.plugins``, that puts ours in the place of SGLang's own. Written against SGLang's source; the
recorded calls of the test are all it was run with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from adaspec.adapters.windows import load_context, round_outcome, window_controller, window_of
from adaspec.controller import Controller
from adaspec.outcome import Decision

DEFAULT_STEPS = (0, 1, 3, 5, 7)
_POLICY = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"


class AdaptivePolicy:
    """Chooses the number of draft steps of every batch, timed from one choice to the next.

    SGLang asks for the steps of a batch before each decoding round and reports a round's accepted drafts after it,
    with overlapped scheduling one round late: reports are matched to choices in their order. A round that follows a
    pause, or whose batch has changed, teaches nothing.

    Args:
        candidate_steps: numbers of draft steps that the engine prepares for.
        controller: over ``window_space(candidate_steps)``; a fresh one by default.
        pause: seconds between two choices that are no round any more.
        clock: seconds since an arbitrary start.

    Raises:
        ValueError: no candidate, or one below 0.
    """

    def __init__(
        self,
        candidate_steps: Sequence[int] = DEFAULT_STEPS,
        controller: Controller | None = None,
        *,
        pause: float = 5.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not candidate_steps or min(candidate_steps) < 0:
            raise ValueError(f"the candidate steps are numbers of at least 0, got {list(candidate_steps)}")
        self.controller = controller or window_controller(candidate_steps)
        self._steps = sorted({window_of(plan) for plan in self.controller.space} & {0, *candidate_steps})
        self._graph_sizes: list[int] | None = None
        self._pause, self._clock = pause, clock
        self._open: list[tuple[Decision, float]] = []  # choices and when they were made, the oldest first

    @property
    def candidate_steps(self) -> list[int]:
        """Every number of steps that may be chosen; 0, plain decoding, is always one."""
        return list(self._steps)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self._graph_sizes = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Batch sizes to capture for a number of steps: all of them, since any may be chosen for any batch."""
        if self._graph_sizes is None:
            return None
        return list(self._graph_sizes) if step in self._steps else []

    def get_steps_for_batch(self, batch_size: int) -> int:
        decision = self.controller.choose(load_context(batch_size))
        self._open.append((decision, self._clock()))
        del self._open[:-4]
        return window_of(decision.plan)

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Takes a round's accepted drafts. Never asks for a switch here: the next round's choice makes it."""
        now = self._clock()
        if not self._open or self._open[0][0].context.batch_size != batch_size:
            self._open.clear()
            return None
        decision, began = self._open.pop(0)
        ended = self._open[0][1] if self._open else now  # overlapped: its time is that to the choice behind it
        window = window_of(decision.plan)
        drafted = [window] * len(num_correct_drafts_per_req)
        outcome = round_outcome(decision, drafted, num_correct_drafts_per_req, ended - began)
        if outcome is not None and ended - began <= self._pause:
            self.controller.observe(decision, outcome)
        return None


def register() -> None:
    """The entry point: has SGLang build our policy wherever it would build its own."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_POLICY, AdaptiveSpeculativeParams, hooks.HookType.REPLACE)


class AdaptiveSpeculativeParams(AdaptivePolicy):
    """Our policy with the name and the constructor of SGLang's, which it replaces.

    The candidates of all batch sizes in the configuration are one set, with ``initial_steps`` in it.

    Raises:
        ValueError: tensor parallelism: every rank would decide by a clock of its own, and they must agree.
    """

    def __init__(
        self, initial_steps: int, cfg_path: str | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        ranks = import_module("sglang.srt.distributed").get_tensor_model_parallel_world_size()
        if ranks > 1:
            raise ValueError(
                f"adaspec decides by the clock, and {ranks} tensor-parallel ranks would decide differently; run with "
                "one rank, or leave the plug-in out (SGLANG_PLUGINS) and use a table of `adaspec export sglang`"
            )
        slots = config or (json.loads(Path(cfg_path).read_text(encoding="utf-8")) if cfg_path else {})
        entries = [entry["candidate_steps"] for size, entry in slots.items() if size.isdigit()]
        super().__init__([initial_steps, *chain.from_iterable(entries or [DEFAULT_STEPS])])
