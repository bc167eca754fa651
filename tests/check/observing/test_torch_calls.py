"""Each function of torch that is replaced does what it did, and is heard."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest

from entrenar_py.check.observing import torch_calls
from entrenar_py.check.observing.torch_calls import TABLE, Patch

ARGUMENTS = {
    "torch.optim.optimizer.Optimizer.__init__": ["self", "params", "defaults"],
    "torch.autograd.backward": ["tensors", "grad_tensors", "retain_graph"],
    "torch.utils.data.dataloader.DataLoader.__init__": ["self", "dataset"],
    "torch.amp.grad_scaler.GradScaler.scale": ["self", "outputs"],
    "torch.amp.grad_scaler.GradScaler.update": ["self", "new_scale"],
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.scale": ["self", "outputs"],
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.update": ["self", "new_scale"],
    "torch.load": ["f"],
    "torch.save": ["obj", "f"],
    "numpy.save": ["file", "arr"],
    "numpy.savez": ["file", "args"],
    "numpy.savez_compressed": ["file", "args"],
    "pickle.dump": ["obj", "file"],
    "safetensors.torch.serialize_file": ["tensor_dict", "filename"],
    **{
        f"torch.distributed.checkpoint.{name}": ["state_dict"]
        for name in ("save", "async_save", "state_dict_saver.save", "state_dict_saver.async_save")
    },
    "torch.nn.utils.clip_grad_norm_": ["parameters", "max_norm", "norm_type"],
    "torch.nn.utils.clip_grad.clip_grad_norm_": ["parameters", "max_norm", "norm_type"],
    "torch.nn.utils.clip_grads_with_norm_": ["parameters", "max_norm"],
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.clip_grad_norm_": [
        *("self", "max_norm", "norm_type")
    ],
    "torch._dynamo.eval_frame.OptimizedModule.__call__": ["self", "args", "kwargs"],
}


def _path(patch: Patch) -> str:
    return ".".join(filter(None, (patch.module, patch.owner, patch.name)))


@pytest.mark.parametrize("patch", TABLE, ids=_path)
def test_every_row_fits_torch(patch: Patch) -> None:
    """The function exists in its own class, takes what the wrapper expects, and has a reason."""
    owner: Any = importlib.import_module(patch.module)
    owner = getattr(owner, patch.owner) if patch.owner else owner
    assert patch.name in vars(owner)
    taken = list(inspect.signature(vars(owner)[patch.name]).parameters)
    assert taken[: len(ARGUMENTS[_path(patch)])] == ARGUMENTS[_path(patch)]
    assert patch.reason


def test_a_module_that_is_not_imported_is_patched_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The finder is asked to call back for a module that isn't imported yet."""
    monkeypatch.setattr(torch_calls, "apply", lambda rows, listener: None)
    monkeypatch.setattr(torch_calls, "LoaderHooks", lambda begin: None)
    for name in ("pre", "post"):
        monkeypatch.setattr(torch_calls, f"register_optimizer_step_{name}_hook", lambda hook: None)
    for patch in TABLE:
        importlib.import_module(patch.module)
    monkeypatch.delitem(sys.modules, "torch.amp.grad_scaler")
    awaited: dict[str, Any] = {}
    torch_calls.install(_Nobody(), awaited)  # type: ignore[arg-type]
    assert list(awaited) == ["torch.amp.grad_scaler"]


def test_what_a_line_hears_is_patched_before_the_script_imports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`from torch.nn.utils import clip_grad_norm_` comes before the line. It is patched once."""
    patched: list[Patch] = []
    monkeypatch.setattr(torch_calls, "apply", lambda rows, listener: patched.extend(rows))
    monkeypatch.setattr(torch_calls.EARS, "was_applied", False)
    for row in torch_calls.LINE_TABLE:
        importlib.import_module(row.module)
    torch_calls.install_for_line({})
    names = [_path(row) for row in patched]
    assert "torch.nn.utils.clip_grad_norm_" in names
    assert "torch.utils.data.dataloader.DataLoader.__init__" in names
    assert torch_calls.heard() == ()


class _Nobody:
    """Follows nothing."""

    class settings:  # noqa: N801
        every = None

    before_step = step_ended = iterated = None

    @staticmethod
    def look_at_calls(wanted: bool) -> bool:
        """Do nothing."""
        return wanted
