"""An answer's choices: events of the ranks to text, reasoning and logprobs, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from oddrank.runtime.serving.messages import Candidates, Scored
from oddrank.runtime.text import TextStream
from oddrank.server.backend import Event
from oddrank.server.chat import ReasoningSplit
from oddrank.server.vocabulary import Vocabulary


class Told(NamedTuple):
    """A token of an answer, or of an echoed prompt. logprob: None where none was asked for, and of a prompt's first."""

    token: int
    logprob: float | None
    top: Candidates


class Delta(NamedTuple):
    """What came to a choice. finish: "stop", "length", or "" where more will come. echoed: whether the tokens told are
    the prompt's."""

    reasoning: str = ""
    text: str = ""
    told: tuple[Told, ...] = ()
    finish: str = ""
    echoed: bool = False


class Choice:
    """One sequence. echo: the prompt's tokens where they are part of the answer. split: where reasoning is told
    apart."""

    def __init__(self, text: TextStream, split: ReasoningSplit | None = None, echo: Sequence[int] = ()) -> None:
        self._text, self._split, self._echo = text, split, list(echo)
        self.tokens = 0
        """Generated, the one that ended it included."""
        self.reused = 0

    def take(self, event: Event) -> Delta:
        if isinstance(event, Scored):
            return self._scored(event)
        self.tokens += 1
        self.reused = max(self.reused, event.reused)
        said = "" if event.ends_text else self._text.add(event.token)
        if event.finish:
            said += self._text.end()
        finish = "stop" if self._text.stopped else event.finish
        reasoning, answer = ("", said) if self._split is None else self._split.add(said)
        if finish and self._split is not None:
            more = self._split.end()
            reasoning, answer = reasoning + more[0], answer + more[1]
        return Delta(reasoning, answer, (Told(event.token, event.logprob, event.top),), finish)

    def _scored(self, event: Scored) -> Delta:
        first = () if event.start > 1 else (Told(self._echo[0], None, []),)
        rest = tuple(
            Told(self._echo[event.start + i], logprob, top)
            for i, (logprob, top) in enumerate(zip(event.logprobs, event.tops, strict=True))
        )
        return Delta(told=first + rest, finish=event.finish, echoed=True)


async def together(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[tuple[int, Any]]:
    """Everything of several streams as it comes, with the number of its stream. One that raises ends all; whoever stops
    asking closes them all."""
    if len(streams) == 1:  # needs nobody to bring it together
        (only,) = streams
        try:
            async for item in only:
                yield 0, item
        finally:
            await only.aclose()  # type: ignore[attr-defined]
        return
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue()
    end = object()

    async def feed(number: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((number, item, None))
            queue.put_nowait((number, end, None))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            queue.put_nowait((number, end, error))
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    tasks = [asyncio.create_task(feed(number, stream)) for number, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            if item is end:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chat_logprobs(told: Sequence[Told], vocabulary: Vocabulary, top: int) -> list[dict[str, Any]]:
    """As chat completions have them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        said = vocabulary[token]
        return {"token": said.text, "logprob": logprob, "bytes": list(said.data)}

    return [
        one(t.token, t.logprob if t.logprob is not None else 0.0)
        | {"top_logprobs": [one(*candidate) for candidate in t.top[:top]]}
        for t in told
    ]


class CompletionLogprobs:
    """As completions have them: parallel lists, offsets into the text."""

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary, self._top, self._offset = vocabulary, top, 0

    def add(self, told: Sequence[Told]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for t in told:
            said = self._vocabulary[t.token].text
            found["tokens"].append(said)
            found["token_logprobs"].append(t.logprob)
            found["top_logprobs"].append(self._candidates(t))
            found["text_offset"].append(self._offset)
            self._offset += len(said)
        return found

    def _candidates(self, told: Told) -> dict[str, float] | None:
        """The likeliest, and the token itself. Of two tokens of one text the likelier stands."""
        if told.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in told.top[: self._top]:
            found.setdefault(self._vocabulary[token].text, logprob)
        found.setdefault(self._vocabulary[told.token].text, told.logprob)
        return found
