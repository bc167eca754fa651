"""peft and transformers, imported in less time. Importing this module imports both.

peft imports bitsandbytes, which passes some functions to `torch.compile`. That loads torch's
compiler, which takes as long as torch itself, for kernels of devices without their own. Here these
functions stay as they are. And some versions of transformers import scikit-learn at once, where it
is installed, for a kind of generation that we don't offer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NOT_NEEDED = "sklearn"


def _uncompiled(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    """Stand in for `torch.compile`, also as a decorator with options."""
    return _uncompiled if function is None else function


@contextmanager
def _in_less_time() -> Iterator[None]:
    compiles, is_free = torch.compile, _NOT_NEEDED not in sys.modules
    torch.compile = _uncompiled  # type: ignore[assignment]
    if is_free:
        sys.modules[_NOT_NEEDED] = None  # type: ignore[assignment]  # as if it weren't installed
    try:
        yield
    finally:
        torch.compile = compiles
        if is_free:
            del sys.modules[_NOT_NEEDED]


with _in_less_time():
    import peft
    import transformers
    from transformers import GenerationMixin  # otherwise imported with the first model

__all__ = ["GenerationMixin", "peft", "transformers"]
