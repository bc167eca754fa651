"""Hooks of mkdocs: pages made of files outside docs/, and state diagrams as tables.

A link such as `../examples/own_trainer.py` leads on the site to a page with that file, so that the
site is whole without a checkout.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
MERMAID = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ARROW = re.compile(r"\s*(\S+) --> (\S+?)(?:: (.*))?$")
LANGUAGES = {"sh": "bash", "py": "python", "yml": "yaml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision into the navigation, in the order of their numbers."""
    names = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    for section in config.nav or []:
        for pages in section.values():
            for page in pages:
                if "Decisions" in page:
                    page["Decisions"] = [f"decisions/{name}" for name in names]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the README, the changelog, and a page for each file outside docs/ that a page links."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    sources = [*pages, *(ROOT / name for name in FROM_ROOT)]
    linked = {path for source in sources for path in _outside(source)}
    linked |= {file for path in linked if (ROOT / path).is_dir() for file in _listed(path)}
    for name, page in FROM_ROOT.items():
        text = _relinked((ROOT / name).read_text("utf-8"), folder="", page=page)
        files.append(File.generated(config, page, content=text))
    for path in sorted(linked):
        files.append(File.generated(config, _page(path), content=_content(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to their pages, and write state diagrams as tables."""
    if page.file.generated_by is None:
        folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
        markdown = _relinked(markdown, folder=folder, page=page.file.src_uri)
    return MERMAID.sub(_moves, markdown)


def _outside(source: Path) -> set[str]:
    """Return the paths outside docs/, as seen from the root, that the page `source` links."""
    folder = source.parent.relative_to(ROOT).as_posix()
    links = LINK.findall(source.read_text("utf-8"))
    paths = {posixpath.normpath(posixpath.join(folder, link)) for link in links}
    return {path for path in paths if not path.startswith("docs/") and path not in FROM_ROOT}


def _relinked(text: str, *, folder: str, page: str) -> str:
    """Return `text` of a file in `folder` of the checkout with its links as seen from `page`."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        inside = target.removeprefix("docs/")
        there = inside if inside != target else FROM_ROOT.get(target) or _page(target)
        return posixpath.relpath(there, posixpath.dirname(page) or ".")

    return LINK.sub(link, text)


def _page(path: str) -> str:
    """Return the name on the site of the page that shows a file or folder outside docs/."""
    return f"files/{path.removesuffix('.md')}.md"


def _listed(folder: str) -> list[str]:
    names = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
    return [f"{folder}/{name}" for name in names if not name.startswith((".", "__"))]


def _content(path: str) -> str:
    """Return the Markdown that shows a file, or lists a folder."""
    file = ROOT / path
    if file.is_dir():
        here = posixpath.dirname(_page(path))
        entries = [(one, posixpath.relpath(_page(one), here)) for one in _listed(path)]
        return "\n".join([f"# {path}/", "", *(f"- [{name}]({link})" for name, link in entries)])
    text = file.read_text("utf-8")
    if file.suffix == ".md":
        return _relinked(text, folder=posixpath.dirname(path), page=_page(path))
    language = file.suffix.removeprefix(".")
    return f"# {path}\n\n````{LANGUAGES.get(language, language)}\n{text}````\n"


def _moves(diagram: re.Match[str]) -> str:
    """Return a state diagram as a table: drawing it takes a script from another host."""
    arrows = [arrow.groups() for line in diagram[1].splitlines() if (arrow := ARROW.match(line))]
    rows = [
        f"| {'start' if before == '[*]' else before} | {cause or ''} | {after} |"
        for before, after, cause in arrows
    ]
    return "\n".join(["| from | on | to |", "|---|---|---|", *rows])
