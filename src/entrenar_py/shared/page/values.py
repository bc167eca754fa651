"""The types of options: each function parses the text of a value, as argparse calls it.

All raise argparse.ArgumentTypeError with the text and the allowed values.
"""

from __future__ import annotations

import argparse


def words(text: str) -> tuple[str, ...]:
    """Return the words of a comma-separated list, at least one."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: use one or more words, with commas between")
    return found


def severities(text: str) -> tuple[str, ...]:
    """Return the severities of a comma-separated list."""
    found = words(text)
    if not set(found) <= {"P0", "P1", "P2"}:
        raise argparse.ArgumentTypeError(f"{text!r}: use P0, P1 or P2, with commas between")
    return found


def natural(text: str, *, least: int = 0) -> int:
    """Return a whole number from `least` to 10^18 - 1."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from {least} to 10^18 - 1")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return the whole numbers, from 1, of a comma-separated list."""
    return tuple(natural(word, least=1) for word in words(text))


def seconds(text: str) -> float:
    """Return a finite number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of seconds > 0")
    return number
