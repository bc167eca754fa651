"""The exit codes of `entrenar`, and their meanings for each command."""

from __future__ import annotations

from collections.abc import Mapping

DONE = 0
WRONG = 1
INVALID = 2
FAILED = 3
INCONCLUSIVE = 4
STOPPED = 6  # 5 is "nothing selected" in entrenar-check, and unused here

MEANINGS: Mapping[int, str] = {
    DONE: "the run is complete; the ledger is correct; the doctor has finished",
    WRONG: "the run halted or was abandoned, or a worker was refused; the ledger is broken or "
    "differs; shards are missing or damaged; prompts have no answer",
    INVALID: "the command line or a file that it names is invalid; nothing ran",
    FAILED: "the program itself failed: a device, a full disk, a bug",
    INCONCLUSIVE: "the ledger can't be replayed here bit for bit",
    STOPPED: "stopped by SIGINT, SIGTERM or SIGHUP: the current step was finished (a second signal "
    "abandons it), the checkpoint was written, and the workers were notified; continue with "
    "--resume",
}

_COMMON = {INVALID: MEANINGS[INVALID], FAILED: MEANINGS[FAILED], STOPPED: "interrupted"}
_TRAINING = {
    DONE: "the run is complete",
    WRONG: "the run was halted or given up",
    STOPPED: MEANINGS[STOPPED],
}
_SHARDS = {STOPPED: "stopped by SIGINT, SIGTERM or SIGHUP; start it again to continue"}
# Command -> meanings of its codes, where they differ from _COMMON.
_OWN: Mapping[str, Mapping[int, str]] = {
    **dict.fromkeys(("coordinator", "finetune", "distill train"), _TRAINING),
    "worker": {**_TRAINING, WRONG: "the run was halted or given up, or refused this worker"},
    "ledger verify": {
        DONE: "the ledger is right",
        WRONG: "the ledger is broken, or training again gives different results",
        INCONCLUSIVE: MEANINGS[INCONCLUSIVE],
    },
    "doctor": {DONE: "the doctor has finished"},
    "infer": {DONE: "the prompt was answered"},
    "merge": {DONE: "the model is written"},
    "eval": {DONE: "the rows have their scores"},
    "plan": {
        DONE: "the run fits",
        INVALID: "the command line or a file that it names is invalid, or the run does not fit",
    },
    "distill logits": {DONE: "all shards are complete", **_SHARDS},
    "distill text": {
        DONE: "every prompt was answered",
        WRONG: "some prompts were not answered",
        **_SHARDS,
    },
    "distill status": {
        DONE: "all shards are complete",
        WRONG: "shards are missing or damaged",
    },
    "pipeline plan": {DONE: "the plan is printed"},
    "pipeline import": {DONE: "the configuration is converted"},
}

# By the status of a run's Finish.
OF_FINISH: Mapping[str, int] = {
    "completed": DONE,
    "halted": WRONG,
    "failed": WRONG,
    "stopped": STOPPED,
}


def of_command(command: str) -> Mapping[int, str]:
    """Return the meanings of the exit codes of `command`; the common ones for a group or ""."""
    own = _OWN.get(command)
    return MEANINGS if own is None else dict(sorted({**_COMMON, **own}.items()))
