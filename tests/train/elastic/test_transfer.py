"""A state is received as it was sent."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.elastic.group import Started, connect
from entrenar_py.train.elastic.transfer import broadcast, load


def test_tensors_keep_their_strides() -> None:
    """A fused optimizer pairs elements by their places in memory. Two ranks, in threads."""
    image = torch.randn(2, 3, 4, 5)
    state = {
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).T,
        "with gaps": torch.randn(4, 6)[:, ::2],
        "transposed, with gaps": torch.randn(4, 6)[:, ::2].T,
        "expanded": torch.randn(1, 3).expand(2, 3),
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
            if not name.endswith(("with gaps", "expanded")):
                assert received[name].stride() == tensor.stride()
    assert received["others"] == [1, "a"]


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_an_optimizer_gets_the_bits_that_were_sent(kind: Any) -> None:
    """torch would round what is float32 to the weights' bfloat16. NAdam's weights would differ."""
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = kind([weight])

    def steps(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, number: int) -> None:
        for _ in range(number):
            weight.grad = weight.detach().sin()
            optimizer.step()

    steps(optimizer, weight, 3)
    copied = torch.nn.Parameter(weight.detach().clone())
    newcomer = kind([copied])
    load(newcomer, copy.deepcopy(optimizer.state_dict()))
    for name, sent in optimizer.state[weight].items():
        assert newcomer.state[copied][name].dtype == sent.dtype
        assert torch.equal(newcomer.state[copied][name], sent)
    steps(newcomer, copied, 3)
    steps(optimizer, weight, 3)
    assert torch.equal(copied, weight)


class Average(torch.nn.Module):
    """A module of a script, which keeps its tensor in the dtype that it began with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = torch.full((3,), 1 / 3).to(dtype)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the tensor in float32, in a list."""
        return {"values": [1, self.values.float()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        """Round it."""
        self.values = state["values"][1].to(self.values.dtype)


def test_a_module_that_rounds_is_refused() -> None:
    """The message names the tensor. What is no tensor may differ."""
    sent = Average(torch.float32).state_dict()
    load(Average(torch.float32), {"values": [2, sent["values"][1]]})
    with pytest.raises(UsageError, match=r"Average.load_state_dict changed .*\['values'\]\[1\]"):
        load(Average(torch.bfloat16), sent)
