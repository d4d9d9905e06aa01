"""Which MODEL is a model of the Hugging Face hub.

Everything that takes a model takes a directory or an id, and finds out here. huggingface_hub is imported only where
there is an id: a model directory does without.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from oddrank.checkpoint.directory import Directory
from oddrank.checkpoint.header import show
from oddrank.errors import OddrankError

if TYPE_CHECKING:
    from oddrank.checkpoint.repository import Repository

_NAME = r"\w(?:[\w.-]{0,94}\w)?"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([^\s@]+))?", re.ASCII)
_URL = re.compile(rf"https?://[^/]+/({_NAME}/{_NAME})(?:/.*)?", re.ASCII)


class HubModel(msgspec.Struct, frozen=True):
    """A repository of the hub, `owner/name`, and a branch, tag or commit of it."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def hub_model(model: str | os.PathLike[str]) -> HubModel | None:
    """The model of the hub that `model` names: `owner/name` or `owner/name@revision`.

    None where it is a path: whatever exists, is spelled otherwise (./x, /x, x/y/z), or is no string.
    """
    found = _ID.fullmatch(model) if isinstance(model, str) else None
    # nor does huggingface_hub take the last three for an id
    if found is None or "--" in found[1] or ".." in found[1] or found[1].endswith(".git") or os.path.lexists(model):
        return None
    return HubModel(found[1], found[2] or "main")


def find(model: str | os.PathLike[str]) -> Directory | Repository:
    """Where the files of `model` are. A model of the hub whose weights are all in the hub's cache is a directory.

    OddrankError where it is neither.
    """
    named = hub_model(model)
    if named is None:
        url = _URL.fullmatch(model) if isinstance(model, str) else None
        if url is not None and not os.path.lexists(model):
            raise OddrankError(f"{show(str(model))} is a URL. Give the id of the model there: {url[1]}.")
        return Directory(Path(model))
    _check_endpoint(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    from oddrank.checkpoint.repository import open_repository

    return open_repository(named)


def _check_endpoint(endpoint: str) -> None:
    """OddrankError for what is no URL; huggingface_hub cannot even be imported with some of those."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise OddrankError(
            f"HF_ENDPOINT is {show(endpoint)}, which is no URL of a hub as https://huggingface.co is one. Correct it, "
            f"or unset it."
        )
