"""What a service tells about its speculative decoding: Prometheus metrics, recent decisions, spans, structured logs.

Needs ``prometheus_client``, and ``opentelemetry-api`` for spans: ``pip install 'adaspec[serve]'``. Metrics mirror those
of vLLM where it has them, with the prefix ``adaspec:``.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from itertools import zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Metric

from adaspec.faults import PLACES, told
from adaspec.guard import Note
from adaspec.outcome import Decision, EdgeOutcome, RoundOutcome, described
from adaspec.plan import Context, Plan

logger = logging.getLogger("adaspec")
_HISTORY = 120  # seconds of throughput that are kept
_TOGETHER = 64  # rounds that are added to the metrics at once
_DETAILS = 32  # fallbacks that are kept word by word
_LATENCIES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class Record:
    """One round for a post-mortem. ``at``: seconds since the epoch."""

    at: float
    decision: Decision
    outcome: RoundOutcome
    note: Note

    def json(self) -> dict[str, Any]:
        """As a JSON-able dict."""
        outcome = self.outcome
        return {
            "at": self.at,
            "reason": self.note.reason,
            "pulled": self.note.pulled,
            "forecast": self.note.forecast,
            "measured": outcome.tokens / outcome.seconds if outcome.seconds else None,
            **described(self.decision, outcome),
        }


class Telemetry:
    """Counts rounds, requests and fallbacks. It is the listener of a ``Guard``; safe to read from other threads.

    Args:
        registry: where the metrics are registered; one of its own by default.
        kept: decisions kept for post-mortems.
        now: seconds since the epoch.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, kept: int = 512, now: Callable[[], float] = time.time
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._now = now
        self._lock = threading.Lock()
        self._records: deque[Record] = deque(maxlen=kept)
        self._details: deque[dict[str, Any]] = deque(maxlen=_DETAILS)
        self._seconds: deque[list[float]] = deque(maxlen=_HISTORY)  # [second, tokens, seconds of rounds]
        self._pending: list[Record] = []
        self._last: Plan | None = None
        self._plans: dict[Plan, _OfPlan] = {}
        self._edges: dict[tuple[str, str], _OfEdge] = {}
        self._metrics = _Metrics(self.registry)

    def round(self, decision: Decision, outcome: RoundOutcome, note: Note) -> None:
        """Takes in a round."""
        record = Record(self._now(), decision, outcome, note)
        with self._lock:
            self._records.append(record)
            self._pending.append(record)
            self._tick(int(record.at), outcome)
            if len(self._pending) >= _TOGETHER:
                self._flush()

    def fallback(self, context: Context, reason: str, detail: str) -> None:
        """Takes in that plain decoding is forced for a while."""
        self._metrics.fallbacks.labels(reason).inc()
        self._note(reason, detail, batch_size=context.batch_size, tag=context.tag)

    def benched(self, drafter: str, reason: str, seconds: float) -> None:
        """Takes in that a drafter is left out for a while."""
        self._metrics.fallbacks.labels("bench").inc()
        self._metrics.benched.labels(drafter).inc()
        self._note("bench", f"{drafter} is left out for {seconds:.0f} s: {reason}", drafter=drafter)

    def request(self, reason: str, prompt: int, generated: int, seconds: float, first: float | None) -> None:
        """Takes in a request that ended: why, its tokens, its seconds, and those to its first token if any."""
        metrics = self._metrics
        metrics.requests.labels(reason).inc()
        metrics.prompt_tokens.inc(prompt)
        metrics.generated.inc(generated)
        if first is not None:
            metrics.latency.observe(seconds)
            metrics.first_token.observe(first)

    def load(self, running: int, waiting: int) -> None:
        """Takes in how many requests are decoded and how many wait."""
        self._metrics.running.set(running)
        self._metrics.waiting.set(waiting)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        with self._lock:
            self._flush()
        return generate_latest(self.registry)

    def decisions(self, last: int = 512) -> list[dict[str, Any]]:
        """The last decisions, oldest first."""
        with self._lock:
            records = list(self._records)[-last:] if last > 0 else []
        return [record.json() for record in records]

    def snapshot(self, last: int = 256) -> dict[str, Any]:
        """What a live page draws: throughput per second, shares of the last rounds, acceptance per edge."""
        with self._lock:
            records, details = list(self._records)[-last:], list(self._details)
            seconds = [list(second) for second in self._seconds]
        return {
            "now": self._now(),
            "throughput": [{"at": at, "tokens": tokens, "seconds": spent} for at, tokens, spent in seconds],
            "plans": _by_plan(records),
            "edges": _by_edge(records),
            "events": details,
            "rounds": len(records),
        }

    def _flush(self) -> None:
        """Adds the pending rounds to the metrics: a sum over rounds costs less than a metric's increment."""
        plans: dict[Plan, list[Record]] = {}
        edges: dict[tuple[str, str], list[EdgeOutcome]] = {}
        switches = 0
        for record in self._pending:
            plan = record.decision.plan
            plans.setdefault(plan, []).append(record)
            switches += self._last not in (None, plan)
            self._last = plan
            for edge in record.outcome.edges:
                edges.setdefault((edge.verifier, edge.drafter), []).append(edge)
        self._pending.clear()
        self._metrics.switches.inc(switches)
        for plan, records in plans.items():
            if plan not in self._plans:
                self._plans[plan] = _OfPlan(self._metrics, plan)
            self._plans[plan].add(records)
        for pair, outcomes in edges.items():
            if pair not in self._edges:
                self._edges[pair] = _OfEdge(self._metrics, *pair)
            self._edges[pair].add(outcomes)

    def _tick(self, second: int, outcome: RoundOutcome) -> None:
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0.0, 0.0])
        self._seconds[-1][1] += outcome.tokens
        self._seconds[-1][2] += outcome.seconds

    def _note(self, reason: str, detail: str, **fields: object) -> None:
        with self._lock:
            self._details.append({"at": self._now(), "reason": reason, "detail": detail})
        logger.warning(detail, extra={"fields": {"event": "fallback", "reason": reason, **fields}})


class _Metrics:
    """The families of metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Metric:
            return Metric(f"adaspec:{name}", text, labels, registry=registry)

        edge = ("verifier", "drafter")
        self.drafts = counter("spec_decode_num_drafts", "Verified drafts.", *edge)
        self.drafted = counter("spec_decode_num_draft_tokens", "Drafted tokens that were reached.", *edge)
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted tokens.", *edge)
        self.drafted_at = counter("spec_decode_num_draft_tokens_per_pos", "Of those drafted.", *edge, "position")
        self.accepted_at = counter("spec_decode_num_accepted_tokens_per_pos", "Of those accepted.", *edge, "position")
        self.pulls = counter("plan_pulls", "Times that a plan was pulled, to be held for some rounds.", "plan")
        self.played = counter("plan_rounds", "Rounds of a plan.", "plan")
        self.tokens = counter("plan_tokens", "Tokens that the rounds of a plan committed.", "plan")
        self.switches = counter("plan_switches", "Rounds with another plan than the one before.")
        self.fallbacks = counter("fallbacks", "Times that speculation was held back, by reason.", "reason")
        self.benched = counter("drafter_failures", "Times that a drafter was left out for a while.", "drafter")
        self.stage = counter("round_stage_seconds", "Seconds of rounds by plan and stage.", "plan", "stage")
        self.rounds = Histogram("adaspec:round_seconds", "Seconds of a round.", buckets=_ROUNDS, registry=registry)
        self.forecast = counter("forecast_seconds", "Seconds that the forecast gave the committed tokens.", "plan")
        self.error = Gauge(
            "adaspec:forecast_error", "log(seconds / forecast seconds), smoothed.", ("plan",), registry=registry
        )
        self.requests = counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generated = counter("generation_tokens", "Tokens of answers.")
        self.latency = Histogram(
            "adaspec:e2e_request_latency_seconds", "Seconds of requests.", buckets=_LATENCIES, registry=registry
        )
        self.first_token = Histogram(
            "adaspec:time_to_first_token_seconds", "To the first token.", buckets=_LATENCIES, registry=registry
        )
        self.running = Gauge("adaspec:num_requests_running", "Requests being decoded.", registry=registry)
        self.waiting = Gauge("adaspec:num_requests_waiting", "Requests that wait.", registry=registry)


class _OfPlan:
    """The metrics of one plan, looked up once."""

    def __init__(self, metrics: _Metrics, plan: Plan) -> None:
        name = str(plan)
        self._pulls, self._played = metrics.pulls.labels(name), metrics.played.labels(name)
        self._tokens = metrics.tokens.labels(name)
        self._forecast, self._error = metrics.forecast.labels(name), metrics.error.labels(name)
        self._rounds = metrics.rounds
        stages = (*plan.models, "catch_up", "outside")
        self._stages = {stage: metrics.stage.labels(name, stage) for stage in stages}
        self._sums = [0.0, 0.0]  # seconds, and those forecast; of late

    def add(self, records: Sequence[Record]) -> None:
        outcomes = [record.outcome for record in records]
        self._pulls.inc(sum(record.note.pulled for record in records))
        self._played.inc(len(outcomes))
        self._tokens.inc(sum(outcome.tokens for outcome in outcomes))
        for outcome in outcomes:
            self._rounds.observe(outcome.seconds)
        for stage, seconds in _stages(outcomes).items():
            if stage in self._stages:
                self._stages[stage].inc(seconds)
        for record in records:
            if record.note.forecast > 0.0 and record.outcome.tokens:
                self._judge(record.outcome, record.outcome.tokens / record.note.forecast)

    def _judge(self, outcome: RoundOutcome, forecast: float) -> None:
        """Compares the seconds of a round, catch-up aside, with those forecast for its tokens."""
        self._forecast.inc(forecast)
        decode = outcome.seconds - outcome.catch_up_seconds
        self._sums = [0.95 * self._sums[0] + decode, 0.95 * self._sums[1] + forecast]
        self._error.set(math.log(max(self._sums[0], 1e-9) / self._sums[1]))


class _OfEdge:
    """The metrics of one (verifier, drafter) pair, looked up once."""

    def __init__(self, metrics: _Metrics, verifier: str, drafter: str) -> None:
        pair = verifier, drafter
        self._drafts = metrics.drafts.labels(*pair)
        self._totals = metrics.drafted.labels(*pair), metrics.accepted.labels(*pair)
        self._at: list[tuple[Metric, Metric]] = []
        self._metrics, self._pair = metrics, pair

    def add(self, outcomes: Sequence[EdgeOutcome]) -> None:
        offered, accepted = (
            [sum(column) for column in zip_longest(*rows, fillvalue=0)]
            for rows in ([each.offered for each in outcomes], [each.accepted for each in outcomes])
        )
        self._drafts.inc(sum(each.verifications for each in outcomes))
        for total, counts in zip(self._totals, (offered, accepted)):
            total.inc(sum(counts))
        while len(self._at) < len(offered):
            labels = (*self._pair, str(len(self._at)))
            self._at.append((self._metrics.drafted_at.labels(*labels), self._metrics.accepted_at.labels(*labels)))
        for (drafted_at, accepted_at), offers, kept in zip(self._at, offered, accepted):
            drafted_at.inc(offers)
            accepted_at.inc(kept)


def _stages(outcomes: Sequence[RoundOutcome]) -> dict[str, float]:
    """Seconds of rounds per model, in catch-up, and outside of both."""
    spent = {"catch_up": sum(outcome.catch_up_seconds for outcome in outcomes)}
    for outcome in outcomes:
        for each in outcome.passes:
            spent[each.model] = spent.get(each.model, 0.0) + each.seconds
    spent["outside"] = max(sum(outcome.seconds for outcome in outcomes) - sum(spent.values()), 0.0)
    return spent


def _by_plan(records: list[Record]) -> list[dict[str, Any]]:
    """Rounds, tokens, seconds and forecast seconds per plan, most played first."""
    sums: dict[str, list[float]] = {}
    for record in records:
        row = sums.setdefault(str(record.decision.plan), [0, 0, 0.0, 0.0])
        forecast = record.outcome.tokens / record.note.forecast if record.note.forecast else 0.0
        new = (1, record.outcome.tokens, record.outcome.seconds - record.outcome.catch_up_seconds, forecast)
        row[:] = [old + more for old, more in zip(row, new)]
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    return [
        {
            "plan": plan,
            "rounds": rounds,
            "share": rounds / len(records),
            "measured": tokens / seconds if seconds else None,
            "forecast": tokens / forecast if forecast else None,
        }
        for plan, (rounds, tokens, seconds, forecast) in ranked
    ]


def _by_edge(records: list[Record]) -> list[dict[str, Any]]:
    """Offered and accepted tokens per position of each pair."""
    sums: dict[tuple[str, str], tuple[Counter[int], Counter[int]]] = {}
    for record in records:
        for edge in (*record.outcome.edges, *record.outcome.scored):
            offered, accepted = sums.setdefault((edge.verifier, edge.drafter), (Counter(), Counter()))
            offered.update(dict(enumerate(edge.offered)))
            accepted.update(dict(enumerate(edge.accepted)))
    return [
        {
            "verifier": verifier,
            "drafter": drafter,
            "offered": [offered[at] for at in sorted(offered)],
            "accepted": [accepted[at] for at in sorted(offered)],
        }
        for (verifier, drafter), (offered, accepted) in sums.items()
    ]


class Tracing:
    """One OpenTelemetry span per request where ``opentelemetry`` is installed; nothing otherwise.

    Args:
        tracer: an OpenTelemetry tracer; None: that of the global provider.
    """

    def __init__(self, tracer: Any = None) -> None:
        if tracer is None:
            try:
                tracer = import_module("opentelemetry.trace").get_tracer("adaspec")
            except ModuleNotFoundError:
                tracer = None
        self._tracer = tracer

    def start(self, name: str) -> Callable[[Mapping[str, str | int | float]], None]:
        """Begins a span; call what is returned with its attributes to end it."""
        if self._tracer is None:
            return lambda attributes: None
        span = self._tracer.start_span(name)

        def end(attributes: Mapping[str, str | int | float]) -> None:
            for key, value in attributes.items():
                span.set_attribute(key, value)
            span.end()

        return end


class Lines(logging.Formatter):
    """A log record as text. Of an error that goes with it only type and places are told, see ``adaspec.faults``."""

    def formatException(self, ei: Any) -> str:
        return told(ei[1], PLACES) if ei[1] else ""


class JsonLines(Lines):
    """A log record as one JSON object; what ``extra={"fields": {...}}`` holds becomes its members."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(fields if isinstance(fields, Mapping) else {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
