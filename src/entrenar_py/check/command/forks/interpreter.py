"""A forked process that acts as a new interpreter: its state before a script, and its end."""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from .processes import end_like

_OURS = os.path.dirname(os.path.dirname(__file__))


def options_of(words: Sequence[str]) -> tuple[tuple[str, ...], bool, list[str]]:
    """Return the options of `python WORDS`, whether it runs a module (`-m`), and the rest."""
    flags, at = [], 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        flags.append(words[at])
        at += 1
    module = words[at : at + 1] == ["-m"]
    return tuple(flags), module, [*words[at + module :]]


def set_environment(environment: Mapping[str, str]) -> None:
    """Make `environment` the environment of this process, without any other variables."""
    os.environ.clear()
    os.environ.update(environment)


def forget_draws() -> None:
    """Reseed the random generators that forks would share (Python's `random` reseeds itself)."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)


def run_as_main(words: Sequence[str]) -> NoReturn:
    """Do what `python WORDS` does in a new interpreter, then end this process."""
    _, is_module, rest = options_of(words[1:])
    sys.orig_argv = [*words]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if "__annotations__" in vars(sys.modules["__main__"]):  # before Python 3.14
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    before, code = {*sys.modules} - {"__main__"}, 0
    try:
        if is_module:
            sys.argv = ["-m", *rest[1:]]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        else:
            sys.argv = rest
            _run_file(rest[0], main)
    except SystemExit as left:
        code = _exit_code(left)
    except BaseException as error:  # noqa: BLE001  (printed as Python prints it)
        code = _told_uncaught(error)
    del main  # its objects end with the last reference
    _leave(code, before)


def _run_file(script: str, main: types.ModuleType) -> None:
    path = os.path.join(os.getcwd(), script)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _exit_code(left: SystemExit) -> int:
    if left.code is None or isinstance(left.code, int):
        return (left.code or 0) & 0xFF
    with suppress(Exception):
        sys.stderr.write(f"{left.code}\n")
    return 1


def _told_uncaught(error: BaseException) -> int:
    """Print an uncaught error as Python does, without frames of this package.

    Return the exit code.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _leave(code: int, before: set[str]) -> NoReturn:
    """End this process as an interpreter ends: with its threads, exit handlers, files and objects.

    The modules in `before` are left alone. Clearing them, too, would copy every memory page that
    they share with other processes.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.last_type = sys.last_value = sys.last_traceback = None
    if sys.version_info >= (3, 12):
        sys.last_exc = None
    _take_down([name for name in sys.modules if name == "__main__" or name not in before])
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    end_like(code)


def _take_down(names: Sequence[str]) -> None:
    """Drop all modules, then clear those that something still refers to, the last import first.

    This is what Python's own `Py_FinalizeEx` and `finalize_modules` do. A collection after each
    module would take minutes if the script has imported some thousand modules, such as those of
    transformers.
    """
    gc.collect()  # also puts the layers of open files in an order in which their text is written
    dropped: list[weakref.ref[types.ModuleType]] = []
    for name in names:
        if isinstance(module := sys.modules[name], types.ModuleType):
            dropped.append(weakref.ref(module))
        sys.modules[name] = None  # type: ignore[assignment]
        del module
    gc.collect()  # finalizers that run here find their globals
    for reference in reversed(dropped):
        if (left := reference()) is not None:
            for key in [*vars(left)]:
                if key != "__builtins__":
                    vars(left)[key] = None
    gc.collect()
