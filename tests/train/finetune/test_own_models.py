"""Configurations of our own models: valid ones load, problems are reported with their place."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from entrenar_py.shared import systems
from entrenar_py.shared.errors import ContractError, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.finetune import own_models, serving
from entrenar_py.train.service import config
from entrenar_py.train.service.address import Address
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io import sockets
from tests.train.wire_io.certificates import Authority

SMALL = """\
coordinator: {secret_file: secret}
workload: mlp
world_size: 2
seed: 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a secret in it."""
    (tmp_path / "secret").write_bytes(b"  open sesame, soon \n")
    return tmp_path


def load(folder: Path, text: str) -> config.Config:
    """Return the configuration of the YAML `text`."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return own_models.load(path)


def section(keys: str) -> str:
    """Return a configuration with `keys` in the section of the service."""
    return SMALL.replace("secret}", f"secret, {keys}}}")


def problems(folder: Path, text: str) -> list[str]:
    """Return the problems of `text`, without the folder in them."""
    with pytest.raises(ContractError) as caught:
        load(folder, text)
    return [one.replace(f"{folder}/", "") for one in caught.value.problems]


def test_the_least_of_one(folder: Path) -> None:
    """The smallest configuration has the defaults of the docs."""
    found = load(folder, SMALL)
    assert found == config.Config(
        plan=TrainingPlan(trainer="parameter_server", workload="mlp", world_size=2, seed=1),
        listen=Address("127.0.0.1", 7411),
        secret=b"open sesame, soon",
        context=None,
        wait_for=1,
        timing=Timing(),
        checkpoint=None,
        metrics=None,
        ledger=None,
    )


def test_all_of_one(folder: Path) -> None:
    """Every key is used, and paths start from the file's own folder."""
    found = load(
        folder,
        section(
            'listen: "[::1]:5000", wait_for: 3, audit_share: 0.1, '
            "timing: {heartbeat_s: 1, dead_after_s: 2.5, gather_s: 60}"
        ).replace("world_size: 2", "world_size: 3")
        + """\
num_steps: 9
learning_rate: 1e-3
clip_norm: null
optimizer: adamw
checkpoint: {path: state/run.ckpt, every_steps: 10}
metrics: /var/log/run.jsonl
ledger: ledger.jsonl
updates: server
""",
    )
    assert (found.plan.num_steps, found.plan.learning_rate) == (9, 1e-3)
    assert (found.plan.clip_norm, found.plan.optimizer) == (None, "adamw")
    assert found.listen == Address("::1", 5000)
    assert found.wait_for == 3
    assert found.timing == Timing(heartbeat_s=1, dead_after_s=2.5, gather_s=60)
    assert found.checkpoint == config.Checkpoint(path=folder / "state/run.ckpt", every_steps=10)
    assert found.metrics == Path("/var/log/run.jsonl")
    assert found.ledger == folder / "ledger.jsonl"
    assert found.plan.options == {"audit_share": 0.1, "updates": "server"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            SMALL + "num_step: 9\n",
            ["run.yaml:5:1: error: configuration: key 'num_step' is not read; "
             "did you mean 'num_steps'?"],
        ),
        (
            SMALL + "seed: 2\n",
            ["run.yaml:5:1: error: key 'seed' is given twice, on lines 4 and 5; keep one"],
        ),
        (
            SMALL + "batch_size: 0\nlearning_rate: fast\n",
            ["run.yaml:5:13: error: configuration: batch_size=0: use a number >= 1",
             "run.yaml:6:16: error: configuration: learning_rate='fast': use a number"],
        ),
        (
            SMALL + "batch_size: 64\n",
            ["run.yaml:5:13: error: batch_size=64 with num_samples=50: use batch_size<=50"],
        ),
        (
            SMALL.replace("mlp", "mpl"),
            ["run.yaml:2:11: error: configuration: workload='mpl': use linear or mlp or decoder"],
        ),
        (
            SMALL.replace("mlp", "own"),
            ["run.yaml:2:11: error: configuration: workload='own': use linear or mlp or decoder"],
        ),
        (
            "workload: mlp\n",
            ["run.yaml:1:1: error: configuration: coordinator is missing: where and how workers",
             "run.yaml:1:1: error: configuration: seed is missing: the only source of randomness",
             "run.yaml:1:1: error: configuration: world_size is missing: largest number of"],
        ),
        (
            SMALL + "backends: [cpu]\n",
            ["run.yaml:5:1: error: configuration: key 'backends' is not read; known are"],
        ),
        (
            section("listen: 127.0.0.1"),
            ["run.yaml:1:44: error: address='127.0.0.1': use host:port, e.g."],
        ),
        (
            section("wait_for: 3"),
            ["run.yaml:1:46: error: wait_for=3: world_size is 2; use that number or less"],
        ),
        (
            section("audit_share: 2"),
            ["run.yaml:1:49: error: coordinator: audit_share=2: use a number >= 0 and <= 1"],
        ),
        (
            SMALL + "updates: client\n",
            ["run.yaml:5:10: error: configuration: updates='client': use workers or server"],
        ),
        (
            SMALL.replace("mlp", "decoder") + "width: 64\n",
            ["run.yaml:5:8: error: width=64: decoder has one size; leave it out, or use mlp or"],
        ),
        (
            section("topology: ring"),
            ["run.yaml:1:46: error: coordinator: topology='ring': use star or mesh"],
        ),
        (
            section("topology: mesh, audit_share: 0.5") + "updates: server\n",
            ["run.yaml:1:65: error: audit_share=0.5 with topology: mesh: no gradient passes",
             "run.yaml:5:10: error: updates='server' with topology: mesh: no gradient passes"],
        ),
        (
            section("wait_for: some"),
            ["run.yaml:1:46: error: coordinator: wait_for='some': use a whole number"],
        ),
        (
            section("timing: {heartbeat_s: 9, dead_after: 3}"),
            ["run.yaml:1:61: error: timing: key 'dead_after' is not read; "
             "did you mean 'dead_after_s'?"],
        ),
        (
            section("timing: {heartbeat_s: 9, dead_after_s: 3}"),
            ["run.yaml:1:44: error: heartbeat_s=9.0 with dead_after_s=3.0: every worker"],
        ),
        (
            SMALL + "checkpoint: {path: here}\n",
            ["run.yaml:5:13: error: checkpoint: every_steps is missing: steps from one save"],
        ),
        (
            SMALL + "checkpoint: here\n",
            ["run.yaml:5:13: error: configuration: checkpoint='here': use a mapping"],
        ),
        (
            SMALL.replace("secret}", "gone}"),
            ["run.yaml:1:28: error: secret_file=gone: can't be read (No such file or directory)"],
        ),
        ("", ["run.yaml:1:1: error: a configuration is a mapping (model, task,"]),
        ("a: [", ["run.yaml:2:1: error: invalid YAML: while parsing a flow node"]),
        ("a: 1\n---\nb: 2", ["run.yaml:2:1: error: invalid YAML: a second document; only one is"]),
    ],
)  # fmt: skip
def test_a_wrong_one_says_where(folder: Path, text: str, expected: list[str]) -> None:
    """Every problem is reported at once with file, line and column."""
    found = problems(folder, text)
    assert len(found) == len(expected), found
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)


def test_a_mesh(folder: Path) -> None:
    """A mesh is a trainer of its own. An option that it lacks may be turned off explicitly."""
    found = load(folder, section("topology: mesh, audit_share: 0") + "updates: workers\n").plan
    assert (found.trainer, found.options) == ("mesh", {})
    systems.require_possible(found)


def test_tls(folder: Path) -> None:
    """With a CA workers must show a certificate. The error names an unfit file."""
    authority = Authority(folder, "ca")
    own = authority.signed("coordinator")
    names = f"cert: {own.cert.name}, key: {own.key.name}"
    found = load(folder, section(f"tls: {{{names}}}"))
    assert found.context is not None
    assert not sockets.proves_identity(found.context)
    found = load(folder, section(f"tls: {{{names}, ca: ca.pem}}"))
    assert found.context is not None
    assert sockets.proves_identity(found.context)
    (line,) = problems(folder, section(f"tls: {{{names}, ca: gone.pem}}"))
    assert line.startswith("run.yaml:1:41: error: TLS ca=gone.pem: No such file or directory")
    (line,) = problems(folder, section(f"tls: {{cert: {own.cert.name}}}"))
    assert line.startswith("run.yaml:1:41: error: tls: key is missing")


def test_no_file(tmp_path: Path) -> None:
    """The error names the missing file."""
    with pytest.raises(
        ContractError, match=r"absent\.yaml:1:1: error: can't be read: No such file"
    ):
        own_models.load(tmp_path / "absent.yaml")


def test_a_nul_is_in_no_path(folder: Path) -> None:
    """Each path with a NUL is reported at its place."""
    text = SMALL + 'ledger: "a\\0"\nmetrics: "\\0"\ncheckpoint: {path: "b\\0", every_steps: 1}\n'
    assert problems(folder, text) == [
        "run.yaml:5:9: error: configuration: ledger='a\\x00': use a path",
        "run.yaml:6:10: error: configuration: metrics='\\x00': use a path",
        "run.yaml:7:20: error: checkpoint: path='b\\x00': use a path",
    ]


def test_a_checkpoint_behind_a_link_is_what_the_link_leads_to(folder: Path) -> None:
    """A link is resolved, so both names have one lock, and a rename does not replace the link."""
    (folder / "link").symlink_to("real")
    found = load(folder, SMALL + "checkpoint: {path: link, every_steps: 1}\n").checkpoint
    assert found is not None
    assert found.path == folder / "real"


def test_a_secret_that_is_too_short(tmp_path: Path) -> None:
    """A short secret is refused, because it could be guessed, and is not printed."""
    path = tmp_path / "secret"
    path.write_bytes(b" short \n")
    with pytest.raises(UsageError, match="5 bytes; use at least 16") as caught:
        config.secret(path)
    assert "short" not in str(caught.value)


def test_every_key_has_its_place() -> None:
    """Each field of a plan is a key with the same default, or is left out on purpose."""
    own = {field.name: field.default for field in fields(own_models.OwnRun)}
    plan = {field.name: field.default for field in fields(TrainingPlan)}
    assert plan.keys() - own.keys() == {"trainer", "backends", "detail", "options"}
    assert all(plan[name] == own[name] for name in plan.keys() & own.keys())


def test_an_earlier_configuration_is_told_where_its_keys_stand_now(folder: Path) -> None:
    """The keys of the service stood outside of the section."""
    path = folder / "run.yaml"
    path.write_text(f"{SMALL}listen: h:1\ntopology: mesh\n", encoding="utf-8")
    with pytest.raises(ContractError) as caught:
        serving.is_finetuning(path)
    told = "stands in the section `coordinator:`; move it there"
    assert caught.value.problems == [
        f"{path}:5:1: error: listen {told}",
        f"{path}:6:1: error: topology {told}",
    ]


def test_the_example_in_the_docs(folder: Path) -> None:
    """The docs' example is a valid configuration."""
    page = (Path(__file__).parents[3] / "docs" / "entrenar.md").read_text(encoding="utf-8")
    text = page.partition("<<'EOF'\n")[2].partition("EOF\n")[0]
    (folder / "run.secret").write_bytes(b"open sesame, soon")
    found = load(folder, text)
    assert (found.plan.workload, found.wait_for) == ("decoder", 2)
    assert found.ledger == folder / "run.jsonl"
