"""The norm to which a script clips its gradients, as its calls show it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from torch import Tensor


class Clips:
    """The limit of a script that clips the whole gradient once a step, to one norm in all steps.

    Other scripts have no `limit`: they clip parts by limits of their own, micro-batches, or to a
    norm that follows the gradients.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        self._calls: list[tuple[frozenset[int], float | None]] = []
        self._is_steady = True

    def note(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float
    ) -> None:
        """Note that the gradients of `parameters` are clipped."""
        held = [parameters] if isinstance(parameters, Tensor) else parameters
        limit = float(max_norm)
        is_plain = float(norm_type) == 2 and 0 < limit < math.inf and limit == float(f"{limit:.2g}")
        self._calls.append((frozenset(map(id, held)), limit if is_plain else None))

    def forget(self) -> None:
        """Forget the calls of a step that is skipped."""
        self._calls.clear()

    def end_step(self, stepped: Collection[Tensor]) -> None:
        """Note that a step was made, of the parameters `stepped` with their gradients."""
        calls, self._calls = self._calls, []
        held, limit = calls[0] if len(calls) == 1 else (frozenset[int](), None)
        graded = {id(parameter) for parameter in stepped if parameter.grad is not None}
        is_first = self.limit is None
        self._is_steady &= limit is not None and (is_first or limit == self.limit)
        self._is_steady &= graded <= held
        self.limit = limit if self._is_steady else None
