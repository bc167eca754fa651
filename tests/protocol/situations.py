"""How far a star has come when a test begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrenar_py.protocol.messages import Computed, TreeNode
from entrenar_py.protocol.phases import PeerPhase, Stage
from tests.protocol.star import Link, Star, Station, run_of


def node(step: int = 0, level: int = 2, index: int = 0, block: int = 0) -> TreeNode:
    """A node of a tree over four shards; the root, unless said otherwise."""
    return TreeNode(step=step, round=0, block=block, level=level, index=index, loss=1.0, weight=4.0)


def computed(*shards: int, step: int = 0) -> Computed:
    """Return the message that announces the nodes of `shards`."""
    return Computed(step=step, shards=shards)


def link_of(station: Station) -> Link:
    """The connection of a worker that has one."""
    assert station.link is not None
    return station.link


def reach(phase: PeerPhase, **changes: Any) -> tuple[Star, Link]:
    """A star and a worker's link in it, once that worker stands in `phase`.

    It is rank 2, and came in the first step, when ranks 0 and 1 were computing.
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
    """A star and the link of its only worker, which has all shards to compute."""
    star = Star(run_of(**changes))
    station = star.arrive()
    star.until(lambda: bool(station.jobs))
    return star, link_of(station)
