"""Optimizers that are given a closure: it computes the gradients inside of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def look_before_step(
    look: Callable[[], None],
    again: Callable[[], None],
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Arguments | None:
    """Call `look` when the gradients of a step are there: now, or when its closure has run.

    `arguments` and `named` are those of the optimizer's step. With a closure, the arguments that
    the step is to be called with in their place are returned.

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
