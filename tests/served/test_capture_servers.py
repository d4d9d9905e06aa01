"""`capture` against servers that tell more or less, and against what is no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import run
from served.fake_server import Reply, chat_reply, refuses, serving

from oddrank.errors import OddrankError
from oddrank.verify.served import Prompt, capture, read_capture, suite
from oddrank.verify.served.client import base_url

ONE = [Prompt("capital", "What is the capital of Australia?", max_tokens=7)]


def taken(answers: Any, prompts: list[Prompt] = ONE, **options: Any) -> Any:
    with serving(answers) as (url, asked):
        return capture(url, prompts, suite="own", **options), asked


def test_a_server_that_tells_everything() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        reply = chat_reply(body, token_ids=[5, 6, 7])
        reply["choices"][0]["message"]["reasoning_content"] = "Hm."
        return 200, reply

    found, asked = taken(answers)
    (answer,) = found.answers
    assert (found.model, found.api, found.suite) == ("tiny", "chat", "own")
    assert (answer.text, answer.reasoning, answer.finish) == ("Canberra.", "Hm.", "stop")
    assert [(t.id, t.text, t.logprob) for t in answer.tokens] == [(5, "Can", -0.1), (6, "berra", -0.1), (7, ".", -0.1)]
    assert [c.text for c in answer.tokens[0].top] == ["Can", "Syd"]  # likeliest first
    assert (answer.prompt_tokens, answer.completion_tokens, answer.with_ids) == (9, 3, True)
    ((path, body),) = asked
    assert path == "/v1/chat/completions"
    assert body["temperature"] == 0 and body["max_tokens"] == 7 and body["top_logprobs"] == 5
    assert body["messages"] == [{"role": "user", "content": ONE[0].text}]


def test_a_server_that_refuses_the_extras_is_asked_without_from_then_on() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        if "return_token_ids" in body or "logprobs" in body:
            return refuses("unknown field")
        return 200, chat_reply(body)

    found, asked = taken(answers, [*ONE, Prompt("second", "And of Austria?")])
    assert [a.text for a in found.answers] == ["Canberra."] * 2 and not found.answers[0].tokens
    assert len(asked) == 4  # three for the first prompt, one for the second


def test_a_server_without_chat_is_asked_for_completions() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        if path != "/v1/completions":
            return refuses("no chat template", 400)
        top = [{"A": -0.5, "C": -0.9}, None]
        logprobs = {"tokens": ["A", "B"], "token_logprobs": [-0.5, None], "top_logprobs": top}
        return 200, {"choices": [{"text": "AB", "finish_reason": "length", "logprobs": logprobs}]}

    found, asked = taken(answers)
    assert found.api == "completions" and asked[-1][1]["prompt"] == ONE[0].text
    first, second = found.answers[0].tokens
    assert [(c.text, c.logprob) for c in first.top] == [("A", -0.5), ("C", -0.9)]
    assert second.logprob is None and second.top == []


def test_parts_of_characters_are_told_by_their_bytes() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        reply = chat_reply(body)
        content = reply["choices"][0]["logprobs"]["content"]
        content[0] |= {"token": "\ufffd", "bytes": [0xE6]}
        content[0]["top_logprobs"] = [{"token": "\ufffd", "bytes": [0xE6], "logprob": -0.1},
                                      {"token": "\ufffd", "bytes": [0xE5], "logprob": -2.0}]  # fmt: skip
        content[1] |= {"token": "\ufffd", "bytes": list("\ufffd".encode())}  # all that vLLM knows
        return 200, reply

    (answer,) = taken(answers)[0].answers
    assert answer.tokens[0].text == "\\xe6" and [c.text for c in answer.tokens[0].top] == ["\\xe6", "\\xe5"]
    assert answer.tokens[1].text == "\ufffd"


def test_a_character_of_several_tokens_has_the_id_of_none() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        reply = chat_reply(body)
        content = reply["choices"][0]["logprobs"]["content"]
        for number, entry in enumerate(content):
            entry |= {"id": number}
            entry["top_logprobs"] = [{"id": number, "token": entry["token"], "logprob": -0.1}]
        # as llama.cpp's server tells an emoji of four tokens: the last one's id and candidates
        content[1] |= {"id": 230, "token": "👌", "bytes": list("👌".encode())}
        content[1]["top_logprobs"] = [{"id": 230, "token": "\ufffd", "bytes": [0x8C], "logprob": -1.7}]
        return 200, reply

    (answer,) = taken(answers)[0].answers
    assert [(t.text, t.id, len(t.top)) for t in answer.tokens] == [("Can", 0, 1), ("👌", None, 0), (".", 2, 1)]


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_a_logprob_that_is_no_number_is_no_answer(number: str) -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        return 200, json.dumps(chat_reply(body)).replace("-3.0", number)

    with pytest.raises(OddrankError, match=r"a logprob of (nan|-inf)"):
        taken(answers)


def test_ids_without_logprobs() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        return 200, chat_reply({}, token_ids=[5, 6, 7])

    (answer,) = taken(answers)[0].answers
    assert [t.id for t in answer.tokens] == [5, 6, 7] and answer.with_ids


def test_ids_that_are_not_one_a_token_are_left_out() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        return 200, chat_reply(body, token_ids=[5, 6, 7, 2])

    (answer,) = taken(answers)[0].answers
    assert len(answer.tokens) == 3 and not answer.with_ids


def test_later_prompts_that_fail_are_kept_as_errors() -> None:
    def answers(path: str, body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        if text == "long":
            return refuses("too long")
        if text == "crash":
            return 500, "boom"
        if text == "odd":
            return 200, {"choices": []}
        return 200, chat_reply(body)

    prompts = [*ONE, Prompt("a", "long"), Prompt("b", "crash"), Prompt("c", "odd")]
    found, _ = taken(answers, prompts, concurrency=3)
    errors = [a.error for a in found.answers]
    assert errors[0] == "" and "400, too long" in errors[1] and "500, boom" in errors[2]
    assert "not an OpenAI" in errors[3]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (lambda p, b: refuses("no such thing"), "refuses the first prompt, capital: chat: 400, no such thing"),
        (lambda p, b: (500, "broken"), "500, broken"),
        (lambda p, b: (200, "<html>"), "not an OpenAI completion"),
        (lambda p, b: (200, {"choices": [{"logprobs": {"content": [{"token": "A"}]}}]}), "not an OpenAI completion"),
    ],
)
def test_a_first_prompt_that_fails(answers: Any, said: str) -> None:
    with pytest.raises(OddrankError, match=said):
        taken(answers)


def test_what_is_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code, _, err = run(capsys, "capture", "http://127.0.0.1:1", "-o", out)
    assert code == 2 and "does not answer" in err and not out.exists()
    code, _, err = run(capsys, "capture", "ftp://x", "-o", out)
    assert code == 2 and "is not the URL of a server" in err
    code, _, err = run(capsys, "capture", "http://127.0.0.1:1", "-o", tmp_path / "none" / "x.json")
    assert code == 2 and "there is no directory" in err
    with serving(lambda p, b: (200, {}), models="<html>") as (url, _):
        code, _, err = run(capsys, "capture", url, "-o", out)
        assert code == 2 and "no JSON" in err
    with serving(lambda p, b: (200, {}), models={"data": []}) as (url, _):
        code, _, err = run(capsys, "capture", url, "-o", out)
        assert code == 2 and "lists no model" in err


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("h:8000/", "http://h:8000/v1"),
        ("https://h/api/v1/", "https://h/api/v1"),
        ("http://h:1/v1/chat/completions", "http://h:1/v1"),
        ("http://user:secret@h:1", "http://h:1/v1"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_urls(given: str, base: str) -> None:
    assert base_url(given) == base


def test_the_command_writes_what_compare_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    with serving(lambda p, b: (200, chat_reply(b))) as (url, asked):
        code, said, err = run(capsys, "capture", url, "-o", out, "--concurrency", 4, "--api-key", "k")
        assert code == 0, err
    assert "10 answers of tiny, chat, with logprobs" in said
    found = read_capture(out)
    assert [a.prompt for a in found.answers] == suite("short") and len(asked) == 10
    code, said, _ = run(capsys, "compare", out, out)
    assert code == 0 and "10 identical" in said


def test_suites(tmp_path: Path) -> None:
    assert len(suite("short")) == 10 and [p.max_tokens for p in suite("long")] == [512] * 5
    lines = tmp_path / "own.txt"
    lines.write_text("One\n\nTwo\n")
    assert [(p.name, p.text) for p in suite(str(lines))] == [("line 1", "One"), ("line 3", "Two")]
    objects = tmp_path / "own.jsonl"
    entries = [{"prompt": "One", "max_tokens": 3}, {"messages": [{"role": "user", "content": "x"}], "name": "m"}]
    objects.write_text("\n".join(map(json.dumps, entries)))
    first, second = suite(str(objects))
    assert (first.name, first.max_tokens) == ("prompt 1", 3) and second.messages and second.name == "m"
    whole = tmp_path / "own.json"
    for text, said in [
        ("[]", "has no prompts"),
        ('[{"prompt": "a", "messages": []}]', "either"),
        ("[{}]", "either"),
        ('[{"prompt": "a", "max_tokens": 0}]', "at least 1"),
        ('[{"prompt": "a", "temperature": 1}]', "unknown field"),
        ('[{"prompt": "a", "name": "x"}, {"prompt": "b", "name": "x"}]', "more than one"),
        ("{", "A suite is"),
    ]:
        whole.write_text(text)
        with pytest.raises(OddrankError, match=said):
            suite(str(whole))
    with pytest.raises(OddrankError, match="no suite"):
        suite("shorter")


def test_files_that_are_no_captures(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(OddrankError, match="No such file"):
        read_capture(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(OddrankError, match="is no capture"):
        read_capture(path)
    path.write_text(json.dumps({"format": "oddrank-capture-9", "url": "", "model": "", "api": "", "suite": "",
                                "made": "", "answers": []}))  # fmt: skip
    with pytest.raises(OddrankError, match="oddrank-capture-9"):
        read_capture(path)
