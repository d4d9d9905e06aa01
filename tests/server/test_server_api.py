"""The API over ranks that say what each test wants."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from server.fake_ranks import END, VOCAB, FakeRanks, tokenizer

from oddrank.runtime.serving.messages import Submit
from oddrank.server.app import State, make_app
from oddrank.server.backend import Backend
from oddrank.server.logs import lines
from oddrank.server.metrics import Metrics
from oddrank.server.served import Served

TOKENS = tokenizer()


def says(text: str, end: bool = True) -> Any:
    ids = TOKENS(text).input_ids
    return lambda _: [*ids, END] if end else ids


@asynccontextmanager
async def serving(ranks: FakeRanks, *, key: str | None = None, length: int = 200, limit: int = 1 << 20,
                  tokens: Any = TOKENS) -> AsyncIterator[tuple[httpx.AsyncClient, State]]:  # fmt: skip
    metrics = Metrics()
    backend = Backend(ranks, metrics.stats)
    state = State(Served(("tiny", "alias"), tokens, VOCAB, length), backend, metrics, key, limit)
    backend.start()
    transport = httpx.ASGITransport(make_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        if ranks.loaded:
            await asyncio.wait_for(backend.loaded.wait(), 5)
        yield client, state
    backend.close()


def run(work: Any) -> Any:
    return asyncio.run(work)


def post(ranks: FakeRanks, path: str, body: Any, **options: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with serving(ranks, **options) as (client, _):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content)

    found: httpx.Response = run(work())
    return found


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else None for line in lines]


def test_a_completion() -> None:
    ranks = FakeRanks(says("Hello, wörld"))
    body = {"model": "tiny", "prompt": "Say", "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
            "min_p": 0.1, "seed": 7, "logit_bias": {"5": -3}, "stop_token_ids": [9], "ignore_eos": True}  # fmt: skip
    got = post(ranks, "/v1/completions", body).json()
    (choice,) = got["choices"]
    assert choice["text"] == "Hello, wörld" and choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert got["usage"]["prompt_tokens"] == 3 and got["usage"]["completion_tokens"] == 14  # the end token, too
    assert got["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert got["object"] == "text_completion" and got["model"] == "tiny" and got["id"].startswith("cmpl-")
    (asked,) = ranks.submitted
    s = asked.sampling
    assert asked.tokens == TOKENS("Say").input_ids
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (50, 0.5, 0.9, 3, 0.1, 7)
    assert (s.logit_bias, s.stop, s.ignore_eos) == (((5, -3.0),), (9,), True)


def test_prompts_and_choices_are_numbered_in_order() -> None:
    ranks = FakeRanks(lambda asked: [asked.tokens[0], END])
    prompts = [TOKENS("ab").input_ids, TOKENS("cd").input_ids]
    got = post(ranks, "/v1/completions", {"prompt": prompts, "n": 2, "seed": 5}).json()
    assert [(c["index"], c["text"]) for c in got["choices"]] == [(0, "a"), (1, "a"), (2, "c"), (3, "c")]
    assert [s.sampling.seed for s in ranks.submitted] == [5, 6, 7, 8]
    assert got["usage"]["prompt_tokens"] == 4


def test_a_stream_says_what_the_whole_says() -> None:
    text = "One two three: ü€😀."
    body = {"prompt": "x", "max_tokens": 60, "logprobs": 2}
    whole = post(FakeRanks(says(text)), "/v1/completions", body).json()
    streamed = events(post(FakeRanks(says(text)), "/v1/completions",
                           body | {"stream": True, "stream_options": {"include_usage": True}}))  # fmt: skip
    assert streamed[-1] is None and streamed[-2]["choices"] == [] and streamed[-2]["usage"] == whole["usage"]
    parts = [e["choices"][0] for e in streamed[:-2]]
    assert "".join(p["text"] for p in parts) == text == whole["choices"][0]["text"]
    assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["stop"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [x for p in parts for x in p["logprobs"][name]]
        assert joined == whole["choices"][0]["logprobs"][name]
    assert not any("\ufffd" in p["text"] for p in parts)


def test_chat_and_its_stream() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    ranks = FakeRanks(says("Yes."))
    got = post(ranks, "/v1/chat/completions", body).json()
    choice = got["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert TOKENS.decode(ranks.submitted[0].tokens) == "<|user|>Hi<|end|><|assistant|>"
    content = choice["logprobs"]["content"]
    assert [c["token"] for c in content] == ["Y", "e", "s", ".", "<|end|>"]
    assert content[0]["bytes"] == [ord("Y")] and content[0]["logprob"] == -math.log(2)
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-math.log(2), -3.0]
    streamed = events(post(FakeRanks(says("Yes.")), "/v1/chat/completions", body | {"stream": True}))
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [e["choices"][0] for e in streamed[1:-1]]
    assert "".join(d["delta"].get("content", "") for d in deltas) == "Yes."
    assert [c for d in deltas for c in d["logprobs"]["content"]] == content
    assert deltas[-1]["finish_reason"] == "stop" and streamed[1]["object"] == "chat.completion.chunk"


def test_reasoning_is_told_apart() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for text, options in (("<think>\nHm</think>\n\nYes", {}), ("\nHm</think>\n\nYes", {"enable_thinking": True})):
        ranks = FakeRanks(says(text))
        asked = body | ({"chat_template_kwargs": options} if options else {})
        message = post(ranks, "/v1/chat/completions", asked).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("\nHm", "Yes")
        streamed = events(post(FakeRanks(says(text)), "/v1/chat/completions", asked | {"stream": True}))
        deltas = [e["choices"][0]["delta"] for e in streamed[1:-1]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "\nHm"
        assert "".join(d.get("content", "") for d in deltas) == "Yes"
    unfinished = post(FakeRanks(says("<think>Hm", end=False)), "/v1/chat/completions", body | {"max_tokens": 9}).json()
    message = unfinished["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm" and message["content"] == ""
    plain = post(FakeRanks(says("a < b <think")), "/v1/chat/completions", body).json()["choices"][0]["message"]
    assert plain["content"] == "a < b <think" and "reasoning_content" not in plain


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("one STOP two", ["STOP"], "one "),
        ("one STO", ["STOP"], "one STO"),
        ("aab", ["ab"], "a"),
        ("xyz", ["z", "yz"], "x"),
        ("über und", "ü", ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(text: str, stops: Any, want: str, stream: bool) -> None:
    ranks = FakeRanks(says(text))
    got = post(ranks, "/v1/completions", {"prompt": "x", "stop": stops, "stream": stream, "max_tokens": 90})
    choices = [e["choices"][0] for e in events(got)[:-1]] if stream else [got.json()["choices"][0]]
    assert "".join(c["text"] for c in choices) == want
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stop_string_ends_it_on_the_ranks() -> None:
    ranks = FakeRanks(lambda _: [*TOKENS("one STOP").input_ids, None])
    assert post(ranks, "/v1/completions", {"prompt": "x", "stop": "STOP", "max_tokens": 90}).json()
    assert ranks.cancelled == [ranks.submitted[0].id]


def test_echo_with_the_prompts_logprobs() -> None:
    """What evaluation harnesses ask: the first token has none, each other its own, in the prompt's order."""
    prompt = TOKENS("abcde").input_ids
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    ranks = FakeRanks(says("!"))
    choice = post(ranks, "/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "abcde!" and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("abcde!") and logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"] == [None, *(-1.0 - t / 100 for t in prompt[1:]), -math.log(2)]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][1] == {"b": -1.0 - prompt[1] / 100}
    nothing = post(FakeRanks(says("!")), "/v1/completions", body | {"max_tokens": 0}).json()["choices"][0]
    assert nothing["text"] == "abcde" and nothing["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:5]
    streamed = events(post(FakeRanks(says("!")), "/v1/completions", body | {"stream": True}))
    parts = [e["choices"][0] for e in streamed[:-1]]
    assert "".join(p["text"] for p in parts) == "abcde!"
    assert [x for p in parts for x in p["logprobs"]["token_logprobs"]] == logprobs["token_logprobs"]
    plain = post(FakeRanks(says("!")), "/v1/completions", {"prompt": "ab", "echo": True, "max_tokens": 0}).json()
    assert plain["choices"][0]["text"] == "ab"


def test_token_ids() -> None:
    body = {"prompt": "ab", "return_token_ids": True, "max_tokens": 9}
    choice = post(FakeRanks(says("xy")), "/v1/completions", body).json()["choices"][0]
    assert choice["token_ids"] == [*TOKENS("xy").input_ids, END]
    assert choice["prompt_token_ids"] == TOKENS("ab").input_ids


def test_token_ids_of_a_stream_are_those_of_the_whole() -> None:
    for more in ({}, {"echo": True}, {"echo": True, "logprobs": 1}):
        body = {"prompt": "ab", "return_token_ids": True, "max_tokens": 9, "n": 2, **more}
        whole = post(FakeRanks(says("xy")), "/v1/completions", body).json()["choices"]
        streamed = events(post(FakeRanks(says("xy")), "/v1/completions", body | {"stream": True}))
        for choice in whole:
            parts = [e["choices"][0] for e in streamed[:-1] if e["choices"][0]["index"] == choice["index"]]
            assert [t for p in parts for t in p["token_ids"]] == choice["token_ids"]
            assert [p["prompt_token_ids"] for p in parts if "prompt_token_ids" in p] == [choice["prompt_token_ids"]]


BAD = [
    (b"{", 400, "not valid JSON"),
    (b'{"prompt": "\xff"}', 400, "not valid JSON"),
    (b'{"prompt": "a", "stop": "\\ud8"}', 400, "The body is not valid JSON: invalid escape"),
    (b'{"prompt": "a\\ud800"}', 400, "\\ud800, half of a surrogate pair"),
    (b'{"prompt": "\\ud83d\\ude00", "stop": ["\\ude00\\ud83d"]}', 400, "\\ude00, half of a surrogate pair"),
    (b'{"\\udfff": 1}', 400, "\\udfff, half of a surrogate pair"),
    (b"[]", 400, "object"),
    ({"prompt": "a", "temperature": "1"}, 400, "temperature"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"prompt": "a", "temperature": 1e-9}, 400, "temperature"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    ({"prompt": "a", "n": 0}, 400, "n:"),
    ({"prompt": "a", "seed": True}, 400, "seed"),
    ({"prompt": "a", "max_tokens": 2**70}, 400, "200 tokens"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "a", "temprature": 1}, 400, '"temprature" is not supported'),
    ({"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "x"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, 400, "-100 to 100"),
    ({"prompt": "a", "logit_bias": {"259": 1}}, 400, "0 to 258"),
    ({"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
    ({"prompt": "a", "stop": ""}, 400, "empty"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": ""}, 400, "no tokens"),
    ({"prompt": []}, 400, "empty"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [[1], [259]]}, 400, "0 to 258"),
    ({"prompt": [-1]}, 400, "0 to 258"),
    ({"prompt": "a" * 200}, 400, "200 tokens of prompt"),
    ({"prompt": "a" * 150, "max_tokens": 51}, 400, "150 tokens of prompt and 51 of answer"),
    ({"prompt": "a", "model": "other"}, 404, "tiny, alias"),
    ({"prompt": "a" * (1 << 21)}, 413, "longer than 1048576"),
    ({}, 400, "prompt"),
]


@pytest.mark.parametrize(("body", "status", "said"), BAD, ids=[str(b[2]) + str(i) for i, b in enumerate(BAD)])
def test_bad_requests_are_refused_by_name(body: Any, status: int, said: str) -> None:
    ranks = FakeRanks(says("x"))
    got = post(ranks, "/v1/completions", body)
    error = got.json()["error"]
    assert got.status_code == status and said in error["message"], error
    assert set(error) == {"message", "type", "param", "code"} and not ranks.submitted


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "type"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"messages": [{"content": "x"}]}, "role"),
    ],
)
def test_bad_chats(body: Any, said: str) -> None:
    got = post(FakeRanks(says("x")), "/v1/chat/completions", body)
    assert got.status_code == 400 and said in got.json()["error"]["message"]


def test_templates_that_are_missing_or_refuse() -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    got = post(FakeRanks(says("x")), "/v1/chat/completions", body, tokens=tokenizer(None))
    assert got.status_code == 400 and "/v1/completions" in got.json()["error"]["message"]
    picky = tokenizer("{{ raise_exception('roles must alternate') }}")
    got = post(FakeRanks(says("x")), "/v1/chat/completions", body, tokens=picky)
    assert got.status_code == 400 and "roles must alternate" in got.json()["error"]["message"]


def test_what_the_ranks_refuse_is_the_clients_error_alone() -> None:
    ranks = FakeRanks(lambda asked: "too many tokens for the cache" if len(asked.tokens) > 1 else [END])

    async def work() -> None:
        async with serving(ranks) as (client, _):
            asked = [client.post("/v1/completions", json={"prompt": p}) for p in ("ab", "a")]
            bad, good = await asyncio.gather(*asked)
            assert bad.status_code == 400 and "cache" in bad.json()["error"]["message"]
            assert good.status_code == 200

    run(work())


def test_health_from_loading_to_a_rank_that_dies() -> None:
    async def work() -> None:
        ranks = FakeRanks(lambda _: [None], load=False)
        async with serving(ranks) as (client, state):
            health = await client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "loading"
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and "loaded" in refused.json()["error"]["message"]
            ranks.load()
            await asyncio.wait_for(state.backend.loaded.wait(), 5)
            assert (await client.get("/health")).status_code == 200
            waiting = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": s}))
                       for s in (False, True)]  # fmt: skip
            while state.backend.pending < 2:
                await asyncio.sleep(0.01)
            ranks.die()
            whole, stream = [await asyncio.wait_for(w, 5) for w in waiting]
            assert whole.status_code == 503 and "killed by SIGKILL" in whole.json()["error"]["message"]
            assert "killed by SIGKILL" in events(stream)[-1]["error"]["message"]
            health = await client.get("/health")
            assert health.status_code == 503 and "SIGKILL" in health.json()["reason"]
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
            assert state.backend.lost.is_set()

    run(work())


def test_a_client_that_leaves_is_cancelled() -> None:
    async def work() -> None:
        ranks = FakeRanks(lambda _: [5, None])
        async with serving(ranks) as (_, state):
            for stream in (False, True):
                app = make_app(state)
                sent: list[Any] = []
                body = json.dumps({"prompt": "ab", "stream": stream, "n": 2}).encode()
                incoming = [{"type": "http.request", "body": body, "more_body": False}]
                left = asyncio.Event()

                async def receive(incoming: Any = incoming, left: Any = left) -> Any:
                    if incoming:
                        return incoming.pop(0)
                    await left.wait()
                    return {"type": "http.disconnect"}

                async def send(message: Any, sent: Any = sent) -> None:
                    sent.append(message)

                scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
                         "headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 80),
                         "asgi": {"version": "3.0", "spec_version": "2.3"}}  # fmt: skip
                task = asyncio.create_task(app(scope, receive, send))
                while state.backend.pending < 2:
                    await asyncio.sleep(0.01)
                left.set()
                await asyncio.wait_for(task, 5)
                assert state.backend.pending == 0
            assert sorted(ranks.cancelled) == [s.id for s in ranks.submitted] and len(ranks.cancelled) == 4
            assert b'oddrank_requests_total{outcome="cancelled"} 2.0' in state.metrics.text()

    run(work())


def test_a_connection_that_is_closed_under_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """uvloop refuses to write to a socket that it has closed, before the server is told that the client left."""

    async def work() -> None:
        ranks = FakeRanks(says("Hello", end=False))
        async with serving(ranks) as (_, state):
            incoming = [{"type": "http.request", "body": b'{"prompt": "ab", "stream": true}', "more_body": False}]

            async def receive() -> Any:
                if not incoming:
                    await asyncio.Event().wait()
                return incoming.pop()

            async def send(message: Any) -> None:
                if message.get("body"):
                    raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [],
                     "http_version": "1.1", "scheme": "http", "server": ("x", 80),
                     "asgi": {"version": "3.0", "spec_version": "2.3"}}  # fmt: skip
            await asyncio.wait_for(make_app(state)(scope, receive, send), 5)
            assert state.backend.pending == 0
            assert ranks.cancelled == [s.id for s in ranks.submitted]
            assert b'oddrank_requests_total{outcome="cancelled"} 1.0' in state.metrics.text()
            assert b'outcome="failed"' not in state.metrics.text()

    run(work())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_logging_is_as_it_was_after_serving(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("oddrank.server")
    before = (list(log.handlers), log.level, log.propagate)
    with lines(as_json=False):
        log.info("heard")
    log.info("not heard")
    assert (list(log.handlers), log.level, log.propagate) == before
    said = capfd.readouterr().err
    assert said.endswith(" heard\n") and "not heard" not in said


def test_a_long_text_stops_nobody() -> None:
    """Another request is answered while megabytes are made tokens; and no body asks for more answers than a few."""

    async def work() -> None:
        ranks = FakeRanks(says("Hello"))
        async with serving(ranks, limit=1 << 24) as (client, _):
            long = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a " * 2_000_000}))
            await asyncio.sleep(0)
            assert (await client.get("/health")).status_code == 200
            assert not long.done()
            refused = await long
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
            many = await client.post("/v1/completions", json={"prompt": ["a"] * 513, "n": 2})
            assert many.status_code == 400 and "1026" in many.json()["error"]["message"]
            assert not ranks.submitted

    run(work())


def test_keys() -> None:
    async def work() -> None:
        async with serving(FakeRanks(says("x")), key="secret") as (client, _):
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
                for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
                    got = await client.request(method, path, headers=headers, json={"prompt": "a"})
                    assert got.status_code == 401 and got.json()["error"]["code"] == "invalid_api_key"
            good = {"Authorization": "Bearer secret"}
            assert (await client.post("/v1/completions", headers=good, json={"prompt": "a"})).status_code == 200
            assert (await client.get("/health")).status_code == 200

    run(work())


def test_models_tokenize_and_what_is_not_there() -> None:
    async def work() -> None:
        async with serving(FakeRanks(says("x"))) as (client, _):
            listed = (await client.get("/v1/models")).json()
            assert [m["id"] for m in listed["data"]] == ["tiny", "alias"] and listed["data"][0]["max_model_len"] == 200
            assert (await client.get("/v1/models/alias")).json()["root"] == "tiny"
            assert (await client.get("/v1/models/none")).status_code == 404
            got = (await client.post("/tokenize", json={"prompt": "äb"})).json()
            assert got["tokens"] == TOKENS("äb").input_ids and got["count"] == 3
            back = (await client.post("/detokenize", json={"tokens": got["tokens"]})).json()
            assert back == {"prompt": "äb"}
            chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
            assert TOKENS.decode(chat.json()["tokens"]) == "<|user|>a<|end|><|assistant|>"
            assert (await client.post("/tokenize", json={})).status_code == 400
            assert (await client.post("/detokenize", json={"tokens": [999]})).status_code == 400
            for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405)):
                got = await client.request(method, path)
                assert got.status_code == status and got.json()["error"]["message"]

    run(work())


def test_metrics() -> None:
    async def work() -> None:
        async with serving(FakeRanks(says("abc"))) as (client, _):
            await client.post("/v1/completions", json={"prompt": "xy"})
            await client.post("/v1/completions", json={"prompt": 5})
            text = (await client.get("/metrics")).text
            for line in (
                'oddrank_requests_total{outcome="ok"} 1.0', 'oddrank_requests_total{outcome="refused"} 1.0',
                "oddrank_prompt_tokens_total 2.0", "oddrank_generated_tokens_total 4.0",
                "oddrank_time_to_first_token_seconds_count 1.0", "oddrank_kv_cache_usage_ratio 0.3",
            ):  # fmt: skip
                assert line in text, text

    run(work())


def test_sampling_defaults_are_the_models() -> None:
    from oddrank.server.served import Defaults

    assert Defaults.of({}) == Defaults(1.0, 1.0, 0, 0.0)
    assert Defaults.of({"temperature": 0.6, "top_p": 0.95, "top_k": 20}) == Defaults(0.6, 0.95, 20, 0.0)
    assert Defaults.of({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert Defaults.of({"temperature": "hot", "top_k": True}) == Defaults()


def test_submitted_values_are_plain() -> None:
    """What goes to the ranks is pickled: no tensors, no pydantic."""
    ranks = FakeRanks(says("x"))
    post(ranks, "/v1/completions", {"prompt": "a", "logprobs": 3})
    (asked,) = ranks.submitted
    assert isinstance(asked, Submit) and type(asked.tokens) is list and all(type(t) is int for t in asked.tokens)
    assert asked.top == 3 and asked.prompt_top is None
