"""How many bytes of gradient each rank of a star, a mesh or a ring has to send, and to get.

Counted from the scenario and from who computed which shards; nothing here asks the trainers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from entrenar_py.scenario import Scenario
from entrenar_py.trace import Shard, Trace, Traffic

# The messages that carry parts of the gradient, or of what was made of it.
BLOCKS = ("TreeNode", "Partial", "Average", "Weights")
FRAME_BYTES, CHUNK_BYTES = 48, 2**22  # a frame's prefix, and how much payload it has at most
HEADER_BYTES_MAX = 256  # of one such message: a few numbers of at most 24 digits, and their names

# (rank, or None for the coordinator; with a worker or the coordinator; sent or got) -> bytes.
Bytes = dict[tuple[int | None, str, str], int]


def payload_bytes(trace: Trace) -> Bytes:
    """Return what the trace says that was sent and got of gradients."""
    found: Counter[tuple[int | None, str, str]] = Counter()
    for one in trace.of(Traffic):
        if one.message in BLOCKS:
            found[one.rank, one.peer, one.direction] += one.payload_bytes
    return dict(found)


def beside_bytes_max(one: Traffic) -> int:
    """The most that prefixes and headers of these messages may take."""
    frames = one.messages + one.payload_bytes // CHUNK_BYTES
    return FRAME_BYTES * frames + HEADER_BYTES_MAX * one.messages


def expected_bytes(trace: Trace) -> Bytes | None:
    """Return what every rank has to send and to get, and the coordinator; None if the blocks are
    unknown, or who computed what.

    Around a ring every block passes N - 1 workers twice, so that the ranks send 2 (N - 1) times the
    vector together, 2 (N - 1) / N each where the blocks can be dealt evenly. In a mesh each rank
    sends its tree nodes to who averages the block, and what it averages to the others. In a star it
    sends its nodes, and gets the average.
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
    """The size of each block: as equal as can be, none longer than the scenario says."""
    longest = scenario.options.get("block_bytes")
    if longest is None:
        return None
    length = scenario.width
    count = min(-(-4 * length // (longest // 4 * 4)), length)
    ends = [block * length // count for block in range(count + 1)]
    return [4 * (end - start) for start, end in pairwise(ends)]


def num_nodes(shards: set[int], num_shards: int) -> int:
    """Return how few nodes of the tree over `num_shards` leaves cover `shards` and nothing else."""
    nodes = {(0, shard) for shard in shards}
    level, width = 0, num_shards  # nodes that there are on this level
    while width > 1:
        for index in range(0, width, 2):
            pair = {(level, index), (level, min(index + 1, width - 1))}
            if pair <= nodes:
                nodes = (nodes - pair) | {(level + 1, index // 2)}
        level, width = level + 1, (width + 1) // 2
    return len(nodes)


def _nodes(trace: Trace, step: int) -> list[int] | None:
    """Return the number of tree nodes that each rank has to send; None if a shard is no rank's."""
    shards_of: dict[int, set[int]] = {rank: set() for rank in range(trace.scenario.world_size)}
    for one in trace.of(Shard):
        if one.step == step:
            shards_of[one.rank].add(one.shard)
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
        own = sum(sizes[rank :: len(nodes)])  # of the blocks that it averages
        others = sum(sizes) - own
        num_bytes[rank, "worker", "sent"] = num * others + (len(nodes) - 1) * own
        num_bytes[rank, "worker", "got"] = (sum(nodes) - num) * own + others
    return num_bytes


def _ring(sizes: list[int], nodes: list[int]) -> Bytes:
    num_bytes = _steered(len(nodes))
    owned = [sum(sizes[rank :: len(nodes)]) for rank in range(len(nodes))]
    for rank in range(len(nodes)):
        before, after = owned[rank - 1], owned[(rank + 1) % len(nodes)]
        # Sums end at the owner, who sends its average, which ends before the owner.
        num_bytes[rank, "worker", "sent"] = 2 * sum(sizes) - owned[rank] - after
        num_bytes[rank, "worker", "got"] = 2 * sum(sizes) - owned[rank] - before
    return num_bytes


def _steered(num_ranks: int) -> Bytes:
    """The coordinator of workers that exchange blocks among themselves carries none."""
    num_bytes: Bytes = {(None, "worker", direction): 0 for direction in ("sent", "got")}
    for rank in range(num_ranks):
        for direction in ("sent", "got"):
            num_bytes[rank, "coordinator", direction] = 0
    return num_bytes
