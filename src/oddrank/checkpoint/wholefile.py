"""A small file that is written whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from oddrank.checkpoint.hashedfile import write_error
from oddrank.checkpoint.header import why
from oddrank.errors import OddrankError


def write_whole(path: Path, data: bytes) -> None:
    """The file is there with all of `data`, in place of one that was there before, or nothing has changed.

    A symbolic link is followed; a device or a pipe is written to as it is. OddrankError where it cannot be written.
    """
    if not path.name:
        raise OddrankError(f'"{path}" cannot be written: it names no file.')
    target = Path(os.path.realpath(path))
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        fresh.write_bytes(data)
        os.replace(fresh, target)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        if path.exists() and not path.is_file():  # a device, whose space is no disk's
            raise OddrankError(f"{path} cannot be written: {why(error)}.") from None
        raise write_error(path, error, alone=True) from None
