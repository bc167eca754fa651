"""The configuration of `--wire v2`: valid ones load, problems are told with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.shared.errors import ContractError
from entrenar_py.train.service import averaging_config, averaging_keys, config_keys
from entrenar_py.train.service.address import Address
from entrenar_py.train.service.averaging_config import AveragingConfig
from entrenar_py.train.upstream.frames import FRAME_BYTES_MAX
from entrenar_py.train.upstream.terms import AveragingRun, Patience

SMALL = "num_samples: 100\nnum_steps: 10\nworld_size: 2\n"


def load(folder: Path, text: str) -> AveragingConfig:
    """Return the configuration of the YAML `text`."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return averaging_config.load(path)


def problems(folder: Path, text: str) -> list[str]:
    """Return the problems of `text`, without the folder in them."""
    with pytest.raises(ContractError) as caught:
        load(folder, text)
    return [one.replace(f"{folder}/", "") for one in caught.value.problems]


def test_the_least_of_one(tmp_path: Path) -> None:
    """The smallest configuration has the defaults of the docs."""
    assert load(tmp_path, SMALL) == AveragingConfig(
        run=AveragingRun(
            num_samples=100,
            num_steps=10,
            world_size=2,
            num_shards=2,
            batch_size=100,
            num_awaited=2,
            gradient_bytes_max=FRAME_BYTES_MAX,
            components=None,
            late_joins=True,
        ),
        listen=Address("127.0.0.1", 7411),
        frame_bytes_max=FRAME_BYTES_MAX,
        patience=Patience(),
        metrics=None,
        ledger=None,
    )


def test_all_of_one(tmp_path: Path) -> None:
    """Every key is used, and paths start from the file's own folder."""
    text = SMALL + (
        "num_shards: 4\nbatch_size: 8\nwait_for: 1\ncomponents: [0, 2]\nlate_joins: false\n"
        "frame_bytes_max: 4294967295\ngradient_bytes_max: 9000000000\nlisten: '[::1]:5000'\n"
        "timing: {hello_s: 1, dead_after_s: 2.5, shard_s: 3, gather_s: 4}\n"
        "metrics: /var/log/m.jsonl\nledger: l.jsonl\n"
    )
    assert {line.partition(":")[0] for line in text.splitlines()} == set(averaging_keys.KEYS)
    assert load(tmp_path, text) == AveragingConfig(
        run=AveragingRun(
            num_samples=100,
            num_steps=10,
            world_size=2,
            num_shards=4,
            batch_size=8,
            num_awaited=1,
            gradient_bytes_max=9_000_000_000,
            components=(0, 2),
            late_joins=False,
        ),
        listen=Address("::1", 5000),
        frame_bytes_max=4_294_967_295,
        patience=Patience(hello_s=1, dead_after_s=2.5, shard_s=3, gather_s=4),
        metrics=Path("/var/log/m.jsonl"),
        ledger=tmp_path / "l.jsonl",
    )


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """What is missing, what is wrong, and what is not known."""
    assert sorted(problems(tmp_path, "num_sample: 3\nworld_size: two\n")) == [
        "run.yaml:1:1: error: configuration: key 'num_sample' is not read; did you mean "
        "'num_samples'?",
        "run.yaml:1:1: error: num_samples is missing: samples that each worker's data set has",
        "run.yaml:1:1: error: num_steps is missing: steps of the run",
        "run.yaml:2:13: error: world_size='two': use a whole number, 1 to 65536",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("num_shards: 1", "num_shards=1: use a whole number, 2 to 65536"),
        ("num_shards: 101", "batch_size=100: use a whole number, 101 to 100"),
        ("batch_size: 1", "batch_size=1: use a whole number, 2 to 100"),
        ("batch_size: 101", "batch_size=101: use a whole number, 2 to 100"),
        ("wait_for: 3", "wait_for=3: use a whole number, 1 to 2"),
        ("wait_for: true", "wait_for=True: use a whole number, 1 to 2"),
        ("components: 3", "components=3: use a list of different numbers from 0 to 255"),
        ("components: [256]", "components=[256]: use a list"),
        ("components: [1, 1]", "components=[1, 1]: use a list of different"),
        ("components: [true]", "components=[True]: use a list"),
        ("late_joins: 3", "late_joins is true or false"),
        ("frame_bytes_max: 4294967296", "frame_bytes_max=4294967296: use a whole number, 4096 to"),
        ("frame_bytes_max: 100", "frame_bytes_max=100: use a whole number, 4096"),
        ("gradient_bytes_max: 5000", "gradient_bytes_max=5000: use a whole number, 100000000 or"),
        ("listen: nowhere", "address='nowhere': use host:port"),
        ("timing: 3", "timing is a mapping of hello_s, dead_after_s, shard_s, gather_s"),
        ("timing: {shard_s: 0}", "shard_s=0.0: use a number of seconds > 0"),
        ("timing: {heartbeat_s: 1}", "key 'heartbeat_s' is not read"),
        ('ledger: "a\\0b"', "a path can't contain a NUL"),
    ],
)
def test_what_is_wrong(line: str, problem: str, tmp_path: Path) -> None:
    """Each problem has the place, the value and what to use."""
    (told,) = problems(tmp_path, f"{SMALL}{line}\n")
    assert told.startswith(("run.yaml:4:", "run.yaml:1:1: error: batch_size"))
    assert problem in told


@pytest.mark.parametrize("key", averaging_keys.NOT_HERE)
def test_what_would_be_ignored(key: str, tmp_path: Path) -> None:
    """Keys of other runs are refused, with the reason."""
    (told,) = problems(tmp_path, f"{SMALL}{key}: 1\n")
    assert told == f"run.yaml:4:1: error: {key}: {averaging_keys.NOT_HERE[key]}; leave it out"


def test_keys_of_other_runs_exist() -> None:
    """What is refused by name is a key of the other coordinator."""
    known = {*config_keys.TRAINING, *config_keys.SERVICE}
    assert set(averaging_keys.NOT_HERE) <= known
    assert not set(averaging_keys.NOT_HERE) & set(averaging_keys.KEYS)
