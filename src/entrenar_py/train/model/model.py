"""Loads a checkpoint in Hugging Face's format, and adds adapters with `peft`.

Only safetensors are read, never pickles. Python code of the checkpoint runs only if the settings
allow it.

Weights that a checkpoint lacks (a classifier's head, adapters) are drawn from the run's seed after
all others were read: a library draws them in its own order, and earlier for some kinds of models.
So every process that loads the same settings has the same bits, and no weights need to be sent.
`part` and `without_weights` load what a stage and its coordinator have, and draw the same values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from entrenar_py.compute.nf4 import BLOCK
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import blocks, masks, model_folder, objectives, precision, stock
from entrenar_py.train.model.precision import in_evaluation
from entrenar_py.train.model.settings import CUDNN, Settings

_MARKERS = ("▁",)  # marks the start of a word; even tokenizers without files have it
_SHOWN = 12  # layers in a message
_UNPACKED = 0.1  # share of weights that method: qlora leaves as they are without a note
# a part of the logits' norm: rounding changes less, and a later token that is seen changes more
_ROUNDED = 1e-4


def tokenizer(settings: Settings, folder: Path | None = None) -> Any:
    """Return the tokenizer in `folder`, by default the checkpoint's.

    Raises UsageError if it can't be read or used.
    """
    transformers, folder = model_folder.library(), folder or settings.model
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give one with a checkpoint")
    model_folder.require_tokenizer(folder)
    with model_folder.reading(folder, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=settings.trust_remote_code,
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise UsageError(
            f"{folder}: its tokenizer has neither a padding nor an end token; give "
            "it one of them (tokenizer_config.json)"
        )
    if not set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens, *_MARKERS}:
        raise UsageError(
            f"{folder}: its tokenizer has no vocabulary, since its file (such as "
            "tokenizer.json) is missing; copy the whole checkpoint"
        )
    return tokenizer


def padding(found: Any) -> int:
    """Return the token with which rows are padded: the padding token, or else the end token."""
    return int(found.eos_token_id if found.pad_token_id is None else found.pad_token_id)


def load(settings: Settings, pad_token: int) -> nn.Module:
    """Return the model with its adapters on the CPU, in training mode.

    Trained tensors are float32, frozen weights have the run's precision. With `method: qlora`,
    frozen layers are in NF4. New tensors (adapters, the head of a classifier) are drawn from the
    run's seed. Raises UsageError if the checkpoint can't be read, or if a layer that the settings
    name is missing.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module, new = _base(settings)
        _draw(settings.seed, module, new)
        stock.require_padding(settings, module, pad_token)
        stock.set_padding(module, pad_token)
        stock.freeze_beside(module)
        if settings.attention == CUDNN:
            from entrenar_py.train.model import attention  # imports transformers

            attention.use(module)
        if settings.adapts:
            module = stock.adapted(settings, module, new)
    precision.prepare(module, settings)
    stock.start(settings, module)  # into float32
    if settings.task != "classify":
        _require_causal(settings, module)
    if settings.data.packing:
        products = precision.of_products(settings)
        with precision.applied(products, next(module.parameters()).device):
            objectives.require_apart(module, products, settings.model)
    if settings.recompute == "blocks":
        masks.recompute(module)
    return module.train()


def plain(settings: Settings) -> nn.Module:
    """Return the unchanged model of the checkpoint on the CPU, for inference only.

    Its weights have the run's precision. Raises UsageError as `load` does.
    """
    with torch.random.fork_rng(devices=[]):
        module, _ = _base(settings)
    _require_causal(settings, module)
    return module.requires_grad_(requires_grad=False).eval()


def part(
    settings: Settings,
    pad_token: int,
    shorten: Callable[[nn.Module], None],
    trains: Container[str],
    *,
    unties: bool,
) -> nn.Module:
    """Return the part of the model that `shorten` leaves, with its adapters, as `load` returns it.

    No other weights of the checkpoint are read. Only parameters with a name in `trains` are
    trained. They don't have a run's initial values.
    """
    module, new = _base(settings, shorten, unties=unties)
    stock.set_padding(module, pad_token)
    stock.freeze_beside(module)
    if settings.adapts:
        targets = tuple(one for one in settings.lora.targets if stock.has_target(module, one))
        if targets:
            lora = replace(settings.lora, targets=targets)
            module = stock.adapted(replace(settings, lora=lora), module, new)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trains)
    precision.prepare(module, settings)
    if settings.recompute == "blocks":
        masks.recompute(module)
    return module.train()


def without_weights(settings: Settings, pad_token: int) -> nn.Module:
    """Return the model with adapters and new parts as `load` draws them, and no other weights.

    Frozen weights have their shape. They are zeros that take the memory of one number.
    """
    aside = list[Callable[[], None]]()  # calls that put back what was taken out

    def shorten(module: nn.Module) -> None:
        model = cast("Any", module)
        _, layers = blocks.place_of(module)
        for index, block in enumerate(layers):
            aside.append(partial(layers.__setitem__, index, block))
            layers[index] = nn.Identity()
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        aside.append(partial(model.set_input_embeddings, table))
        model.set_input_embeddings(nn.Identity())
        if head is not None:
            aside.append(partial(model.set_output_embeddings, head))
            model.set_output_embeddings(nn.Identity())

    plain = replace(settings, method="lora") if settings.method == "qlora" else settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module, new = _base(plain, shorten, unties=True)
        _draw(settings.seed, module, new)
        for put_back in aside:
            put_back()
        for above in module.modules():
            for name, tensor in list(above.named_parameters(recurse=False)):
                if tensor.device.type == "meta":
                    zero = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                    setattr(above, name, nn.Parameter(zero, requires_grad=tensor.requires_grad))
        stock.set_padding(module, pad_token)
        stock.freeze_beside(module)
        module = stock.adapted(settings, module, new)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    stock.start(settings, module)
    return module.train()


def _draw(seed: int, module: nn.Module, new: Sequence[str]) -> None:
    """Draw the parts `new` from `seed`. Later draws follow from the same seed.

    Some models (Qwen3.5) draw numbers for blocks with weights that are read afterwards. A
    coordinator without these blocks doesn't draw them, but has to draw the same adapters.
    """
    torch.manual_seed(seed)
    model = cast("Any", module)
    for name, part in module.named_modules():
        if any(f".{name}".endswith(f".{one}") for one in new):
            tensors: Iterator[Any] = part.parameters()
            for tensor in tensors:
                tensor._is_hf_initialized = False
            for inner in part.modules():
                model._init_weights(inner)


def _require_causal(settings: Settings, module: nn.Module) -> None:
    """Raise UsageError if the model predicts a token from that token itself or later ones.

    An encoder with the head of a language model does: its loss would soon be 0. Differences as
    small as rounding are allowed: with experts, a later token may change how rows are grouped.
    """
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
    with in_evaluation(module), precision.applied(precision.of_products(settings), tokens.device):
        logits = module(input_ids=tokens, use_cache=False).logits
    require_blind(settings, logits)


def require_blind(settings: Settings, hidden: torch.Tensor) -> None:
    """Raise UsageError if two rows of outputs differ before the last of four tokens.

    `hidden` is [2, 4, d], or the logits: outputs for two rows that differ only in their last token.
    """
    one, other = hidden[:, :3].float()
    if (one - other).norm() > _ROUNDED * one.norm():
        raise UsageError(
            f"model={settings.model}: it sees the tokens that it should predict, as encoders do; "
            f"use a causal language model for task: {settings.task}, or is_decoder in config.json"
        )


def trained(settings: Settings, folder: Path, pad_token: int) -> nn.Module:
    """Return the model that a run with `settings` wrote to `folder`, in evaluation mode."""
    if settings.method == "full":
        settings = replace(settings, model=folder)
    module, _ = _base(settings)
    return _with_adapters(settings, folder, module, pad_token).eval()


def decoded(settings: Settings, folder: Path, pad_token: int) -> nn.Module:
    """Return the model of `trained` with NF4 weights decoded to float32."""
    module, _ = _base(replace(settings, method="lora"))
    precision.decode(_base(settings)[0], module)
    return _with_adapters(settings, folder, module, pad_token).eval()


def _with_adapters(settings: Settings, folder: Path, module: Any, pad_token: int) -> nn.Module:
    stock.set_padding(module, pad_token)
    if settings.adapts:
        import peft

        model_folder.require_adapters(folder)
        with model_folder.reading(folder, "adapters"), stock.quiet():
            whole = peft.PeftConfig.from_pretrained(str(folder)).modules_to_save or ()
            for name, part in module.named_modules():
                if name.endswith(tuple(whole)):
                    part.float()  # peft trains a copy, and would round its values to this dtype
            module = peft.PeftModel.from_pretrained(module, str(folder))
    return cast("nn.Module", module)


def shape(settings: Settings) -> nn.Module:
    """Return the model with its adapters on torch's meta device, in training mode.

    It has all shapes and no values, from config.json alone. With `method: qlora`, weights that
    would be in NF4 have their plain shape. Raises UsageError as `load` does, except for problems
    that only weights can show.
    """
    return _of_config(settings, torch.device("meta"))


def random(settings: Settings, *, num_blocks: int) -> nn.Module:
    """Return the model of `shape`, with only `num_blocks` blocks, and random weights on the CPU."""
    return _of_config(settings, torch.device("cpu"), num_blocks)


def _of_config(settings: Settings, place: torch.device, num_blocks: int | None = None) -> nn.Module:
    kind, options = model_folder.class_of(settings)
    config = model_folder.configuration(settings)
    text = config.get_text_config()
    if num_blocks is not None:
        text.num_hidden_layers = num_blocks
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_blocks]
    for name, value in options.items():
        setattr(config, name, value)
    with place, model_folder.reading(settings.model, "model"):
        module: nn.Module = kind.from_config(
            config,
            dtype=precision.of_checkpoint(settings),
            trust_remote_code=settings.trust_remote_code,
        )
    stock.freeze_beside(module)
    if settings.adapts:
        with place:
            module = stock.adapted(settings, module, ())
    precision.prepare(module, settings)
    return module.train()


def _names(settings: Settings, config: Any) -> set[str]:
    kind, _ = model_folder.class_of(settings)
    with torch.device("meta"), model_folder.reading(settings.model, "model"):
        whole = kind.from_config(config, trust_remote_code=settings.trust_remote_code)
    return set(whole.state_dict())


def _base(
    settings: Settings, shorten: Callable[[nn.Module], None] | None = None, *, unties: bool = False
) -> tuple[nn.Module, list[str]]:
    """Return the checkpoint's model, and the names of its parts that the checkpoint lacks.

    `shorten` removes parts of the model before any weights are read; those are not loaded. With
    `unties`, it may remove an embedding that is tied to the head, or the head.
    """
    model_folder.require_numbers(settings.model)
    kind, options = model_folder.class_of(settings)
    config = model_folder.configuration(settings)
    if shorten is not None:
        kind = model_folder.shortened_class(kind, config, shorten, unties=unties)
    quantising: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if settings.method == "qlora":
        quantising = precision.InThreads()  # type: ignore[no-untyped-call]
        with model_folder.reading(settings.model, "model"), torch.device("meta"):
            empty = kind.from_config(config, trust_remote_code=settings.trust_remote_code)
        options |= precision.quantised_loading(empty, precision.of_products(settings))
        if (share := precision.unpacked_share(empty)) > _UNPACKED:
            model_folder.note(
                f"method: qlora: {share:.0%} of the weights in the model's blocks stay in "
                f"{settings.precision}: only linear layers with rows of a multiple of "
                f"{BLOCK} weights are quantised, and not experts that are kept in one "
                "tensor; `entrenar plan` counts their memory"
            )
    with model_folder.reading(settings.model, "model"), quantising:
        module, loading = kind.from_pretrained(
            settings.model,
            dtype=precision.of_checkpoint(settings),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the weight's name
            **options,
        )
    model_folder.require_shapes(settings.model, loading["mismatched_keys"])
    unexpected = set(loading["unexpected_keys"])
    if shorten is None:
        model_folder.require_tied(settings.model, module)
    elif unexpected:  # weights of removed parts are expected
        unexpected -= _names(settings, config)
    for part in model_folder.require_known(settings, module, unexpected):
        model_folder.note(
            f"model={settings.model}: its files have {part}, which task: {settings.task} has no "
            "use for; it is left out"
        )
    new = model_folder.require_weights(settings.model, module, loading["missing_keys"])
    if new and settings.task != "classify":
        raise UsageError(
            f"model={settings.model}: its files lack {', '.join(new)}, which predicts the next "
            f"token; use {model_folder.task_advice(settings.task, config)}"
        )
    if settings.method == "qlora":
        precision.settle_quantised(module)
    return module, new
