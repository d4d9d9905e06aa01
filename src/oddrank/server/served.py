"""The model behind an endpoint: its names, its tokenizer, its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from oddrank.server.chat import Renderer
from oddrank.server.protocol import ApiError
from oddrank.server.vocabulary import Vocabulary
from oddrank.words import counted


@dataclass(frozen=True)
class Defaults:
    """What a request that does not say samples with: the model's generation_config.json, or OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Defaults:
        """From generation_config.json. do_sample false there says greedily, as it does to transformers."""

        def number(name: str, otherwise: float) -> float:
            value = config.get(name)
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise

        if config.get("do_sample") is False:
            return cls(temperature=0.0)
        top_k = int(number("top_k", 0))
        return cls(
            min(max(number("temperature", 1.0), 0.0), 100.0), min(max(number("top_p", 1.0), 1e-6), 1.0), max(top_k, 0),
            min(max(number("min_p", 0.0), 0.0), 1.0),
        )  # fmt: skip


@dataclass(frozen=True)
class Served:
    """names: that requests may give, the first is what answers say. vocab: token ids that the model knows. max_length:
    tokens of a prompt and its answer together."""

    names: tuple[str, ...]
    tokenizer: Any
    vocab: int
    max_length: int
    defaults: Defaults = Defaults()
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", Vocabulary(self.tokenizer, self.vocab))
        object.__setattr__(self, "renderer", Renderer(self.tokenizer))

    vocabulary: Vocabulary = field(init=False)
    renderer: Renderer = field(init=False)

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """ApiError where a request is for another model."""
        if name is not None and name not in self.names:
            raise ApiError(
                404, f'There is no model "{name}" here; this server has {", ".join(self.names)}.', "model",
                "not_found_error", "model_not_found",
            )  # fmt: skip

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special).input_ids)

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """ApiError for ids that the model does not know."""
        wrong = next((t for t in tokens if not 0 <= t < self.vocab), None)
        if wrong is not None:
            raise ApiError(400, f"Token {wrong} is beyond the model's vocabulary, 0 to {self.vocab - 1}.", param)

    def room(self, prompt: int, wanted: int | None) -> int:
        """Tokens that may be generated. ApiError where prompt and answer together are too long."""
        left = self.max_length - prompt
        if wanted is None and left >= 1:
            return left
        if left < (wanted if wanted is not None else 1):
            asked = f"{counted(prompt, 'token')} of prompt" + (f" and {wanted} of answer" if wanted is not None else "")
            raise ApiError(
                400, f"The model takes {self.max_length} tokens together, and these are {asked}. Shorten the prompt"
                + (", or ask for fewer." if wanted is not None else "."), code="context_length_exceeded",
            )  # fmt: skip
        assert wanted is not None
        return wanted

    def card(self, name: str) -> dict[str, Any]:
        """A model as /v1/models lists it."""
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "oddrank", "root": self.name,
            "max_model_len": self.max_length,
        }  # fmt: skip
