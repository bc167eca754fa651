"""Observes whether and when a script saves its weights, and whether it loads them again.

A file has the weights if tensors are saved in it that have at least an eighth of the bytes of the
weights. Saved losses are smaller than that; weights in a smaller dtype are not. Only files saved
after training has begun count, since data may be prepared before. If a run doesn't reach the code
that saves, such as the end of a long epoch, the text of the script and of the library that trains
for it is searched for such code.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from entrenar_py.check.observing import FOLDER, call_sites, script_text
from entrenar_py.check.rank_files import notes
from entrenar_py.shared import hook_calls

_VALUES_MAX = 2**16  # values that are examined in a saved object, at most
_DEPTH_MAX = 12
_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # set by torchrun and by launchers built on it
# Calls that save something other than tensors are excluded.
_SAVES = re.compile(
    r"(?<!json\.)(?<!yaml\.)(?<!toml\.)"
    r"\b(save(?!fig|txt|_for_backward|_hyperparameters)\w*|dump|tofile)\s*\("
)
_LOADS = re.compile(  # calls that load a file; load_state_dict may copy one model to another
    r"\b(torch|pickle|joblib|np|numpy|dcp|checkpoint)\.load\b|\bload_(checkpoint|model|file)\b"
    r"|\bload_state\(|\bload_from_checkpoint|\bfromfile\(|resume|restore|ckpt_path"
)
_RESUMES = re.compile(r"(resum|restor|restart|ckpt_path)", re.IGNORECASE)
# These may write a file, too. If a script has none of them, a function that it defines saves
# something only in lines that `_SAVES` matches.
_WRITES = re.compile(r"\bopen\(|\.write|h5py|create_dataset|subprocess|\.put\w*\(|upload")
_DEFINED = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)", re.MULTILINE)
_RESUMING = ("resume", "restore", "load", "ckpt", "checkpoint")  # the most reliable word first
# An option, and the rest of the call that declares it.
_OPTION = re.compile(
    r"""["'](--[\w-]*(?:resume|restore|ckpt|checkpoint|load)[\w-]*)["']"""
    r"""((?:[^()]|\([^()]*\))*)"""
)
_FLAG = re.compile(r"store_true|is_flag=True|BooleanOptionalAction")
# A setting that may be "resume", and the two ways to set it from outside.
_SETTING = re.compile(r"""\b(\w+)\s*==\s*["'](resume)["']""")
_VARIABLE = r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["']({})["']"""
_RUN_AS_SETTINGS = re.compile(r"\bexec\(\s*open\(")  # options --NAME=VALUE, as in nanoGPT
_SWITCHES = re.compile(  # a variable that is a number, or compared with one
    r"""\b(?:int|bool)\(\s*(?:os\.)?(?:environ|getenv)[^\n]*RESUME|RESUME\w*["'],\s*["']?[01]\b"""
    r"""|RESUME\w*["'][^\n]*==\s*["']1["']"""
)


class _Watch:
    """Detects when this process saves a large part of the bytes of `weights`."""

    def __init__(
        self, folder: Path, weights: Sequence[Tensor], num_bytes: int, made: Callable[[], int]
    ) -> None:
        self.folder, self._made = folder, made
        self._num_bytes, self._least = num_bytes, max(1, num_bytes // notes.LEAST_SHARE)
        self._places = {*map(_place, weights)} - {0}
        self.has_stepped = False
        self.has_read = False  # whether a file was read since the state was last recorded

    def written(self, values: Any, file: object) -> None:
        parts = [*_parts(values)]
        num_bytes = sum(map(_size, parts))
        if num_bytes < self._least:
            return
        # A background thread saves the weights that it got before the step that was taken
        # meanwhile.
        behind = int(threading.current_thread() is not threading.main_thread())
        known: dict[str, Any] = {}
        if isinstance(file, str | os.PathLike) and (at := _changed_at(file)):
            known = {"file": at, "path": str(Path(file).absolute())}
            shown = {_place(part) for part in parts if isinstance(part, Tensor)}
            # The file has more than the weights: the optimizer's state, for example.
            if num_bytes > self._num_bytes and self._places and shown >= self._places:
                known["is_whole"] = True
        notes.write_save(self.folder, after=self._made(), behind=behind, **known)


_CURRENT: list[_Watch] = []


def watch(weights: Iterable[Tensor], num_made: Callable[[], int]) -> None:
    """Record from here on what this process saves. `num_made()` is the number of steps taken.

    `weights` are the trained weights. Nothing is recorded without a harness.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    trained = [*weights]
    num_bytes = sum(map(_size, trained))
    _CURRENT[:] = [_Watch(Path(folder), trained, num_bytes, num_made)]
    own, libraries = (
        script_text.texts()
    )  # a library may save at a step that the harness doesn't let it reach
    notes.write_save(
        Path(folder),
        weights=num_bytes,
        unreached=script_text.first(_SAVES, own, _own_functions(own)),
        library=script_text.first(_SAVES, libraries),
        loads=bool(script_text.first(_LOADS, own)),
        resumes=bool(script_text.first(_RESUMES, own)),
        option=_option(own),
        restarts=os.environ.get(_MAX_RESTARTS) != "0",
    )


def first_step() -> None:
    """Record that training begins with its first step, and whether the script loads only later.

    A warm-up pass may come before the step, and the checkpoint may be loaded between the two.
    """
    for watched in _CURRENT:
        if not watched.has_stepped:
            watched.has_stepped = True
            own, _ = script_text.texts()
            notes.write_save(watched.folder, loads_late=script_text.come_later(_LOADS, own))


def was_read() -> bool:
    """Return whether the script read a file since the last call, and before its first step."""
    has_read = any(one.has_read for one in _CURRENT)
    for one in _CURRENT:
        one.has_read = False
    return has_read


@hook_calls.outside
def written(values: Any, file: object) -> None:
    """Record that `values` were saved to `file`, if they may be the weights."""
    for one in _CURRENT:
        one.written(values, file)


@hook_calls.outside
def loaded(file: Any) -> None:
    """Record that the script loaded `file`, a path or an open file, before it trains."""
    folder, site = os.environ.get(FOLDER), call_sites.here()
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    trains = any(watched.has_stepped for watched in _CURRENT)
    if folder and site and not trains and (at := _changed_at(path)):
        notes.write_save(Path(folder), loaded=at, line=f"{Path(site[0]).name}:{site[1]}")
        for watched in _CURRENT:
            watched.has_read = True


def _changed_at(file: object) -> int | None:
    # The modification time identifies the contents, even if the file is renamed.
    if isinstance(file, str | os.PathLike):
        with suppress(OSError):
            return Path(file).stat().st_mtime_ns
    return None


def _parts(values: Any) -> Iterator[Any]:
    """Yield `values` and everything inside them, each object once."""
    seen: set[int] = set()
    left = [(values, 0)]
    while left and len(seen) < _VALUES_MAX:
        value, depth = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if depth < _DEPTH_MAX:
            left += [(inner, depth + 1) for inner in _inside(value)]


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes):
        return len(value)
    return int(getattr(value, "data_len", 0)) if type(value).__name__ == "TensorSpec" else 0


def _inside(value: Any) -> Iterable[Any]:
    """Return the values in a container, a module, or an object with attributes."""
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Tensor | np.ndarray | type | str | bytes):
        return ()
    return [*vars(value).values()] if hasattr(value, "__dict__") else ()


# --- the text of the script -------------------------------------------------------------------


def _own_functions(texts: Mapping[str, str]) -> frozenset[str]:
    whole = "\n".join(texts.values())
    return frozenset() if _WRITES.search(whole) else frozenset(_DEFINED.findall(whole))


def _option(texts: Mapping[str, str]) -> str:
    """Return the option that most likely resumes a run, with PATH if it takes one; "" if none.

    The result may also be a setting or an environment variable with its value, such as
    `INIT=resume`.
    """
    options = [match for text in texts.values() for match in _OPTION.finditer(text)]

    def is_less_sure(one: re.Match[str]) -> tuple[bool, int]:
        words = (n for n, word in enumerate(_RESUMING) if word in one[1])
        return one[1].startswith("--no-"), next(words)

    surest = min(options, key=is_less_sure, default=None)
    if surest is None or _RESUMING[0] not in surest[1]:
        return _setting("\n".join(texts.values())) or _of_option(surest)
    return _of_option(surest)


def _of_option(surest: re.Match[str] | None) -> str:
    if surest is None:
        return ""
    return surest[1] if _FLAG.search(surest[2]) else f"{surest[1]} PATH"


def _setting(text: str) -> str:
    """Return the setting or environment variable that resumes the script; "" if there is none."""
    for name, value in _SETTING.findall(text):
        line = re.search(rf"\b{name}\s*(?::\s*\w+\s*)?=[^=\n]*" + _VARIABLE.format(r"\w+"), text)
        if line is not None:
            return f"{line[1]}={value}"
        declared = re.search(rf"""["']--({name}|{name.replace("_", "-")})["']""", text)
        if declared is not None:
            return f"--{declared[1]}={value}"
        if _RUN_AS_SETTINGS.search(text) and re.search(rf"^{name}\s*=", text, re.MULTILINE):
            return f"--{name}={value}"
    variable = re.search(_VARIABLE.format(r"\w*RESUME\w*"), text)
    if variable is None:
        return ""
    return f"{variable[1]}={1 if _SWITCHES.search(text) else 'PATH'}"
