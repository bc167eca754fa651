"""Real ranks die, freeze and join in the middle of a run, and the weights are the same bits.

Not exercised: several machines, and more than two GPUs.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import entrenar_py
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.elastic.launcher import seat_of_launcher
from entrenar_py.train.elastic.trainer import _with_extra_state
from entrenar_py.train.elastic.transfer import load
from tests.train.elastic.runs import MOMENTS, STEPS, in_a_process, seed

Outcome = dict[str, Any]
RANKS = {f"undisturbed {count}": count for count in (1, 2, 3, 4)}


def planned(**settings: str) -> dict[str, Any]:
    """Make all planned runs, on ranks forked from one process."""
    return dict(json.loads(in_a_process("runs", **settings).stdout))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Make the runs on the CPU."""
    return planned()


def said(outcome: Outcome, word: str) -> list[list[str]]:
    """Return what ranks reported with `word`, each report as its other words."""
    lines = [line.split() for lines in outcome["reports"].values() for line in lines]
    return [line[1:] for line in lines if line[0] == word]


@pytest.mark.parametrize(
    "name",
    [
        *RANKS,
        *(f"dies in {moment}" for moment in MOMENTS),
        "first rank dies",
        "two die",
        "all die",
        "not again",
        "dies at once",
        "dies in first exchange",
        "newcomer dies",
        "freezes",
        "freezes at once",
        "cut",
        "leaves",
    ],
)
def test_a_run_ends_with_the_bits_of_one_process(outcomes: dict[str, Any], name: str) -> None:
    """The oracle is a loop of plain torch in one process, which shares no code with the trainer."""
    outcome = outcomes[name]
    assert {digest for (digest,) in said(outcome, "digest")} == {outcomes["one process"]}
    assert set(outcome["statuses"]) == {0}


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_runs_on_gpus_end_with_the_bits_of_one_process() -> None:
    """Over NCCL ranks die, freeze and join as over gloo."""
    outcomes = planned(ELASTIC_DEVICE="cuda", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    right, fails = outcomes.pop("one process"), outcomes.pop("fails")
    assert outcomes.pop("leaves early")["statuses"] == [0, 0]
    assert len(outcomes) >= 16
    for name, outcome in outcomes.items():
        assert {digest for (digest,) in said(outcome, "digest")} == {right}, name
        assert set(outcome["statuses"]) == {0}, name
    assert len(outcomes["newcomer dies"]["reports"]) == min(3, torch.cuda.device_count()) + 2
    assert fails["statuses"] == [1, 1]


@pytest.mark.parametrize("name", list(RANKS))
def test_an_undisturbed_run_repeats_nothing(outcomes: dict[str, Any], name: str) -> None:
    """Each rank commits each step once, in one generation."""
    outcome, count = outcomes[name], RANKS[name]
    assert len(said(outcome, "committed")) == count * STEPS
    assert {world for _, _, world in said(outcome, "committed")} == {str(count)}
    assert outcome["interrupts"] == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_survivors_repeat_the_step_and_a_newcomer_joins(
    outcomes: dict[str, Any], moment: str
) -> None:
    """Two of three ranks go on. Another process takes the third seat, with the state of the run."""
    outcome = outcomes[f"dies in {moment}"]
    reasons = [reason.partition(": ")[2] for reason in outcome["interrupts"]]
    # Sockets may be quicker than the supervisor, and a connection may take long.
    died = ("rank 1 of the launcher ended", "an exchange between ranks failed")
    assert any(reason.startswith(died) for reason in reasons)
    assert reasons[-1] == "the next generation began"
    # In the optimizer, all had the mean already. So they had committed step 2, and repeat step 3.
    repeated = "3" if moment in ("optimizer", "committed") else "2"
    assert {step for step, *_ in said(outcome, "repeats")} == {repeated}
    assert {world for _, _, world in said(outcome, "committed")} == {"2", "3"}
    assert sorted(step == "0" for step, _, _ in said(outcome, "joined")) == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "deaths"),
    [("dies at once", 1), ("dies in first exchange", 1), ("newcomer dies", 2)],
)
def test_deaths_in_the_first_step_of_a_generation(
    outcomes: dict[str, Any], name: str, deaths: int
) -> None:
    """Each death happened: another process took the seat."""
    outcome = outcomes[name]
    assert len(outcome["reports"]) == 3 + deaths
    assert len(said(outcome, "digest")) == 3


def test_nobody_commits_what_a_cut_may_have_left(outcomes: dict[str, Any]) -> None:
    """On GPUs an exchange that one rank cuts may end on another one, without an error."""
    repeats = said(outcomes["cut"], "repeats")
    assert [step for step, *_ in repeats] == ["2"] * 3
    assert len(said(outcomes["cut"], "joined")) == 3


def test_a_process_that_fails_says_that_its_exchanges_end(outcomes: dict[str, Any]) -> None:
    """The one that fails says so at its end, and the two others before they abandon theirs."""
    cuts = [int(count) for (count,) in said(outcomes["leaves"], "cuts")]
    assert len(cuts) == 4
    assert max(cuts) == 3


def test_all_ranks_die(outcomes: dict[str, Any]) -> None:
    """Nobody has the state: the run starts again."""
    assert [step for step, _, _ in said(outcomes["all die"], "joined")] == ["0"] * 4


def test_a_seat_that_stays_empty(outcomes: dict[str, Any]) -> None:
    """With no restarts left, the other rank ends the run alone."""
    outcome = outcomes["not again"]
    assert len(outcome["reports"]) == 2
    assert {world for _, _, world in said(outcome, "committed")} == {"1", "2"}


def test_a_frozen_rank_is_replaced(outcomes: dict[str, Any]) -> None:
    """It is given up after the deadline, killed by its supervisor, and started again."""
    outcome = outcomes["freezes"]
    reasons = [reason.partition(": ")[2] for reason in outcome["interrupts"]]
    assert "an exchange between ranks took longer than 4 s" in reasons
    assert len(outcome["reports"]) >= 4


def test_a_script_that_leaves_its_loop_early_ends_the_run(outcomes: dict[str, Any]) -> None:
    """The other rank was killed just then. Its newcomer ends, too, and doesn't train anew."""
    outcome = outcomes["leaves early"]
    assert outcome["statuses"] == [0, 0]
    assert len(outcome["reports"]) == 3
    assert [step for step, *_ in said(outcome, "joined")] == ["0", "0"]
    assert len(said(outcome, "digest")) == 1


def test_a_script_that_fails_ends_the_run(outcomes: dict[str, Any]) -> None:
    """Each rank is started once again, and then the launcher gets status 1."""
    assert outcomes["fails"]["statuses"] == [1, 1]
    assert len(outcomes["fails"]["reports"]) == 4


# --- misuse, in one process -----------------------------------------------------------------------


@pytest.fixture
def layers() -> nn.Module:
    """Return a model of one layer."""
    return nn.Linear(3, 2)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch enforce deterministic algorithms, and no launcher be there."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def trainer_of(layers: nn.Module, micro_batches: int = 2) -> Any:
    """Return a trainer of a single rank."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    return entrenar_py.elastic(layers, optimizer, micro_batches=micro_batches)


def test_fold_needs_the_whole_global_batch(layers: nn.Module) -> None:
    """A rank that is left may have to compute any of the micro-batches."""
    trainer = trainer_of(layers)
    next(trainer.steps(1))
    with pytest.raises(UsageError, match=r"fold\(\) got 1 micro-batches: it needs all 2"):
        next(trainer.fold([torch.ones(1, 3)]))


def test_fold_needs_a_sequence(layers: nn.Module) -> None:
    """A generator can't be asked for one item."""
    trainer = trainer_of(layers)
    next(trainer.steps(1))
    with pytest.raises(UsageError, match=r"fold\(\) got a generator: it needs a sequence"):
        next(trainer.fold(one for one in range(2)))


@pytest.mark.parametrize("last", [0, 1])
def test_a_second_backward_pass(layers: nn.Module, last: int) -> None:
    """In a rank's last micro-batch its gradient would be lost."""
    trainer = trainer_of(layers)
    next(trainer.steps(1))
    batches = trainer.fold([torch.ones(1, 3)] * 2)
    for _ in range(last):
        layers(next(batches)).sum().backward()
    batch = next(batches)
    layers(batch).sum().backward()
    layers(batch).sum().backward()
    with pytest.raises(UsageError, match=f"a second backward pass in micro-batch {last}"):
        next(batches)


def test_the_run_ends_once(layers: nn.Module) -> None:
    """Another loop would begin when others have left."""
    trainer = trainer_of(layers)
    assert list(trainer.steps(0)) == []
    with pytest.raises(UsageError, match="has ended the run: make one loop, over all epochs"):
        next(trainer.steps(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_s": 0}, "deadline_s=0: give more than 0 seconds"),
        ({"deadline_s": float("nan")}, "deadline_s=nan: give more than 0 seconds"),
        ({"first_step": -1}, "first_step=-1: give the number of committed steps"),
    ],
)
def test_numbers_out_of_range(layers: nn.Module, options: dict[str, Any], message: str) -> None:
    """They are refused before ranks meet."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=message):
        entrenar_py.elastic(layers, optimizer, micro_batches=2, **options)


def test_calls_outside_of_their_loops(layers: nn.Module) -> None:
    """The message says which loop is missing."""
    trainer = trainer_of(layers)
    with pytest.raises(UsageError, match=r"fold\(\) outside of the loop over steps\(\)"):
        next(trainer.fold([None, None]))
    with pytest.raises(UsageError, match=r"commit\(\) outside of the loop over steps\(\)"):
        trainer.commit()
    with pytest.raises(UsageError, match=r"trainer.shard outside of the loop over fold\(\)"):
        _ = trainer.shard


def test_a_step_that_was_not_committed(layers: nn.Module) -> None:
    """Going on would skip it on this rank alone."""
    steps = (trainer := trainer_of(layers)).steps(2)
    next(steps)
    with pytest.raises(UsageError, match="step 0 has no gradients: run the loop over fold"):
        trainer.commit()
    steps = trainer_of(nn.Linear(3, 2)).steps(2)
    next(steps)
    with pytest.raises(UsageError, match="step 0 was not committed"):
        next(steps)


def test_an_optimizer_that_fails_in_its_step(layers: nn.Module) -> None:
    """A script that goes on would make the next step from weights between two steps."""
    trainer = trainer_of(layers)
    steps = trainer.steps(2)
    next(steps)
    for batch in trainer.fold([torch.ones(1, 3)] * 2):
        layers(batch).sum().backward()
    trainer._optimizer.step = Mock(side_effect=torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.commit()
    for call in (
        lambda: next(steps),
        lambda: next(trainer.steps(2)),
        lambda: next(trainer.fold([torch.ones(1, 3)] * 2)),
        trainer._regroup,
    ):
        with pytest.raises(SystemFailure, match="step 0 of the optimizer and schedulers failed"):
            call()


def test_a_parameter_without_a_gradient(layers: nn.Module) -> None:
    """The message names it."""
    trainer = trainer_of(layers)
    next(trainer.steps(1))
    batches = trainer.fold([torch.ones(1, 3)] * 2)
    (next(batches) @ layers.weight.T).sum().backward()
    with pytest.raises(UsageError, match=r"micro-batch 0, .* made no gradient for bias"):
        next(batches)


class Running(nn.Module):
    """A layer that keeps a sum of its inputs, in place or in another tensor."""

    def __init__(self, *, in_place: bool, persistent: bool = True) -> None:
        super().__init__()
        self._in_place = in_place
        self.total: Tensor
        self.register_buffer("total", torch.zeros(3), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self._in_place:
            self.total += x.detach().sum(0)
        elif self.training:
            self.total = self.total + x.detach().sum(0)
        return x - self.total.clone()


@pytest.mark.parametrize(
    ("layer", "buffer"),
    [
        (Running(in_place=True), "0.total"),
        (Running(in_place=False), "0.total"),
        (spectral_norm(nn.Linear(3, 3)), "0.parametrizations.weight.0._u"),
        (Running(in_place=True, persistent=False), None),
        (Running(in_place=True).eval(), None),
        (nn.BatchNorm1d(3).eval(), None),
    ],
)
def test_a_micro_batch_that_changes_a_buffer(
    layers: nn.Module, layer: nn.Module, buffer: str | None
) -> None:
    """Ranks would have other buffers, and an audit would convict a healthy one."""
    model = nn.Sequential(layer, layers)
    trainer = trainer_of(model)
    next(trainer.steps(1))
    batches = trainer.fold([torch.ones(2, 3)] * 2)
    model(next(batches)).sum().backward()
    if buffer is None:
        next(batches)
    else:
        with pytest.raises(UsageError, match=f"micro-batch 0 changed buffer {buffer}: "):
            next(batches)


class Averaged(nn.Module):
    """A layer with a running average, which it changes without a new version."""

    def __init__(self, *, by_kernel: bool) -> None:
        super().__init__()
        self._by_kernel = by_kernel
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self._by_kernel:
            return nn.functional.batch_norm(x, self.mean, torch.ones(3), training=True)
        self.mean.data.lerp_(x.detach().mean(0), 0.5)
        return x - self.mean


class Following(nn.Module):
    """A layer with a frozen copy that follows it, as the key encoder of MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.key.data = 0.9 * self.key.data + 0.1 * x.detach().mean(0)
        return x - self.key


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Averaged(by_kernel=False), "buffer 0.mean"),
        (Averaged(by_kernel=True), "buffer 0.mean"),
        (Following(), "frozen parameter 0.key"),
    ],
)
def test_a_change_without_a_version(layers: nn.Module, layer: nn.Module, what: str) -> None:
    """It is seen in the first micro-batch."""
    model = nn.Sequential(layer, layers)
    trainer = trainer_of(model)
    next(trainer.steps(1))
    batches = trainer.fold([torch.rand(2, 3)] * 2)
    model(next(batches)).sum().backward()
    with pytest.raises(UsageError, match=f"micro-batch 0 changed {what}: "):
        next(batches)


def test_an_optimizer_of_other_parameters(layers: nn.Module) -> None:
    """Nobody would reduce their gradients, or drop them."""
    temperature = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*layers.parameters(), temperature], lr=0.1)
    with pytest.raises(UsageError, match=r"parameter 2 of the optimizer, \(2,\), is not the model"):
        entrenar_py.elastic(layers, optimizer, micro_batches=2)
    temperature.requires_grad = False
    entrenar_py.elastic(layers, optimizer, micro_batches=2)
    with pytest.raises(UsageError, match="optimizer is a list: give one object with step"):
        entrenar_py.elastic(layers, [optimizer], micro_batches=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_gradient_that_is_changed_inside_of_the_loop(layers: nn.Module, in_place: bool) -> None:
    """The last micro-batch's is in a bucket already: bits would depend on the number of ranks."""
    trainer = trainer_of(layers)
    next(trainer.steps(1))
    batches = trainer.fold([torch.ones(1, 3)] * 2)
    layers(next(batches)).sum().backward()
    bias = dict(layers.named_parameters())["bias"]
    assert bias.grad is not None
    if in_place:
        nn.utils.clip_grad_norm_(bias, 0.1)
    else:
        bias.grad = bias.grad / 2
    with pytest.raises(UsageError, match=r"gradient of bias was changed .* of micro-batch 0 "):
        next(batches)


def test_what_is_drawn_around_micro_batches_is_the_same_on_all_ranks(layers: nn.Module) -> None:
    """However much a rank's own micro-batches have drawn. Another step draws other numbers."""
    trainer, drawn = trainer_of(layers), []
    for step in trainer.steps(2):
        torch_draws = [torch.rand(1).item()]
        for batch in trainer.fold([torch.ones(1, 3)] * 2):
            torch.rand(step + 1)
            layers(batch).sum().backward()
        torch_draws.append(torch.rand(1).item())
        drawn.append(torch_draws)
        trainer.commit()
    expected = []
    for step in range(2):
        for place in (-1, -2):
            seed(step, place)
            expected.append(torch.rand(1).item())
    assert [one for both in drawn for one in both] == expected
    assert len(set(expected)) == 4


def test_a_newcomer_takes_what_nothing_can_be_copied_to(layers: nn.Module) -> None:
    """The elements of an expanded buffer or frozen parameter are one number in memory."""
    layers.register_buffer("table", torch.ones(1).expand(4))
    layers.register_parameter("frozen", nn.Parameter(torch.ones(1).expand(4), requires_grad=False))
    newcomer = trainer_of(layers)
    newcomer._take({name: torch.full((4,), 2.0) for name in ("table", "frozen")})
    taken = newcomer._tensors()
    assert [taken[name].tolist() for name in ("table", "frozen")] == [[2.0] * 4] * 2
    assert dict(layers.named_buffers()).keys() == {"table"}


class Counting(nn.Linear):
    """A layer with a state that is no tensor."""

    count = 0

    def get_extra_state(self) -> int:
        """Return it."""
        return self.count

    def set_extra_state(self, state: int) -> None:
        """Take another layer's."""
        self.count = state


def test_the_extra_state_of_modules_is_sent() -> None:
    """It is the module's own, besides parameters and buffers."""
    ours, theirs = Counting(3, 2), Counting(3, 2)
    theirs.count = 7
    models = (nn.Sequential(nn.Linear(3, 3), one) for one in (ours, theirs))
    (mine,), (other,) = map(_with_extra_state, models)
    load(mine, other.state_dict())
    assert ours.count == 7


@pytest.mark.parametrize("table", [None, torch.zeros(2)])
def test_a_newcomer_takes_a_cache_that_is_filled_or_has_grown(
    layers: nn.Module, table: Tensor | None
) -> None:
    """The rank that sends it has computed, maybe with longer rows."""
    layers.register_buffer("table", table, persistent=False)
    newcomer, sent = trainer_of(layers), {"weight": torch.ones(2, 3), "table": torch.ones(5)}
    newcomer._take(sent)
    assert {name: one.tolist() for name, one in newcomer._tensors().items() if name in sent} == {
        name: one.tolist() for name, one in sent.items()
    }


def test_a_death_while_an_audited_micro_batch_is_digested(layers: nn.Module) -> None:
    """No gradient of it is missing: the step is repeated."""
    trainer = trainer_of(layers)
    audit = trainer._audit = MagicMock()
    audit.__contains__.return_value, audit.begin.return_value = True, []
    audit.keep.side_effect = lambda shard: trainer._members.interrupt("rank 1 ended")
    next(trainer.steps(1))
    for batch in trainer.fold(torch.ones(2, 5, 3)):
        layers(batch).sum().backward()
    audit.settle.assert_not_called()
    assert trainer._members.interrupted


@pytest.mark.parametrize(
    ("micro_batches", "message"), [(3, "only a power of two"), (0, "only a power of two")]
)
def test_a_number_without_a_tree(layers: nn.Module, micro_batches: int, message: str) -> None:
    """The tree needs a power of two of micro-batches."""
    with pytest.raises(UsageError, match=message):
        trainer_of(layers, micro_batches)


def test_a_model_without_trainable_parameters(layers: nn.Module) -> None:
    """It is refused before ranks meet."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    layers.requires_grad_(requires_grad=False)
    with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
        entrenar_py.elastic(layers, optimizer, micro_batches=2)


def test_a_launcher_that_sets_half_of_its_variables() -> None:
    """The message names the one that is missing, or wrong."""
    with pytest.raises(UsageError, match="the environment has no MASTER_ADDR"):
        seat_of_launcher({"RANK": "0", "WORLD_SIZE": "2"})
    names = {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(UsageError, match="elastic training needs the store of torchrun's agent"):
        seat_of_launcher({**names, "RANK": "1"})
    with pytest.raises(UsageError, match="RANK='x' in the environment is not a number"):
        seat_of_launcher({**names, "TORCHELASTIC_USE_AGENT_STORE": "True"})


def test_a_second_trainer_of_a_rank(layers: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever, as a newcomer behind its own first one."""
    trainer_of(layers)
    seat = type("Seat", (), {"num_seats": 2, "seat": 0, "store": None})()
    monkeypatch.setattr("entrenar_py.train.elastic.trainer.seat_of_launcher", lambda: seat)
    with pytest.raises(UsageError, match=r"elastic\(\) was called twice in this process"):
        trainer_of(layers)


def test_more_ranks_than_micro_batches(layers: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank needs one."""
    seat = type("Seat", (), {"num_seats": 4, "seat": 0, "store": None})()
    monkeypatch.setattr("entrenar_py.train.elastic.trainer.seat_of_launcher", lambda: seat)
    with pytest.raises(UsageError, match="micro_batches=2 with 4 ranks: every rank needs"):
        trainer_of(layers)
