"""From the events of jobs to OpenAI's answers, whole or streamed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from adaspec.decoding.chain import Score
from adaspec.decoding.text import Offsets, Spells, token_bytes
from adaspec.serving.engine import Finished, Piece, Usage
from adaspec.serving.errors import ApiError
from adaspec.serving.exchange import Exchange

logger = logging.getLogger("adaspec.serving")
_LEAST = -9999.0  # stands for the log-probability of what is impossible


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of an answer repeats. ``top``: likeliest tokens told with each; None: no log-probabilities."""

    id: str
    model: str
    top: int | None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Scored:
    """A token as text and as bytes (None: unknown) with its log-probability, and the likeliest there, best first.

    ``offset``: where it stands in the text of its choice; tokens of a stop string stand at its end or behind.
    """

    text: str
    bytes: list[int] | None
    logprob: float
    top: tuple[Scored, ...] = ()
    offset: int = 0

    def told(self) -> dict[str, Any]:
        """As chats tell it."""
        return {"token": self.text, "logprob": self.logprob, "bytes": self.bytes}


class Form(Protocol):
    """How one kind of answer is written."""

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]: ...
    def delta(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]: ...
    def logprobs(self, tokens: Sequence[Scored]) -> dict[str, Any]: ...
    def opening(self, index: int) -> dict[str, Any] | None: ...

    @property
    def whole(self) -> str: ...
    @property
    def part(self) -> str: ...


class CompletionForm:
    """``/v1/completions``."""

    whole = part = "text_completion"

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """One text."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    delta = choice

    def logprobs(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        """Of tokens with one text the likelier is told."""
        tops = [{other.text: other.logprob for other in reversed(token.top)} for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [token.offset for token in tokens],
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """Nothing comes before the text."""
        return None


class ChatForm:
    """``/v1/chat/completions``."""

    whole, part = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """One message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """A piece of one."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        """Token by token."""
        content = [{**token.told(), "top_logprobs": [other.told() for other in token.top]} for token in tokens]
        return {"content": content, "refusal": None}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


@dataclass(slots=True)
class _Choice:
    """What is known of one choice so far."""

    offsets: Offsets
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    reason: str | None = None


class Answer:
    """Writes the answer of one exchange.

    Args:
        head: what every part repeats.
        form: how it is written.
        exchange: what happens.
        tokenizer: decodes single tokens for their log-probabilities.
        log: told the usage once all is done, or None when it is not.
    """

    def __init__(
        self,
        head: Head,
        form: Form,
        exchange: Exchange,
        tokenizer: Spells,
        log: Callable[[Usage | None], None] = lambda usage: None,
    ) -> None:
        self._head, self._form, self._exchange, self._tokenizer, self._log = head, form, exchange, tokenizer, log
        self._choices = [_Choice(Offsets(tokenizer)) for _ in exchange.jobs]
        self._usages: list[Usage] = []

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ApiError: see ``Exchange.events``.
        """
        try:
            async with aclosing(self._exchange.events()) as events:
                async for index, event in events:
                    self._take(self._choices[index], event)
        finally:
            self._log(self._total())
        choices = [
            self._form.choice(
                index, each.text, None if self._head.top is None else self._form.logprobs(each.scored), each.reason
            )
            for index, each in enumerate(self._choices)
        ]
        return {**self._envelope(self._form.whole, choices), "usage": self._usage()}

    async def stream(self, *, usage: bool) -> AsyncIterator[str]:
        """Server-sent events; a failure is the last of them. ``usage``: a chunk of its own tells it."""
        try:
            for index in range(len(self._choices)):
                opening = self._form.opening(index)
                if opening:
                    yield self._chunk([opening], usage=usage)
            async with aclosing(self._exchange.events()) as events:
                async for index, event in events:
                    delta = self._delta(index, event)
                    if delta is not None:
                        yield self._chunk([delta], usage=usage)
            if usage:
                yield _event({**self._envelope(self._form.part, []), "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())
        finally:
            self._log(self._total())

    def _delta(self, index: int, event: Piece | Finished) -> dict[str, Any] | None:
        """What an event adds to the stream; None for nothing."""
        choice = self._choices[index]
        choice.scored = []
        text = self._take(choice, event)
        scores = self._form.logprobs(choice.scored) if choice.scored else None
        return self._form.delta(index, text, scores, choice.reason) if text or scores or choice.reason else None

    def _take(self, choice: _Choice, event: Piece | Finished) -> str:
        """Notes an event; returns its new text."""
        if isinstance(event, Finished):
            choice.reason = event.reason
            self._usages.append(event.usage)
            return ""
        choice.text += event.text
        for token, score in zip(event.tokens, event.scores):
            choice.scored.append(self._scored(token, score, choice.offsets.place(token)))
        return event.text

    def _scored(self, token: int, score: Score, offset: int) -> Scored:
        top = tuple(self._spelt(other, value) for other, value in score.top[: self._head.top])
        return replace(self._spelt(token, score.logprob), top=top, offset=offset)

    def _spelt(self, token: int, logprob: float) -> Scored:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return Scored(text, token_bytes(self._tokenizer, token), max(logprob, _LEAST))

    def _chunk(self, choices: list[dict[str, Any]], *, usage: bool) -> str:
        """``usage``: it will follow, and is null until then."""
        return _event({**self._envelope(self._form.part, choices), **({"usage": None} if usage else {})})

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}

    def _total(self) -> Usage | None:
        """The usage of all choices, once all have ended."""
        if len(self._usages) < len(self._choices):
            return None
        plans: dict[str, int] = {}
        for each in self._usages:
            for plan, rounds in each.plans.items():
                plans[plan] = plans.get(plan, 0) + rounds
        prompt, tokens = sum(each.prompt for each in self._usages), sum(each.tokens for each in self._usages)
        return Usage(prompt, tokens, sum(each.rounds for each in self._usages), plans)

    def _usage(self) -> dict[str, Any]:
        total = self._total()
        assert total is not None, "every job has finished"
        return {
            "prompt_tokens": total.prompt,
            "completion_tokens": total.tokens,
            "total_tokens": total.prompt + total.tokens,
            "completion_tokens_details": {"accepted_prediction_tokens": total.accepted},
            "adaspec": {"rounds": total.rounds, "accepted_tokens": total.accepted, "plans": total.plans},
        }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"
