"""A coordinator and workers as processes of their own, on loopback: the bits, and the files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server, socket
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from entrenar_py.train.wire.terms import PIECE_BYTES, WANTED_MAX
from tests.train.finetune import runs
from tests.train.service.cluster import Cluster, cluster

PATIENCE_S = 120.0


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Cluster]:
    """Processes that are ended with the test."""
    with cluster(tmp_path) as made:
        yield made


def served(machines: Cluster, small: Path, **changes: Any) -> Path:
    """Write a configuration with the section for other machines; return its path."""
    section = {"listen": machines.address, "secret_file": "secret", "wait_for": 2}
    return runs.configured(
        machines.folder,
        small,
        workers=2,
        coordinator={**section, **changes.pop("coordinator", {})},
        **changes,
    )


def test_workers_that_know_a_secret_train_the_same_adapters(
    machines: Cluster, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fetches all files, one has the model, one has another: that one is refused, clearly.

    The adapters are those of one process on one machine.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    served(machines, small)
    serving = machines.coordinator(cache=tmp_path / "own")
    other = tmp_path / "other"
    other.mkdir()
    for path in (small / "model").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    wrong = machines.worker("--model", other, cache=tmp_path / "theirs")
    assert wrong.code() == exit_codes.INVALID
    assert "not the run's model: model.safetensors has SHA-256" in wrong.lines[-1]
    fetches = machines.worker(cache=tmp_path / "theirs")
    has_it = machines.worker("--model", small / "model", cache=tmp_path / "third")
    assert [one.code() for one in (fetches, has_it, serving)] == [exit_codes.DONE] * 3
    assert "fetches 7 files" in fetches.text
    assert "fetches 1 files" in has_it.text
    by_many = runs.adapters(tmp_path / "out")
    runs.configured(tmp_path, small, output="alone", workers=1)
    assert cli.main(["finetune", str(tmp_path / "run.yaml")]) == exit_codes.DONE
    assert by_many == runs.adapters(tmp_path / "alone")


def test_a_mesh_trains_the_same_adapters(
    machines: Cluster, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients go from worker to worker; the coordinator gets the weights, and writes them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    served(machines, small, coordinator={"topology": "mesh"})
    serving = machines.coordinator(cache=tmp_path / "own")
    both = [machines.worker("--model", small / "model", cache=tmp_path / "own") for _ in range(2)]
    assert [one.code() for one in (*both, serving)] == [exit_codes.DONE] * 3
    by_many = runs.adapters(tmp_path / "out")
    runs.configured(tmp_path, small, output="alone", workers=1)
    assert cli.main(["finetune", str(tmp_path / "run.yaml")]) == exit_codes.DONE
    assert by_many == runs.adapters(tmp_path / "alone")


class Relay:
    """Passes bytes to and from a coordinator, and holds those from it back beyond `limit`.

    `num_bytes` counts what came from the coordinator, over all connections.
    """

    def __init__(self, beyond: str) -> None:
        host, _, port = beyond.rpartition(":")
        self._beyond = host, int(port)
        self._listener = create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.num_bytes = 0
        self.limit = 0
        self.is_open = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End it; connections end with their ends."""
        self.is_open.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return  # it is closed
            there = socket()
            try:
                there.connect(self._beyond)
            except OSError:  # nobody is there yet: nor is this
                here.close()
                there.close()
                continue
            for pair in ((here, there, False), (there, here, True)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket, to: socket, is_down: bool) -> None:
        try:
            while data := source.recv(2**16):
                if is_down:
                    self.num_bytes += len(data)
                    if self.num_bytes > self.limit:
                        self.is_open.wait()
                to.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, to):
                one.close()


@contextmanager
def relay(beyond: str) -> Iterator[Relay]:
    """Yield a relay to the address `beyond`."""
    made = Relay(beyond)
    try:
        yield made
    finally:
        made.close()


def large(small: Path, folder: Path) -> Path:
    """Write a checkpoint of some 13 MB with the small one's tokenizer; return its folder."""
    transformers = pytest.importorskip("transformers")
    config = json.loads((small / "model" / "config.json").read_text())
    config |= {"hidden_size": 384, "intermediate_size": 1280}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    model.save_pretrained(folder / "model")
    for path in (small / "model").iterdir():
        if path.name.startswith(("token", "chat")):
            (folder / "model" / path.name).write_bytes(path.read_bytes())
    return folder / "model"


def arrived_bytes(files: Path) -> int:
    """Return the bytes of `files` that are not whole yet.

    A worker renames a file that is whole, maybe between our finding it and our asking for its size.
    """
    total = 0
    for part in files.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            total += part.stat().st_size
    return total


def test_a_download_is_gone_on_with(machines: Cluster, small: Path, tmp_path: Path) -> None:
    """A worker killed in the middle costs what was on its way: no byte that is kept comes twice.

    A file that is damaged in the cache is found by its hash, and fetched again.
    """
    model = large(small, tmp_path)
    total = sum(path.stat().st_size for path in model.iterdir())
    short = {"epochs": 1, "batch_size": 32}
    section = {"wait_for": 1}
    served(machines, small, model=str(model), training=short, coordinator=section)
    serving = machines.coordinator(cache=tmp_path / "own")
    files = tmp_path / "theirs" / "entrenar-py" / "files"
    with relay(machines.address) as between:
        between.limit = total // 2
        direct, machines.address = machines.address, between.address
        first = machines.worker(cache=tmp_path / "theirs")
        deadline = time.monotonic() + PATIENCE_S
        while arrived_bytes(files) < 2 * PIECE_BYTES:
            assert time.monotonic() < deadline, first.lines
            time.sleep(0.02)
        first.signal(signal.SIGKILL)
        first.code()
        kept = sum(one.stat().st_size for one in files.iterdir())
        assert kept >= 2 * PIECE_BYTES
        small_file = next(one for one in files.iterdir() if one.suffix == "")
        damaged = bytearray(small_file.read_bytes())
        damaged[0] ^= 1
        small_file.write_bytes(damaged)
        between.limit = 2**40
        between.is_open.set()
        second = machines.worker(cache=tmp_path / "theirs")
        assert [second.code(), serving.code()] == [exit_codes.DONE] * 2
        machines.address = direct
    assert "is damaged: it is fetched again" in second.text
    on_the_way = (WANTED_MAX + 1) * PIECE_BYTES
    assert between.num_bytes < total + on_the_way + 2**20 + len(damaged)
    for one in files.iterdir():
        if one.suffix == "":
            assert hashlib.sha256(one.read_bytes()).hexdigest() == one.name
    assert not list(files.glob("*.part"))
    assert list((tmp_path / "out").glob("adapter_model.safetensors"))
