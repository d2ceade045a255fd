"""What stands before the application: a bearer token, and a bound on the size of a request."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaspec.serving.errors import ApiError

_OPEN = ("/", "/health")  # the page holds no data; it asks for the token when it fetches some


class Gate:
    """Refuses requests without the token, and bodies that are too large.

    Args:
        app: answers what passes.
        token: bearer token; None: everybody may ask.
        max_body: bytes of a body.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._token is not None and path not in _OPEN:
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
                return ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
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
