"""Stars in the state in which a test begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrenar_py.train.wire.messages import PEER_MAY_SAY, Computed, PeerPhase, Stage, TreeNode
from tests.train.wire.star import Link, Star, Station, run_of

# The phases of workers' connections. Those that fetch files have tests of their own.
WORKERS_MAY_SAY = {
    phase: kinds for phase, kinds in PEER_MAY_SAY.items() if phase is not PeerPhase.FETCHING
}


def node(step: int = 0, level: int = 2, index: int = 0, block: int = 0) -> TreeNode:
    """Return a node of a tree over four shards, by default the root."""
    return TreeNode(step=step, round=0, block=block, level=level, index=index, loss=1.0, weight=4.0)


def computed(*shards: int, step: int = 0) -> Computed:
    """Return the message that announces the nodes of `shards`."""
    return Computed(step=step, shards=shards)


def link_of(station: Station) -> Link:
    """Return the connection of a connected worker."""
    assert station.link is not None
    return station.link


def reach(phase: PeerPhase, **changes: Any) -> tuple[Star, Link]:
    """Return a star, and the link of a worker that is in `phase`.

    The worker has rank 2. It connected during the first step, while ranks 0 and 1 were computing.
    """
    run = run_of(**{"num_steps": 3, **changes})
    star = Star(replace(run, awaited={run.first_step: (0, 1)}))
    star.arrive()
    star.arrive()
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    link = link_of(star.arrive())
    star.until(lambda: star.coordinator.peers[link.peer].phase is phase, first=-1)
    return star, link


def alone(**changes: Any) -> tuple[Star, Link]:
    """Return a star, and the link of its only worker, which has all shards to compute."""
    star = Star(run_of(**changes))
    station = star.arrive()
    star.until(lambda: bool(station.jobs))
    return star, link_of(station)
