"""The keys of a configuration: type and meaning of each. `reading` reads them, the docs show them.

A key is named as the option that it stands for, without the dashes, and takes the values that
`options.parser` allows. A few have no option, such as `command` and `exclude`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Form -> a description of its values.
HOLDS: Mapping[str, str] = {
    "text": "text",
    "texts": "text, or list of texts",
    "count": "whole number",
    "counts": "whole number, or list of them",
    "seconds": "number of seconds",
    "flag": "`true` or `false`",
    "path": "path",
    "paths": "path, or list of paths",
    "command": "text, or list of words",
    "exclusions": "list of tables, see below",
    "date": "date, without quotes",
    "levels": "table of levels by rule",
    "suppressions": "list of tables, see below",
    "knobs": "table of tables of text",
    "acceptances": "table of reasons by clause",
}


@dataclass(frozen=True)
class Key:
    """A key: `form` names a row of HOLDS, and `usual` is the default."""

    form: str
    usual: str
    means: str


_PER_CONTRACT = "; `{contract}` in it is the contract's name, needed where there are several"
KEYS: Mapping[str, Key] = {
    "contract": Key(
        "texts",
        "required",
        "YAML contracts, by path or by the name of a shipped one; each has a report",
    ),
    "command": Key(
        "command",
        "none",
        "the command that trains, with its [placeholders](your-trainer.md#what-is-run); it runs in "
        "the file's folder",
    ),
    "bind": Key(
        "paths",
        "none",
        "files of [bindings](bindings.md), besides those that lie next to a contract; each is for "
        "the contract that it names",
    ),
    "knobs": Key(
        "knobs",
        "each knob's own values",
        "how the script spells a [knob](your-trainer.md#knobs)'s values, as in "
        '`knobs.strategy = {on = "ddp", off = "none"}`; a word of the command that is a knob alone '
        'is left out where that is `""`',
    ),
    "steps": Key("count", "`8`", "what `{steps}` stands for in the command"),
    "epochs": Key("count", "`2`", "what `{epochs}` stands for in the command"),
    "auto": Key(
        "flag",
        "`false`",
        "the command's script doesn't call `observe()`, and is [observed all the same](auto.md)",
    ),
    "deadline": Key("seconds", "`300`", "a run of the command that takes longer is ended"),
    "in-place": Key(
        "flag",
        "`false`",
        "all runs of the command work in the file's folder itself, instead of in "
        "[a copy of it](your-trainer.md#where-a-run-works) each",
    ),
    "launcher": Key(
        "text",
        "`forked`",
        "`forked` or `as-is`: whether the command's launcher and ranks may be "
        "[forked](your-trainer.md#what-is-run) from a process that has imported torch",
    ),
    "system": Key("text", "the contract's own", "the trainer to try, where there is no command"),
    "backend": Key("texts", "`cpu`", "the workers' backends in turn, where there is no command"),
    "examples": Key("count", "`20`", "random scenarios per invariant, where there is no command"),
    "timeout": Key("seconds", "none", "no new run is started after this time; not for a command"),
    "world-size": Key("counts", "the contract's; with a command `2`", "numbers of workers"),
    "seed": Key("count", "`0`", "added to every seed; with a command what `{seed}` stands for"),
    "only": Key("texts", "all", "ids of the clauses to try"),
    "severity": Key("texts", "all", "severities of the clauses to try: `P0`, `P1`, `P2`"),
    "exclude": Key("exclusions", "none", "clauses that are not tried, and why"),
    "accept": Key(
        "acceptances",
        "none",
        "clauses whose falsification is known and accepted, and why: they are tried and reported, "
        "and don't change the exit code",
    ),
    "allow-inconclusive": Key("flag", "`false`", "exit 0 instead of 4 where nothing broke"),
    "strict": Key("flag", "`false`", "the contract's warnings are errors"),
    "rule": Key(
        "levels",
        "each rule's own",
        "the level that `--validate` gives the findings of each [rule](contract-rules.md): `off`, "
        "`info`, `warning`, `error`; `--rule` takes precedence",
    ),
    "suppress": Key("suppressions", "none", "findings of `--validate` to suppress, and why"),
    "json": Key("path", "not written", f"the report as JSON{_PER_CONTRACT}"),
    "junit": Key("path", "not written", "the report as JUnit XML; `{contract}` as in `json`"),
    "sarif": Key("path", "not written", "the report as SARIF; `{contract}` as in `json`"),
    "html": Key("path", "not written", "the report as one page; `{contract}` as in `json`"),
    "github": Key("flag", "`false`", "annotations and summary, where a GitHub workflow runs this"),
    "trace-dir": Key(
        "path", "runs are not kept", "folder for every run's trace; `{contract}` as in `json`"
    ),
    "quiet": Key("flag", "`false`", "show only what did not hold"),
}

# The keys of an entry of `exclude`.
EXCLUSION: Mapping[str, Key] = {
    "clause": Key("texts", "required", "ids of clauses"),
    "reason": Key("text", "required", "why; every report repeats it"),
    "until": Key(
        "date",
        "required, unless `kind` says that it can't apply",
        "the last day on which it is left out (`2027-01-31`); from the next day on the clause is "
        "tried again, and the report says so",
    ),
    "kind": Key(
        "text",
        '`"excluded"`',
        '`"not-applicable"`: the clause says nothing of this trainer, ever; it has no end date',
    ),
}
# The keys of an entry of `suppress`.
SUPPRESSION: Mapping[str, Key] = {
    "rule": Key("text", "required", "the id of the rule"),
    "file": Key("text", "all", "the contract: its name, the end of its path, or a pattern"),
    "item": Key(
        "text", "all", "the dotted path of what is suppressed, with all below it, or a pattern"
    ),
    "reason": Key("text", "required", "why; every report repeats it"),
    "until": Key("date", "required", "the last day; from the next on the findings count again"),
}
KINDS = ("excluded", "not-applicable")
