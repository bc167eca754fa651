"""Optimizers that are given a closure: it makes the gradients, inside of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def looked_at(
    look: Callable[[], None],
    again: Callable[[], None],
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Arguments | None:
    """Has `look` called when the gradients of a step are there, as a hook before the step: now, or
    when its closure has run, and then what that is called with instead of `arguments` and `named`.

    A closure may be run again within the step (by LBFGS): then `again` is called after it.
    """
    optimizer, *given = arguments
    closure = given[0] if given else named.get("closure")
    if closure is None:
        look()
        return None
    looked = False

    def run() -> Any:
        nonlocal looked
        loss = closure()
        if looked:
            again()
        else:
            look()
        looked = True
        return loss

    return (optimizer,), {**named, "closure": run}
