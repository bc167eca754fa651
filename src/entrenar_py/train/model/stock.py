"""Reads an exported folder back by stock peft and transformers: the same logits, or an error.

A run's model is held in memory with settings of its own, such as the token that fills up rows. A
folder says less. So it is read again by the libraries alone, with their own classes and the files
of the folder, and both models compute two rows of unlike lengths. Weights that were not trained are
shared, not read again: a large model is held once. They are the checkpoint's, which has a digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.model import adapters, model_class, precision, quantised
from entrenar_py.train.model.modes import in_evaluation
from entrenar_py.train.model.settings import LAYER_PIPELINE, Settings

_LENGTHS = (7, 4)
# Of the logits' norm, in float32: both models do the same operations on the same weights, but
# matrix products may sum in another order where tensors are aligned in another way.
_ROUNDED = 1e-4


def set_padding(module: nn.Module, token: int) -> None:
    """Let the model take `token` for what fills up rows; classifiers look for it."""
    config = cast("Any", module).config
    config.pad_token_id = config.get_text_config().pad_token_id = token


def require_padding(settings: Settings, module: nn.Module, pad_token: int) -> None:
    """Raise UsageError if a classifier's scores depend on a padding token that no folder names.

    `module` is as config.json has it. Adapters are exported without a configuration, so stock peft
    takes the checkpoint's. Encoders don't look for the token, and pass.
    """
    noted = cast("Any", module).config.get_text_config().pad_token_id
    if settings.task != "classify" or not settings.adapts or noted == pad_token:
        return
    tokens, mask = _rows(module, pad_token)
    products = precision.of_products(settings)
    try:
        theirs = _logits(module, tokens, mask, products)
    except ValueError:  # more rows than one, and no token to look for
        theirs = None
    set_padding(module, pad_token)
    if theirs is not None and _is_close(_logits(module, tokens, mask, products), theirs, products):
        return
    raise UsageError(
        f"model={settings.model}: config.json has pad_token_id={noted}, and its tokenizer fills up "
        f"rows with token {pad_token}: stock peft, which reads that file, would score filled up "
        f"rows otherwise than this run; write pad_token_id: {pad_token} into config.json, or use "
        "method: full"
    )


def require_agreement(
    settings: Settings,
    module: nn.Module,
    tensors: Mapping[str, Array],
    *,
    pad_token: int,
    folder: Path,
) -> None:
    """Raise SystemFailure unless stock libraries read `module` with `tensors` in `folder`.

    A coordinator of stages has none of the weights below its adapters, and compares nothing.
    """
    if settings.adapts and settings.strategy == LAYER_PIPELINE:
        return
    with _at_read_back(folder):
        read = _adapted(settings, module, folder) if settings.adapts else _whole(settings, folder)
    products = precision.of_products(settings)
    _require_same(
        module, read, tensors=tensors, pad_token=pad_token, products=products, folder=folder
    )


def require_merged(settings: Settings, merged: nn.Module, *, pad_token: int, folder: Path) -> None:
    """Raise SystemFailure unless stock transformers read the model `merged` in `folder`."""
    with _at_read_back(folder):
        read = _whole(settings, folder)
    _require_same(
        merged, read, tensors={}, pad_token=pad_token, products=torch.float32, folder=folder
    )


@contextmanager
def _at_read_back(folder: Path) -> Iterator[None]:
    """Turn a failure of the stock libraries, which nobody asked for anything, into the system's."""
    try:
        yield
    except UsageError as error:
        raise SystemFailure(
            f"output {folder}: what was written there can't be read back by stock libraries: "
            f"{error}. The files are kept; report this, with the kind of model"
        ) from error


def _adapted(settings: Settings, module: Any, folder: Path) -> nn.Module:
    """Return the checkpoint's model with the adapters in `folder`, by stock peft.

    It shares the weights of `module`, the run's own model, that were not trained.
    """
    import peft

    kind, options = model_class.of(settings)
    trusts = settings.trust_remote_code
    with model_class.reading(folder, "adapters"), adapters.quiet():
        config = model_class.library().AutoConfig.from_pretrained(
            settings.model, local_files_only=True, trust_remote_code=trusts, **options
        )
        with torch.device("meta"):
            dtype = precision.of_checkpoint(settings)
            below = kind.from_config(config, dtype=dtype, trust_remote_code=trusts)
        _share(settings, module.get_base_model(), below)
        return cast("nn.Module", peft.PeftModel.from_pretrained(below, str(folder)))


def _whole(settings: Settings, folder: Path) -> nn.Module:
    """Return the model in `folder` by stock transformers; its files are mapped, not copied."""
    kind, _ = model_class.of(settings)
    with model_class.reading(folder, "model"):
        return cast(
            "nn.Module",
            kind.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
            ),
        )


def _share(settings: Settings, own: nn.Module, below: nn.Module) -> None:
    """Give `below`, on the meta device, the tensors of `own` without its adapters."""
    held: dict[str, Tensor] = {**dict(own.named_parameters(remove_duplicate=False))}
    held |= dict(own.named_buffers(remove_duplicate=False))
    plain = {_plain(name): tensor for name, tensor in held.items()}
    if settings.method == "qlora":
        for name, layer in list(quantised.layers(own)):
            below.set_submodule(_plain(name), layer)
        cast("Any", below).is_loaded_in_4bit = True
    for prefix, part in below.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.device.type == "meta":
                    tensors[key] = cast("Any", plain[f"{prefix}.{key}".lstrip(".")])


def _plain(name: str) -> str:
    """Return the name that a tensor or layer has without peft; of adapters, one that none has."""
    return ".".join(
        part for part in name.split(".") if part not in ("base_layer", "original_module")
    )


def _require_same(
    module: nn.Module,
    theirs: nn.Module,
    *,
    tensors: Mapping[str, Array],
    pad_token: int,
    products: torch.dtype,
    folder: Path,
) -> None:
    """Raise SystemFailure unless `theirs`, read from `folder`, is `module` with `tensors`.

    Each tensor has the same bits, and the logits are the same but for rounding.
    """
    read = dict(theirs.named_parameters())
    problem = ""
    for name, array in tensors.items():
        if name not in read:
            problem = f"it has no {name}"
        elif not torch.equal(read[name].cpu(), torch.from_numpy(array).to(read[name].dtype)):
            problem = f"{name} has other values"
    if not problem:
        tokens, mask = _rows(module, pad_token)
        ours = _logits(module, tokens, mask, products)
        try:
            found = _logits(theirs, tokens, mask, products)
        except (RuntimeError, ValueError) as error:
            problem = f"it can't compute two rows of unlike lengths ({error})"
        else:
            if not _is_close(ours, found, products):
                apart = (ours - found).abs().max()
                problem = f"its logits of two rows of unlike lengths are up to {apart:.3g} apart"
    if problem:
        raise SystemFailure(
            f"output {folder}: what stock libraries read there is not the model of this run: "
            f"{problem}. The files are kept, and entrenar infer, eval and merge use them as "
            "trained; report this, with the kind of model"
        )


def _rows(module: nn.Module, pad_token: int) -> tuple[Tensor, Tensor]:
    """Return two rows of unlike lengths and their mask, int64 [2, t], filled up at their end."""
    most = cast("Any", module).get_input_embeddings().num_embeddings
    usual = [token for token in range(min(most, 2 * max(_LENGTHS))) if token != pad_token]
    tokens = torch.full((len(_LENGTHS), max(_LENGTHS)), pad_token)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(_LENGTHS):
        tokens[row, :length] = torch.tensor(usual[row : row + length])
        mask[row, :length] = 1
    return tokens, mask


def _logits(module: nn.Module, tokens: Tensor, mask: Tensor, products: torch.dtype) -> Tensor:
    """Return the logits of all that is not filled up, as float32."""
    device = next(module.parameters()).device
    with in_evaluation(module), precision.applied(products, device):
        named = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
        logits: Tensor = module(**named, use_cache=False).logits
    return (logits if logits.dim() == 2 else logits[mask.bool()]).float().cpu()


def _is_close(ours: Tensor, theirs: Tensor, products: torch.dtype) -> bool:
    """Return whether logits differ by rounding at most; what is not a number is in both places."""
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return False
    ours, theirs = (torch.nan_to_num(one, 0, 0, 0).double() for one in (ours, theirs))
    share = _ROUNDED if products == torch.float32 else torch.finfo(products).eps
    return bool((ours - theirs).norm() <= share * ours.norm())
