"""Writes what a configuration may have: as a commented file, and as a JSON schema.

Both come from the records in `train.model.settings`, as `settings_file` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from entrenar_py.train.finetune.settings_file import Field, fields_of
from entrenar_py.train.model.settings import Settings, spelled

_HEAD = "# Every key of `entrenar finetune`. Relative paths start from this file's folder."
_EXAMPLES = {
    "model": "path/to/checkpoint",
    "task": "instruct",
    "output": "out",
    "train": "train.jsonl",
    "prompts": "prompts.jsonl",
    "rows": "answers.jsonl",
    "secret_file": "secret",
    "cert": "coordinator.pem",
    "key": "coordinator.key",
}
_JSON: Mapping[Any, Mapping[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    bool | str: {},
    str: {"type": "string"},
    Path: {"type": "string"},
    tuple[str, ...]: {"type": ["array", "string"], "items": {"type": "string"}},
    tuple[int, int]: {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
    },
}


def template() -> str:
    """Return a configuration with example values for required keys; all others are comments."""
    return "\n".join([_HEAD, *_lines(Settings, is_hidden=False)]) + "\n"


def _lines(section: type[Any], *, is_hidden: bool) -> Iterator[str]:
    """Yield the lines of a section. With `is_hidden`, the caller turns all into comments."""
    for field in fields_of(section):
        choices = f": {', '.join(map(spelled, field.key.choices))}" if field.key.choices else ""
        yield f"# {field.key.meaning}{choices}"
        mark = "" if field.is_required or is_hidden else "# "
        if field.is_section:
            yield f"{mark}{field.name}:"
            inner = _lines(field.kind, is_hidden=not field.is_required)
            yield from (f"{mark}  {line}" for line in inner)
        else:
            value = _EXAMPLES[field.name] if field.is_required else _yaml(field.default)
            yield f"{mark}{field.name}: {value}"
            if field.member is not None:
                keys = ", ".join(
                    f"{one.name} ({one.key.meaning})" for one in fields_of(field.member)
                )
                yield f"# each of them has {keys}"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return "null" if value is None else spelled(value) if isinstance(value, bool) else str(value)


def schema(section: type[Any] = Settings) -> dict[str, Any]:
    """Return the JSON schema of a configuration, or of one of its sections."""
    fields = list(fields_of(section))
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {field.name: _schema_of(field) for field in fields},
        "required": [field.name for field in fields if field.is_required],
    }


def _schema_of(field: Field) -> dict[str, Any]:
    if field.member is not None:
        form: dict[str, Any] = {"type": "array", "items": schema(field.member)}
    else:
        form = schema(field.kind) if field.is_section else dict(_JSON[field.kind])
    if field.is_optional:
        form["type"] = [form["type"], "null"]
    choices = [*field.key.choices, *([None] if field.is_optional else [])]
    bounds = {
        "description": field.key.meaning,
        "enum": choices if field.key.choices else None,
        "minimum": field.key.least,
        "maximum": field.key.most,
        "exclusiveMinimum": field.key.above,
        "exclusiveMaximum": field.key.below,
    }
    return form | {name: bound for name, bound in bounds.items() if bound is not None}
