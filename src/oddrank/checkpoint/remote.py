"""Reading files of a hub repository by HTTP: whole ones and ranges, never more than was asked for.

What comes back is data that somebody else wrote, so every length is checked or bounded here; what it means is for the
parsers of files on disk to say. Requests go through huggingface_hub's session: its proxies, certificates, endpoint
(HF_ENDPOINT) and token (HF_TOKEN) hold. No other host is sent the token.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP library that the hub uses

from oddrank import __version__
from oddrank.checkpoint.header import show
from oddrank.checkpoint.hub import HubModel
from oddrank.checkpoint.jsonfile import MAX_JSON
from oddrank.errors import OddrankError

WAITS = (0.5, 2.0)
"""Seconds before a request is tried again that the hub was too busy for."""

_BUSY = (408, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19})")


class Listing(msgspec.Struct, frozen=True):
    """What the hub says of a repository at a revision: its commit and the names of its files."""

    sha: str
    siblings: tuple[Sibling, ...]


class Sibling(msgspec.Struct, frozen=True):
    rfilename: str


class Answer:
    """The beginning of a file, or of a part of one, read as far as is asked for.

    size: bytes of the whole file, as the server has it. url: where it came from in the end. partial: is it the range
    that was asked for; otherwise the server sends the whole file. etag: of this version of the file.
    """

    def __init__(self, response: Any, size: int) -> None:
        self.size = size
        self.url = str(response.url)
        self.partial = response.status_code == 206
        self.etag = response.headers.get("etag")
        self._chunks = response.iter_raw()
        self._rest = b""

    def take(self, count: int) -> bytes:
        """The next `count` bytes, fewer only where the body ends."""
        parts, missing = [], count
        while missing > 0:
            part = self._rest or next(self._chunks, None)
            if part is None:
                break
            parts.append(part[:missing])
            self._rest = part[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)


class Remote:
    """The files of one model of the hub, over HTTP. All errors are OddrankErrors."""

    def __init__(self, model: HubModel) -> None:
        self.model = model
        self._token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()

    def listing(self, revision: str) -> Listing:
        """The commit that `revision` is, and what files it has."""
        url = f"{constants.ENDPOINT}/api/models/{self.model.repo}/revision/{quote(revision, safe='')}"
        try:
            found = msgspec.json.decode(self.whole(url), type=Listing)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._strange(url, f"it is no listing of a model's files ({str(error)[:100]})") from None
        if not re.fullmatch(r"[0-9a-f]{40}", found.sha):
            raise self._strange(url, f"its commit is {show(found.sha)}")
        return found

    def whole(self, url: str) -> bytes:
        """A whole file of at most MAX_JSON bytes."""
        with self._get(url) as response:
            data = Answer(response, 0).take(MAX_JSON + 1)
        if len(data) > MAX_JSON:
            raise OddrankError(f"{_place(url)} has more than the {MAX_JSON} bytes that are read of such a file.")
        return data

    @contextmanager
    def part(self, url: str, start: int, end: int) -> Iterator[Answer]:
        """Bytes [start, end) of a file; all of it where the server knows no ranges, which only start = 0 allows."""
        with self._get(url, f"bytes={start}-{end - 1}") as response:
            answer = Answer(response, self._size(response, start))
            yield answer
            if answer.partial:
                answer.take(end - start)  # a connection is used again where nothing is left on it

    @contextmanager
    def _get(self, url: str, span: str | None = None) -> Iterator[Any]:
        """The answer to a GET, of which only the head has been read. span: the Range header."""
        with self.explained(url), closing(self._answered(url, span)) as response:
            if response.status_code not in (200, 206):
                raise self.refusal(response)
            coded = response.headers.get("content-encoding", "identity")
            if coded != "identity":
                raise self._strange(str(response.url), f"it is compressed ({show(coded)}), which was not asked for")
            yield response

    def _answered(self, url: str, span: str | None) -> Any:
        headers = {"user-agent": f"oddrank/{__version__}", "accept-encoding": "identity"}
        if span is not None:
            headers["range"] = span
        if self._token is not None and url.startswith(f"{constants.ENDPOINT}/"):
            headers["authorization"] = f"Bearer {self._token}"
        for wait in (*WAITS, None):
            session = get_session()
            request = session.build_request("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            response = session.send(request, stream=True, follow_redirects=True)
            if wait is None or response.status_code not in _BUSY:
                break
            response.close()
            time.sleep(wait)
        return response

    def _size(self, response: Any, start: int) -> int:
        """Bytes of the whole file. The storage that was redirected to must agree with the hub."""
        url, headers = str(response.url), response.headers
        if response.status_code == 206:
            told = headers.get("content-range", "")
            found = _RANGE.fullmatch(told)
            if found is None or int(found[1]) != start:
                raise self._strange(url, f"bytes from {start} on were asked for, and it is {show(told)}")
            size = int(found[2])
        else:
            told = headers.get("content-length", "")
            if start or not re.fullmatch(r"\d{1,19}", told):
                raise self._strange(url, "it does not say how long the file is, and is no part of it")
            size = int(told)
        for earlier in response.history:
            linked = earlier.headers.get("x-linked-size")
            if linked is not None and linked != str(size):
                raise self._strange(url, f"the file has {size} bytes there, and {show(linked)} as the hub says")
        return size

    @contextmanager
    def explained(self, url: str) -> Iterator[None]:
        """Errors of the HTTP library as OddrankErrors. url: what was asked for."""
        try:
            yield
        except HTTPError as error:
            response = getattr(error, "response", None)
            if response is not None:
                raise self.refusal(response) from None
            said = " ".join(str(error).split())[:200]
            raise OddrankError(
                f"There is no directory {self.model} here, and asking the Hugging Face hub for it failed: "
                f"{type(error).__name__}{f' ({said})' if said else ''}, {_place(url)}. Check the network, HF_ENDPOINT "
                f"and the proxy, or give a model directory."
            ) from None

    def refusal(self, response: Any) -> OddrankError:
        """What an answer that is none means. Only its head is looked at."""
        model, headers = self.model, response.headers
        code = headers.get("x-error-code")
        status, said = response.status_code, headers.get("x-error-message")
        if code == "GatedRepo":
            return OddrankError(
                f"{model.repo} is gated: its owners give its files to those who have accepted their terms. Accept them "
                f"at {constants.ENDPOINT}/{model.repo}, and set HF_TOKEN to a token of that account, or run `hf auth "
                f"login`."
            )
        if code == "RevisionNotFound":
            return OddrankError(
                f"{model.repo} has no revision {show(model.revision)} on the hub ({constants.ENDPOINT}). Give a "
                f"branch, a tag or a commit of it: {model.repo}@main."
            )
        listed = response.url.path.startswith(urlsplit(constants.ENDPOINT).path + "/api/")
        if code == "RepoNotFound" or (code is None and listed and status in (401, 404)):
            return OddrankError(
                f"There is no directory {model} here, and the hub ({constants.ENDPOINT}) has no model {model.repo} "
                f"that you may read{f': {show(said)}' if said else ''}. Check the spelling; for a private model set "
                f"HF_TOKEN, or run `hf auth login`."
            )
        place = _place(str(response.url))
        return OddrankError(
            f"{place} was asked for {model} and answered {status}{f': {show(said)}' if said else ''}. "
            + ("Try again later." if status in _BUSY else "Check the model's id and what your HF_TOKEN may read.")
        )

    def _strange(self, url: str, what: str) -> OddrankError:
        return OddrankError(
            f"The answer of {_place(url)}, which was asked for {self.model}, cannot be used: {what}. Try again, or "
            f"download the model (hf download {self.model.repo}) and give its directory."
        )


def _place(url: str) -> str:
    """A URL without its query, which may hold a signature."""
    return urlsplit(url)._replace(query="", fragment="").geturl()
