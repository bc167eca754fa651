"""The launcher for several nodes: which agents it starts, on which nodes, and how they end.

The programs that it starts are replaced by stand-ins, so this tests no torchrun, ssh or SLURM.
docs/multi-node.md says what was really tried.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "examples" / "multi_node" / "launch.sh"
STAND_INS = {
    # Says how it was started, in one write; fails where it is told to, waits for ever where it is.
    "torchrun": 'echo "$$" >> "$LOG.pids"; echo "$ENTRENAR_TRACE_DIR $*" >> "$LOG"\n'
    'if [ "${*: -1}" = wait ]; then exec sleep 60; fi\n'
    'if [ "${*: -1}" != fail ]; then exit; fi\n'
    'if [ -e "$LOG.first" ]; then exec sleep 60; else : > "$LOG.first"; exit 7; fi',
    "ssh": 'echo "ssh ${*:1:4}" >> "$LOG"; exec bash -c "${*:5}"',
    "scontrol": "printf 'a\\nb\\nc\\n'",
    "srun": 'echo "srun ${*:1:4}" >> "$LOG"; exec "${@:5}"',
}


@pytest.fixture
def launch(tmp_path: Path) -> type[Launch]:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    Launch.folder = tmp_path
    return Launch


class Launch:
    """One call of the launcher."""

    folder: Path

    def __init__(self, *arguments: str, **variables: str) -> None:
        log = self.folder / "log.txt"
        log.unlink(missing_ok=True)
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "LOG": str(log),
            "ENTRENAR_TRACE_DIR": str(self.folder / "a b"),
            **variables,
        }
        command = [str(LAUNCH), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=50
        )
        self.code = done.returncode
        self.log = sorted(log.read_text(encoding="utf-8").splitlines()) if log.exists() else []
        pids = self.folder / "log.txt.pids"
        self.pids = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []


def test_an_agent_a_node(launch: type[Launch]) -> None:
    """Each agent has its share of the workers, the first node's rendezvous and the trace folder."""
    done = launch("4", "t.py", "--x", "1 2", NODES="localhost localhost", PORT="1234")
    assert done.code == 0
    assert len(done.log) == 2
    for line in done.log:
        assert line.startswith(f"{launch.folder / 'a b'} --nnodes=2 --nproc-per-node=2 ")
        assert "--rdzv-backend=c10d" in line
        assert "--rdzv-endpoint=127.0.0.1:1234" in line
        assert line.endswith(" t.py --x 1 2")
    assert len({line.partition("--rdzv-id=")[2].split()[0] for line in done.log}) == 1


@pytest.mark.parametrize(("world_size", "shape"), [("1", (1, 1)), ("3", (3, 1)), ("4", (2, 2))])
def test_nodes_divide_the_workers(
    launch: type[Launch], world_size: str, shape: tuple[int, int]
) -> None:
    """The number of nodes divides the number of workers: one worker needs one agent."""
    done = launch(world_size, "t.py", NODES="localhost localhost localhost")
    assert len(done.log) == shape[0]
    assert all(f"--nnodes={shape[0]} --nproc-per-node={shape[1]} " in line for line in done.log)


def test_other_machines(launch: type[Launch]) -> None:
    """The harness's variables are passed in the ssh command, as ssh doesn't forward them."""
    done = launch("2", "t.py", "1 2", NODES="node-a localhost")
    agents = [line for line in done.log if not line.startswith("ssh")]
    assert [line for line in done.log if line.startswith("ssh")] == [
        "ssh -tt -o BatchMode=yes node-a"
    ]
    assert len(agents) == 2
    assert all(line.startswith(f"{launch.folder / 'a b'} --nnodes=2") for line in agents)
    assert all("--rdzv-endpoint=node-a:29500" in line for line in agents)
    assert all(line.endswith(" t.py 1 2") for line in agents)


def test_slurm(launch: type[Launch]) -> None:
    """One srun on the nodes of the job starts all agents."""
    done = launch("4", "t.py", SLURM_JOB_NODELIST="n[1-3]")
    assert done.code == 0
    agent, srun = done.log
    assert srun == "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1"
    assert "--nnodes=2 --nproc-per-node=2" in agent
    assert "--rdzv-endpoint=a:29500" in agent


def test_one_that_fails_ends_all(launch: type[Launch]) -> None:
    """If one agent fails the others are ended, as they would wait; its exit code is returned."""
    done = launch("4", "fail", NODES="localhost localhost localhost localhost")
    assert done.code == 7
    _assert_gone(done.pids)
    assert launch("2", "t.py").code != 0  # NODES is not set


def test_an_agent_being_started_is_ended_too(launch: type[Launch]) -> None:
    """A launcher that is ended while it starts a child starts no other, and leaves none behind.

    The stand-in for `sh` ignores signals, as a child does before it has reset the launcher's traps.
    It tells the launcher to end, and takes its time.
    """
    shell = launch.folder / "bin" / "sh"
    shell.write_text(
        '#!/usr/bin/env bash\ntrap : TERM; echo "$$" >> "$LOG.pids"; kill "$PPID"; sleep 0.3\n'
        'trap - TERM; exec /bin/sh "$@"\n',
        encoding="utf-8",
    )
    shell.chmod(0o755)
    done = launch("2", "wait", NODES="localhost localhost")
    assert done.code == 1
    assert len(set(done.pids)) == 1
    _assert_gone(done.pids)


def _assert_gone(pids: list[int]) -> None:
    for pid in pids:
        deadline = time.monotonic() + 10.0
        while _is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} was left behind"
            time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, and only waits for its parent to ask how
