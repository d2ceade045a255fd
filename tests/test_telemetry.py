"""Telemetry of made-up rounds: the numbers of the outcomes come out again, under names a dashboard can ask for."""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
from importlib.resources import files

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaspec.guard import Note
from adaspec.outcome import Decision, EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context, Plan
from adaspec.telemetry import JsonLines, Telemetry, Tracing

PLAIN, DEEP = Plan(("target",)), Plan.parse("target/mid/draft:4,2")


def deep_round(number: int) -> tuple[Decision, RoundOutcome]:
    edges = (
        EdgeOutcome("target", "mid", (2, 2, 1, 0), (2, 2, 1, 0), (2, 1, 0, 0)),
        EdgeOutcome("mid", "draft", (4, 3), (3, 2), (3, 1)),
    )
    passes = (Pass("target", 5, 2, 60, 0.02), Pass("mid", 3, 2, 60, 0.004), Pass("mid", 3, 2, 60, 0.004))
    return Decision(DEEP, Context(2, 60), 0.5, number), RoundOutcome(5, 0.04, 2, 0.01, edges, passes)


def plain_round(number: int) -> tuple[Decision, RoundOutcome]:
    outcome = RoundOutcome(2, 0.02, 2, passes=(Pass("target", 1, 2, 60, 0.02),))
    return Decision(PLAIN, Context(2, 60), 0.5, number), outcome


@pytest.fixture
def telemetry() -> Telemetry:
    telemetry = Telemetry(kept=4, now=lambda: 1000.0)
    for number, make in enumerate((deep_round, deep_round, plain_round, deep_round)):
        telemetry.round(*make(number), Note(100.0, "", pulled=number != 1))
    return telemetry


def samples(telemetry: Telemetry) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(telemetry.exposition().decode()):
        for sample in family.samples:
            found[(sample.name, *(value for _, value in sorted(sample.labels.items())))] = sample.value
    return found


def test_counts_are_those_of_the_outcomes(telemetry: Telemetry) -> None:
    found = samples(telemetry)
    pair = ("mid", "target")  # labels by name: drafter, verifier
    assert found["adaspec:spec_decode_num_drafts_total", *pair] == 6
    assert found["adaspec:spec_decode_num_draft_tokens_total", *pair] == 15
    assert found["adaspec:spec_decode_num_accepted_tokens_total", *pair] == 9
    kept = "adaspec:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[kept, "mid", str(place), "target"] for place in range(4)] == [6, 3, 0, 0]
    assert found["adaspec:spec_decode_num_draft_tokens_per_pos_total", "draft", "1", "mid"] == 6
    assert found["adaspec:plan_rounds_total", str(DEEP)] == 3
    assert found["adaspec:plan_pulls_total", str(DEEP)] == 2
    assert found["adaspec:plan_tokens_total", str(DEEP)] == 15
    assert found[("adaspec:plan_switches_total",)] == 2


def test_the_seconds_of_a_round_are_split_over_its_stages_without_rest(telemetry: Telemetry) -> None:
    found = samples(telemetry)
    family = "adaspec:round_stage_seconds_total"
    stages = {key[2]: value for key, value in found.items() if key[:2] == (family, str(DEEP))}
    assert stages["target"] == pytest.approx(0.06)
    assert stages["mid"] == pytest.approx(0.024)
    assert stages["catch_up"] == pytest.approx(0.03)
    assert sum(stages.values()) == pytest.approx(0.12)
    assert found[("adaspec:round_seconds_count",)] == 4


def test_the_forecast_error_is_the_log_of_seconds_over_forecast_seconds(telemetry: Telemetry) -> None:
    found = samples(telemetry)
    assert found["adaspec:forecast_seconds_total", str(DEEP)] == pytest.approx(0.15)
    assert found["adaspec:forecast_error", str(DEEP)] == pytest.approx(math.log(0.03 / 0.05))
    assert found["adaspec:forecast_error", str(PLAIN)] == pytest.approx(0.0)


def test_the_last_decisions_are_kept_and_no_more(telemetry: Telemetry) -> None:
    telemetry.round(*plain_round(4), Note(0.0, "floor"))
    kept = telemetry.decisions()
    assert [record["plan"] for record in kept] == [str(DEEP), str(PLAIN), str(DEEP), str(PLAIN)]
    assert kept[-1]["reason"] == "floor"
    assert len(telemetry.decisions(2)) == 2
    json.dumps(kept)


def test_the_snapshot_adds_up_what_a_page_draws(telemetry: Telemetry) -> None:
    snapshot = telemetry.snapshot()
    assert snapshot["throughput"] == [{"at": 1000, "tokens": 17.0, "seconds": pytest.approx(0.14)}]
    first, second = snapshot["plans"]
    assert (first["plan"], first["share"]) == (str(DEEP), 0.75)
    assert first["measured"] == pytest.approx(15 / 0.09)  # catch-up aside
    assert first["forecast"] == pytest.approx(100.0)
    assert second["plan"] == str(PLAIN)
    edges = {(edge["verifier"], edge["drafter"]): edge for edge in snapshot["edges"]}
    assert edges["target", "mid"]["accepted"] == [6, 3, 0, 0]
    json.dumps(snapshot)


def test_fallbacks_are_counted_told_and_logged(telemetry: Telemetry, caplog: pytest.LogCaptureFixture) -> None:
    telemetry.fallback(Context(), "floor", "0.5 of plain decoding")
    telemetry.benched("draft", "RuntimeError: broken", 30.0)
    found = samples(telemetry)
    assert found["adaspec:fallbacks_total", "floor"] == found["adaspec:fallbacks_total", "bench"] == 1
    assert found["adaspec:drafter_failures_total", "draft"] == 1
    assert [event["reason"] for event in telemetry.snapshot()["events"]] == ["floor", "bench"]
    assert caplog.records[-1].fields["drafter"] == "draft"


def test_a_log_line_is_one_json_object() -> None:
    record = logging.LogRecord("adaspec", logging.INFO, "", 0, "request\nfinished", (), None)
    record.fields = {"event": "request", "tokens": 5}
    text = JsonLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["tokens"], line["level"]) == ("request\nfinished", 5, "info")


def test_a_span_holds_the_attributes_of_its_request() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Tracing(provider.get_tracer("test")).start("chat")({"gen_ai.usage.output_tokens": 7})
    [span] = exporter.get_finished_spans()
    assert (span.name, span.attributes["gen_ai.usage.output_tokens"]) == ("chat", 7)
    provider.shutdown()


def test_the_dashboard_asks_for_metrics_that_there_are(telemetry: Telemetry) -> None:
    telemetry.benched("draft", "broken", 1.0)
    telemetry.request("stop", 3, 5, 1.0, 0.1)
    known = {name for name, *_ in samples(telemetry)}
    dashboard = json.loads(files("adaspec.serving").joinpath("dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"adaspec:\w+", target["expr"])
    }
    assert len(asked) > 10
    assert asked <= known


def test_telemetry_and_guard_leave_torch_alone() -> None:
    code = "import sys, adaspec.telemetry, adaspec.guard; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
