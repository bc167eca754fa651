"""Check a call by its options and the ids of its contracts, before the heavy imports."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from entrenar_py.check import contract
from entrenar_py.check.contract import Contract, bindings, records
from entrenar_py.check.project.command_line import PROG, per_contract
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import ContractError, UsageError
from entrenar_py.shared.systems import require_trainer

_UNKNOWN = contract.Vocabulary(checks=None, mutants=lambda: None)


def require_possible(options: argparse.Namespace) -> None:
    """Raise UsageError for an unknown system, backend, contract or id.

    An invalid contract is reported later, with all its problems at once. A contract from a pipe is
    not read here, as it can be read only once.
    """
    require_trainer(options.system, options.backend)
    contracts = []
    for own in each_contract(options):
        path = package_data.contract_path(own.contract)
        if not all(file.is_file() for file in (path, *own.bind)):
            return
        try:
            contracts.append(contract.load(path, vocabulary=_UNKNOWN, bind=own.bind))
        except ContractError:
            return
    require_ids(options, contracts)


def require_ids(options: argparse.Namespace, contracts: Sequence[Contract]) -> dict[str, None]:
    """Return the ids in all contracts; raise UsageError if an id of the options is in none."""
    ids = {name: None for loaded in contracts for name in records.ids_of(loaded)}
    where = contracts[0].name if len(contracts) == 1 else "the contracts"
    records.require_ids(options.only, ids, where, field="only")
    records.require_ids(options.exclude, ids, where)
    return ids


def each_contract(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the options of each contract, with its own bindings.

    Raises UsageError if there is no contract, and if several would read bindings from one pipe.
    """
    if not options.contract:
        names = ", ".join(path.name for path in package_data.shipped_contracts())
        raise UsageError(
            f"--contract FILE is missing; shipped are {names}. No configuration was found either: "
            f"{PROG} init writes one"
        )
    calls = per_contract(options)
    for path in options.bind if len(calls) > 1 else ():
        if path.is_fifo():
            raise UsageError(
                f"--bind {path}: is a pipe, which can be read once, and {len(calls)} contracts "
                "need it; give a file",
                field="bind",
            )
    for own in calls:
        own.bind = bindings.for_contract(options.bind, own.contract, options.contract)
    return calls


def names_no_contract(options: argparse.Namespace) -> bool:
    """Return whether a command is checked by the contracts that are for any script."""
    return "contract" not in (*options.typed, *options.used)
