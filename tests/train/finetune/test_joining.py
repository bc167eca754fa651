"""What a worker takes from a coordinator that knows the secret, and what it refuses."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.finetune import joining, package, serving, settings_file
from entrenar_py.train.finetune.package import Contents, File
from entrenar_py.train.finetune.serving import OfferedFiles
from entrenar_py.train.model import preparation
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.messages import Piece
from entrenar_py.train.wire.terms import Package
from entrenar_py.train.wire_io.tcp import CoordinatorServer
from tests.train.finetune import runs
from tests.train.wire_io.fakes import LOOPBACK, SECRET, TIMING, FakeServer, run_of
from tests.train.wire_io.test_queries import source

USUAL = argparse.Namespace(model=None, trust_remote_code=False, id=None, logits=None)


def file_of(name: str, content: bytes) -> File:
    """Return the file with this name and content."""
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def obtain(listed: bytes, contents: dict[str, bytes], **given: Any) -> Any:
    """Return what a worker gets from a coordinator with this list and these files by digest."""
    digest = hashlib.sha256(listed).hexdigest()
    hands = FakeServer()
    hands.files = {digest: listed, **contents}
    sizes = {name: len(content) for name, content in hands.files.items()}

    async def story() -> Any:
        run = run_of(package=Package(digest, sizes))
        server = CoordinatorServer(run, hands, timing=TIMING, secret=SECRET)
        _, port = await server.listen(LOOPBACK, 0)
        running = asyncio.ensure_future(server.finish())
        try:
            asked = argparse.Namespace(**{**vars(USUAL), **given})
            return await joining.obtain(source(port, package=digest), asked, lambda text: None)
        finally:
            running.cancel()
            await asyncio.wait([running])

    return asyncio.run(story())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents_of(settings: dict[str, Any] | None = None, **changes: Any) -> Contents:
    """Return a list of two files."""
    usual = Contents(
        settings=settings or {"model": "model", "task": "text", "output": "output"},
        class_weights=(),
        samples=file_of("x.samples", b"samples"),
        model=(file_of("config.json", b"{}"),),
    )
    return replace(usual, **changes)


FILES = {
    file.digest: content
    for file, content in (
        (file_of("x", b"samples"), b"samples"),
        (file_of("x", b"{}"), b"{}"),
    )
}


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/tmp/evil.safetensors", "evil.py"])
def test_an_attacker_writes_nowhere(home: Path, tmp_path: Path, name: str) -> None:
    """A coordinator that knows the secret and names a path gets nothing written at all."""
    listed = json.loads(package.dump(contents_of()))
    listed["model"].append({"name": name, "num_bytes": 2, "digest": file_of("", b"{}").digest})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="nothing was fetched"):
        obtain(json.dumps(listed).encode(), FILES)
    assert sorted(tmp_path.rglob("*")) == before
    assert not home.exists()


def test_code_is_not_fetched_unasked(home: Path) -> None:
    """A run with code of the checkpoint needs this worker's own permission; nothing came before."""
    settings = {"model": "model", "task": "text", "output": "output", "trust_remote_code": True}
    code = file_of("modeling_own.py", b"raise SystemExit('run')")
    listed = package.dump(contents_of(settings, model=(code,)))
    with pytest.raises(UsageError, match="give --trust-remote-code"):
        obtain(listed, {**FILES, code.digest: b"raise SystemExit('run')"})
    assert not home.exists()


def test_another_list_than_the_announced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is verified like any file."""

    async def forged(source: Any, missing: Any, store: Any) -> Finish:
        store(source.package, 0, package.dump(contents_of()))
        return Finish("completed")

    monkeypatch.setattr("entrenar_py.train.wire_io.queries.fetch", forged)
    with pytest.raises(SystemFailure, match="not the one that it announced"):
        asyncio.run(joining.obtain(source(1), USUAL, lambda text: None))


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "model", "task": "nothing", "output": "o", "data": {"train": "r.jsonl"}},
        {"model": "model", "task": "text", "output": "o", "data": {"train": "r.jsonl"}, "new": 1},
        {"model": "model", "task": "text"},
    ],
)
def test_settings_of_another_release(home: Path, settings: dict[str, Any]) -> None:
    """Settings are read as strictly as a user's file."""
    with pytest.raises(SystemFailure, match="use one release on both ends"):
        obtain(package.dump(contents_of(settings)), FILES)


def test_rows_that_are_none(home: Path) -> None:
    """A file that is no samples is told, though its hash is right."""
    settings = {"model": "m", "task": "text", "output": "o", "data": {"train": "r.jsonl"}}
    with pytest.raises(SystemFailure, match="rows can't be read"):
        obtain(package.dump(contents_of(settings)), FILES)


def test_a_local_model_of_another_content(home: Path, tmp_path: Path) -> None:
    """One message names the file and both hashes; nothing is fetched."""
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(UsageError, match=r"config\.json can't be read"):
        obtain(package.dump(contents_of()), FILES, model=own)
    (own / "config.json").write_text("{ }")
    with pytest.raises(UsageError, match=r"not the run's model: config\.json has"):
        obtain(package.dump(contents_of()), FILES, model=own)
    assert not home.exists()


def test_what_is_offered_is_what_is_prepared(home: Path, small: Path, tmp_path: Path) -> None:
    """A worker makes of the files the coordinator's tensors, samples and weights, bit for bit.

    No path of the coordinator's machine is in the list, and no row that is only for evaluation.
    """
    config = runs.configured(tmp_path, small, workers=2)
    prepared = preparation.prepare(settings_file.load(config))
    offered = OfferedFiles(prepared)
    listed = offered.read(Piece(file=offered.package.digest, offset=0))
    assert isinstance(listed, bytes)
    assert str(tmp_path).encode() not in listed
    assert str(small).encode() not in listed
    contents = {}
    for digest, size in offered.package.sizes.items():
        pieces = [offered.read(Piece(file=digest, offset=at)) for at in range(0, size, 2**20)]
        assert all(isinstance(piece, bytes) for piece in pieces)
        contents[digest] = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        assert hashlib.sha256(contents[digest]).hexdigest() == digest
    got, own = obtain(listed, contents), prepared.workload()
    assert isinstance(got, Finetuning)
    assert (got.data_digest, got.specs) == (own.data_digest, own.specs)
    assert got.weight_max == own.weight_max
    ids = list(range(8))
    assert got.weight(ids) == own.weight(ids)
    ours, theirs = (dict(one.module.named_parameters()) for one in (own, got))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)


def test_a_file_that_changes_meanwhile(home: Path, small: Path, tmp_path: Path) -> None:
    """A checkpoint that is written while a run goes on is not mixed with the old one."""
    model = tmp_path / "model"
    model.mkdir()
    for path in (small / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = runs.configured(tmp_path, small, model=str(model))
    offered = OfferedFiles(preparation.prepare(settings_file.load(config)))
    content = (model / "config.json").read_bytes()
    piece = Piece(file=hashlib.sha256(content).hexdigest(), offset=0)
    assert offered.read(piece) == content
    (model / "config.json").write_bytes(content + b" ")
    assert "was changed since the run began" in str(offered.read(piece))
    (model / "config.json").unlink()
    assert "can't be read by the coordinator" in str(offered.read(piece))


def test_which_files_a_checkpoint_has(tmp_path: Path, small: Path) -> None:
    """One set of weights, tokenizer and settings; no pickles, and code only where it is asked."""
    settings = settings_file.load(runs.configured(tmp_path, small))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (
        *("config.json", "tokenizer.json", "README.md", "pytorch_model.bin", "modeling_own.py"),
        *("a.safetensors", "b.safetensors", "consolidated.safetensors", ".git"),
    ):
        (folder / name).write_text("{}")
    (folder / "empty.safetensors").touch()
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    here = replace(settings, model=folder)
    plain = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    shards = ["a.safetensors", "b.safetensors"]
    assert serving.checkpoint_files(here) == sorted([*plain, *shards])
    trusting = replace(here, trust_remote_code=True)
    assert "modeling_own.py" in serving.checkpoint_files(trusting)
    index["weight_map"]["x"] = "../rows.jsonl"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"names \.\./rows\.jsonl; weights have to be"):
        serving.checkpoint_files(here)
    (folder / "model.safetensors").write_text("x")
    assert serving.checkpoint_files(here) == [
        *("config.json", "model.safetensors", "tokenizer.json")
    ]
