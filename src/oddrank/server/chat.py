"""Messages to a prompt by the model's own template, and the reasoning part of an answer apart from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oddrank.server.protocol import ApiError, Message

OPEN, CLOSE = "<think>", "</think>"
"""What Qwen's models, and those that follow them, put around their reasoning."""


class Renderer:
    """tokenizer: of the model, with a chat template or without."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def render(
        self, messages: Sequence[Message], *, generate: bool = True, options: dict[str, Any] | None = None
    ) -> str:
        """The prompt's text. ApiError where there is no template, or where it refuses the messages.

        generate: whether the model's turn is begun. options: variables of the template's own (enable_thinking).
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(
                400, "The model has no chat template, so it takes no messages; ask /v1/completions.", "messages"
            )
        reserved = {"tokenize", "add_generation_prompt", "conversation", "chat_template"} & set(options or {})
        if reserved:
            raise ApiError(400, f"chat_template_kwargs cannot set {min(reserved)}.", "chat_template_kwargs")
        try:
            text = self.tokenizer.apply_chat_template(
                [message.plain() for message in messages],
                tokenize=False,
                add_generation_prompt=generate,
                **(options or {}),
            )
        except Exception as error:  # a template runs code of its own and raises what it likes
            said = " ".join(str(error).split()) or type(error).__name__
            raise ApiError(400, f"The model's chat template refuses these messages: {said[:300]}", "messages") from None
        return str(text)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends inside of the model's reasoning, as templates that begin it for the model have it."""
        return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


class ReasoningSplit:
    """Splits text into reasoning and answer as it comes. inside: whether the prompt opened the reasoning already."""

    def __init__(self, inside: bool) -> None:
        self._inside, self._begun, self._held = inside, inside, ""
        self._strip = False  # line ends between the closing mark and the answer

    def add(self, text: str) -> tuple[str, str]:
        """(what comes to the reasoning, what comes to the answer)."""
        reasoning, answer = "", ""
        text, self._held = self._held + text, ""
        if not self._begun:
            lead = text.lstrip()
            if OPEN.startswith(lead) and len(lead) < len(OPEN):  # "" too: not known yet
                self._held = text
                return "", ""
            self._begun = True
            if lead.startswith(OPEN):
                self._inside, text = True, lead[len(OPEN) :]
        if self._inside:
            at = text.find(CLOSE)
            if at < 0:
                keep = _tail(text)
                self._held = text[len(text) - keep :]
                return text[: len(text) - keep], ""
            reasoning, answer = text[:at], text[at + len(CLOSE) :].lstrip("\n")
            self._inside = False
            self._strip = not answer
            return reasoning, answer
        if self._strip:
            text = text.lstrip("\n")
            self._strip = not text
        return reasoning, text

    def end(self) -> tuple[str, str]:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return (held, "") if self._inside else ("", held)


def _tail(text: str) -> int:
    """How much of the end may be the beginning of the closing mark."""
    return next((n for n in range(min(len(text), len(CLOSE) - 1), 0, -1) if text.endswith(CLOSE[:n])), 0)
