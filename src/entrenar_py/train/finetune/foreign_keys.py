"""Keys of other fine-tuning tools, and the keys that our configuration has instead.

The reader of a configuration and the docs' page of keys both use this table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from entrenar_py.shared.config.fields import Record
from entrenar_py.train.model.settings import ALL_LINEAR

TOOLS = ("axolotl", "TRL", "LLaMA-Factory")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The names of one setting in each of TOOLS, our key ("" if there is none), and a note.

    `others` are names without a tool.
    """

    axolotl: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()
    llama_factory: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    ours: str = ""
    note: str = ""

    @property
    def by_tool(self) -> tuple[tuple[str, ...], ...]:
        """The names in each of TOOLS."""
        return self.axolotl, self.trl, self.llama_factory


def _same(*names: str, ours: str = "", note: str = "") -> Row:
    return Row(axolotl=names, trl=names, llama_factory=names, ours=ours, note=note)


_PATH = ("model_name_or_path",)
_BATCH = ("per_device_train_batch_size",)
_PRODUCT = "rows per step: the product of both keys and the number of devices"
_SCHEDULE = ("lr_scheduler_type",)
ROWS = (
    Row(
        axolotl=("base_model",),
        trl=_PATH,
        llama_factory=_PATH,
        ours="model",
        note="a folder; nothing is downloaded",
    ),
    _same("output_dir", ours="output"),
    Row(
        axolotl=("adapter",),
        trl=("use_peft",),
        llama_factory=("finetuning_type",),
        ours="method",
        note="lora, qlora or full",
    ),
    Row(
        axolotl=("load_in_4bit",),
        trl=("load_in_4bit",),
        llama_factory=("quantization_bit",),
        others=("load_in_8bit",),
        ours="method",
        note="qlora has 4 bits, NF4; there are no 8 bits",
    ),
    _same("bf16", "fp16", ours="precision", note="float32 or bfloat16"),
    _same("gradient_checkpointing", ours="recompute", note="blocks"),
    Row(
        axolotl=("attn_implementation", "flash_attention"),
        trl=("attn_implementation",),
        llama_factory=("flash_attn",),
        ours="attention",
        note="torch or cudnn",
    ),
    Row(
        axolotl=("datasets",),
        trl=("dataset_name",),
        llama_factory=("dataset",),
        others=("train_file", "dataset_path"),
        ours="data.train",
        note="files of rows; the format is recognised by their fields",
    ),
    Row(
        axolotl=("test_datasets",),
        llama_factory=("eval_dataset",),
        ours="data.validation",
    ),
    Row(
        axolotl=("val_set_size",),
        llama_factory=("val_size",),
        ours="data.validation_share",
        note="a share, not a number of rows",
    ),
    Row(
        axolotl=("sequence_len",),
        trl=("max_length", "max_seq_length"),
        llama_factory=("cutoff_len",),
        ours="data.max_tokens",
        note="data.on_long decides what happens to a longer row",
    ),
    Row(
        axolotl=("sample_packing",),
        trl=("packing",),
        llama_factory=("packing",),
        ours="data.packing",
    ),
    Row(trl=("dataset_text_field",), ours="data.text_field"),
    Row(
        axolotl=("lora_r",),
        trl=("lora_r", "r"),
        llama_factory=("lora_rank",),
        ours="lora.rank",
    ),
    _same("lora_alpha", ours="lora.alpha"),
    _same("lora_dropout", ours="lora.dropout"),
    Row(
        axolotl=("peft_use_rslora",),
        trl=("use_rslora",),
        llama_factory=("use_rslora",),
        ours="lora.rslora",
    ),
    Row(
        axolotl=("peft_use_dora",),
        trl=("use_dora",),
        llama_factory=("use_dora",),
        ours="lora.dora",
    ),
    Row(
        axolotl=("lora_target_modules", "lora_target_linear"),
        trl=("lora_target_modules", "target_modules"),
        llama_factory=("lora_target",),
        ours="lora.targets",
        note=f"{ALL_LINEAR} is the default",
    ),
    Row(
        axolotl=("lora_modules_to_save",),
        trl=("modules_to_save",),
        llama_factory=("additional_target",),
        ours="lora.modules_to_save",
    ),
    Row(
        axolotl=("lora_model_dir",),
        llama_factory=("adapter_name_or_path",),
        ours="lora.start_from",
    ),
    Row(
        axolotl=("rl_beta",),
        trl=("beta",),
        llama_factory=("pref_beta",),
        ours="preference.beta",
    ),
    Row(
        axolotl=("rl",),
        trl=("loss_type",),
        llama_factory=("pref_loss",),
        ours="task",
        note="preference is DPO with the sigmoid loss; other losses are not supported",
    ),
    Row(
        axolotl=("num_epochs",),
        trl=("num_train_epochs",),
        llama_factory=("num_train_epochs",),
        ours="training.epochs",
    ),
    _same(
        "max_steps",
        ours="training.max_steps",
        note="ends a run before training.epochs do, never after",
    ),
    Row(
        axolotl=("micro_batch_size",),
        trl=_BATCH,
        llama_factory=_BATCH,
        ours="training.batch_size",
        note=_PRODUCT,
    ),
    _same(
        "gradient_accumulation_steps",
        ours="training.batch_size",
        note=f"{_PRODUCT}; training.num_shards is the number of parts",
    ),
    Row(
        axolotl=("learning_rate",),
        trl=("learning_rate",),
        llama_factory=("learning_rate",),
        others=("lr",),
        ours="training.learning_rate",
    ),
    Row(
        axolotl=("lr_scheduler",),
        trl=_SCHEDULE,
        llama_factory=_SCHEDULE,
        ours="training.schedule",
        note="constant, linear or cosine",
    ),
    _same(
        "warmup_ratio",
        "warmup_steps",
        ours="training.warmup_share",
        note="a share of the steps",
    ),
    _same("max_grad_norm", ours="training.clip_norm"),
    _same("eval_steps", ours="evaluate_every"),
    _same("save_steps", ours="checkpoint_every"),
    Row(
        axolotl=("fsdp", "fsdp_config", "deepspeed"),
        trl=("fsdp", "deepspeed"),
        llama_factory=("fsdp", "deepspeed"),
        ours="strategy",
        note="for ranks that torchrun starts",
    ),
    Row(
        others=("threads", "num_threads"),
        ours="workers",
        note="a worker computes on one thread, since more would change the bits; it uses one core",
    ),
    Row(
        axolotl=("train_on_inputs",),
        trl=("assistant_only_loss", "completion_only_loss"),
        llama_factory=("train_on_prompt",),
        note="leave it out: with `task: instruct` only the assistant's turns are learned",
    ),
    Row(
        axolotl=("chat_template",),
        trl=("chat_template_path",),
        llama_factory=("template",),
        note="leave it out: the tokenizer's own template is used",
    ),
    Row(
        axolotl=("optimizer",),
        trl=("optim",),
        llama_factory=("optim",),
        note="leave it out: the optimizer is AdamW",
    ),
    _same(
        "logging_steps",
        "report_to",
        note="leave it out: every step is in metrics.jsonl; --tensorboard DIR draws them",
    ),
    _same(
        "resume_from_checkpoint", note="leave it out: --resume continues from the last checkpoint"
    ),
)


def tell(record: Record, own: Callable[[], Mapping[str, Collection[str]]]) -> list[str]:
    """Report keys of a mapping that belong to other tools or to other sections; return them.

    `own` returns the names of our keys by section; "" is the top level.
    """
    keys = []
    for key in record.node.fields:
        found = "" if key in record.known else advice(key) or _elsewhere(key, own())
        if found:
            message = f"{record.what}: key {key!r} is not read; {found}"
            record.problems.error(record.node.keys[key], message)
            keys.append(key)
    return keys


def advice(key: str) -> str:
    """Return what to write instead of a key of another tool; "" if no tool has it."""
    for row in ROWS:
        if key in row.others or any(key in names for names in row.by_tool):
            return f"did you mean {row.ours}? {row.note}".rstrip() if row.ours else row.note
    return ""


def _elsewhere(key: str, own: Mapping[str, Collection[str]]) -> str:
    places = [f"{name}.{key}" if name else f"{key} outside of this section" for name in own]
    found = [place for place, names in zip(places, own.values(), strict=True) if key in names]
    return f"did you mean {' or '.join(found)}?" if found else ""


def of_targets(targets: Collection[str]) -> Iterator[str]:
    """Yield problems of `lora.targets`: a foreign name for all layers, or ours next to others.

    `all` is LLaMA-Factory's name.
    """
    for target in targets:
        if target == "all" or (target == ALL_LINEAR and len(targets) > 1):
            yield f"targets={target}: use {ALL_LINEAR} alone, or name the ends of layers' names"


def table() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the docs' table: the names in each tool, our key, and the note."""
    for row in ROWS:
        if any(row.by_tool):
            named = (", ".join(f"`{name}`" for name in names) for names in row.by_tool)
            yield (*named, f"`{row.ours}`" if row.ours else "", row.note)
