"""Runs whose ranks share the model by hand are read again once one worker has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from entrenar_py.check.command import runs
from entrenar_py.check.command.launch import OUTPUT, Ended
from entrenar_py.check.command.run_plan import Plan
from entrenar_py.check.evidence.needs import ALONE
from entrenar_py.check.rank_files.rank_file import RankFile
from entrenar_py.shared import trace
from entrenar_py.shared.trace import Start, Update, record_tensor
from tests import traces

WHOLE = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


def launch(command: Sequence[str], *, folder: Path, **settings: object) -> Ended:
    """Write the files of ranks that hold the rows of one matrix, and the end of the run."""
    world_size = int(command[-1])
    for rank in range(world_size):
        file = RankFile(folder, {"rank": rank, "world_size": world_size, "values": True})
        rows = WHOLE[rank * 4 // world_size :][: 4 // world_size]
        weights = {"weight": record_tensor(rows.reshape(-1), values=True)}
        shard = traces.shard(0, rank, ids=(3, 4), weight=2)
        start = Start(step=0, rank=rank, weights=weights, shapes={"weight": rows.shape})
        update = traces.update(0, rank, loss=0.5, weight=2, gradient=weights, weights=weights)
        file.append([start, shard, update])
        file.close()
    (folder / OUTPUT).touch()
    return Ended(code=0, seconds=1.0, tail=(), output=folder / OUTPUT, num_left=0)


def sizes(recorded: trace.Trace) -> list[int | None]:
    """Return how many elements of the matrix each rank is seen with after the step."""
    return [update.weights["weight"].size for update in recorded.of(Update)]


def test_a_run_is_read_again_with_the_pieces_that_one_worker_shows(tmp_path: Path) -> None:
    """The first trace has halves; then whole tensors and one batch, in its file, too."""
    plan = Plan(
        command=("train", "{world_size}"), needs=(ALONE,), folder=tmp_path / "runs", launch=launch
    )
    seen = [(file.stem, run) for file, run in runs.record(plan, lambda *_: None)]
    names = [name for name, _ in seen]
    assert names == ["2-workers", "2-workers", "1-worker"]
    traces: Mapping[int, trace.Trace] = {place: run.trace for place, (_, run) in enumerate(seen)}
    assert [sizes(traces[place]) for place in range(3)] == [[6, 6], [12, 12], [12]]
    assert seen[2][1].settings in seen[1][1].ahead, "it is not judged before one worker has run"
    assert [traces[place].scenario.batch_size for place in range(3)] == [4, 2, 2]
    assert sizes(trace.load(tmp_path / "runs/2-workers.jsonl")) == [12, 12]
