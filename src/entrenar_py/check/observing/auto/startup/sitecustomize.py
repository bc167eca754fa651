"""Starts the observation of this process when torch is imported; Python runs this file first.

The harness puts this file's folder first on PYTHONPATH. It runs in every Python of the command,
which may be an older version, so it uses no new syntax and imports only the standard library. A
process that never imports torch only pays for this file and for a finder.
"""

import importlib.machinery
import importlib.util
import os
import sys

# The same names are in check/observing/__init__.py and check/observing/auto/__init__.py.
FOLDER = "ENTRENAR_TRACE_DIR"
SETTINGS = "ENTRENAR_AUTO"
HERE = os.path.dirname(os.path.abspath(__file__))


class Waiting:
    """A finder that calls a function after an awaited module was loaded.

    `awaited` maps names of modules to the functions to call. A module stays awaited until it was
    executed, since libraries search for torch without importing it.
    """

    def __init__(self, awaited):
        self.awaited = awaited

    def find_spec(self, name, path=None, target=None):
        """Return the spec that the other finders return for an awaited module, or None."""
        if name not in self.awaited:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, type):
                    self._follow(spec.loader, name)
                return spec
        return None

    def _follow(self, loader, name):
        """Make `loader`, which stays the same object, report when it has executed the module."""
        execute = loader.exec_module

        def exec_module(module):
            vars(loader).pop("exec_module", None)
            execute(module)
            if module.__name__ == name and name in self.awaited:
                self.awaited.pop(name)()

        loader.exec_module = exec_module


def note(text):
    """Write `text` for the harness, if its folder exists. check/rank_files/notes.py reads it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        sys.stderr.write("entrenar: " + text + "\n")
        return
    try:
        with open(os.path.join(folder, "auto-%d.note.txt" % os.getpid()), "a") as file:
            file.write(text + "\n")
    except OSError:
        pass  # the folder is gone, and so is the harness


def begin():
    """Start the observation, now that torch is imported. If that is impossible, note the reason."""
    try:
        from entrenar_py.check.observing.auto import beginning
    except Exception as error:  # noqa: BLE001  (the user's script must continue)
        note(
            "%s (Python %d.%d) can't import entrenar_py (%s: %s): install entrenar-py there, or "
            "run the script with a Python that has it"
            % (
                sys.executable,
                sys.version_info[0],
                sys.version_info[1],
                type(error).__name__,
                error,
            )
        )
        return
    beginning.begin(WAITING)


def run_users_own():
    """Run the `sitecustomize` that Python would have run, if there is one."""
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


WAITING = Waiting({"torch": begin})
if os.environ.get(SETTINGS):
    sys.meta_path.insert(0, WAITING)
    if os.environ.get(FOLDER):
        try:  # the file shows that PYTHONPATH is not ignored
            with open(os.path.join(os.environ[FOLDER], "auto.loaded"), "a"):
                pass
        except OSError:
            pass
    if "torch" in sys.modules:  # if the process was forked after torch was imported
        WAITING.awaited.pop("torch")()
if __name__ == "sitecustomize":
    run_users_own()
