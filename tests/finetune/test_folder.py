"""Files come into a folder all together, also those in folders of their own."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.finetune import folder


def test_folders_within_are_replaced(tmp_path: Path) -> None:
    """As tokenizers with several chat templates write them; the second export is as the first."""
    for text in ("first", "second"):
        with folder.replacing(tmp_path, marks=["config.json"], advice="try again") as partial:
            inner = partial / "additional_chat_templates"
            inner.mkdir()
            (inner / f"{text}.jinja").write_text(text)
            (partial / "config.json").write_text(text)
    (inner,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.read_text() for path in inner.iterdir()] == ["second"]
    assert inner.stat().st_mode & 0o100, "it can be entered"
