"""The generated pages and tables of the docs; `make docs` writes them.

Tests fail if a page is out of date.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from docs import cli_reference, finetune_schema, kill_matrix_page, original_wire
from entrenar_py.check import kill_matrix
from entrenar_py.check.anatomy import suspects
from entrenar_py.check.causes.presuppositions import COMPARISONS
from entrenar_py.check.clauses import CHECKS, Check
from entrenar_py.check.clauses.knobs import KNOBS
from entrenar_py.check.contract import Invariant
from entrenar_py.check.contract.rules import RULES
from entrenar_py.check.kill_matrix import Row
from entrenar_py.check.project import configuration as project_keys
from entrenar_py.shared import mutants, scenario
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import KINDS, LIE_PLACES, LIES, NEEDED, OPTIONAL, STRANGERS
from entrenar_py.shared.scenario import CHOICES, Scenario
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.shared.verdict import Counterexample
from entrenar_py.train.finetune import foreign_keys, own_models, settings_file
from entrenar_py.train.model.settings import Serving, Timeouts, Tls
from entrenar_py.train.service import exit_codes
from entrenar_py.train.service.config import Checkpoint
from entrenar_py.train.wire import attendance, frames, messages, terms
from entrenar_py.train.wire.mesh_worker import MeshWorker, RingWorker
from entrenar_py.train.wire.messages import MESSAGES, Accept, Message
from entrenar_py.train.wire.pipeline_peers import PipelineWorker
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io import door
from falsification import classes
from falsification.twins import every
from tests.check.command import twins

DOCS = Path(__file__).parent
FORMAT = DOCS / "contract-format.md"
CONTRACT_RULES = DOCS / "contract-rules.md"
ORIGINAL = DOCS / "original-workers.md"
COMING_FROM = DOCS / "coming-from.md"
PROTOCOL = DOCS / "protocol.md"
SERVICE = DOCS / "entrenar.md"
CONFIGURATION = DOCS / "configuration.md"
YOUR_TRAINER = DOCS / "your-trainer.md"
AUTO = DOCS / "auto.md"
ANATOMY = DOCS / "anatomy.md"

# The meaning of each field of a scenario; its type and default are read from the record.
MEANINGS = {
    "system": "the system that runs it; `--system` replaces a trainer's",
    "workload": "the model and its data; the gradients of `vectors` are known beforehand; "
    "`finetune` is for the systems `finetuned` and `finetuned_by_peer` and for traces of "
    "`entrenar finetune`, `own` for traces of your own trainer",
    "world_size": "workers",
    "seed": "the only source of randomness; `--seed` is added to it",
    "num_shards": "logical shards of a batch, at least one per worker",
    "num_samples": "size of the data set, at least one sample per worker",
    "batch_size": "samples of one step, over all workers; an epoch's last batch is short",
    "num_steps": "optimizer steps",
    "accumulation": "micro-batches of a shard",
    "optimizer": "the update rule; `momentum` is `sgd` with 0.9",
    "learning_rate": "the highest rate",
    "weight_decay": "decay per step; decoupled from the gradient in `adamw`",
    "clip_norm": "largest L2 norm of the averaged gradient; null: no clipping",
    "schedule": "the rate after the warm-up: constant, or falling to 0 at `num_steps`",
    "warmup_steps": "steps in which the rate rises to `learning_rate`",
    "dropout": "probability, below 1",
    "width": "hidden width of `mlp`; elements of `vectors`",
    "backends": "the backends, assigned to the workers in turn",
    "faults": "planned faults, see below",
    "stops": "steps before which the run is saved, discarded and resumed",
    "repeat": "distinguishes two runs of one scenario; has no effect on a run",
    "detail": "what is recorded of tensors: digests only, or values too",
    "mutant": "a planted bug or a benign variant ([kill matrix](kill-matrix.md))",
    "options": "options of the system, see below",
}
TYPES = {
    "float": "number >= 0",
    "float | None": "number > 0, or null",
    "str": "text",
    "str | None": "text, or null",
    "tuple[str, ...]": "list of texts",
    "tuple[int, ...]": "list of whole numbers",
    "tuple[Fault, ...]": "list of mappings",
    "Mapping[str, Any]": "mapping",
}
# Fields that mean something else in a configuration of `entrenar`.
# Table of docs/entrenar.md -> the section of a configuration.
SECTIONS: Mapping[str, type[Any]] = {
    "training": own_models.OwnRun,
    "service": Serving,
    "checkpoint": Checkpoint,
    "tls": Tls,
    "timing": Timeouts,
}
# Type of a message's field -> its JSON.
WIRE_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "int | None": "integer or null",
    "str": "text",
    "str | None": "text or null",
    "float": "real",
    "tuple[int, ...]": "list of integers",
    "tuple[str, ...]": "list of texts",
    "Nonce": "32 hex digits",
    "Proof": "64 hex digits",
    "Digest": "64 hex digits",
    "Digest | None": "64 hex digits or null",
}
# Messages that a worker sends to other workers.
AMONG_WORKERS = (Accept, *MeshWorker.parts, *RingWorker.parts, *PipelineWorker.parts)
PAYLOADS = {
    "": "",
    "state": "weights, optimizer state, position",
    "events": "trace events, JSON lines",
    "plan": "one JSON object",
    "block": "float32, one per parameter of the block",
    "file": "the bytes of the piece",
    "hidden states": "one number per row, token and feature",
}


def pages(rows: Sequence[Row]) -> dict[str, str]:
    """Return file name -> text of every page that is generated or has generated tables."""
    return {
        "anatomy.md": anatomy(ANATOMY.read_text(encoding="utf-8")),
        "auto.md": auto(AUTO.read_text(encoding="utf-8")),
        "cli.md": cli_reference.reference(),
        "configuration.md": configuration(CONFIGURATION.read_text(encoding="utf-8")),
        "contract-rules.md": contract_rules(CONTRACT_RULES.read_text(encoding="utf-8")),
        "contract-format.md": contract_format(FORMAT.read_text(encoding="utf-8")),
        "entrenar.md": service(SERVICE.read_text(encoding="utf-8")),
        "coming-from.md": coming_from(COMING_FROM.read_text(encoding="utf-8")),
        finetune_schema.NAME: finetune_schema.text(),
        "kill-matrix.md": kill_matrix_page.page(rows, scripts(), checks()),
        "original-workers.md": original_workers(ORIGINAL.read_text(encoding="utf-8")),
        "protocol.md": protocol(PROTOCOL.read_text(encoding="utf-8")),
        "your-trainer.md": your_trainer(YOUR_TRAINER.read_text(encoding="utf-8")),
    }


def scripts() -> list[tuple[str, ...]]:
    """A row per broken twin of an example script; none of them is run."""
    found: list[tuple[str, ...]] = []
    for one in every(("trainers", "knobs", "integrations")):
        place = Counterexample(message="", step=one.step, rank=one.rank, tensor=one.tensor).place()
        where = ", ".join(filter(None, (place, f"“{one.words}”" if one.words else "")))
        script = f"[`{one.script}`](../examples/user_trainers/{one.script})"
        found.append((one.name, script, one.source, CHECKS[one.check].id, where or "any place"))
    return found


def coming_from(page: str) -> str:
    """Return `page` with the current table of other tools' keys."""
    head = (*foreign_keys.TOOLS, "here", "")
    return _filled(page, {"keys": _table(head, list(foreign_keys.table()))})


def contract_rules(page: str) -> str:
    """Return `page` with the current table of rules."""
    head = ("rule", "level", "demands")
    rows = [
        (
            f"[{rule.id}]({rule.published})" if rule.published else rule.id,
            str(rule.level),
            rule.demands,
        )
        for rule in RULES
    ]
    return _filled(page, {"rules": _table(head, rows)})


def contract_format(page: str) -> str:
    """Return `page` with the current tables of scenarios, systems and faults."""
    tables = {
        "scenario": fields(),
        "systems": systems(),
        "faults": faults(),
        "lies": lies(),
        "strangers": strangers(),
    }
    return _filled(page, tables)


def protocol(page: str) -> str:
    """Return `page` with the current frames, messages, bounds and legal moves."""
    tables = {
        "frame": layout(),
        "messages": message_table(),
        "peer": _legal(messages.PEER_MAY_SAY),
        "worker": _legal(messages.WORKER_MAY_HEAR),
        "mesh-peer": _legal(messages.MESH_PEER_MAY_SAY),
        "mesh-worker": _legal(messages.MESH_WORKER_MAY_HEAR),
        "pipeline-peer": _legal(messages.PIPELINE_PEER_MAY_SAY),
        "pipeline-worker": _legal(messages.PIPELINE_WORKER_MAY_HEAR),
        "applicant": _legal(messages.APPLICANT_MAY_HEAR),
        "applicant-moves": diagram(messages.APPLICANT_MOVES, messages.ApplicantPhase.CONNECTED),
        "run-moves": diagram(messages.RUN_MOVES, messages.Stage.GATHERING),
        "peer-moves": diagram(messages.PEER_MOVES, messages.PeerPhase.CHALLENGED),
        "fetching-moves": diagram(messages.FETCHING_PEER_MOVES, messages.PeerPhase.CHALLENGED),
        "worker-moves": diagram(messages.WORKER_MOVES, messages.WorkerPhase.CONNECTED),
        "bounds": bounds(),
    }
    return _filled(page, tables)


def original_workers(page: str) -> str:
    """Return `page` with the current messages, keys and bounds of the original system's wire."""
    wire = original_wire
    tables = {
        "messages": _table(wire.MESSAGE_HEAD, wire.messages()),
        "legal": _table(wire.LEGAL_HEAD, wire.legal()),
        "keys": _table(wire.KEY_HEAD, wire.keys()),
        "timing": _table(wire.KEY_HEAD, wire.timing()),
        "bounds": _table(wire.BOUND_HEAD, wire.bounds()),
    }
    return _filled(page, tables)


def service(page: str) -> str:
    """Return `page` with the current keys of a configuration, and exit codes."""
    head = ("key", "holds", "default", "means")
    tables = {
        **{name: _table(head, _keys(kind)) for name, kind in SECTIONS.items()},
        "exits": _table(
            ("code", "means"), [(str(code), text) for code, text in exit_codes.MEANINGS.items()]
        ),
    }
    return _filled(page, tables)


def your_trainer(page: str) -> str:
    """Return `page` with the current tables of knobs, and of what comparisons presuppose."""
    made: dict[str, list[str]] = {}
    for comparison, presupposed in COMPARISONS.items():
        for one in presupposed:
            made.setdefault(one.says, []).append(comparison)
    rows = [(says, "; ".join(comparisons)) for says, comparisons in made.items()]
    knobs = [
        (f"`{{{name}}}`", knob.usual, knob.turned_to or ", ".join(knob.others), knob.expected)
        for name, knob in KNOBS.items()
    ]
    tables = {
        "presuppositions": _table(("presupposed", "by comparisons of"), rows),
        "knobs": _table(("placeholder", "usual", "turned to", "expected"), knobs),
    }
    return _filled(page, tables)


def auto(page: str) -> str:
    """Return `page` with the current numbers of scripts by class."""
    head = ("by", "class", "broken scripts", "right scripts")
    return _filled(page, {"classes": _table(head, [*classes.counts(twins.every())])})


def anatomy(page: str) -> str:
    """Return `page` with the current table of suspects."""
    rows = [(f"`{one.name}`", one.reason, one.decided) for one in suspects.PATTERNS]
    return _filled(page, {"suspects": _table(("suspect", "why", "decided by"), rows)})


def configuration(page: str) -> str:
    """Return `page` with the current keys of a project's configuration."""
    head = ("key", "holds", "default", "means")
    tables = {
        name: _table(
            head,
            [
                (f"`{key}`", project_keys.HOLDS[one.form], one.usual, one.means)
                for key, one in table.items()
            ],
        )
        for name, table in (
            ("keys", project_keys.KEYS),
            ("exclusion", project_keys.EXCLUSION),
        )
    }
    return _filled(page, tables)


def _keys(section: type[Any]) -> list[tuple[str, ...]]:
    """A row for each key of a section of a configuration."""
    rows: list[tuple[str, ...]] = []
    for field in settings_file.fields_of(section):
        holds = "mapping" if field.is_section else settings_file.holds(field)
        default = "see below" if field.is_section else f"`{field.default}`"
        if field.is_required or field.default is None:
            default = "required" if field.is_required else "none"
        rows.append((f"`{field.name}`", holds, default, field.key.meaning))
    return rows


def _filled(page: str, tables: Mapping[str, str]) -> str:
    """Return `page` with `tables` between `<!-- generated: NAME -->` and `<!-- end -->`."""
    for name, table in tables.items():
        before, start, rest = page.partition(f"<!-- generated: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        assert start, f"the page has a place for the table of {name}"
        assert end, f"the table of {name} has an end"
        page = f"{before}{start}{table}{end}{after}"
    return page


def checks() -> list[tuple[str, ...]]:
    """Return a row per check: name, id, claim, tolerance kinds, own scenarios."""
    clauses = kill_matrix.invariants()
    return [
        (
            *(f"`{check.name}`", check.id, check.decides),
            ", ".join(f"`{kind}`" for kind in check.tolerance_kinds),
            _planned(check, clauses[check.id]),
        )
        for check in CHECKS.values()
    ]


def _planned(check: Check, clause: Invariant) -> str:
    """Return the number of scenarios, their systems, and the plan's first paragraph."""
    planned = check.plan(clause)
    on = " and ".join(dict.fromkeys(f"`{one.system}`" for one in planned))
    said = " ".join((check.plan.__doc__ or "").split("\n\n")[0].split()).rstrip(".")
    return f"{len(planned)} on {on}: {said.removeprefix('Plan ')}"


def fields() -> str:
    """Return a row per field of a scenario, with its default in a contract."""
    rows = [
        (f"`{name}`", _holds(field), _default(field), MEANINGS[name])
        for name in next(scenario.expand({})).to_dict()
        if (field := Scenario.__dataclass_fields__[name])
    ]
    return _table(("field", "holds", "default", "means"), rows)


def _holds(field: dataclasses.Field[Any]) -> str:
    if field.name == "system":
        return "a system's name"
    if field.name in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[field.name])
    if field.type != "int":
        return TYPES[str(field.type)]
    try:
        next(scenario.expand({field.name: 0}))
    except UsageError:
        return "whole number >= 1"
    return "whole number >= 0"


def _default(field: dataclasses.Field[Any]) -> str:
    value = getattr(next(scenario.expand({})), field.name)
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`" if value else "none"
    return f"`{value}`" if field.type != "Mapping[str, Any]" else "none"


def systems() -> str:
    """Return a row per system: its faults and options."""
    rows = [
        (f"`{name}`", system.what, _code(system.faults), _code(system.options))
        for name, system in SYSTEMS.items()
    ]
    return _table(("system", "runs", "faults", "options"), rows)


def faults() -> str:
    """Return a row per kind of fault: its effect and its fields."""
    rows = [
        (f"`{kind}`", what, _code(NEEDED[kind]), _code(OPTIONAL.get(kind, ())))
        for kind, what in KINDS.items()
    ]
    return _table(("fault", "effect", "needs", "takes"), rows)


def lies() -> str:
    """Return a row per lie: its words, and the messages that can carry it."""
    rows = [(f"`{name}`", what, _code(LIE_PLACES[name])) for name, what in LIES.items()]
    return _table(("`value` of a lie", "words", "at"), rows)


def strangers() -> str:
    """Return a row per stranger."""
    rows = [(f"`{name}`", what) for name, what in STRANGERS.items()]
    return _table(("`value` of a stranger", "meaning"), rows)


def layout() -> str:
    """A frame's prefix, as the module that writes it has it."""
    lines = (frames.__doc__ or "").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("    bytes"))
    end = lines.index("", start)
    return f"```\n{textwrap.dedent(chr(10).join(lines[start:end]))}\n```\n"


def message_table() -> str:
    """Return a row per message: its sender, fields, payload and meaning."""
    rows = [
        (
            *(str(tag), f"`{kind.__name__}`", _sender(kind)),
            "<br>".join(
                f"`{field.name}` {WIRE_TYPES[str(field.type)]}"
                for field in dataclasses.fields(kind)
            ),
            PAYLOADS[kind.carries],
            " ".join((kind.__doc__ or "").split()).partition(": ")[2],
        )
        for tag, kind in MESSAGES.items()
    ]
    return _table(("tag", "message", "sent by", "fields", "payload", "meaning"), rows)


def _sender(kind: type[Message]) -> str:
    """Return the sender of a message: worker, coordinator, or either."""
    by_worker = {*messages.ALWAYS, *AMONG_WORKERS}
    for peers in (
        messages.PEER_MAY_SAY,
        messages.MESH_PEER_MAY_SAY,
        messages.PIPELINE_PEER_MAY_SAY,
    ):
        by_worker |= {one for row in peers.values() for one in row}
    by_coordinator = {one for row in messages.APPLICANT_MAY_HEAR.values() for one in row}
    for workers in (messages.WORKER_MAY_HEAR, messages.MESH_WORKER_MAY_HEAR):
        by_coordinator |= {one for row in workers.values() for one in row}
    if kind in by_worker & by_coordinator:
        return "either"
    return "worker" if kind in by_worker else "coordinator"


def _legal(table: Mapping[Any, Sequence[type[Message]]]) -> str:
    """A row per place: what may be heard there."""
    rows = [(f"`{place}`", _code(kind.__name__ for kind in row)) for place, row in table.items()]
    return _table(("place", "legal"), rows)


def diagram(moves: Iterable[tuple[StrEnum, str | type[Message], StrEnum]], start: StrEnum) -> str:
    """A state diagram: an arrow per way from one place to another, with all that leads there."""
    ways: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for before, cause, after in moves:
        named = cause if isinstance(cause, str) else cause.__name__
        ways.setdefault((before, after), []).append(named)
    arrows = [
        f"    {before} --> {after}: {' or '.join(causes)}"
        for (before, after), causes in ways.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {start}", *arrows, "```", ""])


def bounds() -> str:
    """A row per bound: how long, how large, how many."""
    timing = Timing()
    rows = [
        (
            "header of a message without a key",
            f"{frames.UNKEYED_HEADER_BYTES_MAX} bytes",
        ),
        ("header of any other", f"{frames.HEADER_BYTES_MAX} bytes"),
        ("text in a header", f"{messages.TEXT_CHARS_MAX} characters"),
        ("list in a header", f"{messages.LIST_MAX} numbers"),
        ("payload in one frame", f"{frames.CHUNK_BYTES} bytes"),
        ("payload of a message", "what its receiver allows, by the manifest"),
        ("piece of a file", f"{terms.PIECE_BYTES} bytes"),
        ("pieces that a worker wants before the first has come", f"{terms.WANTED_MAX}"),
        (
            "connections that fetch files, in addition to one for each rank",
            f"{attendance.FETCHING_MAX}",
        ),
        ("time from a connection to its `Hello`", f"{timing.hello_s:g} s"),
        ("connections that are joining or leaving", f"{door.STRANGERS_MAX}"),
        ("between heartbeats", f"{timing.heartbeat_s:g} s"),
        ("silence after which a peer counts as dead", f"{timing.dead_after_s:g} s"),
        (
            "waiting for workers before a step; for one of them to load the state",
            f"{timing.gather_s:g} s",
        ),
    ]
    return _table(("bound", "at most, unless set otherwise"), rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


def write_names() -> None:
    """Write the names of the planted bugs as `mutants.names` reads them."""
    names = [name for name, variant in mutants.catalogue().items() if not variant.benign]
    (DOCS.parent / "falsification/names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def main() -> None:
    """Run the whole kill matrix and write every page."""
    rows = kill_matrix.run(list(mutants.catalogue().values()), kill_matrix.invariants())
    for name, text in pages(rows).items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_names()
    main()
