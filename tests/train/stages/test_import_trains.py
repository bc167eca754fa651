"""A hand-written configuration of the earlier framework is converted, and trains as it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs
from tests.train.service.cluster import Cluster, Process
from tests.train.wire_io.fakes import free_port


@pytest.mark.by_hand
def test_what_is_imported_trains(
    machines: Cluster,
    llama: Path,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The commands in the file's comments are given, and the adapters are those of one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    host, _, port = machines.address.rpartition(":")
    old = {
        "version": 1,
        "coordinator": {"host": host, "port": int(port)},
        "workers": [
            {"id": 3, "hostname": "left", "port": free_port(), "device": "cpu"},
            {"id": 5, "hostname": "right", "device": "cpu"},
        ],
        "shard_plan": [
            {"id": 5, "start": 0, "end": 1, "is_last": False},
            {"id": "local", "start": 1, "end": 2, "is_last": False},
            {"id": 3, "start": 2, "end": 4, "is_last": True},
        ],
    }
    (tmp_path / "hetero_config.json").write_text(json.dumps(old), encoding="utf-8")
    lines = (small / "train.jsonl").read_text(encoding="utf-8").splitlines()[:24]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["pipeline", "import", "hetero_config.json", "--model", str(llama)]
    assert cli.main([*command, "--task", "text", "--data", "rows.jsonl"]) == exit_codes.DONE
    text = capsys.readouterr().out.replace("rows.jsonl}", "rows.jsonl, max_tokens: 64}")
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")

    given = re.findall(r"^#   entrenar (worker .*\S)   \(on .*\)$", text, re.MULTILINE)
    assert [one.partition(" --id ")[2].split()[0] for one in given] == [
        "worker-5",
        "local",
        "worker-3",
    ]
    started = [machines.coordinator(cache=tmp_path / "own")]
    for number, one in enumerate(given):
        told = shlex.split(one.replace("--secret-file secret", f"--secret-file {machines.secret}"))
        process = Process(told, cache=tmp_path / f"cache{number}")
        machines.processes.append(process)
        started.append(process)
    codes = [one.code() for one in started]
    assert codes == [exit_codes.DONE] * 4, "\n".join(one.text for one in started)

    alone = re.sub(r"^(strategy|stages|coordinator|  .*|- .*)(:.*)?\n", "", text, flags=re.M)
    alone = alone.replace("output: out", "output: alone")
    (tmp_path / "alone.yaml").write_text(alone, encoding="utf-8")
    assert cli.main(["finetune", "alone.yaml"]) == exit_codes.DONE
    assert runs.adapters(tmp_path / "out") == runs.adapters(tmp_path / "alone")
