"""What `entrenar` does before it loads anything heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """\
import sys
from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes

for command in (
    ["finetune"], ["plan"], ["pipeline", "plan"],
    ["distill", "train"], ["distill", "logits"], ["distill", "text"],
):
    assert cli.main([*command, sys.argv[1]]) == exit_codes.INVALID, command
assert cli.main(["finetune", "init"]) == exit_codes.DONE
print(sorted({"torch", "transformers", "peft"}.intersection(sys.modules)))
"""


def test_a_slip_in_a_configuration_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """By every command that reads one: it takes a third of a second, not five."""
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntask: text\noutput: o\ndata: {train: t}\nsed: 1\n", encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", CODE, path], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("run.yaml:5:1: error: configuration: key 'sed' is not read") == 6
    assert ran.stdout.splitlines()[-1] == "[]"
