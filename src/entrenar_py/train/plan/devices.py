"""The devices of a run (this machine's, or described by hand), and text forms of sizes and times.

A device is described as `name:memory[:bandwidth]`. Sizes and times are written as `23.6 MB` and
`0.19 s`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from entrenar_py.shared import scenario
from entrenar_py.shared.errors import UsageError

FORM = "name:memory[:bandwidth], such as rtx4090:24GB, 2 x h100:80GB:25GB/s or cpu:16GB:1Gbit"
_DEVICE = re.compile(
    r"(?:(?P<count>\d{1,4})\s*x\s+)?(?P<name>[^:]+):(?P<memory>[^:]+)(?::(?P<rate>[^:]+))?"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|B)(?:/s|ps)?")
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_COUNT_MAX = 4096
_MEMORY_MAX = 2**60


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device with `memory` bytes for workers, None if it reports none.

    `kind` is cpu, cuda or wgpu. `bandwidth` is the speed of its link to the other devices, in bytes
    per second, None if not given.
    """

    name: str
    kind: str
    memory: int | None
    bandwidth: float | None = None


def described(texts: Sequence[str]) -> list[Device]:
    """Return the devices that texts describe; `2 x ...` stands for two devices.

    A name that begins with cpu or wgpu has that kind; any other name stands for a CUDA GPU. Raises
    UsageError for a text that can't be parsed.
    """
    devices = list[Device]()
    for text in texts:
        match = _DEVICE.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"device {text!r}: use {FORM}")
        name, count = match["name"].strip(), int(match["count"] or 1)
        if not 1 <= count <= _COUNT_MAX:
            raise UsageError(f"device {text!r}: use 1 to {_COUNT_MAX} of them")
        rate = match["rate"]
        device = Device(
            name=name,
            kind=_kind(name),
            memory=bytes_of(match["memory"]),
            bandwidth=None if rate is None else bandwidth_of(rate),
        )
        devices += [device] * count
    return devices


def found() -> list[Device]:
    """Return the working hardware devices of this machine, as `entrenar doctor` finds them."""
    from entrenar_py.compute import machine

    devices = []
    for device in machine.found():
        if device.serves and not device.software:
            kind = scenario.backend_kind(device.name)
            name = f"{device.name} ({device.device})"
            memory = device.facts.get("free bytes")
            devices.append(Device(name=name, kind=kind, memory=memory))
    return devices


def of_backend(name: str) -> Device:
    """Return the device of this machine that a backend's name opens, with its free memory.

    The device is not tested. The process that computes on it opens it later.
    """
    from entrenar_py.compute import machine

    return Device(name=name, kind=scenario.backend_kind(name), memory=machine.free_bytes(name))


def bytes_of(text: str) -> int:
    """Return the number of bytes in a text such as `24GB` (10^9) or `24GiB` (2^30).

    Raises UsageError if the text can't be parsed, or if the number is too large.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"memory {text!r}: use a number with its unit, such as 24GB or 24GiB")
    unit = match[2].removesuffix("B")
    number = float(match[1]) * (_BINARY | _FACTORS)[unit]
    if not 1 <= number <= _MEMORY_MAX:
        raise UsageError(f"memory {text!r}: use 1B to {_MEMORY_MAX}B")
    return int(number)


def bandwidth_of(text: str) -> float:
    """Return the bytes per second in a text such as `10Gbit` or `25GB/s`.

    Raises UsageError if the text can't be parsed.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(
            f"bandwidth {text!r}: use a number with its unit, such as 10Gbit, 1Gbit/s or 25GB/s"
        )
    return float(match[1]) * _FACTORS[match[2]] / (8 if match[3] == "bit" else 1)


def _kind(name: str) -> str:
    return next((kind for kind in ("cpu", "wgpu") if name.lower().startswith(kind)), "cuda")


_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def size(num_bytes: float) -> str:
    """Return a number of bytes with three digits and a unit, in powers of 1000."""
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def short(num_bytes: float) -> str:
    """Return a number of bytes as `23.6M`, for a narrow column."""
    return size(num_bytes).replace(" ", "").removesuffix("B") or "0"


def seconds(number: float) -> str:
    """Return a time as text in `s` or `ms`, with at least two digits."""
    if number >= 1:
        return f"{_digits(number)} s"
    return f"{_digits(number * 1e3)} ms"


def _digits(number: float) -> str:
    places = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{places}f}"
