"""Writes docs/field.md from the recipes of tests/field and their results: `make docs`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.field import elastic, recipes, run
from tests.field.recipe import Expected, Recipe, Trial, result_path

PAGE = Path(__file__).parent / "field.md"
HEAD = """\
# The field

<!-- Written by `python -m docs.field_page`; a test says when it is out of date. -->

This page has the verdicts of entrenar-check on well-known training scripts, as they are published,
and the reason why each verdict is right. `make field` repeats the runs, and fails if a verdict
differs. The scripts are not copied into this project: a recipe in `tests/field/recipes/` names
repository and commit, the lines to add, the data and the command.

No contract is named, as in a plain call. So a falsified F-DP-003 is advice: torch steps with a NaN
by default. A falsified F-TI-007 is advice, too, if it comes from rounding on GPUs. Rows
named "language model" use `language-model-v1.yaml`.

Each verdict that is not "held" is explained as one of these:

- **defect**: the script does something that nobody wants. It is reproduced in at most thirty lines
  without entrenar-check.
- **default**: the script or library does as documented, and the contract asks for more.
- **property**: the clause's comparison does not apply to the script's design.
- **not declared**: a declaration, or an option of the command, would settle it.
- **limit of the tool**: no declaration could settle it.
"""
ELASTIC = """\
## Elastic scripts

Scripts that are made to survive the death of a rank: what do they keep? Each was run undisturbed,
and with one of two ranks killed (SIGKILL) in the middle of an epoch, on CPUs over gloo.
`python -m tests.field.elastic` repeats it. The weights at the end of both runs are compared, and
the steps and samples that they are made of. Each run had
[`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`](your-trainer.md#a-restart-by-torchrun), without which most
restarts by torchrun fail. [`entrenar_py.elastic`](elastic.md) keeps every step, sample and bit.

Steps "made again" were made before the kill and had to be repeated. Steps "beyond" are those that
the weights at the end contain, in addition to the undisturbed run's. The pause is the longest time
without a step of the first rank (torch 2.13.0 on two cores that other work shared, 30 November
2026).

| script | steps | made again | beyond | samples lost | trained twice | by one rank alone \
| weights at the end | pause | why |
|---|---|---|---|---|---|---|---|---|---|"""


def page() -> str:
    """Return the text of docs/field.md."""
    everything = recipes.everything()
    return "\n".join(
        [
            HEAD,
            "## All scripts\n",
            "| script | how | on | held | not applied | advice | falsified | inconclusive | exit "
            "| s |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(line for recipe in everything for line in _rows(recipe)),
            "",
            ELASTIC,
            *_elastic_rows(),
            "",
            *(line for recipe in everything for line in _section(recipe)),
        ]
    )


def results(recipe: Recipe, trial: Trial) -> Mapping[str, Any] | None:
    """Return what was recorded of a trial, or None."""
    path = result_path(recipe, trial.hardware)
    if not path.exists():
        return None
    found: Mapping[str, Any] | None = json.loads(path.read_text("utf-8")).get(trial.name)
    return found


def _rows(recipe: Recipe) -> Iterator[str]:
    for trial in recipe.trials:
        result = results(recipe, trial)
        anchor = re.sub(r"[^\w-]", "", recipe.name)
        link = f"[{recipe.title}](#{anchor})"
        if result is None:
            yield _line(link, trial.name, trial.hardware, "not run yet", *[""] * 6)
            continue
        yield _line(
            link,
            trial.name,
            result["device"],
            str(len(_of(result, "held"))),
            ", ".join(_of(result, run.ABSENT)) or "none",
            ", ".join(_of(result, run.ADVICE)) or "none",
            _kinds(trial, result, "falsified"),
            _kinds(trial, result, "inconclusive"),
            str(_exit_code(result)),
            str(result["seconds"]),
        )


_FIGURES = (
    *("num_steps", "steps_back", "steps_beyond"),
    *("samples_lost", "samples_again", "steps_alone"),
)


def _elastic_rows() -> Iterator[str]:
    known = json.loads(elastic.RESULTS.read_text("utf-8"))
    for name, found in known.items():
        ends = "the same bits" if found["same_weights"] else "others, equal on both ranks"
        yield _line(
            f"{name}, [{found['commit'][:7]}]({found['address']})",
            *(str(found[key]) for key in _FIGURES),
            ends if found["ranks_agree"] else "others, different on the ranks",
            f"{found['pause_s']} s",
            elastic.WHY[name],
        )


def _of(result: Mapping[str, Any], verdict: str) -> list[str]:
    """Return the clauses with a verdict."""
    return [name for name, one in result["clauses"].items() if one["verdict"] == verdict]


def _exit_code(result: Mapping[str, Any]) -> int:
    if _of(result, "falsified"):
        return 1
    return 4 if _of(result, "inconclusive") else 0


def _kinds(trial: Trial, result: Mapping[str, Any], verdict: str) -> str:
    """Return the clauses that were recorded with a verdict, and whose doing that is."""
    found = [one for one in trial.expected if one.clause in _of(result, verdict)]
    return ", ".join(f"{one.clause} ({one.kind})" for one in found) or "none"


def _section(recipe: Recipe) -> Iterator[str]:
    yield f"## {recipe.name}\n"
    source = f"[{recipe.repository}]({recipe.address})" if recipe.address else "a driver of ours"
    if recipe.driver:
        source = f"[`{recipe.driver}`](../tests/field/drivers/{recipe.driver}), as a user writes it"
    yield f"{recipe.title}, from {source}.\n"
    for trial in recipe.trials:
        yield f"**{trial.name}**{_lines(trial)}\n"
        yield f"```\n{' '.join(trial.command)}\n```\n"
        result = results(recipe, trial)
        if result is not None:
            versions = ", ".join(f"{name} {one}" for name, one in result["versions"].items())
            yield f"With {versions}; held: {', '.join(_of(result, 'held')) or 'none'}.\n"
            for name in _of(result, run.ABSENT):
                yield f"{name} is not applied: {result['clauses'][name]['reason']}.\n"
        if trial.expected:
            yield "| clause | verdict | kind | why |"
            yield "|---|---|---|---|"
            yield from map(_explained, trial.expected)
            yield ""


def _lines(trial: Trial) -> str:
    added = sum(len(one.add.splitlines()) for one in trial.edits)
    changed = sum(len(one.instead.splitlines()) for one in trial.edits)
    told = [f"{added} lines added"] * bool(added) + [f"{changed} lines changed"] * bool(changed)
    return f", {' and '.join(told)}:" if told else ":"


def _explained(one: Expected) -> str:
    links = []
    if one.reproduction:
        links.append(f"[reproduced](../tests/field/reproductions/{one.reproduction})")
    if one.known:
        links.append(f"[known]({one.known})")
    return _line(one.clause, one.verdict, str(one.kind), " ".join((one.because, *links)))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
