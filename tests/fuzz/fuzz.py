"""Coverage-guided fuzzing: `python -m tests.fuzz.fuzz [TARGET ...] --seconds 60`.

Each target runs in its own process, from the seeds of `corpus`. A finding is printed with its
traceback and kept in the working folder as crash-...; `--input FILE TARGET` tries it again. Needs
atheris (`pip install '.[fuzz]'`, Python 3.11). The tests run the same targets without it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["entrenar_py"]):
    from tests.fuzz.targets import TARGETS

SECONDS = 60
# torch alone takes a third of this; inputs must not take the rest.
RSS_MIB_MAX = 1024
INPUT_SECONDS_MAX, INPUT_BYTES_MAX = 10, 2**16


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target and exit the process, with 0 if nothing was found."""
    from tests.fuzz import corpus

    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(corpus.seeds()[name]):
            Path(folder, str(number)).write_bytes(seed)
        limits = {
            "max_total_time": seconds,
            "rss_limit_mb": RSS_MIB_MAX,
            "timeout": INPUT_SECONDS_MAX,
            "max_len": INPUT_BYTES_MAX,
            "print_final_stats": 1,
            "verbosity": 0,
        }
        flags = [f"-{flag}={value}" for flag, value in limits.items()]
        atheris.Setup([sys.argv[0], *flags, folder], TARGETS[name])
        atheris.Fuzz()


def main() -> int:
    """Fuzz the targets on the command line, all by default. Return 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.fuzz")
    parser.add_argument("target", nargs="*", choices=[*TARGETS, []], help="all, if none is given")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each target")
    parser.add_argument("--input", type=Path, metavar="FILE", help="try this one input")
    parser.add_argument("--alone", action="store_true", help="in this process, one target")
    options = parser.parse_args()
    if options.input is not None:
        TARGETS[options.target[0]](options.input.read_bytes())
        return 0
    if options.alone:
        fuzz(options.target[0], options.seconds)
    found = []
    for name in options.target or TARGETS:
        print(f"--- {name}", flush=True)
        again = [sys.executable, "-m", "tests.fuzz.fuzz", name, "--alone"]
        done = subprocess.run([*again, "--seconds", str(options.seconds)], check=False)
        found += [name] if done.returncode else []
    print(f"found something: {', '.join(found)}" if found else "nothing was found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
