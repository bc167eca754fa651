"""The settings of a run of `entrenar finetune`, one frozen record for each section.

Each field is annotated with its meaning and its limits. `settings_file` uses them to read a file,
and to write the commented configuration and the JSON schema of the docs. So each key is described
in one place; a separate table of keys could contradict the records.

Limits apply to one value. Combinations that exclude each other are in `settings_file`, which knows
the lines of a file; settings that exclude a strategy are in LIMITS, which plans read, too.
Requirements that depend on a model or on rows are checked where these are read.

A record is plain data, and imports neither torch nor transformers, so that a mistake is reported at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import PRECISIONS
from entrenar_py.train.wire.terms import Timing

USUAL = Timing()
TASKS = ("instruct", "classify", "text", "preference")
CHATS = ("instruct", "preference")  # tasks with rows that a chat template may render
METHODS = ("lora", "qlora", "full")
RECOMPUTED = ("none", "blocks")
STRATEGIES = (
    "ddp",
    "ddp_canonical",
    "fsdp",
    "fsdp_canonical",
    "tensor_parallel",
    "sequence_parallel",
    "pipeline_parallel",
)
LAYER_PIPELINE = "layer_pipeline"  # its stages are workers of `entrenar coordinator`
# Strategies in which each shard is computed by one rank.
BY_SHARDS = ("ddp", "ddp_canonical", "fsdp", "fsdp_canonical")
CANONICAL = ("ddp_canonical", "fsdp_canonical")  # bits of one rank
WHOLE_MODELS = ("ddp", "ddp_canonical")  # strategies with a whole model on each rank
WHOLE_LAYERS = ("ddp", "ddp_canonical", "pipeline_parallel")  # strategies that cut no layer
KINDS = ("cpu", "cuda", "wgpu")  # of backends
TEACHER_PRECISIONS = ("float32", "bfloat16", "int8")
ALL_LINEAR = "all-linear"  # of lora.targets, as in peft
AUTO = "auto"  # of compile
TORCH, CUDNN = ATTENTIONS = ("torch", "cudnn")
COMPILABLE = ("ddp", "ddp_canonical", "tensor_parallel")  # strategies, as measured on GPUs
CLASS_WEIGHTS = ("none", "inverse", "sqrt_inverse")


def spelled(choice: str | bool) -> str:
    """Return a choice as it is written in a file."""
    return str(choice).lower() if isinstance(choice, bool) else choice


class Key(NamedTuple):
    """The meaning of a key, and its limits: bounds of a number, or `choices`."""

    meaning: str
    choices: tuple[str | bool, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """The rows to learn from, and the names of the fields that are used."""

    train: Annotated[Path, Key("rows to train on: .jsonl, .json or .parquet; * is a pattern")]
    validation: Annotated[Path | None, Key("rows to evaluate on: a file of the same kind")] = None
    validation_share: Annotated[
        float,
        Key(
            "share of the `train` rows that is kept for evaluation, if `validation` is not given",
            least=0,
            below=1,
        ),
    ] = 0.0
    text_field: Annotated[str, Key("field with the text, for `classify` and `text`")] = "text"
    label_field: Annotated[str, Key("field with the class, for `classify`")] = "label"
    messages_field: Annotated[str, Key("field with a list of {role, content}, for `instruct`")] = (
        "messages"
    )
    date: Annotated[
        str | None,
        Key(
            "date for chat templates that ask for it, as 2026-11-28; default: the day of the start"
        ),
    ] = None
    max_tokens: Annotated[
        int,
        Key(
            "largest number of tokens in a row; `on_error` says what happens to a longer one",
            least=2,
        ),
    ] = 512
    packing: Annotated[
        bool,
        Key(
            "put several rows into one sequence of `max_tokens`; a row doesn't attend to the others"
        ),
    ] = False
    on_error: Annotated[
        str,
        Key(
            "what happens if a row can't be used: the run stops, or the row is "
            "skipped, counted and listed",
            choices=("stop", "skip"),
        ),
    ] = "stop"
    on_long: Annotated[
        str | None,
        Key(
            "what happens if a row has more than `max_tokens`; truncate keeps its first tokens; "
            "by default `on_error` decides",
            choices=("stop", "truncate", "skip"),
        ),
    ] = None

    @property
    def truncates(self) -> bool:
        """True if a row of more than `max_tokens` loses its end."""
        return self.on_long == "truncate"

    @property
    def validates(self) -> bool:
        """True if there are rows to evaluate on."""
        return self.validation is not None or self.validation_share > 0


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes of the task `classify`."""

    labels: Annotated[tuple[str, ...], Key("all classes, in the order of the outputs")] = ()
    weights: Annotated[
        str,
        Key(
            "weight of a class in the loss: 1, 1 / its share of the rows, or the "
            "square root of that",
            choices=CLASS_WEIGHTS,
        ),
    ] = "none"
    oversample: Annotated[
        bool, Key("repeat rows of rarer classes until all classes are equally frequent")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Preference:
    """The loss of the task `preference` (DPO)."""

    beta: Annotated[
        float,
        Key(
            "factor of the difference between a side's log-probability and the reference's", above=0
        ),
    ] = 0.1
    label_smoothing: Annotated[
        float,
        Key("share of rows in which the rejected side may be the better one", least=0, below=0.5),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of the methods `lora` and `qlora`."""

    rank: Annotated[int, Key("rank of an adapter", least=1, most=2**12)] = 16
    alpha: Annotated[float, Key("an adapter's output is multiplied by alpha / rank", above=0)] = 32
    dropout: Annotated[
        float, Key("dropout probability of an adapter's inputs", least=0, below=1)
    ] = 0.0
    targets: Annotated[
        tuple[str, ...],
        Key(
            "layers that get an adapter, by the ends of their names; all-linear is every linear "
            "layer except the head"
        ),
    ] = (ALL_LINEAR,)
    rslora: Annotated[
        bool, Key("multiply by alpha / sqrt(rank) instead, which suits high ranks (rsLoRA)")
    ] = False
    dora: Annotated[
        bool, Key("train the norm of each output's weights apart from their direction (DoRA)")
    ] = False
    modules_to_save: Annotated[
        tuple[str, ...],
        Key("layers that are trained as a whole, by the ends of their names"),
    ] = ()
    start_from: Annotated[
        Path | None, Key("folder with adapters of the same kind that the run begins with")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """The optimizer (AdamW), its schedule, and how batches are made up."""

    epochs: Annotated[int, Key("passes over all rows", least=1, most=10**6)] = 1
    max_steps: Annotated[
        int | None,
        Key("the run and its schedule end after this step, if the epochs have more", least=1),
    ] = None
    batch_size: Annotated[int, Key("rows per step, over all workers", least=1)] = 16
    num_shards: Annotated[
        int, Key("parts of a batch; workers share these parts", least=1, most=2**16)
    ] = 4
    learning_rate: Annotated[float, Key("the highest learning rate", above=0)] = 2e-4
    schedule: Annotated[
        str,
        Key(
            "how the learning rate falls after the warm-up",
            choices=("constant", "linear", "cosine"),
        ),
    ] = "cosine"
    warmup_share: Annotated[
        float,
        Key("share of the steps in which the learning rate rises (warm-up)", least=0, below=1),
    ] = 0.03
    weight_decay: Annotated[float, Key("AdamW's weight decay", least=0)] = 0.0
    clip_norm: Annotated[
        float | None, Key("a step's gradient is clipped to this L2 norm", above=0)
    ] = 1.0

    def num_steps(self, num_samples: int) -> int:
        """Return the number of steps of a run on `num_samples` samples."""
        num_steps = self.epochs * -(-num_samples // self.batch_size)
        return num_steps if self.max_steps is None else min(num_steps, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The evaluated states that are kept, each in a folder that `entrenar infer` reads."""

    best: Annotated[
        bool, Key("keep the state with the lowest validation loss, in `output`/best")
    ] = False
    last: Annotated[
        int, Key("keep the states of this many last evaluations, in `output`/step-N", least=0)
    ] = 0


@dataclass(frozen=True, kw_only=True)
class Completions:
    """The requests of `entrenar distill text` to the teacher, and the use of its answers."""

    prompts: Annotated[
        Path,
        Key(
            "prompts: rows in .jsonl, .json or .parquet; for `instruct` a row without "
            "its last answer"
        ),
    ]
    rows: Annotated[Path, Key("JSONL file to write, for data.train of a later run")]
    endpoint: Annotated[
        str | None,
        Key("base URL of an OpenAI-compatible server (http://host:8000/v1), instead of `teacher`"),
    ] = None
    served_model: Annotated[str | None, Key("the model's name at the endpoint")] = None
    key_variable: Annotated[str | None, Key("environment variable with the endpoint's API key")] = (
        None
    )
    new_tokens: Annotated[
        int, Key("largest number of tokens in an answer", least=1, most=2**17)
    ] = 512
    temperature: Annotated[
        float, Key("sampling temperature; 0 takes the most likely token", least=0, most=10)
    ] = 0.0
    concurrent: Annotated[int, Key("requests at a time", least=1, most=2**10)] = 4
    retries: Annotated[
        int, Key("how many times a failed request is tried again", least=0, most=100)
    ] = 4
    timeout_s: Annotated[float, Key("seconds that an answer may take", above=0, most=86_400)] = (
        300.0
    )
    synthetic_share: Annotated[
        float, Key("share of the written rows that the teacher made", least=0.001, most=1)
    ] = 0.5


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """A teacher's soft targets (`entrenar distill`), and the loss that learns from them."""

    logits: Annotated[
        Path | None,
        Key("folder of the teacher's shards, which may still be arriving; not needed for `text`"),
    ] = None
    teacher: Annotated[
        Path | None, Key("folder with the teacher's checkpoint; training a student doesn't need it")
    ] = None
    top_k: Annotated[
        int, Key("number of most likely tokens that are kept at each position", least=1, most=2**24)
    ] = 128
    stored: Annotated[
        str, Key("number format of log-probabilities in a shard", choices=("float16", "float32"))
    ] = "float16"
    precision: Annotated[
        str,
        Key("number format of the teacher's weights; int8 is for CPUs", choices=TEACHER_PRECISIONS),
    ] = "bfloat16"
    shard_samples: Annotated[int, Key("samples per shard", least=1, most=2**20)] = 256
    batch_tokens: Annotated[
        int,
        Key("largest number of tokens in a teacher's batch, unless a single row has more", least=1),
    ] = 8192
    wait_s: Annotated[
        float,
        Key(
            "seconds that a student waits for a shard; with 0 a missing shard ends the run", least=0
        ),
    ] = 86400.0
    alpha: Annotated[
        float,
        Key(
            "weight of the teacher's part of the loss; cross entropy has the weight 1 - alpha",
            least=0,
            most=1,
        ),
    ] = 0.5
    temperature: Annotated[
        float,
        Key(
            "temperature T of both distributions; the divergence is multiplied by T * T",
            above=0,
            most=10**4,
        ),
    ] = 2.0
    text: Annotated[
        Completions | None,
        Key("settings of `entrenar distill text`; other commands don't read them"),
    ] = None

    @property
    def shards(self) -> Path:
        """The folder of the teacher's shards. Raises UsageError if none is named."""
        if self.logits is None:
            raise UsageError(
                "distill.logits is missing: the folder of the teacher's shards; only `entrenar "
                "distill text` needs none (to train on its rows, leave the section distill out)"
            )
        return self.logits


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The PEM certificates of `entrenar coordinator`."""

    cert: Annotated[Path, Key("the coordinator's certificate; workers check its name")]
    key: Annotated[Path, Key("its private key, without a passphrase")]
    ca: Annotated[
        Path | None, Key("the authority that signs the certificates that workers must show")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The time limits of coordinator and workers, in seconds."""

    heartbeat_s: Annotated[float, Key("time between two heartbeats of either end", above=0)] = (
        USUAL.heartbeat_s
    )
    dead_after_s: Annotated[
        float, Key("how long either end may be silent before it counts as dead", above=0)
    ] = USUAL.dead_after_s
    hello_s: Annotated[
        float, Key("how long a new connection may take to prove the secret", above=0)
    ] = USUAL.hello_s
    gather_s: Annotated[
        float,
        Key(
            "how long the run waits for enough workers before it ends, and for a worker that "
            "receives and loads the state",
            above=0,
        ),
    ] = USUAL.gather_s


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The address and the workers of a run that `entrenar coordinator` serves."""

    secret_file: Annotated[Path, Key("file with the secret: its bytes, stripped of white space")]
    listen: Annotated[str, Key("where workers connect, host:port; port 0 means any free port")] = (
        "127.0.0.1:7411"
    )
    topology: Annotated[
        str,
        Key(
            "where gradients go: all to the coordinator, or from worker to worker",
            choices=("star", "mesh"),
        ),
    ] = "star"
    tls: Annotated[Tls | None, Key("all connections use TLS 1.3")] = None
    wait_for: Annotated[
        int, Key("workers that must have joined before the first step", least=1, most=2**10)
    ] = 1
    audit_share: Annotated[
        float,
        Key(
            "share of each step's shards that a second worker also computes; at least "
            "one shard if not 0",
            least=0,
            most=1,
        ),
    ] = 0.0
    timing: Annotated[Timeouts, Key("how long either end waits, in seconds")] = Timeouts()


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A stage of `strategy: layer_pipeline`."""

    layers: Annotated[
        tuple[int, int], Key("[first, stop]: its first block, and the one after its last")
    ]
    worker: Annotated[
        tuple[str, ...],
        Key(
            "the worker that computes it, by its `entrenar worker --id`; several "
            "workers share the shards"
        ),
    ] = ()
    backend: Annotated[
        str | None, Key("the kind of backend that its workers need", choices=KINDS)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run."""

    model: Annotated[Path, Key("folder with a checkpoint in Hugging Face's format")]
    task: Annotated[str, Key("the task to train for", choices=TASKS)]
    output: Annotated[Path, Key("folder for the trained weights, and for the run's record")]
    method: Annotated[
        str,
        Key(
            "train adapters, adapters on frozen weights in NF4, or all weights",
            choices=METHODS,
        ),
    ] = "lora"
    precision: Annotated[
        str,
        Key(
            "number format of frozen weights and of matrix products; trained weights are float32",
            choices=PRECISIONS,
        ),
    ] = "float32"
    recompute: Annotated[
        str,
        Key(
            "activations that are recomputed in the backward pass: less memory, more time",
            choices=RECOMPUTED,
        ),
    ] = "none"
    strategy: Annotated[
        str | None,
        Key(
            "how ranks that torchrun starts share the work; or layer_pipeline, in "
            "which each worker of `entrenar coordinator` has a stage of the model",
            choices=(*STRATEGIES, LAYER_PIPELINE),
        ),
    ] = None
    elastic: Annotated[
        bool,
        Key("whether the run goes on when ranks of `ddp_canonical` die, and new ones may join"),
    ] = False
    stages: Annotated[
        tuple[StagePlan, ...],
        Key("the stages of `layer_pipeline`, in order; by default one per worker, of equal size"),
    ] = ()
    workers: Annotated[
        int | None,
        Key(
            "processes that compute on this machine, with one thread each; by default "
            "as many as cores, shards and memory allow. For `entrenar coordinator`: "
            "workers at a time (1)",
            least=1,
            most=2**10,
        ),
    ] = None
    devices: Annotated[
        tuple[str, ...],
        Key(
            "devices that a run may use, as name:memory[:bandwidth]; by default those "
            "of this machine"
        ),
    ] = ()
    seed: Annotated[int, Key("seed of all random numbers", least=0, most=2**63 - 1)] = 0
    evaluate_every: Annotated[
        int, Key("steps from one evaluation on the validation rows to the next", least=1)
    ] = 50
    checkpoint_every: Annotated[int, Key("steps from one checkpoint to the next", least=1)] = 50
    keep: Annotated[Keep, Key("states that are kept after an evaluation")] = Keep()
    compile: Annotated[
        bool | str,
        Key(
            "compile the model's blocks on CUDA devices, which takes seconds at the start; auto: "
            "if the run is long enough; never with dropout, or with recompute: blocks",
            choices=(AUTO, True, False),
        ),
    ] = AUTO
    attention: Annotated[
        str,
        Key(
            "library that computes causal attention on CUDA devices; cudnn is faster on GPUs of "
            "Hopper's generation, and needs nvidia-cudnn-frontend",
            choices=ATTENTIONS,
        ),
    ] = TORCH
    trust_remote_code: Annotated[bool, Key("run Python that comes with the checkpoint")] = False
    data: Annotated[Data, Key("the rows")]
    classes: Annotated[Classes, Key("the classes of `task: classify`")] = Classes()
    preference: Annotated[Preference, Key("the loss of `task: preference`")] = Preference()
    lora: Annotated[Lora, Key("the adapters of `method: lora` and `qlora`")] = Lora()
    training: Annotated[Training, Key("the optimizer and its batches")] = Training()
    distill: Annotated[
        Distillation | None, Key("for `entrenar distill`: also learn from a teacher")
    ] = None
    coordinator: Annotated[
        Serving | None,
        Key("for `entrenar coordinator`: workers on other machines; other commands don't read it"),
    ] = None

    @property
    def num_workers(self) -> int:
        """The number of workers in the configuration; 1 if it gives none."""
        return self.workers or 1

    @property
    def adapts(self) -> bool:
        """True if adapters are trained and the model's own weights are frozen."""
        return self.method != "full"


class Limit(NamedTuple):
    """A setting with which only some strategies run, and why; `keys` lead to it in a file."""

    setting: str
    keys: tuple[str, ...]
    is_given: Callable[[Settings], bool]
    strategies: tuple[str, ...]
    reason: str

    @property
    def advice(self) -> str:
        """The reason, and the strategies to use."""
        return f"{self.reason}; use {', '.join(self.strategies)}"


LIMITS = (
    Limit(
        "task: preference",
        ("strategy",),
        lambda settings: settings.task == "preference",
        BY_SHARDS,
        "both sides of a pair, and the reference, need the whole model",
    ),
    Limit(
        "distill",
        ("strategy",),
        lambda settings: settings.distill is not None,
        BY_SHARDS,
        "a student's loss needs the whole model's logits on one device",
    ),
    Limit(
        "modules_to_save",
        ("lora", "modules_to_save"),
        lambda settings: bool(settings.lora.modules_to_save),
        WHOLE_MODELS,
        "a rank or stage needs them whole",
    ),
    Limit(
        "dora: true",
        ("lora", "dora"),
        lambda settings: settings.lora.dora,
        WHOLE_LAYERS,
        "the norms need a layer's whole weights",
    ),
    Limit(
        "method: qlora",
        ("strategy",),
        lambda settings: settings.method == "qlora",
        (*WHOLE_LAYERS, LAYER_PIPELINE),
        "quantised weights can't be cut",
    ),
    Limit(
        "compile: true",
        ("compile",),
        # A layer pipeline doesn't read the key at all.
        lambda settings: settings.compile is True and settings.strategy != LAYER_PIPELINE,
        COMPILABLE,
        "its blocks are not compiled",
    ),
)


def limits_of(settings: Settings, strategy: str) -> list[Limit]:
    """Return the settings with which `strategy` can't run."""
    return [one for one in LIMITS if strategy not in one.strategies and one.is_given(settings)]
