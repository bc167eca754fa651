"""The idle time of equal stages beside its formula, (P - 1) / (M + P - 1), over TCP on this host.

    python -m tests.benchmarks.equal_stages --stages 2,3,4 --shards 4,8,16

Stages compute a small model, and each pass then sleeps until it has taken --pass-ms, and twice that
in the last stage, whose pass is both. So stages are alike, and need no core each: what is measured
is the schedule and the wire. `idle` is the median of the steps after the first ones. Prints a JSON
line for each pair; CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import gpu_finetune, layer_pipeline

PATIENT = "--sleeping"  # the first argument of a worker's process


def worker(pass_ms: float, arguments: list[str]) -> int:
    """Be a worker whose passes take `pass_ms`."""
    from entrenar_py import entrenar as cli
    from entrenar_py.train.stages.member import StageMember

    plain = StageMember._run

    def slow(self: Any, request: Any) -> Any:
        end = time.monotonic() + pass_ms / 1000 * (1 + self.workload.stage.is_last)
        found = plain(self, request)
        time.sleep(max(0.0, end - time.monotonic()))
        return found

    StageMember._run = slow  # type: ignore[method-assign]
    return cli.main(arguments)


def main() -> None:
    """Measure each pair that the command line asks for."""
    if sys.argv[1:2] == [PATIENT]:
        sys.exit(worker(float(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--shards", default="4,8,16")
    parser.add_argument("--pass-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    given.hidden, given.tokens, given.rows, given.blocks = 32, 16, 1, 4
    command = (sys.executable, "-m", "tests.benchmarks.equal_stages", PATIENT, str(given.pass_ms))
    with tempfile.TemporaryDirectory(prefix="entrenar-stages-") as name:
        folder = Path(name)
        layer_pipeline.checkpoint(folder / "model", given)
        for stages in map(int, given.stages.split(",")):
            for shards in map(int, given.shards.split(",")):
                asked = argparse.Namespace(**{**vars(given), "stages": stages, "shards": shards})
                gpu_finetune.rows(folder / "rows.jsonl", shards * given.steps, given.tokens)
                output = f"{stages}-{shards}"
                found = layer_pipeline.ours(folder, output, asked, of_worker=command)
                formula = (stages - 1) / (shards + stages - 1)
                record = {"stages": stages, "shards": shards, "idle": found["idle"]}
                print(json.dumps({**record, "formula": round(formula, 3)}), flush=True)


if __name__ == "__main__":
    main()
