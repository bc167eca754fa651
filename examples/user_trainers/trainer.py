"""Hugging Face's Trainer, on sequences of different lengths.

Loss is the sum over tokens by the tokens of the whole step, whatever the micro-batches and workers:
`num_items_in_batch` counts them. The Trainer stops at nothing: with `logging_nan_inf_filter`, its
default, a loss that is NaN is not even logged, so a callback looks at the gradients. The sequences
divide by the batch: what is left over would be filled up with some that were there before.
"""

import os
import tempfile

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from entrenar_py.integrations.transformers import ObserveCallback

GLOBAL_BATCH, MICRO_BATCHES, WORDS, LENGTH = 8, 2, 8, 7
world_size = int(os.environ["WORLD_SIZE"])


class Model(torch.nn.Module):
    """The next word, by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 6)
        self.head = torch.nn.Linear(6, WORDS)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embedding(input_ids))}


def loss_of(outputs, labels, num_items_in_batch=None):
    """The sum of the losses of this micro-batch's tokens, by the number of those of the step."""
    total = torch.nn.functional.cross_entropy(outputs["logits"].mT, labels, reduction="sum")
    count = int((labels != -100).sum())
    watch.observation.loss(total / count, count)
    return total / num_items_in_batch


class StopAtNaN(TrainerCallback):
    """Nothing that is not finite is stepped with."""

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            raise FloatingPointError(f"the gradient of step {state.global_step} is not finite")


torch.manual_seed(0)
sequences = torch.randint(WORDS, (32, LENGTH))
data = [{"input_ids": words[:-1], "labels": words[1:].clone()} for words in sequences]
for sample, length in zip(data, torch.randint(1, LENGTH, (32,)).tolist(), strict=True):
    sample["labels"][length:] = -100  # padding
watch = ObserveCallback()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=GLOBAL_BATCH // MICRO_BATCHES // world_size,
        gradient_accumulation_steps=MICRO_BATCHES,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        label_names=["labels"],  # the model takes none, so they would be left out
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        use_cpu=torch.cuda.device_count() < world_size,
    )
    Trainer(
        model=Model(),
        args=arguments,
        train_dataset=data,
        compute_loss_func=loss_of,
        callbacks=[watch, StopAtNaN()],
    ).train()
