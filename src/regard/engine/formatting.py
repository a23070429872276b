"""Counts, bytes and seconds as text, for printed plans."""

from __future__ import annotations


def number(count: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> number(1, "key"), number(2000, "query", "queries")
    ('1 key', '2,000 queries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def rough(count: float) -> str:
    """A count with three digits.

    >>> rough(1_234_567_890)
    '1.23 billion'
    """
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return str(int(count))


def duration(seconds: float) -> str:
    """Seconds with two digits, or with all digits before the point.

    >>> duration(0.0123), duration(0.123), duration(12.3)
    ('12 ms', '123 ms', '12 s')
    """
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def size(count: float) -> str:
    """Bytes with three digits.

    >>> size(1536), size(17)
    ('1.5 KiB', '17 bytes')
    >>> size(1000 * 1024)
    '1,000 KiB'
    """
    for unit, word in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            number = count / unit
            return f"{number:,.0f} {word}" if number >= 100 else f"{number:.3g} {word}"
    return f"{int(count)} bytes"
