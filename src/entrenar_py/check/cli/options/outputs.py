"""The files that a call writes: separate ones for each contract, none written over another."""

from __future__ import annotations

import argparse
from pathlib import Path

from entrenar_py.check.cli.options.parser import flag
from entrenar_py.shared.errors import UsageError

FILES = ("json", "junit", "sarif", "html")  # options that write a report to a file
_OUTPUTS = (*FILES, "trace_dir")
_CONTRACT = "{contract}"  # in the path of an output, replaced by the contract's name


def per_contract(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return a copy of the options for each contract, with its path and its own output files."""
    copies = []
    for contract in options.contract:
        own = argparse.Namespace(**vars(options))
        own.contract = contract
        for name in _OUTPUTS:
            path = getattr(options, name)
            if path is not None:
                setattr(own, name, Path(str(path).replace(_CONTRACT, _stem(contract))))
        copies.append(own)
    return copies


def require_distinct(options: argparse.Namespace) -> None:
    """Raise UsageError if an output would overwrite another output or a file that is read."""
    read = [(name, path) for name in ("contract", "bind") for path in getattr(options, name)]
    single = ("config", "replay", *_OUTPUTS)
    outputs = [(name, path) for name in single if (path := getattr(options, name)) is not None]
    by_path: dict[Path, str] = {}
    for name, path in (*read, *outputs):
        other = by_path.setdefault(Path(path).absolute(), name)
        if other != name and name in _OUTPUTS:
            message = f"{flag(other)} and {flag(name)} are both {path}; give two files"
            raise UsageError(message, field=name)
    _require_apart(options)


def _require_apart(options: argparse.Namespace) -> None:
    """Raise UsageError if one contract's report would overwrite another's."""
    if len(options.contract) < 2 or options.mode == "validate":  # it writes one report of all
        return
    stems = [_stem(contract) for contract in options.contract]
    for name in _OUTPUTS:
        path = getattr(options, name)
        if path is None:
            continue
        if _CONTRACT not in str(path):
            raise UsageError(
                f"{flag(name)} {path}: {len(stems)} contracts need a report each; give a path "
                f"with {_CONTRACT}, which is replaced by the contract's name",
                field=name,
            )
        if len(set(stems)) < len(stems):
            raise UsageError(
                f"{flag(name)} {path}: two contracts have the same name ({', '.join(stems)}); "
                "rename one, or check them one by one",
                field=name,
            )


def _stem(contract: str) -> str:
    return Path(contract).name.removesuffix(".yaml").removesuffix(".yml")
