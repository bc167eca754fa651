"""Settings of optimizers belong to parameters, whatever groups a script divides them into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from entrenar_py.check.diff import judge, report
from entrenar_py.check.diff.judge import Judgement
from entrenar_py.check.observing.borders import Borders
from entrenar_py.check.rank_files.border_file import Border, RankBorders, Settings

Groups = Sequence[tuple[Sequence[str], Mapping[str, float]]]
DECAYED, PLAIN = {"weight_decay": 0.1, "lr": 1e-3}, {"weight_decay": 0.0, "lr": 2e-3}
WEIGHTS, REST = ("0.weight", "2.weight"), ("0.bias", "2.bias")
USUAL: Groups = ((WEIGHTS, DECAYED), (REST, PLAIN))


def run(groups: Groups) -> list[RankBorders]:
    """Return the borders of a step of AdamW with these groups, given by parameters' names."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    named, borders, problems = dict(net.named_parameters()), list[Border](), list[str]()
    recorder = Borders(net, borders.append, Settings(), failed=problems.append)
    optimizer = torch.optim.AdamW(
        [{"params": [named[name] for name in names], **given} for names, given in groups]
    )
    recorder.begin_pass(0, 0)
    net(torch.ones(2, 3)).square().mean().backward()
    recorder.before_step(0, [optimizer])
    optimizer.step()
    recorder.after_step()
    assert not problems
    return [RankBorders(rank=0, borders=borders)]


def judged(groups: Groups) -> Judgement:
    """Return the judgement of other groups, compared with the usual ones."""
    return judge.judge(run(USUAL), run(groups), [])


@pytest.mark.parametrize(
    "groups",
    [
        USUAL[::-1],
        [([name], given) for names, given in USUAL for name in names],
        [(WEIGHTS[::-1], DECAYED), (REST, PLAIN)],
    ],
    ids=["in another order", "one for each parameter", "parameters in another order"],
)
def test_other_groups_with_the_same_settings_are_equal(groups: Groups) -> None:
    """A refactoring of groups is no bug."""
    assert judged(groups).bits is None


def test_a_parameter_in_the_wrong_group_is_named_with_its_settings() -> None:
    """Not only its update differs: the report says why."""
    wrong = ((*WEIGHTS, "2.bias"), {**DECAYED, "lr": 2e-3}), (("0.bias",), PLAIN)
    real = judged(wrong).real
    assert real is not None
    assert report.place(real).endswith("setting weight_decay of 2.bias")
    assert report.size(real).startswith("0 and 0.1; ")


def test_a_setting_of_several_parameters_is_shown_once() -> None:
    """The parameters that it concerns are counted."""
    real = judged(((WEIGHTS, DECAYED), (REST, {**PLAIN, "lr": 4e-3}))).real
    assert real is not None
    assert report.place(real).endswith("setting lr of 0.bias and 1 more")


def test_a_parameter_that_only_one_run_trains_has_no_partner() -> None:
    """The settings of the others are compared."""
    frozen = ((WEIGHTS, DECAYED), (("2.bias",), PLAIN))
    settings = [each for each in judged(frozen).differences if each.border.kind == "setting"]
    assert {each.border.shape for each in settings} == {(3,)}
    assert not any(each.distance for each in settings)
