"""Attention by cuDNN, beside torch in float64.

Without a GPU and nvidia-cudnn-frontend, a stand-in on the CPU takes the place of the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
import transformers
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.fx.experimental import _config as shape_config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.finetune.strategies import launch
from entrenar_py.train.finetune.strategies.strategy import Shards
from entrenar_py.train.model import attention, preparation
from tests.train.model import checkpoints

HEADS, SHARED, WIDTH = 8, 2, 64  # of queries; of keys and values


def tensors(rows: int, length: int, *, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Return query, key and value as a model's layers make them, [n, heads, t, width]."""
    draws = torch.Generator().manual_seed(length)
    shapes = [(rows, length, heads, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    return [
        torch.randn(shape, generator=draws).to(dtype=dtype, device=device).transpose(1, 2)
        for shape in shapes
    ]


class Layer(nn.Module):
    """What transformers' function reads of a layer."""

    is_causal, num_key_value_groups = True, HEADS // SHARED


@pytest.mark.parametrize(
    ("changed", "is_served"),
    [
        ({}, True),
        ({"query": torch.float32}, False),
        ({"value": torch.float32}, False),
        ({"width": 136}, False),
        ({"width": 60}, False),
        ({"length": 1}, False),
        ({"queries": 1}, False),
    ],
)
def test_what_is_served(changed: dict[str, Any], is_served: bool) -> None:
    """16-bit tensors with heads that cuDNN takes; not a cache that is longer than the query."""
    length, width = changed.get("length", 16), changed.get("width", 64)
    query, key, value = (
        torch.zeros(2, heads, length, width, dtype=changed.get(name, torch.bfloat16))
        for name, heads in (("query", HEADS), ("key", SHARED), ("value", SHARED))
    )
    query = query[:, :, : changed.get("queries", length)]
    assert attention.is_served(query, key, value) is is_served


def tiny(**given: Any) -> Any:
    """Return a Qwen3 of one block."""
    config = transformers.Qwen3Config(
        **{
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 64,
            "head_dim": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            **given,
        }
    )
    return transformers.Qwen3ForCausalLM(config)


def test_a_model_keeps_its_bits_on_a_cpu() -> None:
    """Only the given model is changed, and its configuration in a file is not."""
    model, other = tiny(), tiny()
    tokens = torch.arange(24).view(2, 12)
    before, written = model(input_ids=tokens).logits, model.config.to_dict()
    attention.use(model)
    assert torch.equal(model(input_ids=tokens).logits, before)
    assert model.config.to_dict() == written
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["eager", "not replaceable"])
def test_attention_of_another_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    if kind == "eager":
        model.set_attn_implementation("eager")
    else:
        monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda _: False)
    told = "eager" if kind == "eager" else "sdpa"
    with pytest.raises(UsageError, match=f"by transformers' {told}, which it can't replace"):
        attention.use(model)


@pytest.mark.parametrize("name", ["s_aux", "softcap"])
def test_an_input_that_would_be_ignored(name: str) -> None:
    query, key, value = tensors(2, 16, dtype=torch.bfloat16)
    named: dict[str, Any] = {name: torch.ones(1)}
    with pytest.raises(UsageError, match=f"Layer needs {name}, which it doesn't have"):
        attention._attention(Layer(), query, key, value, None, **named)


@pytest.mark.skipif(find_spec("cudnn") is not None, reason="nvidia-cudnn-frontend is installed")
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said at the start, and where a process computes without having asked."""
    told = "can't import nvidia-cudnn-frontend .*; pip install"
    with pytest.raises(UsageError, match=told):
        attention.require(tiny(), torch.device("cuda"))
    monkeypatch.setattr(attention, "_DEVICES", ("cpu",))
    model = tiny().bfloat16()
    attention.use(model)
    with pytest.raises(UsageError, match=told):
        model(input_ids=torch.arange(24).view(2, 12))


@pytest.mark.skipif(find_spec("cudnn") is not None, reason="nvidia-cudnn-frontend is installed")
def test_a_worker_that_refuses_refuses_again(small: Path, tmp_path: Path) -> None:
    """Also after a warm-up with an exception that nobody saw: it would compute other bits."""
    settings = checkpoints.settings(small, tmp_path / "model", checkpoints.qwen3())
    settings = replace(settings, method="lora", precision="bfloat16", attention="cudnn")
    workload = preparation.prepare(settings, tmp_path / "cache").workload()
    for step in (partial(workload.warm_up, num_samples=1), workload.move):
        with pytest.raises(UsageError, match="can't import nvidia-cudnn-frontend"):
            step(torch.device("cuda"))
    assert next(workload.module.parameters()).device.type == "cpu"


def test_ranks_are_asked_at_the_start(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever their strategy, they end if cuDNN can't compute, and say so if it doesn't."""
    asked = list[torch.device]()

    def require(_: nn.Module, device: torch.device) -> None:
        asked.append(device)
        if len(asked) > 1:
            raise UsageError("it can't")

    monkeypatch.setattr(attention, "require", require)
    monkeypatch.setattr(attention, "_num_calls", 0)
    settings = checkpoints.settings(small, tmp_path / "model", checkpoints.qwen3())
    settings = replace(settings, precision="bfloat16", attention="cudnn", strategy="fsdp")
    prepared = preparation.prepare(settings, tmp_path / "cache")
    place = torch.device("cuda:0")
    here = launch.World(rank=0, local_rank=0, size=1, on_host=1, device=place)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        shards = launch._shards(settings, prepared, here)
        assert asked == [here.device]
        with pytest.raises(UsageError, match="it can't"):
            launch._shards(settings, prepared, here)
    finally:
        dist.destroy_process_group()
    shards = Shards(shards.workload, shards.plan, torch.device("cpu"))
    step = shards.step(0, sharding.Position(0, 0))
    shards.workload.objective.float()
    for told in (True, False):  # once
        shards.loss(shards.workload.objective, step, 0)
        assert ("torch computed the attention" in capsys.readouterr().err) is told


@pytest.fixture
def served() -> None:
    """Skip unless cuDNN computes attention here."""
    if not torch.cuda.is_available() or find_spec("cudnn") is None:
        pytest.skip("no GPU, or no nvidia-cudnn-frontend")
    attention.require(tiny(), torch.device("cuda"))


@pytest.mark.cuda
@pytest.mark.usefixtures("served")
def test_heads_that_are_too_wide() -> None:
    with pytest.raises(UsageError, match=r"can't compute heads of width 520 with it"):
        attention.require(tiny(head_dim=520), torch.device("cuda"))


FORWARD = (
    "sdpa_fwd(Tensor q, Tensor k, Tensor v, float attn_scale, bool is_causal=False, "
    "bool return_lse=True) -> (Tensor, Tensor)"
)
BACKWARD = (
    "sdpa_bwd(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "float attn_scale, bool is_causal=False, bool is_deterministic=False) "
    "-> (Tensor, Tensor, Tensor)"
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Define the library's operations on the CPU, by torch's attention."""
    if find_spec("cudnn") is not None:
        pytest.skip("nvidia-cudnn-frontend is installed")
    monkeypatch.setattr(attention, "_DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "_library", lambda: None)
    library: Any = torch.library.Library("cudnn", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in (FORWARD, BACKWARD):
        library.define(schema)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, return_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        assert is_causal
        assert return_lse
        out = exact(q, k, v, scale=scale).transpose(1, 2)
        return torch.empty_like(q).copy_(out), q.new_zeros(*q.shape[:3], 1, dtype=torch.float32)

    def backward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _: Tensor,
        __: Tensor,
        scale: float,
        is_causal: bool,
        is_deterministic: bool,
    ) -> tuple[Tensor, ...]:
        assert is_causal
        assert is_deterministic
        # By hand: no derivatives are recorded below an operation.
        group = q.shape[1] // k.shape[1]
        keys, values = (one.double().repeat_interleave(group, 1) for one in (k, v))
        scores = scale * q.double() @ keys.mT
        shares = scores.masked_fill(~torch.ones_like(scores).bool().tril(), -torch.inf).softmax(-1)
        of_shares = gradient.double() @ values.mT
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
        found = (of_scores @ keys, of_scores.mT @ q.double(), shares.mT @ gradient.double())
        return tuple(
            torch.empty_like(one).copy_(
                other.reshape(len(one), one.shape[1], -1, *one.shape[2:]).sum(2)
            )
            for one, other in zip((q, k, v), found, strict=True)
        )

    def shapes(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)

    def shapes_of_gradients(_: Tensor, *given: Any, **__: object) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in given[:3])

    kinds = (("sdpa_fwd", forward, shapes), ("sdpa_bwd", backward, shapes_of_gradients))
    for name, function, fake in kinds:
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"cudnn::{name}", fake, lib=library)
    yield
    library._destroy()


def computed(function: Any, given: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradients."""
    leaves = [one.detach().requires_grad_() for one in given]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention._attention(Layer(), query, key, value, None)[0]


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out.transpose(1, 2)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("compiles", [False, True])
def test_how_the_library_is_called(compiles: bool) -> None:
    """The stand-in checks its arguments, and torch's compiler traces once for all lengths."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    function = ours
    if compiles:
        function = torch.compile(ours, dynamic=True, fullgraph=True, backend="aot_eager")
    config: Any = shape_config
    for rows, length in ((2, 48), (3, 200), (5, 80)):
        given = tensors(rows, length, dtype=torch.bfloat16)
        with config.patch(use_duck_shape=False):  # as for a model's blocks
            found = computed(function, given)
        wanted = computed(exact, [one.double() for one in given])
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).norm() < 0.02 * other.norm()
    assert counters["unique_graphs"] - before == compiles


@pytest.mark.usefixtures("stand_in")
def test_a_model_calls_it(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A warning says if it doesn't."""
    monkeypatch.setattr(attention, "_num_calls", 0)
    model, tokens = tiny().bfloat16(), torch.arange(24).view(2, 12)
    attention.use(model)
    model(input_ids=tokens, attention_mask=torch.tensor([[1] * 12, [0] * 4 + [1] * 8]))
    attention.warn_if_unused()
    assert (
        "attention: cudnn: torch computed the attention of the first rows"
        in capsys.readouterr().err
    )
    model(input_ids=tokens).logits.float().sum().backward()
    attention.warn_if_unused()
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("given", ["mask", "dropout", "to all", "float32", "position_bias", ""])
def test_the_rest_is_transformers_own(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuDNN doesn't compute has the bits of the function that this one replaces."""
    monkeypatch.setattr(attention, "_num_calls", 0)
    dtype = torch.float32 if given == "float32" else torch.bfloat16
    mask = torch.ones(2, 1, 16, 16).bool().tril() if given == "mask" else None
    inputs: tuple[Any, ...] = (Layer(), *tensors(2, 16, dtype=dtype), mask)
    inputs += (0.5 if given == "dropout" else 0.0, 0.2)
    named: dict[str, Any] = {"is_causal": False} if given == "to all" else {}
    if given == "position_bias":
        named[given] = torch.ones(1, HEADS, 16, 16, dtype=dtype)
    found = []
    for function in (attention._attention, sdpa_attention_forward):
        torch.manual_seed(0)
        found.append(function(*inputs, **named)[0])
    assert attention._num_calls == (not given)
    assert torch.equal(*found)


@pytest.mark.usefixtures("stand_in")
def test_products_in_another_precision() -> None:
    """Under autocast, float32 tensors are computed in 16 bits, as by torch's function."""
    given = tensors(2, 64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*given).dtype == torch.bfloat16


@pytest.mark.cuda
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("compiles", [False, True])
def test_is_attention(compiles: bool) -> None:
    """Also compiled once for all lengths, and the same bits at each call."""
    function = torch.compile(ours, dynamic=True) if compiles else ours
    for rows, length in ((2, 64), (3, 200), (1, 1000)):
        given = tensors(rows, length, dtype=torch.bfloat16, device="cuda")
        found = computed(function, given)
        wanted = computed(exact, [one.double() for one in given])
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).norm() < 0.01 * other.norm()
        for _ in range(5):
            again = computed(function, given)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.cuda
@pytest.mark.usefixtures("served")
def test_can_be_recorded() -> None:
    """A replay of recorded operations has the bits of the operations."""
    given = tensors(2, 256, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        found = computed(ours, given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        replayed = computed(ours, given)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, replayed, strict=True))
