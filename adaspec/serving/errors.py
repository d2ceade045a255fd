"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success. ``param``: the field at fault; ``code``: a word that programs compare."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": clean(self.message), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As an HTTP response."""
        headers = {} if self.retry is None else {"Retry-After": str(max(round(self.retry), 1))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def clean(text: str) -> str:
    """Text that can be sent as UTF-8, of bounded length."""
    return text[:1000].encode("utf-8", "backslashreplace").decode()


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    """Answers what the service refuses."""
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answers what the framework refuses: an unknown path, a wrong method, a body that is no JSON."""
    assert isinstance(error, HTTPException)
    response = ApiError(error.status_code, str(error.detail)).response()
    response.headers.update(error.headers or {})
    return response


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answers a body that the schema refuses, naming its first fault."""
    assert isinstance(error, RequestValidationError)
    fault = _fault(error.errors())
    place = [clean(str(part)) for part in fault["loc"][1:] if not isinstance(part, int)]  # behind "body" or "query"
    if fault["type"] == "json_invalid":
        return ApiError(400, "the body is no JSON", code="invalid_json").response()
    if fault["type"] == "model_attributes_type" and "json" not in request.headers.get("content-type", ""):
        return ApiError(400, "the body needs the header Content-Type: application/json", code="invalid_type").response()
    message = fault["msg"].removeprefix("Value error, ")
    param = place[0] if place else None
    return ApiError(400, f"{param or 'the body'}: {message}", param=param, code=fault["type"]).response()


def _fault(faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fault to tell: of the first field at fault, rather one of a value than that another type would do too."""
    of_field = [each for each in faults if each["loc"][:2] == faults[0]["loc"][:2]]
    return next((each for each in of_field if not each["type"].endswith("_type")), faults[0])


async def on_failure(request: Request, error: Exception) -> JSONResponse:
    """Answers what nobody foresaw; the details are in the log, not in the answer."""
    return ApiError(500, "the server failed; its log tells why").response()
