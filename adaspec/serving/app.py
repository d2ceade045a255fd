"""The routes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from adaspec.serving.answers import Answer, ChatForm, CompletionForm, Form, Head
from adaspec.serving.engine import Usage
from adaspec.serving.errors import ApiError, on_api_error, on_failure, on_http_error, on_invalid
from adaspec.serving.gate import Gate
from adaspec.serving.schema import ChatRequest, CompletionRequest
from adaspec.serving.service import Service

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
    }
    for status, text in {
        400: "The request cannot be honoured; the error says why.",
        401: "The bearer token is missing or wrong.",
        403: "Without a bearer token only requests for localhost are answered.",
        404: "There is no such model or path.",
        413: "The request is too large.",
        429: "Too many requests wait.",
        503: "The server is shutting down.",
        504: "Not finished in time.",
    }.items()
}


def build(service: Service, *, local: bool = False) -> ASGIApp:
    """The application: the routes behind the gate. It starts and closes the service with itself.

    ``local``: it listens on the loopback address alone.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(title="adaspec", version=version("adaspec"), docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_failure)
    _openai(app, service)
    _operations(app, service)
    return Gate(app, token=service.settings.token, max_body=service.settings.max_body, local=local)


def _openai(app: FastAPI, service: Service) -> None:
    """OpenAI's routes."""
    model = {
        "id": service.settings.model,
        "object": "model",
        "created": int(service.began),
        "owned_by": "adaspec",
        "max_model_len": service.capacity,
    }

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(service, body, request, CompletionForm(), "cmpl")

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _answer(service, body, request, ChatForm(), "chatcmpl")

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return model


def _operations(app: FastAPI, service: Service) -> None:
    """What operators read."""
    page = files("adaspec.serving").joinpath("page.html").read_text("utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def live_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})

    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> JSONResponse:
        alive = service.engine.alive
        return JSONResponse({"status": "ok" if alive else "closing"}, 200 if alive else 503)

    @app.get("/metrics", responses={401: _ERRORS[401]})
    def metrics() -> Response:
        service.telemetry.load(*service.engine.load())
        return Response(service.telemetry.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/live", responses={401: _ERRORS[401]})
    def live() -> dict[str, Any]:
        return service.live()

    @app.get("/decisions", responses={400: _ERRORS[400], 401: _ERRORS[401]})
    def decisions(last: int = Query(100, ge=1, le=512)) -> dict[str, Any]:
        return {"decisions": service.telemetry.decisions(last)}


def _check_model(service: Service, name: str) -> None:
    if name != service.settings.model:
        message = f"there is no model {name!r}, this server has {service.settings.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _answer(
    service: Service, body: CompletionRequest | ChatRequest, request: Request, form: Form, kind: str
) -> Response:
    began = time.monotonic()
    _check_model(service, body.model)
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    if isinstance(body, ChatRequest) and body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    prompts = await run_in_threadpool(service.prompts, body)
    head = Head(f"{kind}-{secrets.token_hex(12)}", service.settings.model, body.top)
    end_span = service.tracing.start(kind)

    def log(usage: Usage | None) -> None:
        service.log(head.id, began, usage)
        end_span(_attributes(head, usage))

    try:
        exchange = service.exchange(body, prompts)
    except ApiError:
        log(None)
        raise
    answer = Answer(head, form, exchange, service.assembly.tokenizer, log)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return StreamingResponse(
            answer.stream(usage=usage), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    return await _unless_gone(answer, request)


async def _unless_gone(answer: Answer, request: Request) -> Response:
    """The whole answer; it is given up when the client hangs up."""
    whole, gone = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        if whole.done():
            return JSONResponse(whole.result())
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in (whole, gone):
            task.cancel()
        await asyncio.gather(whole, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _attributes(head: Head, usage: Usage | None) -> dict[str, str | int | float]:
    """Of a request's span."""
    attributes: dict[str, str | int | float] = {"gen_ai.request.model": head.model, "gen_ai.response.id": head.id}
    if usage is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.output_tokens": usage.tokens,
            "adaspec.rounds": usage.rounds,
            "adaspec.plan": max(usage.plans, key=lambda plan: usage.plans[plan], default=""),
        }
    return attributes
