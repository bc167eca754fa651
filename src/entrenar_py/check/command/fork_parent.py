"""`python fork_parent.py SETTINGS`: a process that forks launchers and ranks; see `forks`."""

import sys
from functools import partial

if __name__ == "__main__":
    from forks import parent, processes  # type: ignore[import-not-found]
    from subreaper import main  # type: ignore[import-not-found]

    _self = sys.modules["__main__"]  # keeps this module alive when a script takes its place
    for _name in [*sys.modules]:  # a script may import modules with the names of ours
        if _name.partition(".")[0] in ("forks", "subreaper"):
            del sys.modules[_name]
    if not sys.flags.safe_path:
        del sys.path[0]
    processes.run(partial(parent.main, main))
