"""Pages of docs/ are in the site's navigation, their links are valid, and lines are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = yaml.safe_load((DOCS / "website/mkdocs.yml").read_text("utf-8"))
PAGES = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
# Made by the site's hooks.
GENERATED = {"index.md", "changelog.md"}
WHOLLY_GENERATED = {"cli.md", "faults.md", "field.md", "kill-matrix.md"}
# A path below one of the repository's folders; capitals stand for any name (docs/contributing.md).
NAMED = re.compile(r"(?<![\w/.~-])((?:src|tests|docs|falsification|examples|contracts)/[\w./-]+)")
PLACEHOLDER = re.compile(r"FAMILY|CONTRACT|NAME|\.\.\.")
COLUMNS_MAX = 100
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def test_every_page_is_in_the_navigation() -> None:
    """Each page is there once; decisions are added in the order of their numbers."""
    named = list(_leaves(CONFIGURATION["nav"]))
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    top = [name for name in pages if not name.startswith("decisions/")]
    assert sorted(named) == sorted([*top, *GENERATED])


def test_the_search_needs_no_server_and_no_other_host() -> None:
    """A browser that opens the site from a folder gets the index, and the frame that reads it."""
    assert {"search", "offline"} <= set(CONFIGURATION["plugins"])
    (shim,) = CONFIGURATION["extra"]["polyfills"]
    assert "iframe-worker" in shim  # else the plugin fetches one from a host
    assert (DOCS / shim).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Every link leads to an existing file, and to a heading in it."""
    for link in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{link} leads to no file"
        assert not heading or heading in _anchors(target), f"{link} leads to no heading"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent == DOCS or page.name == "README.md"],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_named_paths_exist(page: Path) -> None:
    """Every path of the repository that a page names exists; decisions may name former ones."""
    text = page.read_text("utf-8")
    assert [
        path
        for path in (match.rstrip(".") for match in NAMED.findall(text))
        if not PLACEHOLDER.search(path) and not (ROOT / path).exists()
    ] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in WHOLLY_GENERATED],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_lines_of_prose_are_short(page: Path) -> None:
    """Lines of prose are short; code and tables are exempt."""
    text = re.sub(r"<!-- generated: .*?<!-- end -->", "", page.read_text("utf-8"), flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "<!--"))]
    assert [line for line in lines if len(line) > COLUMNS_MAX] == []


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(below)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and mkdocs both make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}
