"""Write the JSON schema of a fine-tuning's configuration: `python -m docs.finetune_schema`."""

from __future__ import annotations

import json
from pathlib import Path

from entrenar_py.train.finetune import settings_forms

NAME = "finetune-schema-v1.json"
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def text() -> str:
    """Return the schema as it stands in docs/."""
    head = {"$schema": _DRAFT, "title": "A configuration of `entrenar finetune`"}
    return json.dumps(head | settings_forms.schema(), indent=2) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / NAME).write_text(text(), encoding="utf-8")
