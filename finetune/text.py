"""Numbers with their noun in messages."""

from __future__ import annotations


def counted(number: int | float, noun: str, plural: str | None = None) -> str:
    """`1 row`, `2 rows`, `6,027 rows`.

    Args:
        noun: in the singular.
        plural: if it is not the noun with an s.
    """
    return f"{number:,.0f} {noun if number == 1 else plural or f'{noun}s'}"
