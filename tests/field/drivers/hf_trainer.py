"""transformers.Trainer on a causal language model from a configuration, as its documentation has
it: sequences of several lengths, accumulation, a checkpoint after each step."""

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--dir", help="folder of checkpoints")
arguments = parser.parse_args()
world_size = int(os.environ["WORLD_SIZE"])


def padded(samples):
    """Return a batch: padded with 0, which the loss leaves out."""
    length = max(len(words) for words in samples)
    ids = torch.stack([torch.nn.functional.pad(w, (0, length - len(w))) for w in samples])
    labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


set_seed(0)
lengths = torch.randint(2, 12, (arguments.samples,)).tolist()
data = [torch.randint(1, 32, (length,)) for length in lengths]
kept = arguments.dir and any(Path(arguments.dir).glob("checkpoint-*"))
rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), arguments.dropout)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, **rates)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir=arguments.dir or "out",
        per_device_train_batch_size=arguments.global_batch // world_size // arguments.accumulation,
        gradient_accumulation_steps=arguments.accumulation,
        max_grad_norm=arguments.clip,
        max_steps=arguments.steps,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_strategy="steps" if arguments.dir else "no",
        save_steps=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=data,
    data_collator=padded,
)
trainer.train(resume_from_checkpoint=True if kept else None)
