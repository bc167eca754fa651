"""A network inside this machine: hosts (network namespaces), each linked to one switch.

A namespace lives as long as the process that holds it, which ends when its standard input is
closed. So nothing is left behind, however the tests end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

_CLONE_NEWNET = 0x40000000  # <sched.h>
_SUBNET = "10.77.0"
_SWITCH = "switch"


class Host:
    """One namespace, with `address` on the network and its link at the switch's `port_name`."""

    def __init__(self, address: str, port_name: str) -> None:
        self.address, self.port_name = address, port_name
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            _, said = self._holder.communicate()
            raise PermissionError(said.decode().strip())

    @property
    def pid(self) -> int:
        """The id of the process that holds the namespace."""
        return self._holder.pid

    def ip(self, *arguments: str) -> None:
        """Run `ip` in this namespace; PermissionError with its output if that fails."""
        command = ["nsenter", "--net", "--target", str(self.pid), "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def close(self) -> None:
        """End the namespace and all that is in it."""
        self._holder.communicate()


class Network:
    """Hosts by name, each with one link to a switch that is a host of its own."""

    def __init__(self, names: Sequence[str]) -> None:
        """PermissionError if this process may not create it, FileNotFoundError without tools."""
        self._stack = ExitStack()
        self.hosts: dict[str, Host] = {}
        try:
            self._switch = self._host("", "")
            self._switch.ip("link", "add", _SWITCH, "type", "bridge")
            self._switch.ip("link", "set", _SWITCH, "up")
            for number, name in enumerate(names, start=1):
                self.hosts[name] = self._plug(number)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """End all hosts."""
        self._stack.close()

    def unplug(self, name: str) -> None:
        """Set the link of host `name` down, which both ends of it notice."""
        self._switch.ip("link", "set", self.hosts[name].port_name, "down")

    def plug(self, name: str) -> None:
        """Set the link of host `name` up again."""
        self._switch.ip("link", "set", self.hosts[name].port_name, "up")

    def swallow(self, name: str, other: str) -> None:
        """Silently drop packets from host `name` to `other`; its own link stays up."""
        self.hosts[name].ip("route", "add", "blackhole", f"{self.hosts[other].address}/32")

    def pass_on(self, name: str, other: str) -> None:
        """Pass on packets from host `name` to `other` again."""
        self.hosts[name].ip("route", "del", "blackhole", f"{self.hosts[other].address}/32")

    def _host(self, address: str, port_name: str) -> Host:
        made = Host(address, port_name)
        self._stack.callback(made.close)
        return made

    def _plug(self, number: int) -> Host:
        host = self._host(f"{_SUBNET}.{number}", f"port{number}")
        here = ("netns", str(host.pid))
        self._switch.ip(
            *("link", "add", host.port_name, "type", "veth", "peer", "name", "eth0"), *here
        )
        self._switch.ip("link", "set", host.port_name, "master", _SWITCH, "up")
        host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            host.ip("link", "set", device, "up")
        return host


def missing() -> str | None:
    """Return why no network can be made here, or None. It tries to make one."""
    if sys.platform != "linux":
        return f"network namespaces are of Linux, this is {sys.platform}"
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (util-linux, iproute2)"
    try:
        Network(["alone"]).close()
    except PermissionError as error:
        return f"network namespaces need root: {error}"
    return None


def enter(pid: int) -> None:
    """Make all later sockets of this thread in the namespace of process `pid`."""
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to the namespace of process {pid}")
    finally:
        os.close(handle)
