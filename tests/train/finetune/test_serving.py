"""A configuration with a section for other machines: told apart, read, and refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import ContractError
from entrenar_py.train.finetune import serving, settings_file
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs

STAGES = {
    "data": {"validation_share": 0.0},
    "strategy": "layer_pipeline",
    "coordinator": {"listen": "127.0.0.1:7411", "secret_file": "secret"},
    "stages": [{"layers": [0, 1], "backend": "cpu"}, {"layers": [1, 2], "backend": "cpu"}],
}
VALIDATED = {"validation": "rows.jsonl", "validation_share": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate_every": 10},
        {"evaluate_every": 10, "data": VALIDATED},
        {"data": {"on_error": "skip"}},
        {"recompute": "blocks"},
        {"precision": "bfloat16"},
        {"workers": 3},
        STAGES,
        {"method": "qlora"},
    ],
    ids=str,
)
def test_shared_settings_are_read_again(
    changes: dict[str, Any], small: Path, tmp_path: Path
) -> None:
    settings = settings_file.load(runs.configured(tmp_path, small, **changes))
    shared = serving.shared_settings(settings)
    found = settings_file.of_text(json.dumps(shared), "the settings")
    assert (found.method, found.precision) == (settings.method, settings.precision)
    assert found.recompute == settings.recompute
    assert not found.data.validates


HEAD = """\
model: checkpoint
task: text
output: out
data: {train: rows.jsonl}
"""
VALIDATED_HEAD = HEAD.replace("rows.jsonl", "rows.jsonl, validation_share: 0.5")
SECTION = """\
coordinator:
  secret_file: secret
"""


def written(folder: Path, text: str) -> Path:
    """Write a configuration and a secret; return the configuration's path."""
    (folder / "secret").write_text("open sesame, and do it soon")
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def problems(path: Path) -> list[str]:
    """Return what `entrenar coordinator` finds wrong, less the file's name, each in a line."""

    def run() -> None:
        assert serving.is_finetuning(path)
        serving.run(path, resume=False, halt_on_spike=False)

    with pytest.raises(ContractError) as raised:
        run()
    return [line.removeprefix(f"{path}:") for line in str(raised.value).splitlines()]


def test_the_two_kinds_are_told_apart(tmp_path: Path) -> None:
    """A file with a model fine-tunes, one with a workload doesn't."""
    assert serving.is_finetuning(written(tmp_path, HEAD + SECTION))
    assert not serving.is_finetuning(
        written(tmp_path, "workload: linear\nworld_size: 2\nseed: 0\n")
    )
    assert serving.is_finetuning(written(tmp_path, "seed: 0\n"))


def test_a_mixture_is_refused_by_line(tmp_path: Path) -> None:
    """Every key of the one kind is told, with the line of the other kind's."""
    path = written(tmp_path, "workload: linear\n" + HEAD + SECTION)
    found = problems(path)
    assert [line.split(":")[0] for line in found] == ["2", "3", "4", "5"]
    words = "model belongs to a configuration that fine-tunes a checkpoint, and workload (line 1)"
    assert found[0].startswith(f"2:1: error: {words}")


def test_a_key_of_the_section_that_stands_outside(tmp_path: Path) -> None:
    """A key of the other kind of file is sent to the section."""
    path = written(tmp_path, HEAD + "listen: 127.0.0.1:0\nsecret_file: secret\n")
    words = "stands in the section `coordinator:`; move it there"
    expected = [f"5:1: error: listen {words}", f"6:1: error: secret_file {words}"]
    assert problems(path) == expected


def test_without_the_section_nobody_can_connect(tmp_path: Path) -> None:
    """The message names the section, and the command that needs none."""
    (found,) = problems(written(tmp_path, HEAD))
    assert "coordinator is missing" in found
    assert "`entrenar finetune`" in found


def test_all_problems_of_the_section_are_told_by_line(tmp_path: Path) -> None:
    """Address, secret, certificates, timing and wait_for, each at its place."""
    path = written(
        tmp_path,
        HEAD
        + """\
coordinator:
  listen: nowhere
  secret_file: absent
  wait_for: 2
  tls: {cert: absent, key: absent}
  timing: {heartbeat_s: 50}
""",
    )
    found = problems(path)
    assert [line.split(":")[0] for line in found] == ["6", "7", "8", "9", "10"]
    for line, words in zip(
        found, ("nowhere", "absent", "workers is 1", "absent", "shorter heartbeat"), strict=True
    ):
        assert words in line


def test_limits_of_the_section(tmp_path: Path) -> None:
    """Its keys have limits like the others, and unknown ones are told."""
    section = SECTION + "  audit_share: 2\n  wait_for: 0\n  wait: 3\n"
    found = problems(written(tmp_path, HEAD + section))
    assert len(found) == 3
    assert any("wait_for" in line and "is not read" in line for line in found), found


@pytest.mark.parametrize(
    ("head", "section", "told"),
    [
        (
            VALIDATED_HEAD + "evaluate_every: 5\n",
            "",
            "5:17: error: evaluate_every with topology: mesh",
        ),
        (HEAD, "  audit_share: 0.5\n", "8:16: error: audit_share=0.5 with topology: mesh"),
        (
            HEAD + "strategy: layer_pipeline\n",
            "",
            "8:13: error: topology=mesh with strategy: layer_pipeline",
        ),
    ],
)
def test_what_a_mesh_excludes(head: str, section: str, told: str, tmp_path: Path) -> None:
    """Its coordinator has no gradient, and the weights only when it saves them."""
    found = problems(written(tmp_path, head + SECTION + "  topology: mesh\n" + section))
    assert found[0].startswith(told)


def test_the_section_is_nothing_to_the_other_command(tmp_path: Path) -> None:
    """`entrenar finetune` reads the same file."""
    settings = settings_file.load(written(tmp_path, HEAD + SECTION))
    assert settings.coordinator is not None
    assert settings.coordinator.listen == "127.0.0.1:7411"


def test_the_command_tells_problems_and_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback: lines that begin with file:line:column."""
    path = written(tmp_path, "workload: linear\n" + HEAD)
    assert cli.main(["coordinator", str(path)]) == exit_codes.INVALID
    assert f"{path}:2:1: error: model belongs to" in capsys.readouterr().err
