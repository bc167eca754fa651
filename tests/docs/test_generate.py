"""Generated pages are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate, kill_matrix_page
from entrenar_py.check import kill_matrix
from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.kill_matrix import Row
from entrenar_py.shared import mutants
from entrenar_py.shared.scenario import expand
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.wire import messages
from falsification import classes
from tests.check.command import twins

DOCS = Path(__file__).parents[2] / "docs"


def test_make_docs_changes_nothing(
    matrix: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages in docs/ are those that the script writes; run `make docs` if not."""
    monkeypatch.setattr(kill_matrix, "run", lambda variants, invariants: matrix)
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    generate.main()
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [
        "anatomy.md",
        "auto.md",
        "cli.md",
        "coming-from.md",
        "configuration.md",
        "contract-format.md",
        "contract-rules.md",
        "entrenar.md",
        "finetune-schema-v1.json",
        "kill-matrix.md",
        "original-workers.md",
        "protocol.md",
        "your-trainer.md",
    ]
    written.remove("kill-matrix.md")
    for name in written:
        assert (tmp_path / name).read_text("utf-8") == (DOCS / name).read_text("utf-8"), name


def test_the_kill_matrix_is_current(matrix: list[Row]) -> None:
    """The page has every row tried here and the names of all variants; run `make docs` if not."""
    page = (DOCS / "kill-matrix.md").read_text("utf-8")
    lines = kill_matrix_page.page(matrix, checks=generate.checks()).splitlines()
    assert [one for one in lines if one not in page and "killed for the right" not in one] == []
    assert [name for name in mutants.catalogue() if f"| `{name}` |" not in page] == []
    assert "SURVIVED" not in page
    assert "**wrong**" not in page


def test_tables_stand_between_their_marks() -> None:
    """Text around a table stays, and an edited table is generated anew."""
    page = generate.FORMAT.read_text("utf-8")
    edited = page.replace("| `seed` | whole", "| `seed` | hole")
    assert edited != page
    assert generate.contract_format(edited) == page


def test_each_class_of_bugs_has_five_broken_scripts() -> None:
    """The table of classes is current, and each has right scripts beside the broken ones."""
    page = generate.AUTO.read_text("utf-8")
    assert generate.auto(page) == page, "say `make docs`"
    for _, title, broken, right in classes.counts(twins.every()):
        assert int(broken) >= 5, title
        assert int(right) >= 2, title


def test_what_comparisons_presuppose_is_told() -> None:
    """The table of presuppositions is generated from the code, and is current."""
    page = generate.YOUR_TRAINER.read_text("utf-8")
    assert generate.your_trainer(page) == page, "say `make docs`"


def test_the_protocol_is_as_the_tables_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages, legal moves and diagrams are generated from the code, and are current."""
    page = generate.PROTOCOL.read_text("utf-8")
    assert generate.protocol(page) == page, "say `make docs`"
    legal = dict.fromkeys(messages.WorkerPhase, (messages.Leave,))
    monkeypatch.setattr(messages, "WORKER_MAY_HEAR", legal)
    move = (messages.Stage.OVER, "a miracle", messages.Stage.GATHERING)
    monkeypatch.setattr(messages, "RUN_MOVES", (move,))
    changed = generate.protocol(page)
    assert "| `away` | `Leave` |" in changed
    assert "over --> gathering: a miracle" in changed
    assert "| 21 | `Leave` | either |" in changed


def test_every_message_has_a_row() -> None:
    """Messages are in the order of their tags, each with its sender and meaning."""
    rows = [row.strip("|\n ").split(" | ") for row in generate.message_table().splitlines()[2:]]
    kinds = messages.MESSAGES.items()
    assert [row[:2] for row in rows] == [[str(tag), f"`{kind.__name__}`"] for tag, kind in kinds]
    for row, (_, kind) in zip(rows, kinds, strict=True):
        assert row[2] in ("coordinator", "worker", "either")
        assert bool(row[4].strip()) == bool(kind.carries)
        assert row[5]


def test_a_page_without_the_marks_is_refused() -> None:
    """A page without the marks is refused, as its table would be lost silently."""
    page = generate.FORMAT.read_text("utf-8")
    for lost in ("<!-- generated: scenario -->\n", "<!-- end -->\n"):
        with pytest.raises(AssertionError):
            generate.contract_format(page.replace(lost, ""))


def test_every_check_and_field_has_a_row() -> None:
    """Every check and every field of a scenario has a row with its meaning."""
    fields = [row.strip("|\n ").split(" | ") for row in generate.fields().splitlines()[2:]]
    for rows, names in (
        (generate.checks(), tuple(CHECKS)),
        (fields, tuple(next(expand({})).to_dict())),
    ):
        assert [row[0] for row in rows] == [f"`{name}`" for name in names]
        assert all(cell.strip() for row in rows for cell in row)
    assert set(generate.MEANINGS) == set(next(expand({})).to_dict())


def test_every_key_of_a_configuration_has_a_row() -> None:
    """Each key has a row in the table of its mapping."""
    page = generate.SERVICE.read_text("utf-8")
    assert generate.service(page) == page, "say `make docs`"
    names = [key.name for one in generate.SECTIONS.values() for key in settings_file.fields_of(one)]
    assert [row.split("`")[1] for row in page.splitlines() if row.startswith("| `")] == names
