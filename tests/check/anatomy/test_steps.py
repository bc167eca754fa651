"""A record is cut into steps, repeated lines are folded, and steps and ranks are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.anatomy import page, record, steps, suspects, text
from entrenar_py.check.anatomy.record import (
    Backward,
    Cleared,
    Collective,
    Drawn,
    Event,
    Forward,
    Named,
    Record,
    Stepped,
)
from entrenar_py.shared.errors import TraceError

HERE: dict[str, Any] = {"file": "/home/me/train.py"}


def call(line: int = 1, *, training: bool = True) -> Forward:
    """Return the call of a model."""
    return Forward(
        **HERE, line=line, module=0, kind="Net", training=training, grad=training, outputs_grad=True
    )


def backward(value: float, line: int = 2, **facts: Any) -> Event:
    """Return a backward pass that touches both parameters."""
    told = {"shape": "[]", "node": "MeanBackward0", "touched": "0-1", "norm": 1.0, **facts}
    return Backward(**HERE, line=line, value=value, **told)


def step(line: int = 3, **facts: Any) -> Event:
    """Return the step of one optimizer."""
    told = {"optimizer": 0, "kind": "SGD", "held": "0-1", "graded": "0-1", "moved": 2, **facts}
    return Stepped(**HERE, line=line, norm=1.0, rates=(0.1,), **told)


CLEARED = Cleared(**HERE, line=4, owner="SGD", touched="0-1", present=2)
NAMES = tuple(Named(number=n, name=name, shape="[2]", bytes=8) for n, name in enumerate("wb"))


def run(*events: Event, rank: int = 0, world_size: int = 1) -> Record:
    """Return a record with these events."""
    return Record(rank=rank, world_size=world_size, events=(*NAMES, *events))


def test_ranges_are_read_as_written() -> None:
    """A set of numbers survives its text, and other texts are refused."""
    for found in ((), (3,), (0, 1, 2, 7), (5, 9)):
        assert record.numbers(record.ranges(found)) == frozenset(found)
    assert record.ranges((0, 1, 2, 7)) == "0-2,7"
    for wrong in ("3-1", "-4", "x", str(record.NUMBERS_MAX)):
        with pytest.raises(ValueError):
            record.numbers(wrong)


def test_a_step_ends_where_the_next_pass_begins() -> None:
    """What follows the optimizer's step, such as zero_grad, belongs to that step."""
    events = (call(), backward(1.0), step(), CLEARED) * 3
    made = steps.cut(run(*events))
    assert [len(one.events) for one in made] == [4, 4, 4]


def test_without_an_optimizer_there_are_no_steps() -> None:
    """Passes alone aren't counted as steps: weights are changed by code that isn't seen."""
    known = {0: run(*(call(), backward(1.0)) * 3)}
    assert steps.cut(known[0]) == []
    assert steps.of(known) is None


def test_two_losses_of_one_batch_are_no_micro_batches() -> None:
    """Passes from several means are suspect only if a module is called between them."""
    one, other = (backward(value, mean=True) for value in (1.0, 2.0))
    losses = (call(), one, other, step(), CLEARED) * 2
    batches = (call(), one, call(), other, step(), CLEARED) * 2
    assert not suspects.of({0: run(*losses)})
    assert [one.name for one in suspects.of({0: run(*batches)})] == ["micro-batches-undivided"]


def test_ranks_without_an_exchange_are_apart_unless_their_weights_are_equal() -> None:
    """A process group that isn't torch's is not seen, and keeps replicas equal all the same."""
    for other, expected in (("b", ["ranks-apart"]), ("a", [])):
        known = {
            rank: run(*(call(), backward(1.0), step(weights=own)) * 2, rank=rank, world_size=2)
            for rank, own in enumerate(("a", other))
        }
        assert [one.name for one in suspects.of(known)] == expected


def test_masks_are_the_same_though_generators_part_later() -> None:
    """Two calls with one generator and different samples are enough; the same samples are not."""
    for samples, expected in (("xy", ["same-masks"]), ("xx", ["same-samples"])):
        known = {}
        for rank, sample in enumerate(samples):
            draws = [
                replace(
                    call(), digest=f"{sample}{n}", draws=True, generator=f"{n}-{rank * (n > 1)}"
                )
                for n in range(3)
            ]
            reduced = Collective(**HERE, operation="all_reduce", size=2, contents="gradients")
            reduced = replace(reduced, by="DistributedDataParallel", touched="0-1")
            events = (event for one in draws for event in (one, backward(1.0), reduced, step()))
            known[rank] = run(*events, rank=rank, world_size=2)
        assert [one.name for one in suspects.of(known)] == expected


def test_lengths_and_buckets_do_not_part_steps() -> None:
    """Padded batches of other lengths are the same line; a smaller batch is another one."""
    reduced = Collective(
        **HERE, operation="all_reduce", reduction="mean", size=2, tensor_bytes=16, touched="0-1"
    )
    reduced = replace(reduced, by="DistributedDataParallel", contents="gradients")
    events = [
        event
        for n, shape in enumerate(("[4, 7]", "[4, 9]", "[4, 8, 2]", "[3, 7]"))
        for event in (
            Drawn(**HERE, loader=0, number=0, shapes=f"int64 {shape}"),
            *(call(), backward(1.0), replace(reduced, calls=n + 1), step(), CLEARED),
        )
    ]
    anatomy = steps.of({0: run(*events)})
    assert anatomy is not None
    assert anatomy.alike == (0, 1, 2)
    assert [one.where for one in anatomy.by_step] == ["step 3 (the last)"]


def test_two_optimizers_make_one_step_together() -> None:
    """A step is over when both have stepped; one that rarely steps doesn't count."""
    both = (call(), backward(1.0), step(), call(5), backward(2.0), step(6, optimizer=1, held="2"))
    rare = step(9, optimizer=2, held="7")
    assert len(steps.cut(run(*(both * 4), rare))) == 4


def test_models_that_train_in_turn_have_their_own_steps() -> None:
    """A step that ends since an optimizer steps again begins with its own first call."""
    one = (call(), backward(1.0), step(), CLEARED)
    other = (call(5), backward(2.0, 6), step(7, optimizer=1, held="2"))
    made = steps.cut(run(*one * 3, *other * 3))
    assert [len(each.events) for each in made] == [4, 4, 7, 3, 3]


def test_micro_batches_are_folded() -> None:
    """Lines that repeat are one block with a count, and the first and the last value."""
    one = (call(), backward(1.0), call(), backward(2.0), call(), backward(3.0), step(), CLEARED)
    found = steps.of({0: run(*one * 3)})
    assert found is not None
    first, rest = found.lanes[0]
    assert (first.times, len(first.lines)) == (3, 2)
    assert (first.lines[1].values, first.lines[1].last) == ("1", "3")
    assert [line.what.partition(":")[0] for line in rest.lines] == ["SGD.step", "SGD.zero_grad"]
    assert any(line.startswith("  x3 |") for line in text.screen(found, ()))


def test_steps_and_ranks_are_compared_with_a_usual_step() -> None:
    """What the first and the last step, and another rank, do differently is told."""
    usual = (call(), backward(1.0), step(), CLEARED)
    first = (call(8, training=False), *usual)
    last = (call(), backward(1.0), step())
    reduced = Collective(**HERE, line=7, operation="barrier", size=2)
    events = (*first, *usual, *usual, *last)
    other = (*first, *usual[:3], reduced, CLEARED, *usual, *last)
    found = steps.of({0: run(*events, world_size=2), 1: run(*other, rank=1, world_size=2)})
    assert found is not None
    assert (found.usual, found.alike) == (1, (1, 2))
    told = [(one.where, len(one.also), len(one.lacks)) for one in found.by_step]
    assert told == [("step 0", 1, 0), ("step 3 (the last)", 0, 1)]
    assert [(one.where, one.also[0][0].what) for one in found.by_rank] == [
        ("rank 1", "barrier, 2 ranks")
    ]


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    """Events survive a file; a file that ends early has a problem, and a foreign one is refused."""
    lines = [record.header(rank=1, world_size=2, pid=5), *map(record.line_of, (*NAMES, step()))]
    path = tmp_path / f"1-5{record.SUFFIX}"
    path.write_text("\n".join((*lines, record.closing(""))) + "\n")
    assert record.load(tmp_path)[1] == run(step(), rank=1, world_size=2)
    path.write_text("\n".join(lines) + '\n{"event"')
    assert "without" in record.load(tmp_path)[1].problem
    for wrong in ("{}", "[", lines[0] + '\n{"event": "step", "optimizer": "x", "kind": ""}\n'):
        path.write_text(wrong)
        with pytest.raises(TraceError, match="run again"):
            record.load(tmp_path)


def test_texts_of_a_script_are_inert_on_the_page() -> None:
    """Names from the script are escaped, and the page requests nothing."""
    evil = "<script>alert(1)</script>"
    known = {0: run(*(call(), backward(1.0), step(kind=evil), step(kind=evil)) * 3)}
    found = steps.of(known)
    assert found is not None
    shown = page.page(found, suspects.of(known), evil)
    assert "<script" not in shown
    assert "default-src 'none'" in shown
    assert "http" not in shown.replace("http-equiv", "")


def test_a_suspect_tells_where_and_why() -> None:
    """It has the line, the first step and the ranks, a reason, and what decides it."""
    events = (call(), backward(1.0, carried="0"), step()) * 2
    (found,) = suspects.of({0: run(*events)})
    assert (found.name, found.place) == ("gradients-kept", "train.py:2")
    assert found.where == "all ranks, step 0 and 1 more; zero_grad is missing for w"
    assert found.reason
    assert found.decided
