"""Settings of all tests, and fixtures that are too expensive to be made twice."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path

import pytest
from hypothesis import settings

from entrenar_py import compute as backends
from entrenar_py.check import kill_matrix
from entrenar_py.check.contract import Invariant
from entrenar_py.check.kill_matrix import Row
from entrenar_py.shared import mutants, systems
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.verdict import Finding
from entrenar_py.systems import preload
from tests import pile
from tests.command_line import contract_file
from tests.train.service.nursery import CHECKPOINT_MODULES, without_gpu

OF_CHECKPOINTS = ("finetuned", "finetuned_by_stages", "distilled")  # systems
VARIANTS_AT_ONCE = 6  # of the kill matrix, that a process takes; but all of a kind that takes long

# A timing is a benchmark, never a test: a slow machine must not fail one.
# The same examples in every run, so that a gate is not a lottery; `make soak` looks further.
settings.register_profile("entrenar", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("entrenar")

# Many tests have a cache folder of their own: Mesa's compiled shaders are shared all the same.
os.environ.setdefault(
    "MESA_SHADER_CACHE_DIR", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
)

# torch's store looks up the name of whoever connects. A query that the name server drops takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What a shell starts in the background ignores interrupts, and so would all that is tested here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS = {
    number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
}

_set_preload = ForkServerContext.set_forkserver_preload


def _set_preload_of_all(context: BaseContext, names: list[str]) -> None:
    """Set what the fork server loads to `names`, and what torch ranks need.

    A process has one fork server, which loads what its first crew says. If that trains a
    checkpoint, each rank of a later crew would import a second's worth of modules itself. And
    each process that trains a checkpoint would import its model. If no variant was planted before
    the first crew, each rank of the kill matrix would import the catalogue, which takes as long as
    the training.
    """
    more = without_gpu(CHECKPOINT_MODULES) if "peft" in names else ()
    every = [*names, *preload.of_ranks(), preload.MUTANTS, *more]
    _set_preload(context, list(dict.fromkeys(every)))


ForkServerContext.set_forkserver_preload = _set_preload_of_all  # type: ignore[assignment, method-assign]


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Hide what pytest and modules hold from collections, and from observers of all objects.

    Otherwise every sixth second of a run is spent in the garbage collector.
    """
    gc.collect(1)
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def has_adapter() -> bool:
    """Return whether a wgpu adapter opens here."""
    try:
        backends.open_backend("wgpu")
    except BackendUnavailable:
        return False
    return True


@cache
def has_peft() -> bool:
    """Return whether everything is installed that fine-tuning and its oracles need."""
    needed = ("peft", "transformers", "accelerate", "bitsandbytes")
    return all(importlib.util.find_spec(name) for name in needed)


@cache
def shipped_invariants() -> dict[str, Invariant]:
    """Return the clauses of the shipped contracts by id, read once in a process: 0.3 s."""
    return kill_matrix.invariants()


def _tried() -> list[Variant]:
    """Return the variants to try; `make mutants` tries all.

    These are all variants of trainers without processes of torch's own, and without a checkpoint
    of transformers. Of the other trainers there is one for each clause that is not yet shown to
    fail, or to be silent; no benign one for clauses that the others show, too. Without an adapter,
    variants in the wgpu backend are left out, and without peft those of fine-tuning.
    """
    variants = [
        one
        for one in mutants.catalogue().values()
        if has_adapter() or not any("backends.wgpu." in path for path in one.plants)
        if has_peft() or one.scenario.system not in OF_CHECKPOINTS
    ]
    quick = [
        one
        for one in variants
        if one.scenario.system not in OF_CHECKPOINTS
        and not systems.SYSTEMS[one.scenario.system].only
    ]
    shown = Counter(clause for one in quick for clause in _about(one))
    others = list[Variant]()
    for one in variants:
        if one not in quick and not all(shown[clause] for clause in _about(one)):
            others.append(one)
            shown.update(_about(one))
    for one in [*others]:
        if one.benign and all(shown[clause] > 1 for clause in _about(one)):
            others.remove(one)
            shown.subtract(_about(one))
    return [*quick, *others]


def _about(variant: Variant) -> list[tuple[bool, str]]:
    clauses = variant.tried if variant.benign else variant.invariants
    return [(variant.benign, clause) for clause in clauses]


@cache
def _matrix(folder: Path) -> list[Row]:
    parts = {name: partial(_rows, variants) for name, variants in _parts(_tried()).items()}
    catalogue = mutants.catalogue()
    return [
        Row(variant=catalogue[name], invariant=invariant, finding=finding)
        for rows in pile.share(folder, parts)
        for name, invariant, finding in rows
    ]


def _parts(variants: list[Variant]) -> dict[str, list[Variant]]:
    """Return the variants that one process takes, the longest parts first.

    The first fine-tuning of a process loads transformers and captures graphs, for many seconds.
    """
    tuned = [one for one in variants if one.scenario.system in ("finetuned", "finetuned_by_ranks")]
    others = [one for one in variants if one.scenario.system in OF_CHECKPOINTS and one not in tuned]
    rest = [one for one in variants if one not in tuned and one not in others]
    starts = range(0, len(rest), VARIANTS_AT_ONCE)
    few = {f"matrix-{start}": rest[start : start + VARIANTS_AT_ONCE] for start in starts}
    return {"matrix-finetuned": tuned, "matrix-other-checkpoints": others, **few}


def _rows(variants: list[Variant]) -> list[tuple[str, str, Finding]]:
    """Return the rows of `variants` as they can be pickled: a plant may be a nested function."""
    rows = kill_matrix.run(variants, shipped_invariants())
    return [(row.variant.name, row.invariant, row.finding) for row in rows]


@pytest.fixture
def matrix(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The variants as every clause that judges them found them, shared by the run's processes."""
    return _matrix(pile.shared_folder(tmp_path_factory))


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a test in a folder of its own, as counterexamples are saved below the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def contract(own_folder: Path) -> str:
    """Return a contract with two clauses that hold, with one scenario each."""
    return contract_file(own_folder)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small checkpoint, `model`, and rows, `train.jsonl` and `test.jsonl`.

    Skips without the extra `finetune`.
    """
    for needed in ("peft", "transformers"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("small")
    importlib.import_module("examples.finetune.make_small").make(folder)
    return folder


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Restore handlers that a command left behind, which ends with its process elsewhere.

    Before the test, too: a fixture of its module may have run the command.
    """
    _restore_handlers()
    yield
    _restore_handlers()


def _restore_handlers() -> None:
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
