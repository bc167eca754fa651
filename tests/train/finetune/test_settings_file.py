"""A configuration is read whole or refused with all its problems, each at its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from docs import finetune_schema
from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import ContractError, UsageError
from entrenar_py.train.finetune import foreign_keys, serving, settings_file, settings_forms
from entrenar_py.train.finetune.strategies import launch
from entrenar_py.train.model import model
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.service import exit_codes
from tests.train.plan.qwen3 import TINY, settings

PAIRS = """\
model: model
task: preference
output: out
data: {train: rows.jsonl}
"""
SMALL = """\
model: model
task: text
output: out
data: {train: rows.jsonl}
"""
CLASSES = """\
model: model
task: classify
output: out
data: {train: rows.jsonl}
classes: {labels: [a, b]}
"""


def load(folder: Path, text: str) -> Settings:
    """Return the settings of a file with `text`."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return settings_file.load(path)


def problems(folder: Path, text: str) -> list[str]:
    """Return the problems of a file with `text`, without its folder."""
    with pytest.raises(ContractError) as raised:
        load(folder, text)
    return [line.removeprefix(f"{folder}/") for line in raised.value.problems]


def test_relative_paths_start_from_the_files_folder(tmp_path: Path) -> None:
    settings = load(tmp_path, SMALL.replace("output: out", "output: /elsewhere/out"))
    assert settings.model == tmp_path / "model"
    assert settings.data.train == tmp_path / "rows.jsonl"
    assert settings.output == Path("/elsewhere/out")
    assert (
        load(tmp_path, SMALL.replace("output: out", "output: a/../out")).output == tmp_path / "out"
    )


def test_a_way_up_from_a_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    settings = load(tmp_path, SMALL.replace("output: out", "output: link/../out"))
    assert settings.output.resolve() == tmp_path / "far" / "out"


def test_the_template_is_a_configuration_at_its_defaults(tmp_path: Path) -> None:
    settings = load(tmp_path, settings_forms.template())
    plain = load(
        tmp_path,
        "model: path/to/checkpoint\ntask: instruct\noutput: out\ndata: {train: train.jsonl}\n",
    )
    assert settings == plain


def test_every_key_of_the_template_can_be_uncommented(tmp_path: Path) -> None:
    lines = settings_forms.template().splitlines()
    keys = {field.name for field in settings_file.fields_of(Settings)}
    shown = yaml.safe_load("\n".join(line.removeprefix("# ") for line in lines if _is_key(line)))
    assert set(shown) == keys


def _is_key(line: str) -> bool:
    """Return whether a line of the template is a key, perhaps behind a comment's sign."""
    text = line.removeprefix("# ")
    name = text.strip().partition(":")[0]
    return name.isidentifier() and not text.startswith(" ")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = """\
modle: m
task: clasify
data: {train: rows.jsonl, max_tokens: 1, on_eror: stop}
training: {learning_rate: fast, batch_size: 2.5, num_shards: 0}
workers: yes
"""
    found = problems(tmp_path, text)
    assert found == [
        "run.yaml:1:1: error: configuration: key 'modle' is not read; did you mean 'model'?",
        "run.yaml:1:1: error: configuration: model is missing: folder with a checkpoint in "
        "Hugging Face's format",
        "run.yaml:1:1: error: configuration: output is missing: folder for the trained weights, "
        "and for the run's record",
        "run.yaml:2:7: error: configuration: task='clasify': use instruct or classify or text or "
        "preference",
        "run.yaml:3:39: error: data: max_tokens=1: use a number >= 2",
        "run.yaml:3:42: error: data: key 'on_eror' is not read; did you mean 'on_error'?",
        "run.yaml:4:27: error: training: learning_rate='fast': use a number",
        "run.yaml:4:45: error: training: batch_size=2.5: use a whole number",
        "run.yaml:4:62: error: training: num_shards=0: use a number >= 1 and <= 65536",
        "run.yaml:5:10: error: configuration: workers=True: use a whole number",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            SMALL + "classes: {labels: [a, b]}\n",
            "5:19: error: task: text has no classes; leave labels out",
        ),
        (
            SMALL + "method: full\nlora: {rank: 4}\n",
            "6:14: error: method: full has no adapters; leave rank out",
        ),
        (
            SMALL.replace("rows.jsonl", "rows.jsonl, label_field: y"),
            "4:40: error: task: text does not read label_field; leave it out",
        ),
        (
            SMALL.replace("rows.jsonl", "r.jsonl, validation: v.jsonl, validation_share: 0.1"),
            "4:63: error: validation and validation_share: give one",
        ),
        (
            CLASSES.replace("[a, b]", "[a]"),
            "5:19: error: task: classify needs two classes.labels or more",
        ),
        (
            CLASSES.replace("[a, b]", "[a, a]"),
            "5:19: error: classes.labels has a class twice; name each once",
        ),
        (
            SMALL + "training: {batch_size: 2}\n",
            "5:11: error: num_shards=4 with batch_size=2: a shard would have no row; use "
            "num_shards <= batch_size",
        ),
        (
            SMALL + "workers: 8\n",
            "5:10: error: workers=8 with num_shards=4: a worker would have no shard; use workers "
            "<= num_shards",
        ),
        (
            SMALL + "strategy: ddp\nworkers: 2\n",
            "6:10: error: strategy: ddp does not read workers; leave it out, and give torchrun "
            "--nproc_per_node",
        ),
        (
            CLASSES.replace("rows.jsonl", "rows.jsonl, packing: true"),
            "4:36: error: packing with task: classify: a class is predicted from the end of a "
            "sequence; leave packing out",
        ),
        (
            SMALL + "preference: {beta: 0.2}\n",
            "5:20: error: task: text has no pairs; leave beta out",
        ),
        (
            PAIRS + "preference: {label_smoothing: 0.5}\n",
            "5:31: error: preference: label_smoothing=0.5: use a number >= 0 and < 0.5",
        ),
        (
            PAIRS + "method: full\n",
            "5:9: error: task: preference with method: full: the reference is the model without "
            "its adapters, and with all weights trained a second model would be needed; use "
            "method: lora or qlora",
        ),
        (
            PAIRS.replace("rows.jsonl", "rows.jsonl, packing: true"),
            "4:36: error: packing with task: preference: the two sides of a pair are separate "
            "rows; leave packing out",
        ),
        (
            PAIRS.replace("rows.jsonl", "rows.jsonl, messages_field: x"),
            "4:43: error: task: preference does not read messages_field; leave it out",
        ),
        (
            PAIRS + "strategy: pipeline_parallel\n",
            "5:11: error: task: preference with strategy: pipeline_parallel: both sides of a "
            "pair, and the reference, need the whole model; use ddp, ddp_canonical, fsdp, "
            "fsdp_canonical, or none",
        ),
        (
            PAIRS + "distill: {logits: soft}\n",
            "5:10: error: distill with task: preference: a teacher's logits are for next tokens; "
            "use task: instruct or text",
        ),
        (
            SMALL + "strategy: fsdp\nmethod: qlora\n",
            "5:11: error: method: qlora with strategy: fsdp: quantised weights can't be cut; use "
            "ddp, ddp_canonical, pipeline_parallel, layer_pipeline, or none",
        ),
        (
            SMALL + "strategy: fsdp_canonical\nelastic: true\n",
            "6:10: error: elastic: true with strategy: fsdp_canonical: only with ddp_canonical may "
            "ranks die and join; use strategy: ddp_canonical, or leave elastic out",
        ),
        (
            SMALL + "elastic: true\n",
            "5:10: error: elastic: true with strategy: none: only with ddp_canonical may ranks die "
            "and join; use strategy: ddp_canonical, or leave elastic out",
        ),
        (
            SMALL + "strategy: ddp_canonical\ntraining: {num_shards: 3}\n",
            "6:24: error: num_shards=3 with strategy: ddp_canonical: ranks share a tree evenly; "
            "use 1, 2, 4, 8 ...",
        ),
        (
            SMALL + "strategy: sequence_parallel\ncompile: true\n",
            "6:10: error: compile: true with strategy: sequence_parallel: its blocks are not "
            "compiled; use ddp, ddp_canonical, tensor_parallel, or none",
        ),
        (
            SMALL + "compile: often\n",
            "5:10: error: configuration: compile='often': use auto or true or false",
        ),
        (
            SMALL + "attention: cudnn\n",
            "5:12: error: attention: cudnn with precision: float32: it computes in 16 bits; leave "
            "out one of the two",
        ),
        (
            SMALL.replace("}", ", packing: true}") + "precision: bfloat16\nattention: cudnn\n",
            "6:12: error: attention: cudnn with packing: true: packed rows need masks; leave out "
            "one of the two",
        ),
        (
            SMALL + "compile: true\nrecompute: blocks\n",
            "5:10: error: compile: true with recompute: blocks: blocks that are computed again are "
            "not compiled; leave out one of the two",
        ),
        (
            CLASSES.replace("b]", "b], weights: inverse, oversample: true"),
            "5:36: error: weights=inverse with oversample: true: all classes are equally frequent "
            "then, so each weight would be 1; give only one of the two",
        ),
        (
            SMALL + "training: {epochs: }\n",
            "5:20: error: training: epochs: it has no value; give one, or leave the key out",
        ),
        (
            SMALL + "training: {learning_rate: .inf}\n",
            "5:27: error: training: learning_rate=inf: use a finite number",
        ),
        (
            SMALL + "lora: {targets: []}\n",
            "5:17: error: targets is empty: name a layer to adapt, such as q_proj",
        ),
        (
            SMALL + "strategy: fsdp\nlora: {dora: true}\n",
            "6:14: error: dora: true with strategy: fsdp: the norms need a layer's whole weights; "
            "use ddp, ddp_canonical, pipeline_parallel, or none",
        ),
        (
            SMALL + "precision: bfloat16\nlora: {modules_to_save: [norm]}\n",
            "6:25: error: modules_to_save with precision: bfloat16: they are trained in float32, "
            "and stock peft would compute with fewer bits; use precision: float32",
        ),
        (
            SMALL + "strategy: fsdp\nlora: {modules_to_save: [norm]}\n",
            "6:25: error: modules_to_save with strategy: fsdp: a rank or stage needs them whole; "
            "use ddp, ddp_canonical, or none",
        ),
        (
            SMALL + "keep: {best: true}\n",
            "5:7: error: keep without rows to evaluate on: give data.validation, too",
        ),
        (
            SMALL + "lora: {targets: [all-linear, q_proj]}\n",
            "5:17: error: targets=all-linear: use all-linear alone, or name the ends of layers' "
            "names",
        ),
        (
            SMALL + "training: {learning_rate: .nan}\n",
            "5:27: error: training: learning_rate=nan: use a number > 0",
        ),
    ],
)
def test_keys_that_do_not_go_together(tmp_path: Path, text: str, told: str) -> None:
    assert problems(tmp_path, text) == [f"run.yaml:{told}"]


@pytest.mark.parametrize(
    "text",
    [SMALL, CLASSES, CLASSES.replace("b]", "\U0001f4a3]"), SMALL + "method: full\nseed: 3\n"],
)
def test_settings_come_back_from_their_text(tmp_path: Path, text: str) -> None:
    settings = load(tmp_path, text)
    written = settings_file.to_text(settings_file.to_record(settings))
    assert settings_file.of_text(written, "written") == settings
    assert load(tmp_path, written) == settings


def test_settings_of_half_a_character() -> None:
    with pytest.raises(ContractError, match=r"^written:1:\d+: error: not UTF-8"):
        settings_file.of_text('{"task": "\ud83d"}', "written")


def test_the_schema_of_the_docs_is_current() -> None:
    """If not, run `python -m docs.finetune_schema`."""
    path = Path(finetune_schema.__file__).parent / finetune_schema.NAME
    assert path.read_text(encoding="utf-8") == finetune_schema.text()


def test_the_schema_takes_what_is_read(tmp_path: Path) -> None:
    schema = settings_forms.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    assert check.is_valid(yaml.safe_load(CLASSES))
    assert check.is_valid(settings_file.to_record(load(tmp_path, CLASSES)))
    assert not check.is_valid(yaml.safe_load(SMALL.replace("task: text", "task: talk")))
    assert not check.is_valid(yaml.safe_load(SMALL + "modle: a\n"))
    assert not check.is_valid(yaml.safe_load(SMALL + "lora: {rank: 0}\n"))


def test_keys_of_other_tools_are_told_with_ours(tmp_path: Path) -> None:
    """Each at its place, all at once; so are our own keys in another section."""
    text = SMALL + (
        "lr: 1e-4\ngradient_accumulation_steps: 8\nmax_steps: 10\nbf16: true\nthreads: 4\n"
        "batch_size: 4\nlora: {r: 8, targets: all, seed: 3}\noptim: adamw_torch\n"
    )
    told = problems(tmp_path, text)
    parts = [
        ("5:1", "key 'lr' is not read; did you mean training.learning_rate?"),
        ("6:1", "did you mean training.batch_size? rows per step: the product"),
        ("7:1", "did you mean training.max_steps? ends a run before training.epochs do"),
        ("8:1", "did you mean precision? float32 or bfloat16"),
        ("9:1", "did you mean workers? a worker computes on one thread"),
        ("10:1", "key 'batch_size' is not read; did you mean training.batch_size?"),
        ("11:8", "lora: key 'r' is not read; did you mean lora.rank?"),
        ("11:23", "targets=all: use all-linear alone, or name the ends of layers' names"),
        ("11:28", "did you mean seed outside of this section?"),
        ("12:1", "leave it out: the optimizer is AdamW"),
    ]
    assert len(told) == len(parts)
    for line, (place, part) in zip(told, parts, strict=True):
        assert line.startswith(f"run.yaml:{place}: error: "), line
        assert part in line


def test_what_other_tools_keys_lead_to_is_read() -> None:
    """Every key of ours in the table exists, and no name of another tool is one, at its place."""
    known = set(_keys(settings_forms.schema()))
    for row in foreign_keys.ROWS:
        assert not row.ours or row.ours in known, row
        assert row.ours or row.note, row


def _keys(schema: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, one in schema["properties"].items():
        yield before + name
        if "properties" in one:
            yield from _keys(one, f"{before}{name}.")


OF_STAGES = """\
model: model
task: text
output: out
data: {train: rows.jsonl}
strategy: layer_pipeline
"""


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            "{layers: [0, 2]}\n- {layers: [3, 4]}",
            "8:12: error: stages[1] layers=[3, 4]: no stage has block 2; let it begin at 2",
        ),
        (
            "{layers: [2, 4]}",
            "7:12: error: stages[0] layers=[2, 4]: no stage has blocks 0 to 1; let it begin at 0",
        ),
        (
            "{layers: [0, 2]}\n- {layers: [1, 4]}",
            "8:12: error: stages[1] layers=[1, 4]: block 1 is in stages[0] or before, too; let it "
            "begin at 2",
        ),
        (
            "{layers: [0, 3]}\n- {layers: [1, 4]}",
            "8:12: error: stages[1] layers=[1, 4]: blocks 1 to 2 are in stages[0] or before, too; "
            "let it begin at 3",
        ),
        (
            "{layers: [2, 4]}\n- {layers: [0, 2]}",
            "7:12: error: stages[0] layers=[2, 4]: stages are listed in the order of their blocks; "
            "put the one with layers: [0, 2] here",
        ),
        (
            "{layers: [0, 0]}\n- {layers: [0, 2]}",
            "7:12: error: stages[0] layers=[0, 0]: it has no block; use [first, last + 1]",
        ),
        (
            "{layers: [-1, 2]}",
            "7:12: error: stages[0] layers=[-1, 2]: blocks are counted from 0",
        ),
        (
            "{layers: [0, 1], worker: a}\n- {layers: [1, 2], worker: [b, a]}",
            "8:28: error: stages[1] worker=a: stages[0] has it, too; a worker has one stage",
        ),
        (
            "{layers: [0, 1], worker: [a, a]}",
            "7:28: error: stages[0] worker=a: it is named twice; a worker has one stage",
        ),
        (
            "{layers: [0, 1], worker: [a, b, c, d, e]}",
            "7:28: error: stages[0] has 5 workers, and training.num_shards=4: one would have no "
            "shard; use num_shards >= 5, or fewer workers",
        ),
        (
            "{layers: [0, 1], backend: tpu}",
            "7:29: error: stages[0]: backend='tpu': use cpu or cuda or wgpu",
        ),
        (
            "{layers: [0, 1, 2]}",
            "7:12: error: stages[0]: layers=[0, 1, 2]: use a list of two whole numbers",
        ),
        (
            "{layer: [0, 1]}",
            "7:3: error: stages[0]: layers is missing: [first, stop]: its first block, and the one "
            "after its last",
        ),
    ],
)
def test_stages(tmp_path: Path, stages: str, told: str) -> None:
    found = problems(tmp_path, f"{OF_STAGES}stages:\n- {stages}\n")
    assert f"run.yaml:{told}" in found
    assert len(found) == (2 if "layer:" in stages else 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            OF_STAGES + "stages: [{layers: [0, 1]}]\nworkers: 2\n",
            "7:10: error: workers=2 with stages: each stage names its own workers; leave it out",
        ),
        (
            OF_STAGES.replace("rows.jsonl", "rows.jsonl, packing: true"),
            "4:36: error: strategy: layer_pipeline does not read data.packing; leave it out",
        ),
        (
            OF_STAGES.replace("rows.jsonl", "rows.jsonl, validation: v.jsonl"),
            "4:39: error: strategy: layer_pipeline does not read rows to evaluate on; leave it out",
        ),
        (
            OF_STAGES.replace("rows.jsonl", "rows.jsonl, validation_share: 0.1"),
            "4:45: error: strategy: layer_pipeline does not read rows to evaluate on; leave it out",
        ),
        (
            OF_STAGES + "trust_remote_code: true\n",
            "6:20: error: strategy: layer_pipeline does not read trust_remote_code; leave it out",
        ),
        (
            OF_STAGES + "compile: false\n",
            "6:10: error: strategy: layer_pipeline does not read compile: a stage runs its blocks "
            "as they are; leave it out",
        ),
        (
            OF_STAGES + "coordinator: {secret_file: s, wait_for: 1}\n",
            "6:41: error: strategy: layer_pipeline does not read wait_for: a step needs all "
            "stages; leave it out",
        ),
        (
            OF_STAGES.replace("layer_pipeline", "ddp") + "stages: [{layers: [0, 1]}]\n",
            "6:9: error: stages: only strategy: layer_pipeline has stages; leave them out",
        ),
    ],
)
def test_keys_beside_stages(tmp_path: Path, text: str, told: str) -> None:
    assert problems(tmp_path, text) == [f"run.yaml:{told}"]


def test_problems_of_several_stages_are_told_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        f"{OF_STAGES}stages:\n- {{layers: [1, 2], worker: a}}\n- {{layers: [3, 4], worker: a}}\n",
    )
    assert [line.partition(" error")[0] for line in found] == [
        "run.yaml:7:12:",
        "run.yaml:8:12:",
        "run.yaml:8:28:",
    ]


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            "{layers: [0, 3]}",
            "7:12: error: stages[0] layers=[0, 3]: the model has 4 blocks, 0 to 3; use layers: "
            "[0, 4]",
        ),
        (
            "{layers: [0, 5]}\n- {layers: [5, 6]}",
            "7:12: error: stages[0] layers=[0, 5]: the model has 4 blocks, 0 to 3; use layers: "
            "[0, 4], and leave out what comes after it",
        ),
        (
            "{layers: [0, 4]}\n- {layers: [4, 6]}",
            "8:12: error: stages[1] layers=[4, 6]: the model has 4 blocks, 0 to 3; leave it out",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_stages_that_do_not_fit_the_model(tmp_path: Path, stages: str, told: str) -> None:
    pytest.importorskip("peft")
    module = model.shape(settings(tmp_path, TINY))
    path = tmp_path / "run.yaml"
    with pytest.raises(ContractError) as raised:
        serving.cut_of(path, load(tmp_path, f"{OF_STAGES}stages:\n- {stages}\n"), module)
    assert raised.value.problems == [f"{path}:{told}"]


@pytest.mark.parametrize("command", ["plan", "finetune"])
def test_commands_that_run_no_pipeline(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tmp_path, OF_STAGES)
    path = tmp_path / "run.yaml"
    assert cli.main([command, str(path)]) == exit_codes.INVALID
    assert (
        f"{path}: entrenar {command} does not run strategy: layer_pipeline; `entrenar pipeline "
        f"plan {path}` shows its stages, `entrenar coordinator {path}` trains"
    ) in capsys.readouterr().err


def test_ranks_of_torchrun_run_no_pipeline(tmp_path: Path) -> None:
    load(tmp_path, OF_STAGES)
    with pytest.raises(UsageError, match="torchrun does not run strategy: layer_pipeline; `entr"):
        launch.settings_of(tmp_path / "run.yaml")
