"""Standard output: any text, no markup, colours on request, a reader that disconnects."""

from __future__ import annotations

import io
import os
import sys

import pytest

from entrenar_py.shared.page import console
from entrenar_py.shared.untrusted import printing


def printed(text: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    console.standard_output(color=False).print(text)
    return output.getvalue().decode(encoding)


def test_text_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Markup and emoji codes have no effect."""
    text = "[red]x[/] :smile: [/]\n"
    assert printed(text.rstrip(), "utf-8", monkeypatch) == text


def test_what_the_encoding_lacks_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII terminal shows every name."""
    assert printed("loss α", "ascii", monkeypatch) == "loss \\u03b1\n"


def test_a_stream_that_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding program may have replaced standard output by any object."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console.standard_output(color=True).print("x")
    assert stream.getvalue() == "x\n"


def test_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no exception and no exit; the rest of the output is discarded."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output = console.standard_output(color=False)
        output.print("lost")
        output.print("lost too")
        print("not even here", flush=True)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_start(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `>&-` in a shell nothing is printed, and nothing counts as lost."""
    monkeypatch.setattr(sys, stream, None)
    printing.say("x")
    printing.warn("x")
    console.standard_output(color=False).print("x")
    assert not printing.lost()
