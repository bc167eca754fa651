"""Whatever is wrong with what `entrenar distill text` is given is told once, before it asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from tests.train.distill import server as servers
from tests.train.distill.configured import chats, config

URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "has neither an endpoint nor a teacher"),
        (
            {"endpoint": URL, "distill": {"teacher": "t"}},
            "with distill.teacher=",
        ),
        ({"endpoint": URL, "served_model": None}, "distill.text.served_model is missing"),
        ({"endpoint": "host:8000"}, "endpoint='host:8000': it has no http:// or https://"),
        ({"endpoint": "http://"}, "or no host; use a base URL such as http://host:8000/v1"),
        ({"endpoint": "http://h:x/v1"}, "Port could not be cast to integer value"),
        ({"endpoint": "http://[::1/v1"}, "Invalid IPv6 URL"),
        ({"endpoint": "http://a b/v1"}, "characters that no URL has"),
        ({"endpoint": f"http://{'a' * 70}/v1"}, "use a base URL"),
        ({"endpoint": f"{URL}/chat/completions"}, "it is longer than a base URL"),
        ({"endpoint": f"{URL}?key=1"}, "it is longer than a base URL"),
        ({"endpoint": f"http://me:{servers.KEY}@host/v1"}, "a user or a password in its URL"),
        ({"endpoint": URL, "key_variable": "NOT_SET"}, "the environment has no such variable"),
        ({"endpoint": URL, "key_variable": "ODD"}, "its value has characters that no key has"),
        ({"endpoint": URL, "rows": "answers.txt"}, "use a name that ends with .jsonl"),
        ({"endpoint": URL, "rows": "run.yaml/a.jsonl"}, "a.jsonl: can't be written"),
        (
            {"endpoint": URL, "rows": "prompts.jsonl"},
            "would read this file, too; give it another name",
        ),
        ({"endpoint": URL, "data": {"train": "*.jsonl"}}, "would read this file, too"),
        ({"endpoint": URL, "data": {"validation": "answers.jsonl"}}, "data.validation="),
        (
            {"endpoint": URL, "rows": "d/a.jsonl", "data": {"train": "d*/*.jsonl"}},
            "would read this file, too",
        ),
        ({"endpoint": URL, "rows": "run.jsonl"}, "so this command did not write it"),
        ({"endpoint": URL, "temperature": 1e-40}, "use 0, which takes the most likely token, or"),
        ({"endpoint": URL, "timeout_s": 1e10}, "use a number > 0 and <= 86400"),
        ({"endpoint": URL, "data": {"train": "none.jsonl"}}, "can't be read"),
        ({"endpoint": URL, "prompts": "none.jsonl"}, "can't be read"),
        ({"distill": {"teacher": "none"}}, "no such folder"),
    ],
    ids=str,
)
def test_refused(
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One message says what was given, what is allowed, and what to do."""
    monkeypatch.setenv("ODD", f"{servers.KEY} \u20ac")
    path = config(tmp_path, chats(["a"]), **changes)
    (tmp_path / "run.jsonl").write_text("{}\n", encoding="utf-8")
    assert cli.main(["distill", "text", str(path)]) == exit_codes.INVALID
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert servers.KEY not in shown.err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no row that can be used; give one that has rows"),
        ([{"messages": []}], "1 of 1 row can't be used"),
        ([{"messages": [{"role": "system", "content": "x"}]}], "no turn of the user"),
        ([{"messages": [{"role": "user", "content": " "}]}], "is empty"),
        ([{"other": "x"}], "has no field 'messages'"),
        ([{"messages": [{"role": "user", "content": "x " * 2**16}]}], "has 131087 characters, too"),
    ],
)
def test_unusable_prompts(
    rows: list[Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that ask nothing are listed with their places."""
    path = config(tmp_path, rows, endpoint=URL)
    assert cli.main(["distill", "text", str(path)]) == exit_codes.INVALID
    assert message in capsys.readouterr().err
    path = config(tmp_path, rows, endpoint=URL, data={"on_error": "skip"})
    assert cli.main(["distill", "text", str(path)]) == exit_codes.INVALID
    assert "has no row that can be used" in capsys.readouterr().err


def test_a_backend_with_an_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend computes nothing where a server answers."""
    path = config(tmp_path, chats(["a"]), distill={"teacher": "t"})
    command = ["distill", "text", str(path), "--endpoint", URL, "--backend", "cpu"]
    assert cli.main(command) == exit_codes.INVALID
    assert "nothing is computed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "distill is missing"),
        ({"logits": "shards"}, "distill.text is missing: the section names the prompts"),
        ({"alpha": 1.0}, "distill has neither logits nor text"),
    ],
)
def test_without_the_section(
    section: dict[str, Any] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration without `distill.text` is refused."""
    path = config(tmp_path, chats(["a"]))
    record = {**json.loads(path.read_text(encoding="utf-8")), "distill": section}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert cli.main(["distill", "text", str(path)]) == exit_codes.INVALID
    assert message in capsys.readouterr().err


def test_shards_are_for_other_commands(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration for answers alone has no logits to make, or to train on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = config(tmp_path, chats(["a"]), endpoint=URL, model=str(small / "model"))
    for command in (["distill", "logits"], ["finetune"]):
        assert cli.main([*command, str(path)]) == exit_codes.INVALID
        assert "distill.logits is missing" in capsys.readouterr().err
