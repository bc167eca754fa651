"""The page of an anatomy, opened in a browser: what it shows, and that nothing had to be mended."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from entrenar_py.check.anatomy import page, steps, suspects
from tests.check.anatomy.test_steps import CLEARED, backward, call, run, step

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
BROWSER_S = 60.0


class Tags(HTMLParser):
    """The tags of a page in order, and the text of each cell of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self._is_in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
            self._is_in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")
        self._is_in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._is_in_cell:
            self.cells[-1] += data


def opened(path: Path, folder: Path) -> tuple[str, str]:
    """Return the page as a browser has it, and what its console says; skip without a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser is installed, for example chromium-headless-shell by apt-get")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}")
    ended = subprocess.run(
        [browser, *options, "--enable-logging=stderr", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=BROWSER_S,
        check=True,
    )
    said = [line for line in ended.stderr.splitlines() if ":CONSOLE:" in line]
    return ended.stdout, "\n".join(said)


def test_a_browser_shows_each_lane_and_row(tmp_path: Path) -> None:
    """Lanes of both ranks and all rows are there, as written, and the console is silent."""
    events = (call(), backward(1.0), call(), backward(2.0), step(), CLEARED)
    other = (call(), backward(3.0), call(), backward(4.0, line=7), step(stale="0"), CLEARED)
    records = {
        rank: run(*events_of * 3, rank=rank, world_size=2)
        for rank, events_of in enumerate((events, other))
    }
    anatomy, found = steps.of(records), suspects.of(records)
    assert anatomy is not None
    assert found
    path = tmp_path / "step.html"
    path.write_text(page.page(anatomy, found, "torchrun <train>.py"), encoding="utf-8")
    dom, console = opened(path, tmp_path / "profile")
    assert console == ""
    written, shown = Tags(path.read_text("utf-8")), Tags(dom)
    assert shown.tags == written.tags, "the browser had to mend the page"
    assert shown.cells == written.cells
    assert {"rank 0", "rank 1"} <= {*shown.cells}
    for lane in anatomy.lanes.values():
        for line in (line for block in lane for line in block.lines):
            assert any(line.what in cell for cell in shown.cells), line.what
    assert "torchrun &lt;train&gt;.py" in dom


def test_a_browser_tells_what_a_page_may_not_do(tmp_path: Path) -> None:
    """The console is read: a script that the policy forbids is told there."""
    path = tmp_path / "bad.html"
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    path.write_text(f"<!DOCTYPE html>{policy}<script>1</script>", encoding="utf-8")
    assert "Content Security Policy" in opened(path, tmp_path / "profile")[1]
