"""Keep errors of the observation out of a script that never asked for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from entrenar_py.shared import hook_calls
from entrenar_py.shared.errors import EntrenarError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def guarded(
    method: Callable[Concatenate[Any, _Given], _Result],
) -> Callable[Concatenate[Any, _Given], _Result | None]:
    """Return `method` for use as a hook: an error of ours ends the observation, not the script.

    Its class has `is_off()`, and `give_up(why)` which switches all hooks off. It returns None where
    they are off, or if it fails.
    """

    @hook_calls.ours
    @wraps(method)
    def run(self: Any, /, *given: _Given.args, **named: _Given.kwargs) -> _Result | None:
        if hook_calls.is_traced() or self.is_off():
            return None
        try:
            return method(self, *given, **named)
        except EntrenarError as error:
            self.give_up(str(error))
        except Exception as error:  # noqa: BLE001  (the user's script has to run all the same)
            self.give_up(
                f"the observation failed ({type(error).__name__}: {error}): an error of "
                "entrenar-py, please report it"
            )
        return None

    return run
