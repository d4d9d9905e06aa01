"""The two ways oddrank says no.

An error is one paragraph: what is wrong, where, the numbers, and what would work instead. The command line
prints it and leaves with the class's exit code; nothing else is ever printed for bad input.
"""


class OddrankError(Exception):
    """Bad usage or bad input: an unknown family, a corrupt header, a plan that cannot be proven."""

    exit_code = 2

    def __init__(self, message: str, short: str | None = None) -> None:
        """`short`: the same in a few words, for a cell of a table."""
        super().__init__(printable(message))
        self.short = printable(short or message)


def printable(message: str) -> str:
    """With escapes for what no terminal should be sent: names in a message may come from a checkpoint."""
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


class CheckFailedError(OddrankError):
    """The input was good and a check of it failed: logits differ, a tensor is unmatched."""

    exit_code = 1
