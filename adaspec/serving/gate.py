"""What stands before the application: a bearer token, known host names, and a bound on the size of a request."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaspec.serving.errors import ApiError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OPEN = ("/", "/health")  # the page holds no data; it asks for the token when it fetches some


class Gate:
    """Refuses requests without the token, for names that are not ours, and bodies that are too large.

    Args:
        app: answers what passes.
        token: bearer token; None: everybody may ask.
        max_body: bytes of a body.
        local: without a token, take only requests for this machine by name: a page of another site whose name was
            pointed at the loopback address shall not read the answers.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, max_body: int, local: bool = False) -> None:
        self._app, self._max_body = app, max_body
        self._token = None if token is None else token.encode()
        self._local = local and token is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal.response()(scope, receive, _guarded(send))
            return
        await self._app(scope, self._bounded(receive), _guarded(send))

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._token is not None and path not in _OPEN:
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._token):
                return ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
        if self._local and _name(headers.get("host", "")) not in LOOPBACK:
            message = "without a bearer token this server answers only as localhost: set one, or ask for 127.0.0.1"
            return ApiError(403, message, code="unknown_host")
        length = headers.get("content-length", "0")
        if length.isdecimal() and len(length) < 20 and int(length) <= self._max_body:
            return None
        return ApiError(413, f"a request has at most {self._max_body} bytes", code="request_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        """``receive`` that ends with an error once a body without an announced length grows too large."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise HTTPException(413, f"a request has at most {self._max_body} bytes")
            return message

        return bounded


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _guarded(send: Send) -> Send:
    """``send`` that tells browsers to take every answer for what it says it is, and to keep none."""

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["X-Content-Type-Options"] = "nosniff"
            headers["Referrer-Policy"] = "no-referrer"
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return guarded
