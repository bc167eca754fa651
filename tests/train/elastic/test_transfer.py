"""A state is received as it was sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from entrenar_py.train.elastic.group import Started, connect
from entrenar_py.train.elastic.transfer import broadcast


def test_tensors_keep_their_strides() -> None:
    """A fused optimizer pairs elements by their places in memory. Two ranks, in threads."""
    image = torch.randn(2, 3, 4, 5)
    state = {
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).T,
        "with gaps": torch.randn(4, 6)[:, ::2],
        "a part": torch.randn(10)[3:],
        "bfloat16": torch.randn(3).bfloat16(),
        "a scalar": torch.tensor(7),
        "empty": torch.empty(0),
        "others": [1, "a"],
    }
    store = HashStore()

    def wait(started: Started) -> None:
        started.check()

    def rank(number: int) -> Any:
        cpu = torch.device("cpu")
        group = connect(
            store, cpu, rank=number, world_size=3, timeout_s=60, announce=lambda _: None
        )
        given = state if number == 1 else None
        return broadcast(given, group, source=1, wait=wait, keeps=number != 2)

    with ThreadPoolExecutor(3) as pool:
        received, sent, dropped = pool.map(rank, range(3))
    assert sent is state
    assert dropped is None
    assert received.keys() == state.keys()
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(received[name], tensor)
            assert received[name].dtype == tensor.dtype
            assert name == "with gaps" or received[name].stride() == tensor.stride()
    assert received["others"] == [1, "a"]
