"""The keys of a configuration and their meanings. `config` reads them, the docs show them."""

from __future__ import annotations

from collections.abc import Mapping

from entrenar_py.shared.scenario import Scenario

LISTEN = "127.0.0.1:7411"
TOPOLOGIES = ("star", "mesh")
SIZED = ("mlp", "vectors")  # workloads that `width` makes larger

# Scenario fields that a service does not use. It injects nothing, has no planned stops, and runs on
# the backends of its workers.
_NOT_HERE = ("system", "backends", "faults", "stops", "repeat", "detail", "mutant", "options")
TRAINING = tuple(name for name in Scenario.__dataclass_fields__ if name not in _NOT_HERE)
REQUIRED = ("workload", "world_size", "seed")

# Key -> (type, default, meaning). The docs show this table.
SERVICE: Mapping[str, tuple[str, str, str]] = {
    "topology": (
        *("`star` or `mesh`", "`star`"),
        "where gradients go: all to the coordinator, or from worker to worker",
    ),
    "listen": ("host:port", f"`{LISTEN}`", "where workers connect; port 0 is any free one"),
    "secret_file": ("path", "required", "its bytes, less white space at both ends, are the secret"),
    "tls": ("mapping", "nothing is encrypted", "connections over TLS 1.3, and no others"),
    "wait_for": ("whole number >= 1", "`1`", "workers that must be there before the first step"),
    "audit_share": (
        *("number from 0 to 1", "`0`"),
        "share of each step's shards that a second worker computes, too, at least one if not 0",
    ),
    "updates": (
        *("`workers` or `server`", "`workers`"),
        "who makes the steps: every worker, or the server, which then sends the new weights",
    ),
    "timing": ("mapping", "below", "how long either end waits"),
    "checkpoint": ("mapping", "none is written", "the state, to go on from with `--resume`"),
    "metrics": ("path", "none are written", "one JSON object a step"),
    "ledger": ("path", "none is written", "the trace of the run, a chained line an event"),
}
CHECKPOINT: Mapping[str, tuple[str, str, str]] = {
    "path": ("path", "required", "the file; it is replaced as a whole or not at all"),
    "every_steps": ("whole number >= 1", "required", "steps from one save to the next"),
}
TLS: Mapping[str, tuple[str, str, str]] = {
    "cert": ("path", "required", "the coordinator's certificate, PEM; workers check its name"),
    "key": ("path", "required", "its private key, PEM, without a passphrase"),
    "ca": ("path", "none is asked for", "the signer of the certificates that workers must show"),
}
TIMING: Mapping[str, str] = {
    "heartbeat_s": "time between two signs of life of either end",
    "dead_after_s": "how long either end may be silent before it is given up",
    "hello_s": "how long a new connection may take to prove the secret",
    "gather_s": "how long the run waits for enough workers before it is given up",
}
