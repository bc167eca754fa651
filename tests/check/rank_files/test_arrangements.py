"""How ranks share a model and its samples, as a run on one worker shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entrenar_py.check.rank_files import arrangements, assembly
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import Noticed, Shard, Start, TensorRecord, Update, record_tensor
from tests import traces

Values = NDArray[Any]
Weights = Mapping[str, Values]
RNG = np.random.default_rng(3)
UP, DOWN, NORM = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 2), (2, 4), (2,)))


def records(weights: Weights, scale: float = 1.0) -> dict[str, TensorRecord]:
    """Return the records of these tensors, or of multiples."""
    return {
        name: record_tensor((scale * values).reshape(-1), values=True)
        for name, values in weights.items()
    }


def recorded(
    rank: int,
    weights: Weights,
    ids: Sequence[int] = (0, 1),
    *,
    size: int = 2,
    gradient: Weights | None = None,
    **header: str,
) -> RankTrace:
    """Return the record of one step of a rank that begins with `weights`, and halves them."""
    facts: dict[str, Any] = {"step": 0, "rank": rank}
    shapes = {name: values.shape for name, values in weights.items()}
    shard = Shard(
        epoch=0,
        shard=0,
        ids=tuple(ids),
        loss_sum=None,
        weight=len(ids),
        finite=True,
        **facts,
        gradient=records(gradient or weights),
    )
    update = Update(
        loss=None,
        weight=0.0,
        learning_rate=0.1,
        gradient=records(weights),
        grad_norm=None,
        applied_norm=None,
        finite=True,
        **facts,
        weights=records(weights, 0.5),
        optimizer={f"{name}/exp_avg": record for name, record in records(weights).items()},
    )
    start = Start(weights=records(weights), trainable=tuple(weights), shapes=shapes, **facts)
    return RankTrace(
        life=0,
        header={"rank": rank, "world_size": size, **header},
        events=(start, Noticed(shared=(("norm", "other.norm"),), **facts), shard, update),
        ended=True,
        problem="",
    )


def whole_of(alone: RankTrace, *ranks: RankTrace) -> list[Any]:
    """Return the events of ranks, put together as the run on one worker shows."""
    arrangement = arrangements.shown(ranks, [alone])
    assert arrangement is not None
    return assembly.ordered(arrangement.of(ranks))


def elements(tensors: Mapping[str, TensorRecord]) -> dict[str, list[float]]:
    """Return the elements of each tensor."""
    found = {name: record.values() for name, record in tensors.items()}
    return {name: values.tolist() for name, values in found.items() if values is not None}


def listed(weights: Weights, scale: float = 1.0) -> dict[str, list[float]]:
    """Return the elements of each tensor, or of a multiple."""
    return {name: (scale * values).reshape(-1).tolist() for name, values in weights.items()}


MODEL = {"up": UP, "down": DOWN, "norm": NORM}
ALONE = recorded(0, MODEL, size=1)
HALVES = [
    {"up": UP[place], "down": DOWN[:, place], "norm": NORM} for place in (slice(2), slice(2, 4))
]


def test_pieces_of_layers_are_put_together_in_each_step() -> None:
    """Weights, gradients and state are whole on each rank, and the micro-batch is one."""
    ranks = [recorded(rank, weights) for rank, weights in enumerate(HALVES)]
    events = whole_of(ALONE, *ranks)
    updates = [event for event in events if isinstance(event, Update)]
    assert [elements(update.weights) for update in updates] == [listed(MODEL, 0.5)] * 2
    assert elements(updates[1].optimizer)["down/exp_avg"] == listed(MODEL)["down"]
    (shard,) = (event for event in events if isinstance(event, Shard))
    assert elements(shard.gradient) == listed(MODEL)
    assert {start.shapes["up"] for start in events if isinstance(start, Start)} == {(4, 2)}


def test_pieces_in_plain_tensors_are_found_beside_a_declared_layout() -> None:
    """It says which ranks share samples. Ranks without such pieces have no need of another one."""
    layout = Layout(axes={"dp": 2, "tp": 2}, tied=(("norm", "other.norm"),))
    ids = [(0,), (0,), (1,), (1,)]
    ranks = [
        replace(recorded(rank, HALVES[rank % 2], ids[rank], size=4), layout=layout)
        for rank in range(4)
    ]
    arrangement = arrangements.shown(ranks, [ALONE])
    assert arrangement is not None
    assert [arrangement.layout.data(rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert (arrangement.layout.axes, arrangement.layout.tied) == (layout.axes, layout.tied)
    updates = [e for e in assembly.ordered(arrangement.of(ranks)) if isinstance(e, Update)]
    assert [elements(update.weights)["down"] for update in updates] == [
        listed(MODEL, 0.5)["down"]
    ] * 4
    stages = [
        replace(recorded(rank, {name: MODEL[name]}), layout=Layout(axes={"pp": 2}))
        for rank, name in enumerate(("up", "down"))
    ]
    assert arrangements.shown(stages, [ALONE]) is None


def test_a_copy_is_the_rank_s_own() -> None:
    """What both ranks hold whole is compared between them."""
    spoilt = {**HALVES[1], "norm": NORM}
    ranks = [recorded(0, HALVES[0]), recorded(1, spoilt)]
    first, shard, update = ranks[1].events[0], ranks[1].events[2], ranks[1].events[3]
    assert isinstance(update, Update)
    moved = {**update.weights, **records({"norm": NORM + 1})}
    changed = Update(**{**{k: getattr(update, k) for k in update.__slots__}, "weights": moved})
    ranks[1] = RankTrace(
        life=0, header=ranks[1].header, events=(first, shard, changed), ended=True, problem=""
    )
    updates = [event for event in whole_of(ALONE, *ranks) if isinstance(event, Update)]
    norms = [elements(update.weights)["norm"] for update in updates]
    assert norms == [(0.5 * NORM).tolist(), (NORM + 1).tolist()]


@pytest.mark.parametrize("layout", [None, Layout(axes={"pp": 2})])
def test_stages_have_the_union_of_names_and_add_up_what_is_tied(layout: Layout | None) -> None:
    """A stage that counts from zero is renamed; a tensor of both has both terms of its gradient.

    So is one whose ranks declare that they are stages.
    """
    alone = recorded(0, {"0": UP, "1": DOWN, "norm": NORM}, (5, 6), size=1, samples="content")
    ranks = [
        recorded(0, {"0": UP, "norm": NORM}, (5, 6), samples="content"),
        recorded(
            1, {"0": DOWN, "head": NORM}, (8, 9), samples="content", gradient={"head": NORM * 2}
        ),
    ]
    ranks = [replace(rank, layout=layout) for rank in ranks]
    events = whole_of(alone, *ranks)
    starts = [elements(event.weights) for event in events if isinstance(event, Start)]
    assert starts == [listed({"0": UP, "norm": NORM, "1": DOWN})] * 2
    (shard,) = (event for event in events if isinstance(event, Shard))
    assert shard.ids == (5, 6)
    assert elements(shard.gradient)["norm"] == (3 * NORM).tolist()


def test_tables_on_one_rank_each_have_no_gradient_of_a_micro_batch() -> None:
    """Ranks with samples of their own share tables: a table's gradient is of all samples."""
    alone = recorded(0, {"a": UP, "b": DOWN, "norm": NORM}, (0, 1, 2, 3), size=1)
    ranks = [
        recorded(0, {"a": UP, "norm": NORM}, (0, 1)),
        recorded(1, {"b": DOWN, "norm": NORM}, (2, 3)),
    ]
    events = whole_of(alone, *ranks)
    updates = [sorted(event.weights) for event in events if isinstance(event, Update)]
    assert updates == [["a", "b", "norm"]] * 2
    shards = [event for event in events if isinstance(event, Shard)]
    assert [(shard.ids, sorted(shard.gradient)) for shard in shards] == [
        ((0, 1), ["norm"]),
        ((2, 3), ["norm"]),
    ]
    summed = [update.summed for update in events if isinstance(update, Update)]
    assert summed == [{"a": (), "b": ()}] * 2


def test_padding_is_no_part_of_a_tensor() -> None:
    """A flat tensor of seven elements on two ranks has an eighth, which one worker lacks."""
    flat, padded = UP.reshape(-1)[:7], np.append(UP.reshape(-1)[:7], np.float32(0))
    alone = recorded(0, {"flat": flat}, (0, 1, 2, 3), size=1)
    ranks = [recorded(rank, {"flat": padded[4 * rank :][:4]}, (2 * rank,)) for rank in range(2)]
    updates = [event for event in whole_of(alone, *ranks) if isinstance(event, Update)]
    assert [elements(update.weights) for update in updates] == [listed({"flat": flat}, 0.5)] * 2


def test_buffers_follow_their_layers() -> None:
    """A later stage's statistics get its layer's name; a rank's own offset is local."""
    counts, zeros = np.zeros(2, np.float32), np.ones(2, np.float32)

    def stage(rank: int, weights: Weights, size: int = 2) -> RankTrace:
        buffers = {f"{next(iter(weights))}.mean": counts, "offset": zeros * rank}
        one = recorded(rank, {f"{name}.w": v for name, v in weights.items()}, (5,), size=size)
        first = replace(one.events[0], buffers=records(buffers))  # type: ignore[call-arg]
        update = replace(one.events[3], buffers=records(buffers))  # type: ignore[call-arg]
        return replace(one, events=(first, one.events[2], update), local=frozenset())

    events = whole_of(stage(0, {"0": UP, "1": DOWN}, 1), stage(0, {"0": UP}), stage(1, {"0": DOWN}))
    updates = [event for event in events if isinstance(event, Update)]
    assert [sorted(update.buffers) for update in updates] == [["0.mean", "1.mean"]] * 2
    assert [sorted(update.local) for update in updates] == [["offset"]] * 2


def test_where_nothing_is_shown_nothing_is_arranged() -> None:
    """Replicas, a rank with weights of its own, and unlike samples beside unknown ones stay so."""
    assert arrangements.shown([recorded(rank, MODEL) for rank in range(2)], [ALONE]) is None
    strange = recorded(1, {**HALVES[1], "norm": NORM + 1})
    assert arrangements.shown([recorded(0, HALVES[0]), strange], [ALONE]) is None
    ranks = [
        recorded(rank, HALVES[rank % 2], ids, size=3) for rank, ids in enumerate([(0,), (1,), ()])
    ]
    assert arrangements.shown(ranks, [ALONE]) is None


ROW = (3.0, 1.0, 2.0, 5.0)


def drawing(rank: int, *steps: tuple[int, ...], samples: str = "index") -> RankTrace:
    shards = [traces.shard(step, rank, ids=ids, loss_sum=None) for step, ids in enumerate(steps)]
    header = {"rank": rank, "world_size": 2, "samples": samples}
    return RankTrace(life=0, header=header, events=tuple(shards), ended=True, problem="")


def given(rank: int, *parts: tuple[float, ...], life: int = 0) -> RankTrace:
    """Return the record of a rank whose model is given a row, or a part of one, in each step."""
    shards = [
        traces.shard(
            step,
            rank,
            loss_sum=None,
            ids=(10 * rank + step,),
            contents=((float(len(part)), math.hypot(*part), sum(part)),),
        )
        for step, part in enumerate(parts, start=life)
    ]
    return replace(drawing(rank), events=tuple(shards), life=life)


def test_ranks_that_draw_the_same_samples_are_one_group() -> None:
    """In another order, too; with others in one step they are several groups."""
    one = arrangements.batches_of(drawing(0, (0, 1), (2, 3)))
    for second, due in (((3, 2), (0, 0)), ((4, 5), (0, 1))):
        ranks = [drawing(0, (0, 1), (2, 3)), drawing(1, (1, 0), second)]
        assert arrangements.groups_of(arrangements.drawn_batches(ranks, one), 2) == due


def test_a_later_stage_is_given_no_samples() -> None:
    """Its rows are none of those of one worker: it works on the first stage's samples."""
    first, later = drawing(0, (10, 11), samples="content"), drawing(1, (7, 8), samples="content")
    drawn = arrangements.drawn_batches([first, later], arrangements.batches_of(first))
    assert sorted(drawn) == [0]
    assert arrangements.groups_of(drawn, 2) == (0, 0)
    assert (
        arrangements.groups_of(
            {0: arrangements.batches_of(first), 1: arrangements.batches_of(later)}, 3
        )
        is None
    )
    assert [
        event.ids
        for event in arrangements.without_samples(later).events
        if isinstance(event, Shard)
    ] == [()]


@pytest.mark.parametrize(
    ("parts", "are_parts"),
    [
        ([ROW[:2], ROW[2:]], True),
        ([ROW[::2], ROW[1::2]], True),
        ([ROW[:1], ROW[1:]], True),
        ([ROW[:2], ROW[:2]], False),
        ([ROW, ROW], False),
        ([ROW[:2], ROW[1:3]], False),
    ],
)
def test_parts_of_a_row_have_its_numbers_together(
    parts: list[tuple[float, ...]], are_parts: bool
) -> None:
    """Halves of unequal size are parts; a half that is given twice, or the whole row, is none."""
    ranks = [given(rank, part) for rank, part in enumerate(parts)]
    assert arrangements.are_parts(ranks, arrangements.batches_of(given(2, ROW))) is are_parts


def test_ranks_with_parts_have_the_samples_of_one_worker() -> None:
    """A rank that is started again goes on where it was; a step of no other run says nothing."""
    one = arrangements.batches_of(given(2, ROW, ROW))
    ranks = [given(rank, ROW[2 * rank :][:2], life=life) for rank in (0, 1) for life in (0, 1, 2)]
    assert arrangements.are_parts(ranks, one)
    first = [arrangements.with_whole_rows(rank, one).events for rank in ranks[:3]]
    ids = [[event.ids for event in events if isinstance(event, Shard)] for events in first]
    assert ids == [[(20,)], [(21,)], [(2,)]]
    assert not arrangements.are_parts(ranks[2::3], one), "no step is one worker's"
