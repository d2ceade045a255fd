"""vLLM, steered while it runs: per scheduling step a controller sets how many tokens are drafted.

Pass ``scheduler_cls="adaspec.adapters.vllm.AdaptiveScheduler"`` (``AsyncAdaptiveScheduler`` with async scheduling) and
a ``num_speculative_tokens_per_batch_size`` in the speculative config. The table only names the windows to choose from
(vLLM prepares its graphs for them); which batch sizes they stand at does not matter. 0, plain decoding, is always one.

A scheduler lives once per engine, in the engine's core, whatever the number of tensor- or pipeline-parallel workers:
the workers get the window with their work, so no two of them can disagree. Written against vLLM 0.32.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from adaspec.adapters.windows import HOLD, load_context, round_outcome, window_controller, window_of
from adaspec.controller import Controller
from adaspec.faults import log_failure
from adaspec.outcome import Decision
from adaspec.state import Store, open_store, take_up

_LOG = logging.getLogger(__name__)
_ONE_PASS = ("ngram", "ngram_gpu", "suffix")  # methods whose drafts cost the same whatever the window
_IN_FLIGHT = 16  # steps scheduled and not finished; more are steps that vLLM dropped
_RECENT = 512  # decisions that are kept for a look


@dataclass(frozen=True, slots=True)
class Settings:
    """``additional_config["adaspec"]`` of an engine; every field may be left out.

    Attributes:
        state: file, folder or fsspec URL that keeps what was learned; "": nowhere. A local file belongs to one engine.
        replica: name of this engine among those that share ``state``, which is then a folder.
        save_seconds: between two saves; the last one is at shutdown.
        hold: rounds per pull of the policy.
        seed: of the policy's draws.
    """

    state: str = ""
    replica: str = ""
    save_seconds: float = 60.0
    hold: int = HOLD
    seed: int = 0

    @classmethod
    def of(cls, config: object) -> Settings:
        """Reads the settings of a vLLM config.

        Raises:
            ValueError: a setting that is not known.
        """
        given = config.get("adaspec", {}) if isinstance(config, Mapping) else {}
        unknown = sorted(set(given) - set(cls.__slots__))
        if unknown:
            raise ValueError(f"additional_config['adaspec'] knows {', '.join(cls.__slots__)}, got {', '.join(unknown)}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that the workers are busy with: it verifies what ``verified`` had drafted and drafts for ``drafting``."""

    output: Any
    began: float
    verified: Decision | None
    drafting: Decision | None


class Steering:
    """What an adaptive scheduler adds to vLLM's own; asks the controller, times the steps, reads what was accepted.

    It stands in for vLLM's table of windows per batch size: vLLM looks up a batch size, the controller answers. A
    window set in one step is drafted at its end and verified in the next, whose time and tokens are the outcome.
    Steps with a prompt in them, and steps that draft another window than they verify, teach nothing.
    """

    def __init__(self, controller: Controller, *, one_pass: bool, store: Store | None, save_seconds: float) -> None:
        self.controller = controller
        self.recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # (batch size, window) of the latest steps
        self._one_pass = one_pass
        self._store, self._save_seconds, self._saved = store, save_seconds, time.monotonic()
        self._steps: deque[_Step] = deque(maxlen=_IN_FLIGHT)
        self._asked: Decision | None = None  # of the step being scheduled
        self._verified: Decision | None = None  # of the step before
        self._ended = 0.0  # when the latest step ended; 0: the engine was idle behind it
        self._length = 0  # mean tokens of the running requests

    def __getitem__(self, batch_size: int) -> int:
        """The window for a batch, where vLLM looks into its table."""
        self._asked = self.controller.choose(load_context(batch_size, self._length))
        window = window_of(self._asked.plan)
        self.recent.append((batch_size, window))
        return window

    def scheduled(self, output: Any, began: float) -> None:
        """A step goes out."""
        if not output.total_num_scheduled_tokens:
            return
        self._steps.append(_Step(output, began, self._verified, self._asked))
        self._verified, self._asked = self._asked, None

    def finished(self, output: Any, sampled: Any) -> None:
        """A step came back, before vLLM takes its tokens in."""
        now = time.perf_counter()
        step = None
        while self._steps and step is None:
            first = self._steps.popleft()
            step = first if first.output is output else None
        if step is None:
            return
        if step.verified is not None and self._tells(step):
            drafted, accepted = _counts(output, sampled)
            outcome = round_outcome(step.verified, drafted, accepted, now - max(step.began, self._ended))
            if outcome is not None:
                self.controller.observe(step.verified, outcome)
        self._ended = now

    def after(self, running: Sequence[Any]) -> None:
        """The tokens are taken in; ``running``: the requests that go on."""
        self._length = sum(request.num_computed_tokens for request in running) // max(len(running), 1)
        if not running:
            self._verified, self._ended = None, 0.0
        if time.monotonic() - self._saved >= self._save_seconds:
            self.save()

    def save(self) -> None:
        """Writes the state; a place that cannot be written is told and does not stop the engine."""
        self._saved = time.monotonic()
        if self._store is None:
            return
        try:
            self._store.save(self.controller.state_dict())
        except OSError as error:
            log_failure(_LOG, "adaspec cannot save its state", error)

    def close(self) -> None:
        """Writes the state for the last time, and lets others have its file."""
        self.save()
        if self._store is not None:
            self._store.release()
            self._store = None

    def _tells(self, step: _Step) -> bool:
        same = step.drafting is not None and step.verified is not None and step.drafting.plan == step.verified.plan
        return (self._one_pass or same) and _decodes(step.output)


def _decodes(output: Any) -> bool:
    """Whether a step holds no prompt: every request has one token and its drafts."""
    drafts = output.scheduled_spec_decode_tokens
    counts = output.num_scheduled_tokens.items()
    return not output.scheduled_new_reqs and all(count == 1 + len(drafts.get(name, ())) for name, count in counts)


def _counts(output: Any, sampled: Any) -> tuple[list[int], list[int]]:
    """Tokens drafted and accepted, per request that got any."""
    invalid = output.num_invalid_spec_tokens or {}
    drafted, accepted = [], []
    for name in output.num_scheduled_tokens:
        tokens = sampled.sampled_token_ids[sampled.req_id_to_index[name]] if sampled.sampled_token_ids else ()
        if len(tokens):
            drafted.append(len(output.scheduled_spec_decode_tokens.get(name, ())) - invalid.get(name, 0))
            accepted.append(len(tokens) - 1)
    return drafted, accepted


def _steering(scheduler: Any) -> Steering:
    config = scheduler.vllm_config
    settings = Settings.of(config.additional_config)
    table = scheduler.dynamic_sd_lookup
    if table is None:
        raise ValueError(
            "adaspec steers vLLM through num_speculative_tokens_per_batch_size, which this engine lacks: put one into "
            "its speculative_config, such as [[1, 1, 2], [2, 2, 4], [3, 256, 0]] for the windows 2, 4 and 0 (vLLM "
            "drops it for data parallelism)"
        )
    windows = {int(entry[2]) for entry in config.speculative_config.num_speculative_tokens_per_batch_size}
    longest = scheduler.num_spec_tokens
    one_pass = config.speculative_config.method in _ONE_PASS
    controller = window_controller(
        {min(window, longest) for window in windows}, one_pass=one_pass, hold=settings.hold, seed=settings.seed
    )
    store = open_store(settings.state, settings.replica) if settings.state else None
    if store is not None:
        take_up(controller, store)
    return Steering(controller, one_pass=one_pass, store=store, save_seconds=settings.save_seconds)


class _Adaptive:
    """Mixed into a scheduler of vLLM's; ``adaspec`` is what steers it."""

    adaspec: Steering

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adaspec = _steering(self)
        self.dynamic_sd_lookup = self.adaspec

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.adaspec.scheduled(output, began)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.adaspec.finished(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.adaspec.after(self.running)  # type: ignore[attr-defined]
        return outputs

    def shutdown(self) -> None:
        self.adaspec.close()
        super().shutdown()  # type: ignore[misc]


class AdaptiveScheduler(_Adaptive, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with the window of every step chosen by a controller."""


class AsyncAdaptiveScheduler(_Adaptive, AsyncScheduler):  # type: ignore[misc]
    """The same for async scheduling, where a step is scheduled before the one ahead of it has come back."""
