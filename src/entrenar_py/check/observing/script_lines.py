"""Record what each statement of a script does to its variables and to the random generators.

For `entrenar-check diff --again`: the first statement after which two runs of the same command have
different values is the source of the difference, or uses a value that came from it. After each
statement the variables that it names are digested. Libraries are not followed, and neither are
threads other than the main one. A worker of a loader has a file of its own.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from entrenar_py.check.observing import FOLDER, call_sites, generators, statements
from entrenar_py.check.observing.statements import Statement
from entrenar_py.check.rank_files import border_file, line_file, notes
from entrenar_py.compute import digest
from entrenar_py.shared import hook_calls

_HITS_MAX = 200  # times that one line of a process is recorded
_ITEMS_MAX, _DEPTH_MAX, _ELEMENTS_MAX = 1000, 4, 2**20
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SIMPLE = (
    *(bool, int, float, complex, str, bytes, Path, type(None)),
    *(torch.dtype, torch.device, np.generic),
)

clock: Callable[[], int] = lambda: 0  # noqa: E731  (the number of borders recorded so far)


def begin_if_planned(rank: int) -> None:
    """Begin to follow the script's lines in this thread if the harness asked for it."""
    settings = border_file.Settings.planned()
    if settings is not None and settings.lines:
        Lines(Path(os.environ[FOLDER]), rank).begin()


class Lines:
    """Follows the frames of the script, and writes an event after each of its statements."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._pid = folder, rank, os.getpid()
        self._file = line_file.create(folder, rank)
        self._stack: list[tuple[FrameType, int]] = []
        self._num_frames = 0
        self._at: dict[int, int] = {}  # number of a frame -> its line
        self._hits: Counter[tuple[CodeType, int]] = Counter()
        self._states: Mapping[str, str] = {}
        self._is_off = False

    def begin(self) -> None:
        """Follow the functions that run now, and those that are called from now on."""
        for frame in [*call_sites.own_frames()][::-1]:
            frame.f_trace = self._enter(frame)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._enter(frame) if _is_own(frame.f_code) else None

    def _enter(self, frame: FrameType) -> Callable[..., Any] | None:
        if os.getpid() != self._pid and not self._moved():
            sys.settrace(None)
            return None
        self._num_frames += 1
        number = self._num_frames
        self._stack.append((frame, number))
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        outer = self._stack[-2][0] if len(self._stack) > 1 else None
        line = 0 if outer is None else outer.f_lineno
        self._write(frame, number, line_file.CALL, line, names, outer=outer)

        def follow(frame: FrameType, event: str, value: Any) -> Any:
            if event == "line":
                self._finish(frame, number, frame.f_lineno)
            elif event == "return":
                self._finish(frame, number, 0)
                self._write(frame, number, line_file.RETURN, frame.f_lineno, (), value)
                while self._stack and self._stack.pop()[1] != number:
                    pass
            return follow

        return follow

    def _moved(self) -> bool:
        """Return whether this process, a child of the recorded one, is a worker of a loader."""
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return False
        self._pid, self._stack = os.getpid(), []
        self._file = line_file.create(self._folder, self._rank, worker.id)
        return True

    def _finish(self, frame: FrameType, number: int, line: int) -> None:
        """Write what the last statement of a frame has done, as the one in `line` begins."""
        of_file = _statements(frame.f_code.co_filename)
        last = self._at.get(number)
        statement = None if last is None else of_file.get(last)
        if last is not None and statement is not None:
            if of_file.get(line) is statement and not statement.is_loop:
                return
            self._hits[frame.f_code, last] += 1
            if self._hits[frame.f_code, last] <= _HITS_MAX:
                self._write(frame, number, line_file.LINE, statement.first, statement.names)
        self._at[number] = line

    def _write(
        self,
        frame: FrameType,
        number: int,
        kind: str,
        line: int,
        names: tuple[str, ...],
        returned: Any = None,
        outer: FrameType | None = None,
    ) -> None:
        if self._is_off or hook_calls.is_traced():
            return
        try:
            values = dict(_values(frame, names))
            if returned is not None:
                values[line_file.RETURNED] = value_digest(returned)
        except Exception as error:  # noqa: BLE001  (the user's script must continue)
            self._is_off = True
            notes.write_problem(self._folder, f"lines can't be followed ({error!r})")
            return
        states = generators.global_states()
        for name, state in states.items():
            if self._states.get(name) != state:
                values[line_file.GENERATOR + name] = state
        self._states = states
        at = next((n for n, (_, one) in enumerate(self._stack) if one == number), 0)
        parent = self._stack[at - 1][1] if at else 0
        path = _path((outer or frame).f_code.co_filename)
        event = [number, parent, kind, path, line, clock(), values]
        line_file.append(self._file, event)


@cache
def _is_own(code: CodeType) -> bool:
    return call_sites.is_own(code.co_filename)


@cache
def _path(file: str) -> str:
    return call_sites.in_place(Path(file).resolve())


@cache
def _statements(file: str) -> Mapping[int, Statement]:
    with suppress(OSError, UnicodeDecodeError):
        return statements.by_line(Path(file).read_text(encoding="utf-8"))
    return {}


def _values(frame: FrameType, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the variables with these names and their digests; those of modules have a prefix."""
    # Not a copy: up to Python 3.12 the frame keeps this dictionary, and reads it after the event.
    own, of_module = frame.f_locals, frame.f_globals
    for name in names:
        is_local = own is not of_module and name in own
        if is_local or name in of_module:
            value = own[name] if is_local else of_module[name]
            if not callable(value) or isinstance(value, nn.Module):
                yield name if is_local else line_file.GLOBAL + name, value_digest(value)


def value_digest(value: Any) -> str:
    """Return a digest of a value; "" of what has no value, such as a function.

    It begins with a letter for a tensor or model, for a set, and for what contains neither.
    Addresses are no part of it.
    """
    kind, shown = _digest(value, _DEPTH_MAX)
    if not shown:
        return ""
    text = f"{kind}{blake3(shown.encode()).hexdigest(8)}"
    if isinstance(value, list):
        parts = sorted(_digest(one, _DEPTH_MAX - 1)[1] for one in value[:_ITEMS_MAX])
        text += line_file.SORTED + blake3(" ".join(parts).encode()).hexdigest(8)
    return text


def _digest(value: Any, depth: int) -> tuple[str, str]:
    if isinstance(value, Tensor):
        return line_file.TENSOR, _tensor(value)
    if isinstance(value, np.ndarray):
        return line_file.TENSOR, blake3(value.tobytes()).hexdigest(8)
    if isinstance(value, _SIMPLE):
        return line_file.PLAIN, repr(value)
    if isinstance(value, _GENERATORS):
        return line_file.PLAIN, blake3(generators.state_of(value)).hexdigest(8)
    if isinstance(value, nn.Module):
        inner: Iterator[Any] = (
            (name, held)
            for name, module in _modules(value)
            for own in (vars(module),)
            for where in (own, own.get("_parameters", {}), own.get("_buffers", {}))
            for held in where.items()
            if isinstance(held[1], Tensor | bool | int | float | str)
        )
        return line_file.MODEL, _all(inner, 3)[1]
    if isinstance(value, torch.optim.Optimizer):
        return _all((p for group in value.param_groups for p in group["params"]), 1)
    if depth <= 0:
        return line_file.PLAIN, ""
    if isinstance(value, set | frozenset):
        return line_file.SET, " ".join(sorted(_digest(one, depth - 1)[1] for one in value)) or "-"
    if isinstance(value, dict):
        return _all(islice(value.items(), _ITEMS_MAX), depth - 1)
    if isinstance(value, list | tuple):
        return _all(islice(value, _ITEMS_MAX), depth - 1)
    if call_sites.is_own_class(type(value)):
        return _all(vars(value).items() if hasattr(value, "__dict__") else (), depth - 1)
    return line_file.PLAIN, ""


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those in it; it may be under construction."""
    return module.named_modules() if "_modules" in vars(module) else iter([("", module)])


def _all(values: Iterable[Any], depth: int) -> tuple[str, str]:
    kinds, digests = set[str](), blake3()
    for value in values:
        kind, text = _digest(value, depth)
        kinds.add(kind)
        digests.update(f"{text} ".encode())
    has_tensor = not kinds.isdisjoint((line_file.TENSOR, line_file.MODEL))
    return line_file.TENSOR if has_tensor else line_file.PLAIN, digests.hexdigest(8)


def _tensor(tensor: Tensor) -> str:
    parts = [tensor.detach()]
    if tensor.is_leaf and tensor.grad is not None:
        parts.append(tensor.grad)
    return " ".join(
        digest.digest(part if part.numel() <= _ELEMENTS_MAX else _some(part)) for part in parts
    )


def _some(tensor: Tensor) -> Tensor:
    """Return evenly spaced elements of a large tensor."""
    return tensor.flatten()[:: tensor.numel() // _ELEMENTS_MAX + 1]
