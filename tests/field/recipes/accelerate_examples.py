"""huggingface/accelerate: its own example of text classification, with two ranks on the CPU."""

from __future__ import annotations

import csv
import random
from pathlib import Path

from tests.field.recipe import Recipe, Trial, default
from tests.field.usual import STEPS_AT_NAN

_WORDS = ("ask", "answer", "what", "is", "the", "sum", "of", "two", "red", "green", "dog", "cat")
_CARD = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.csv
  - split: validation
    path: validation.csv
---
"""
_METRIC = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("int64")
        features = datasets.Features({"predictions": kind, "references": kind})
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=features
        )

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
"""


def pairs(folder: Path) -> None:
    """Write what the examples download, in folders of the same names: model, data and metric."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    home = folder / "bert-base-cased"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *_WORDS])}
    BertTokenizer(vocab=vocabulary).save_pretrained(home)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(vocabulary), intermediate_size=32, max_position_embeddings=64, **size
    )
    BertForSequenceClassification(config).save_pretrained(home)
    glue = folder / "nyu-mll/glue"
    glue.mkdir(parents=True)
    (glue / "README.md").write_text(_CARD, encoding="utf-8")
    drawn = random.Random(0)
    for part, count in (("train", 128), ("validation", 16)):
        with Path(glue, f"{part}.csv").open("w", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("sentence1", "sentence2", "label", "idx"))
            for index in range(count):
                first, second = (" ".join(drawn.choices(_WORDS, k=k)) for k in (3 + index % 5, 5))
                rows.writerow((first, second, drawn.randint(0, 1), index))
    (folder / "glue").mkdir()
    (folder / "glue/glue.py").write_text(_METRIC, encoding="utf-8")


_SAME_MASKS = default(
    clause="F-TI-005",
    words="draws the same random numbers as rank 0, for other samples",
    because="`set_seed(seed)` sets the same seed on all ranks, so dropout drops the same elements "
    "on each. `device_specific=True` would not.",
    reproduction="same_dropout_on_all_ranks.py",
)
_USUAL = (STEPS_AT_NAN, _SAME_MASKS)
RECIPES = (
    Recipe(
        name="accelerate-examples",
        title="accelerate's examples",
        repository="huggingface/accelerate",
        commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        folder="examples",
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        data=pairs,
        environment={"HF_HUB_OFFLINE": "1", "HF_HOME": "hf"},
        trials=(
            Trial(
                name="auto, nlp_example",
                command=(
                    *("torchrun", "--standalone", "--nproc_per_node={world_size}"),
                    *("nlp_example.py", "--cpu"),
                ),
                options=("--steps", "4"),
                expected=_USUAL,
            ),
        ),
    ),
)
