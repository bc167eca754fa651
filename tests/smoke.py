"""Run the main commands once each on something tiny, in one process: for `python -O`.

Prints a line for each command that worked; ends with an exception or a wrong exit code. The
arguments are a folder to write to, and the worker's backend.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any


def reuse_bytecode() -> None:
    """Take installed packages from their ordinary bytecode.

    Under -O Python would compile all of torch again, which takes longer than everything else here.
    """
    external: Any = importlib.import_module("importlib._bootstrap_external")
    usual = external.cache_from_source

    def cached(path: str, override: bool | None = None, *, optimization: str | None = None) -> Any:
        ordinary = "" if "site-packages" in str(path) else optimization
        return usual(path, override, optimization=ordinary)

    external.cache_from_source = cached


def main(folder: Path, backend: str) -> None:
    """Train as a service, verify the ledger and train again by it, and judge a small contract."""
    from entrenar_py import entrenar as service
    from entrenar_py.train.service import coordinator, worker  # noqa: F401  (torch, before the fork)
    from tests.train.service.cluster import Cluster

    run = Cluster(folder)
    training = {"workload": "mlp", "world_size": 1, "seed": 0, "num_steps": 3}
    kept = {"ledger": "ledger.jsonl", "checkpoint": {"path": "state", "every_steps": 2}}
    path = run.configure(training, **kept)
    joined = ["--coordinator", run.address, "--secret-file", str(run.secret), "--backend", backend]
    child = os.fork()
    if child == 0:
        os._exit(service.main(["worker", *joined]))
    require("coordinator", service.main(["coordinator", str(path)]))
    require("worker", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    verify = ["ledger", "verify", "--replay", str(folder / "ledger.jsonl")]
    require("ledger verify", service.main(verify))

    from entrenar_py.check import cli
    from tests.command_line import contract_file

    small = ["--contract", contract_file(folder), "--examples", "2", "--quiet"]
    require("entrenar-check", cli.main(small))


def require(what: str, code: int) -> None:
    """Print that `what` worked, or raise SystemExit with its exit code."""
    if code != 0:
        raise SystemExit(f"{what}: exit code {code}")
    print(f"{what}: ok", flush=True)


if __name__ == "__main__":
    if __debug__:
        raise SystemExit("run it with python -O: it is to show that no assert is needed")
    reuse_bytecode()
    main(Path(sys.argv[1]), sys.argv[2])
