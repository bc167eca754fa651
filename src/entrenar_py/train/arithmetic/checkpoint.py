"""Checkpoint files: written whole or not at all, and refused when damaged.

A file is one ASCII line (magic, version, BLAKE3 of the rest) and a safetensors payload with
the progress as JSON in its metadata. It is written to a temporary file in the same folder, synced,
and renamed.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from entrenar_py.shared.errors import CheckpointError
from entrenar_py.shared.scenario import ANY_SIZE, plan_record
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.train.arithmetic import optimizer, sharding
from entrenar_py.train.arithmetic.tensors import Array, TensorSpec

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run between two steps: the next sample, and the schedule's step."""

    position: sharding.Position
    schedule_step: int


_PROGRESS = struct.Struct("<3Q")


def state_bytes(specs: Sequence[TensorSpec], kind: str) -> int:
    """Return the size in bytes of a state with tensors `specs` and an optimizer of `kind`."""
    return _PROGRESS.size + 4 * sum(prod(shape) for _, shape in _parts(specs, kind))


def dump_state(
    specs: Sequence[TensorSpec],
    kind: str,
    progress: Progress,
    tensors: Mapping[str, Array],
    moments: optimizer.State,
) -> bytearray:
    """Return the state as little-endian bytes. Every array is copied once.

    First come three uint64 (`progress`), then as float32 the `tensors`, in the order of `specs`,
    and the `moments`.
    """
    data = bytearray(state_bytes(specs, kind))
    stands = (progress.position.epoch, progress.position.offset, progress.schedule_step)
    _PROGRESS.pack_into(data, 0, *stands)
    everything = {**tensors, **{_in_state(name): vector for name, vector in moments.items()}}
    for name, part in _views(specs, kind, data):
        part[...] = everything[name]
    return data


def progress_of(data: Buffer) -> Progress:
    """Return the progress at the beginning of `data`, the bytes of a state."""
    epoch, offset, schedule_step = _PROGRESS.unpack_from(data)
    return Progress(position=sharding.Position(epoch, offset), schedule_step=schedule_step)


def load_state(
    specs: Sequence[TensorSpec], kind: str, data: Buffer
) -> tuple[Progress, dict[str, Array], optimizer.State]:
    """Return copies of the progress, the tensors and the moments in a state.

    Raises ValueError if the size of `data` is not exactly `state_bytes`.
    """
    if len(data) != state_bytes(specs, kind):
        raise ValueError(f"a state of {len(data)} bytes: expected {state_bytes(specs, kind)} bytes")
    parts = {name: part.astype(np.float32) for name, part in _views(specs, kind, data)}
    moments = {name: parts[_in_state(name)] for name in optimizer.STATE[kind]}
    return progress_of(data), {spec.name: parts[spec.name] for spec in specs}, moments


def _views(specs: Sequence[TensorSpec], kind: str, data: Buffer) -> Iterator[tuple[str, Array]]:
    """Yield each part of a state: its name, and a view of `data`."""
    start = _PROGRESS.size
    for name, shape in _parts(specs, kind):
        yield name, np.frombuffer(data, "<f4", prod(shape), start).reshape(shape)
        start += 4 * prod(shape)


def _parts(specs: Sequence[TensorSpec], kind: str) -> list[tuple[str, tuple[int, ...]]]:
    num_trainable = sum(prod(spec.shape) for spec in specs if spec.role == "trainable")
    state = optimizer.initial_shapes(kind, num_trainable)
    return [
        *((spec.name, spec.shape) for spec in specs),
        *((_in_state(name), shape) for name, shape in state.items()),
    ]


def _in_state(name: str) -> str:
    """Return the name of an optimizer vector in a state; tensors never have such a name."""
    return f"optimizer/{name}"


MAGIC = b"entrenar-checkpoint 1 "
_ANY_VERSION = re.compile(rb"entrenar-checkpoint (\d{1,9}) ")
Arrays = Mapping[str, NDArray[Any]]
_ADVICE = "use an earlier checkpoint"
# Room in the file for everything except the tensors: their names, the plan, the progress.
_DESCRIPTION_BYTES_MAX = 2**24


def save(path: Path, arrays: Arrays, progress: Mapping[str, Any]) -> None:
    """Write `arrays` and `progress` to `path`. A crash at any point leaves the old file intact.

    Raises OSError if the file can't be written, for example to a full disk. The old file then stays
    intact, too, and the partial new file is removed.
    """
    # safetensors ignores strides: a transposed array would come back with wrong values.
    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    payload = safetensors.save(in_order, {"progress": json.dumps(progress)})
    header = MAGIC + blake3(payload).hexdigest().encode() + b"\n"
    partial = partial_of(path)
    try:
        handle = files.open_to_write(partial, flags=os.O_TRUNC, mode=0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    files.sync_folder(path.parent)


def partial_of(path: Path) -> Path:
    """Return the temporary file of a checkpoint at `path`, in the same folder."""
    return path.with_name(path.name + ".partial")


def load(
    path: Path, *, bytes_max: int | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays and the progress that `save` wrote.

    Raises CheckpointError if the file is missing, not a checkpoint, truncated, changed, or larger
    than `bytes_max` (None sets no limit).
    """
    try:
        with files.open_file(path, bytes_max=bytes_max) as file:
            content = file.read()
    except OSError as error:
        problem = f"can't be read ({error.strerror}); give a checkpoint that can be read"
        raise CheckpointError(f"checkpoint {path}: {problem}") from error
    header, _, payload = content.partition(b"\n")
    if not header.startswith(MAGIC):
        raise CheckpointError(f"checkpoint {path}: {_foreign(header)}")
    if header[len(MAGIC) :] != blake3(payload).hexdigest().encode():
        raise CheckpointError(
            f"checkpoint {path}: its BLAKE3 digest does not match its content: the file is "
            f"truncated or was changed; {_ADVICE}"
        )
    try:
        return dict(safetensors.load(payload)), _progress(payload)
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its content is not a checkpoint's ({error!r}); {_ADVICE}"
        ) from error


def _foreign(header: bytes) -> str:
    """Return what is wrong with the first line of a file that doesn't begin with MAGIC."""
    versioned = _ANY_VERSION.match(header)
    if versioned is None:
        return f"its first line is not a checkpoint's; {_ADVICE}"
    return (
        f"version {int(versioned[1])}: this release reads version {int(MAGIC.split()[1])}; go on "
        f"with the release that wrote it, or {_ADVICE}"
    )


def _progress(payload: bytes) -> dict[str, Any]:
    # safetensors.numpy.load gives no metadata; the format puts it in a length-prefixed JSON header.
    length = int.from_bytes(payload[:8], "little")
    header = json_text.load(payload[8 : 8 + length])
    return dict(json_text.load(header["__metadata__"]["progress"]))


def as_arrays(**groups: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Return `groups` as one flat mapping from `group/name` to array."""
    return {
        f"{group}/{name}": array for group, part in groups.items() for name, array in part.items()
    }


def group_of(arrays: Arrays, group: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of one group of `as_arrays`, by name."""
    prefix = f"{group}/"
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


# --- contents that fit a run: a valid digest does not prove that they do -------------------------


def bytes_max(expected: Arrays) -> int:
    """Return the largest size, in bytes, of a checkpoint file with arrays like `expected`."""
    return sum(array.nbytes for array in expected.values()) + _DESCRIPTION_BYTES_MAX


def require_own(path: Path, progress: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint at `path` belongs to a plan different from `plan`.

    Earlier releases stored a scenario. Only a trainer with the same bits for any number of workers
    may have had a different number. The message names the first difference, which may be an
    option of the plan.
    """
    noted = progress.get("plan")
    if noted is None:
        noted = plan_record(progress.get("scenario"))
    theirs, ours = _fields(noted if isinstance(noted, Mapping) else {}), _fields(plan)
    free = ("world_size",) if plan.get("trainer") in ANY_SIZE else ()
    for name in (*ours, *theirs):
        if name != free and theirs.get(name) != ours.get(name):
            raise CheckpointError(
                f"checkpoint {path}: it was saved by a run with {name[-1]}={theirs.get(name)!r}, "
                f"but this run has {name[-1]}={ours.get(name)!r}; continue with the setting of "
                "that run, or give another path"
            )


def _fields(plan: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the fields and options of a plan, by their key paths."""
    options = plan.get("options")
    options = options if isinstance(options, Mapping) else {}
    return {
        **{(name,): value for name, value in plan.items() if name != "options"},
        **{("options", name): value for name, value in options.items()},
    }


def require_fitting(
    path: Path,
    arrays: Arrays,
    progress: Mapping[str, Any],
    *,
    expected: Arrays,
    limits: Mapping[str, int],
) -> None:
    """Raise CheckpointError if the content of the file at `path` doesn't fit the run.

    `arrays` must have the names, shapes and dtypes of `expected` and be finite. For each key of
    `limits`, `progress` must hold a whole number from 0 to the limit.
    """
    for name, largest in limits.items():
        value = progress.get(name)
        if type(value) is not int or not 0 <= value <= largest:
            raise CheckpointError(
                f"checkpoint {path}: {name}={reprlib.repr(value)}: this run has 0 to {largest}; "
                f"{_ADVICE}"
            )
    for name in sorted(expected.keys() ^ arrays.keys()):
        problem = "is missing" if name in expected else "is not in this run's model"
        raise CheckpointError(f"checkpoint {path}: tensor {name} {problem}; {_ADVICE}")
    for name, model in expected.items():
        array = arrays[name]
        if (array.shape, array.dtype) != (model.shape, model.dtype):
            raise CheckpointError(
                f"checkpoint {path}: tensor {name} is {array.dtype} {list(array.shape)}, but "
                f"this run's is {model.dtype} {list(model.shape)}; {_ADVICE}"
            )
        if not np.isfinite(array).all():
            raise CheckpointError(f"checkpoint {path}: tensor {name} is not finite; {_ADVICE}")
