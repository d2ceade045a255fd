"""Hugging Face's own assisted generation, where a controller only chooses how many tokens the assistant drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers.generation import AssistedCandidateGenerator, CandidateGenerator

from adaspec.adapters.windows import round_outcome, window_controller, window_of
from adaspec.controller import Controller
from adaspec.outcome import Decision
from adaspec.plan import Context


class AdaptiveCandidates(CandidateGenerator):  # type: ignore[misc]
    """Asks a controller for ``num_assistant_tokens`` before every draft, and reports what became of it.

    Args:
        inner: what drafts.
        controller: over ``window_space``.
        clock: seconds since an arbitrary start.
    """

    def __init__(
        self,
        inner: AssistedCandidateGenerator,
        controller: Controller,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._inner, self._controller, self._clock = inner, controller, clock
        self._open: tuple[Decision, float, int] | None = None  # decision, when it was made, tokens drafted
        self._first = True  # its target pass is the prompt's

    def get_candidates(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        began = self._clock()
        decision = self._controller.choose(Context(1, input_ids.shape[1]))
        window = window_of(decision.plan)
        candidates: tuple[Tensor, Tensor | None] = (input_ids, None)
        if window or self._first:  # the assistant takes in the prompt together with the target
            self._inner.num_assistant_tokens = max(window, 1)
            candidates = self._inner.get_candidates(input_ids, *args, **kwargs)
        self._open = (decision, began, candidates[0].shape[1] - input_ids.shape[1])
        return candidates

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Ends a round. The heuristic of transformers, which would change the number itself, is not asked."""
        if self._open is not None and not self._first:
            decision, began, drafted = self._open
            outcome = round_outcome(decision, [drafted], [int(num_matches)], self._clock() - began)
            if outcome is not None:
                self._controller.observe(decision, outcome)
        self._open, self._first = None, False


class Assisted:
    """``custom_generate`` of a model whose assistant drafts as many tokens as a controller says.

    ``model.generate(**inputs, custom_generate=Assisted(assistant))``. All else is Hugging Face's loop: batches of one.

    Args:
        assistant: the model that drafts.
        windows: numbers of drafted tokens to choose from; none at all is always one.
        controller: over ``window_space(windows)``; what it learns stays with it.
    """

    def __init__(
        self, assistant: Any, windows: Sequence[int] = (1, 2, 4, 8), controller: Controller | None = None
    ) -> None:
        self.assistant = assistant
        self.controller = controller or window_controller(windows, hold=4)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding method that ``model.generate`` calls."""
        return type(model)._assisted_decoding(
            _Loop(model, self),
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            inputs_tensor=inputs_tensor,
            **model_kwargs,
        )


class _Loop:
    """The model as its assisted loop sees it, but for the candidate generator."""

    def __init__(self, model: Any, assisted: Assisted) -> None:
        self._model, self._assisted = model, assisted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _get_candidate_generator(
        self,
        generation_config: Any,
        input_ids: Tensor,
        inputs_tensor: Tensor | None,
        logits_processor: Any,
        model_kwargs: dict[str, Any],
        **others: Any,
    ) -> AdaptiveCandidates:
        inner = AssistedCandidateGenerator(
            input_ids=input_ids,
            assistant_model=self._assisted.assistant,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            inputs_tensor=inputs_tensor,
            logits_processor=logits_processor,
        )
        return AdaptiveCandidates(inner, self._assisted.controller)
