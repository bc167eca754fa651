"""The names of a run's tensors, on its ranks and in another run of the same trainer.

A wrapper of the user's own puts parts into the names, and often wraps only with several workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import Event, Shard, Start, Synchronised, Trace, Update
from entrenar_py.shared.wording import listed

# The fields of events that map or list names of tensors, apart from `optimizer`.
_BY_NAME = (
    *("weights", "buffers", "local", "shapes", "gradient", "rates"),
    *("kept", "summed", "edited"),
)
_TUPLES = ("trainable", "frozen", "decayed")
_SHOWN = 2  # names in a reason


def lacking(compared: Compared) -> str:
    """Return why the names of two runs, or of the ranks of one, don't mean the same tensors."""
    for trace in (compared.trace, compared.model):
        if why := apart_on_ranks(trace):
            return why
    if compared.is_one_run:
        return ""
    names, model_names = known(compared.trace), known(compared.model)
    if not names or not model_names or names == model_names:
        return ""
    only, model_only = sorted(names - model_names), sorted(model_names - names)
    run, model = run_name(compared.trace), run_name(compared.model)
    held = [
        f"{who} holds {listed(some, most=_SHOWN)}"
        for who, some in ((run, only), (model, model_only))
        if some
    ]
    return (
        f"the runs name their tensors differently: {', '.join(held)}: give observe() the same "
        "module in every run, the model itself and not a wrapper around it"
    )


def apart_on_ranks(trace: Trace) -> str:
    """Return why ranks that declare no layout hold tensors of different names; "" if they don't."""
    by_rank = of_ranks(trace)
    if trace.traits.shared or len(by_rank) < 2:
        return ""
    (first, names), *others = sorted(by_rank.items())
    for rank, held in others:
        if apart := sorted(held ^ names):
            owner = rank if apart[0] in held else first
            return (
                f"ranks {first} and {rank} hold tensors of different names (only rank {owner} "
                f"holds {apart[0]}): say how the ranks share the model, "
                'observe(..., layout={"pp": ...}) for stages, {"ep": ...} for experts'
            )
    return ""


def of_ranks(trace: Trace) -> Mapping[int, Set[str]]:
    """Return by rank the names of the weights that it holds at its first start, if recorded."""
    names: dict[int, Set[str]] = {}
    for start in trace.of(Start):
        if start.weights:
            names.setdefault(start.rank, start.weights.keys())
    return names


def known(trace: Trace) -> Set[str]:
    """Return the names of all weights at the start of any rank."""
    return frozenset[str]().union(*of_ranks(trace).values())


def aligned(model: Trace, trace: Trace) -> Trace:
    """Return `model` with the names that `trace` has, if the two correspond in only one way.

    Otherwise return `model` as it is.
    """
    names, like = (known(run) | _buffers(run) for run in (model, trace))
    if known(model) == known(trace):
        return model
    named = _matched(names, like)
    return model if named is None else renamed(model, named)


def _buffers(trace: Trace) -> Set[str]:
    return frozenset(name for start in trace.of(Start) for name in start.buffers)


def _matched(names: Set[str], like: Set[str]) -> dict[str, str] | None:
    """Return for each of `names` the one of `like` that means the same tensor; None if unclear.

    Names correspond if they are equal without the parts that occur in one run only, or without the
    parts that all names of their run begin with.
    """
    parts, like_parts = (_parts(some) for some in (names, like))
    for short, short_like in (
        (_without(names, parts - like_parts), _without(like, like_parts - parts)),
        (_without_beginning(names), _without_beginning(like)),
    ):
        is_clear = len(short) == len(names) and len(short_like) == len(like)
        if is_clear and short.keys() == short_like.keys():
            return {name: short_like[key] for key, name in short.items()}
    return None


def _parts(names: Iterable[str]) -> Set[str]:
    return frozenset(part for name in names for part in name.split("."))


def _without(names: Iterable[str], parts: Set[str]) -> dict[str, str]:
    """Return names by what is left of them without `parts`."""
    return {".".join(p for p in name.split(".") if p not in parts): name for name in names}


def _without_beginning(names: Set[str]) -> dict[str, str]:
    """Return names by what is left of them without the parts that all begin with."""
    split = [name.split(".") for name in names]
    common = 0
    while split and all(len(parts) > common + 1 for parts in split):
        if len({parts[common] for parts in split}) > 1:
            break
        common += 1
    return {".".join(parts[common:]): ".".join(parts) for parts in split}


def renamed(trace: Trace, named: Mapping[str, str]) -> Trace:
    """Return `trace` with the tensors in `named` under their new names."""
    return replace(trace, events=tuple(_renamed(event, named) for event in trace.events))


def _renamed(event: Event, named: Mapping[str, str]) -> Event:
    if not isinstance(event, Start | Update | Shard | Synchronised):
        return event
    changes: dict[str, Any] = {}
    for field in _BY_NAME:
        if held := getattr(event, field, None):
            changes[field] = {named.get(name, name): value for name, value in held.items()}
    for field in _TUPLES:
        if held := getattr(event, field, None):
            changes[field] = tuple(named.get(name, name) for name in held)
    if state := getattr(event, "optimizer", None):
        changes["optimizer"] = {_of_state(key, named): value for key, value in state.items()}
    if extra := getattr(event, "extra", None):
        changes["extra"] = {_of_copy(key, named): value for key, value in extra.items()}
    return replace(event, **changes)


def _of_copy(key: str, named: Mapping[str, str]) -> str:
    """Return the name of a tensor beside the model, `label/parameter`, with a new name."""
    label, slash, name = key.partition("/")
    return f"{label}{slash}{named.get(name, name)}"


def _of_state(key: str, named: Mapping[str, str]) -> str:
    """Return the name of optimizer state, `parameter/key`, with the parameter's new name."""
    name, slash, rest = key.partition("/")
    return f"{named.get(name, name)}{slash}{rest}"
