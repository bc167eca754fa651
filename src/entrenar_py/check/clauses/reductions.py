"""F-RED-001 to F-RED-004: the averages that a star, a mesh and a ring compute, and their cost.

They are judged on the workload `vectors`, for which the mean is known in advance. `expected_bytes`
computes how many bytes must be sent. The bound on the error is derived in docs/numerics.md. Source:
reduction-v1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from entrenar_py.check import evidence
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing
from entrenar_py.check.evidence.needs import TWIN, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Membership, Reduced, Shard, Trace, Traffic
from entrenar_py.shared.verdict import Finding, Tally

KNOWN = "vectors"  # the workload with known terms
AROUND = "ring"  # the topology in which partial sums pass from worker to worker
UNIT_ROUNDOFF, UNIT_ROUNDOFF_F64 = 2.0**-24, 2.0**-53
NUM_SHARDS = 8
_MISSING = f"no reduction of known vectors was run (workload {KNOWN})"

# (length, bytes of a block): a single element; fewer elements than workers; 17 blocks of two sizes;
# one block, which one worker averages.
SIZES = ((1, 4), (3, 4), (997, 240), (4_099, 2**20))
# Socket buffers of 4 KiB are smaller than a block. TIGHT has (workers, length, bytes of a block),
# with blocks for every worker, so that all write at the same time.
SMALL = {"socket_bytes": 4_096, "dead_after_s": 30.0, "deadline_s": 60.0}
TIGHT = ((2, 300_007, 2**20), (3, 65_537, 2**16), (8, 100_003, 2**15))
# 256 MiB in two blocks, with the usual socket buffers of 4 MiB.
LONG = {"block_bytes": 2**27, "dead_after_s": 60.0, "deadline_s": 110.0}


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan simulated runs with 2 to 8 workers and 1 to 4,099 elements, and runs over TCP.

    Some TCP runs have blocks larger than a socket's buffer. Others are long: 2^24 elements on a
    mesh, and 2^26 on a ring. More elements on a mesh would test nothing new, but lengthen the run
    and its twin in one process. If a user's binding gives a clause no scenarios, only a few
    simulated runs are planned.
    """
    systems = ("parameter_server", "mesh", "ring")
    if invariant.binding is not None:
        return [
            _scenario(f"{system}_simulated", world_size, length, {"block_bytes": block_bytes})
            for system in systems
            for world_size, (length, block_bytes) in zip((2, 3, 4), SIZES, strict=False)
        ]
    simulated = [
        _scenario(f"{system}_simulated", world_size, length, {"block_bytes": block_bytes})
        for system in systems
        for world_size in range(2, 9)
        for length, block_bytes in SIZES
    ]
    real = [
        _scenario(system, world_size, length, {"block_bytes": block_bytes, **SMALL})
        for system in systems
        for world_size, length, block_bytes in TIGHT
    ]
    long = [
        _scenario(system, 2, length, LONG).with_(
            num_shards=3, num_samples=3, batch_size=3, num_steps=1
        )
        for system, length in (("mesh", 2**24), ("ring", 2**26))
    ]
    return [*simulated, *real, *long]


def _scenario(system: str, world_size: int, length: int, options: dict[str, float]) -> Scenario:
    """Return a scenario of two steps: shards of two or three samples, then of one.

    `options` are the options of the system.
    """
    return Scenario(
        system=system,
        workload=KNOWN,
        world_size=world_size,
        seed=world_size,
        num_shards=NUM_SHARDS,
        num_samples=27,
        batch_size=19,
        num_steps=2,
        width=length,
        options=options,
    )


def judge_mean(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that every rank has the weighted mean, within float32 rounding.

    A clause may state one of three tolerances instead: absolute; relative to the mean of the terms'
    absolute values (the mean itself if all terms have one sign); or in units of 2^-24 times that
    mean.
    """
    tally = Tally(invariant.id)
    for trace in _subjects(traces, tally):
        stated = invariant.tolerance, invariant.tolerance_kind
        allowed = _roundings_allowed(*stated, trace)
        _is_whole(tally, trace)
        seen = {(reduced.step, reduced.rank): reduced for reduced in trace.of(Reduced)}
        for step, by_rank in evidence.ranks_by_step(trace):
            if lacking := by_rank.keys() - {rank for at, rank in seen if at == step}:
                why = f"{missing.named(lacking)} measured nothing in step {step}"
                missing.ask(tally, why, facts.only_in_traces("a Reduced for every rank and step"))
        for reduced in seen.values():
            if allowed is None:
                _judge_error(tally, invariant, trace, reduced)
                continue
            tally.at_most(
                allowed,
                reduced.roundings,
                f"the average of {reduced.num_elements} elements is off by {reduced.roundings:.3g} "
                f"roundings, {_explained(invariant)} {allowed:.3g}",
                form=".3g",
                tensor="vector",
                element=reduced.element,
                **evidence.place(trace, reduced),
            )
    return tally.finding(nothing=missing.probed(invariant, _MISSING))


def _roundings_allowed(stated: float | None, kind: str | None, trace: Trace) -> float | None:
    """Return the allowed error in the units of `roundings_max`; None for an absolute tolerance."""
    if stated is None or kind not in ("absolute", "relative", "ulp"):
        return roundings_max(trace)
    if kind == "absolute":
        return None
    return stated / UNIT_ROUNDOFF if kind == "relative" else stated


def _explained(invariant: Invariant) -> str:
    if invariant.tolerance is None or invariant.tolerance_kind not in ("relative", "ulp"):
        return "its order of additions explains"
    return f"the {invariant.tolerance_kind} tolerance allows"


def _judge_error(tally: Tally, invariant: Invariant, trace: Trace, reduced: Reduced) -> None:
    if reduced.error is None:
        why = "how far the average is off was not measured"
        missing.ask(tally, why, facts.only_in_traces("Reduced.error"))
        return
    message = f"the average of {reduced.num_elements} elements is off by {reduced.error:.3g}"
    place = {"tensor": "vector", **evidence.place(trace, reduced)}
    tally.at_most(invariant.tolerance or 0.0, reduced.error, message, form="g", **place)


def roundings_max(trace: Trace) -> float:
    """Return the rounding bound, in units of 2^-24 times the mean of the terms' absolute values.

    In a tree a term passes through the additions of its shard, one addition per level, and the
    division. In a ring it passes through the additions of its shard, those of its worker's shards,
    one per worker, and the division.
    """
    scenario = trace.scenario
    shards, samples = scenario.num_shards, scenario.batch_size
    in_shard = -(-samples // shards) - 1
    if trace.traits.topology == AROUND:
        # The shards of a lost worker pass to other workers, in the worst case all to the same one.
        own = shards if scenario.faults else -(-shards // scenario.world_size)
        depth = in_shard + (own - 1) + (scenario.world_size - 1) + 1
    else:
        depth = in_shard + (shards - 1).bit_length() + 1
    bound = _gamma(depth, UNIT_ROUNDOFF) + _gamma(samples, UNIT_ROUNDOFF_F64)
    return bound / UNIT_ROUNDOFF


def _gamma(num: int, unit: float) -> float:
    return num * unit / (1 - num * unit)


def judge_bits(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that ranks have the same bits, and that a second reduction gives these bits, too."""
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    for trace in (run for run in runs if run.traits.topology):
        if not _is_whole(tally, trace):
            continue
        _compare_ranks(tally, trace)
        if trace is not runs.base:
            continue
        if trace.traits.topology == AROUND and trace.scenario.faults:
            continue  # without the lost worker, the ring adds in a different order
        for model in runs.of(TWIN):
            message = f"not the bits of {model.scenario.system}"
            closeness.compare_updates(tally, model, trace, "gradient", message)
        if not runs.of(TWIN):
            tally.miss(f"there is no other run to compare the run of {trace.scenario.system} with")
    return tally.finding(nothing=missing.probed(invariant, _MISSING))


def _is_whole(tally: Tally, trace: Trace) -> bool:
    """Return whether every rank, except lost ones, recorded every step. Count gaps as missing."""
    scenario, updates = trace.scenario, evidence.updates(trace)
    for step in range(scenario.num_steps):
        lacking = set(range(scenario.world_size)) - updates.get(step, {}).keys()
        if lacking and (step not in updates or not scenario.faults):
            why = f"{missing.named(lacking)} recorded nothing of step {step}"
            missing.ask(tally, why, facts.UPDATES)
            return False
    return True


def _compare_ranks(tally: Tally, trace: Trace) -> None:
    for _, by_rank in evidence.ranks_by_step(trace):
        lowest = evidence.any_rank(by_rank)
        for rank, update in sorted(by_rank.items()):
            place = evidence.place(trace, update)
            for part in ("gradient", "weights"):
                message = f"rank {rank} holds different bits from rank {lowest.rank} ({part})"
                left, right = getattr(lowest, part), getattr(update, part)
                closeness.compare_exact(tally, left, right, message, **place)


def judge_traffic(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that each rank sends and receives exactly its algorithm's payload.

    Headers must be small.
    """
    tally = Tally(invariant.id)
    for trace in _subjects(traces, tally):
        if trace.scenario.faults:
            continue  # an exchange that begins again is sent twice
        if trace.scenario.options.get("audit_share"):
            tally.miss("audited shards are sent twice or more: their traffic was not judged")
            continue
        expected = expected_bytes(trace)
        if expected is None:
            tally.miss(
                "the trace does not say in which blocks the vector was sent, or which worker "
                "computed which shards"
            )
            continue
        got = payload_bytes(trace)
        scenario = trace.scenario
        for (rank, peer, direction), num_bytes in expected.items():
            name = "the coordinator" if rank is None else f"rank {rank}"
            if not any(record.rank == rank for record in trace.of(Traffic)):
                fact = facts.only_in_traces("a Traffic for every rank")
                missing.ask(tally, f"it is unknown what {name} sent", fact)
                continue
            end = {"sent": "to", "got": "from"}[direction]
            bytes_recorded = got.get((rank, peer, direction), 0)
            other = "workers" if peer == "worker" else "the coordinator"
            what = f"{name} {direction} {bytes_recorded} bytes of gradient {end} {other}"
            tally.equal(num_bytes, bytes_recorded, what, rank=rank, scenario=scenario)
        _judge_headers(tally, trace)
    return tally.finding(nothing=missing.probed(invariant, _MISSING))


def _judge_headers(tally: Tally, trace: Trace) -> None:
    """Check that headers are small, and that only blocks have a payload between workers."""
    for record in trace.of(Traffic):
        what = f"{record.messages} {record.message} that were {record.direction}"
        place = evidence.place(trace, record)
        if record.message in BLOCKS:
            most = beside_bytes_max(record)
            extra = record.bytes - record.payload_bytes
            message = f"{what} have {extra} bytes more than the payload of these messages"
            tally.at_most(most, extra, message, **place)
        elif record.peer == "worker" and record.rank is not None:
            tally.equal(0, record.payload_bytes, f"{what} between workers have a payload", **place)


def judge_ends(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that every run completes, and no worker leaves or joins a run without faults."""
    tally = Tally(invariant.id)
    for trace in traces:
        scenario = trace.scenario
        if not trace.traits.topology:
            continue
        if not evidence.could_run(tally, trace):
            continue
        how = f"the run ended {trace.end.status}: {trace.end.reason}"
        ended = tally.equal("completed", trace.end.status, how, scenario=scenario)
        for change in trace.of(Membership) if ended and not scenario.faults else ():
            what = f"rank {change.rank} {change.change}, though no fault struck it: {change.reason}"
            tally.check(False, what, **evidence.place(trace, change))
    return tally.finding(nothing=missing.probed(invariant, _MISSING))


def _subjects(traces: Iterable[Trace], tally: Tally) -> Iterator[Trace]:
    for trace in evidence.usable(traces, tally):
        if trace.traits.topology and trace.scenario.workload == KNOWN:
            yield trace


# --- the bytes that each rank sends and receives --------------------------------------------------

# Computes the bytes of gradients that each rank of a star, a mesh or a ring must send and receive,
# from the scenario and the rank of each shard, independently of the trainers.

# The messages with blocks of gradients, averages, or new weights.
BLOCKS = ("TreeNode", "Partial", "Average", "Weights")
FRAME_BYTES, CHUNK_BYTES = 48, 2**22  # sizes of a frame's prefix and of its largest payload
# Of a message with a block: a few numbers of up to 24 digits, and their names.
HEADER_BYTES_MAX = 256

# (rank, or None for the coordinator; "worker" or "coordinator" as the peer; "sent" or "got") ->
# bytes.
Bytes = dict[tuple[int | None, str, str], int]


def payload_bytes(trace: Trace) -> Bytes:
    """Return the payload bytes of gradients that the trace recorded as sent and received."""
    total: Counter[tuple[int | None, str, str]] = Counter()
    for record in trace.of(Traffic):
        if record.message in BLOCKS:
            total[record.rank, record.peer, record.direction] += record.payload_bytes
    return dict(total)


def beside_bytes_max(record: Traffic) -> int:
    """Return how many bytes prefixes and headers of the messages in `record` may take at most."""
    frames = record.messages + record.payload_bytes // CHUNK_BYTES
    return FRAME_BYTES * frames + HEADER_BYTES_MAX * record.messages


def expected_bytes(trace: Trace) -> Bytes | None:
    """Return the payload bytes that each rank and the coordinator must send and receive.

    Return None if the blocks are unknown, or the rank that computed a shard. In a ring every block
    passes N - 1 workers twice. So the ranks together send 2 (N - 1) times the vector, and each rank
    sends 2 (N - 1) / N of the vector if the blocks divide evenly. In a mesh each rank sends its
    tree nodes to the rank that averages the block, and its own averages to all others. In a star
    each rank sends its nodes and receives the average.
    """
    scenario = trace.scenario
    sizes = block_bytes(scenario)
    if sizes is None:
        return None
    count = {"star": _star, "mesh": _mesh, "ring": _ring}[trace.traits.topology]
    total: Bytes = defaultdict(int)
    for step in range(scenario.num_steps):
        nodes = _nodes(trace, step)
        if nodes is None:
            return None
        for key, num_bytes in count(sizes, nodes).items():
            total[key] += num_bytes
    return total


def block_bytes(scenario: Scenario) -> list[int] | None:
    """Return the size of each block in bytes; None without option `block_bytes`.

    Sizes are as equal as possible.
    """
    longest = scenario.options.get("block_bytes")
    if longest is None:
        return None
    length = scenario.width
    count = min(-(-4 * length // (longest // 4 * 4)), length)
    ends = [block * length // count for block in range(count + 1)]
    return [4 * (end - start) for start, end in pairwise(ends)]


def num_nodes(shards: set[int], num_shards: int) -> int:
    """Return the smallest number of tree nodes that cover exactly `shards`.

    The tree is the reduction tree over `num_shards` shards.
    """
    nodes = {(0, shard) for shard in shards}
    level, width = 0, num_shards  # the number of nodes on this level
    while width > 1:
        for index in range(0, width, 2):
            pair = {(level, index), (level, min(index + 1, width - 1))}
            if pair <= nodes:
                nodes = (nodes - pair) | {(level + 1, index // 2)}
        level, width = level + 1, (width + 1) // 2
    return len(nodes)


def _nodes(trace: Trace, step: int) -> list[int] | None:
    """Return the number of tree nodes that each rank must send.

    Return None if shards are missing or occur twice.
    """
    shards_of: dict[int, set[int]] = {rank: set() for rank in range(trace.scenario.world_size)}
    for event in trace.of(Shard):
        if event.step == step:
            # A resumed run may have more ranks than its ledger's first line says.
            shards_of.setdefault(event.rank, set()).add(event.shard)
    num_shards = trace.scenario.num_shards
    if sorted(shard for shards in shards_of.values() for shard in shards) != list(
        range(num_shards)
    ):
        return None
    return [num_nodes(shards, num_shards) for shards in shards_of.values()]


def _star(sizes: list[int], nodes: list[int]) -> Bytes:
    num_bytes: Bytes = {
        (None, "worker", "sent"): len(nodes) * sum(sizes),
        (None, "worker", "got"): sum(nodes) * sum(sizes),
    }
    for rank, num in enumerate(nodes):
        num_bytes[rank, "coordinator", "sent"] = num * sum(sizes)
        num_bytes[rank, "coordinator", "got"] = sum(sizes)
    return num_bytes


def _mesh(sizes: list[int], nodes: list[int]) -> Bytes:
    num_bytes = _steered(len(nodes))
    for rank, num in enumerate(nodes):
        own = sum(sizes[rank :: len(nodes)])  # bytes of the blocks that this rank averages
        others = sum(sizes) - own
        num_bytes[rank, "worker", "sent"] = num * others + (len(nodes) - 1) * own
        num_bytes[rank, "worker", "got"] = (sum(nodes) - num) * own + others
    return num_bytes


def _ring(sizes: list[int], nodes: list[int]) -> Bytes:
    num_bytes = _steered(len(nodes))
    owned = [sum(sizes[rank :: len(nodes)]) for rank in range(len(nodes))]
    for rank in range(len(nodes)):
        before, after = owned[rank - 1], owned[(rank + 1) % len(nodes)]
        # A block's sums end at its owner, and its average at the rank just before the owner.
        num_bytes[rank, "worker", "sent"] = 2 * sum(sizes) - owned[rank] - after
        num_bytes[rank, "worker", "got"] = 2 * sum(sizes) - owned[rank] - before
    return num_bytes


def _steered(num_ranks: int) -> Bytes:
    """Return zero bytes for exchanges with the coordinator, since only workers exchange blocks."""
    num_bytes: Bytes = {(None, "worker", direction): 0 for direction in ("sent", "got")}
    for rank in range(num_ranks):
        for direction in ("sent", "got"):
            num_bytes[rank, "coordinator", direction] = 0
    return num_bytes


ROWS = (
    Check(
        name="reduction_mean",
        id="F-RED-001",
        decides="every rank's average is the weighted mean within rounding",
        spoken_of="allreduce all-reduce averaging arithmetic reduce-scatter sum inputs",
        judge=judge_mean,
        plan=plan,
        tolerance_kinds=("ulp", "relative", "absolute"),
        takes_tolerance=True,
    ),
    Check(
        name="reduction_bits",
        id="F-RED-002",
        decides="all ranks hold the same bits: those of the tree, or in a ring those of every run",
        spoken_of="allreduce all-reduce identical output all-gather",
        judge=judge_bits,
        plan=plan,
        needs=(TWIN,),
    ),
    Check(
        name="reduction_traffic",
        id="F-RED-003",
        decides="each rank sends and receives only the payload that its algorithm needs",
        spoken_of="bandwidth bytes sent optimal transferred",
        judge=judge_traffic,
        plan=plan,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="reduction_ends",
        id="F-RED-004",
        decides="a reduction ends for every number of workers, vector length and block size",
        spoken_of="deadlock timeout circular hang blocked",
        judge=judge_ends,
        plan=plan,
    ),
)
