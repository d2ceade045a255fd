"""The loop of choosing a plan, playing a round and learning from it; streaming and stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from adaspec.decoding.chain import Chain, Score, Sequences
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.decoding.text import ByteTable, Decodes, TextStream
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context


class Chooser(Protocol):
    """What the loop needs of a controller."""

    def choose(self, context: Context) -> Decision: ...
    def observe(self, decision: Decision, outcome: RoundOutcome) -> None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One text to continue, as token ids, and how."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one round brought. ``pieces``: new text per row; ``finished``: rows that ended in this round or before;
    ``stopped``: those of them that a stop string ended; ``scores``: of the tokens, if asked for.
    """

    decision: Decision
    outcome: RoundOutcome
    tokens: list[list[int]]
    pieces: list[str]
    finished: list[bool]
    stopped: list[bool]
    scores: list[list[Score]] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One continued text. ``finish_reason``: "stop" (stop token or string), "length" or "interrupted".

    ``logprobs``: log-probabilities of ``tokens`` under the target, before penalties and temperature.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The completions of a batch and what they took. ``seconds`` = prefill (prompts) + decoding (rounds)."""

    completions: tuple[Completion, ...]
    steps: tuple[tuple[Decision, RoundOutcome], ...]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of decoding; processing the prompts is no part of it."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per row and round, bonus included."""
        rows = sum(outcome.rows for _, outcome in self.steps)
        return self.tokens / rows if rows else 0.0


class Generator:
    """Continues texts with a chain, plan by plan as its controller chooses.

    Args:
        chain: target and drafters.
        controller: chooses a plan before each round and learns from its outcome.
        tokenizer: decodes token ids to text.
        stop_ids: tokens that end every text.
    """

    def __init__(self, chain: Chain, controller: Chooser, tokenizer: Decodes, stop_ids: Sequence[int] = ()) -> None:
        self.chain = chain
        self.controller = controller
        self._tokenizer, self._table = tokenizer, ByteTable.of(tokenizer)
        self.stop_ids = tuple(stop_ids)

    def check(self, requests: Sequence[Request]) -> None:
        """Tells whether ``requests`` can be decoded as one batch.

        Raises:
            ValueError: an empty prompt or stop string, no token to generate, or a request longer than the cache.
        """
        self.chain.check(self._sequences(requests))
        for request in requests:
            TextStream(self._tokenizer, request.stop)

    def _sequences(self, requests: Sequence[Request]) -> Sequences:
        return Sequences(
            tuple(request.prompt for request in requests),
            tuple(request.sampling for request in requests),
            tuple(request.max_new_tokens for request in requests),
            (self.stop_ids,) * len(requests),
        )

    def stream(
        self,
        requests: Sequence[Request],
        *,
        tag: str = "",
        logprobs: int | None = None,
        controller: Chooser | None = None,
        cancelled: Callable[[int], bool] = lambda row: False,
    ) -> Iterator[Step]:
        """Decodes ``requests`` as one batch and yields after every round. ``controller`` stands in for the own one.

        ``logprobs``: how many of the most likely tokens are told with the score of each token; None: no scores.
        A row that is ``cancelled`` ends with the next round.

        Raises:
            ValueError: an empty prompt, or a request longer than the cache.
        """
        chooser = controller or self.controller
        texts = [TextStream(self._tokenizer, request.stop, self._table) for request in requests]

        def watch(row: int, tokens: list[int]) -> int | None:
            keep = texts[row].push(tokens)
            return len(tokens) if keep is None and cancelled(row) else keep

        self.chain.start(self._sequences(requests), watch=watch, logprobs=logprobs)
        ended = [False] * len(requests)
        while self.chain.running:
            decision = chooser.choose(self.chain.context(tag))
            result = self.chain.round(decision.plan)
            chooser.observe(decision, result.outcome)
            pieces = [
                "" if before else text.take() + (text.finish() if now else "")
                for text, before, now in zip(texts, ended, result.finished)
            ]
            ended = result.finished
            stopped = [text.stopped for text in texts]
            yield Step(decision, result.outcome, result.tokens, pieces, result.finished, stopped, result.scores)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        tag: str = "",
        logprobs: int | None = None,
        controller: Chooser | None = None,
    ) -> Generation:
        """Decodes ``requests`` to their ends; see ``stream``."""
        recorder = Recorder(requests, self.stop_ids)
        for step in self.stream(requests, tag=tag, logprobs=logprobs, controller=controller):
            recorder.add(step)
        return recorder.result()


class Recorder:
    """Gathers the steps of a stream into a ``Generation``; whoever consumes a stream feeds it each step.

    Create it just before the stream: its clock starts then. Time a consumer spends between steps is not counted.
    """

    def __init__(self, requests: Sequence[Request], stop_ids: Sequence[int]) -> None:
        self._requests = requests
        self._stop_ids = set(stop_ids)
        self._began = time.perf_counter()
        self._total = 0.0
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._texts = [""] * len(requests)
        self._stopped = [False] * len(requests)
        self._logprobs: list[list[float]] | None = None
        self._steps: list[tuple[Decision, RoundOutcome]] = []

    def add(self, step: Step) -> None:
        if not self._steps:
            self._total = time.perf_counter() - self._began
        self._steps.append((step.decision, step.outcome))
        self._stopped = step.stopped
        for row, (tokens, piece) in enumerate(zip(step.tokens, step.pieces)):
            self._tokens[row] += tokens
            self._texts[row] += piece
        if step.scores is not None:
            self._logprobs = self._logprobs or [[] for _ in self._requests]
            for kept, scores in zip(self._logprobs, step.scores):
                kept += [score.logprob for score in scores]

    def result(self, *, interrupted: bool = False) -> Generation:
        """What was gathered; ``interrupted``: the stream did not come to its end."""
        decode = sum(outcome.seconds for _, outcome in self._steps)
        first = self._steps[0][1].seconds if self._steps else 0.0
        return Generation(
            tuple(self._completion(row, interrupted) for row in range(len(self._requests))),
            tuple(self._steps),
            max(self._total - first, 0.0),
            decode,
        )

    def _completion(self, row: int, interrupted: bool) -> Completion:
        tokens = self._tokens[row]
        reason = finish_reason(tokens, self._requests[row], self._stop_ids, self._stopped[row])
        if reason == "interrupted" and not interrupted:
            reason = "stop"
        logprobs = None if self._logprobs is None else tuple(self._logprobs[row])
        return Completion(self._texts[row], tuple(tokens), reason, logprobs)


def finish_reason(tokens: Sequence[int], request: Request, stop_ids: Collection[int], stopped: bool) -> str:
    """Why a row ended: "stop" (stop token or, if ``stopped``, string), "length", or "interrupted" for neither."""
    if stopped or any(token in stop_ids for token in tokens[-1:]):
        return "stop"
    return "length" if len(tokens) >= request.max_new_tokens else "interrupted"
