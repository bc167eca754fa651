"""The exceptions of this package, and the hints for names that are not allowed."""

from __future__ import annotations

import pickle

import pytest

from entrenar_py.shared.errors import UsageError, did_you_mean

ALLOWED = ("world_size", "num_shards")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("world_sizes", "did you mean 'world_size'?"),
        ("num_shard", "did you mean 'num_shards'?"),
        ("world", "did you mean 'world_size'?"),
        ("s", "allowed are world_size, num_shards"),
        ("colour", "allowed are world_size, num_shards"),
        (3, "allowed are world_size, num_shards"),
        (None, "allowed are world_size, num_shards"),
        ("world_size" * 10, "allowed are world_size, num_shards"),
    ],
)
def test_the_nearest_name_or_all(given: object, said: str) -> None:
    """The hint is the one near name, or else the list of all."""
    assert did_you_mean(given, ALLOWED) == said


def test_a_part_of_a_name_is_nearer_than_a_likeness() -> None:
    """For `steps`, `num_steps` is meant and not `stops`."""
    assert did_you_mean("steps", ("stops", "num_steps")) == "did you mean 'num_steps'?"
    both = did_you_mean("steps", ("stops", "num_steps", "warmup_steps"))
    assert both == "did you mean 'num_steps' or 'warmup_steps'?"
    assert did_you_mean("F-DP", ("F-DP-1", "F-DP-2", "F-DP-03")) == "did you mean 'F-DP-2'?"


def test_an_error_names_its_field() -> None:
    """An error keeps its field when sent to another process; most errors have no single field."""
    error = UsageError.of("world_size", 3, "use 2")
    assert (str(error), error.field) == ("world_size=3: use 2", "world_size")
    assert pickle.loads(pickle.dumps(error)).field == "world_size"
    assert UsageError("nothing to do").field == ""


def test_advice_may_replace_the_list() -> None:
    """Advice replaces the list only if no name is near."""
    assert did_you_mean("colour", ALLOWED, otherwise="") == ""
    assert did_you_mean("world_sizes", ALLOWED, otherwise="") == "did you mean 'world_size'?"
