"""Small checkpoints with a tokenizer, and what transformers says of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from server.fake_ranks import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from oddrank.synth import describe_release, write_checkpoint

VOCAB = 259
"""Of the byte-level tokenizer: a prime times 7, so that no small number of ranks divides it but 7."""


def write_synthetic(family: str, format_: str, out: Path) -> Path:
    """A tiny model of `oddrank synth`, and a tokenizer that knows every one of its tokens."""
    write_checkpoint(describe_release(family, format_, size="tiny", vocab=VOCAB), out)
    tokenizer().save_pretrained(out)
    return out


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """A conversation by the tokenizer's own template, the model's turn begun."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


class Reference:
    """transformers' fp32 model of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """log p(next token | tokens so far), [tokens, vocab]."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = torch.log_softmax(self._model(torch.tensor([list(tokens)])).logits[0].double(), -1)
        return self._known[key]

    def after(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """log p(token | prompt, the answer up to there), [len(answer), vocab]."""
        return self.logprobs([*prompt, *answer])[len(prompt) - 1 : -1]

    def greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The likeliest token at each place of the answer. It is the answer exactly where that is the greedy one: each
        place's token is chosen after all those before it."""
        return self.after(prompt, answer).argmax(-1).tolist()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def continued(self, prompt: Sequence[int], count: int) -> str:
        """The greedy text after a prompt, by transformers' own loop."""
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        whole = self._model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return str(self.tokenizer.decode(whole[0, len(prompt) :], skip_special_tokens=True))
