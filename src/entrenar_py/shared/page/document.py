"""The frame of a self-contained HTML page: its style, and a policy without scripts and requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from entrenar_py.shared.untrusted import escaping

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
END = "</body>\n</html>"


def begin(title: str) -> Iterator[str]:
    """Yield the lines of a page called `title`, which is escaped here, up to its body."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield f"<title>{escaping.html(title)}</title>"
    yield f"<style>\n{STYLE}</style>\n</head>\n<body>"
