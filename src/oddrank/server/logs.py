"""A line a request, for people or as JSON."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from oddrank.runtime.logs import JsonFormatter

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


@contextmanager
def lines(as_json: bool) -> Iterator[None]:
    """Inside, the server's own lines go to standard error, and what uvicorn warns of; afterwards all is as it was."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    # answers that are cut off at the end have their own line; uvicorn would add a traceback
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)))
    loggers = ((log, logging.INFO), (logging.getLogger("uvicorn"), logging.WARNING))
    before = [(logger.handlers, logger.level, logger.propagate) for logger, _ in loggers]
    for logger, level in loggers:
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for (logger, _), (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text else text
