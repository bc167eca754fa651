"""Devices are described by hand, or found on this machine."""

from __future__ import annotations

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.plan import devices
from entrenar_py.train.plan.devices import Device


def test_a_device_has_memory_and_perhaps_a_link() -> None:
    assert devices.described(
        ["rtx4090:24GB", "2 x wgpu-rx7900:20GiB:1Gbit", "cpu:1.5TB:25GB/s"]
    ) == [
        Device(name="rtx4090", kind="cuda", memory=24 * 10**9),
        Device(name="wgpu-rx7900", kind="wgpu", memory=20 * 2**30, bandwidth=125e6),
        Device(name="wgpu-rx7900", kind="wgpu", memory=20 * 2**30, bandwidth=125e6),
        Device(name="cpu", kind="cpu", memory=15 * 10**11, bandwidth=25e9),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rtx4090", "device 'rtx4090': use name:memory"),
        ("rtx4090:24", "memory '24': use a number with its unit"),
        ("rtx4090:0GB", "memory '0GB': use 1B to"),
        ("rtx4090:24GB:fast", "bandwidth 'fast': use a number with its unit"),
        ("rtx4090:24GB:0Gbit", "bandwidth '0Gbit': use a number with its unit"),
        ("0 x rtx4090:24GB", "device '0 x rtx4090:24GB': use 1 to 4096 of them"),
        ("a:1GB:1Gbit:x", "device 'a:1GB:1Gbit:x': use name:memory"),
    ],
)
def test_other_forms_are_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match="use ") as raised:
        devices.described([text])
    assert str(raised.value).startswith(told)


def test_this_machine_has_a_cpu_with_free_memory() -> None:
    cpu = devices.found()[0]
    assert cpu.kind == "cpu"
    assert cpu.memory is None or cpu.memory > 2**20
