"""A service of a tiny random model in a thread of the test process, and OpenAI's own client for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from adaspec.assemble import Assembly
from adaspec.guard import Rules
from adaspec.serving.server import Server
from adaspec.serving.service import Service, Settings

NAME = "tiny"


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


class Gate:
    """Keeps the decode thread where it is until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()


def hold(run: Running, step: str = "round") -> Gate:
    """The next round of a running service waits; or its next ``start``, the prefill."""
    gate, chain = Gate(), run.service.assembly.generator.chain
    play = getattr(chain, step)

    def waiting(*arguments: Any, **options: Any) -> Any:
        gate.entered.set()
        assert gate.open.wait(60.0)
        return play(*arguments, **options)

    setattr(chain, step, waiting)
    return gate


def until(holds: Callable[[], object]) -> None:
    """Waits for something that another thread does."""
    end = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
