"""Cuts a model of transformers into stages: each rank keeps some of its blocks.

The model's own forward pass runs in each stage. It leaves out the blocks of others, takes the
hidden states that came in at the first block of its own, and ends after the last one of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.stages.stage_model import Reached, Skipped, hidden_of


class Ends:
    """What a model has before and after its blocks, found out by running it on `tokens`.

    `before` and `after` are sets of parameters. `dtypes` has the format of each block's output, and
    `width` is the size of its last dim.
    """

    def __init__(self, module: nn.Module, blocks: nn.ModuleList, tokens: Tensor) -> None:
        self.before, self.after = set[nn.Parameter](), set[nn.Parameter]()
        self.dtypes: list[torch.dtype] = []
        self.width = 0
        self.returns_tuples = False  # True if blocks do
        self._found = self.before
        inside = {layer for block in blocks for layer in block.modules()}
        hooks = [
            layer.register_forward_pre_hook(self._note)
            for layer in module.modules()
            if layer not in inside and next(layer.parameters(recurse=False), None) is not None
        ]
        hooks += [block.register_forward_hook(self._passed) for block in blocks]
        try:
            module(input_ids=tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        if len(self.dtypes) != len(blocks):
            raise UsageError(
                f"strategy=pipeline_parallel: {type(module).__name__} does not run its "
                f"{len(blocks)} blocks once each; use ddp, ddp_canonical or fsdp"
            )

    def _note(self, layer: nn.Module, _: object) -> None:
        self._found.update(layer.parameters(recurse=False))

    def _passed(self, _: nn.Module, __: object, output: Any) -> None:
        hidden = hidden_of(output)
        self.returns_tuples = isinstance(output, tuple)
        self.dtypes.append(hidden.dtype)
        self.width = hidden.shape[-1]
        self._found = self.after


class Stage(nn.Module):
    """The blocks `own` of a model whose forward pass without a head is `decoder`.

    Called with tokens int64 [n, t] in the first stage, with hidden states [n, t, d] in others.
    """

    def __init__(
        self, decoder: nn.Module, blocks: nn.ModuleList, own: range, *, returns_tuples: bool
    ) -> None:
        super().__init__()
        self._decoder, self._is_first = decoder, own.start == 0
        self._embedding_width = cast("Any", decoder).get_input_embeddings().weight.shape[1]
        self._is_last = own.stop == len(blocks)
        self._received: Tensor | None = None
        for index, block in enumerate(blocks):
            if index not in own:
                blocks[index] = Skipped(block, returns_tuple=returns_tuples)
        if not self._is_first:
            blocks[own.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self._is_last:
            blocks[own.stop - 1].register_forward_hook(_leave)

    def forward(self, x: Tensor, **named: Any) -> Tensor:
        """Return hidden states [n, t, d]: after this stage's blocks, or the model's last ones.

        `named` are a mask or positions, [n, t].
        """
        if self._is_first:
            named["input_ids"] = x
        else:  # what the model does before its blocks is without effect
            self._received = x
            named["inputs_embeds"] = x.new_zeros(*x.shape[:2], self._embedding_width)
        try:
            found = self._decoder(**named, use_cache=False)
        except Reached as reached:
            return reached.hidden
        finally:
            self._received = None
        hidden: Tensor = found.last_hidden_state
        return hidden

    def _enter(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (self._received, *inputs[1:]), named
        return inputs, {**named, "hidden_states": self._received}


def _leave(_: nn.Module, __: object, output: Any) -> None:
    raise Reached(hidden_of(output))
