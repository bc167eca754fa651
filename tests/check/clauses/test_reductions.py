"""Averages of a star, a mesh and a ring, and the bytes that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check.clauses import CHECKS, reductions
from entrenar_py.check.contract import Binding, Position
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Membership, Reduced, Shard, Start, Trace, Traffic, Update
from entrenar_py.shared.verdict import Finding, Verdict
from entrenar_py.train.arithmetic import blocks, reduction
from tests import traces
from tests.traces import altered, left_open, undecided

REAL = ("parameter_server", "mesh", "ring")
SIMULATED = tuple(f"{name}_simulated" for name in REAL)
CHECKED = ("reduction_mean", "reduction_bits", "reduction_traffic", "reduction_ends")
PLANNED = CHECKS["reduction_mean"].plan(traces.clause("reduction_mean"))


def small(system: str, world_size: int) -> list[Scenario]:
    """Return the planned scenarios that are tried here: every length, few numbers of workers."""
    return [
        one
        for one in PLANNED
        if (one.system, one.world_size) == (system, world_size) and one.width < 10_000
    ]


RIGHT = small("ring_simulated", 3)[2]
MESHED = small("mesh_simulated", 3)[2]


def judged(check: str, trace: Trace) -> Finding:
    """Judge the family of `trace`, with `trace` in place of the right run."""
    return traces.judge(check, [trace, *traces.family(check, trace.scenario)[1:]])


@pytest.mark.parametrize("world_size", [2, 5, 8])
@pytest.mark.parametrize("system", SIMULATED)
@pytest.mark.parametrize("check", CHECKED)
def test_right_reductions_hold(check: str, system: str, world_size: int) -> None:
    """One element, fewer than workers, many blocks, and one block hold."""
    subjects = small(system, world_size)
    assert len(subjects) == 4
    for subject in subjects:
        finding = traces.held(check, *traces.family(check, subject))
        assert finding.compared > (0 if check == "reduction_ends" else world_size)


@pytest.mark.parametrize("system", REAL)
def test_real_ones_hold_where_no_block_fits_into_a_socket(system: str) -> None:
    """Processes over TCP with socket buffers of 4 KiB hold."""
    (subject,) = [
        one for one in PLANNED if (one.system, one.world_size) == (system, 3) and one.width < 2**20
    ]
    assert subject.options["block_bytes"] > 10 * subject.options["socket_bytes"]
    for check in CHECKED:
        traces.held(check, *traces.family(check, subject))


def test_the_plan_of_a_bound_statement_is_small() -> None:
    """A clause bound by a user is tried on nine small runs, not on the plan of reduction-v1."""
    binding = Binding(kind="obligation", item="mean", position=Position("x.yaml", 1, 1))
    planned = CHECKS["reduction_mean"].plan(
        replace(traces.clause("reduction_mean"), binding=binding)
    )
    assert len(planned) == 9
    assert {one.system for one in planned} == {*SIMULATED}
    assert max(one.width for one in planned) < 1_000


def test_the_plan_reaches_what_it_says() -> None:
    """The plan has every number of workers on every system, and 2^26 elements in 128 MiB blocks."""
    for system in SIMULATED:
        assert {one.world_size for one in PLANNED if one.system == system} == set(range(2, 9))
        assert any(one.width < one.world_size for one in PLANNED if one.system == system)
    assert max((one.width, one.system) for one in PLANNED) == (2**26, "ring")
    assert max(one.options["block_bytes"] for one in PLANNED) == 2**27
    assert {one.system for one in PLANNED if "socket_bytes" in one.options} == {*REAL}


def test_every_rank_is_measured() -> None:
    """Each rank's largest error is a few roundings, but not zero."""
    run = traces.run(RIGHT)
    found = run.of(Reduced)
    assert {(one.step, one.rank) for one in found} == {(s, r) for s in (0, 1) for r in (0, 1, 2)}
    assert all(0.5 < one.roundings < reductions.roundings_max(traces.run(RIGHT)) for one in found)
    assert all(one.num_elements == 997 for one in found)


@pytest.mark.parametrize(
    ("system", "world_size", "most"),
    [("mesh", 3, 2 + 3 + 1), ("ring", 3, 2 + 2 + 2 + 1), ("ring", 8, 2 + 0 + 7 + 1)],
)
def test_the_bound_counts_additions(system: str, world_size: int, most: int) -> None:
    """The bound counts 2 additions in the largest shard, those of tree or ring, and a division."""
    bound = reductions.roundings_max(
        traces.hand_written(subject=RIGHT.with_(system=system, world_size=world_size))
    )
    assert most < bound < most * 1.001


@pytest.mark.parametrize("roundings", [7.1, float("inf"), float("nan")])
def test_a_mean_that_is_off(roundings: float) -> None:
    """A wrong or non-finite average is named by step, rank and element."""
    wrong = traces.altered(
        traces.run(RIGHT), Reduced, {"step": 1, "rank": 2}, roundings=roundings, element=4
    )
    found = traces.broken(judged("reduction_mean", wrong))
    assert (found.step, found.rank, found.tensor, found.element) == (1, 2, "vector", 4)


def test_bits_of_another_rank() -> None:
    """A rank that holds other bits than the others is found."""
    digest = {"vector": traces.values(1.0)}
    wrong = traces.altered(traces.run(RIGHT), Update, {"step": 1, "rank": 2}, weights=digest)
    found = traces.broken(judged("reduction_bits", wrong))
    assert (found.step, found.rank) == (1, 2)


@pytest.mark.parametrize("subject", [RIGHT, MESHED], ids=["ring", "mesh"])
def test_bits_of_another_sum(subject: Scenario) -> None:
    """Bits that all ranks share, but not the other run of the ring or the tree, are found."""
    digest = {"vector": traces.values(1.0)}
    wrong = traces.altered(traces.run(subject), Update, {"step": 1}, gradient=digest)
    found = traces.broken(judged("reduction_bits", wrong))
    assert (found.step, found.rank) == (1, 0)
    assert "not the bits of" in found.message


@pytest.mark.parametrize("more", [-4, 4])
@pytest.mark.parametrize("subject", [RIGHT, MESHED], ids=["ring", "mesh"])
def test_an_element_more_or_less(subject: Scenario, more: int) -> None:
    """One element more or less is found, sent or received."""
    for direction in ("sent", "got"):
        place = {"rank": 1, "direction": direction, "message": "Average"}
        one = traces.one(traces.run(subject), Traffic, **place)
        wrong = traces.altered(
            traces.run(subject), Traffic, place, payload_bytes=one.payload_bytes + more
        )
        found = traces.broken(judged("reduction_traffic", wrong))
        assert found.rank == 1
        assert int(found.got or 0) - int(found.expected or 0) == more


@pytest.mark.parametrize(
    ("message", "peer", "said"),
    [
        ("Average", "worker", "bytes more than the payload"),
        ("Heartbeat", "worker", "between workers have a payload"),
        ("TreeNode", "coordinator", "bytes of gradient to the coordinator"),
    ],
)
def test_what_is_carried_beside(message: str, peer: str, said: str) -> None:
    """Large headers, unexpected payloads, and gradients through the coordinator are found."""
    payload = 0 if message == "Average" else 4_000
    more = Traffic(
        rank=2,
        peer=peer,
        direction="sent",
        message=message,
        messages=1,
        payload_bytes=payload,
        bytes=4_304 + 1,
    )
    run = traces.run(RIGHT)
    found = traces.broken(judged("reduction_traffic", replace(run, events=(*run.events, more))))
    assert found.rank == 2
    assert said in found.message


def test_copies_are_no_needless_traffic() -> None:
    """With audits the traffic clause is inconclusive, and all others hold."""
    whole = small("parameter_server_simulated", 3)[0]
    run = traces.run(whole.with_(options={**whole.options, "audit_share": 0.5}))
    assert undecided(judged("reduction_traffic", run)).startswith("audited shards are sent twice")


@pytest.mark.parametrize("status", ["failed", "halted"])
def test_a_run_that_does_not_end(status: str) -> None:
    """Its failure is the finding's reason, and the other clauses have nothing to judge."""
    run = traces.run(RIGHT)
    end = End(status=status, reason="not finished after 60 s")
    stuck = replace(run, events=(*run.events[:-1], end))
    found = traces.broken(judged("reduction_ends", stuck))
    assert "not finished after 60 s" in found.message
    if status == "failed":
        for check in CHECKED[:3]:
            left_open(check, stuck)


def test_a_worker_that_was_given_up() -> None:
    """A worker dropped without a fault, as silent or disconnected, is found."""
    run = traces.run(RIGHT)
    left = Membership(step=1, rank=2, change="left", reason="silent for 10.0 s")
    found = traces.broken(judged("reduction_ends", replace(run, events=(left, *run.events))))
    assert (found.step, found.rank) == (1, 2)


@pytest.mark.parametrize(
    ("check", "lacking"),
    [
        ("reduction_mean", Reduced),
        ("reduction_mean", Update),
        ("reduction_traffic", Traffic),
        ("reduction_traffic", Shard),
        ("reduction_bits", Update),
    ],
)
def test_nothing_is_held_of_what_was_not_recorded(
    check: str, lacking: type[Reduced | Traffic | Shard | Update]
) -> None:
    """A missing fact makes the clause inconclusive."""
    for place in ({}, {"rank": 2}):
        bare = traces.without(traces.run(RIGHT), lacking, **place)
        assert judged(check, bare).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("check", CHECKED)
def test_nothing_at_all(check: str) -> None:
    """No run, a crashed run, a run without its twin, and another workload are inconclusive."""
    other = traces.run(traces.scenario(num_steps=2))
    crashed = traces.failed(RIGHT)
    for found in ([], [other], [crashed]):
        left_open(check, *found)
    if check == "reduction_bits":
        left_open(check, traces.run(RIGHT))


def test_a_run_that_never_began_is_not_called_stuck() -> None:
    """A run in which no worker got the state says nothing about the exchange."""
    bare = traces.without(traces.run(RIGHT), Start)
    end = End(status="failed", reason="workers did not come")
    bare = replace(bare, events=(*bare.events[:-1], end))
    left_open("reduction_ends", bare)


@pytest.mark.parametrize(
    ("kind", "holds", "breaks"),
    [("absolute", 2e-6, 1e-6), ("relative", 16 * 2.0**-24, 14 * 2.0**-24), ("ulp", 15.0, 14.0)],
)
def test_a_clause_may_say_how_far_an_average_may_be_off(
    kind: str, holds: float, breaks: float
) -> None:
    """A clause's own tolerance, of its kind, replaces the rounding bound."""
    run = traces.family("reduction_mean", RIGHT)[0]
    clause = replace(traces.clause("reduction_mean"), tolerance_kind=kind)
    for tolerance, verdict in ((holds, Verdict.HELD), (breaks, Verdict.FALSIFIED)):
        allowing = replace(clause, tolerance=tolerance)
        finding = reductions.judge_mean(
            allowing, Runs(altered(run, Reduced, {}, roundings=15.0, error=1.5e-6))
        )
        assert finding.verdict is verdict, finding
    finding = reductions.judge_mean(
        replace(clause, tolerance=1.0), Runs(altered(run, Reduced, {}, error=None))
    )
    assert (finding.verdict is Verdict.INCONCLUSIVE) == (kind == "absolute")


@pytest.mark.parametrize("system", SIMULATED)
def test_vectors_that_a_clause_states_are_averaged(system: str) -> None:
    """Vectors stated by a clause are averaged: 3 workers, 7 elements, blocks of 12 bytes."""
    terms = [[1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1], [0, 0, 0, 0, 0, 0, 0]]
    subject = Scenario(
        system=system,
        workload="vectors",
        world_size=3,
        seed=0,
        num_shards=3,
        num_samples=3,
        batch_size=3,
        num_steps=1,
        width=7,
        detail="values",
        options={"terms": terms, "block_bytes": 12},
    )
    for check in CHECKED:
        traces.held(check, *traces.family(check, subject))
    update = traces.family("reduction_mean", subject)[0].of(Update)[0]
    values = update.gradient["vector"].values()
    assert values is not None
    assert [f"{value:.6f}" for value in values] == ["2.666667"] * 7


# --- bytes ----------------------------------------------------------------------------------------


def subject(system: str, **changes: object) -> Scenario:
    """Return a run of one step: vectors of 10 elements, in blocks of 12, 12 and 16 bytes."""
    usual = {"workload": "vectors", "world_size": 3, "num_shards": 4, "num_steps": 1, "width": 10}
    options = {"options": {"block_bytes": 16}}
    return traces.scenario(system=system, **{**usual, **options, **changes})


def expected(system: str, ranks: tuple[int, ...] = (0, 0, 1, 2)) -> reductions.Bytes | None:
    shards = [traces.shard(0, rank, shard=shard, loss_sum=0.0) for shard, rank in enumerate(ranks)]
    return reductions.expected_bytes(traces.hand_written(*shards, subject=subject(system)))


def test_around_a_ring() -> None:
    """Rank 0 owns the first 12 bytes: it does not send their sum, nor does rank 2 their average."""
    assert expected("ring") == {
        (0, "worker", "sent"): 80 - 12 - 12,
        (0, "worker", "got"): 80 - 12 - 16,
        (1, "worker", "sent"): 80 - 12 - 16,
        (1, "worker", "got"): 80 - 12 - 12,
        (2, "worker", "sent"): 80 - 16 - 12,
        (2, "worker", "got"): 80 - 16 - 12,
        **NOTHING,
    }


def test_in_a_mesh() -> None:
    """Each rank sends a node of each other block to its owner, and its average to two ranks."""
    assert expected("mesh_simulated") == {
        (0, "worker", "sent"): 28 + 2 * 12,
        (0, "worker", "got"): 2 * 12 + 28,
        (1, "worker", "sent"): 28 + 2 * 12,
        (1, "worker", "got"): 2 * 12 + 28,
        (2, "worker", "sent"): 24 + 2 * 16,
        (2, "worker", "got"): 2 * 16 + 24,
        **NOTHING,
    }


def test_more_nodes_than_workers() -> None:
    """Shards 0 and 2 of rank 0 are no common node, so it sends both."""
    found = expected("mesh", (0, 1, 0, 2))
    assert found is not None
    assert found[0, "worker", "sent"] == 2 * 28 + 2 * 12
    assert found[2, "worker", "got"] == 3 * 16 + 24


def test_what_can_not_be_counted() -> None:
    """None is returned for a shard of no rank, or without the blocks' size."""
    assert expected("mesh", (0, 1, 2)) is None
    bare = subject("ring", options={})
    assert reductions.expected_bytes(traces.hand_written(subject=bare)) is None


def test_in_a_star() -> None:
    """The coordinator carries everything."""
    found = expected("parameter_server")
    assert found is not None
    assert found.pop((None, "worker", "sent")) == found.pop((None, "worker", "got")) == 120
    assert set(found.values()) == {40}
    assert len(found) == 6


NOTHING = {
    (rank, peer, direction): 0
    for rank, peer in ((None, "worker"), *((rank, "coordinator") for rank in range(3)))
    for direction in ("sent", "got")
}


@given(st.integers(2, 8), st.integers(1, 500), st.integers(4, 600))
def test_a_ring_sends_what_the_formula_says(world_size: int, length: int, block_bytes: int) -> None:
    """All ranks together send and get 2 (N - 1) times the vector, in any blocks."""
    sizes = reductions.block_bytes(
        subject("ring", width=length, options={"block_bytes": block_bytes})
    )
    assert sizes is not None
    found = reductions._ring(sizes, [1] * world_size)
    for direction in ("sent", "got"):
        total = sum(n for (_, _, way), n in found.items() if way == direction)
        assert total == 2 * (world_size - 1) * 4 * length


@given(st.integers(1, 500), st.integers(4, 600))
def test_blocks_are_cut_as_the_trainers_cut_them(length: int, block_bytes: int) -> None:
    """The check's sizes of blocks equal the trainers'."""
    sizes = reductions.block_bytes(
        subject("ring", width=length, options={"block_bytes": block_bytes})
    )
    assert sizes is not None
    cut = blocks.Blocks(length, len(sizes))
    assert sizes == [cut.num_bytes(block) for block in range(cut.count)]
    assert max(sizes) <= block_bytes


@given(st.integers(1, 40), st.data())
def test_nodes_are_folded_as_the_trainers_fold_them(num_shards: int, data: st.DataObject) -> None:
    """The check's number of nodes equals the trainers', for any shards of any tree."""
    held = data.draw(st.sets(st.integers(0, num_shards - 1), min_size=1))
    leaves = [reduction.Node(0, shard, blocks.vector_of(bytes(4)), 0.0, 0.0) for shard in held]
    assert reductions.num_nodes(held, num_shards) == len(reduction.fold(leaves, num_shards))


@pytest.mark.parametrize(
    ("messages", "payload_bytes", "most"), [(0, 0, 0), (1, 4, 304), (3, 2**23 + 4, 3 * 304 + 96)]
)
def test_what_may_come_beside_payloads(messages: int, payload_bytes: int, most: int) -> None:
    """Each message may have a header, and each frame a prefix."""
    one = Traffic(
        rank=0,
        peer="worker",
        direction="sent",
        message="Average",
        messages=messages,
        payload_bytes=payload_bytes,
        bytes=0,
    )
    assert reductions.beside_bytes_max(one) == most
