"""Stock peft and transformers: adding adapters, writing folders and reading them back.

A run's model in memory has settings of its own, such as the padding token. A folder contains less.
So it is read back by the libraries alone, with their own classes and the files of the folder, and
both models compute two rows of different lengths. Weights that were not trained are shared, not
read again, so a large model is in memory once. They come from the checkpoint, which has a digest.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.model import model_folder, precision
from entrenar_py.train.model.precision import in_evaluation
from entrenar_py.train.model.settings import ALL_LINEAR, LAYER_PIPELINE, Settings

HEADS = ("classifier", "score")  # peft trains these as a whole by default
_LAYERS_SHOWN = 12  # layers in a message
_KINDS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
_TOLD_CHARS = 300


def adapted(settings: Settings, module: Any, new: Sequence[str]) -> nn.Module:
    """Return `module` with adapters. Its `new` parts are trained whole, and saved with them."""
    import peft

    lora, aside = settings.lora, _within(model_folder.beside_text(module))
    saved = _saved(lora.modules_to_save, module, new)
    is_all = lora.targets == (ALL_LINEAR,)
    if whole := saved if is_all else lora.modules_to_save:
        ends = "|".join(map(re.escape, whole))
        aside = "|".join(filter(None, (aside, rf"(.*\.)?({ends})(\..*)?")))
    several = _of_several_outputs(module)
    if is_all:
        aside = "|".join(filter(None, (aside, *map(re.escape, several)))) or None
    else:
        _require_targets(lora.targets, module, new, aside, several)
    _require_no_experts(settings, module)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast("Any", lora.alpha),  # peft's type says int, but a float works, too
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=ALL_LINEAR if is_all else list(lora.targets),
        exclude_modules=aside,
        modules_to_save=saved,
        task_type="SEQ_CLS" if settings.task == "classify" else "CAUSAL_LM",
    )
    try:
        with quiet():
            adapted: nn.Module = peft.get_peft_model(module, config)
    except (TypeError, ValueError) as error:
        told = escaping.shortened(" ".join(str(error).split()), chars_max=_TOLD_CHARS)
        raise UsageError(
            f"lora.targets={', '.join(lora.targets)}: peft can't adapt all of them ({told}); leave "
            "that layer out"
        ) from error
    if lora.dora:
        precision.set_magnitudes(adapted)
    return adapted


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Make `module` compute without its adapters.

    Unlike peft's own `disable_adapter`, this leaves alone whether tensors have gradients: the
    trainer's tensors are in the module while it computes.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def start(settings: Settings, module: Any) -> None:
    """Give the adapters of `module` the values in the folder `lora.start_from`, if that is given.

    Raises UsageError unless its adapters are of the same kind, on the same layers.
    """
    folder = settings.lora.start_from
    if folder is None:
        return
    import peft
    from peft.utils import save_and_load

    where = f"lora.start_from={folder}"
    model_folder.require_adapters(folder, where)
    with model_folder.reading(folder, "adapters"):
        theirs = cast("Any", peft.PeftConfig.from_pretrained(str(folder)))
        values = save_and_load.load_peft_weights(str(folder), device="cpu")
    for key, name in _KINDS.items():
        if (found := getattr(theirs, name)) != (due := getattr(settings.lora, key)):
            raise UsageError(f"{where}: its adapters have {key}: {found}, and lora.{key} is {due}")
    alphas = theirs.alpha_pattern or {}  # of experts
    if alphas != (due := module.peft_config["default"].alpha_pattern):
        raise UsageError(f"{where}: its adapters have alpha_pattern: {alphas}, this run's {due}")
    due = peft.get_peft_model_state_dict(module, save_embedding_layers=False)
    for name in sorted(due.keys() | values.keys()):
        shapes = [tuple(one[name].shape) if name in one else "none" for one in (values, due)]
        if shapes[0] != shapes[1]:
            raise UsageError(
                f"{where}: {name} has shape {shapes[0]} there, and {shapes[1]} in this run; use "
                "the same model, lora.targets and lora.modules_to_save"
            )
    with quiet():
        peft.set_peft_model_state_dict(module, values)


def _saved(names: Sequence[str], module: nn.Module, new: Sequence[str]) -> list[str]:
    """Return the names of the parts that are trained whole: those in `new` and in `names`.

    Raises UsageError for a name that no part has, or with which peft would find other parts, too,
    and for weights that another part shares.
    """
    for name in names:
        named = [part for path, part in module.named_modules() if f".{path}".endswith(f".{name}")]
        inside = {id(part) for above in named for part in above.modules()}
        weights = {id(weight) for part in named for weight in part.parameters()}
        if not weights:
            raise UsageError(
                f"lora.modules_to_save={name!r}: the model has no layer of that name with weights"
            )
        others = [
            path
            for path, part in module.named_modules()
            if path.endswith(name)
            and not f".{path}".endswith(f".{name}")
            and any(True for _ in part.parameters())
        ]
        if others:
            ends = list(dict.fromkeys(path.rpartition(".")[2] for path in others))
            whole = next(path for path, part in module.named_modules() if part is named[0])
            raise UsageError(
                f"lora.modules_to_save={name!r}: peft would also train all of "
                f"{', '.join(ends[:_LAYERS_SHOWN])}, since their names end like that; use a longer "
                f"name, such as {whole}"
            )
        for path, part in module.named_modules():
            own = part.parameters(recurse=False)
            if id(part) not in inside and any(id(weight) in weights for weight in own):
                raise UsageError(
                    f"lora.modules_to_save={name!r}: {path} has the same weights "
                    "(tie_word_embeddings), and adapters can't keep both equal; use method: full"
                )
    return [*(name for name in new if name not in HEADS), *names]


def _require_targets(
    targets: Sequence[str],
    module: nn.Module,
    new: Sequence[str],
    aside: str | None,
    several: Sequence[str],
) -> None:
    """Raise UsageError unless each target is a layer of the checkpoint outside of `aside`.

    Raises it for the layers `several`, too, which have several outputs.
    """
    outside = re.compile(aside or "")
    named = [name for name, layer in module.named_modules() if _is_matrix(layer)]
    named = [name for name in named if not outside.fullmatch(name)]
    for target in targets:
        if target in new:
            raise UsageError(
                f"lora.targets={target!r}: the checkpoint lacks that layer, so all of it is "
                "trained; leave it out of the targets"
            )
        if routers := [name for name in several if f".{name}".endswith(f".{target}")]:
            raise UsageError(
                f"lora.targets={target!r}: peft can't adapt {routers[0]}, which returns several "
                "tensors; leave it out of the targets"
            )
        if _experts_of(module, target):
            continue
        if not any(name == target or name.endswith(f".{target}") for name in named):
            experts = [name for name in _expert_names(module) if _experts_of(module, name)]
            ends = list(dict.fromkeys([*(name.rpartition(".")[2] for name in named), *experts]))
            raise UsageError(
                f"lora.targets={target!r}: the model has no layer of that name with a matrix of "
                f"weights; it has {', '.join(ends[:_LAYERS_SHOWN])}"
            )


def _require_no_experts(settings: Settings, module: nn.Module) -> None:
    """Raise UsageError for kinds of adapters that peft doesn't have for experts, if any get one."""
    lora = settings.lora
    options = {"dropout": lora.dropout, "dora": lora.dora}
    names = [*_expert_names(module)] if lora.targets == (ALL_LINEAR,) else lora.targets
    experts = sorted({one for name in names for one in _experts_of(module, name)})
    for key, value in options.items():
        if value and experts:
            raise UsageError(
                f"lora.{key}={value}: peft adapts {', '.join(experts)} of this model's experts "
                f"as tensors, which excludes lora.{key}; leave it out, or choose lora.targets "
                "without experts, such as q_proj and v_proj"
            )


def _expert_names(module: Any) -> Mapping[str, str]:
    """Return the tensors that peft adapts in place of layers that had these names.

    transformers 5 keeps the matrices of all experts in one tensor, and some routers' apart from a
    layer. Adapters still name the layers of older releases.
    """
    from peft.utils import transformers_weight_conversion as conversion

    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(module.config.model_type)
    names: Mapping[str, str] = conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {})
    return names


def _experts_of(module: nn.Module, target: str) -> set[str]:
    """Return the tensor that peft adapts for `target` in place of a layer, if `module` has it."""
    tensor = _expert_names(module).get(target.rpartition(".")[2])
    has_it = tensor and any(name.endswith(f".{tensor}") for name, _ in module.named_parameters())
    return {tensor} if tensor and has_it else set()


def _of_several_outputs(module: nn.Module) -> list[str]:
    """Return the linear layers that return more than their product, as some routers do."""
    return [name for name, layer in module.named_modules() if _has_several_outputs(layer)]


def _has_several_outputs(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return False
    if not layer.weight.is_floating_point():  # in NF4
        return False
    tensors = {name: one.to("meta") for name, one in layer.named_parameters(recurse=False)}
    row = torch.empty(1, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        with torch.no_grad():
            output = torch.func.functional_call(layer, tensors, (row,))
    except Exception:  # noqa: BLE001  (a model's code, which may want other rows: peft decides)
        return False
    return not isinstance(output, Tensor)


def _within(parts: Sequence[str]) -> str | None:
    return rf"({'|'.join(map(re.escape, parts))})\..*" if parts else None


def freeze_beside(module: nn.Module) -> None:
    """Freeze the parts through which no text passes: they would have no gradient."""
    for name in model_folder.beside_text(module):
        module.get_submodule(name).requires_grad_(False)


def _is_matrix(layer: nn.Module) -> bool:
    """Return whether a layer is a product with a matrix: nn.Linear, or GPT-2's Conv1D."""
    weight = getattr(layer, "weight", None)
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_matrix and not isinstance(layer, nn.Embedding)


def has_target(module: nn.Module, target: str) -> bool:
    """Return whether a layer with a name that ends in `target` can have an adapter."""
    if target == ALL_LINEAR:
        from transformers.pytorch_utils import Conv1D

        head = cast("Any", module).get_output_embeddings()
        return any(
            isinstance(layer, nn.Linear | Conv1D) and layer is not head and name not in HEADS
            for name, layer in module.named_modules()
        )
    if target.rpartition(".")[2] in _expert_names(module):
        return bool(_experts_of(module, target))
    return any(
        (name == target or name.endswith(f".{target}")) and _is_matrix(layer)
        for name, layer in module.named_modules()
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress peft's warnings about later releases of transformers, and about its own repairs.

    For the ranks of experts' adapters, it looks among layers, and they are tensors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        yield


def ends(module: nn.Module, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: those of `module`, and the end token of `tokenizer`."""
    named = getattr(cast("Any", module).generation_config, "eos_token_id", None)
    several = named if isinstance(named, list) else [named]
    known = (int(one) for one in (*several, tokenizer.eos_token_id) if one is not None)
    return list(dict.fromkeys(known))


def plain_generation(module: nn.Module, tokenizer: Any) -> Any:
    """Return a generation configuration that has only the tokens in `ends`.

    Penalties, beams and the like of the checkpoint are ignored: whoever asks gives the temperature,
    and nothing else is supported.
    """
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=ends(module, tokenizer) or None)


@contextmanager
def answering_plainly(module: nn.Module, tokenizer: Any) -> Iterator[None]:
    """Give `module`, with or without adapters, the configuration of `plain_generation`."""
    # transformers fills an argument `generation_config` with the values of the model's own.
    model = cast("Any", module)
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    before = model.generation_config
    model.generation_config = plain_generation(model, tokenizer)
    try:
        yield
    finally:
        model.generation_config = before


def _add_end(module: nn.Module, tokenizer: Any) -> None:
    """Let the generation configuration of `module` have the tokenizer's end token.

    Answers were trained with it, and checkpoints often name a different one. transformers' own
    trainer does the same.
    """
    config = getattr(module, "generation_config", None)
    if config is not None and tokenizer.eos_token_id is not None:
        tokens = ends(module, tokenizer)
        config.eos_token_id = tokens if len(tokens) > 1 else tokens[0]


def save(module: nn.Module, tensors: Mapping[str, Array], tokenizer: Any, folder: Path) -> None:
    """Set the parameters `tensors` of `module`; write adapters or the whole model, and tokenizer.

    Adapters are a PEFT folder: adapter_config.json and adapter_model.safetensors.
    """
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, array in tensors.items():
            parameters[name].copy_(torch.from_numpy(array))
    saved = cast("Any", module)  # a model of peft or transformers
    for config in getattr(saved, "peft_config", {}).values():
        config.target_modules = sorted(config.target_modules)  # a set has no order
        if config.target_parameters:
            config.target_parameters = sorted(config.target_parameters)
        config.base_model_name_or_path = str(Path(config.base_model_name_or_path).absolute())
    # peft would also write the frozen weights under an adapter on a head or an embedding. A
    # coordinator of stages doesn't have them.
    options = {"save_embedding_layers": False} if hasattr(saved, "peft_config") else {}
    if not options:
        _add_end(module, tokenizer)
    saved.save_pretrained(folder, **options)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty template of a model card
    tokenizer.save_pretrained(folder)


def merge(module: nn.Module, tokenizer: Any, folder: Path, dtype: str = "float32") -> nn.Module:
    """Add the adapters of `module` to their layers' weights; write and return that model.

    It is rounded to `dtype` if that is not float32.

    Also writes the tokenizer. `module` is changed. A head with adapters no longer shares its
    weights with the embeddings.
    """
    _untie(cast("Any", module).get_base_model())
    merged = cast("Any", module).merge_and_unload()
    if dtype != "float32":
        merged.to(getattr(torch, dtype))
    _add_end(merged, tokenizer)
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return cast("nn.Module", merged)


def _untie(model: Any) -> None:
    """Give a head with adapters its own weights, since adapters are not added to the embeddings."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if hasattr(head, "base_layer") and head.base_layer.weight is table.weight:
        head.base_layer.weight = nn.Parameter(table.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


_LENGTHS = (7, 4)
# The largest difference as a part of the logits' norm, in float32. Both models do the same
# operations on the same weights, but matrix products may add in a different order if tensors are
# aligned differently.
_ROUNDED = 1e-4


def set_padding(module: nn.Module, token: int) -> None:
    """Set the model's padding token to `token`. Classifiers look for it."""
    config = cast("Any", module).config
    config.pad_token_id = config.get_text_config().pad_token_id = token


def require_padding(settings: Settings, module: nn.Module, pad_token: int) -> None:
    """Raise UsageError if a classifier's scores depend on a padding token that no folder names.

    `module` has the settings of config.json. Adapters are exported without a configuration, so
    stock peft uses the checkpoint's. Encoders don't look for the token, and pass.
    """
    noted = getattr(cast("Any", module).config.get_text_config(), "pad_token_id", None)
    if settings.task != "classify" or not settings.adapts or noted == pad_token:
        return
    tokens, mask = _rows(module, pad_token)
    products = precision.of_products(settings)
    try:
        theirs = _logits(module, tokens, mask, products)
    except ValueError:  # several rows, and no padding token to look for
        theirs = None
    set_padding(module, pad_token)
    if theirs is not None and _is_close(_logits(module, tokens, mask, products), theirs, products):
        return
    raise UsageError(
        f"model={settings.model}: config.json has pad_token_id={noted}, and its tokenizer pads "
        f"rows with token {pad_token}: stock peft, which reads that file, would score padded "
        f"rows differently than this run; write pad_token_id: {pad_token} into config.json, or use "
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
    """Raise SystemFailure unless stock libraries read `module` with `tensors` from `folder`.

    Does nothing for adapters of a layer pipeline, since their coordinator has no other weights.
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
    """Raise SystemFailure unless stock transformers read the model `merged` from `folder`."""
    with _at_read_back(folder):
        read = _whole(settings, folder)
    dtype = next(merged.parameters()).dtype
    read.to(dtype)
    _require_same(merged, read, tensors={}, pad_token=pad_token, products=dtype, folder=folder)


@contextmanager
def _at_read_back(folder: Path) -> Iterator[None]:
    """Turn a UsageError of the stock libraries into a SystemFailure: the user did nothing wrong."""
    try:
        yield
    except UsageError as error:
        raise SystemFailure(
            f"output {folder}: stock libraries can't read the files that were written there: "
            f"{error}. The files are kept; report this, with the kind of model"
        ) from error


def _adapted(settings: Settings, module: Any, folder: Path) -> nn.Module:
    """Return the checkpoint's model with the adapters in `folder`, loaded by stock peft.

    It shares those weights of `module`, the run's own model, that were not trained.
    """
    import peft

    kind, options = model_folder.class_of(settings)
    trusts = settings.trust_remote_code
    with model_folder.reading(folder, "adapters"), quiet():
        config = model_folder.library().AutoConfig.from_pretrained(
            settings.model, local_files_only=True, trust_remote_code=trusts, **options
        )
        with torch.device("meta"):
            dtype = precision.of_checkpoint(settings)
            below = kind.from_config(config, dtype=dtype, trust_remote_code=trusts)
        _share(settings, module.get_base_model(), below)
        read = cast("nn.Module", peft.PeftModel.from_pretrained(below, str(folder)))
    if settings.lora.dora:
        precision.use_exact_norms(read)  # peft's rounding is no difference of the files
    return read


def _whole(settings: Settings, folder: Path) -> nn.Module:
    """Return the model in `folder`, loaded by stock transformers. Its files are memory-mapped."""
    kind, _ = model_folder.class_of(settings)
    with model_folder.reading(folder, "model"):
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
    """Give `below`, a model on the meta device, the tensors of `own` without its adapters."""
    held: dict[str, Tensor] = {**dict(own.named_parameters(remove_duplicate=False))}
    held |= dict(own.named_buffers(remove_duplicate=False))
    plain = {_plain(name): tensor for name, tensor in held.items()}
    if settings.method == "qlora":
        for name, layer in list(precision.quantised_layers(own)):
            below.set_submodule(_plain(name), layer)
        cast("Any", below).is_loaded_in_4bit = True
    for prefix, part in below.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.device.type == "meta":
                    tensors[key] = cast("Any", plain[f"{prefix}.{key}".lstrip(".")])


def _plain(name: str) -> str:
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

    Each tensor must have the same bits, and the logits must be equal up to rounding.
    """
    read = dict(theirs.named_parameters())
    problem = ""
    for name, array in tensors.items():
        if name not in read:
            problem = f"it has no {name}"
        elif not torch.equal(read[name].cpu(), torch.from_numpy(array).to(read[name].dtype)):
            problem = f"{name} has different values"
    if not problem:
        tokens, mask = _rows(module, pad_token)
        ours = _logits(module, tokens, mask, products)
        try:
            logits = _logits(theirs, tokens, mask, products)
        except (RuntimeError, ValueError) as error:
            problem = f"it can't compute two rows of different lengths ({error})"
        else:
            if not _is_close(ours, logits, products):
                apart = (ours - logits).abs().max()
                problem = f"its logits of two rows of different lengths are up to {apart:.3g} apart"
    if problem:
        raise SystemFailure(
            f"output {folder}: the model that stock libraries read there is not the model of "
            f"this run: {problem}. The files are kept, and entrenar infer, eval and merge use "
            "them as trained; report this, with the kind of model"
        )


def _rows(module: nn.Module, pad_token: int) -> tuple[Tensor, Tensor]:
    """Return two rows of different lengths and their mask, int64 [2, t], padded at the end."""
    most = cast("Any", module).get_input_embeddings().num_embeddings
    usual = [token for token in range(min(most, 2 * max(_LENGTHS))) if token != pad_token]
    tokens = torch.full((len(_LENGTHS), max(_LENGTHS)), pad_token)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(_LENGTHS):
        tokens[row, :length] = torch.tensor(usual[row : row + length])
        mask[row, :length] = 1
    return tokens, mask


def _logits(module: nn.Module, tokens: Tensor, mask: Tensor, products: torch.dtype) -> Tensor:
    device = next(module.parameters()).device
    with in_evaluation(module), precision.applied(products, device):
        named = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
        logits: Tensor = module(**named, use_cache=False).logits
    return (logits if logits.dim() == 2 else logits[mask.bool()]).float().cpu()


def _is_close(ours: Tensor, theirs: Tensor, products: torch.dtype) -> bool:
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return False
    ours, theirs = (torch.nan_to_num(one, 0, 0, 0).double() for one in (ours, theirs))
    share = _ROUNDED if products == torch.float32 else torch.finfo(products).eps
    return bool((ours - theirs).norm() <= share * ours.norm())
