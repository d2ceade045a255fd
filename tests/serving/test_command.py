"""``adaspec serve`` as a process: it says where it listens, ends on SIGTERM, and a bad option is one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from adaspec.cli import main


def test_it_serves_until_it_is_told_to_stop(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    options = ["--port", "0", "--threads", "1", "--precision", "float32", "--log-json", "--state", str(state)]
    command = [sys.executable, "-m", "adaspec", "serve", "--target", str(folder), "--name", "tiny", *options]
    environment = os.environ | {"ADASPEC_API_KEY": "hidden-token"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", told)
        assert url is not None
        body = {"model": "tiny", "prompt": "the fox", "max_tokens": 5}
        answer = httpx.post(
            f"{url[0]}/v1/completions", json=body, headers={"Authorization": "Bearer hidden-token"}, timeout=60.0
        )
        assert answer.json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)
    assert state.is_file()
    assert "hidden-token" not in log + told
    assert "Traceback" not in log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert [line["tokens"] for line in lines if line.get("event") == "request"] == [5]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--floor", "2"], "got 2.0"),
        (["--max-batch", "0"], "got 0"),
        (["--budget", "tenant"], "TAG=SHARE"),
        (["--budget", "tenant=2"], "got 2.0"),
        (["--batch-wait-ms", "-1"], "-0.001"),
        (["--timeout", "0"], "timeout is above 0 and below 1e6 seconds, got 0.0"),
        (["--grace", "-1"], "grace is at least 0 and below 1e6 seconds, got -1.0"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_bad_option_is_one_line(folder: Path, capsys, options: list[str], told: str) -> None:
    assert main(["serve", "--target", str(folder), *options]) in (1, 2)
    complaint = capsys.readouterr().err.splitlines()
    assert len(complaint) == 1
    assert told in complaint[0]


def test_an_empty_token_is_refused(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "token").write_text(" \n")
    assert main(["serve", "--target", str(folder), "--api-key-file", str(tmp_path / "token")]) == 2
    assert "is empty" in capsys.readouterr().err
