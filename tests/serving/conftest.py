"""A service of a tiny random model in a thread of the test process, and OpenAI's own client for it."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_cli import save_model

from adaspec.assemble import Assembly, DrafterSpec, Setup, assemble
from adaspec.guard import Rules
from adaspec.serving.server import Server
from adaspec.serving.service import Service, Settings

torch.set_num_threads(1)
NAME = "tiny"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def new_assembly(folder: Path):
    """Builds an assembly with a controller of its own."""

    def build() -> Assembly:
        drafters = (DrafterSpec("lookup", "lookup"), DrafterSpec("small", "int8"))
        setup = Setup(str(folder), drafters, windows=(2, 4), inner_windows=(1,), precision="float32", threads=1)
        return assemble(setup, lambda what, share: None)

    return build


class Running:
    """A service that runs, and how to reach it."""

    def __init__(self, service: Service, server: Server, url: str) -> None:
        self.service, self.server, self.url = service, server, url
        self.clients: list[OpenAI] = []

    def client(self, key: str = "none") -> OpenAI:
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60.0)
        self.clients.append(client)
        return client


@contextmanager
def running(assembly: Assembly, settings: Settings | None = None, rules: Rules | None = None) -> Iterator[Running]:
    """Serves an assembly on a free port until the block ends."""
    service = Service(assembly, settings or Settings(NAME, grace=20.0), rules)
    urls: list[str] = []
    ready = threading.Event()

    def tell(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(service, "127.0.0.1", 0, tell)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(60.0)
    run = Running(service, server, urls[0])
    try:
        yield run
    finally:
        for client in run.clients:
            client.close()
        server.drain()
        thread.join(60.0)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(new_assembly) -> Iterator[Running]:
    with running(new_assembly()) as run:
        yield run


@pytest.fixture(scope="session")
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def offline(new_assembly):
    """The text and tokens of one greedy request, decoded alone and plainly."""
    assembly = new_assembly()

    def answer(prompt: str, count: int, stop: tuple[str, ...] = ()) -> str:
        from adaspec.compare import run_fixed
        from adaspec.decoding.sampling import GREEDY

        request = assembly.request(prompt, raw=True, max_new_tokens=count, sampling=GREEDY, stop=stop)
        return run_fixed(assembly.generator, request, assembly.space.plain).completions[0].text

    return answer


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium")
    return found
