"""Observation of scripts without the line `observe`: its settings.

`startup/sitecustomize.py` waits for torch, and `beginning` sets hooks. `follower` finds out what
the script trains, and then drives an Observer or a Watch. This module imports nothing heavy, since
launchers import it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

SETTINGS = "ENTRENAR_AUTO"  # how to observe, as JSON; without this variable nothing is observed
STARTUP = Path(__file__).with_name("startup")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings with which a script without the line `observe` is observed.

    - `steps`: the process ends after this many optimizer steps; None for no limit.
    - `every`: the steps between two checks of a watch, which records nothing; None to record
      instead.
    - `contract`: only its clauses are watched; None for all clauses.
    - `seed`: the seed of generators that the script doesn't seed; None to leave them unseeded.
    - `follows`: whether the script is observed without the line. If False, only facts that the line
      can't observe are.
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
        """Return the settings that `variables` wrote to `environment`."""
        return cls(**json.loads(environment[SETTINGS]))
