"""Ranks that say what a test wants, for the server's side of things; a byte-level tokenizer to go with them."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oddrank.errors import OddrankError
from oddrank.runtime.serving.messages import Cancel, Chosen, Failed, Ready, Scored, Stats, Stop, Submit, Update

END = 256
"""<|end|>"""
VOCAB = 259
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token a byte, in the order of byte-level BPE's alphabet, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t) for t in ("<|end|>", "<|user|>", "<|assistant|>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", chat_template=template)


class FakeRanks:
    """`says` gives the tokens of a request; each is told in an update of its own. A token None is never told: the
    request hangs. An exception ends the ranks."""

    def __init__(self, says: Callable[[Submit], list[int | None] | str | Exception], load: bool = True) -> None:
        self.size, self.says, self.loaded = 1, says, load
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.submitted: list[Submit] = []
        self.cancelled: list[int] = []
        self.closed = False
        self.failure: OddrankError | None = None
        if load:
            self.load()

    def load(self) -> None:
        self.inbox.put(Ready(10, 16, 1000, 1000))

    def die(self, why: str = "Rank 1 of 2 (pid 7) was killed by SIGKILL.") -> None:
        self.failure = OddrankError(why)
        self.inbox.put(self.failure)

    def send(self, message: Any, rank: int | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        if isinstance(message, Cancel):
            self.cancelled.append(message.id)
        elif isinstance(message, Submit):
            self.submitted.append(message)
            self._answer(message)
        else:
            assert isinstance(message, Stop)

    def _answer(self, asked: Submit) -> None:
        said = self.says(asked)
        stats = Stats(0, 1, 10, 3, 0, 0.01, 1, 0, len(asked.tokens), 0)
        if isinstance(said, Exception):
            self.die(str(said))
            return
        if isinstance(said, str):
            self.inbox.put(Update([], [], [Failed(asked.id, said)], stats))
            return
        if asked.prompt_top is not None:
            known = asked.tokens[1:]
            ends = "" if asked.sampling.max_tokens else "length"
            half = len(known) // 2
            for start, part, end in ((1, known[:half], ""), (1 + half, known[half:], ends)):
                logprobs = [-1.0 - t / 100 for t in part]
                tops = [[(t, -1.0 - t / 100), (t + 1, -7.0)][: asked.prompt_top or 0] for t in part]
                self.inbox.put(Update([], [Scored(asked.id, start, logprobs, tops, end)], [], stats))
        for n, token in enumerate(said[: asked.sampling.max_tokens]):
            if token is None:
                return
            ends_text = token == END
            finish = "stop" if ends_text else "length" if n + 1 == asked.sampling.max_tokens else ""
            logprob = None if asked.top is None else -math.log(2)
            top = [(token, -math.log(2)), (0, -3.0), (1, -4.0)][: asked.top or 0]
            self.inbox.put(Update([Chosen(asked.id, token, finish, ends_text, logprob, top, 4)], [], [], stats))
            if finish:
                return

    def receive(self, timeout: float | None = None) -> tuple[int, Any]:
        message = self.inbox.get(timeout=timeout)
        if isinstance(message, OddrankError):
            self.inbox.put(message)
            raise message
        return 0, message

    def close(self) -> None:
        self.closed = True
        self.inbox.put(OddrankError("closed"))
