r"""Escaping of text from outside, so that each character is visible and has no effect when shown.

Contracts, ledgers, paths, devices and peers contain texts that others wrote. Characters that
control a terminal, that are invisible, that reverse the direction of text or that are invalid are
written as escapes (`\x1b`, `\u202e`). All code that prints or writes such a text escapes it here;
no other module knows the set of characters.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

# Characters that are invisible or that have an effect when they are shown:
#   control characters (C0 except tab and line feed, DEL, C1), soft hyphens and other characters of
#   no width (joiners, fillers, the byte order mark), characters that change the direction of text,
#   line and paragraph separators, lone surrogates, tags, the variation selectors that no emoji
#   needs, and Unicode's noncharacters.
# All characters that XML 1.0 forbids are among these.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufdd0-\ufdef\ufeff\uffa0"
    "\ufff0-\ufffb\ufffe\uffff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_NO_CHARACTERS = "".join(
    chr(plane << 16 | end) for plane in range(1, 17) for end in (0xFFFE, 0xFFFF)
)
_UNSEEN = re.compile(f"[{_HIDDEN}{_NO_CHARACTERS}]")
_MARK_CHARS_MAX = len(" [... 1,000,000,000 characters left out ...] ")
# GitHub's runners execute a line that begins with `::`, and `##[` anywhere in a line.
_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\[)")


def text(given: object) -> str:
    r"""Return `given` as text with every invisible character escaped, except tabs and line ends."""
    return _UNSEEN.sub(_spelled, str(given))


def line(given: object) -> str:
    """Return `given` on one line, with single spaces, and no command for GitHub's runners."""
    return _COMMAND.sub(_disarmed, _joined(given))


def exact(given: object) -> str:
    """Return `given` on one line with all its spaces; tabs and line ends are escaped."""
    shown = text(given).replace("\t", r"\t").replace("\n", r"\n")
    return _COMMAND.sub(_disarmed, shown)


def shortened(long_text: str, *, chars_max: int = 400) -> str:
    """Return `long_text`, or its beginning and its end if it is longer than `chars_max`.

    A mark between the two says how many characters were left out.
    """
    if len(long_text) <= chars_max:
        return long_text
    room = chars_max - _MARK_CHARS_MAX
    head, tail = long_text[: room * 2 // 3], long_text[len(long_text) - room // 3 :]
    left_out = len(long_text) - len(head) - len(tail)
    return f"{head} [... {left_out:,} characters left out ...] {tail}"


def html(given: object) -> str:
    """Return `given` on one line with all its spaces, escaped for HTML."""
    return escape(exact(given))


def dump_json(record: Any, *, indent: int | None = None) -> str:
    """Return `record` as strict JSON text with hidden characters as JSON escapes.

    JSON readers restore these characters. Lone surrogates, which many readers refuse, are spelled
    out as in `text`. Raises ValueError for numbers that are not finite.
    """
    dumped = json.dumps(record, indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNSEEN.sub(_escaped, dumped)


def _joined(given: object) -> str:
    return " ".join(text(given).split())


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _disarmed(found: re.Match[str]) -> str:
    return rf"{found[1] or ''}\x{ord(found[0][-1]):02x}"


def _escaped(match: re.Match[str]) -> str:
    """Return the JSON escape of a hidden character, which in JSON occurs only within strings."""
    code = ord(match[0])
    if 0xD800 <= code <= 0xDFFF:
        return rf"\\u{code:04x}"
    units = match[0].encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
