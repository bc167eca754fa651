"""The source of a difference is the statement where it began, not one that passes it on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from entrenar_py.check.diff import sources
from entrenar_py.check.rank_files import line_file
from entrenar_py.check.rank_files.border_file import Border
from entrenar_py.check.rank_files.line_file import CALL, LINE, RETURN, Event

# A value "x1 | x2" has one digest in each run. A line without one has nothing to compare.
Rows = Sequence[tuple[int, dict[str, str]]]


def streams(file: Path, rows: Rows, *, frame: int = 1) -> tuple[list[Event], list[Event]]:
    """Return the events of both runs of a file's statements, each a line and its values."""
    both: tuple[list[Event], list[Event]] = ([], [])
    for order, (line, values) in enumerate(rows):
        for index, events in enumerate(both):
            shown = {name: value.split(" | ")[-1 if index else 0] for name, value in values.items()}
            events.append(Event(frame, 0, LINE, str(file), line, order, shown))
    return both


def found(
    tmp_path: Path, text: str, rows: Rows, *, generators: bool = False
) -> sources.Source | None:
    """Return the source of a difference in the last statement."""
    file = tmp_path / "train.py"
    file.write_text(text)
    first, second = streams(file, rows)
    border = output(len(rows) - 1)
    return sources.source([first], [second], border, generators=generators)


def output(order: int) -> Border:
    """Return the border of a model's output."""
    return Border(
        order=order, step=0, micro_batch=0, phase="forward", kind="output", name="", digest=""
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x = float(time.time())", sources.CLOCK),
        ("x = uuid.uuid4().int", sources.ENTROPY),
        ("x = os.getpid()", sources.PROCESS),
        ("x = hash(name)", sources.HASH),
        ("x = os.environ['PORT']", sources.ENVIRONMENT),
        ("x = os.listdir(folder)", sources.LISTING),
        ("x = torch.empty(3)", sources.MEMORY),
        ("x = torch.load(path)", sources.FILE),
        ("dist.recv(x)", sources.ARRIVAL),
        ("x = [f.result() for f in as_completed(jobs)]", sources.THREADS),
        ("x = strange(y)", ""),
    ],
)
def test_the_kind_is_that_of_the_statement_where_a_difference_begins(
    tmp_path: Path, text: str, kind: str
) -> None:
    """Later statements pass it on; their own kinds don't matter."""
    passed_on = f"{text}\nz = torch.load(x)\nmodel(z)\n"
    rows = [(1, {"x": "P1 | P2"}), (2, {"x": "P1 | P2", "z": "T3 | T4"}), (3, {"z": "T3 | T4"})]
    source = found(tmp_path, passed_on, rows)
    assert source is not None
    assert (source.kind, source.line) == (kind, 1)


def test_a_time_that_is_only_printed_is_no_source(tmp_path: Path) -> None:
    """What the statement of the border uses counts."""
    text = "t = time.time()\nx = hash(s)\nmodel(x)\n"
    source = found(
        tmp_path, text, [(1, {"t": "P1 | P2"}), (2, {"x": "T1 | T2"}), (3, {"x": "T1 | T2"})]
    )
    assert source is not None
    assert source.line == 2
    assert (
        found(tmp_path, text, [(1, {"t": "P1 | P2"}), (2, {"x": "T1"}), (3, {"x": "T1"})]) is None
    )


def test_other_files_in_a_folder_are_no_other_order(tmp_path: Path) -> None:
    """A list with other elements comes from what the statement uses."""
    text = "d = uuid.uuid4()\nn = os.listdir(d)\nmodel(n)\n"
    rows = [(1, {"d": "P1 | P2"}), (2, {"n": "T1/a | T2/b"}), (3, {"n": "T1/a | T2/b"})]
    source = found(tmp_path, text, rows)
    assert source is not None
    assert source.kind == sources.ENTROPY
    rows = [(1, {"d": "P1 | P2"}), (2, {"n": "T1/a | T2/a"}), (3, {"n": "T1/a | T2/a"})]
    source = found(tmp_path, text, rows)
    assert source is not None
    assert source.kind == sources.LISTING


def test_a_draw_from_an_unseeded_generator_is_a_source(tmp_path: Path) -> None:
    """The generator differs from the start, and the first statement that moves it is named."""
    name = line_file.GENERATOR + "torch"
    text = "import torch\nx = torch.rand(3)\nmodel(x)\n"
    rows = [(1, {name: "1 | 2"}), (2, {name: "3 | 4", "x": "T1 | T2"}), (3, {"x": "T1 | T2"})]
    source = found(tmp_path, text, rows)
    assert source is not None
    assert (source.kind, source.line, source.detail) == (sources.GENERATOR, 2, "torch")
    rows = [(1, {name: "1 | 2"}), (2, {name: "3 | 4", "x": "T1"}), (3, {"x": "T1"})]
    source = found(tmp_path, text, rows, generators=True)
    assert source is not None
    assert source.line == 2


def test_a_seed_that_differs_is_the_source_of_what_is_drawn(tmp_path: Path) -> None:
    """The generator comes from the seed."""
    name = line_file.GENERATOR + "torch"
    text = "s = os.getpid()\ntorch.manual_seed(s)\nx = torch.rand(3)\nmodel(x)\n"
    rows = [
        (1, {name: "5", "s": "P1 | P2"}),
        (2, {name: "1 | 2", "s": "P1 | P2"}),
        (3, {name: "3 | 4", "x": "T1 | T2"}),
        (4, {"x": "T1 | T2"}),
    ]
    source = found(tmp_path, text, rows)
    assert source is not None
    assert (source.kind, source.line) == (sources.PROCESS, 1)


def test_the_order_of_a_set_is_a_hash(tmp_path: Path) -> None:
    """The set is the same, and what is made of it in order is not."""
    text = "n = list(s)\nmodel(n)\n"
    source = found(tmp_path, text, [(1, {"s": "S1", "n": "T1/a | T2/a"}), (2, {"n": "T1 | T2"})])
    assert source is not None
    assert source.kind == sources.HASH


def test_a_value_that_a_collective_may_still_change_was_not_waited_for(tmp_path: Path) -> None:
    """The collective's line is named."""
    text = "w = dist.all_reduce(g, async_op=True)\ng = g / 2\nmodel(g)\n"
    source = found(tmp_path, text, [(1, {"g": "T1"}), (2, {"g": "T2 | T3"}), (3, {"g": "T2 | T3"})])
    assert source is not None
    assert (source.kind, source.line) == (sources.WAITING, 1)


BRANCH = (
    "if random() < 0.5:\n    x = x * 2\ny = f(x)\nz = clock()\nmodel(y)\n",
    "coin = random()\nif coin < 0.5:\n    x = x * 2\ny = f(x)\nmodel(y)\n",
    "if os.getpid() % 2:\n    clip(model)\nz = clock()\nmodel(x)\nstep()\n",
)


@pytest.mark.parametrize(
    ("text", "before", "branch", "after", "expected"),
    [
        (
            BRANCH[0],
            [(1, {"x": "T1", line_file.GENERATOR + "python": "1 | 2"})],
            [(2, {"x": "T2"})],
            [(3, {"x": "T1 | T2", "y": "T3 | T4"}), (5, {"y": "T3 | T4"})],
            (sources.GENERATOR, 1),
        ),
        (
            BRANCH[1],
            [(1, {"coin": "P1 | P2"}), (2, {"coin": "P1 | P2", "x": "T1"})],
            [(3, {"x": "T2"})],
            [(4, {"x": "T1 | T2", "y": "T3 | T4"}), (5, {"y": "T3 | T4"})],
            ("", 1),
        ),
        (BRANCH[2], [(1, {})], [(2, {"model": "M1"})], [(4, {"x": "T1"})], (sources.PROCESS, 1)),
    ],
    ids=["draw", "variable", "in place"],
)
def test_what_a_branch_of_one_run_changes_comes_from_its_condition(
    tmp_path: Path, text: str, before: Rows, branch: Rows, after: Rows, expected: tuple[str, int]
) -> None:
    """Not from the first statement that both runs have after it."""
    file = tmp_path / "train.py"
    file.write_text(text)
    start = [(0, {line_file.GENERATOR + "python": "3 | 4", "x": "T1"})]
    first, _ = streams(file, [*start, *before, *after])
    _, second = streams(file, [*start, *before, *branch, *after])
    border = output(len(first) - 1)
    for pair in ((first, second), (second, first)):
        source = sources.source([pair[0]], [pair[1]], border, generators=False)
        assert source is not None
        assert (source.kind, source.line) == expected


def test_a_branch_that_sets_equal_values_is_no_source(tmp_path: Path) -> None:
    """Both runs have the same value after it."""
    file = tmp_path / "train.py"
    file.write_text("if clock():\n    n = 1\nx = uuid4(n)\nmodel(x)\n")
    ends = [(3, {"n": "P1", "x": "T1 | T2"}), (4, {"x": "T1 | T2"})]
    first, _ = streams(file, [(1, {"n": "P1"}), *ends])
    _, second = streams(file, [(1, {"n": "P1"}), (2, {"n": "P1"}), *ends])
    source = sources.source([first], [second], output(2), generators=False)
    assert source is not None
    assert (source.kind, source.line) == (sources.ENTROPY, 3)


def test_a_worker_of_a_loader_is_searched(tmp_path: Path) -> None:
    """If batches differ, a worker's statement is the source, or else the order of workers."""
    file = tmp_path / "train.py"
    file.write_text("def get(i):\n    return noise()\nfor x in loader:\n    model(x)\n")
    rows: Rows = [(3, {"x": "T1 | T2"}), (4, {"x": "T1 | T2"})]
    first, second = streams(file, rows)
    border = Border(
        order=1, step=0, micro_batch=0, phase="forward", kind="input", name="", digest=""
    )
    workers: list[list[Event]] = []
    for digest in ("P1", "P2"):
        call = Event(1, 0, CALL, str(file), 0, 0, {"i": "P5"})
        returned = Event(1, 0, RETURN, str(file), 2, 0, {line_file.RETURNED: digest})
        workers.append([call, returned])
    source = sources.source([first, workers[0]], [second, workers[1]], border, generators=False)
    assert source is not None
    assert (source.kind, source.line) == (sources.WORKERS, 2)
    source = sources.source([first, workers[0]], [second, workers[0]], border, generators=False)
    assert source is not None
    assert (source.kind, source.line) == (sources.WORKERS, 3)


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    """An incomplete last line is left out; a launcher's file without steps is not a rank's."""
    with line_file.create(tmp_path, 0) as launcher, line_file.create(tmp_path, 0) as own:
        line_file.append(launcher, [1, 0, LINE, "run.py", 1, 0, {}])
        line_file.append(own, [1, 0, LINE, "train.py", 3, 7, {"x": "P1"}])
    with line_file.create(tmp_path, 0, 1) as worker:
        line_file.append(worker, [1, 0, LINE, "train.py", 3, 7, {"x": "P1"}])
        worker.write(b"[1, 0")
    wanted = Event(1, 0, LINE, "train.py", 3, 7, {"x": "P1"})
    assert line_file.load_folder(tmp_path, 0) == [[wanted], [wanted]]
