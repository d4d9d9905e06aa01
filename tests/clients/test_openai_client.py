"""The openai package asks SmolLM2 on two unequal ranks; transformers knows what it must be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
import torch

from clients.conftest import PREFILL
from clients.served_models import Reference, chat_ids
from clients.served_process import KEY, Serving

pytestmark = pytest.mark.demo

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The capital of France is"
CHAT: Any = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Name three planets."}]
TOLERANCE = 2e-4
"""Nats between two fp32 computations of 30 layers that add in another order; 1e-5 is what is seen."""


@pytest.fixture(scope="module")
def client(smollm2: dict[int, Serving]) -> openai.OpenAI:
    return smollm2[2].client()


def ids(choice: Any) -> list[int]:
    """oddrank's `return_token_ids`, an extra that the package passes through."""
    return choice.model_extra["token_ids"]  # type: ignore[no-any-return]


IDS = {"return_token_ids": True}


def check_logprobs(lines: torch.Tensor, tokens: Sequence[int], logprobs: Sequence[float | None]) -> None:
    assert logprobs == pytest.approx([float(line[t]) for line, t in zip(lines, tokens, strict=True)], abs=TOLERANCE)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "oddrank"


def test_chat(client: openai.OpenAI, reference: Reference) -> None:
    prompt = chat_ids(reference.tokenizer, CHAT)
    got = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=24, logprobs=True, top_logprobs=3,
        extra_body=IDS,
    )  # fmt: skip
    (choice,) = got.choices
    answer = ids(choice)
    assert answer == reference.greedy(prompt, answer)
    ended = answer[-1] == reference.tokenizer.eos_token_id
    assert (ended or len(answer) == 24) and choice.finish_reason == ("stop" if ended else "length")
    assert choice.message.content == reference.tokenizer.decode(answer, skip_special_tokens=True)
    assert got.usage and (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(prompt), len(answer))
    assert choice.logprobs and choice.logprobs.content
    content = choice.logprobs.content
    lines = reference.after(prompt, answer)
    check_logprobs(lines, answer, [c.logprob for c in content])
    assert b"".join(bytes(c.bytes or []) for c in content).decode() == reference.tokenizer.decode(answer)
    for line, entry in zip(lines, content, strict=True):
        values, tokens = line.topk(3)
        assert [t.token for t in entry.top_logprobs] == [reference.tokenizer.decode([int(t)]) for t in tokens]
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_a_chat_stream(client: openai.OpenAI, reference: Reference) -> None:
    """By the package's own accumulating helper, which checks every chunk."""
    text = ""
    with client.chat.completions.stream(
        model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=24, logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        whole = stream.get_final_completion()
    logprobs = whole.choices[0].logprobs
    assert logprobs and logprobs.content
    prompt = chat_ids(reference.tokenizer, CHAT)
    answer = [reference.tokenizer.convert_tokens_to_ids(_spelt(c.token)) for c in logprobs.content]
    assert answer == reference.greedy(prompt, answer)
    check_logprobs(reference.after(prompt, answer), answer, [c.logprob for c in logprobs.content])
    assert text == whole.choices[0].message.content == reference.tokenizer.decode(answer, skip_special_tokens=True)
    assert whole.usage and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), len(answer))


def _spelt(text: str) -> str:
    """As byte-level BPE's vocabulary has plain text."""
    return text.replace(" ", "\u0120").replace("\n", "\u010a")


def test_usage_comes_last_and_only_when_asked(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 5, "stream": True}
    plain = list(client.completions.create(**asked))
    assert all(chunk.usage is None for chunk in plain) and plain[-1].choices[0].finish_reason == "length"
    *chunks, last = client.completions.create(**asked, stream_options={"include_usage": True})
    assert [c.choices[0].text for c in chunks] == [c.choices[0].text for c in plain] and len(chunks) >= 5
    assert last.choices == [] and last.usage and last.usage.completion_tokens == 5


def test_completions_of_several_prompts(client: openai.OpenAI, reference: Reference) -> None:
    """As text and as token ids; in one request, each with its own answer."""
    texts = [PROMPT, "Once upon a time, there was a little fox who", "2, 4, 6, 8, 10, 12,"]
    tokens = [reference.ids(t) for t in texts]
    prompts: Any = (texts, tokens)
    for prompt in prompts:
        got = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12, extra_body=IDS)
        answers = [ids(c) for c in got.choices]
        assert answers == [reference.greedy(t, a) for t, a in zip(tokens, answers, strict=True)]
        assert [c.text for c in got.choices] == [reference.tokenizer.decode(a) for a in answers]
        assert [len(a) for a in answers] == [12, 12, 12]
    one = client.completions.create(model=MODEL, prompt=tokens[2], temperature=0, max_tokens=12)
    assert one.choices[0].text == got.choices[2].text


def test_n_and_seed(client: openai.OpenAI, reference: Reference) -> None:
    """Choices differ, a seed repeats them, and each token's logprob is the model's own, not the sampler's."""
    asked: Any = {
        "model": MODEL, "prompt": PROMPT, "n": 3, "seed": 11, "temperature": 0.9, "top_p": 0.95, "max_tokens": 12,
        "logprobs": 0, "extra_body": IDS,
    }  # fmt: skip
    first, again = client.completions.create(**asked), client.completions.create(**asked)
    other = client.completions.create(**asked | {"seed": 99})
    answers = [[ids(c) for c in got.choices] for got in (first, again, other)]
    assert answers[0] == answers[1] and len({tuple(a) for a in answers[0] + answers[2]}) == 6
    third = client.completions.create(**asked | {"seed": 13, "n": 1})
    assert ids(third.choices[0]) == answers[0][2], "choice i draws from seed + i"
    for choice in first.choices:
        assert choice.logprobs and choice.logprobs.token_logprobs
        lines = reference.after(reference.ids(PROMPT), ids(choice))
        check_logprobs(lines, ids(choice), choice.logprobs.token_logprobs)


def test_sampling_draws_from_the_models_distribution(client: openai.OpenAI, reference: Reference) -> None:
    """128 first tokens: only what top_k leaves, about as often as transformers' probabilities say."""
    line = reference.logprobs(reference.ids(PROMPT))[-1]
    values, tokens = line.topk(4)
    expected = 128 * (values / 2).softmax(-1)  # temperature 2
    got = client.completions.create(
        model=MODEL, prompt=PROMPT, n=128, seed=1, temperature=2, max_tokens=1, extra_body=IDS | {"top_k": 4}
    )
    drawn = [ids(c)[0] for c in got.choices]
    assert set(drawn) <= set(tokens.tolist())
    counts = torch.tensor([drawn.count(t) for t in tokens.tolist()])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3, "chi squared: p < 0.001 with 3 degrees of freedom"


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client: openai.OpenAI, reference: Reference, stream: bool) -> None:
    prompt = "1, 2, 3, 4,"
    asked: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16}
    whole = client.completions.create(**asked, extra_body=IDS).choices[0]
    assert ids(whole) == reference.greedy(reference.ids(prompt), ids(whole))
    text = whole.text
    stop = text[7:10]  # across tokens
    asked["stop"] = ["never said", stop]
    if stream:
        choices = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    else:
        choices = client.completions.create(**asked).choices
    assert "".join(c.text for c in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    ended = client.completions.create(**asked | {"stop": None}, extra_body={"stop_token_ids": reference.ids(" 6")})
    assert ended.choices[0].finish_reason == "stop" and "6" not in ended.choices[0].text


@pytest.mark.parametrize("generated", [0, 3])
def test_echo_with_the_prompts_logprobs(client: openai.OpenAI, reference: Reference, generated: int) -> None:
    prompt = reference.ids("The quick brown fox jumps over the lazy dog. naïve 世")
    got = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=generated, temperature=0, extra_body=IDS
    )
    (choice,) = got.choices
    assert len(ids(choice)) == generated and choice.model_extra["prompt_token_ids"] == prompt
    whole = [*prompt, *ids(choice)]
    assert choice.text == reference.tokenizer.decode(whole)
    told = choice.logprobs
    assert told and told.token_logprobs and told.top_logprobs and told.text_offset and told.tokens
    lines = reference.after(whole[:1], whole[1:])
    assert told.token_logprobs[0] is None
    check_logprobs(lines, whole[1:], told.token_logprobs[1:])
    assert ids(choice) == lines.argmax(-1).tolist()[len(prompt) - 1 :]
    best = lines.max(-1).values.tolist()
    assert [max(top.values()) for top in told.top_logprobs[1:]] == pytest.approx(best, abs=TOLERANCE)
    assert len(told.tokens) == len(told.text_offset) == len(whole)


def test_logit_bias(client: openai.OpenAI, reference: Reference) -> None:
    likeliest = int(reference.logprobs(reference.ids(PROMPT))[-1].argmax())
    (wanted,) = reference.ids(" Rome")
    got = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=1, extra_body=IDS,
        logit_bias={str(likeliest): -100, str(wanted): 100},
    )  # fmt: skip
    assert ids(got.choices[0]) == [wanted]


def test_errors_are_those_of_the_package(client: openai.OpenAI, smollm2: dict[int, Serving]) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT}
    for changes, said in (
        ({"max_tokens": 600}, "512 tokens together"),
        ({"prompt": "word " * 600}, "512 tokens together"),
        ({"prompt": [49152]}, "beyond the model's vocabulary"),
        ({"presence_penalty": 1.0}, "penalties are not supported"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"repetition_penalty": 1.2}}, "repetition_penalty"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=said) as caught:
                client.completions.create(**asked | changes, stream=stream)
            assert caught.value.status_code == 400 and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="no model") as missing:
        client.chat.completions.create(model="gpt-none", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    for key in ("sk-wrong", KEY + "x"):
        with pytest.raises(openai.AuthenticationError, match="API key"):
            smollm2[2].client(key).completions.create(**asked)
    assert httpx.post(f"{smollm2[2].url}/v1/completions", json=asked).status_code == 401
    assert client.completions.create(**asked, max_tokens=1).choices, "and it goes on"


def test_null_is_left_out(client: openai.OpenAI) -> None:
    """The package sends None as null; so do others for every field."""
    nothing: Any = dict.fromkeys(("n", "stop", "seed", "stream", "top_p", "logit_bias", "presence_penalty", "user"))
    asked: Any = {"model": MODEL, "temperature": 0}
    plain = client.completions.create(**asked, prompt=PROMPT)
    filled = client.completions.create(**asked, **nothing, prompt=PROMPT, echo=None, logprobs=None, max_tokens=None)
    assert filled.choices == plain.choices and len(filled.choices[0].text) > 16
    chat = client.chat.completions.create(
        **asked, **nothing, messages=CHAT, logprobs=None, top_logprobs=None, tools=None, max_completion_tokens=4,
        response_format=None, stream_options=None,
    )  # fmt: skip
    assert chat.choices[0].message.content and chat.choices[0].logprobs is None


def test_tools_are_refused_by_name(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        client.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool])


def test_perplexity_of_a_text(client: openai.OpenAI, reference: Reference) -> None:
    """Longer than what a step takes of a prompt: in pieces."""
    prompt = reference.ids("Plants use sunlight, water and carbon dioxide to make sugar and oxygen. " * 12)
    assert len(prompt) > 2 * PREFILL
    got = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    told = got.choices[0].logprobs
    assert told and told.token_logprobs
    check_logprobs(reference.after(prompt[:1], prompt[1:]), prompt[1:], told.token_logprobs[1:])
