"""Shards as files: what is written is read, and what is damaged or another's is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from numpy.typing import NDArray

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.distill import manifest, shards, teacher
from entrenar_py.train.distill.manifest import Claims
from entrenar_py.train.distill.shards import File, Rows, ShardWriter
from tests.fuzz.bad_files import KINDS
from tests.train.distill import made
from tests.train.distill.made import FACTS, STARTS

NAMES = ("sample", "position", "target", "tokens", "log_probabilities", "rest")


def same(one: Rows, other: Rows) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in NAMES)


@pytest.mark.parametrize("stored", ["float16", "float32"])
@pytest.mark.parametrize("group_bytes", [1, 100, 2**22])
def test_what_was_written_is_read(
    tmp_path: Path, stored: str, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "GROUP_BYTES", group_bytes)
    facts = replace(FACTS, stored=stored)
    rows = made.rows_of(0, facts)
    with closing(ShardWriter(tmp_path, facts, 0, STARTS[0])) as writer:
        for part in (slice(0, 2), slice(2, 7)):
            writer.add(rows.part(part))
        entry = writer.finish()
    assert shards.problem(tmp_path, facts, entry) is None
    file = File(tmp_path, facts, 0, STARTS[0])
    groups = shards.groups(facts, STARTS[0])
    assert len(groups) == (1 if group_bytes > 200 else 2)
    for number, part in enumerate(groups):
        assert file.group_of(part.start) == file.group_of(part.stop - 1) == number
        assert same(file.read(number), rows.part(part))
    assert same(shards.joined([file.read(number) for number in range(len(groups))]), rows)


def test_others_read_it_as_parquet(tmp_path: Path) -> None:
    """The columns and the metadata are those of the docs."""
    made.write(tmp_path, 1)
    table = made.table_of(tmp_path / "shard-00001-of-00003.parquet")
    assert table.column_names == list(NAMES)
    assert [str(field.type) for field in table.schema] == [
        "int32",
        "int32",
        "int32",
        "fixed_size_list<element: int32 not null>[4]",
        "fixed_size_list<element: halffloat not null>[4]",
        "float",
    ]
    told = manifest.columns(FACTS, 1).metadata[manifest.METADATA_KEY]
    assert table.schema.metadata[manifest.METADATA_KEY] == told
    assert b'"temperature": 1.0' in told


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with closing(ShardWriter(tmp_path, FACTS, 0, STARTS[0])) as writer:
        writer.add(made.rows_of(0).part(slice(0, 4)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "size"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "digest"),
    ],
)
def test_a_damaged_file(tmp_path: Path, change: object, kind: str) -> None:
    entry = made.write(tmp_path, 0)
    change(tmp_path / "shard-00000-of-00003.parquet")  # type: ignore[operator]
    problem = shards.problem(tmp_path, FACTS, entry)
    assert getattr(problem, "kind", None) == kind


def _changed(name: str, row: int, column: int | None, value: float) -> Rows:
    rows = made.rows_of(0)
    array = getattr(rows, name).copy()
    array[row if column is None else (row, column)] = value
    return replace(rows, **{name: array})


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (_changed("log_probabilities", 5, 1, np.nan), "add up to nan"),
        (_changed("log_probabilities", 5, 1, np.inf), "add up to inf"),
        (_changed("log_probabilities", 5, 0, 0.5), r"add up to [12]\.\d+"),
        (_changed("log_probabilities", 5, 0, -np.inf), r"add up to 0\.\d+"),
        (_changed("rest", 5, None, np.nan), "add up to nan"),
        (_changed("rest", 5, None, 0.0), r"add up to 1\.\d+"),
        (_changed("tokens", 5, 3, made.rows_of(0).tokens[5, 1]), r"token \d+ is in it twice"),
    ],
)
def test_a_row_that_is_no_distribution(tmp_path: Path, rows: Rows, problem: str) -> None:
    """A file with the right digest may hold anything; a student would learn NaN from it."""
    with closing(ShardWriter(tmp_path, FACTS, 0, STARTS[0])) as writer:
        writer.add(rows)
        assert shards.problem(tmp_path, FACTS, writer.finish()) is None
    told = rf"row 5 \(sample 1, position 1\) is not a distribution: .*{problem}; make it again"
    with pytest.raises(UsageError, match=told):
        File(tmp_path, FACTS, 0, STARTS[0]).read(0)


@given(
    logits=hypothesis_numpy.arrays(
        np.float32, (3, 9), elements=st.floats(-(2.0**15), 2.0**15, width=32) | st.just(-np.inf)
    ),
    top_k=st.integers(1, 9),
    stored=st.sampled_from((torch.float16, torch.float32)),
)
def test_whatever_a_teacher_keeps_is_a_distribution(
    logits: NDArray[np.float32], top_k: int, stored: torch.dtype
) -> None:
    """Rounding alone, of large logits or to half precision, never looks like damage."""
    logits[:, 0] = np.maximum(logits[:, 0], -(2.0**15))  # one token at least is possible
    kept = teacher.kept_of(torch.from_numpy(logits), top_k=top_k, known=9, stored=stored)
    none = np.zeros(3, np.int32)
    assert shards.not_distributions(Rows(none, none, none, *kept.arrays())) is None


def test_a_file_of_another_place(tmp_path: Path) -> None:
    """Another teacher's, another shard's, one of other columns, or one with rows missing."""
    made.write(tmp_path, 0)
    path = tmp_path / "shard-00000-of-00003.parquet"
    for facts, told in (
        (replace(FACTS, tokenizer="9" * 32), r"tokenizer is '2{32}', and '9{32}'"),
        (replace(FACTS, top_k=5), r"column tokens has type fixed_size_list.*4\], and not"),
        (replace(FACTS, stored="float32"), "column log_probabilities has type .*halffloat"),
    ):
        with pytest.raises(UsageError, match=told):
            File(tmp_path, facts, 0, STARTS[0])
    with pytest.raises(UsageError, match="it has 7 rows in 1 groups, expected 5 in 1"):
        File(tmp_path, FACTS, 0, STARTS[1])
    path.rename(tmp_path / "shard-00001-of-00003.parquet")
    with pytest.raises(UsageError, match="shard is 0, and 1 in the folder's list"):
        File(tmp_path, FACTS, 1, STARTS[1])
    pa = manifest.arrow()
    table = made.table_of(tmp_path / "shard-00001-of-00003.parquet").drop_columns(["rest"])
    pa.parquet.write_table(table, path)
    with pytest.raises(UsageError, match="column rest is missing"):
        File(tmp_path, FACTS, 0, STARTS[0])
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(UsageError, match="it is not a Parquet file"):
        File(tmp_path, FACTS, 0, STARTS[0])


def test_a_stopped_process_keeps_nobody_out_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is stopped while it adds a line to the list is named after a while."""
    monkeypatch.setattr(manifest, "APPENDING_S", 0.1)
    script = (
        "import signal; from pathlib import Path; from entrenar_py.train.distill.manifest import *;"
        "lists = Claims(Path(sys.argv[1])).appending(); lists.__enter__();"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with (
        closing(Claims(tmp_path)) as own,
        subprocess.Popen([sys.executable, "-c", script, tmp_path]) as other,
    ):
        os.waitpid(other.pid, os.WUNTRACED)
        try:
            with (
                pytest.raises(SystemFailure, match=f"process {other.pid} has kept its lists"),
                own.appending(),
            ):
                pass
        finally:
            other.send_signal(signal.SIGCONT)
        assert other.wait() == 0
        with own.appending():
            pass


@pytest.mark.parametrize("kind", ["pipe", "folder", "full"])
def test_a_lock_that_is_no_file(tmp_path: Path, kind: str) -> None:
    """Whoever may write to the folder can put a pipe there: it is refused at once."""
    KINDS[kind](tmp_path / manifest.CLAIMS_FILE)
    with pytest.raises(OSError):
        Claims(tmp_path)
    assert manifest.being_made(tmp_path, 3) == {}


def test_who_makes_what(tmp_path: Path) -> None:
    """A claim ends with its process; the system's own record names the process."""
    with closing(Claims(tmp_path)) as own:
        assert own.take(1)
        # Locks are a process's: another one in this process would give all of them up.
        script = (
            "import sys; from pathlib import Path\n"
            "from entrenar_py.train.distill.manifest import *;"
            "one = Claims(Path(sys.argv[1])); print(one.take(0), one.take(1),"
            "list(being_made(Path(sys.argv[1]), 3)))"
        )
        told = subprocess.run(
            [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
        )
        assert told.stdout == "True False [1]\n"
        assert own.take(0)
        own.give_up(0)
    assert manifest.being_made(tmp_path / "nowhere", 3) == {}
