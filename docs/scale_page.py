"""Computes the seconds of a step for any number of workers, and writes docs/scale.md's tables.

    python docs/scale_page.py      # writes the tables of docs/scale.md, and docs/scale.svg

`docs/scale.json` has what `tests.benchmarks.scale` printed. The formulas count what occupies the
busiest link, one phase after the other; a test compares them with the simulated runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "scale.md"
PICTURE = DOCS / "scale.svg"
KEPT = json.loads((DOCS / "scale.json").read_text("utf-8"))

BLOCK_BYTES = 2**22
HEARTBEAT_S = 5.0
FAN_IN = 32
# Per worker and step, beside the vector: what the simulated runs send (docs/scale.json).
OVERHEAD_UP, OVERHEAD_DOWN, OVERHEAD_BLOCK = 1090, 250, 190


@dataclass(frozen=True)
class Links:
    """The link of each process, the same for all; `message_s` is the cost of a message."""

    name: str
    bytes_s: float
    latency_s: float
    message_s: float = 1e-4


SIMULATED = Links("simulated", 125e6, 0.002)  # the slowest of many messages takes 2 ms
LINKS = (
    Links("10 Gbit/s, 0.1 ms", 1.25e9, 1e-4),
    Links("1 Gbit/s, 0.5 ms", 125e6, 5e-4),
    Links("100 Mbit/s, 30 ms", 12.5e6, 0.03),
)
SIZES = {"16 KiB": 2**14, "88 MB": 88e6, "2 GB": 2e9}
WORKERS = (10, 1_000, 100_000)


def num_blocks(vector_bytes: float, owners: int = 1) -> int:
    """Return in how many blocks a vector is sent, of at most BLOCK_BYTES."""
    return owners * max(1, math.ceil(vector_bytes / owners / BLOCK_BYTES))


def star(workers: int, vector_bytes: float, links: Links) -> float:
    """Return the seconds of an exchange through one process.

    Its link takes all sums in, and then all averages out. The first averages follow the last sums
    block by block. `Commit` goes out to all. Heartbeats take a part of the time.
    """
    blocks = num_blocks(vector_bytes)
    up_s = star_up(vector_bytes, links)
    down_s = (vector_bytes + OVERHEAD_DOWN) / links.bytes_s + blocks * links.message_s
    overlapped_s = min(up_s, down_s) * (1 - 1 / blocks)
    busy_s = workers * (up_s + down_s - overlapped_s + links.message_s)
    free = 1 - workers * links.message_s / HEARTBEAT_S
    return math.inf if free <= 0 else busy_s / free + 6 * links.latency_s


def star_up(vector_bytes: float, links: Links) -> float:
    """Return for how long the sums of one worker occupy the coordinator's link."""
    messages_s = (1 + num_blocks(vector_bytes)) * links.message_s
    return (vector_bytes + OVERHEAD_UP) / links.bytes_s + messages_s


def mesh(workers: int, vector_bytes: float, links: Links) -> float:
    """Return the seconds of an exchange between all workers.

    A worker sends the sums of the others' blocks, and then the averages of its own to all others.
    The coordinator only assigns, collects `Staged`, and commits.
    """
    blocks = num_blocks(vector_bytes, workers) // workers
    part_s = vector_bytes / workers / links.bytes_s
    messages_s = blocks * (links.message_s + OVERHEAD_BLOCK / links.bytes_s)
    own_s = 2 * (workers - 1) * (part_s + messages_s)
    return own_s + 3 * workers * links.message_s + 6 * links.latency_s


def tree(workers: int, vector_bytes: float, links: Links) -> float:
    """Return the seconds of an exchange through aggregators of FAN_IN workers or aggregators each.

    Every level is a star of FAN_IN; blocks pass the levels one after the other.
    """
    levels, blocks = num_levels(workers), num_blocks(vector_bytes)
    level_s = star(min(FAN_IN, workers), vector_bytes, links)
    return level_s * (1 + (levels - 1) / blocks)


def num_levels(workers: int) -> int:
    """Return the number of levels above the workers."""
    levels, places = 1, FAN_IN
    while places < workers:
        levels, places = levels + 1, places * FAN_IN
    return levels


EXCHANGES: dict[str, Callable[[int, float, Links], float]] = {
    "star": star,
    "mesh": mesh,
    f"aggregators of {FAN_IN}": tree,
}


# --- tables ---------------------------------------------------------------------------------------


def computed_table() -> str:
    """Return the seconds of an exchange, by links, size and number of workers."""
    rows = [
        [links.name, size, name, *(_seconds(exchange(n, SIZES[size], links)) for n in WORKERS)]
        for links in LINKS
        for size in SIZES
        for name, exchange in EXCHANGES.items()
    ]
    heads = [f"{n:,} workers" for n in WORKERS]
    return _table(["links", "vector", "", *heads], rows)


def traffic_table() -> str:
    """Return the bytes on the busiest link in one step, each way, by number of workers."""
    rows = []
    for size, vector_bytes in SIZES.items():
        rows.append([size, "star: the coordinator", *(_bytes(n * vector_bytes) for n in WORKERS)])
        each = [_bytes(2 * (n - 1) / n * vector_bytes) for n in WORKERS]
        rows.append([size, "mesh: a worker", *each])
        fans = [_bytes(min(n, FAN_IN) * vector_bytes) for n in WORKERS]
        rows.append([size, "an aggregator", *fans])
    return _table(["vector", "link of", *(f"{n:,} workers" for n in WORKERS)], rows)


def simulated_table() -> str:
    """Return what the simulated runs measured, beside the formulas."""
    rows = []
    for run in KEPT["simulated"]:
        topology = _topology(run)
        out, into = run["coordinator_bytes" if topology == "star" else "worker_bytes"]
        rows.append(
            [
                topology,
                f"{run['workers']:,}",
                f"{run['elements'] * 4 // 1024} KiB",
                f"{run['messages']:,}",
                f"{_bytes(out)} / {_bytes(into)}",
                f"{run['step_s']:.3f} s",
                f"{expected_s(run):.3f} s",
                f"{1e3 * run['cpu_s']:,.0f} ms" if topology == "star" else "",
            ]
        )
    heads = ["", "workers", "vector", "messages", "busiest link, out / in", "a step, simulated"]
    return _table([*heads, "computed", "coordinator's CPU, measured"], rows)


def churn_table() -> str:
    """Return the simulated runs with losses and joins."""
    rows = [
        [
            run["what"],
            f"{run['lost']} / {run['joined']}",
            f"{run['step_s']:.2f} s",
            f"{run['mean_step_s']:.2f} s",
            f"{run['longest_step_s']:.1f} s",
            "the same" if run["digest"] == "same" else "different",
        ]
        for run in KEPT["churn"]
    ]
    return _table(["", "lost / joined", "median step", "mean", "longest", "bits"], rows)


def real_table() -> str:
    """Return the bytes of real processes over TCP, beside those of the simulator."""
    rows = []
    for run in KEPT["real"]:
        twin = next(
            one
            for one in KEPT["simulated"]
            if (_topology(one), one["workers"], one["elements"])
            == (run["topology"], run["workers"], run["elements"])
        )
        rows.append(
            [
                run["topology"],
                f"{run['workers']}",
                " / ".join(f"{one:,.0f}" for one in run["coordinator_bytes"]),
                " / ".join(f"{one:,.0f}" for one in twin["coordinator_bytes"]),
                " / ".join(f"{one:,.0f}" for one in run["worker_bytes"]),
                " / ".join(f"{one:,.0f}" for one in twin["worker_bytes"]),
            ]
        )
    heads = ["", "workers", "coordinator, TCP", "simulated", "a worker, TCP", "simulated"]
    return _table(heads, rows)


def expected_s(run: dict[str, Any]) -> float:
    """Return the computed seconds of a simulated step: the slowest shard, and the exchange.

    In a star most sums arrive while the slowest shards are still being computed. In a mesh this
    hides half of the assignments.
    """
    low_s, high_s = 0.001, 0.05  # how long a simulated shard takes
    workers: int = run["workers"]
    vector_bytes: int = 4 * run["elements"]
    slowest_s = high_s - (high_s - low_s) / (workers + 1)
    if _topology(run) == "mesh":
        hidden_s = workers * SIMULATED.message_s / 2
        return slowest_s + mesh(workers, vector_bytes, SIMULATED) - hidden_s
    up_s = workers * star_up(vector_bytes, SIMULATED)
    return slowest_s + star(workers, vector_bytes, SIMULATED) - min(slowest_s, up_s)


def _topology(run: dict[str, Any]) -> str:
    return "star" if run["trainer"] == "parameter_server" else "mesh"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _seconds(seconds: float) -> str:
    if seconds == math.inf:
        return "never"
    if seconds >= 7200:
        return f"{seconds / 3600:,.0f} h"
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            return f"{num_bytes:,.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:,.0f} {unit}"
        num_bytes /= 1000
    raise AssertionError("the last unit has no limit")


# --- the picture ----------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 720, 440, 70, 50, 30
X_RANGE, Y_RANGE = (1.0, 1e5), (1e-2, 1e2)
COLORS = {"star": "#c0392b", "mesh": "#2471a3", f"aggregators of {FAN_IN}": "#1e8449"}


def picture() -> str:
    """Return the seconds of a step against workers: lines computed, dots simulated."""
    points = [round(10 ** (exponent / 20)) for exponent in range(101)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for exponent in range(6):
        x = _x(10.0**exponent)
        parts += [
            _line(x, _y(Y_RANGE[0]), x, _y(Y_RANGE[1])),
            f'<text x="{x:.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{10**exponent:,}</text>",
        ]
    for exponent in range(-2, 3):
        y = _y(10.0**exponent)
        parts += [
            _line(_x(X_RANGE[0]), y, _x(X_RANGE[1]), y),
            f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{10.0**exponent:g} s</text>',
        ]
    for place, (name, exchange) in enumerate(EXCHANGES.items()):
        ends = [(n, 0.05 + exchange(n, SIZES["16 KiB"], SIMULATED)) for n in points]
        seen = [(n, s) for n, s in ends if Y_RANGE[0] <= s <= Y_RANGE[1]]
        path = " ".join(f"{_x(n):.1f},{_y(s):.1f}" for n, s in seen)
        color, y = COLORS[name], MARGIN + 22 + 20 * place
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
            f'<text x="{LEFT + 14}" y="{y}" fill="{color}">{name}</text>',
        ]
    for run in KEPT["simulated"]:
        if run["elements"] * 4 == SIZES["16 KiB"]:
            color = COLORS[_topology(run)]
            x, y = _x(run["workers"]), _y(run["step_s"])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
    parts += [
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 10}" text-anchor="middle">workers</text>',
        f'<text x="{WIDTH - MARGIN}" y="{MARGIN - 5}" text-anchor="end">seconds a step, 16 KiB, '
        "1 Gbit/s, 0.1 ms a message: lines computed, dots simulated</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _x(workers: float) -> float:
    return LEFT + (WIDTH - LEFT - MARGIN) * _share(workers, X_RANGE)


def _y(seconds: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - MARGIN) * _share(seconds, Y_RANGE)


def _share(value: float, span: tuple[float, float]) -> float:
    return math.log(value / span[0]) / math.log(span[1] / span[0])


# --- the page -------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "simulated": simulated_table,
    "churn": churn_table,
    "real": real_table,
    "traffic": traffic_table,
    "computed": computed_table,
}


def page(text: str) -> str:
    """Return the page `text` with its tables as they should be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{table()}{end}{after}"
    return text


def main() -> None:
    """Write the tables of the page, and the picture."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    PICTURE.write_text(picture(), "utf-8")


if __name__ == "__main__":
    main()
