"""Asks an OpenAI-compatible server a suite of prompts, greedily, and keeps all it tells.

Servers differ in what they tell: logprobs, token ids, reasoning apart from the answer. The first prompt finds out: the
most is asked for first, and what a server refuses is left out from then on.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx

from oddrank.errors import OddrankError
from oddrank.verify.served.answers import FORMAT, Answer, Candidate, Capture, Prompt, Token

log = logging.getLogger("oddrank")

TOP = 5
"""Candidates asked for at each place: the most that OpenAI's own completions give."""

_REFUSALS = (400, 404, 405, 422, 501)
"""Statuses with which a server says that it does not do what was asked, in this form."""

_EXTRAS: list[dict[str, bool]] = [{"logprobs": True, "ids": True}, {"logprobs": True}, {}]


class _Way(NamedTuple):
    """How a server is asked. api: "chat" or "completions"."""

    api: str
    logprobs: bool
    ids: bool


class _RefusedError(Exception):
    """The server answered that it does not do this. The text is what it said."""


class _FailedError(Exception):
    """No answer, or one that is none."""


def capture(
    url: str,
    prompts: Sequence[Prompt],
    *,
    suite: str,
    model: str | None = None,
    api: str = "auto",
    key: str | None = None,
    concurrency: int = 1,
    timeout: float = 600.0,
    on_answer: Callable[[Answer], object] | None = None,
) -> Capture:
    """Every prompt's answer at temperature 0, in the order of the prompts.

    url: of the server, with or without /v1. model: by default the first that the server lists. api: "chat",
    "completions", or "auto", which is chat where the server has it. timeout: seconds for one answer. A prompt that is
    not answered has an `error`; OddrankError where not even the first is.
    """
    base = base_url(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=max(1, concurrency))
    with httpx.Client(headers=headers, timeout=httpx.Timeout(timeout, connect=10), limits=limits) as client:
        name = model or _first_model(client, base)
        asker = _Asker(client, base, name)
        way, first = asker.find_way(prompts[0], api)
        if on_answer:
            on_answer(first)

        def one(prompt: Prompt) -> Answer:
            answer = asker.answer(prompt, way)
            if on_answer:
                on_answer(answer)
            return answer

        with ThreadPoolExecutor(max(1, concurrency)) as pool:
            answers = [first, *pool.map(one, prompts[1:])]
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Capture(FORMAT, base, name, way.api, suite, made, answers)


def base_url(url: str) -> str:
    """http://host:port/v1 of what a user may write. OddrankError for what is no URL of a server. A password in it is
    not kept."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise OddrankError(f'"{url}" is not the URL of a server. Give one like http://127.0.0.1:8000.')
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions"):
        path = path.removesuffix(ending)
    if not path.endswith("/v1"):
        path += "/v1"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return urlunsplit((parts.scheme, host if port is None else f"{host}:{port}", path, "", ""))


def _first_model(client: httpx.Client, base: str) -> str:
    found = _get(client, f"{base}/models")
    entries = found.get("data") if isinstance(found, dict) else None
    names = [e["id"] for e in entries or [] if isinstance(e, dict) and isinstance(e.get("id"), str)]
    if not names:
        raise OddrankError(f"{base}/models lists no model. Name it with --model.")
    return str(names[0])


def _get(client: httpx.Client, url: str) -> Any:
    try:
        response = client.get(url)
    except httpx.HTTPError as error:
        raise OddrankError(f"{url} does not answer ({_said(error)}). Is the server up?") from None
    if response.status_code != 200:
        raise OddrankError(f"{url} answers {response.status_code}: {_message(response)}")
    try:
        return response.json()
    except ValueError:
        raise OddrankError(f"{url} answers no JSON, so it is no OpenAI-compatible server.") from None


class _Asker:
    def __init__(self, client: httpx.Client, base: str, model: str) -> None:
        self.client, self.base, self.model = client, base, model

    def find_way(self, prompt: Prompt, api: str) -> tuple[_Way, Answer]:
        """The first way that the server takes, and its answer."""
        refused: list[str] = []
        apis = ("chat", "completions") if api == "auto" else (api,)
        for name in apis:
            if name == "completions" and prompt.messages is not None:
                continue
            for extras in _EXTRAS:
                way = _Way(name, extras.get("logprobs", False), extras.get("ids", False))
                try:
                    found = self._ask(prompt, way)
                    if refused and name != apis[0]:
                        log.warning("%s refuses chat, so completions are asked (%s)", self.base, refused[-1])
                    return way, found
                except _RefusedError as error:
                    refused.append(f"{name}: {error}")
                except _FailedError as error:
                    raise OddrankError(f"{self.base}: the first prompt, {prompt.name}, failed: {error}") from None
        # what was refused with the fewest extras is not about the extras
        raise OddrankError(f"{self.base} refuses the first prompt, {prompt.name}: {'; '.join(dict.fromkeys(refused))}")

    def answer(self, prompt: Prompt, way: _Way) -> Answer:
        try:
            return self._ask(prompt, way)
        except (_RefusedError, _FailedError) as error:
            return Answer(prompt, error=str(error) or type(error).__name__)

    def _ask(self, prompt: Prompt, way: _Way) -> Answer:
        body: dict[str, Any] = {"model": self.model, "max_tokens": prompt.max_tokens, "temperature": 0, "seed": 0}
        if way.api == "chat":
            body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
            if way.logprobs:
                body |= {"logprobs": True, "top_logprobs": TOP}
        else:
            if prompt.messages is not None:
                raise _FailedError("it is a conversation, and the server is asked for completions")
            body["prompt"] = prompt.text
            if way.logprobs:
                body["logprobs"] = TOP
        if way.ids:
            body["return_token_ids"] = True
        start = time.perf_counter()
        path = "chat/completions" if way.api == "chat" else "completions"
        try:
            response = self.client.post(f"{self.base}/{path}", json=body)
        except httpx.HTTPError as error:
            raise _FailedError(f"no answer ({_said(error)})") from None
        seconds = time.perf_counter() - start
        if response.status_code in _REFUSALS:
            raise _RefusedError(f"{response.status_code}, {_message(response)}")
        if response.status_code != 200:
            raise _FailedError(f"{response.status_code}, {_message(response)}")
        try:
            return _read(prompt, response.json(), seconds)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise _FailedError(f"its answer is not an OpenAI completion ({type(error).__name__}: {error})") from None


def _read(prompt: Prompt, body: dict[str, Any], seconds: float) -> Answer:
    choice = body["choices"][0]
    message = choice.get("message") or {}
    usage = body.get("usage") or {}
    ids = choice.get("token_ids")
    return Answer(
        prompt,
        text=(message.get("content") if message else choice.get("text")) or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        finish=choice.get("finish_reason") or "",
        tokens=_tokens(choice.get("logprobs"), ids if isinstance(ids, list) else None),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        seconds=round(seconds, 4),
    )


def _tokens(logprobs: dict[str, Any] | None, ids: list[int] | None) -> list[Token]:
    found = []
    if logprobs and logprobs.get("content"):  # chat, and some servers' completions
        for entry in logprobs["content"]:
            top = [Candidate(_text(t), _nats(t["logprob"]), t.get("id")) for t in entry.get("top_logprobs") or []]
            own = Token(_text(entry), entry.get("id"), _nats(entry["logprob"]), _likeliest(top))
            found.append(Token(own.text) if _of_several(own) else own)
    elif logprobs and logprobs.get("tokens"):
        texts = logprobs["tokens"]
        tops = logprobs.get("top_logprobs") or [None] * len(texts)
        for text, logprob, top in zip(texts, logprobs["token_logprobs"], tops, strict=True):
            candidates = [Candidate(t, _nats(p)) for t, p in (top or {}).items()]
            found.append(Token(text, None, None if logprob is None else _nats(logprob), _likeliest(candidates)))
    if ids is None:
        return found
    if not found:
        return [Token("", int(i)) for i in ids]
    if len(ids) != len(found):  # some servers leave the end token out of one of the two
        return found
    return [Token(t.text, int(i), t.logprob, t.top) for t, i in zip(found, ids, strict=True)]


def _of_several(token: Token) -> bool:
    """Whether an entry is a character of several tokens, with the id and the candidates of the last (llama.cpp)."""
    return token.id is not None and any(c.id == token.id and c.text != token.text for c in token.top)


def _text(entry: dict[str, Any]) -> str:
    """A token's text. Of part of a character, which has none, its bytes: \\xe6."""
    data = entry.get("bytes")
    if not data or "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return bytes(data).decode("utf-8", errors="backslashreplace")


def _nats(value: Any) -> float:
    """ValueError for what is no logprob: a comparison with NaN would find nothing."""
    if not math.isfinite(value):
        raise ValueError(f"a logprob of {value}")
    return float(value)


def _likeliest(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: -c.logprob)


def _message(response: httpx.Response) -> str:
    """What a server says of its error, in one line."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and name in body:
            body = body[name]
    text = " ".join(str(body).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
