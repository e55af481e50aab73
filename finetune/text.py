"""Numbers in messages: with their noun, as a duration."""

from __future__ import annotations


def counted(number: int | float, noun: str, plural: str | None = None) -> str:
    """`1 row`, `2 rows`, `6,027 rows`.

    Args:
        noun: in the singular.
        plural: if it is not the noun with an s.
    """
    return f"{number:,.0f} {noun if number == 1 else plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """Seconds with three digits, in us and ms below 0.1 s, in minutes and hours from 600 s on."""
    if 0 < abs(seconds) < 1e-4:
        return f"{1e6 * seconds:.3g} us"
    if abs(seconds) < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    if abs(seconds) < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"
