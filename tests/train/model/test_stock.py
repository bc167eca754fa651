"""What is exported is what stock libraries read, also on rows that are filled up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.model import model, stock
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings
from tests.train.model import checkpoints

# peft asks for what a later transformers will lack.


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("is_tied", [True, False])
def test_adapters_of_a_head_are_not_added_to_the_embeddings(
    is_tied: bool, small: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = checkpoints.qwen3()
    config.tie_word_embeddings = is_tied
    whole = checkpoints.settings(small, tmp_path / "model", config)
    chosen = replace(whole, method="lora", lora=Lora(rank=2, targets=("q_proj", "lm_head")))
    module: Any = model.load(chosen, 0).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if "lora_B" in name:
                tensor.normal_()
        tokens = torch.tensor([[5, 6, 7, 8]])
        expected = module(input_ids=tokens).logits
        stock.merge(module, model.tokenizer(chosen), tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        apart = (merged(input_ids=tokens).logits - expected).norm()
    assert apart < 1e-5 * expected.norm()


# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [7, 8, 9, 0, 0, 0]])  # the second row is filled up
MASK = (TOKENS != 0).long()


def settings(folder: Path, **changes: Any) -> Settings:
    usual: dict[str, Any] = {
        "model": folder,
        "task": "classify",
        "output": folder.parent / "out",
        "data": Data(train=folder / "rows.jsonl"),
        "classes": Classes(labels=("safe", "unsafe", "unknown")),
        "lora": Lora(rank=2, targets=("q_proj", "v_proj")),
    }
    chosen = Settings(**{**usual, **changes})
    return chosen if chosen.task == "classify" else replace(chosen, classes=Classes())


@pytest.fixture
def checkpoint(small: Path, tmp_path: Path) -> Path:
    """The small Qwen3, whose config.json and tokenizer both fill up with token 0."""
    shutil.copytree(small / "model", tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **keys: Any) -> None:
    """Set keys of the JSON file at `path`."""
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | keys), encoding="utf-8")


def exported(chosen: Settings) -> tuple[Any, Mapping[str, Any]]:
    """Write a model with trained tensors that are drawn; return it, and them."""
    module: Any = model.load(chosen, 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if tensor.requires_grad and ("lora_" in name or "score" in name):
                tensor.copy_(torch.randn(tensor.shape, generator=draw))
    trained = {
        name: tensor.detach().numpy().copy()
        for name, tensor in module.named_parameters()
        if tensor.requires_grad
    }
    stock.save(module, trained, model.tokenizer(chosen), chosen.output)
    return module, trained


def agree(chosen: Settings, module: Any, trained: Mapping[str, Any]) -> None:
    stock.require_agreement(chosen, module, trained, pad_token=0, folder=chosen.output)


@pytest.mark.parametrize("noted", [None, 3])
def test_a_classifier_that_stock_peft_would_score_otherwise_is_refused(
    noted: int | None, checkpoint: Path
) -> None:
    """It looks for the last token that is no padding, by the checkpoint's config.json alone."""
    change(checkpoint / "config.json", pad_token_id=noted)
    told = f"pad_token_id={noted}, and its tokenizer pads rows with token 0: .* pad_token_id: 0"
    with pytest.raises(UsageError, match=told):
        model.load(settings(checkpoint), 0)
    model.load(settings(checkpoint, task="text"), 0)  # no language model looks for it
    change(checkpoint / "config.json", pad_token_id=0)
    model.load(settings(checkpoint), 0)


def test_a_whole_classifier_is_exported_with_the_token_that_fills_up_its_rows(
    checkpoint: Path,
) -> None:
    """Stock transformers scores rows of unlike lengths as the run's own model does."""
    transformers = pytest.importorskip("transformers")
    change(checkpoint / "config.json", pad_token_id=None)
    chosen = settings(checkpoint, method="full")
    module, trained = exported(chosen)
    agree(chosen, module, trained)
    read = transformers.AutoModelForSequenceClassification.from_pretrained(chosen.output).eval()
    with torch.no_grad():
        theirs = read(input_ids=TOKENS, attention_mask=MASK).logits
        alone = read(input_ids=TOKENS[1:, :3]).logits
    torch.testing.assert_close(theirs[1:], alone)


def test_an_encoder_needs_no_padding_token_in_its_configuration(
    small: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=512, num_attention_heads=2, **sizes)
    config.pad_token_id = 3
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    model.load(settings(tmp_path, lora=Lora(rank=2, targets=("query",))), 0)


KINDS: dict[str, dict[str, Any]] = {
    "classes": {},
    "classes, narrow and recomputed": {"precision": "bfloat16", "recompute": "blocks"},
    "texts": {"task": "text", "lora": Lora(rank=2, targets=("q_proj", "lm_head"))},
    "texts, all linear layers": {"task": "text", "lora": Lora(rank=2)},
    "texts, rsLoRA": {"task": "text", "lora": Lora(rank=9, rslora=True)},
    "texts, a whole norm": {"task": "text", "lora": Lora(rank=2, modules_to_save=("model.norm",))},
    "classes, DoRA": {"lora": Lora(rank=2, dora=True)},
    "texts, DoRA, narrow": {"task": "text", "precision": "bfloat16", "lora": Lora(dora=True)},
    "all weights": {"task": "text", "method": "full"},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_stock_libraries_read_what_is_exported(kind: str, checkpoint: Path) -> None:
    """No weight below the adapters is read or held again."""
    chosen = settings(checkpoint, **KINDS[kind])
    module, trained = exported(chosen)
    agree(chosen, module, trained)


def of(config: Any, small: Path, folder: Path, **lora: Any) -> Settings:
    """Return settings that train adapters of a small model with `config`."""
    whole = checkpoints.settings(small, folder, config)
    return replace(whole, method="lora", lora=Lora(rank=2, **lora))


EXPERTS = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.filterwarnings("error:.*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", *EXPERTS), EXPERTS])
def test_adapters_of_experts_are_read_back(
    targets: tuple[str, ...], small: Path, tmp_path: Path
) -> None:
    """By stock peft, by later commands, and by a run that begins with them.

    Both matrices that one tensor has together get the rank that each had as a layer.
    """
    chosen = of(checkpoints.qwen3_moe(), small, tmp_path / "model", targets=targets)
    module, trained = exported(chosen)
    agree(chosen, module, trained)
    assert trained_shape(trained, "mlp.experts.base_layer.lora_A") == (4 * 2 * 2, 32)
    assert trained_shape(trained, "mlp.experts.lora_A") == (4 * 2, 16)
    lora = replace(chosen.lora, start_from=chosen.output)
    for again in (
        model.trained(chosen, chosen.output, 0),
        model.load(replace(chosen, lora=lora), 0),
    ):
        read = dict(again.named_parameters())
        for name, array in trained.items():
            assert torch.equal(read[name], torch.from_numpy(array)), name
    pattern = {r".*\.gate_up_proj": 1}
    change(chosen.output / "adapter_config.json", alpha_pattern=pattern)
    with pytest.raises(UsageError, match=r"lora\.start_from=.*: its adapters have alpha_pattern: "):
        model.load(replace(chosen, lora=lora), 0)


def trained_shape(trained: Mapping[str, Any], part: str) -> tuple[int, ...]:
    return next(tuple(one.shape) for name, one in trained.items() if f"0.{part}." in name)


def test_what_peft_has_not_for_experts(small: Path, tmp_path: Path) -> None:
    """The message names the setting that has to change."""
    chosen = of(checkpoints.qwen3_moe(), small, tmp_path)
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"dropout": 0.05},
            r"lora\.dropout=0\.05: peft adapts down_proj, gate\.weight, gate_up_pr",
        ),
        ({"dora": True}, r"lora\.dora=True: peft adapts down_proj"),
        ({"targets": ("w1",)}, r"lora\.targets='w1': .* it has q_proj, .*, up_proj, down_proj"),
        ({"targets": ("up_proj",)}, r"lora\.targets=up_proj: .* also targeting gate_proj"),
    ]
    for changes, told in refused:
        with pytest.raises(UsageError, match=told):
            model.load(replace(chosen, lora=replace(chosen.lora, **changes)), 0)
    lora = replace(chosen.lora, dropout=0.05, targets=("q_proj",))
    model.load(replace(chosen, lora=lora), 0)


@pytest.mark.parametrize("kind", ["llama4", "phimoe"])
def test_routers_that_return_several_tensors_get_no_adapters(
    kind: str, small: Path, tmp_path: Path
) -> None:
    chosen = of(getattr(checkpoints, kind)(), small, tmp_path / "model")
    module, trained = exported(chosen)
    agree(chosen, module, trained)
    assert not any("router" in name for name in trained)
    lora = replace(chosen.lora, targets=("q_proj", "router"))
    with pytest.raises(
        UsageError, match=r"lora\.targets='router': .* model\.layers\.0\..*\.router"
    ):
        model.load(replace(chosen, lora=lora), 0)


def test_a_configuration_without_a_padding_token(small: Path, tmp_path: Path) -> None:
    chosen = of(checkpoints.codegen(), small, tmp_path / "model")
    module, trained = exported(chosen)
    agree(chosen, module, trained)


@pytest.mark.parametrize("task", ["classify", "text"])
def test_by_default_the_layers_of_pefts_all_linear_are_adapted(task: str, checkpoint: Path) -> None:
    """All that peft adapts, and nothing else; the head is not among them."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    chosen = settings(checkpoint, task=task, lora=Lora(rank=2))
    kind = {
        "classify": (transformers.AutoModelForSequenceClassification, "SEQ_CLS"),
        "text": (transformers.AutoModelForCausalLM, "CAUSAL_LM"),
    }
    whole, of_task = kind[task]
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type=of_task)
    theirs = peft.get_peft_model(whole.from_pretrained(checkpoint), config)
    shapes = {name: tensor.shape for name, tensor in theirs.named_parameters() if ".lora_" in name}
    ours = model.load(chosen, 0).named_parameters()
    assert shapes == {name: tensor.shape for name, tensor in ours if ".lora_" in name}
    assert any(".down_proj." in name for name in shapes)


def test_a_head_and_a_table_are_trained_whole(small: Path, tmp_path: Path) -> None:
    """Both are read back by stock peft, and a merge has them, too."""
    transformers = pytest.importorskip("transformers")
    config = checkpoints.qwen3()
    config.tie_word_embeddings = False
    whole = checkpoints.settings(small, tmp_path / "model", config)
    saved = ("embed_tokens", "lm_head")
    lora = Lora(rank=2, modules_to_save=saved)
    chosen = replace(whole, method="lora", lora=lora)
    module, trained = exported(chosen)
    assert sum(name.split(".modules_to_save.")[0].endswith(saved) for name in trained) == 2
    agree(chosen, module, trained)
    module.eval()
    with torch.no_grad():
        due = module(input_ids=TOKENS[:1]).logits
        stock.merge(module, model.tokenizer(chosen), tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(input_ids=TOKENS[:1]).logits, due)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lm_head", "model.embed_tokens has the same weights"),
        ("embed_tokens", "lm_head has the same weights"),
        ("head", "the model has no layer of that name with weights"),
        ("norm", r"all of q_norm, k_norm, input_layernorm, .*; use a longer .* as model\.norm"),
    ],
)
def test_what_cannot_be_trained_whole(name: str, told: str, small: Path, tmp_path: Path) -> None:
    config = checkpoints.qwen3()
    config.tie_word_embeddings = True
    whole = checkpoints.settings(small, tmp_path / "model", config)
    chosen = replace(whole, method="lora", lora=Lora(modules_to_save=(name,)))
    with pytest.raises(UsageError, match=rf"lora\.modules_to_save='{name}': .*{told}"):
        model.load(chosen, 0)


def test_a_trained_head_is_never_rounded(checkpoint: Path) -> None:
    """It is float32 above a checkpoint in 16 bits, too: in a next run, `infer` and a merge."""
    safetensors = pytest.importorskip("safetensors.torch")
    chosen = settings(checkpoint, precision="bfloat16")
    trained = exported(chosen)[1]
    name = next(name for name in trained if ".score." in name)
    head = torch.from_numpy(trained[name])
    assert not torch.equal(head, head.bfloat16().float())
    lora = replace(chosen.lora, start_from=chosen.output)
    begun = model.load(replace(chosen, lora=lora), 0)
    read = model.trained(chosen, chosen.output, 0)
    for module in (begun, read):
        assert torch.equal(dict(module.named_parameters())[name], head)
    stock.merge(read.float(), model.tokenizer(chosen), chosen.output / "merged")
    merged = safetensors.load_file(chosen.output / "merged" / "model.safetensors")
    assert torch.equal(merged["score.weight"], head)


def test_a_run_begins_with_the_adapters_of_another(checkpoint: Path) -> None:
    """They have the values that stock peft reads there; other kinds of adapters are refused."""
    lora = Lora(rank=2, targets=("q_proj", "v_proj"))
    trained = exported(settings(checkpoint, lora=lora))[1]
    start = checkpoint.parent / "out"
    chosen = settings(checkpoint, output=start.parent / "next")
    chosen = replace(chosen, lora=replace(lora, start_from=start), seed=7)
    begun = dict(model.load(chosen, 0).named_parameters())
    for name, array in trained.items():
        assert torch.equal(begun[name], torch.from_numpy(array)), name
    for change, told in {
        "rank": r"its adapters have rank: 2, and lora\.rank is 4",
        "dora": r"its adapters have dora: False, and lora\.dora is True",
        "targets": r"k_proj\.lora_A\.weight has shape none there, and \(2, 64\) in this run",
    }.items():
        given: dict[str, Any] = {"rank": 4, "dora": True, "targets": ("q_proj", "k_proj")}
        other = replace(chosen.lora, **{change: given[change]})
        with pytest.raises(UsageError, match=rf"lora\.start_from={start}: .*{told}"):
            model.load(replace(chosen, lora=other), 0)
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        model.load(replace(chosen, lora=replace(lora, start_from=checkpoint)), 0)


@pytest.mark.parametrize("lora", [Lora(rank=2, targets=("q_proj", "v_proj")), Lora(dora=True)])
def test_stock_peft_reads_adapters_of_a_quantised_model(
    lora: Lora, small: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    config = checkpoints.llama()
    config.update({"hidden_size": 64, "intermediate_size": 64, "pad_token_id": 0})
    whole = checkpoints.settings(small, tmp_path / "model", config)
    chosen = settings(whole.model, method="qlora", lora=lora)
    module, trained = exported(chosen)
    agree(chosen, module, trained)
    change(chosen.output / "adapter_config.json", lora_alpha=1)
    with pytest.raises(
        SystemFailure, match="its logits of two rows of different lengths are up to"
    ):
        agree(chosen, module, trained)


def another_alpha(folder: Path) -> None:
    change(folder / "adapter_config.json", lora_alpha=1)


def another_tensor(folder: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    held = torch_files.load_file(folder / "adapter_model.safetensors")
    name = next(name for name in held if "lora_B" in name)
    torch_files.save_file({**held, name: held[name] + 1}, folder / "adapter_model.safetensors")


def no_padding(folder: Path) -> None:
    change(folder / "config.json", pad_token_id=None)


def another_norm(folder: Path) -> None:
    change(folder / "config.json", rms_norm_eps=1.0)


@pytest.mark.parametrize(
    ("damage", "method", "told"),
    [
        (another_alpha, "lora", "its logits of two rows of different lengths are up to"),
        (another_tensor, "lora", r"lora_B\.default\.weight has different values"),
        (no_padding, "full", "it can't compute two rows of different lengths"),
        (another_norm, "full", "its logits of two rows of different lengths are up to"),
    ],
)
def test_a_folder_that_says_something_else_is_told(
    damage: Callable[[Path], None], method: str, told: str, checkpoint: Path
) -> None:
    chosen = settings(checkpoint, method=method)
    module, trained = exported(chosen)
    damage(chosen.output)
    with pytest.raises(SystemFailure, match=f"is not the model of this run: .*{told}"):
        agree(chosen, module, trained)


def test_a_folder_that_cannot_be_read_back_is_a_failure_of_the_run(checkpoint: Path) -> None:
    """It is no mistake of the configuration, whose exit code it had."""
    chosen = settings(checkpoint)
    module, trained = exported(chosen)
    (chosen.output / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        SystemFailure,
        match=r"stock libraries can't read the files that were written there: .*adapters",
    ):
        agree(chosen, module, trained)
