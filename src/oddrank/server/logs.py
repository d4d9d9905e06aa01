"""A line a request, for people or as JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

log = logging.getLogger("oddrank.server")


def request_line(fields: dict[str, Any]) -> None:
    """Log that a request is over. fields: what is known of it; None is left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    log.info("request", extra={"fields": known})


class PlainFormatter(logging.Formatter):
    """2026-11-30T12:00:00 POST /v1/completions 200 prompt_tokens=5 ..."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        fields = getattr(record, "fields", None)
        if fields is None:
            return f"{when} {super().format(record)}"
        head = " ".join(str(fields[name]) for name in ("method", "path", "status") if name in fields)
        rest = " ".join(f"{k}={_plain(v)}" for k, v in fields.items() if k not in ("method", "path", "status"))
        return f"{when} {head} {rest}".rstrip()


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(said, enc_hook=str).decode()


def set_up(as_json: bool) -> None:
    """The server's own lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text else text
