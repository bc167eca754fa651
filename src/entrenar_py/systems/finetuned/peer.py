"""Fine-tuning by `transformers.Trainer` with `peft`: an independent oracle for our own.

Like all oracles it takes the checkpoint, the rows and the order of the samples from the scenario,
and it also uses our formula for the learning rate. Everything else is the peer's: tokens, masks,
loss, gradients, clipping, the selection of decayed weights, and the optimizer. The peer's schedule
is not used: with w warm-up steps its rate begins at 0, ours at 1 / (w + 1) of the peak.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from entrenar_py.shared import package_data, trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Tensors, Trace
from entrenar_py.systems.finetuned import records, small_run
from entrenar_py.systems.finetuned.small_run import LABELS, Fixture, Request
from entrenar_py.train.arithmetic import optimizer, sharding
from entrenar_py.train.coordinator.recorder import Recorder

IGNORED = -100


def run(scenario: Scenario) -> Trace:
    """Train as `scenario` says. Raises UsageError without the extras `finetune`, `integrations`."""
    request = Request.of(scenario)
    _require(scenario, request)
    recorder = Recorder(scenario)
    with small_run.quiet(), tempfile.TemporaryDirectory() as folder:
        fixture = small_run.make(Path(folder), scenario, request)
        try:
            import_module("accelerate")
        except ImportError as error:
            advice = package_data.extra_advice("integrations")
            raise UsageError(f"transformers.Trainer needs {error.name}; {advice}") from error
        module = _model(fixture, request)
        _train(scenario, fixture, module, recorder, Path(folder, "peer"))
    return recorder.finish(status="completed")


def _require(scenario: Scenario, request: Request) -> None:
    if scenario.optimizer != "adamw":
        raise UsageError.of("optimizer", scenario.optimizer, "use adamw, the Trainer's own")
    if request.oversample or scenario.dropout:
        raise UsageError(
            "oversample and dropout: this system does not support them, since its masks differ"
        )


def _model(fixture: Fixture, request: Request) -> Any:
    """Return the checkpoint's model, with adapters drawn from the run's seed."""
    import peft
    import transformers

    is_classes = fixture.settings.task == "classify"
    kind: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if is_classes:
        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": len(LABELS)}
    if request.method == "qlora":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        options["device_map"] = {"": "cpu"}
    torch.manual_seed(fixture.settings.seed)
    module = kind.from_pretrained(
        fixture.settings.model, dtype=torch.float32, local_files_only=True, **options
    )
    module.config.pad_token_id = 0
    if request.method == "full":
        return module
    config = peft.LoraConfig(
        r=request.rank,
        lora_alpha=request.alpha,
        target_modules=list(fixture.settings.lora.targets),
        task_type="SEQ_CLS" if is_classes else "CAUSAL_LM",
    )
    return peft.get_peft_model(module, config)


def _train(
    scenario: Scenario, fixture: Fixture, module: Any, recorder: Recorder, folder: Path
) -> None:
    """Train `module` with the Trainer, and record each step."""
    import transformers

    settings, notes = fixture.settings, _Notes(scenario, module, recorder)
    batches = list(_batches(scenario))
    rows = [_example(fixture, *found) for found in records.stock_rows(fixture)]
    for row, example in zip(fixture.rows, rows, strict=True):
        if settings.task == "classify":
            example["labels"] = LABELS.index(row["label"])

    class Peer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            given = ([rows[i] for i in batch] for batch in batches)
            whole: Any = [_collated(examples) for examples in given]
            return torch.utils.data.DataLoader(whole, batch_size=None, shuffle=False)

        def create_scheduler(self, *given: Any, **named: Any) -> Any:
            steps = torch.optim.lr_scheduler.LambdaLR(self.optimizer, notes.share_of_rate)
            self.lr_scheduler = steps
            return steps

        def training_step(self, *given: Any, **named: Any) -> Tensor:
            loss: Tensor = super().training_step(*given, **named)
            notes.computed(loss)
            return loss

    weights = _class_weights(fixture) if settings.task == "classify" else None
    trainer = Peer(
        model=module,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=scenario.num_steps,
            per_device_train_batch_size=scenario.batch_size,
            learning_rate=scenario.learning_rate,
            weight_decay=scenario.weight_decay,
            max_grad_norm=scenario.clip_norm or 0.0,
            optim="adamw_torch",
            adam_epsilon=1e-8,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=settings.seed,
            data_seed=settings.seed,
        ),
        callbacks=[notes.callback(transformers.TrainerCallback, batches)],
        compute_loss_func=None if weights is None else _weighted(weights),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def _batches(scenario: Scenario) -> Sequence[sharding.Ids]:
    """Return the samples of each step; an epoch's last batch may be short."""
    position, batches = sharding.Position(), []
    for _ in range(scenario.num_steps):
        visit = sharding.order(scenario.num_samples, scenario.rng("order", position.epoch))
        batches.append(sharding.batch(visit, position, scenario.batch_size))
        position = sharding.advance(position, len(batches[-1]), scenario.num_samples)
    return batches


def _example(fixture: Fixture, tokens: Sequence[int], completion: Sequence[int]) -> dict[str, Any]:
    labels = [token if place in completion else IGNORED for place, token in enumerate(tokens)]
    return {"input_ids": list(tokens), "labels": labels}


def _collated(examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the rows, padded on the right to the longest row, as the peer's own collators do."""
    longest = max(len(example["input_ids"]) for example in examples)

    def padded(values: Sequence[int], filler: int) -> list[int]:
        return [*values, *[filler] * (longest - len(values))]

    batch = {
        "input_ids": torch.tensor([padded(example["input_ids"], 0) for example in examples]),
        "attention_mask": torch.tensor(
            [padded([1] * len(example["input_ids"]), 0) for example in examples]
        ),
    }
    if isinstance(examples[0]["labels"], int):
        return {**batch, "labels": torch.tensor([example["labels"] for example in examples])}
    return {
        **batch,
        "labels": torch.tensor([padded(example["labels"], IGNORED) for example in examples]),
    }


def _class_weights(fixture: Fixture) -> Tensor:
    """Return class weights: 1, the inverse of each class's fraction of the rows, or its root.

    The mean is divided by the sum of the weights, so a common factor doesn't matter.
    """
    labels = [row["label"] for row in fixture.rows]
    shares = np.array([labels.count(label) / len(labels) for label in LABELS])
    power = {"none": 0.0, "inverse": -1.0, "sqrt_inverse": -0.5}[fixture.settings.classes.weights]
    return torch.tensor(shares**power, dtype=torch.float32)


def _weighted(weights: Tensor) -> Any:
    def loss(outputs: Any, labels: Tensor, **named: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, weight=weights)

    return loss


class _Notes:
    """Records the Trainer's steps as a trace's events."""

    def __init__(self, scenario: Scenario, module: nn.Module, recorder: Recorder) -> None:
        self._scenario, self._module, self._recorder = scenario, module, recorder
        self._loss, self._norm = 0.0, 0.0
        self._gradient: Tensors = {}

    def share_of_rate(self, step: int) -> float:
        """Return the learning rate of `step` as a fraction of the peak."""
        return optimizer.learning_rate(
            step,
            peak=1.0,
            kind=self._scenario.schedule,
            warmup_steps=self._scenario.warmup_steps,
            num_steps=self._scenario.num_steps,
        )

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self._module.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _weights(self) -> Tensors:
        trained = self._trained().items()
        return self._recorder.tensors({name: one.detach().numpy() for name, one in trained})

    def began(self) -> None:
        """Record the weights before the first step."""
        trained = self._trained()
        self._recorder.emit(
            trace.Start(
                step=0,
                rank=0,
                weights=self._weights(),
                trainable=tuple(trained),
                decayed=tuple(name for name, one in trained.items() if one.dim() > 1),
            )
        )

    def computed(self, loss: Tensor) -> None:
        """Keep the step's loss, and its gradient before clipping."""
        gradients = {
            name: (torch.zeros_like(array) if array.grad is None else array.grad).detach().numpy()
            for name, array in self._trained().items()
        }
        self._loss, self._gradient = float(loss), self._recorder.tensors(gradients)
        flat = np.concatenate([array.ravel() for array in gradients.values()])
        self._norm = optimizer.norm_l2(flat)

    def stepped(self, step: int, ids: sharding.Ids) -> None:
        """Record `step`, which used the samples `ids`."""
        self._recorder.emit(
            trace.Shard(
                step=step,
                rank=0,
                epoch=0,
                shard=0,
                ids=tuple(ids),
                loss_sum=None,
                weight=float(len(ids)),
                finite=True,
            )
        )
        self._recorder.emit(
            trace.Update(
                step=step,
                rank=0,
                loss=self._loss,
                weight=float(len(ids)),
                learning_rate=self._scenario.learning_rate * self.share_of_rate(step),
                finite=True,
                weights=self._weights(),
                gradient=self._gradient,
                grad_norm=self._norm,
            )
        )

    def callback(self, base: type[Any], batches: Sequence[sharding.Ids]) -> Any:
        """Return a callback of the Trainer that records its start and its steps."""
        notes = self

        class Listening(base):  # type: ignore[misc]
            def on_train_begin(self, *given: Any, **named: Any) -> None:
                notes.began()

            def on_step_end(self, args: Any, state: Any, *given: Any, **named: Any) -> None:
                step = state.global_step - 1
                notes.stepped(step, batches[step])

        return Listening()
