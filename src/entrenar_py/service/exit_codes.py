"""The exit codes of `entrenar`: one table for all its commands."""

from __future__ import annotations

from collections.abc import Mapping

DONE = 0
WRONG = 1
INVALID = 2
FAILED = 3
INCONCLUSIVE = 4
STOPPED = 6  # 5 is entrenar-check's "nothing selected", which has no place here

MEANINGS: Mapping[int, str] = {
    DONE: "the run is complete; the ledger is right; the doctor has looked",
    WRONG: "the run was halted or given up, a worker was refused; the ledger is broken or differs; "
    "shards are missing or damaged, prompts have no answer",
    INVALID: "the command line or a file that it names is invalid; nothing ran",
    FAILED: "the program itself failed: a device, a full disk, a bug",
    INCONCLUSIVE: "the ledger can't be replayed here bit for bit",
    STOPPED: "stopped by SIGINT or SIGTERM: the step in work was finished (a second signal gives "
    "it up), the checkpoint written, the workers told; go on with --resume",
}

# By how a run finished.
OF_FINISH: Mapping[str, int] = {
    "completed": DONE,
    "halted": WRONG,
    "failed": WRONG,
    "stopped": STOPPED,
}
