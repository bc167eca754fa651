"""The clauses that can be exercised, on machines with and without devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.check import doctor
from entrenar_py.check.doctor import SCHEMA, Examination, Reach, Trainer
from entrenar_py.compute import machine
from entrenar_py.compute.machine import Found

CPU = Found(name="cpu", serves=True, device="x86_64")
NO_CUDA = Found(name="cuda", serves=False, reason="no driver")
NO_WGPU = Found(name="wgpu", serves=False, reason="no adapter")
LLVMPIPE = Found(name="wgpu:0", serves=True, device="llvmpipe", software=True)
GPUS = [Found(name=f"cuda:{index}", serves=True, device="H100") for index in range(2)]


def clauses(found: Sequence[Found]) -> dict[str, Reach]:
    return {one.id: one for one in doctor.reaches(found)}


def test_without_devices() -> None:
    """Without devices, clauses that need an adapter have a reason; training on the CPU works."""
    known = clauses([CPU, NO_CUDA, NO_WGPU])
    product, manifest, chain = (known[one] for one in ("F-WGPU-001", "F-HET-001", "F-DP-004"))
    assert (product.state, product.can, product.lacking) == ("no", 0, ("wgpu (no adapter)",))
    assert (manifest.state, manifest.lacking) == ("no", ("wgpu (no adapter)", "cuda (no driver)"))
    assert chain.state == "partly"
    assert chain.can == chain.planned
    assert "cuda (no driver): a simulated one fails instead" in chain.lacking
    assert (known["F-DP-001"].state, known["F-DP-001"].lacking) == ("yes", ())


def test_with_an_adapter() -> None:
    """Two backends are enough to compare gradients; the third is listed as missing."""
    known = clauses([CPU, NO_CUDA, LLVMPIPE])
    assert known["F-WGPU-001"].state == "yes"
    assert (known["F-HET-001"].state, known["F-HET-001"].lacking) == (
        "partly",
        ("cuda (no driver)",),
    )


def test_with_everything() -> None:
    """With all devices nothing is lacking, and every clause of every contract is listed."""
    known = clauses([CPU, *GPUS, LLVMPIPE])
    assert {one.state for one in known.values()} == {"yes"}
    assert {"F-LS-001", "F-PAR-001", "F-RED-001", "F-TI-001", "F-WP-001"} <= set(known)


@pytest.mark.parametrize(
    ("found", "reference", "ddp"),
    [
        ([CPU, NO_CUDA, NO_WGPU], ("cpu",), ("cpu",)),
        ([CPU, *GPUS, LLVMPIPE], ("cpu", "cuda:0", "cuda:1", "wgpu:0"), ("cpu", "cuda")),
    ],
)
def test_trainers(found: list[Found], reference: tuple[str, ...], ddp: tuple[str, ...]) -> None:
    """Our trainers take each device by name; torch's own need a GPU for each rank."""
    known = {one.system: one for one in doctor.trainers(found)}
    assert known["reference"].backends == reference
    assert known["ddp"].backends == ddp
    assert bool(known["ddp"].limits) == ("cuda" in ddp)
    assert "matmul" not in known


EXAMINED = Examination(
    versions={"torch": "2.0"},
    backends=[
        Found(name="cpu", serves=True, device="x86_64"),
        Found(name="wgpu", serves=False, reason="no adapter"),
    ],
    trainers=[Trainer(system="reference", backends=("cpu",))],
    clauses=[
        Reach(contract="a-v1.yaml", id="F-A-001", name="one", planned=3, can=3),
        Reach(
            contract="a-v1.yaml", id="F-A-002", name="two", planned=2, can=0, lacking=("wgpu (no)",)
        ),
    ],
)


def test_what_is_printed_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables have backends with reasons and clauses with what they lack; so has the JSON."""
    monkeypatch.setattr(doctor, "examine", lambda **_: EXAMINED)
    path = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--clauses", "--json", str(path), "--no-color"]) == 0
    text = capsys.readouterr().out
    for expected in ("no adapter", "F-A-001 one", "3 of 3", "wgpu (no)", "1 exercised, 0 partly"):
        assert expected in text
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["schema"] == SCHEMA
    assert [clause["state"] for clause in record["clauses"]] == ["yes", "no"]
    assert record["backends"][1]["reason"] == "no adapter"


def test_without_being_asked_no_clause_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The short examination says how to list the clauses; trainers that are alike share a row."""
    monkeypatch.setattr(machine, "found", lambda: EXAMINED.backends)
    monkeypatch.setattr(machine, "versions", lambda: EXAMINED.versions)
    monkeypatch.setattr(doctor, "reaches", pytest.fail)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--no-color"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20
    assert lines[-1].startswith("entrenar doctor --clauses lists")
    assert any("reference, textbook" in line for line in lines)


def test_a_file_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that can't be written is refused before anything is examined."""
    monkeypatch.setattr(doctor, "examine", pytest.fail)
    assert cli.main(["doctor", "--json", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
