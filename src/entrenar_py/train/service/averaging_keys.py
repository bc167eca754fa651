"""The keys of a configuration of `coordinator --wire v2`. `averaging_config` reads them, the docs
show them.
"""

from __future__ import annotations

from collections.abc import Mapping

from entrenar_py.train.service.config_keys import LISTEN
from entrenar_py.train.upstream.frames import FRAME_BYTES_MAX

REQUIRED = ("num_samples", "num_steps", "world_size")

# Key -> (type, default, meaning). The docs show this table.
KEYS: Mapping[str, tuple[str, str, str]] = {
    "num_samples": ("whole number >= 1", "required", "samples that each worker's data set has"),
    "num_steps": ("whole number >= 1", "required", "steps of the run"),
    "world_size": (
        *("whole number from 1 to 65536", "required"),
        "places for workers; `total_workers` in JoinAccepted",
    ),
    "num_shards": (
        *("whole number from `world_size` to 65536", "`world_size`"),
        "shards of a batch; how many there are decides the bits of the averages",
    ),
    "batch_size": ("whole number >= `num_shards`", "`num_samples`", "samples of a step"),
    "wait_for": ("whole number >= 1", "`world_size`", "workers before the first step"),
    "components": (
        *("list of numbers from 0 to 255", "a shard ends with GradientPayload"),
        "a shard ends with the last of its blocks and these NonBlock components",
    ),
    "late_joins": (
        *("`true` or `false`", "`true`"),
        "whether workers may join later, with the weights before the step of their first shard",
    ),
    "frame_bytes_max": (
        *("whole number from 4096 to 4294967295", f"`{FRAME_BYTES_MAX}`"),
        "the longest frame of a worker",
    ),
    "gradient_bytes_max": (
        *("whole number >= `frame_bytes_max`", "`frame_bytes_max`"),
        "what all parts of one shard's gradient may take",
    ),
    "listen": ("host:port", f"`{LISTEN}`", "where workers connect; port 0 is any free one"),
    "timing": ("mapping", "below", "how long the coordinator waits"),
    "metrics": ("path", "none are written", "one JSON object a step"),
    "ledger": ("path", "none is written", "a chained line an event, with the averages' digests"),
}
TIMING: Mapping[str, str] = {
    "hello_s": "how long a new connection may take to ask to join",
    "dead_after_s": "how long a worker that sends heartbeats may be silent while it has a shard",
    "shard_s": "how long a worker may take over a shard",
    "gather_s": "how long the run waits for enough workers before it is given up",
}
# Keys of other runs, and why there is nothing that they could mean here.
NOT_HERE: Mapping[str, str] = {
    "secret_file": "this wire has no authentication",
    "tls": "this wire has no encryption",
    "checkpoint": "the workers hold the weights",
    "workload": "the workers hold the model",
    "topology": "gradients go through the coordinator",
    "updates": "the workers make the steps",
    "audit_share": "this wire can't ask two workers for one shard",
    "seed": "the coordinator draws nothing",
}
