"""The service behind the routes: models, queue, guard, telemetry and state, put together once."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from adaspec.assemble import Assembly
from adaspec.decoding.generate import Request
from adaspec.faults import told, words
from adaspec.guard import Guard, Rules
from adaspec.serving.engine import Engine, Limits, Usage
from adaspec.serving.errors import ApiError
from adaspec.serving.exchange import Exchange
from adaspec.serving.schema import ChatRequest, Common, CompletionRequest
from adaspec.state import StateFile, restore, take_up
from adaspec.telemetry import Telemetry, Tracing

logger = logging.getLogger("adaspec.serving")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the service behaves towards its clients.

    Attributes:
        model: the name clients call it by.
        limits: of batches and queue.
        timeout: seconds until a request must have ended.
        grace: seconds that a shutdown lets requests finish.
        max_body: bytes of a request.
        token: bearer token; None: everybody may ask. Never shown.
        state: file that keeps what the controller learned; None: it is forgotten.
        save_every: seconds between two saves.

    Raises:
        ValueError: a time that is negative or too long, a time (but ``grace``) or size of 0, or an empty token.
    """

    model: str
    limits: Limits = field(default_factory=Limits)
    timeout: float = 300.0
    grace: float = 30.0
    max_body: int = 1 << 20
    token: str | None = field(default=None, repr=False)
    state: str | None = None
    save_every: float = 60.0

    def __post_init__(self) -> None:
        for name, seconds in (("timeout", self.timeout), ("save_every", self.save_every)):
            if not 0.0 < seconds < 1e6:
                raise ValueError(f"{name} is above 0 and below 1e6 seconds, got {seconds}")
        if not 0.0 <= self.grace < 1e6:
            raise ValueError(f"grace is at least 0 and below 1e6 seconds, got {self.grace}")
        if self.max_body < 1:
            raise ValueError(f"a request may have at least 1 byte, got {self.max_body}")
        if self.token is not None and not self.token.strip():
            raise ValueError("the bearer token is empty")


class Service:
    """Everything that answers requests.

    Args:
        assembly: models and controller.
        settings: see there.
        rules: of the guard.
        tracing: spans.

    Raises:
        ValueError: a state file of something else, or of another server that runs.
        OSError: a state file that cannot be written.
    """

    def __init__(
        self, assembly: Assembly, settings: Settings, rules: Rules | None = None, tracing: Tracing | None = None
    ) -> None:
        self.assembly, self.settings = assembly, settings
        self.telemetry = Telemetry()
        self.tracing = tracing or Tracing()
        self._store = StateFile(settings.state) if settings.state else None
        self._writes = self._store is not None and not (rules and rules.read_only)
        if self._store:
            found = (take_up if self._writes else restore)(assembly.controller, self._store)
            logger.info("state %s", "restored" if found else "begun anew", extra={"fields": {"event": "restore"}})
        self.guard = Guard(assembly.controller, rules, self.telemetry)
        chain = assembly.generator.chain
        chain.shield(self.guard.bench)
        self.capacity, self._vocabulary = chain.capacity, chain.target.vocab_size
        self.engine = Engine(assembly.generator, self.guard, self.telemetry, settings.limits, self._between)
        self.began = time.time()
        self._saved = time.monotonic()
        self._closed = False
        self._tokenizer_lock = threading.Lock()

    def start(self) -> None:
        """Begins to decode."""
        self.engine.start()

    def close(self, grace: float | None = None) -> None:
        """Finishes or reports every request, and saves what was learned; a second time nothing is left to do.

        ``grace``: seconds to finish in, in place of the settings'.
        """
        if self._closed:
            return
        self._closed = True
        self.engine.close(self.settings.grace if grace is None else grace)
        self.save()
        if self._store:
            self._store.release()

    def save(self) -> None:
        """Writes the controller's state."""
        self._saved = time.monotonic()
        if self._store is None or not self._writes:
            return
        try:
            self._store.save(self.assembly.controller.state_dict())
        except (OSError, ValueError) as error:
            logger.error("the state could not be saved: %s", error)

    def _between(self) -> None:
        if self._store and time.monotonic() - self._saved > self.settings.save_every:
            self.save()

    def prompts(self, body: CompletionRequest | ChatRequest) -> list[tuple[int, ...]]:
        """The prompts of a request as token ids; takes time, so call it in a thread.

        Raises:
            ApiError: a chat where the model has no template, one that its template refuses, or ids it does not know.
        """
        with self._tokenizer_lock:
            if isinstance(body, ChatRequest):
                return [self._chat(body)]
            return [self._ids(prompt) for prompt in body.prompts()]

    def _chat(self, body: ChatRequest) -> tuple[int, ...]:
        tokenizer = self.assembly.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        turns = [message.turn() for message in body.messages]
        try:
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program, and may raise what it likes
            own = type(error).__module__.startswith("jinja2")  # what the template itself says to whoever asks
            raise ApiError(
                400, f"the chat template refuses this: {words(error) if own else told(error)}", param="messages"
            ) from None
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        ids = tuple(self.assembly.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        if not ids or max(ids) >= self._vocabulary:
            raise ApiError(400, f"a prompt is 1 or more token ids below {self._vocabulary}", param="prompt")
        return ids

    def exchange(self, body: CompletionRequest | ChatRequest, prompts: list[tuple[int, ...]]) -> Exchange:
        """Queues a request.

        Raises:
            ApiError: it does not fit the cache, asks for an unknown plan, or there is no room.
        """
        limit = body.limit if isinstance(body, ChatRequest) else body.max_tokens or 16
        requests = [self._request(body, prompt, limit) for prompt in prompts]
        try:
            override = body.adaspec.override()
        except ValueError as error:
            raise ApiError(400, str(error), param="adaspec") from None
        if override and override.plan and override.plan not in self.assembly.space:
            raise ApiError(400, f"there is no plan {override.plan}", param="adaspec")
        greedy = requests[0].sampling.temperature == 0.0
        return Exchange(
            self.engine,
            self.telemetry,
            requests,
            tag=body.adaspec.tag or ("" if greedy else "sampled"),
            override=override,
            logprobs=body.top,
            timeout=self.settings.timeout,
        )

    def _request(self, body: Common, prompt: tuple[int, ...], limit: int | None) -> Request:
        room = self.capacity - len(prompt)
        if room < (limit or 1):
            wanted = f" and {limit} new ones" if limit else ""
            message = f"the prompt has {len(prompt)} tokens{wanted}, the cache holds {self.capacity}"
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        return Request(prompt, limit or room, body.sampling(secrets.randbits(62)), body.stops())

    def live(self) -> dict[str, Any]:
        """What the page draws."""
        running, waiting = self.engine.load()
        rows = self.assembly.controller.table()
        return {
            **self.telemetry.snapshot(),
            "model": self.settings.model,
            "uptime": time.time() - self.began,
            "running": running,
            "waiting": waiting,
            "benched": self.guard.benched,
            "read_only": self.guard.rules.read_only,
            "table": [
                {"plan": str(row.plan), "rounds": row.rounds, "forecast": row.forecast, "measured": row.measured}
                for row in rows[:12]
            ],
        }

    def log(self, name: str, began: float, usage: Usage | None) -> None:
        """One line per request that ended; neither prompt nor answer is in it."""
        fields: dict[str, Any] = {"event": "request", "id": name, "seconds": round(time.monotonic() - began, 4)}
        if usage is not None:
            fields |= {"prompt_tokens": usage.prompt, "tokens": usage.tokens, "rounds": usage.rounds}
        logger.info("request %s", "finished" if usage else "ended early", extra={"fields": fields})
