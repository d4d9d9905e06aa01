"""Routes, keys, sizes, errors, health: HTTP around the endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from oddrank import __version__
from oddrank.server.backend import Backend, RanksLostError, RequestFailedError
from oddrank.server.endpoints import Answer, Endpoints, Watch
from oddrank.server.logs import log, request_line
from oddrank.server.metrics import Metrics
from oddrank.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from oddrank.server.served import Served

BODY_LIMIT = 8 << 20
"""Bytes of a request's body: a prompt of a million tokens is about half of it."""

_LEFT = 499
"""The status of an answer that nobody waits for any more; nginx's."""


class State:
    """What the routes share. draining: the server takes no new requests, as it is about to end."""

    def __init__(
        self, served: Served, backend: Backend, metrics: Metrics, key: str | None, body_limit: int = BODY_LIMIT
    ) -> None:
        self.served, self.backend, self.metrics, self.key, self.body_limit = served, backend, metrics, key, body_limit
        self.endpoints = Endpoints(served, backend)
        self.draining = False


def make_app(state: State) -> FastAPI:
    app = FastAPI(title="oddrank", version=__version__, docs_url=None, redoc_url=None)
    app.state.oddrank = state

    @app.exception_handler(ApiError)
    async def _refused(_: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        said = {404: f"There is nothing at {request.url.path}.", 405: f"{request.url.path} does not take this method."}
        return _error(ApiError(error.status_code, said.get(error.status_code, str(error.detail))))

    @app.get("/health")
    async def health() -> Response:
        if state.backend.failure is not None:
            return _status(503, "failed", str(state.backend.failure))
        if state.draining:
            return _status(503, "ending", "The server is about to end.")
        if state.backend.ready is None:
            return _status(503, "loading", "The weights are being loaded.")
        return _status(200, "ok", None)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _authorize(state, request)
        return JSONResponse({"object": "list", "data": [state.served.card(name) for name in state.served.names]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _authorize(state, request)
        state.served.check_name(name)
        return JSONResponse(state.served.card(name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(state, request, lambda body, watch: state.endpoints.completion(
            parse(CompletionRequest, body), watch))  # fmt: skip

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(state, request, lambda body, watch: state.endpoints.chat(parse(ChatRequest, body), watch))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        _authorize(state, request)
        asked = parse(TokenizeRequest, await _body(state, request))
        served = state.served
        served.check_name(asked.model)
        if asked.messages is not None:
            text = served.renderer.render(
                asked.messages, generate=asked.add_generation_prompt, options=asked.chat_template_kwargs
            )
            tokens = served.encode(text, special=False)
        else:
            tokens = served.encode(asked.prompt or "", asked.add_special_tokens)
        return JSONResponse({"count": len(tokens), "max_model_len": served.max_length, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        _authorize(state, request)
        asked = parse(DetokenizeRequest, await _body(state, request))
        state.served.check_name(asked.model)
        state.served.check_tokens(asked.tokens, "tokens")
        return JSONResponse({"prompt": state.served.tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    app.add_middleware(_Watched, state=state)
    return app


_LONG_BODY = 1 << 16
"""Bytes from which a body is read beside the other requests rather than between them."""


class _Watched:
    """Every request of the API gets one log line when its answer is over, however it ends, and no traceback."""

    def __init__(self, app: Any, state: State) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in ("/health", "/metrics", "/version"):
            await self.app(scope, receive, send)
            return
        watch = scope.setdefault("state", {})["watch"] = Watch()
        begun, status, whole, gone = False, 0, False, False

        async def noting(message: Any) -> None:
            nonlocal begun, status, whole, gone
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
            try:
                await send(message)
            except (OSError, RuntimeError):
                # uvloop's for a connection that it has closed: of a client that had asked twice on one, and then left,
                # uvicorn tells the second request alone
                gone = True
                raise
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        failed = None
        try:
            await self.app(scope, receive, noting)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if gone:
                return
            failed = error
            log.exception("a request failed in the server itself")
            if not begun:
                response = _error(ApiError(500, "The server failed; its log says how.", kind="server_error"))
                await response(scope, receive, noting)
        finally:
            self._over(scope, watch, status, whole, failed)

    def _over(self, scope: Any, watch: Watch, status: int, whole: bool, failed: Exception | None) -> None:
        seconds = time.perf_counter() - watch.started
        if status == _LEFT:
            outcome = "cancelled"
        elif watch.finish == "error" or failed is not None or status >= 500:
            outcome = "failed"
        elif status >= 400:
            outcome = "refused"
        else:
            outcome = "ok" if whole else "cancelled"
        if scope["path"] in ("/v1/completions", "/v1/chat/completions"):
            self.state.metrics.over(watch, outcome, seconds)
        first = None if watch.first_token is None else round(watch.first_token - watch.started, 4)
        client = scope.get("client")
        request_line({
            "method": scope["method"], "path": scope["path"], "status": status or None, "outcome": outcome,
            "client": client[0] if client else None, "seconds": round(seconds, 4), "first_token": first,
            "prompt_tokens": watch.prompt_tokens or None, "completion_tokens": watch.completion_tokens or None,
            "reused_tokens": watch.reused_tokens or None, "finish": watch.finish or None,
            "stream": watch.stream or None,
        })  # fmt: skip


async def _answer(state: State, request: Request, make: Callable[[bytes, Watch], Answer]) -> Response:
    _authorize(state, request)
    body = await _body(state, request)
    watch: Watch = request.state.watch
    if state.draining:
        raise ApiError(503, "The server is about to end and takes no new requests.", kind="server_error")
    if state.backend.failure is not None:
        raise ApiError(503, str(state.backend.failure), kind="server_error")
    if state.backend.ready is None:
        raise ApiError(503, "The weights are still being loaded; try again soon.", kind="server_error")
    # tokenizers let others run meanwhile, and a text of megabytes takes seconds
    answer = make(body, watch) if len(body) < _LONG_BODY else await asyncio.to_thread(make, body, watch)
    if answer.asked.stream:
        watch.stream = True
        first = answer.events()
        return _Stream(_sse(first, watch), media_type="text/event-stream")
    return JSONResponse(await _unless_left(request, _whole(answer, watch)))


async def _whole(answer: Answer, watch: Watch) -> dict[str, Any]:
    try:
        return await answer.whole()
    except (RequestFailedError, RanksLostError) as error:
        watch.finish = "error"
        raise _of_ranks(error) from None


class _Stream(StreamingResponse):
    """Ends what it streams when it cannot be sent, rather than whenever that is collected as garbage."""

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


async def _sse(events: AsyncIterator[dict[str, Any]], watch: Watch) -> AsyncIterator[bytes]:
    """Server-sent events. An error in the middle is one, too, and the last."""
    encode = msgspec.json.Encoder().encode
    try:
        async for event in events:
            yield b"data: " + encode(event) + b"\n\n"
    except (RequestFailedError, RanksLostError) as error:
        watch.finish = "error"
        yield b"data: " + encode(_of_ranks(error).body()) + b"\n\n"
        return
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"


async def _unless_left(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The result of work, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise _gone()
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


def _gone() -> ApiError:
    return ApiError(_LEFT, "The client left.")


def _of_ranks(error: RequestFailedError | RanksLostError) -> ApiError:
    if isinstance(error, RanksLostError):
        return ApiError(503, str(error), kind="server_error", code="ranks_lost")
    return ApiError(400, str(error))


async def _body(state: State, request: Request) -> bytes:
    """ApiError for one that is too long, before it is read whole, and where the client has left: uvicorn says so rather
    than give what it has of the body, or even all of it, where it heard of both before it was asked."""
    limit = state.body_limit
    too_long = ApiError(413, f"The body is longer than {limit} bytes, the most that this server takes.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_long
            parts.append(part)
    except ClientDisconnect:
        raise _gone() from None
    return b"".join(parts)


def _authorize(state: State, request: Request) -> None:
    if state.key is None:
        return
    given = request.headers.get("authorization", "")
    kind, _, key = given.partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), state.key.encode()):
        raise ApiError(
            401, "This server wants its API key: Authorization: Bearer KEY.", kind="authentication_error",
            code="invalid_api_key",
        )  # fmt: skip


def _error(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status)


def _status(code: int, status: str, reason: str | None) -> Response:
    return JSONResponse({"status": status} | ({"reason": reason} if reason else {}), status_code=code)
