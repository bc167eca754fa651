"""Valid files of every kind, and nearly valid ones: names, types, sizes and numbers that no writer
of ours would have written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from entrenar_py.check.harness import counterexamples
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Finding, Verdict
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.coordinator.server import Server
from tests.command_line import contract_file
from tests.train.service import cluster
from tests.train.wire_io.certificates import Authority

TRAINING: Mapping[str, Any] = {
    "workload": "linear",
    "world_size": 2,
    "seed": 0,
    "num_shards": 4,
    "num_steps": 3,
    "optimizer": "momentum",
}
HEADER: Mapping[str, Any] = {
    "kind": "rank",
    "version": 1,
    "rank": 0,
    "world_size": 1,
    "pid": 1,
    "values": False,
    "num_samples": 8,
    "versions": {"torch": "2"},
    "optimizer": "SGD",
    "groups": [{"lr": 0.1}],
}
EVENTS: tuple[dict[str, Any], ...] = (
    {"kind": "start", "step": 0, "rank": 0, "weights": {"w": "0" * 32}, "trainable": ["w"]},
    {
        "kind": "shard",
        "step": 0,
        "epoch": 0,
        "rank": 0,
        "shard": 0,
        "ids": [0, 1],
        "loss_sum": 1.0,
        "weight": 2.0,
        "finite": True,
        "gradient": {"w": "1" * 32},
    },
    {
        "kind": "update",
        "step": 0,
        "rank": 0,
        "loss": 0.5,
        "weight": 2.0,
        "finite": True,
        "learning_rate": 0.1,
        "weights": {"w": "2" * 32},
        "gradient": {"w": "1" * 32},
    },
    {"kind": "closed", "problem": ""},
)
BIG = 10**12
EVERY_STEP: Mapping[str, Any] = {"path": "bad", "every_steps": 1}

Make = Callable[[Path], object]


def write_good(folder: Path) -> None:
    """Write a contract and a secret, for commands that need a valid file as well as the bad one."""
    Path(contract_file(folder)).rename(folder / "contract.yaml")
    (folder / "secret").write_text("open sesame, and do it soon")


def write_configuration(path: Path, **keys: object) -> None:
    """Write the configuration of a run for which no worker comes."""
    usual = {"listen": "127.0.0.1:0", "timing": {"gather_s": 0.5}}
    cluster.write_configuration(path, TRAINING, **{**usual, **keys})


@cache
def _authority() -> tuple[TemporaryDirectory[str], Path, Path]:
    folder = TemporaryDirectory()
    own = Authority(Path(folder.name), "ca").signed("coordinator")
    return folder, own.cert, own.key


def certificate() -> tuple[Path, Path]:
    return _authority()[1:]


# --- rank files -------------------------------------------------------------------------------


def rank_lines(header: Mapping[str, Any] = HEADER, *records: Mapping[str, Any]) -> bytes:
    """Return the lines of a rank's file, with the usual events by default."""
    lines = [json.dumps(one) for one in (header, *(records or EVENTS))]
    return "".join(f"{line}\n" for line in lines).encode()


def _with(event: int, **changes: Any) -> bytes:
    events = [dict(one) for one in EVENTS]
    events[event] |= changes
    return rank_lines(HEADER, *events)


def _header(**changes: Any) -> bytes:
    return rank_lines({**HEADER, **changes})


def _layout(**told: Any) -> bytes:
    usual = {"kind": "layout", "axes": {"dp": 1}, "tied": [], "pieces": {}}
    return rank_lines(HEADER, {**usual, **told}, *EVENTS)


def _many(path: Path) -> None:
    """Write 10^7 lines."""
    line = (json.dumps(EVENTS[1]) + "\n").encode()
    with path.open("wb") as file:
        file.write(rank_lines()[: rank_lines().index(b"\n") + 1])
        for _ in range(1000):
            file.write(line * 10_000)


def _long(path: Path) -> None:
    """Write one line of 4 GiB."""
    path.write_bytes(rank_lines()[:-1])
    os.truncate(path, 2**32)


def _values(data: str, dtype: str) -> bytes:
    return _with(2, weights={"w": ["2" * 32, data, dtype]})


_PIECE = [[0], [BIG], [BIG], [0]]
RANK_FILES: Mapping[str, bytes] = {
    "good": rank_lines(),
    "no header": b"".join(rank_lines().splitlines(keepends=True)[1:]),
    "header alone": rank_lines().splitlines(keepends=True)[0],
    "header list": b"[]\n",
    "not UTF-8": rank_lines().replace(b"start", b"\xff\xfe"),
    "deep": rank_lines().replace(b"{}", b"[" * 100_000) + b"[" * 100_000 + b"\n",
    "digits": rank_lines().replace(b'"step": 0', b'"step": ' + b"9" * 5000),
    "rank text": _header(rank="a"),
    "rank null": _header(rank=None),
    "rank big": _header(rank=BIG),
    "rank beyond": _header(rank=1),
    "world text": _header(world_size="two"),
    "world big": _header(world_size=BIG),
    "world 0": _header(world_size=0),
    "no world": rank_lines({k: v for k, v in HEADER.items() if k != "world_size"}),
    "versions": _header(versions=7),
    "groups": _header(groups=7),
    "groups items": _header(groups=[7]),
    "group values": _header(groups=[{"lr": "fast", "momentum": {}, "weight_decay": []}]),
    "group nan": _header(groups=[{"lr": float("nan")}]),
    "optimizer": _header(optimizer=["SGD"]),
    "samples text": _header(num_samples="many"),
    "samples big": _header(num_samples=10**30),
    "samples less": _header(num_samples=-8),
    "dropout": _header(dropout="half"),
    "pid": _header(pid="x"),
    "surrogates": _header(optimizer="\udc80", versions={"\ud800": "\udc80"}),
    "step big": _with(2, step=2**62),
    "step less": _with(2, step=-5),
    "epoch big": _with(1, epoch=2**62),
    "shard big": _with(1, shard=2**62),
    "ids big": _with(1, ids=[2**62]),
    "ids less": _with(1, ids=[-1]),
    "other rank": _with(2, rank=5),
    "rate nan": _with(2, learning_rate="nan"),
    "no base64": _values("!!!!", "float32"),
    "no dtype": _values("AAAA", "complicated"),
    "odd size": _values("AAAA", "float64"),
    "fault": rank_lines(HEADER, *EVENTS[:2], {"kind": "injected", "fault": {}}),
    "fault kind": rank_lines(HEADER, *EVENTS[:2], {"kind": "injected", "fault": {"kind": 7}}),
    "fault big": rank_lines(
        HEADER,
        *EVENTS[:2],
        {"kind": "injected", "fault": {"kind": "leave", "step": 2**62, "rank": 0}},
    ),
    "layout axes": _layout(axes=7),
    "layout big": _layout(axes={"dp": BIG}),
    "layout tied": _layout(tied=7),
    "layout piece": _layout(pieces={"w": [1, 2, 3]}),
    "layout piece big": _layout(pieces={"w": _PIECE}) + rank_lines().splitlines(keepends=True)[1],
    "piece of values": rank_lines(
        HEADER,
        {"kind": "layout", "axes": {"dp": 1}, "tied": [], "pieces": {"w": _PIECE}},
        {**EVENTS[0], "weights": {"w": ["0" * 32, "AAAAAA==", "float32"]}},
        *EVENTS[1:],
    ),
    "local": rank_lines(HEADER, {"kind": "local", "buffers": 7}, *EVENTS),
    "compressed": rank_lines(HEADER, {"kind": "compressed", "to": {"a": 1}}, *EVENTS),
    "kind list": rank_lines(HEADER, {"kind": []}, *EVENTS),
    "closed early": rank_lines(HEADER, EVENTS[3], *EVENTS),
}


# --- counterexamples --------------------------------------------------------------------------


def counterexample(**changes: Any) -> bytes:
    """Return a counterexample with a matching digest, whatever its content; `changes` go into the
    record or its scenario.
    """
    found = Finding(invariant="F-DP-001", verdict=Verdict.FALSIFIED, compared=1, reason="it broke")
    scenario = Scenario(system="reference", workload="linear", world_size=2, seed=0)
    record = {
        "schema": counterexamples.VERSION,
        "invariant": "F-DP-001",
        "scenario": scenario.to_dict(),
        "finding": found.to_dict(),
    }
    for name, value in changes.items():
        place = record if name in record else record["scenario"]
        place[name] = value  # type: ignore[index]
    record["digest"] = counterexamples.digest_of(record)
    return json.dumps(record).encode()


REPLAYS: Mapping[str, bytes] = {
    "steps": counterexample(num_steps=BIG),
    "samples": counterexample(num_samples=BIG),
    "batch": counterexample(num_samples=BIG, batch_size=BIG),
    "workers": counterexample(world_size=BIG, num_shards=BIG, num_samples=BIG),
    "width": counterexample(workload="mlp", width=BIG),
    "vectors": counterexample(workload="vectors", width=BIG),
    "shards": counterexample(num_shards=BIG),
    "accumulation": counterexample(accumulation=2**16, num_shards=2**16),
    "warmup": counterexample(warmup_steps=10**400),
    "seed": counterexample(seed=10**4000),
    "invariant": counterexample(invariant=[7]),
    "finding": counterexample(finding=[7]),
    "finding types": counterexample(finding={"verdict": "falsified", "invariant": 7}),
    "finding none": counterexample(finding={}),
    "scenario": counterexample(scenario=7),
    "surrogates": counterexample(system="\udc80"),
    "options": counterexample(options={"\ud800": "\ud800"}),
    "backends": counterexample(backends=["\udc80"]),
    "stops": counterexample(stops=["\udc80"]),
}


# --- checkpoints ------------------------------------------------------------------------------


@cache
def _state() -> tuple[dict[str, Any], dict[str, Any]]:
    server = Server(Scenario(system="parameter_server", **TRAINING))
    arrays = checkpoint.as_arrays(
        tensors=server.replica.replica.arrays, optimizer=server.replica.state
    )
    progress = {**server.replicas.progress(1), "plan": server.plan.to_dict()}
    return dict(arrays), progress


def saved(path: Path, *, arrays: Mapping[str, Any] | None = None, **progress: Any) -> None:
    """Write a checkpoint with a matching digest, as a coordinator does, with these changes."""
    held, stands = _state()
    kept = {name: one for name, one in {**held, **(arrays or {})}.items() if one is not None}
    checkpoint.save(path, kept, {**stands, **progress})


def _first(change: Callable[[Any], Any]) -> Make:
    """Return a function that writes a checkpoint with its first tensor changed."""

    def write(path: Path) -> None:
        name, array = next(iter(_state()[0].items()))
        saved(path, arrays={name: change(array)})

    return write


def _filled(value: float) -> Callable[[Any], Any]:
    return lambda array: np.full_like(array, value)


CHECKPOINTS: Mapping[str, Make] = {
    "step -5": partial(saved, step=-5),
    "step beyond": partial(saved, step=4),
    "step text": partial(saved, step="one"),
    "step float": partial(saved, step=1.5),
    "step list": partial(saved, step=[1]),
    "step big": partial(saved, step=10**30),
    "epoch -1": partial(saved, epoch=-1),
    "epoch big": partial(saved, epoch=2**62),
    "offset big": partial(saved, offset=2**62),
    "offset text": partial(saved, offset="x"),
    "schedule": partial(saved, schedule_step=-1),
    "schedule text": partial(saved, schedule_step={}),
    "plan": partial(saved, plan=7),
    "scenario": partial(saved, plan=None, scenario=7),
    "nan": _first(_filled(float("nan"))),
    "inf": _first(_filled(float("inf"))),
    "shape": _first(lambda array: array.reshape(-1)[:-1].copy()),
    "transposed": _first(lambda array: np.stack([array, array])),
    "dtype": _first(lambda array: array.astype(np.float64)),
    "integers": _first(lambda array: array.astype(np.int8)),
    "missing": _first(lambda array: None),
    "strange": partial(saved, arrays={"tensors/other": np.zeros(3, np.float32)}),
    "no group": partial(saved, arrays={"other": np.zeros(3, np.float32)}),
    "no moments": lambda path: saved(
        path, arrays={name: None for name in _state()[0] if name.startswith("optimizer/")}
    ),
}


def _written(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


def _chained(**header: Any) -> bytes:
    """Return a trace of only a header and an end, with a valid chain."""
    head = {
        "kind": "trace",
        "version": trace.VERSION,
        "scenario": Scenario(system="parameter_server", **TRAINING).to_dict(),
        "environment": {},
        "promises": [],
        **header,
    }
    from entrenar_py.shared.trace import ledger

    lines, chain = [], ""
    end = {"kind": "end", "status": "completed", "reason": ""}
    for record in (head, end):
        line, chain = ledger.dump_line(chain, record)
        lines.append(f"{line}\n")
    return "".join(lines).encode()


def _endless_line(path: Path) -> None:
    path.write_bytes(_chained().partition(b"\n")[0][:-40])
    os.truncate(path, 2**34)


TRACES: Mapping[str, Make] = {
    "line": _endless_line,
    "environment": _written(_chained(environment=[["a", "b"]])),
    "environment 7": _written(_chained(environment=7)),
    "promises": _written(_chained(promises=7)),
    "promises mixed": _written(_chained(promises=[["rounds"], {}])),
    "scenario": _written(_chained(scenario=7)),
    "surrogates": _written(_chained(environment={"\ud800": "\udc80"}, promises=["\udc80"])),
    "steps": _written(
        _chained(
            scenario={
                **Scenario(system="own", workload="own", world_size=1, seed=0).to_dict(),
                "num_steps": BIG,
            }
        )
    ),
    "workers": _written(
        _chained(
            scenario={
                **Scenario(system="own", workload="own", world_size=1, seed=0).to_dict(),
                "num_samples": BIG,
                "num_shards": 2**16,
                "world_size": 2**16,
            }
        )
    ),
}
_REPLAY = {name: _written(data) for name, data in REPLAYS.items()}
OF: Mapping[str, Mapping[str, Make]] = {
    "rank file": {
        **{name: _written(data) for name, data in RANK_FILES.items()},
        "many lines": _many,
        "long line": _long,
    },
    "replay": _REPLAY,
    "known": {name: _written(counterexample(num_steps=BIG)) for name in ("steps",)},
    "checkpoint": CHECKPOINTS,
    "trace": TRACES,
    "verify": TRACES,
    "secret": {"long": _written(b"x" * 2**24), "short": _written(b"x")},
}
