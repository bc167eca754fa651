"""The WebGPU adapters of this machine, `wgpu:0`, `wgpu:1` ..., and the only access to wgpu-py.

A driver is native code: an error in it ends the process without an exception. This module therefore
does two things before a process opens an adapter.

**Triton is loaded first, if it is installed.** Mesa's software driver contains one copy of LLVM,
and Triton, which torch's usual Linux build includes, contains another. If an adapter is open when
Triton is loaded, the process dies of SIGSEGV. The opposite order works. So every module gets
wgpu-py from `library`, and none imports it directly.

**A child process opens the adapter first**, in the same order, and runs a small kernel. If a signal
kills the child, the adapter is unavailable, and the signal is the reason. `python -m
entrenar_py.compute.adapters INDEX` is this child. It is a new interpreter, because a fork of a
process with threads proves nothing. It doesn't load torch, so it takes less than a second.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import BackendUnavailable

# The indices of the adapters that worked in a child of this process or of one of its ancestors.
# This is an environment variable, because workers are started by a fork server, a fork, torchrun or
# a new interpreter, and nothing else reaches all of them.
PROVEN = "ENTRENAR_ADAPTERS_PROVEN"
PROBE_S = 120.0  # a probe takes a second on an idle machine, and many times longer on a busy one
_OPEN = "open the adapter"
_KERNEL = """
@group(0) @binding(0) var<storage, read_write> numbers: array<u32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  numbers[id.x] = id.x;
}
"""


@dataclass(frozen=True)
class Probe:
    """The outcome of a child that opened an adapter: `doing` is its last action.

    `failure` says how the child died; "" if it survived.
    """

    doing: str = ""
    failure: str = ""

    @property
    def is_listed(self) -> bool:
        """True if the child survived listing the adapters, and began with the adapter itself."""
        return not self.failure or self.doing.startswith(_OPEN)

    def require_alive(self) -> None:
        """Raise BackendUnavailable if the child died."""
        if self.failure:
            raise BackendUnavailable(
                f"backend wgpu: a child process that tried to {self.doing or 'start'} "
                f"{self.failure}; update the driver, or use another backend"
            )


def found() -> list[Any]:
    """Return the adapters (wgpu.GPUAdapter), the best one first. The list may be empty.

    Raises BackendUnavailable as `library` does, and with wgpu-py's message if listing fails.
    """
    wgpu = library()
    try:
        return ranked(wgpu.gpu.enumerate_adapters_sync())
    except (wgpu.GPUError, RuntimeError) as error:
        raise BackendUnavailable(f"backend wgpu: {error}") from error


def library() -> Any:
    """Return the module wgpu, loaded after Triton.

    Raises BackendUnavailable if wgpu-py is not installed, or if a child that loads it and lists the
    adapters dies.
    """
    # Turns off Mesa's layer that reorders devices for a desktop. `ranked` sorts the adapters
    # instead, and without a desktop the layer prints "error: XDG_RUNTIME_DIR ..." four times.
    os.environ.setdefault("NODEVICE_SELECT", "1")
    try:
        if find_spec("wgpu") is None:
            raise ImportError("No module named 'wgpu'")
        if not (tried := probe(0)).is_listed:
            tried.require_alive()
        return _loaded()
    except (ImportError, OSError) as error:  # OSError: the native library does not load
        raise BackendUnavailable(
            f"backend wgpu: {error}; install it with {package_data.extra_advice('wgpu')}"
        ) from error


def native() -> Any:
    """Return wgpu-py's module for wgpu-native. Raises BackendUnavailable as `library` does."""
    library()
    return importlib.import_module("wgpu.backends.wgpu_native")


def _loaded() -> Any:
    triton_failure()
    return importlib.import_module("wgpu")


@cache
def triton_failure() -> str:
    """Return why Triton's import fails; "" if it succeeds or Triton is not installed."""
    try:
        if find_spec("triton") is not None:
            importlib.import_module("triton")
    except Exception as error:  # noqa: BLE001  (code of others that we do not need)
        return f"{type(error).__name__}: {error}"
    return ""


@cache
def probe(index: int) -> Probe:
    """Return the outcome of a child process that opens the adapter at `index`.

    If such a child already succeeded (`PROVEN`), none is started. A child that ends with an error,
    not by a signal, counts as alive: this process then gets the same error.
    """
    proven = os.environ.get(PROVEN, "").split()
    if str(index) in proven:
        return Probe()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "entrenar_py.compute.adapters", str(index)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is meant for this process, and isn't a crash of an adapter
    )
    with child:
        try:
            output, failure = child.communicate(timeout=PROBE_S)[0], ""
        except subprocess.TimeoutExpired:
            child.kill()
            output, failure = child.communicate()[0], f"did not answer in {PROBE_S:g} s"
    if child.returncode < 0 and not failure:
        failure = f"crashed: signal {_signal_name(-child.returncode)}"
    if failure:
        return Probe(
            output.decode(errors="replace").rpartition("\n")[0].rpartition("\n")[2], failure
        )
    os.environ[PROVEN] = " ".join([*proven, str(index)])
    return Probe()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def ranked(adapters: Sequence[Any]) -> list[Any]:
    """Return the adapters sorted: hardware before software, OpenGL last.

    OpenGL lacks most limits. An OpenGL adapter is either a duplicate of a Vulkan adapter, or the
    only adapter that an old driver has.
    """
    return sorted(adapters, key=lambda adapter: (is_opengl(adapter), is_software(adapter)))


def choose(adapters: Sequence[Any], index: int) -> Any:
    """Return the adapter at `index`. Raises BackendUnavailable, with a list of all, if missing."""
    if not adapters:
        raise BackendUnavailable(
            "backend wgpu: no adapter on this machine; install a Vulkan driver "
            "(Mesa's mesa-vulkan-drivers has one in software)"
        )
    if index >= len(adapters):
        there = ", ".join(f"wgpu:{n} {title(one)}" for n, one in enumerate(adapters))
        raise BackendUnavailable(f"backend wgpu:{index}: this machine has {there}")
    return adapters[index]


def title(adapter: Any) -> str:
    """Return the adapter's name for messages: `NVIDIA H100 (Vulkan)`."""
    return f"{adapter.info['device']} ({adapter.info['backend_type']})"


def is_software(adapter: Any) -> bool:
    """Return whether the adapter emulates a GPU on the CPU."""
    return bool(adapter.info["adapter_type"] == "CPU")


def is_opengl(adapter: Any) -> bool:
    """Return whether the adapter uses OpenGL."""
    return "OpenGL" in adapter.info["backend_type"]


def main(index: int) -> None:
    """Open the adapter at `index`, run a kernel, read the result; print each action before it."""
    print("load triton and wgpu", flush=True)
    wgpu = _loaded()
    print("list the adapters", flush=True)
    adapter = choose(ranked(wgpu.gpu.enumerate_adapters_sync()), index)
    print(_OPEN, title(adapter), flush=True)
    device = adapter.request_device_sync()
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    numbers = device.create_buffer(size=256, usage=usage)
    pipeline = device.create_compute_pipeline(
        layout="auto",
        compute={"module": device.create_shader_module(code=_KERNEL), "entry_point": "main"},
    )
    group = device.create_bind_group(
        layout=pipeline.get_bind_group_layout(0),
        entries=[{"binding": 0, "resource": {"buffer": numbers, "offset": 0, "size": 256}}],
    )
    encoder = device.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(1)
    compute.end()
    device.queue.submit([encoder.finish()])
    device.queue.read_buffer(numbers)


if __name__ == "__main__":
    main(int(sys.argv[1]))
