"""TRL's SFTTrainer on prompts and completions, as its documentation has it: a model from a
configuration, a tokenizer of words, accumulation."""

import argparse
import os
import random
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--packing", action="store_true")
parser.add_argument("--dir", help="folder of checkpoints")
arguments = parser.parse_args()
world_size = int(os.environ["WORLD_SIZE"])

set_seed(0)
words = [f"w{number}" for number in range(29)]
vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)


def text(least, most):
    return " ".join(random.choices(words, k=random.randint(least, most)))


rows = [{"prompt": text(2, 6), "completion": " " + text(1, 9)} for _ in range(arguments.samples)]
kept = arguments.dir and any(Path(arguments.dir).glob("checkpoint-*"))
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(
        output_dir=arguments.dir or "out",
        per_device_train_batch_size=arguments.global_batch // world_size // arguments.accumulation,
        gradient_accumulation_steps=arguments.accumulation,
        max_grad_norm=arguments.clip,
        max_steps=arguments.steps,
        max_length=32,
        packing=arguments.packing,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_strategy="steps" if arguments.dir else "no",
        save_steps=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=True if kept else None)
