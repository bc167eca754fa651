"""A script that compiles its model or its steps compiles the same when it is observed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

import entrenar_py
from entrenar_py.check.observing import FOLDER

STEPS = 2
ROWS = torch.linspace(-1, 1, 24).reshape(STEPS, 3, 4)


class Net(nn.Module):
    """A model with dropout and buffers that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row of `x`."""
        return cast(Tensor, self.second(self.drop(self.norm(self.first(x)))))


class Outer(nn.Module):
    """A module that calls the model, as DistributedDataParallel does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.inner(x))


Step = Callable[[Tensor], Any]
Compile = Callable[..., Any]


def _step(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(rows: Tensor) -> None:
        call(rows).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Compile], Step]] = {
    "model": lambda m, o, compiled: _step(compiled(m, fullgraph=True), o),
    "wrapper": lambda m, o, compiled: _step(compiled(Outer(m), fullgraph=True), o),
    "step": lambda m, o, compiled: compiled(_step(m, o)),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget compiled code, and that there was any."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def train(way: str, *, observed: str) -> list[Any]:
    """Return all that is compiled, and the weights, the buffers and the generator at the end.

    The model is `observed` "before" it is compiled, or "after" that.
    """
    graphs: list[list[str]] = []

    def backend(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(sorted(str(node.target) for node in graph.graph.nodes if node.op != "output"))
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    obs = entrenar_py.observe(model, optimizer) if observed == "before" else None
    step = WAYS[way](
        model, optimizer, lambda thing, **how: torch.compile(thing, backend=backend, **how)
    )
    obs = obs or entrenar_py.observe(model, optimizer)
    for rows in ROWS:
        step(rows)
    obs.close()
    held = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in held)
    counters = torch._dynamo.utils.counters
    return [
        hashlib.sha256(bits).hexdigest(),
        graphs,
        {**counters["frames"]},
        {**counters["graph_break"]},
    ]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("way", "observed"), [("model", "before"), ("wrapper", "before"), ("step", "after")]
)
def test_the_same_is_compiled(
    way: str, observed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs, breaks and bits are the same, and all steps are recorded with their gradients."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    watched = train(way, observed=observed)
    (file,) = tmp_path.glob("*.rank.jsonl")
    monkeypatch.delenv(FOLDER)
    plain = train(way, observed=observed)
    assert watched == plain
    events = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    assert [kinds.count(kind) for kind in ("shard", "update")] == [STEPS, STEPS]
