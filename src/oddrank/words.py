"""How messages say things."""


def counted(count: int, noun: str) -> str:
    """1 near tie, 2 near ties: a count with its noun, given in the singular, of those that take an s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
