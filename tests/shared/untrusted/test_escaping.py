"""Text of others is shown, and does nothing: one hostile text through every door and format."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import unicodedata
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from entrenar_py import entrenar as service
from entrenar_py.check import cli
from entrenar_py.check import doctor as doctor_visit
from entrenar_py.check.doctor import Examination
from entrenar_py.check.pytest_clauses import Judged
from entrenar_py.check.reports import github, html, json_format, junit, sarif, terminal
from entrenar_py.check.reports.report import Report, ending
from entrenar_py.compute.machine import Found
from entrenar_py.shared import trace
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.page import arguments, console
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.train.service import progress
from entrenar_py.train.service.metrics import Metrics
from entrenar_py.train.service.run_events import Noted
from entrenar_py.train.wire.frames import FROM_COORDINATOR, Encoder
from entrenar_py.train.wire.messages import VERSION, Challenge
from tests import traces
from tests.check.reports.conftest import full_report
from tests.fuzz.bad_contents import TRAINING
from tests.test_architecture import SOURCE, modules

# A title, a cleared screen, a forged line for a log and one for a runner, text turned around, what
# no one sees, half a character, and the syntax of every format.
HOSTILE = (
    "::error::a\x1b]0;b\x07\x1b[2Jc\r\nworker: completed\n::add-mask::d\x85e\u2028f\u202eg\u2066h"
    "\u200bi\ufeffj\x9bk\udc80l\U000e0041m\x00n\uffff##[group]<script>]]>&`|%0A*[x](y)\\o"
)
# What may be in nothing that a person reads; a tab and a line end may, where they are ours.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
ANSI = re.compile("\x1b\\[[0-9;]*m|\x1b\\[\\?25[lh]|\x1b\\[[0-9]*[AK]|\r")  # what rich does itself
# Shown, though Unicode counts them among the characters for formatting.
SHOWN = re.compile("[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd]")
HIEROGLYPHS = range(0x13430, 0x13460)


def require_harmless(shown: str) -> None:
    """Nothing unseen is left, and no line was forged or is a runner's command."""
    assert not (found := UNSEEN.findall(shown)), found
    for line in shown.split("\n"):
        assert not line.lstrip().startswith(("::", "worker: completed")), line
        assert "##[" not in line


def hostile_report() -> Report:
    """A report in which everything that a contract, a run and a machine bring is hostile."""
    full = full_report()
    entries = [
        replace(
            one,
            invariant=replace(
                one.invariant,
                id=HOSTILE,
                name=HOSTILE,
                statement=HOSTILE,
                description=HOSTILE,
                group=HOSTILE,
                position=Position(HOSTILE.replace("\0", ""), 3, 1),
            ),
            finding=replace(
                one.finding,
                reason=HOSTILE,
                notes=(HOSTILE,),
                counterexample=one.finding.counterexample
                and replace(one.finding.counterexample, message=HOSTILE, tensor=HOSTILE),
            ),
            replay=one.replay and HOSTILE,
        )
        for one in full.entries
    ]
    gate = full.contract.gate and replace(full.contract.gate, id=HOSTILE, name=HOSTILE)
    contract = replace(full.contract, metadata={"version": HOSTILE, "name": HOSTILE}, gate=gate)
    return replace(
        full,
        contract=replace(contract, path=Path(HOSTILE)),
        contract_given=HOSTILE,
        system=HOSTILE,
        entries=tuple(entries),
        environment={HOSTILE: HOSTILE, "devices": [HOSTILE]},
        command=HOSTILE,
        not_applying=tuple(replace(one, reason=HOSTILE) for one in full.not_applying),
    )


# --- the one place ----------------------------------------------------------------------------


def test_every_unseen_character_is_spelled_out() -> None:
    """All that Unicode calls control, format, surrogate, separator of lines, or no character."""
    everything = [chr(code) for code in range(sys.maxunicode + 1)]
    for character in everything:
        kind = unicodedata.category(character)
        ends = ord(character) & 0xFFFF >= 0xFFFE or 0xFDD0 <= ord(character) <= 0xFDEF
        shown = SHOWN.match(character) or ord(character) in HIEROGLYPHS or character in "\t\n"
        if (kind in ("Cc", "Cf", "Cs", "Zl", "Zp") or ends) and not shown:
            assert escaping.text(character) != character, hex(ord(character))
        elif kind in ("Lu", "Ll", "Lo", "Nd", "Po", "Sm", "So") and len(character.strip()):
            assert escaping.text(character) in (character, rf"\u{ord(character):04x}")


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_fit_for_xml_and_json(text: str) -> None:
    """Escaped text can be written anywhere and stays as it is the second time; JSON keeps it."""
    shown = escaping.text(text)
    shown.encode("utf-8")
    assert not UNSEEN.search(shown)
    assert escaping.text(shown) == shown
    ElementTree.fromstring(f"<a>{escaping.html(text)}</a>")
    dumped = escaping.dump_json({text: text})
    assert not UNSEEN.search(dumped)
    kept = "".join(rf"\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)
    assert json.loads(dumped) == {kept: kept}


def test_it_is_still_told_what_was_there() -> None:
    """Spelled out, not dropped; other scripts and signs are left alone."""
    assert escaping.text("a\x1b[31m\udc80\0é") == r"a\x1b[31m\udc80\x00é"
    assert escaping.line("été 日本 ⚠️ α ≤ β") == "été 日本 ⚠️ α ≤ β"
    assert escaping.line(" ::error::x") == r"\x3a:error::x"
    assert escaping.line("std::vector") == "std::vector"
    assert escaping.exact("a  b\nc") == r"a  b\nc"


# --- formats ----------------------------------------------------------------------------------


def test_a_long_text_is_cut_in_its_middle() -> None:
    """Both ends stay, and how much is left out is said."""
    assert escaping.shortened("a" * 400) == "a" * 400
    cut = escaping.shortened("a" * 10_000 + "end")
    assert cut.startswith("aaa")
    assert cut.endswith("aend")
    assert "[... 9,649 characters left out ...]" in cut
    assert len(cut) <= 400


def test_reports() -> None:
    """Terminal, JUnit, HTML, SARIF, GitHub: harmless; JSON and SARIF hold what was there."""
    report = hostile_report()
    for force in (False, True):
        file = io.StringIO()
        console = Console(file=file, force_terminal=force, width=99)
        closing = ending([report], allow_inconclusive=False)
        style = terminal.Style(verbose=True)
        terminal.render([report], console, style=style, ending=closing)
        assert not UNSEEN.search(ANSI.sub("", file.getvalue()))
        if not force:  # a terminal folds lines, and is no runner
            require_harmless(file.getvalue())
    document = junit.render(report, allow_inconclusive=False)
    require_harmless(document)
    ElementTree.fromstring(document)
    page = html.render(report)
    require_harmless(page)
    assert "<script" not in page
    summary = github.summary(report, allow_inconclusive=False)
    require_harmless(summary)
    for line in github.annotate(report, root=Path.cwd(), allow_inconclusive=False):
        assert len(line.splitlines()) == 1
        assert not UNSEEN.search(line)
        assert "::" not in line.split("::", 2)[1]  # its properties, behind the name of the command


def test_json_and_sarif(tmp_path: Path) -> None:
    """Valid, free of hidden characters, and the texts in JSON are what they were."""
    report = hostile_report()
    arguments.write_file(json_format.dump(report, allow_inconclusive=False), tmp_path / "r.json")
    log = sarif.dump(report, root=tmp_path, allow_inconclusive=False)
    arguments.write_file(log, tmp_path / "r.sarif")
    for name in ("r.json", "r.sarif"):
        assert not UNSEEN.search((tmp_path / name).read_text("utf-8"))
    told = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert told["results"][0]["reason"] == HOSTILE.replace("\udc80", r"\udc80")
    run = json.loads((tmp_path / "r.sarif").read_text("utf-8"))["runs"][0]
    for result in run["results"]:
        require_harmless(result["message"]["text"])


def test_pytest_says_so() -> None:
    """A test's failure message is harmless, too."""
    report = hostile_report()
    for entry in report.entries:
        judged = Judged(entry=entry, report=report)
        require_harmless(judged.text())
        require_harmless(judged.notes)


# --- doors ------------------------------------------------------------------------------------


def test_the_log_the_screen_and_the_metrics(tmp_path: Path) -> None:
    """A worker's reason is one line of each."""
    note = Noted(what="left", step=1, text=f"worker 1 left in step 1: {HOSTILE}")
    for force in (False, True):
        file = io.StringIO()
        shown = Console(file=file, force_terminal=force, width=400, markup=False)
        with progress.opened(shown, num_steps=3) as listener:
            listener(note)
        require_harmless(ANSI.sub("", file.getvalue()))
    with closing(Metrics(tmp_path / "m.jsonl")) as metrics:
        metrics(note)
    written = (tmp_path / "m.jsonl").read_text("utf-8")
    assert not UNSEEN.search(written)
    assert len(written.splitlines()) == 1
    assert json.loads(written)["text"] == note.text.replace("\udc80", r"\udc80")


def test_a_server_without_the_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it gives as its reason, the worker prints its own lines and no other."""
    (tmp_path / "secret").write_text("x" * 32)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def challenge() -> None:
            taken, _ = server.accept()
            server.close()
            with taken:
                said = Challenge(version=VERSION, nonce=HOSTILE)
                taken.sendall(b"".join(Encoder(direction=FROM_COORDINATOR).encode(said)))

        thread = threading.Thread(target=challenge)
        thread.start()
        at = f"127.0.0.1:{server.getsockname()[1]}"
        secret = str(tmp_path / "secret")
        given = ["--coordinator", at, "--secret-file", secret, "--patience-s", "0.1"]
        assert service.main(["worker", *given]) != 0
        thread.join()
    printed = capsys.readouterr()
    require_harmless(printed.out + printed.err)
    assert all(line.startswith("worker: ") for line in printed.out.splitlines())


def test_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its reason, its devices, its path: a line each, and no more."""
    from entrenar_py.shared.scenario import Scenario

    of = Scenario(system="parameter_server", **TRAINING)
    end = trace.End(status="halted", reason=HOSTILE)
    start = traces.update(0, weights={HOSTILE: trace.TensorRecord("0" * 32)})
    path = tmp_path / HOSTILE.replace("\0", "").replace("/", "")
    trace.save(
        trace.Trace(scenario=of, environment={HOSTILE: HOSTILE}, promises=(), events=(start, end)),
        path,
    )
    assert service.main(["ledger", "verify", str(path)]) == 0
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"loss"', b'"lost"'))
    assert service.main(["ledger", "verify", str(path)]) == 1
    printed = capsys.readouterr()
    require_harmless(printed.out + printed.err)
    own = (escaping.line(path), "broken: ")
    assert all(line.startswith(own) for line in printed.out.splitlines()), printed.out


@pytest.mark.parametrize("main", [cli.main, service.main])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--contract", "{path}"),
        ("--contract", "distributed-training-v1.yaml", "--replay", "{path}"),
        ("--contract", "distributed-training-v1.yaml", "--judge", "{path}"),
        ("coordinator", "{path}"),
        ("ledger", "verify", "{path}"),
        ("{path}",),
        ("worker", "--coordinator", "{path}", "--secret-file", "x"),
    ],
)
def test_errors(
    main: object, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message quotes a path, an argument: one line on standard error."""
    path = str(tmp_path / "x" / HOSTILE.replace("\0", ""))
    assert callable(main)
    assert main([one.format(path=path) for one in arguments]) == 2
    printed = capsys.readouterr()
    require_harmless(printed.err)
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_yaml_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A contract's own keys and texts, in its problems and warnings."""
    quoted = json.dumps(HOSTILE.replace("\udc80", "").replace("\U000e0041", ""))
    path = tmp_path / "contract.yaml"
    path.write_text(f"metadata: {{version: 1, {quoted}: {quoted}}}\n{quoted}: 1\n{quoted}: 2\n")
    assert cli.main(["--contract", str(path), "--validate"]) == 2
    printed = capsys.readouterr()
    require_harmless(printed.err)
    assert all(line.startswith(f"{path}:") for line in printed.err.splitlines())


def test_the_doctor() -> None:
    """An adapter names itself."""
    found = Found(
        name="wgpu", serves=True, device=HOSTILE, software=False, reason=HOSTILE, facts={}
    )
    examined = Examination(versions={"x": HOSTILE}, backends=[found], trainers=[], clauses=[])
    file = io.StringIO()
    shown = console.standard_output(color=False)
    shown.file = file
    doctor_visit.show(examined, clauses=True, console=shown)
    require_harmless(file.getvalue())
    assert not UNSEEN.search(escaping.dump_json(examined.to_dict(), indent=2))


# --- no way around it -------------------------------------------------------------------------

# Who prints: lines, and what rich lays out. What memory prints is JSON for the process that asked,
# and what a child that tries an adapter prints is read by its parent, who escapes it. The start-up
# module imports nothing of ours, and its sentences are its own. A forked rank prints
# the text that its script exits with, as Python does; it goes to the run's output.
PRINTERS = {
    *("shared.untrusted.printing", "shared.page.console", "systems.probes.memory"),
    "compute.adapters",
    "check.command.forks.interpreter",
    "check.observing.auto.startup.sitecustomize",
}
# TOML has escapes of its own. What is read back as YAML can have no pairs of surrogates. Rows and
# replies are written to find out that they can be, and then forgotten. What chats say is for a
# tokenizer; what a checkpoint says goes on to `escaping`.
WRITERS = {
    *("train.model.chat_template", "train.model.model_folder"),
    *(
        "shared.untrusted.escaping",
        "check.project.init",
        "train.model.rows",
        "train.distill.endpoint",
    ),
    *("train.finetune.settings_file", "train.plan.stage_text"),  # as YAML
}
FORBIDDEN = ("print", "Console", "rich.print", "traceback.print_exc", "warnings.warn")


def test_nothing_is_printed_past_it() -> None:
    """No `print`, no traceback, no console or stream of a module's own; JSON has one writer."""
    for module, path in modules().items():
        if module in PRINTERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            where = f"{module}:{node.lineno}: {called}"
            assert called not in FORBIDDEN, where
            assert not called.endswith(("stdout.write", "stderr.write")), where
            kept = ("ensure_ascii", "False") in {
                (one.arg, ast.unparse(one.value)) for one in node.keywords
            }
            assert module in WRITERS or not kept, where


def test_html_escapes_in_one_place() -> None:
    """Markup without `visible` would let hidden characters through."""
    for path in (SOURCE / "reports").glob("*.py"):
        assert "from html import" not in path.read_text("utf-8"), path


# --- where nothing can be written -------------------------------------------------------------


class Full(io.StringIO):
    """A stream on a full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By lines and by consoles alike; whoever prints goes on."""
    monkeypatch.setattr(sys, "stdout", Full())
    printing.say("a")
    printing.say("b")
    console.standard_output(color=False).print("c")
    assert printing.lost()
    told = capsys.readouterr().err
    assert (
        told
        == "standard output can't be written (No space left on device): the rest of the output "
        "is lost\n"
    )


@pytest.mark.parametrize("main", ["entrenar_py.check.cli", "entrenar_py.entrenar"])
def test_help_on_a_full_disk(main: str) -> None:
    """One message, exit code 3, and no traceback of the interpreter's."""
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", main, "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=usual,
        )
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
