"""What goes wrong around a service: clients that vanish, signals, states that cannot be kept, ports in use."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path

import httpx
import pytest
from service_helpers import NAME, hold, running, until

from adaspec.cli import main
from adaspec.guard import Rules
from adaspec.serving.service import Settings
from adaspec.state import StateFile

OPTIONS = ["--threads", "1", "--precision", "float32", "--name", NAME]


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The command sets up the log of its process, which is that of the tests here."""
    kept = [
        (each, each.handlers[:], each.level, each.propagate) for each in map(getLogger, ("adaspec", "uvicorn.error"))
    ]
    yield
    for logger, logger.handlers, level, logger.propagate in kept:
        logger.setLevel(level)


def body(**options) -> dict:
    return {"model": NAME, "prompt": "the quick brown fox", "temperature": 0, "max_tokens": 24} | options


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """``adaspec serve`` as a process, and its URL."""
    command = [sys.executable, "-m", "adaspec", "serve", "--target", str(folder), "--port", "0", *OPTIONS, *options]
    environment = {key: value for key, value in os.environ.items() if key != "ADASPEC_API_KEY"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        told = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert told is not None
        try:
            yield process, told[0]
        finally:
            process.kill()


def test_the_state_is_saved_while_a_long_batch_runs(new_assembly, tmp_path) -> None:
    path = tmp_path / "state.json"
    with running(new_assembly(), Settings(NAME, state=str(path), save_every=1e-6)) as run:
        chunks = run.client().completions.create(**body(max_tokens=100, stream=True))
        next(iter(chunks))
        until(path.is_file)
        saved = json.loads(path.read_text("utf-8"))["totals"]
        chunks.close()
    assert sum(rounds for rounds, _, _ in saved.values()) < 100


def test_a_kill_loses_what_was_learned_since_the_last_save_and_nothing_else(tmp_path, folder) -> None:
    path = tmp_path / "state.json"
    with serving(folder, "--state", str(path)) as (process, url):
        httpx.post(f"{url}/v1/completions", json=body(), timeout=60.0)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    before = path.read_bytes()
    with serving(folder, "--state", str(path)) as (process, url):
        httpx.post(f"{url}/v1/completions", json=body(), timeout=60.0)
        process.kill()
        process.wait(60)
    assert path.read_bytes() == before
    StateFile(path).claim()  # a killed process holds no lock


def test_a_stream_is_finished_after_sigterm_and_newcomers_are_refused(folder, tmp_path) -> None:
    state = tmp_path / "state.json"
    with serving(folder, "--state", str(state)) as (process, url), httpx.Client(base_url=url, timeout=60.0) as client:
        whole = client.post("/v1/completions", json=body(max_tokens=100)).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body(max_tokens=100, stream=True)) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            told = [next(lines)]
            process.send_signal(signal.SIGTERM)
            told += lines
        assert told[-1] == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in told[:-1]) == whole
        _, log = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)
    assert state.is_file()
    assert "Traceback" not in log


def test_two_interrupts_tell_who_waits_and_still_save_the_state(folder, tmp_path) -> None:
    state = tmp_path / "state.json"
    many = body(prompt=["the quick brown fox"] * 50, max_tokens=200, stream=True)
    with (
        serving(folder, "--state", str(state), "--max-batch", "1") as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=many, timeout=60.0) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        until(lambda: refuses(url))
        assert not state.is_file()
        process.send_signal(signal.SIGINT)
        last = [line for line in lines if line][-1]
        _, log = process.communicate(timeout=60)
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert state.is_file()
    assert "Traceback" not in log


def refuses(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 503
    except httpx.TransportError:
        return True


def test_a_second_server_on_one_state_is_refused(new_assembly, folder, tmp_path, capsys) -> None:
    path = tmp_path / "state.json"
    with running(new_assembly(), Settings(NAME, state=str(path))):
        assert main(["serve", "--target", str(folder), "--port", "0", *OPTIONS, "--state", str(path)]) == 2
        assert "state.json is the state of another process" in capsys.readouterr().err.splitlines()[-1]
        with running(new_assembly(), Settings(NAME, state=str(path)), Rules(read_only=True)):
            pass  # it only reads
    assert path.is_file()
    with running(new_assembly(), Settings(NAME, state=str(path))):
        pass


@pytest.mark.parametrize("place", ["file/state.json", "folder"])
def test_a_state_that_cannot_be_kept_is_refused_at_once(folder, tmp_path, capsys, place) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    command = ["serve", "--target", str(folder), "--port", "0", *OPTIONS, "--state", str(tmp_path / place)]
    assert main(command) == 2
    assert str(tmp_path / place.split("/")[0]) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_refused_at_once(folder, tmp_path, capsys) -> None:
    tmp_path.chmod(0o500)
    command = ["serve", "--target", str(folder), "--port", "0", *OPTIONS, "--state", str(tmp_path / "state.json")]
    assert main(command) == 1
    assert "Permission denied" in capsys.readouterr().err.splitlines()[-1]


def test_a_state_that_can_be_kept_no_more_is_one_line_and_the_requests_go_on(new_assembly, tmp_path, caplog) -> None:
    place = tmp_path / "place"
    with running(new_assembly(), Settings(NAME, state=str(place / "state.json"), save_every=1e-6)) as run:
        client = run.client()
        client.completions.create(**body(max_tokens=2))
        until(lambda: not run.service.engine._running)
        place.rename(tmp_path / "elsewhere")
        place.write_text("a file now")
        assert client.completions.create(**body(max_tokens=4)).usage.completion_tokens == 4
    told = [record for record in caplog.records if "could not be saved" in record.message]
    assert told
    assert all(str(place) in record.message and record.exc_info is None for record in told)


def test_a_port_in_use_and_a_port_that_is_none_are_one_line_before_anything_is_loaded(folder, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--target", "no-such-model", "--port", str(port)]) == 1
    [told] = capsys.readouterr().err.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in told
    assert main(["serve", "--target", str(folder), "--port", "65536"]) == 2
    assert "got 65536" in capsys.readouterr().err


def test_a_client_that_hangs_up_during_the_prefill_costs_one_round(new_assembly) -> None:
    with running(new_assembly()) as run:
        gate = hold(run, "start")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{run.url}/v1/completions", json=body(max_tokens=200), timeout=1.0)
        assert gate.entered.is_set()
        until(lambda: run.service.engine._running[0].cancelled)
        gate.open.set()
        until(lambda: run.service.engine.load() == (0, 0))
        assert len(run.service.telemetry.decisions()) == 1
        assert run.client().completions.create(**body()).usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_a_character_split_over_tokens_comes_out_whole(new_assembly, stream) -> None:
    text = "\u00e4\U0001f98a\u65e5 " * 8
    with running(new_assembly()) as run:
        ids = run.service.assembly.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) > len(text)
        play, left = run.service.assembly.generator.chain._commit, list(ids)

        def scripted(verdict):
            for place in range(int(verdict.counts[0])):
                verdict.tokens[0, place] = left.pop(0)
            return play(verdict)

        run.service.assembly.generator.chain._commit = scripted
        answer = run.client().completions.create(**body(max_tokens=len(ids) - 1, stream=stream))
        pieces = [chunk.choices[0].text for chunk in answer] if stream else [answer.choices[0].text]
    assert "".join(pieces).startswith(text[:-3])
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_many_clients_that_hang_up_at_once_leave_nothing_behind(new_assembly) -> None:
    with running(new_assembly()) as run:
        before = threading.active_count()
        for _ in range(20):
            with httpx.stream(
                "POST", f"{run.url}/v1/completions", json=body(max_tokens=200, stream=True), timeout=60.0
            ):
                pass
        until(lambda: run.service.engine.load() == (0, 0))
        assert threading.active_count() <= before + 2
        assert run.client().completions.create(**body()).usage.completion_tokens == 24
