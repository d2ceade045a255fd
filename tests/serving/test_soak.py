"""Slow: a short soak, fuzzing by the published schema, and the live page in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from browser import look

pytestmark = pytest.mark.slow


def test_a_short_soak_loses_and_garbles_nothing(folder: Path, tmp_path: Path) -> None:
    from adaspec.serving.soak import main

    out = tmp_path / "summary.json"
    options = ["--minutes", "0.35", "--clients", "8", "--precision", "float32", "--threads", "1", "--tokens", "5", "30"]
    drafters = ["--drafter", "lookup", "--drafter", "small=int8"]
    assert main(["--target", str(folder), *options, *drafters, "--out", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary["lost"] == summary["garbled"] == 0
    assert summary["requests"] > 20
    assert summary["benched_from_to"]
    assert len(summary["by_batch_size"]) > 1
    assert {"8 clients", "8 clients, a drafter fails", "1 client"} <= set(summary["by_phase"])
    assert 0.0 < summary["plan_mix_difference"] <= 1.0


def test_fuzzing_by_the_published_schema_finds_no_500(server, tmp_path: Path) -> None:
    program = f"""
import schemathesis
from hypothesis import HealthCheck, settings
schema = schemathesis.openapi.from_url({server.url!r} + "/openapi.json")
counts = {{}}
@schema.parametrize()
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_api(case):
    answer = case.call(timeout=60)
    counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
    assert answer.status_code < 500, (answer.status_code, case.as_curl_command())
    if answer.status_code >= 400 and case.method != "HEAD":
        assert set(answer.json()["error"]) == {{"message", "type", "param", "code"}}
"""
    done = run_program(program, tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def run_program(program: str, place: Path) -> subprocess.CompletedProcess[str]:
    """A program under a pytest of its own: the fuzzer brings warnings that are errors here."""
    file = place / "test_fuzz.py"
    file.write_text(program, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("size", ["1200,900", "390,844"])
def test_the_live_page_draws_without_an_error(server, client, chromium: str, tmp_path: Path, size: str) -> None:
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            client.completions.create(model="tiny", prompt="the quick brown fox the", max_tokens=40, temperature=0)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        seen = look(chromium, server.url + "/", tmp_path / "profile", size=size)
    finally:
        stop.set()
        thread.join(60.0)
    assert not seen.complaints
    assert "<tr><td><code>target" in seen.dom
    assert 'class="cell"' in seen.dom
    assert "<polyline" in seen.dom
