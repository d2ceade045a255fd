"""Runs the application in one process until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from adaspec.files import read_text
from adaspec.serving.app import build
from adaspec.serving.gate import LOOPBACK
from adaspec.serving.service import Service
from adaspec.telemetry import JsonLines, Lines

TOKEN_VARIABLE = "ADASPEC_API_KEY"


class Server(uvicorn.Server):
    """A server that, told to stop, first lets the requests it has finish; told so twice, it tells them that it ends.

    Args:
        service: what answers.
        host: address to listen on.
        port: 0 for any free one.
        ready: called with the URL once requests are taken.
    """

    def __init__(self, service: Service, host: str, port: int, ready: Callable[[str], None] = lambda url: None) -> None:
        config = uvicorn.Config(
            build(service, local=host in LOOPBACK),
            host=host,
            port=port,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(service.settings.grace) + 35,
        )
        super().__init__(config)
        self._service, self._ready = service, ready
        self._hurried = False

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Closes the queue, so that whoever waits is answered within the grace; at a second Ctrl-C at once.

        A third one cuts the connections.
        """
        if self.should_exit and sig == signal.SIGINT and not self._hurried:
            self._hurried = True
            self.drain(0.0)
            return
        super().handle_exit(sig, frame)
        self.drain()

    def drain(self, grace: float | None = None) -> None:
        """Stops: takes no more requests, finishes those it has. ``grace``: in seconds, in place of the settings'."""
        self.should_exit = True
        seconds = self._service.settings.grace if grace is None else grace
        threading.Thread(target=self._service.engine.close, args=(seconds,), daemon=True).start()


def bind(host: str, port: int) -> socket.socket:
    """A socket for ``Server.run``, bound before the models are loaded: who asks for a port in use knows at once.

    Raises:
        ValueError: a port that there is not.
        OSError: the address is in use, or not of this machine.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"a port lies in 0 to 65535, got {port}")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if os.name == "posix":  # elsewhere it would share the port with another process
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


def read_token(variable: str | None, file: Path | None) -> str | None:
    """The bearer token, from a file or else from the value of an environment variable.

    Raises:
        ValueError: an empty one, or a file that cannot be read.
    """
    if file is not None:
        return read_text(file, "--api-key-file").strip()
    if variable is not None and not variable.strip():
        raise ValueError(f"the bearer token in {TOKEN_VARIABLE} is empty")
    return variable.strip() if variable is not None else None


def log_to_stderr(*, machine: bool, level: int = logging.INFO) -> None:
    """Writes the log of this process to standard error; ``machine``: one JSON object a line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if machine else Lines("%(asctime)s %(levelname)s %(message)s"))
    for name in ("adaspec", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level if name == "adaspec" else logging.WARNING)
        logger.propagate = False
