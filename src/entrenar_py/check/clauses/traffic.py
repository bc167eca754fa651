"""The bytes of gradient that each rank of a star, a mesh or a ring must send and receive.

They are computed from the scenario and the rank of each shard, independently of the trainers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Shard, Trace, Traffic

# The messages that carry blocks of gradients, of averages, or of new weights.
BLOCKS = ("TreeNode", "Partial", "Average", "Weights")
FRAME_BYTES, CHUNK_BYTES = 48, 2**22  # the size of a frame's prefix, and of its largest payload
HEADER_BYTES_MAX = 256  # of one such message: a few numbers of at most 24 digits, and their names

# (rank, None for the coordinator; peer: "worker" or "coordinator"; "sent" or "got") -> bytes.
Bytes = dict[tuple[int | None, str, str], int]


def payload_bytes(trace: Trace) -> Bytes:
    """Return the payload bytes of gradients that the trace recorded as sent and received."""
    total: Counter[tuple[int | None, str, str]] = Counter()
    for record in trace.of(Traffic):
        if record.message in BLOCKS:
            total[record.rank, record.peer, record.direction] += record.payload_bytes
    return dict(total)


def beside_bytes_max(record: Traffic) -> int:
    """Return the most bytes that prefixes and headers of the messages in `record` may take."""
    frames = record.messages + record.payload_bytes // CHUNK_BYTES
    return FRAME_BYTES * frames + HEADER_BYTES_MAX * record.messages


def expected_bytes(trace: Trace) -> Bytes | None:
    """Return the payload bytes that each rank and the coordinator must send and receive.

    None if it is unknown which blocks there are, or which rank computed which shards. In a ring
    every block passes N - 1 workers twice: the ranks together send 2 (N - 1) times the vector, and
    each sends 2 (N - 1) / N of it if the blocks divide evenly. In a mesh each rank sends its tree
    nodes to the rank that averages the block, and its own averages to all others. In a star each
    rank sends its nodes and gets the average.
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
    """Return the size of each block, as equal as possible; None without option `block_bytes`."""
    longest = scenario.options.get("block_bytes")
    if longest is None:
        return None
    length = scenario.width
    count = min(-(-4 * length // (longest // 4 * 4)), length)
    ends = [block * length // count for block in range(count + 1)]
    return [4 * (end - start) for start, end in pairwise(ends)]


def num_nodes(shards: set[int], num_shards: int) -> int:
    """Return the least number of nodes of the tree over `num_shards` that cover just `shards`."""
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
    """Return how many tree nodes each rank must send; None if a shard is missing or comes twice."""
    shards_of: dict[int, set[int]] = {rank: set() for rank in range(trace.scenario.world_size)}
    for event in trace.of(Shard):
        if event.step == step:
            shards_of[event.rank].add(event.shard)
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
        # A block's sums end at its owner, and its average at the rank just before the owner.
        num_bytes[rank, "worker", "sent"] = 2 * sum(sizes) - owned[rank] - after
        num_bytes[rank, "worker", "got"] = 2 * sum(sizes) - owned[rank] - before
    return num_bytes


def _steered(num_ranks: int) -> Bytes:
    """Return zero bytes for each exchange with the coordinator: only workers exchange blocks."""
    num_bytes: Bytes = {(None, "worker", direction): 0 for direction in ("sent", "got")}
    for rank in range(num_ranks):
        for direction in ("sent", "got"):
            num_bytes[rank, "coordinator", direction] = 0
    return num_bytes
