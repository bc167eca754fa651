"""A mesh as a service: workers exchange gradients, the coordinator only controls the run."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.train import cli as options
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.topology import TreeExchange
from entrenar_py.train.finetune import joining
from entrenar_py.train.service import exit_codes, worker
from entrenar_py.train.service.host import Host
from entrenar_py.train.service.run_events import Happening, Noted, StepMade
from entrenar_py.train.wire.effects import Finish, Joined
from entrenar_py.train.wire.messages import Applied, State
from entrenar_py.train.wire_io.queries import Told
from tests.systems import by_hand
from tests.train.service.cluster import LARGE, LONG, Cluster, cluster, metrics, weights
from tests.train.service.members import Noticed, plan_of
from tests.train.service.switchboard import Switchboard
from tests.train.wire_io.certificates import Authority

MESH = {"topology": "mesh", "ledger": "ledger.jsonl", "metrics": "metrics.jsonl"}
STATE = {"path": "state", "every_steps": 7}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster."""
    with cluster(tmp_path) as made:
        yield made


def is_verified(mesh: Cluster) -> bool:
    """Assert that the ledger is whole, and that training again gives its bits."""
    verified = mesh.verify("--replay")
    return verified.code() == exit_codes.DONE


def test_a_gradient_of_more_than_one_block(mesh: Cluster) -> None:
    """With over 1 MiB of gradient and a worker killed, the bits are the reference's.

    Few bytes pass the coordinator.
    """
    mesh.configure(LARGE, wait_for=2, **MESH)
    serving = mesh.coordinator()
    victim, other = mesh.worker("--rank", 1), mesh.worker("--rank", 0)
    serving.until(r"step 1/60")
    victim.kill()
    assert [serving.code(), other.code()] == 2 * [exit_codes.DONE]
    assert "worker 1 left in step" in serving.text
    assert serving.lines[-1] == f"completed: step 60, weights {weights(LARGE)}"
    steps = [one for one in metrics(mesh.folder) if one["what"] == "step"]
    assert [one["step"] for one in steps] == list(range(60))
    assert all(one["loss"] > 0 and one["reduce_ms"] is None for one in steps)
    assert all(one["bytes_in"] < 2**20 for one in steps), "the last one's brings the state"
    assert is_verified(mesh)


@pytest.mark.by_hand  # CI kills the coordinator of a star
def test_a_killed_coordinator_goes_on_where_it_was(mesh: Cluster) -> None:
    """After SIGKILL in a run over TLS, a new coordinator resumes from the checkpoint.

    The workers, which are ahead of it, reconnect and go on from there.
    """
    authority = Authority(mesh.folder, "ca")
    own = authority.signed("coordinator")
    tls = {"cert": own.cert.name, "key": own.key.name, "ca": authority.ca.name}
    mesh.configure(LONG, wait_for=2, checkpoint=STATE, tls=tls, **MESH)
    first = mesh.coordinator()
    shown = authority.signed("worker")
    given = ["--tls-ca", authority.ca, "--tls-cert", shown.cert, "--tls-key", shown.key]
    workers = [mesh.worker(*given), mesh.worker(*given)]
    first.until(r"checkpoint before step")
    first.kill()
    second = mesh.coordinator("--resume")
    assert int(second.until(r"from step (\d+) on").group(1)) > 0
    assert [one.code() for one in (second, *workers)] == 3 * [exit_codes.DONE]
    assert second.lines[-1] == f"completed: step 200, weights {weights(LONG)}"
    assert is_verified(mesh)


def test_all_links_to_the_coordinator_break_at_once(mesh: Cluster) -> None:
    """Both workers reconnect with the state, and the run goes on without a checkpoint."""
    mesh.configure(LONG, wait_for=2, **MESH)
    serving = mesh.coordinator()
    serving.until(r"listens at")
    with closing(Switchboard(mesh.address)) as relay:
        workers = [mesh.worker("--coordinator", relay.address) for _ in range(2)]
        for turn in (r"step 1/200", r"takes part from step [1-9]"):
            serving.until(turn)
            relay.reset()
        assert [one.code() for one in (serving, *workers)] == 3 * [exit_codes.DONE]
    assert len(re.findall(r"left in step", serving.text)) >= 2
    assert serving.lines[-1] == f"completed: step 200, weights {weights(LONG)}"
    assert is_verified(mesh)


@pytest.mark.slow
def test_a_stopped_coordinator_asks_for_the_state(mesh: Cluster) -> None:
    """On SIGTERM the coordinator finishes its step, gets the state from a worker, and saves it.

    The resumed run goes on from there with another worker.
    """
    mesh.configure(LONG, checkpoint={**STATE, "every_steps": 1000}, **MESH)
    first, early = mesh.coordinator(), mesh.worker()
    first.until(r"step 1/200")
    first.signal(signal.SIGTERM)
    assert (first.code(), early.code()) == (exit_codes.STOPPED, exit_codes.WRONG)
    _, progress = checkpoint.load(mesh.folder / "state")
    assert progress["step"] > 0
    assert f": step {progress['step']}, weights" in first.lines[-1]
    second = mesh.coordinator("--resume")
    second.until(f"from step {progress['step']} on")
    others = [mesh.worker(), mesh.worker()]
    assert [one.code() for one in (second, *others)] == 3 * [exit_codes.DONE]
    assert second.lines[-1] == f"completed: step 200, weights {weights(LONG)}"
    assert is_verified(mesh)


# --- the host, by hand ----------------------------------------------------------------------------


def met(tmp_path: Path, heard: list[Happening]) -> tuple[Host, Member]:
    """Return a host and the only worker of its run, before step 0."""
    scenario = plan_of(world_size=1).with_(trainer="mesh")
    host = Host(scenario, checkpoint_path=tmp_path / "c", listeners=[heard.append])
    member = Member(scenario)
    welcome = by_hand.welcome_of(host.server, 0, 0)
    member.load(welcome, bytearray(host.server.payload(welcome)))
    member.recorder.drain()
    Noticed(host).joined(Joined(0, 0, late=False))
    return host, member


def make(host: Host, member: Member, step: int) -> None:
    """Let the worker compute, average and make `step`, and report it."""
    server, exchange = Noticed(host), member.exchange
    nodes = member.work(step, range(host.plan.num_shards))
    assert isinstance(nodes, list)
    assert isinstance(exchange, TreeExchange)
    for node in nodes:
        exchange.contribute(node)
    for block in range(server.reduction.blocks.count):
        exchange.complete(block)
        assert exchange.reduce(block) is not None
    member.recorder.drain()  # of the shards
    member.make_held(step)
    member.regroup(0)
    said, told = Applied(step=step), bytearray(member.payload(Applied(step=step)))
    server.require(0, said, told)
    server.keep(0, said, told)
    server.gather(step + 1)


def test_a_step_is_told_by_who_made_it(tmp_path: Path) -> None:
    """Each step is reported once, with the loss from the worker."""
    heard: list[Happening] = []
    host, member = met(tmp_path, heard)
    for step in range(2):
        make(host, member, step)
    steps = [one for one in heard if isinstance(one, StepMade)]
    assert [(one.step, one.workers) for one in steps] == [(0, (0,)), (1, (0,))]
    assert steps[1].loss < steps[0].loss
    with pytest.raises(ProtocolError, match="Applied: the loss of its step is missing"):
        host.server.require(0, Applied(step=2), bytearray(trace.dump_events([])))


def test_only_a_state_that_is_here_is_saved(tmp_path: Path) -> None:
    """If the workers are ahead and lost, the checkpoint is of the last state that was sent.

    The final note names that step, too.
    """
    heard: list[Happening] = []
    host, member = met(tmp_path, heard)
    for step in range(3):
        make(host, member, step)
        if step == 0:  # somebody came, say
            given = bytearray(member.payload(State(step=1)))
            host.server.require(0, State(step=1), given)
            Noticed(host).keep(0, State(step=1), given)
    host.finish(Finish("failed", "no worker is left"))
    _, progress = checkpoint.load(tmp_path / "c")
    assert progress["step"] == 1
    last = heard[-1]
    assert isinstance(last, Noted)
    assert last.text.startswith("failed (no worker is left): step 1, weights ")


# --- the worker -----------------------------------------------------------------------------------


def test_a_worker_without_a_certificate(mesh: Cluster) -> None:
    """Over TLS a worker needs a certificate, and the message names the options."""
    scenario = json.dumps(plan_of().with_(trainer="mesh").to_dict()).encode()
    told = Told(plan=scenario, heartbeat_s=1.0, dead_after_s=2.0, package=None)
    authority = Authority(mesh.folder, "ca")
    line = ["worker", "--coordinator", "h:1", "--secret-file", "s", "--tls-ca", str(authority.ca)]
    stay = worker.Stay(options.parse(line), b"", None, *worker.opened("cpu"), joining.obtain)
    with pytest.raises(
        UsageError, match=r"in this run workers connect.* give --tls-cert and --tls-key"
    ):
        stay.join(told)


def test_a_port_that_is_taken(mesh: Cluster) -> None:
    """The message names the port, and how to go on."""
    mesh.configure(topology="mesh")
    serving = mesh.coordinator()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = mesh.worker("--listen-port", port)
        assert refused.code() == exit_codes.INVALID
    assert f"port={port}: can't listen at 127.0.0.1 (Address already in use)" in refused.text
    assert mesh.worker("--listen-port", port).code() == serving.code() == exit_codes.DONE
