"""The list of a run's files: what it says comes back, and what an attacker writes is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.finetune import package
from entrenar_py.train.finetune.package import Contents, File

CONTENTS = Contents(
    settings={"task": "text"},
    class_weights=(0.1, 3.5),
    samples=File("x.samples", 5, "a" * 64),
    model=(File("config.json", 7, "b" * 64), File("model.safetensors", 9, "c" * 64)),
)


def named(*names: str, **settings: Any) -> bytes:
    """Return a list whose checkpoint has files of these names."""
    files = tuple(File(name, 7, f"{number:064x}") for number, name in enumerate(names))
    return package.dump(replace(CONTENTS, model=files, settings=settings))


def test_what_is_written_is_read() -> None:
    """All of it comes back, floats with every bit."""
    assert package.parse(package.dump(CONTENTS)) == CONTENTS


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "..",
        ".",
        "",
        "/etc/cron.d/evil.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:evil.safetensors",
        ".hidden.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "-rf.safetensors",
        "pytorch_model.bin",
        "model.pkl",
        "model.pt",
        "adapter_config.json",
        "modeling_evil.py",
        "sitecustomize.py",
        "config.json ",
        "é.safetensors",
        "a" * 300 + ".safetensors",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    """No path, no pickle, no code, no hidden file, no odd character: nothing is fetched then."""
    with pytest.raises(UsageError, match="nothing was fetched"):
        package.parse(named("config.json", name))


def test_code_is_named_only_with_the_setting() -> None:
    """Python files may be listed where the run's settings say that the checkpoint has code."""
    assert package.parse(named("modeling_own.py", trust_remote_code=True)).model[0].num_bytes == 7
    for said in (1, "true", None, "yes"):
        with pytest.raises(UsageError, match="nothing was fetched"):
            package.parse(named("modeling_own.py", trust_remote_code=said))
    with pytest.raises(UsageError, match="nothing was fetched"):
        package.parse(named("../evil.py", trust_remote_code=True))


def test_two_names_that_a_file_system_may_take_for_one() -> None:
    """Names that differ in case alone are refused."""
    with pytest.raises(UsageError, match="a file twice"):
        package.parse(named("config.json", "Model.safetensors", "model.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"settings": []},
        {"class_weights": [float("nan")]},
        {"class_weights": ["1"]},
        {"class_weights": [-1.0]},
        {"model": [{"name": "config.json"}]},
        {"model": [{"name": "config.json", "num_bytes": -1, "digest": "b" * 64}]},
        {"model": [{"name": "config.json", "num_bytes": 2**62, "digest": "b" * 64}]},
        {"model": [{"name": "config.json", "num_bytes": True, "digest": "b" * 64}]},
        {"model": [{"name": "config.json", "num_bytes": 7, "digest": "../../etc/passwd"}]},
        {"model": [{"name": "config.json", "num_bytes": 7, "digest": "b" * 64, "path": "/"}]},
        {"model": 3},
        {"samples": None},
        {"more": 1},
    ],
)
def test_what_is_no_list_is_refused(change: dict[str, Any]) -> None:
    """Every wrong shape, size and digest has one message."""
    record = json.loads(package.dump(CONTENTS)) | change
    with pytest.raises(UsageError, match="can't be read"):
        package.parse(json.dumps(record).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    """Any bytes are refused with the same message."""
    with pytest.raises(UsageError, match="use one release on both ends"):
        package.parse(data)


def test_one_content_of_two_sizes() -> None:
    """A digest has one size."""
    files = (File("config.json", 7, "b" * 64), File("model.safetensors", 8, "b" * 64))
    with pytest.raises(UsageError, match="two sizes"):
        package.parse(package.dump(replace(CONTENTS, model=files)))


def test_a_list_that_is_too_long() -> None:
    """A checkpoint with too many files for a list is told when the run begins."""
    names = [f"model-{number:05}.safetensors" for number in range(10_000)]
    with pytest.raises(UsageError, match="fewer files"):
        named(*names)


def test_the_files_of_a_package_are_its_contents() -> None:
    """A content that has two names is one file."""
    files = (File("config.json", 7, "b" * 64), File("vocab.json", 7, "b" * 64))
    both = replace(CONTENTS, model=files).files()
    assert [file.digest for file in both] == ["b" * 64, "a" * 64]
    assert Path(both[0].name).name in ("config.json", "vocab.json")
