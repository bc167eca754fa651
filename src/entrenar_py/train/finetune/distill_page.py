"""The stage `entrenar distill logits` as one self-contained HTML page, in the shards' folder."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

from entrenar_py.shared.page import html_page
from entrenar_py.shared.page.html_page import Line, chart
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.train.distill.producing import Progress
from entrenar_py.train.model.settings import Distillation
from entrenar_py.train.service.figures import duration

FILE = "report.html"


def write(section: Distillation, progress: Progress) -> Path:
    """Write the page, and return its path; warn if it can't be written: the shards are there.

    Processes that share the folder write the same file: it is that of the last one.
    """
    path = section.shards / FILE
    own = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
    try:
        own.write_text("\n".join(_lines(section, progress)) + "\n", encoding="utf-8")
        own.replace(path)
    except OSError as error:
        own.unlink(missing_ok=True)
        printing.warn(f"entrenar: {path}: can't be written ({error.strerror or error})")
    return path


def _lines(section: Distillation, progress: Progress) -> Iterator[str]:
    name = f"logits of {section.teacher.name if section.teacher else 'the teacher'}"
    status, badge = progress.state, "held" if progress.state == "completed" else "inconclusive"
    yield from html_page.begin(f"{name}: {status}")
    mark = f'<span class="verdict {badge}">{status}</span>'
    yield f"<header><h1>{escaping.html(name)} {mark}</h1><dl>"
    for key, value in _told(section, progress):
        yield f"<dt>{escaping.html(key)}</dt><dd>{escaping.html(value)}</dd>"
    yield "</dl></header>"
    made = enumerate(progress.made, start=1)
    paces = tuple((number, one.tokens / one.seconds) for number, one in made)
    if len(paces) > 1:
        line = Line(label="this process", points=paces, colour=0)
        yield '<section><h2>Pace</h2><div class="charts">'
        yield chart("Tokens a second, by shards made here", "tokens/s", [line])
        yield "</div></section>"
    yield html_page.END


def _told(section: Distillation, progress: Progress) -> Iterator[tuple[str, str]]:
    facts = progress.facts
    yield "shards", f"{progress.shards_done:,} of {facts.num_shards:,} in {section.shards}"
    behind = facts.num_shards - progress.shards_done
    yield "behind", f"{behind:,} shards, {progress.rows_left:,} rows of this process's part"
    yield "rows", f"{progress.rows_done:,} of {sum(facts.rows):,}"
    if progress.made:
        yield "pace", f"{progress.tokens_per_s:,.0f} tokens/s of this process"
    if progress.made and progress.left_s:
        yield "left", f"{duration(progress.left_s)} at this pace"
    yield "kept", f"{facts.top_k} of {facts.vocabulary} tokens, {facts.stored}"
    yield "teacher", f"{section.teacher} ({facts.teacher}), weights in {facts.precision}"
    yield "tokenizer", facts.tokenizer
    yield "rows' digest", facts.data
