"""Observation without a line in the script: what the harness sets, and what ranks look for.

`startup/sitecustomize.py` waits for torch, `beginning` sets hooks, `follower` finds out what the
script trains, and then drives an Observer or a Watch. This module imports nothing heavy: launchers
import it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

SETTINGS = "ENTRENAR_AUTO"  # how to observe, as JSON; nothing is observed without it
STARTUP = Path(__file__).with_name("startup")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings by which a script without a line is observed.

    - `steps`: a process ends after this many optimizer steps; None for no end.
    - `every`: steps between two looks of a watch, which records nothing; None for a record.
    - `contract`: its clauses are watched; None for all clauses.
    - `seed`: of what the script doesn't seed itself; None to leave that as it is.
    - `follows`: the script is observed without a line; else what its line can't see is heard.
    """

    steps: int | None = None
    every: int | None = None
    contract: str | None = None
    seed: int | None = None
    follows: bool = True

    def variables(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables that make Python observe scripts with these settings."""
        before = environment.get("PYTHONPATH")
        paths = [str(STARTUP), *([before] if before else [])]
        return {SETTINGS: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(paths)}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Return the settings in `environment`, as `variables` put them there."""
        return cls(**json.loads(environment[SETTINGS]))
