"""A trace with one event of every kind, and events with any value in each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario

SCENARIO = Scenario(
    system="reference", workload="linear", world_size=1, seed=0, options={"m": [1, 2]}
)
NAN, INF = float("nan"), float("inf")
TENSORS = {
    "w": trace.record_tensor(np.array([1.5, -0.0, NAN, INF], np.float32), values=True),
    "count": trace.record_tensor(np.array([[3]], np.int64), values=True),
    "b": trace.record_tensor(np.zeros(0, np.float32)),
}
# One of every kind, with what JSON has no word for, at least once in each field that can hold it.
EVENTS: tuple[trace.Event, ...] = (
    trace.Start(
        step=0,
        rank=0,
        weights=TENSORS,
        optimizer=TENSORS,
        trainable=("w",),
        frozen=("b",),
        progress={"epoch": 0, "offset": 3, "note": None},
        resumed=True,
    ),
    trace.Shard(
        step=0, epoch=1, rank=0, shard=2, ids=(4, 1), loss_sum=NAN, weight=2.0, finite=False
    ),
    trace.Shard(
        step=0,
        epoch=1,
        rank=0,
        shard=3,
        ids=(),
        loss_sum=-0.0,
        weight=0.0,
        finite=True,
        draws="d",
        contents=((3.0, 1.5, -0.5), (3.0, INF, NAN)),
        gradient=TENSORS,
    ),
    trace.Update(
        step=0,
        rank=0,
        loss=INF,
        weight=3.0,
        learning_rate=0.1,
        finite=True,
        weights=TENSORS,
        grad_norm=-INF,
        applied_norm=None,
    ),
    trace.Drawn(
        step=0, rank=1, where="loader", generator="numpy", before="a", after="b", worker=1, ids=(3,)
    ),
    trace.Drawn(step=0, rank=1, where="batch", generator="rng", before="a", after="b", part=0),
    trace.Declared(step=0, rank=1, frozen=("w",), tied=(("w", "v"), ("a", "b", "c"))),
    trace.Ruled(
        step=0,
        rank=1,
        rule="Adam",
        names=("w",),
        constants={"betas": [0.9, 0.99], "amsgrad": True, "weight_decay": 0.0},
    ),
    trace.Called(rank=1, what="step", file="/home/me/train.py", line=3),
    trace.Noticed(
        step=0,
        rank=1,
        shared=(("w", "v"),),
        alike=(("w", "u"),),
        doubled=("w",),
        peculiar={"w": "zero"},
    ),
    trace.Tokens(step=0, rank=0, micro_batch=1, rows=2, positions=8, begun=1, tied=True),
    trace.Evaluated(step=0, rank=0, counted=6, training=True, drew=False),
    trace.Scored(
        step=0,
        rank=0,
        micro_batch=1,
        call=0,
        counted=9,
        least=NAN,
        most=0.5,
        dtype="float32",
        known=8,
        matches=(0, 8, 1),
    ),
    trace.Reread(
        step=0,
        rank=0,
        micro_batch=1,
        replaced="later",
        still=0.0,
        moved=INF,
        noise=0.0,
        scale=1.0,
        unit=2.0**-8,
        cut=3,
        own=0.5,
        loss=0.25,
    ),
    trace.Synchronised(step=1, rank=2, weights=TENSORS, collectives=1),
    trace.Membership(step=1, rank=2, change="left", reason='died, \u2028 "quoted" é'),
    trace.Injected(fault={"kind": "leave", "rank": 2}, step=1, rank=2),
    trace.Audit(
        step=1, shard=3, ranks=(1, 2, 0), alike=(0, 1, 1), culprit=1, tensor="w", element=2
    ),
    trace.Planted(name="ddp-bypass"),
    trace.Halt(step=1, reason="nan", shard=1, tensor="w", ids=(1, 2)),
    trace.Spike(step=1, grad_norm=40.0, median=0.5, num_steps=20),
    trace.Saved(step=1, rank=0, weights=TENSORS, progress={"epoch": 1}),
    trace.Manifest(backend="cpu", entries=(("w", (2, 3), "float32"), ("b", (), "float32"))),
    trace.Attempt(backend="cuda", served=False, reason="absent"),
    trace.Product(
        backend="wgpu",
        device="llvmpipe",
        software=True,
        shape=(1, 2, 3),
        result_shape=(1, 3),
        layout="plain",
        magnitude=1.0,
        finite=False,
        error_cpu=NAN,
        error_f64=INF,
        bound=1e-6,
        stated=True,
        digest="00",
    ),
    trace.Memory(
        rank=0, backend="cpu", peak_bytes=3, baseline_bytes=1, estimate_bytes=9, budget_bytes=99
    ),
    trace.Selection(rank=1, ids=(0, 3)),
    trace.Held(rank=1, num_parts=2, held_bytes=5, whole_bytes=9),
    trace.Carried(
        message="Average", payload_bytes=4, pieces=2, sent="00", got=None, allocated_bytes=64
    ),
    trace.Gap(step=3, lines=5, digest="0" * 32, reason="it was removed"),
    trace.Refused(case="flipped", error=None, claimed_bytes=2**62, allocated_bytes=0),
    trace.Admission(case="wrong secret", entitled=False, let_in=False, answer="refused"),
    trace.Heard(
        case="backwards",
        step=0,
        part="block 3",
        digest=None,
        poisoned=True,
        roundings=INF,
        element=None,
    ),
    trace.Grouped(
        step=4,
        rank=2,
        process=3,
        generation=1,
        members=(0, 2),
        received=True,
        waited_s=INF,
        weights=TENSORS,
        optimizer={},
        extra=TENSORS,
        progress={"schedule": 4},
    ),
    trace.Averaged(step=2, ranks=(0, 2), gradient=TENSORS, loss=INF, correct=None, weight=7),
    trace.Reduced(step=0, rank=1, num_elements=5, roundings=INF, element=4),
    trace.Traffic(
        rank=None,
        peer="worker",
        direction="got",
        message="TreeNode",
        messages=2,
        payload_bytes=8,
        bytes=400,
    ),
    trace.Stepped(
        step=3,
        backend="wgpu",
        device="llvmpipe",
        software=True,
        num_samples=7,
        given="replica 0",
        earlier=1,
        submissions=1,
        read_backs=1,
        uploads=1,
        upload_bytes=512,
        declared_bytes=40,
        num_inputs=2,
        dispatches=5,
        compiled=0,
        traced=0,
        on_host=("aten.mm.default",),
        results=TENSORS,
    ),
    trace.Explained(
        of="mlp",
        tensor="loss",
        device="llvmpipe",
        software=True,
        finite=False,
        num_elements=3,
        num_bounded=2,
        element=1,
        error=INF,
        bound=1e-6,
        total_error=INF,
        total_bound=1e-5,
        step=3,
    ),
    trace.Poisoned(
        of="amax", tensor="result 0", device="llvmpipe", software=True, reached=2, lost=1, element=1
    ),
    trace.Declined(
        case="no kernel",
        operation="inv",
        error=None,
        message="",
        in_line=False,
        right=True,
        submissions=0,
    ),
    trace.TeacherRow(
        shard=0,
        sample=3,
        position=1,
        tokens=(4, 2),
        log_probabilities=(-0.5, -1.5),
        rest=0.125,
        stock=(-3.0, -2.0),
    ),
    trace.Sharded(when="resumed", digests=("0:ab",), complete=False, due=2),
    trace.TurnedAway(what="half of a shard", refused="it is short", error_kind="size"),
    trace.Encoded(
        sample=3,
        row=1,
        tokens=(1, 2),
        predicted=(1,),
        stock_tokens=(1, 2),
        completion=(1,),
        label=-1,
    ),
    trace.Taught(sample=3, positions=(0,)),
    trace.Referred(sample=3, use=1, chosen=-12.5, rejected=-0.25),
    trace.Weighed(asked="inverse", weights=(0.5, INF)),
    trace.Frozen(when="before step 0", weights=TENSORS),
    trace.Quantised(layer="q_proj", due=True, held=TENSORS, stock=TENSORS),
    trace.ReadBack(by="peft", tensors=TENSORS),
    trace.Adapted(when="merged", layer="q_proj", rank=2, alpha=4.5, shape=(3, 2), tensors=TENSORS),
    trace.End(status="completed"),
)
WHOLE = trace.Trace(
    scenario=SCENARIO, environment={"torch": "2"}, promises=("bitwise",), events=EVENTS
)


# --- any value in each field ----------------------------------------------------------------------


def nested(depth: int) -> Any:
    """Return mappings nested `depth` times."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


# Halves of characters stand alone here: JSON makes one character of two that fit each other.
_TEXTS = (
    st.text(max_size=4)
    | st.sampled_from(("\ud800", "\udcff", '","chain":"00"}', "\r\u2028\0"))
    | st.just(10**5).map(lambda length: "k" * length)
)
_FLOATS = st.floats() | st.sampled_from((1e308, -5e-324, NAN, INF, -INF, -0.0))
_SIMPLE = st.none() | st.booleans() | st.integers() | _FLOATS | _TEXTS
_WORDS = st.recursive(
    _SIMPLE,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=4,
) | st.sampled_from((10**400, nested(14), nested(15)))
# What a file holds, and what it can't hold.
_READABLE: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-9, 9) | st.sampled_from((2**63 - 1, 1 - 2**63)),
    float: _FLOATS,
    bool: st.booleans(),
    str: _TEXTS,
    trace.TensorRecord: (
        st.builds(trace.TensorRecord, _TEXTS) | st.sampled_from(tuple(TENSORS.values()))
    ),
    NoneType: st.none(),
    Any: _WORDS,
}
_UNREADABLE: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.sampled_from((-(2**63), 2**63, 2**64 - 1, 10**400)),
    float: st.sampled_from((2**63, 10**400)),  # to a type checker an int is a float
    trace.TensorRecord: st.sampled_from(
        (trace.TensorRecord("d", "AAAA", "int4"), trace.TensorRecord("d", "AAA"))
    ),
    # Python prints no number of so many digits, and doesn't print what is so deep.
    Any: st.just(5000).map(lambda digits: 10**digits) | st.sampled_from((16, 2000)).map(nested),
}


def any_event() -> st.SearchStrategy[trace.Event]:
    """Return a strategy for events of all kinds, with any value that an annotation allows."""
    any_values = {kind: _READABLE[kind] | _UNREADABLE.get(kind, st.nothing()) for kind in _READABLE}
    return st.tuples(
        st.sampled_from(tuple(trace.EVENTS.values())), st.sampled_from((_READABLE, any_values))
    ).flatmap(lambda drawn: _events(*drawn))


def _events(
    kind: type[trace.Event], plain: Mapping[Any, st.SearchStrategy[Any]]
) -> st.SearchStrategy[trace.Event]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: _any(hints[field.name], plain) for field in fields(kind)})


def _any(hint: Any, plain: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint in plain:
        return plain[hint]
    if origin in (Union, UnionType):
        return st.one_of(*(_any(one, plain) for one in args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(_any(args[0], plain), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(_any(one, plain) for one in args))
    assert issubclass(origin, Mapping), hint
    return st.dictionaries(_TEXTS, _any(args[1], plain), max_size=2)
