"""Every strategy trains as one process does, and writes what stock peft and transformers load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from entrenar_py import entrenar as cli
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import ledger
from entrenar_py.train.finetune import cli as finetune_cli
from entrenar_py.train.finetune import outputs, settings_file
from entrenar_py.train.finetune.strategies import launch, pipeline_parallel, strategy
from entrenar_py.train.model import evaluation, model, objectives, precision, preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import BY_SHARDS, STRATEGIES
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.service import exit_codes
from tests.train.finetune.strategies import ranks, runs
from tests.train.finetune.strategies.runs import Case
from tests.train.model import checkpoints

# peft asks for what a later transformers will lack.
CPU = torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"])
def workload(
    request: pytest.FixtureRequest, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Finetuning:
    """The small Qwen3 with adapters, in one process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    case = Case(
        folder=tmp_path, model=small / "model", small=small, more={"precision": request.param}
    )
    return preparation.prepare(settings_file.load(case.write("out", None))).workload()


def require_same(before: strategy.Reference, workload: Finetuning) -> None:
    strategy.require_same_logits(
        before, strategy.probe_logits(workload, CPU), "tensor_parallel", "Qwen3"
    )


def test_another_rounding_is_the_same_model(
    workload: Finetuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and products in float32, in place of bfloat16."""
    before = strategy.reference_of(workload, CPU)
    assert 0 < before.rounding < 0.05
    workload.module.float()
    monkeypatch.setattr(workload, "formats", lambda device: precision.as_given(device))
    require_same(before, workload)


@pytest.mark.parametrize("layer", ["o_proj", "down_proj", "q_proj", "v_proj"])
def test_a_part_that_is_missing_is_told(workload: Finetuning, layer: str) -> None:
    """Of each layer's weights, the half of another rank is 0, as if sums were never added."""
    before = strategy.reference_of(workload, CPU)
    for name, parameter in workload.module.named_parameters():
        if f"{layer}.base_layer.weight" in name:
            dim = 1 if layer in ("o_proj", "down_proj") else 0
            parameter.data.chunk(2, dim)[1].zero_()
    refusal = "strategy=tensor_parallel: Qwen3 computes different logits"
    with pytest.raises(UsageError, match=refusal):
        require_same(before, workload)


def test_adapters_are_part_of_it(workload: Finetuning) -> None:
    """With B filled, an adapter that is applied twice is told, and B is empty afterwards."""
    with strategy.filled(workload.module):
        before = strategy.reference_of(workload, CPU)
        for name, parameter in workload.module.named_parameters():
            if "lora_A" in name:
                parameter.data.mul_(2)
        with pytest.raises(UsageError, match="computes different logits"):
            require_same(before, workload)
    assert not any(p.any() for n, p in workload.module.named_parameters() if "lora_B" in n)


def test_what_is_no_number_is_left_alone() -> None:
    """A router of experts returns a tuple, with the experts that it chose."""

    class Router(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return scores, scores.argmax(-1)

    module, x = nn.Sequential(Router(3, 4)), torch.ones(2, 3)
    exact, chosen = module(x)
    with strategy._rounded(module, torch.Generator().manual_seed(0)):
        other, same = module(x)
    assert torch.equal(chosen, same)
    assert 0 < float((exact - other).detach().abs().max()) < 1e-5
    assert not module[0]._forward_hooks


# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

DROPOUT = {"dropout": 0.2}
VALIDATED = {"validation": runs.VALIDATION}
SCORED = {"evaluate_every": 2}
# AdamW's first steps have the size of the rate wherever a gradient is not 0: where one is near 0,
# rounding decides their direction. So later losses differ by more than their own rounding.
TOLERANCE = 2e-5
# Of a loss whose products are rounded to the 8 bits of bfloat16: on one kind of device in another
# order, and on a GPU by other kernels, too.
TOLERANCE_BFLOAT16, TOLERANCE_BFLOAT16_GPU = 2.0**-12, 2.0**-7


@pytest.fixture(scope="module")
def llama(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.llama(small, tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def bloom(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks return tuples."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(
        vocab_size=512, hidden_size=32, n_layer=4, n_head=4, hidden_dropout=0.0
    )
    folder = tmp_path_factory.mktemp("bloom") / "model"
    checkpoints.settings(small, folder, config)
    return folder


@pytest.fixture
def case(
    request: pytest.FixtureRequest, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Case:
    """Return a case with the small Qwen3, or what the test's parameters say instead."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes: dict[str, Any] = dict(getattr(request, "param", {}))
    name = changes.pop("model", "qwen3")
    model = small / "model" if name == "qwen3" else request.getfixturevalue(name)
    return replace(Case(folder=tmp_path, model=model, small=small), **changes)


@pytest.fixture(scope="module")
def undisturbed(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function of a strategy: the output of two ranks, run once for all tests."""

    @cache
    def trained(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp(strategy)
        case = Case(folder=folder, model=small / "model", small=small, lora=DROPOUT)
        case = replace(case, data=VALIDATED, more=SCORED)
        return run(case, strategy)

    return trained


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A case as one process trains it: its steps, and the output that was written from them."""

    steps: list[trace.Update]
    prepared: Prepared
    output: Path
    logits: Tensor
    scores: evaluation.Scores | None


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, int], Alone]:
    """Return a function of a case and `fill_up` (`Case.alone`): the run that ranks are compared to.

    Strategies with the same case share it.
    """
    made: dict[tuple[str, int], Alone] = {}

    def alone(case: Case, fill_up: int) -> Alone:
        key = repr(replace(case, folder=Path())), fill_up
        if key not in made:
            made[key] = _alone(replace(case, folder=tmp_path_factory.mktemp("alone")), fill_up)
        return made[key]

    return alone


def _alone(case: Case, fill_up: int) -> Alone:
    steps, tensors = case.alone(fill_up=fill_up)
    prepared = preparation.prepare(settings_file.load(case.folder / "alone.yaml"))
    output = outputs.write(prepared, prepared.workload(), tensors, model_digest="0" * 32)
    scores = None
    if prepared.validation is not None:
        module = model.trained(prepared.settings, output, prepared.pad_token)
        scores = evaluation.scores(
            module, prepared.validation, settings=prepared.settings, pad_token=prepared.pad_token
        )
    return Alone(
        steps=steps,
        prepared=prepared,
        output=output,
        logits=runs.logits(case, output),
        scores=scores,
    )


def run(case: Case, strategy: str) -> Path:
    """Train the case by two ranks; return the output."""
    codes, told = ranks.torchrun(case.write("out", strategy), 2)
    assert codes == [exit_codes.DONE] * 2, told
    return case.folder / "out"


BY_HAND = pytest.mark.by_hand
CASES = [
    pytest.param({"lora": DROPOUT, "data": VALIDATED, "more": SCORED}, id="qwen3-lora"),
    pytest.param({"method": "full"}, id="qwen3-full"),
    pytest.param({"model": "llama", "data": {"packing": True}}, id="llama-lora-packed"),
    pytest.param({"model": "llama", "method": "full"}, id="llama-full"),
    pytest.param({"task": "classify", "data": VALIDATED, "more": SCORED}, id="qwen3-classes"),
    pytest.param({"task": "preference", "data": VALIDATED, "more": SCORED}, id="qwen3-pairs"),
]
# CI has no minutes for all pairs: it tries every strategy and every case, `-m by_hand` the rest.
IN_CI = {
    "qwen3-lora": launch.STRATEGIES,
    "qwen3-full": ("fsdp",),
    "llama-lora-packed": ("tensor_parallel", "pipeline_parallel"),
    "llama-full": (),
    "qwen3-classes": ("sequence_parallel",),
    "qwen3-pairs": ("fsdp",),
}


def strategies(*in_ci: str) -> list[Any]:
    """Return all strategies as parameters; those that are not `in_ci` are tried by hand."""
    return [pytest.param(one, marks=() if one in in_ci else BY_HAND) for one in launch.STRATEGIES]


BFLOAT16 = {"precision": "bfloat16"}


@pytest.mark.parametrize("strategy", strategies("fsdp"))
@pytest.mark.parametrize("case", [{"more": BFLOAT16}], indirect=True)
def test_products_in_bfloat16(case: Case, strategy: str) -> None:
    """Adapters are float32 and all others bfloat16, so that products convert their operands."""
    output = run(case, strategy)
    steps, _ = case.alone()
    losses = [one.loss for one in runs.steps(output)]
    assert losses == pytest.approx([one.loss for one in steps], rel=TOLERANCE_BFLOAT16)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("strategy", launch.STRATEGIES)
@pytest.mark.parametrize("case", [{}, {"more": BFLOAT16}, {"method": "full"}], indirect=True)
def test_two_gpus_train_as_one_process_does(case: Case, strategy: str) -> None:
    """What they write infers as what one process wrote."""
    codes, told = ranks.torchrun(case.write("out", strategy), 2, on_gpus=True)
    assert codes == [exit_codes.DONE] * 2, told
    steps, tensors = case.alone()
    found, is_short = runs.steps(case.folder / "out"), case.more == BFLOAT16
    tolerance = TOLERANCE_BFLOAT16_GPU if is_short else 10 * TOLERANCE  # a GPU has other kernels
    losses = [one.loss for one in steps]
    assert [one.loss for one in found] == pytest.approx(losses, rel=tolerance)
    assert runs.noted(case.folder / "out", "step")[-1]["backends"] == {"0": "cuda:0", "1": "cuda:1"}
    prepared = preparation.prepare(settings_file.load(case.folder / "alone.yaml"))
    alone = outputs.write(prepared, prepared.workload(), tensors, model_digest="0" * 32)
    ours, theirs = runs.logits(case, case.folder / "out"), runs.logits(case, alone)
    # Without training, 72 % of these logits would be further away, 21 % in bfloat16.
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.05 if is_short else 5e-3)


@pytest.mark.parametrize(
    "case", [{"lora": {"targets": ["layers.0.self_attn.q_proj"]}}], indirect=True
)
def test_a_stage_without_anything_to_train_is_told(case: Case) -> None:
    """By all ranks, once; and what was refused leaves nothing that blocks the next attempt."""
    codes, told = ranks.torchrun(case.write("out", "pipeline_parallel"), 2)
    assert codes == [exit_codes.INVALID] * 2, told
    assert told.count("rank 1 has nothing to train in blocks 1 to 1") == 1
    run(case, "ddp")


@pytest.mark.parametrize(
    "case", [{"model": "bloom", "lora": {"targets": ["query_key_value"]}}], indirect=True
)
def test_blocks_that_return_tuples(case: Case) -> None:
    """Placeholders for blocks of other ranks do so, too."""
    output = run(case, "pipeline_parallel")
    steps, _ = case.alone()
    losses = [one.loss for one in runs.steps(output)]
    assert losses == pytest.approx([one.loss for one in steps], rel=TOLERANCE)


@pytest.mark.parametrize(
    "case", [{"method": "qlora"}, {"lora": {"dora": True, "rslora": True}}], indirect=True
)
def test_stages_keep_quantised_weights_and_norms(case: Case) -> None:
    codes, told = ranks.torchrun(case.write("out", "pipeline_parallel"), 2)
    assert codes == [exit_codes.DONE] * 2, told
    steps, _ = case.alone()
    losses = [one.loss for one in runs.steps(case.folder / "out")]
    assert losses == pytest.approx([one.loss for one in steps], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(
            *case.values,
            strategy,
            id=f"{case.id}-{strategy}",
            marks=() if strategy in IN_CI[str(case.id)] else BY_HAND,
        )
        for case in CASES
        for strategy in launch.STRATEGIES
        # Replicas hold whole models, so another architecture is nothing new to them.
        if str(case.id).startswith("qwen3") or strategy not in ("ddp", "ddp_canonical")
        if case.id != "qwen3-pairs" or strategy in BY_SHARDS
    ],
    indirect=["case"],
)
def test_two_ranks_train_as_one_process_does(
    case: Case,
    strategy: str,
    undisturbed: Callable[[str], Path],
    trained_alone: Callable[[Case, int], Alone],
) -> None:
    if strategy == "pipeline_parallel":  # whose stages drop by streams of their own
        case = replace(case, lora={})
    output = undisturbed(strategy) if case.lora == DROPOUT else run(case, strategy)
    alone = trained_alone(case, 2 if strategy == "sequence_parallel" else 1)
    found, steps = runs.steps(output), alone.steps
    assert [one.loss for one in found] == pytest.approx([one.loss for one in steps], rel=TOLERANCE)
    norms = [one.grad_norm for one in steps]
    assert [one.grad_norm for one in found] == pytest.approx(norms, rel=5 * TOLERANCE)
    assert [one.learning_rate for one in found] == [one.learning_rate for one in steps]
    assert (steps[-1].loss or 0.0) < (steps[0].loss or 0.0)
    if strategy == "ddp_canonical":  # with the bits of a worker
        assert [(one.loss, one.grad_norm) for one in found] == [
            (one.loss, one.grad_norm) for one in steps
        ]
        assert runs.digest(output) == runs.digest(alone.output)
    torch.testing.assert_close(runs.logits(case, output), alone.logits, rtol=1e-3, atol=1e-3)
    told_of = runs.noted(output, "step")[-1]
    assert told_of["backends"] == {"0": "cpu", "1": "cpu"}
    assert told_of["memory_bytes"] > 2**27, "of both ranks"
    assert (alone.scores is None) == (alone.prepared.validation is None)
    if alone.scores is not None:
        require_scored(runs.noted(output, "evaluation"), alone.scores)


def require_scored(scored: list[dict[str, Any]], due: evaluation.Scores) -> None:
    """Require scores after step 2 and at the end, these as of what one process wrote."""
    assert [one["step"] for one in scored] == [2, 4]
    assert scored[-1]["loss"] == pytest.approx(due.loss, rel=1e-3)
    assert scored[0]["loss"] != scored[-1]["loss"]
    assert scored[-1]["weight"] == due.weight
    assert scored[-1]["confusion"] == due.confusion.tolist()


@pytest.mark.parametrize("strategy", strategies("fsdp", "pipeline_parallel"))
@pytest.mark.parametrize("case", [{"lora": DROPOUT}], indirect=True)
def test_neither_blocks_that_are_computed_again_nor_scores_change_a_bit(
    case: Case, strategy: str, undisturbed: Callable[[str], Path]
) -> None:
    """The run that all are compared with keeps activations, and is scored after its second step."""
    output = run(replace(case, more={"recompute": "blocks"}), strategy)
    assert runs.digest(output) == runs.digest(undisturbed(strategy))


@pytest.mark.parametrize(
    "case",
    [
        {"lora": DROPOUT},
        {"method": "full", "data": {"packing": True}},
        {"method": "qlora"},
        {"lora": {"dora": True, "modules_to_save": ["model.norm"]}},
    ],
    indirect=True,
)
def test_canonical_ranks_write_the_same_bits(
    case: Case, undisturbed: Callable[[str], Path]
) -> None:
    digests = {runs.digest(undisturbed("ddp_canonical"))} if case.lora == DROPOUT else set()
    for world_size in (4,) if digests else (1, 4):
        config = case.write(f"out{world_size}", "ddp_canonical")
        codes, told = ranks.torchrun(config, world_size)
        assert codes == [exit_codes.DONE] * world_size, told
        digests.add(runs.digest(case.folder / f"out{world_size}"))
    assert len(digests) == 1


@pytest.mark.parametrize(
    "case",
    [{"lora": DROPOUT, "training": {"clip_norm": 0.05}, "more": {"checkpoint_every": 2}}],
    indirect=True,
)
def test_pieces_have_the_bits_of_whole_models(case: Case) -> None:
    """Weights and norms, on two and three ranks, some with empty pieces; each step is clipped.

    Two ranks that died may go on as three.
    """
    whole = case.write("whole", "ddp_canonical")
    assert ranks.torchrun(whole, 1, by_buckets=True)[0] == [exit_codes.DONE]
    norms = [one.grad_norm for one in runs.steps(case.folder / "whole")]
    for world_size in (2, 3):
        name = f"out{world_size}"
        config, copied = case.write(name, "fsdp_canonical"), 3 if world_size == 2 else None
        codes, told = ranks.torchrun(config, world_size, copies_before=copied)
        assert codes == [exit_codes.DONE] * world_size, told
        assert runs.digest(case.folder / name) == runs.digest(case.folder / "whole"), name
        found = runs.steps(case.folder / name)
        assert [one.grad_norm for one in found] == norms, name
        assert [one.applied_norm for one in found] == pytest.approx([0.05] * 4, rel=1e-3)
    for world_size, computed_by in ((2, [0, 0, 1, 1]), (3, [0, 1, 2, 0])):
        shards = ledger.load(case.folder / f"out{world_size}" / "ledger.jsonl").of(trace.Shard)
        assert [one.rank for one in shards if one.step == 0] == computed_by
    codes, told = ranks.torchrun(case.write("broken", "fsdp_canonical"), 3, "--resume")
    assert codes == [exit_codes.DONE] * 3, told
    assert runs.digest(case.folder / "broken") == runs.digest(case.folder / "whole")


@pytest.mark.parametrize("strategy", ["ddp", "ddp_canonical", "tensor_parallel"])
@pytest.mark.parametrize("case", [{"method": "full"}], indirect=True)
def test_large_tensors_are_not_one_vector(
    case: Case, strategy: str, trained_alone: Callable[[Case, int], Alone]
) -> None:
    """They are reduced by buckets, or one by one, and a run that died goes on with its bits.

    With ddp_canonical also on another number of ranks.
    """
    case = replace(case, more={"checkpoint_every": 2})
    config = case.write("out", strategy)
    codes, told = ranks.torchrun(config, 2, by_buckets=True, copies_before=3)
    assert codes == [exit_codes.DONE] * 2, told
    steps = trained_alone(case, 1).steps
    found = runs.steps(case.folder / "out")
    assert [one.loss for one in found] == pytest.approx([one.loss for one in steps], rel=TOLERANCE)
    broken = case.write("broken", strategy)
    size = 1 if strategy == "ddp_canonical" else 2
    codes, told = ranks.torchrun(broken, size, "--resume", by_buckets=True)
    assert codes == [exit_codes.DONE] * size, told
    assert [one.step for one in runs.steps(case.folder / "broken")] == [0, 1, 2, 2, 3]
    if strategy == "ddp_canonical":
        codes, told = ranks.torchrun(case.write("alike", strategy), 1, by_buckets=True)
        assert runs.digest(case.folder / "alike") == runs.digest(case.folder / "out")
    assert runs.digest(case.folder / "broken") == runs.digest(case.folder / "out")


@pytest.mark.parametrize("strategy", strategies("ddp", "pipeline_parallel"))
@pytest.mark.parametrize(
    "case", [{"lora": DROPOUT, "more": {"checkpoint_every": 2}}], indirect=True
)
def test_a_run_that_died_goes_on_with_the_same_bits(
    case: Case,
    strategy: str,
    undisturbed: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = case.write("broken", strategy)
    codes, _ = ranks.torchrun(broken, 2, dies_before=3)
    assert codes == [None, None]
    if strategy == "ddp":
        codes, told = ranks.torchrun(broken, 2)
        assert codes == [exit_codes.INVALID] * 2
        assert told.count("it already exists; continue with --resume") == 1
    codes, told = ranks.torchrun(broken, 2, "--resume")
    assert codes == [exit_codes.DONE] * 2, told
    assert "from step 2 on" in told
    assert runs.digest(undisturbed(strategy)) == runs.digest(case.folder / "broken")
    ledger = case.folder / "broken" / "ledger.jsonl"
    assert cli.main(["ledger", "verify", str(ledger)]) == exit_codes.DONE
    verified = capsys.readouterr().out
    assert "step 2 is in it twice" in verified
    weights = told.partition("completed: step 4, weights ")[2][:16]
    assert f"steps 0 to 3 of 0 to 3, weights {weights} after step 3; completed" in verified
    if strategy == "ddp":  # nothing is left to be made, and the ledger stays as it is
        codes, told = ranks.torchrun(broken, 2, "--resume")
        assert codes == [exit_codes.DONE] * 2, told
        assert cli.main(["ledger", "verify", str(ledger)]) == exit_codes.DONE
        assert "; completed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "case",
    [{"num_rows": 20, "training": {"epochs": 12}, "data": {"validation_share": 0.3}}],
    indirect=True,
)
def test_a_halt_at_a_spike(case: Case) -> None:
    """All ranks end before the step; `--resume` without the option makes it, and is told of it.

    The page of the run has both parts of it, and its scores.
    """
    config, output = case.write("out", "ddp"), case.folder / "out"
    figures = str(case.folder / "figures")
    options = "--halt-on-spike", "--tensorboard", figures
    codes, told = ranks.torchrun(config, 2, *options, spike_factor=0.5)
    assert codes == [exit_codes.WRONG] * 2, told
    assert "training halted before any update (--halt-on-spike)" in told
    assert len(list(Path(figures).glob("events.out.tfevents.*"))) == 1
    halted = ledger.load(output / "ledger.jsonl")
    (spike,) = halted.of(trace.Spike)
    assert [one.step for one in halted.of(trace.Halt)] == [spike.step]
    assert not (output / "adapter_model.safetensors").exists()
    codes, told = ranks.torchrun(config, 2, "--resume", spike_factor=0.5)
    assert codes == [exit_codes.DONE] * 2, told
    assert f"step {spike.step}: gradient norm " in told
    assert ledger.load(output / "ledger.jsonl").of(trace.Spike)[1] == spike
    page = (output / "report.html").read_text("utf-8")
    assert "completed" in page
    assert "<h2>Validation after step 24</h2>" in page
    assert "training halted before any update" in page


@pytest.mark.parametrize("strategy", strategies("ddp", "tensor_parallel"))
@pytest.mark.parametrize(
    "case",
    [
        {
            "method": "full",
            "training": {"learning_rate": 1e30, "weight_decay": 0.0, "schedule": "constant"},
        }
    ],
    indirect=True,
)
def test_a_value_that_is_not_finite_halts_all_ranks(case: Case, strategy: str) -> None:
    codes, told = ranks.torchrun(case.write("out", strategy), 2)
    assert codes == [exit_codes.WRONG] * 2, told
    assert "training halted before any update" in told
    assert not (case.folder / "out" / "model.safetensors").exists()


def test_ranks_that_do_not_fit_are_one_error(case: Case) -> None:
    codes, told = ranks.torchrun(case.write("out", "ddp"), 5)
    assert codes == [exit_codes.INVALID] * 5
    assert told.count("entrenar:") == 1
    problem = "training.num_shards=4 leaves ranks without a shard; use num_shards >= 5"
    assert problem in told
    assert not (case.folder / "out" / "state.checkpoint").exists()


@pytest.mark.parametrize(
    ("strategy", "world_size", "problem"),
    [
        ("ddp_canonical", 3, "ranks share a tree evenly; start 1, 2, 4, 8 ... ranks"),
        ("pipeline_parallel", 3, "the model has 2 blocks, and each rank needs one; use 2 ranks or"),
        ("tensor_parallel", 4, "num_key_value_heads=2 is no multiple of 4 ranks; use ddp, "),
        ("sequence_parallel", 4, "num_key_value_heads=2 is no multiple of 4 ranks; use ddp, "),
    ],
)
def test_each_strategy_refuses_ranks_that_do_not_fit(
    case: Case, strategy: str, world_size: int, problem: str
) -> None:
    """Each rank does, before it trains."""
    settings = launch.settings_of(case.write("out", strategy))
    workload = preparation.prepare(settings).workload()
    plan = preparation.plan_of(settings, workload)
    with pytest.raises(UsageError, match=f"strategy={strategy} with {world_size} ranks: ") as told:
        launch.require_possible(strategy, workload, plan, world_size)
    assert problem in str(told.value)


def test_ranks_need_a_strategy(case: Case) -> None:
    problem = "strategy is missing, which ranks of torchrun need; add one of ddp, ddp_can"
    with pytest.raises(UsageError, match=problem):
        launch.settings_of(case.write("out", None))


def test_a_problem_of_a_file_is_told_once_with_its_line(case: Case) -> None:
    config = case.write("out", "ddp")
    config.write_text(config.read_text("utf-8") + "modle: x\n", "utf-8")
    codes, told = ranks.torchrun(config, 2)
    assert codes == [exit_codes.INVALID] * 2
    assert told.count("key 'modle' is not read; did you mean 'model'?") == 1


def test_a_strategy_is_not_for_the_command(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", str(case.write("out", "ddp"))]) == exit_codes.INVALID
    assert "strategy=ddp is for ranks of torchrun" in capsys.readouterr().err


def test_the_module_is_not_for_a_lone_process(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune_cli.rank([str(case.write("out", "ddp"))], {}) == exit_codes.INVALID
    assert "is started by torchrun" in capsys.readouterr().err


def test_torchrun_starts_the_module(case: Case) -> None:
    """As a user does, in processes of their own."""
    config = case.write("out", "ddp_canonical")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *command, "-m", finetune_cli.PROG, str(config)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "written to" in done.stdout
    alike = case.write("alike", "ddp_canonical")
    assert ranks.torchrun(alike, 1)[0] == [exit_codes.DONE]
    assert runs.digest(case.folder / "out") == runs.digest(case.folder / "alike")


def test_the_table_has_every_strategy_of_a_configuration() -> None:
    assert tuple(launch.STRATEGIES) == STRATEGIES


def test_a_pipelines_head_has_the_weights_of_the_moved_objective() -> None:
    """Moving an objective to a device replaces its buffers."""
    module = nn.Module()
    module.score = nn.Linear(4, 2)
    objective = objectives.ClassObjective(module, [1.0, 1.0])
    head = pipeline_parallel._Head(objective, module)
    objective.weights = torch.tensor([3.0, 5.0])
    hidden, targets = torch.linspace(-1, 1, 24).reshape(2, 3, 4), torch.tensor([[0, 1], [1, 2]])
    logits = module.score(hidden[[0, 1], [1, 2]])
    wanted = nn.functional.cross_entropy(
        logits, targets[:, 0], weight=objective.weights, reduction="sum"
    )
    assert torch.equal(head.loss(hidden, targets), wanted)
