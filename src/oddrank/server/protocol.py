"""Requests as OpenAI's API has them, with the fields that other servers of open models have added (top_k, min_p, ...).

A field that is not here is refused by name, and so is a value that asks for something that is not done: nothing is
ignored that would change the answer.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MOST_LOGPROBS = 20
MOST_CHOICES, MOST_SEQUENCES = 128, 1024
MOST_STOPS = 16

T = TypeVar("T", bound=BaseModel)

Probability = Annotated[float, Field(ge=0, le=1)]


class ApiError(Exception):
    """An error in OpenAI's shape. kind: its `type`."""

    def __init__(
        self, status: int, message: str, param: str | None = None, kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.kind, self.code = status, message, param, kind, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        """As in OpenAI's API, which many clients fill with null."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}


class StreamOptions(_Model):
    include_usage: bool = False


class ResponseFormat(_Model):
    type: Literal["text"]


class _Asked(_Model):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: Probability | None = Field(None, gt=0)
    top_k: int | None = Field(None, ge=-1)
    min_p: Probability | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=MOST_STOPS)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @field_validator("presence_penalty", "frequency_penalty")
    @classmethod
    def _no_penalties(cls, value: float | None) -> float | None:
        if value:
            raise ValueError("penalties are not supported here; leave it out, or give 0")
        return value

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 1e-3:
            raise ValueError("must be 0 (the likeliest token) or at least 0.001")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        given = [value] if isinstance(value, str) else value or []
        if len(given) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop strings")
        if any(not stop for stop in given):
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not token.isascii() or not token.isdecimal():
                raise ValueError(f'"{token}" is not a token id')
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} is {bias} and must be from -100 to 100")
        return value

    @model_validator(mode="after")
    def _streamed(self) -> _Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens


class CompletionRequest(_Asked):
    """prompt: a text, several, token ids, or several lists of them."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True
    best_of: int | None = None
    suffix: None = None
    max_tokens: int | None = Field(16, ge=0)

    @model_validator(mode="after")
    def _asks(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not supported here: leave it out, or give what n is")
        if not self.prompt and not isinstance(self.prompt, str):
            raise ValueError("prompt is empty")
        if (asked := len(self.prompts()) * self.n) > MOST_SEQUENCES:
            raise ValueError(f"prompt and n ask for {asked} answers, and one request may for {MOST_SEQUENCES}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0 and nothing is echoed, so there is nothing to answer")
        return self

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return list(given)


class TextPart(_Model):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Templates read fields of their own (tool calls, names), so those pass through."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    role: str
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """For a template: the content as one text."""
        found = self.model_dump(exclude_none=True)
        found["content"] = (
            self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        )
        return found


class ChatRequest(_Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True

    @field_validator("tools")
    @classmethod
    def _no_tools(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("tools are not supported here; leave it out")
        return value

    @model_validator(mode="after")
    def _asks(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs: true")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(_Model):
    """prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Model):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def parse(kind: type[T], body: bytes) -> T:
    """ApiError, naming the field, where a body is not such a request."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # of a union's errors the deepest is of the member that was meant
        first = max(error.errors(include_url=False, include_input=False), key=lambda e: len(e["loc"]))
        where = ".".join(str(part) for part in first["loc"] if not _of_union(part))
        if first["type"] == "json_invalid":
            half = _half_character(body)
            if half is not None:
                raise ApiError(
                    400,
                    f"The body has {half}, half of a surrogate pair without its other half, which is no character. "
                    "Leave it out, or send the whole character, as itself or as both halves.",
                ) from None
            raise ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}.") from None
        if first["type"] == "extra_forbidden":
            message = f'"{where}" is not supported by this server, or misspelt; leave it out.'
        elif first["type"] == "value_error":
            message = (
                f"{where}: {first['msg'].removeprefix('Value error, ')}."
                if where
                else (f"{first['msg'].removeprefix('Value error, ')}.")
            )
        else:
            message = f"{where}: {first['msg']}." if where else f"{first['msg']}."
        raise ApiError(400, message, param=where or None) from None


def _half_character(body: bytes) -> str | None:
    r"""The first lone surrogate, as \uXXXX, in JSON that is right but for those."""
    try:
        found = re.search("[\ud800-\udfff]", json.dumps(json.loads(body), ensure_ascii=False))
    except (ValueError, RecursionError):
        return None
    return None if found is None else f"\\u{ord(found[0]):04x}"


def _of_union(part: int | str) -> bool:
    """Whether a part of an error's place names a member of a union, which means nothing to a client."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)
