"""The placeholders of a command, and the text that each run fills in for them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from entrenar_py.check.clauses.knobs import KNOBS
from entrenar_py.shared.errors import UsageError, did_you_mean
from entrenar_py.shared.wording import counted

# Name of a placeholder -> what is filled in for it.
PLACEHOLDERS = {
    "world_size": "number of workers",
    "seed": "the seed",
    "steps": "total number of optimizer steps, including those before a resume",
    "epochs": "total number of epochs, including those before a resume",
    "workdir": "a folder of the run, for checkpoints: the same before a stop and after it",
    "trace_dir": "the folder for the records of the ranks",
    "resume:OPTIONS": "options that make the script continue from a checkpoint, filled in only "
    "where it is started again after a stop: {resume:--resume out/last.pt}; a "
    "PATH with a * is the newest such file",
    "share:N": "how many samples of a global batch of N a worker has in one micro-batch: "
    "N divided by the number of workers, and by {accumulation} if that is in "
    "the command",
    **{name: knob.says for name, knob in KNOBS.items()},
}
# Excludes ${...} of a shell or of Hydra. Doubled braces stand for braces: {{epoch}}.
_NAME = re.compile(r"(?<!\$)(?:\{(?P<text>\{\w+\})\}|\{(?P<name>\w+)\})")
RESUME = "resume:"  # begins a placeholder that always has options after it
_RESUME_BEGINS = re.compile(r"(?<!\$)\{resume:")
_RESUME = re.compile(_RESUME_BEGINS.pattern + r"([^{}]*)\}")
_SHARE = re.compile(r"(?<!\$)\{share(?::([^{}]*))?\}")


def has(command: Iterable[str], name: str) -> bool:
    """Return whether a command has the placeholder `name`."""
    if name == RESUME:
        return any(_RESUME_BEGINS.search(word) for word in command)
    return any(name in _names(word) for word in command)


def _names(word: str) -> list[str]:
    return [found["name"] for found in _NAME.finditer(word) if found["name"]]


def require_known(command: Sequence[str]) -> None:
    """Raise UsageError, with a suggestion, for a placeholder in `command` that doesn't exist."""
    for word in command:
        for share in _SHARE.finditer(word):
            if not (share[1] or "").isdecimal() or int(share[1]) < 1:
                raise UsageError(
                    f"{word}: {share[0]} stands for a worker's share of a global batch; say how "
                    "many samples that has, {share:16}",
                    field="command",
                )
        for name in _names(word):
            if f"{name}:" == RESUME:
                raise UsageError(
                    f"{word}: {{resume}} needs the options that make the script continue from a "
                    "checkpoint, {resume:--resume out/last.pt}",
                    field="command",
                )
            if name.isidentifier() and name not in PLACEHOLDERS and name != "share":
                raise UsageError(
                    f"{word}: {did_you_mean(name, PLACEHOLDERS)} (for the text {{{name}}} itself, "
                    f"write {{{{{name}}}}})",
                    field="command",
                )


def can_share(command: Sequence[str], workers: int) -> bool:
    """Return whether each global batch in `command` can be divided evenly among `workers`."""
    shares = (share for word in command for share in _SHARE.finditer(word))
    return not any(int(share[1]) % workers for share in shares)


def require_shares(command: Sequence[str], cuts: Iterable[tuple[int, int]]) -> None:
    """Raise UsageError unless every run can divide each global batch in `command` evenly.

    `cuts` has the numbers of workers and of micro-batches of each run.
    """
    by_parts = {math.prod(cut): cut for cut in cuts}
    for samples in sorted({int(share[1]) for word in command for share in _SHARE.finditer(word)}):
        for parts, (workers, micro_batches) in sorted(by_parts.items()):
            if samples % parts:
                each = f", {micro_batches} micro-batches each" if micro_batches > 1 else ""
                raise UsageError(
                    f"{{share:{samples}}}: {samples} samples can't be divided evenly among "
                    f"{counted(workers, 'worker')}{each}, as a run of this command needs; give a "
                    f"multiple of {math.lcm(*by_parts)}",
                    field="command",
                )


def fill(
    command: Sequence[str],
    values: Mapping[str, str],
    spelled: Mapping[str, Mapping[str, str]],
    *,
    resumes_in: Path | None = None,
) -> list[str]:
    """Return `command` with its placeholders filled in from `values`.

    `spelled` maps knob and value to the text that is filled in instead of the value. If that text
    is "", a word that is only the knob's placeholder is left out. The options in {resume:...} are
    left out of a first launch; `resumes_in` is the working folder of a later launch. A worker's
    share is computed for the usual value of `accumulation` if `values` has none.
    """
    texts = {name: spelled.get(name, {}).get(value, value) for name, value in values.items()}
    empty = {"{" + name + "}" for name in spelled if texts[name] == ""}
    parts = int(values["world_size"])
    if has(command, "accumulation"):
        parts *= int(values.get("accumulation", KNOBS["accumulation"].usual))
    filled = [
        _SHARE.sub(
            lambda share: str(int(share[1]) // parts),
            _NAME.sub(lambda found: found["text"] or texts.get(found["name"], found[0]), word),
        )
        for word in command
        if word not in empty
    ]
    return [word for one in filled for word in _with_resume(one, resumes_in)]


def _with_resume(word: str, folder: Path | None) -> list[str]:
    whole = _RESUME.fullmatch(word)
    if whole is None:
        return [_RESUME.sub(lambda found: found[1] if folder else "", word)]
    return [_newest(one, folder) for one in shlex.split(whole[1])] if folder else []


def _newest(word: str, folder: Path) -> str:
    """Return `word`; if it is a pattern, the newest file in `folder` that matches it."""
    if "*" not in word:
        return word
    option, equals, pattern = word.rpartition("=")
    base = Path(folder, pattern)  # an absolute pattern stays as it is
    found = Path(base.anchor).glob(str(base.relative_to(base.anchor)))
    newest = max(found, key=lambda path: path.stat().st_mtime, default=base)
    return f"{option}{equals}{newest}"
