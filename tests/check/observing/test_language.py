"""What a rank records of a language model: targets, shares, and what outputs depend on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from entrenar_py.check.observing import tokens
from entrenar_py.check.observing.generators import Generators
from entrenar_py.check.observing.language import Looking
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import trace

IDS = torch.tensor([[1, 4, 5, 6, 7, 8, 9, 3], [1, 9, 8, 7, 6, 5, 4, 0]])

BLOCKS = (torch.arange(8)[:, None] > 2).eq(torch.arange(8) > 2).float()  # of 3 and 5 tokens


class Summed(nn.Module):
    """Scores by the sum of all tokens up to each; it counts its passes, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(bos_token_id=1, pad_token_id=0)
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros(()))
        self.calls, self.kept = 0, list[Any]()

    def forward(self, ids: Tensor, **_: Any) -> Tensor:
        self.calls += 1
        self.kept.append(self.calls)
        self.passes += 1 + random.random() + np.random.rand()
        x = self.mix(F.dropout(self.table(ids), 0.1))
        scores: Tensor = self.head(x)
        return scores

    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Flat(Summed):
    """Sees all of a row."""

    def mix(self, x: Tensor) -> Tensor:
        return x + x.sum(1, keepdim=True)


def recorded(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ids: Tensor = IDS,
    given: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Any]:
    """Return the events of one step of `model` on `ids`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[Any] = []
    subject = Subject(model, (optimizer,), declared=None, rank=0, world_size=1)
    looking = Looking(subject, Generators(model, objects={}), events.extend)
    looking.listen()
    looking.forward(model, ((ids,), dict(given)), 0)
    scores = model(ids, **given)
    (_next(scores, ids) if loss is None else loss(scores, ids)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    looking.stepped(0)
    looking.remove()
    return events


def _next(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def of(kind: type[trace.E], events: list[Any]) -> list[trace.E]:
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the replaced functions back, and leave other listeners out."""
    for patch in tokens.TABLE:
        monkeypatch.setattr(F, patch.name, getattr(F, patch.name))
    monkeypatch.setattr(tokens, "_EARS", tokens._Ears())


# --- nothing is changed ---------------------------------------------------------------------------


def test_a_probe_leaves_no_trace_in_the_script() -> None:
    """Generators, buffers, counters and lists are those of a script that isn't looked at."""

    def state(model: Summed) -> list[Any]:
        return [
            *(float(p.detach().sum()) for p in [*model.parameters(), *model.buffers()]),
            *(model.calls, model.kept, model.training),
            *(torch.rand(1).item(), np.random.rand(), random.random()),
        ]

    def seeded() -> Summed:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(3)
        return Summed()

    plain = seeded()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    _next(plain(IDS), IDS).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    expected = state(plain)
    looked_at = seeded()
    events = recorded(looked_at)
    assert len(of(trace.Reread, events)) == 2
    assert state(looked_at) == expected


def test_a_model_with_hooks_of_the_script_is_left_alone() -> None:
    """A hook may count passes."""
    model = Summed()
    model.head.register_forward_hook(lambda *_: None)
    events = recorded(model)
    (tokens,) = of(trace.Tokens, events)
    assert "the script has set a hook on head" in tokens.problem
    assert len(of(trace.Scored, events)) == 1  # losses are seen without a pass
    assert not of(trace.Reread, events)


class Wrapped(nn.Module):
    """Passes all on, as wrappers of libraries do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapped_model_names_its_own_arguments() -> None:
    """Losses over the tokens are known where the model is passed nothing again."""
    inner = Summed()
    inner.head.register_forward_hook(lambda *_: None)
    assert len(of(trace.Scored, recorded(Wrapped(inner)))) == 1


def test_an_error_in_a_pass_of_our_own_is_told() -> None:
    """The script goes on."""

    class Once(Summed):
        def mix(self, x: Tensor) -> Tensor:
            if self.calls > 1:
                raise RuntimeError("only once")
            return x

    (tokens,) = of(trace.Tokens, recorded(Once()))
    assert tokens.problem == "it can't be passed tokens again (RuntimeError: only once)"


# --- what outputs depend on -----------------------------------------------------------------------


def test_later_tokens_move_no_earlier_output() -> None:
    """Outputs after the cut move; whoever sees all of a row moves before it, too."""
    for model, is_causal in ((Summed(), True), (Flat(), False)):
        for reread in of(trace.Reread, recorded(model)):
            assert reread.moved > 0.01
            assert (reread.still == 0.0) is is_causal
            assert reread.noise == 0.0


def test_a_row_that_depends_on_other_rows_is_told() -> None:
    """Experts that are full leave out tokens of the rows that come last."""

    class Full(Summed):
        def mix(self, x: Tensor) -> Tensor:
            return x.flatten(0, 1).cumsum(0).view_as(x)

    # With IDS, the first row's next tokens are the same tokens in another order, of the same sum.
    ids = torch.tensor([[1, 4, 4, 4, 7, 8, 9, 3], IDS[1].tolist()])
    assert all(one.noise > 0.01 for one in of(trace.Reread, recorded(Full(), ids=ids)))


def _of_decoder(scores: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), IDS[:, 2:].flatten())


@pytest.mark.parametrize(("name", "is_known"), [("tgt", True), ("other", False)])
def test_a_decoder_s_tokens_are_those_that_are_probed(name: str, is_known: bool) -> None:
    """An encoder sees all of its row, which may be the same text."""

    class Decoder(Summed):
        def forward(self, ids: Tensor, **given: Any) -> Tensor:
            seen = self.table(ids).sum(1, keepdim=True)
            scores: Tensor = self.head(self.table(given[name]).cumsum(1) + seen)
            return scores

    events = recorded(Decoder(), given={name: IDS[:, 1:]}, loss=_of_decoder)
    assert bool(of(trace.Reread, events)) is is_known
    assert all(one.still == 0.0 for one in of(trace.Reread, events))


def test_outputs_whose_targets_are_ignored_may_move() -> None:
    """A prompt may be seen from both sides."""

    class Prompt(Summed):
        def mix(self, x: Tensor) -> Tensor:
            prompt = x[:, :4] + x[:, :4].sum(1, keepdim=True)
            return torch.cat([prompt, x[:, 4:]], 1)

    def of_answers(scores: Tensor, ids: Tensor) -> Tensor:
        wanted = ids.clone()
        wanted[:, :5] = -100
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), wanted[:, 1:].flatten())

    rereads = of(trace.Reread, recorded(Prompt(), of_answers))
    assert [one.still for one in rereads] == [0.0, 0.0]


def test_padding_is_replaced_where_a_mask_shows_it() -> None:
    """By tokens of the text, whatever the padding is."""
    mask = torch.ones_like(IDS)
    mask[1, -1] = 0
    events = recorded(Summed(), given={"attention_mask": mask})
    assert [one.padding for one in of(trace.Tokens, events)] == [1]
    assert [one.replaced for one in of(trace.Reread, events)] == ["later", "later", "padding"]
    assert of(trace.Reread, events)[-1].still == 0.0


@pytest.mark.parametrize(
    "shown",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
        {"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])},
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]])},
        {"cu_seqlens": torch.tensor([0, 3, 8])},
        {"mask": BLOCKS.tril().bool()[None]},
        {"mask": BLOCKS.log()[None, None]},
    ],
)
def test_documents_are_known_by_the_argument_that_shows_them(shown: dict[str, Tensor]) -> None:
    """Positions, numbers, lengths, and masks of blocks."""
    events = recorded(Summed(), given=shown, ids=IDS[:1])
    (tokens,) = of(trace.Tokens, events)
    assert (tokens.documents, tokens.shown) == (2, next(iter(shown)))
    earlier = of(trace.Reread, events)[-1]
    assert earlier.replaced == "earlier"
    assert earlier.still > 0.01  # the model sees them all


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": torch.arange(8)[None]},
        {"position_ids": torch.arange(8)[None] % 3},
        {"token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])},
        {"labels": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
        {"mask": torch.ones(8, 8).tril().bool()[None]},
        {"cu_seqlens": torch.tensor([0, 8])},
    ],
)
def test_other_arguments_show_no_documents(given: dict[str, Tensor]) -> None:
    """One document a row, places in bars of music, types of tokens, and labels."""
    (tokens,) = of(trace.Tokens, recorded(Summed(), given=given, ids=IDS[:1]))
    assert tokens.documents == 0


# --- losses ---------------------------------------------------------------------------------------


def _transposed(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:])


def _same(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


def _twice(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-2].flatten(0, 1), ids[:, 2:].flatten())


def _summed(scores: Tensor, ids: Tensor) -> Tensor:
    logs = scores[:, :-1].log_softmax(-1).flatten(0, 1)
    return F.nll_loss(logs, ids[:, 1:].flatten(), reduction="sum", ignore_index=0) / 5


def _by_token(scores: Tensor, ids: Tensor) -> Tensor:
    each = F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return each.view(2, -1)[:, 2:].sum() / 4


@pytest.mark.parametrize(
    ("loss", "matches", "least", "most"),
    [
        (_next, (0, 12, 0), 1 / 14, 1 / 14),
        (_transposed, (0, 12, 0), 1 / 14, 1 / 14),
        (_same, (12, 0, 0), 1 / 16, 1 / 16),
        (_summed, (0, 12, 0), 1 / 5, 1 / 5),
        (_by_token, (0, 12, 0), 0.0, 1 / 4),
        (_twice, (0, 0, 12), 1 / 12, 1 / 12),
    ],
)
def test_targets_and_shares_of_a_loss(
    loss: Any, matches: tuple[int, ...], least: float, most: float
) -> None:
    """Whatever the layout and the reduction."""
    (scored,) = of(trace.Scored, recorded(Summed(), loss))
    assert (scored.known, scored.matches) == (12, matches)
    assert (scored.least, scored.most) == pytest.approx((least, most))


def test_positions_may_be_the_first_dimension() -> None:
    """As in a recurrent network over columns of a text."""

    class Columns(Summed):
        def mix(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    def down(scores: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(scores[:-1].flatten(0, 1), ids[1:].flatten())

    events = recorded(Columns(), down, IDS.t().contiguous())
    (scored,) = of(trace.Scored, events)
    assert scored.matches == (0, 12, 0)
    assert all(one.still == 0.0 and one.moved > 0.01 for one in of(trace.Reread, events))


def test_a_loss_that_is_only_shown_is_no_part_of_the_step() -> None:
    """Nor is one that is not over the tokens."""

    def also(scores: Tensor, ids: Tensor) -> Tensor:
        F.cross_entropy(scores.flatten(0, 1), ids.flatten())
        kinds = F.cross_entropy(scores.mean(1), torch.tensor([1, 2]))
        return _next(scores, ids) + kinds

    (scored,) = of(trace.Scored, recorded(Summed(), also))
    assert scored.matches == (0, 12, 0)


@pytest.mark.parametrize("training", [False, True])
def test_an_evaluation_is_recorded_with_its_mode(training: bool) -> None:
    """A loss without gradient follows a pass without gradient; a mean that is only shown doesn't.

    It is that of the step to come.
    """
    model = Summed().train(training)
    events: list[Any] = []
    subject = Subject(model, (), declared=None, rank=0, world_size=1)
    looking = Looking(subject, Generators(model, objects={}), events.extend)
    looking.listen()
    looking.stepped(4)
    with torch.no_grad():
        _next(torch.zeros(2, 8, 10), IDS)  # no pass of this model
        looking.aside(model)
        _next(model(IDS), IDS)
    looking.remove()
    (found,) = of(trace.Evaluated, events)
    assert (found.step, found.counted, found.training, found.drew) == (5, 14, training, True)


def test_a_pass_that_a_checkpoint_repeats_is_no_evaluation() -> None:
    """`checkpoint(model, use_reentrant=True)` passes the rows through without gradient first."""

    class Repeats(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            looking.aside(model)
            return _next(model(IDS), IDS) + 0 * x

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            looking.forward(model, ((IDS,), {}), 0)
            return gradients[0]

    model, events = Summed(), list[Any]()
    subject = Subject(model, (), declared=None, rank=0, world_size=1)
    looking = Looking(subject, Generators(model, objects={}), events.extend)
    looking.listen()
    Repeats.apply(torch.ones((), requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    looking.remove()
    assert not of(trace.Evaluated, events)


def test_the_settings_tell_the_token_of_a_begin() -> None:
    """Two of them at a row's begin are counted; nothing is known if it is also an end."""
    twice = torch.tensor([[1, 1, 5, 6, 7, 8, 9, 3]])
    (tokens,) = of(trace.Tokens, recorded(Summed(), ids=twice))
    assert (tokens.begun, tokens.doubled) == (1, 1)
    model = Summed()
    model.config.eos_token_id = [2, 1]
    (tokens,) = of(trace.Tokens, recorded(model, ids=twice))
    assert (tokens.begun, tokens.doubled) == (None, None)


def test_a_model_without_tokens_is_told() -> None:
    """Its steps are not looked at."""
    model = nn.Linear(4, 10)
    (tokens,) = recorded(model, lambda scores, _: scores.sum(), torch.rand(2, 4))
    assert tokens.problem == "it is given no token ids"
