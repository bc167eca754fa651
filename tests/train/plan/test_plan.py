"""Plans: what a worker needs, what a step moves, which strategy fits, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.train.model.settings import Data, Distillation, Lora, Settings, Training
from entrenar_py.train.plan import devices, plan, text
from entrenar_py.train.plan.plan import Option, Run
from entrenar_py.train.plan.shape import Cut, Shape
from tests import extras
from tests.train.plan.qwen3 import QWEN3_4B, TINY, settings

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
extras.require("peft", "transformers")


@pytest.fixture(scope="module", autouse=True)
def shapes() -> Iterator[None]:
    """Keep one shape for equal settings: a rehearsal of its model takes a second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "Shape", cache(Shape))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all tests, so that equal settings are planned for once."""
    return tmp_path_factory.mktemp("plans")


@cache
def planned(
    found: Settings, *described: str, longest: int | None = None
) -> tuple[Run, dict[str, Option]]:
    run = plan.of(found, devices.described(described), longest=longest, bandwidth=1.25e9)
    return run, {one.strategy: one for one in plan.options(run)}


def chosen(run: Run, found: dict[str, Option]) -> tuple[str, str]:
    """Return the strategy to take, "" for none, and why."""
    options = [*found.values()]
    one = plan.choose(run, options)
    return "" if one is None else one.strategy, plan.reason(run, options, one)


def test_gradients_of_qwen3_4b_on_the_wire(folder: Path) -> None:
    vector = 4 * 5_898_240 // 18  # of 2 blocks instead of 36
    run = plan.of(
        settings(
            folder,
            {**QWEN3_4B, "num_hidden_layers": 2},
            training=Training(batch_size=4, num_shards=4),
        ),
        devices.described(["2 x h100:80GB:25GB/s"]),
        longest=8,
        bandwidth=1.25e9,
    )
    star, ddp = plan.option(run, "star"), plan.option(run, "ddp")
    # Two shards of a worker are one node of the tree; the coordinator takes two and sends two.
    assert (star.traffic.sent, star.traffic.received) == (vector, vector)
    assert star.traffic.busiest == 4 * vector
    assert ddp.traffic.sent == vector
    assert ddp.seconds == vector / 25e9
    fsdp = plan.option(run, "fsdp")
    assert fsdp.traffic.sent == (2 * 2 * run.shape.counts().weight_bytes + vector) // 2
    canonical = plan.option(run, "fsdp_canonical")  # also gathers the sum for its norm
    assert canonical.traffic.sent == fsdp.traffic.sent + vector // 2


def test_three_ranks_exchange_each_micro_batch(folder: Path) -> None:
    """They keep pieces of up to four nodes of the tree, and one has its last micro-batch twice."""
    found = settings(folder, TINY, training=Training(batch_size=8, num_shards=8))
    run, options = planned(found, "3 x gpu:4GB")
    vector = 4 * run.shape.counts().trained
    fsdp, canonical = options["fsdp"], options["fsdp_canonical"]
    assert canonical.problem == ""
    assert canonical.traffic.sent == fsdp.traffic.sent + 3 * vector * 2 // 3
    plain, more = (one.workers[0].memory.gradients for one in (fsdp, canonical))
    assert more == plain + 4 * -(-vector // 3)


def test_shards_that_are_no_node_are_sent_one_by_one(folder: Path) -> None:
    found = settings(folder, TINY, training=Training(batch_size=6, num_shards=6))
    run, options = planned(found, "3 x cpu:4GB")
    vector = 4 * run.shape.counts().trained
    assert options["star"].traffic.sent == vector  # 2 of 6 shards are a node each
    found = settings(folder, TINY, training=Training(batch_size=8, num_shards=8))
    run, options = planned(found, "3 x cpu:4GB")
    assert options["star"].traffic.sent == 2 * vector  # 2 or 3 of 8: shards 3, 4, 5 are two nodes


def test_alike_gpus_take_the_fastest_that_fits(folder: Path) -> None:
    run, options = planned(settings(folder, TINY), "2 x gpu:4GB")
    strategy, why = chosen(run, options)
    assert strategy == "ddp"
    assert why.count(". ") == 1
    assert "needs" in why


def test_unlike_devices_take_the_reference_trainer(folder: Path) -> None:
    run, options = planned(settings(folder, TINY), "gpu:4GB", "wgpu-amd:4GB", "cpu:4GB")
    assert chosen(run, options)[0] == "star"  # a mesh would be faster, and no run has one
    assert options["mesh"].seconds < options["star"].seconds
    assert options["ddp"].problem == "its devices must be of one kind"


def test_gpus_of_which_one_has_less_left_are_planned_for(folder: Path) -> None:
    """What is free differs by a few bytes on every machine; each rank is held to its own GPU."""
    for memory, fits in (("3.9GB", True), ("1MB", False)):
        pair = devices.described(["gpu:4GB", f"gpu:{memory}"])
        run = plan.of(settings(folder, TINY), pair, longest=8, bandwidth=1e9)
        option = plan.option(run, "ddp")
        assert not option.problem
        assert [one.fits(recompute=False) for one in option.workers] == [True, fits]


def test_a_device_that_is_named_twice_has_twice_the_workers(folder: Path) -> None:
    """As by --backend cpu,cpu,cpu,wgpu with four workers."""
    found = settings(folder, TINY, workers=4)
    pair = devices.described(["cpu:4GB", "wgpu:4GB"])
    run = plan.of(found, pair, longest=8, bandwidth=1e9, turns=[0, 0, 0, 1])
    workers = plan.option(run, "star").workers
    assert [(one.device.kind, one.sharing) for one in workers] == [("cpu", 3)] * 3 + [("wgpu", 1)]


def test_faster_strategies_that_are_not_taken_are_named(folder: Path) -> None:
    """Alike CPUs take the reference trainer for its bits, not for its speed."""
    run, options = planned(settings(folder, TINY), "2 x cpu:4GB")
    strategy, why = chosen(run, options)
    assert strategy == "star"
    assert "ddp" in why.partition("faster on the wire")[0].split(". ")[1]
    assert "same bits" in why
    assert why.count(". ") == 1


def test_pairs_need_the_whole_model(folder: Path) -> None:
    """As the configuration's reader refuses them. A pair has two rows, which take more memory."""
    run, options = planned(settings(folder, TINY, task="preference"), "2 x gpu:4GB")
    able = {name for name, option in options.items() if not option.problem}
    assert able == {"star", "mesh", "ddp", "ddp_canonical", "fsdp", "fsdp_canonical"}
    assert options["tensor_parallel"].problem.startswith("with task: preference, both sides")
    texts, _ = planned(settings(folder, TINY), "2 x gpu:4GB")
    pairs, single = (plan.option(one, "star").workers[0].memory for one in (run, texts))
    assert pairs.activations > 1.5 * single.activations


@pytest.mark.parametrize(
    ("changes", "able"),
    [
        ({"lora": Lora(modules_to_save=("model.norm",))}, {"ddp", "ddp_canonical"}),
        ({"lora": Lora(dora=True)}, {"ddp", "ddp_canonical", "pipeline_parallel"}),
        (
            {"distill": Distillation(logits=Path("soft"))},
            {"ddp", "ddp_canonical", "fsdp", "fsdp_canonical"},
        ),
        ({"compile": True}, {"ddp", "ddp_canonical", "tensor_parallel"}),
        (
            {"training": Training(batch_size=6, num_shards=6)},
            {"ddp", "fsdp", "tensor_parallel", "sequence_parallel", "pipeline_parallel"},
        ),
    ],
    ids=["modules_to_save", "dora", "distill", "compile", "shards"],
)
def test_no_strategy_is_advised_that_the_configuration_reader_refuses(
    changes: dict[str, Any], able: set[str], folder: Path
) -> None:
    _, options = planned(settings(folder, TINY, **changes), "2 x gpu:4GB")
    assert {name for name, one in options.items() if not one.problem} == {"star", "mesh", *able}


def test_remedies_are_none_that_the_configuration_reader_refuses(folder: Path) -> None:
    found = settings(folder, TINY, lora=Lora(modules_to_save=("model.norm",)), compile=True)
    run, _ = planned(found, "cpu:4GB")
    names = [name for name, _ in plan._steps(run)]
    assert names
    assert not {"recompute: blocks", "precision: bfloat16"} & set(names)


def test_quantised_weights_are_cut_by_no_strategy(folder: Path) -> None:
    """As the configuration's reader refuses them; and no other method's advice is that."""
    found = settings(folder, {**TINY, "hidden_size": 64}, method="qlora")
    _, options = planned(found, "2 x gpu:4GB")
    able = {name for name, option in options.items() if not option.problem}
    assert able == {"star", "mesh", "ddp", "ddp_canonical", "pipeline_parallel"}
    assert options["fsdp"].problem.startswith("with method: qlora, quantised weights can't")


def test_weights_that_fit_no_device_alone_are_shared(folder: Path) -> None:
    """GPUs have room for half of the weights, which are much more than all else."""
    config = {**TINY, "intermediate_size": 2**13}
    found = settings(
        folder, config, data=Data(train=folder), training=Training(batch_size=4, num_shards=4)
    )
    run = plan.of(found, devices.described(["2 x gpu:4GB"]), longest=8, bandwidth=1e9)
    least = plan.option(run, "ddp").workers[0].memory.needed
    run, options = planned(found, f"2 x gpu:{least - 10**6}B", longest=8)
    strategy, why = chosen(run, options)
    assert strategy in {"fsdp", "tensor_parallel", "sequence_parallel", "pipeline_parallel"}
    assert "There is no room for" in why
    assert "ddp" in why


def test_what_would_fit_is_told(folder: Path) -> None:
    found = settings(folder, TINY, data=Data(train=folder, max_tokens=512))
    run, options = planned(found, "cpu:480MB")
    strategy, why = chosen(run, options)
    assert not strategy
    assert "which has 480 MB" in why
    assert "training.num_shards: 16" in why
    for told in plan.remedies(run, "star"):
        assert "MB)" in told


def test_a_device_with_two_workers_has_room_for_both(folder: Path) -> None:
    one = settings(folder, TINY, workers=1)
    needed = planned(one, "cpu:4GB")[1]["star"].workers[0].memory.needed
    room = f"cpu:{int(1.5 * needed)}B"
    assert planned(one, room)[1]["star"].fits(recompute=False)
    two = settings(folder, TINY, workers=2)
    assert not planned(two, room)[1]["star"].fits(recompute=False)


def test_a_device_that_reports_no_memory_may_fit(folder: Path) -> None:
    device = devices.Device(name="wgpu:0", kind="wgpu", memory=None)
    run = plan.of(settings(folder, TINY), [device], longest=None, bandwidth=1e9)
    star = plan.option(run, "star")
    assert star.workers[0].fits(recompute=False) is None
    assert star.fits(recompute=False)


@pytest.mark.parametrize(
    ("described", "strategy", "problem"),
    [
        (["3 x gpu:4GB"], "ddp_canonical", "3 ranks can't share a tree evenly: 2, 4, 8 ... can"),
        (["gpu:4GB"], "fsdp", "it needs two devices or more"),
        (["5 x gpu:4GB"], "star", "5 workers and 4 shards: use training.num_shards >= 5"),
        (["5 x gpu:4GB"], "pipeline_parallel", "4 blocks can't be cut into 5 stages"),
        (["2 x wgpu:4GB"], "ddp", "torch's collectives don't support wgpu"),
    ],
)
def test_a_strategy_that_cannot_run(
    folder: Path, described: Sequence[str], strategy: str, problem: str
) -> None:
    assert planned(settings(folder, TINY), *described)[1][strategy].problem == problem


def test_packed_rows_are_sequences_of_the_largest_length(folder: Path) -> None:
    """Of 4 rows of up to 100 tokens, in sequences of 512, there are 2 at most."""
    data = Data(train=folder, max_tokens=512, packing=True)
    gpu = devices.described(["gpu:4GB"])
    run = plan.of(settings(folder, TINY, data=data), gpu, longest=100, bandwidth=1e9)
    assert (run.rows, run.length) == (2, 512)
    run = plan.of(settings(folder, TINY), gpu, longest=100, bandwidth=1e9)
    assert (run.rows, run.length) == (4, 100)


def test_sharing_layers_leaves_less_to_each(folder: Path) -> None:
    options = planned(settings(folder, TINY), "2 x gpu:4GB")[1]
    peaks = {name: one.peak(recompute=False) for name, one in options.items()}
    assert peaks["sequence_parallel"] < peaks["tensor_parallel"] < peaks["ddp"]
    # The first of two stages has half of the blocks, and two micro-batches at a time.
    assert peaks["pipeline_parallel"] == pytest.approx(peaks["ddp"], rel=0.01)
    weights = {name: one.workers[0].memory.weights for name, one in options.items()}
    assert weights["pipeline_parallel"] < 0.6 * weights["ddp"]


def test_a_stage_has_the_table_or_the_head(folder: Path) -> None:
    """An untied model's first stage has no head, its last no table; of a tied one both have it."""
    shapes = [
        Shape(settings(folder, {**TINY, "tie_word_embeddings": is_tied}))
        for is_tied in (False, True)
    ]
    table = TINY["vocab_size"] * TINY["hidden_size"]
    for shape, is_spared in zip(shapes, (True, False), strict=True):
        width = 4  # bytes of a frozen weight, in float32
        both = shape.counts(Cut(blocks=2)).frozen_bytes
        for cut in (Cut(blocks=2, has_table=False), Cut(blocks=2, has_head=False)):
            assert both - shape.counts(cut).frozen_bytes == width * table * is_spared


def test_a_stage_may_be_one_block(folder: Path) -> None:
    options = planned(settings(folder, TINY), "4 x gpu:4GB")[1]
    four = options["pipeline_parallel"].peak(recompute=False)
    options = planned(settings(folder, TINY), "2 x gpu:4GB")[1]
    assert four < options["pipeline_parallel"].peak(recompute=False)


@pytest.mark.parametrize("described", [["2 x gpu:4GB"], ["gpu:4GB", "wgpu:1GB", "cpu:2GB:1Gbit"]])
def test_the_text_fits_a_terminal(folder: Path, described: Sequence[str]) -> None:
    run, options = planned(settings(folder, TINY), *described)
    found = [*options.values()]
    one = plan.choose(run, found)
    told = text.lines(
        *(run, found, one, "It fits. It does."), length_from="data.max_tokens", num_samples=10**6
    )
    lines = [*told]
    assert max(map(len, lines)) <= 100
    assert lines[0] == "model    qwen3: 195,264 parameters, 4 blocks"


def test_the_record_has_every_strategy(folder: Path) -> None:
    run, options = planned(settings(folder, TINY), "2 x gpu:4GB")
    found = [*options.values()]
    record: dict[str, Any] = plan.to_record(run, found, plan.choose(run, found), "why")
    assert {one["strategy"] for one in record["options"]} == {*options}
    [first, _] = record["options"][0]["workers"]
    assert first["needs"]["peak"] > first["needs_recomputed"]["peak"]
