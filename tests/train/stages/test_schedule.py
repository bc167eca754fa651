"""The order in which stages take shards, the places of workers, and the times of passes."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.finetune import page
from entrenar_py.train.wire import pipeline
from entrenar_py.train.wire.pipeline import Places, Timed


def played(num_stages: int, num_shards: int) -> dict[int, list[Timed]]:
    """Return the passes of equal stages that wait for nothing but each other; each takes 1."""
    shards = range(num_shards)
    left = {
        stage: pipeline.order(shards, stage=stage, num_stages=num_stages)
        for stage in range(num_stages)
    }
    last = num_stages - 1
    done: dict[tuple[int, int, bool], int] = {}  # stage, shard, is_forward -> when
    found: dict[int, list[Timed]] = {stage: [] for stage in left}
    for now in count():
        if not any(left.values()):
            return found
        assert now < 10 * (num_shards + num_stages), "no deadlock"
        for stage, passes in left.items():
            if not passes or (found[stage] and found[stage][-1].ended > now):
                continue
            shard, is_forward = passes[0]
            needed = (stage - 1, shard, True) if is_forward else (stage + 1, shard, False)
            begins = is_forward and stage == 0
            if begins or done.get(needed, now + 1) <= now:
                passes.pop(0)
                takes = 2 if stage == last else 1  # both passes at once
                found[stage].append(Timed(shard, is_forward, now, now + takes))
                done[stage, shard, is_forward] = now + takes
                if stage == last:
                    done[stage, shard, False] = now + takes
    raise AssertionError


@given(st.integers(1, 6), st.integers(1, 12))
def test_every_shard_passes_once_each_way(num_stages: int, num_shards: int) -> None:
    """Backward passes are in the order of the shards, so that sums need few vectors."""
    for stage, passes in played(num_stages, num_shards).items():
        forward = [one.shard for one in passes if one.is_forward]
        backward = [one.shard for one in passes if not one.is_forward]
        assert forward == list(range(num_shards))
        assert backward == ([] if stage == num_stages - 1 else list(range(num_shards)))


@given(st.integers(2, 6), st.integers(1, 12))
def test_equal_stages_wait_as_the_formula_says(num_stages: int, num_shards: int) -> None:
    idle = pipeline.idle_share(played(num_stages, num_shards))
    expected = (num_stages - 1) / (num_shards + num_stages - 1)
    assert idle == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_stage_keeps_few_shards(num_stages: int, num_shards: int) -> None:
    """One more than there are stages from it on."""
    for stage in range(num_stages - 1):
        kept = most = 0
        for _, is_forward in pipeline.order(range(num_shards), stage=stage, num_stages=num_stages):
            kept += 1 if is_forward else -1
            most = max(most, kept)
        assert most <= num_stages - stage + 1


def test_times_are_read_back() -> None:
    passes = [Timed(3, True, 5, 9), Timed(0, False, 9, 9)]
    assert pipeline.decode(pipeline.encode(passes)) == passes


@pytest.mark.parametrize("times", [(1,), (1, 2), (1, 5, 4), (1, 2, 3, 4)])
def test_times_that_are_none(times: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="times_us"):
        pipeline.decode(times)


def test_nothing_passed() -> None:
    assert pipeline.idle_share({}) is None
    assert list(page.draw_passes({}, 4)) == []


@pytest.mark.parametrize("passes", [[], {"x": []}, {"0": [1.5]}, {"0": [1]}, {"0": None}, None])
def test_lines_of_another_form_draw_nothing(passes: object) -> None:
    assert page.passes_of({"passes_us": passes}) == {}


def test_the_picture_has_each_pass() -> None:
    passes = played(3, 4)
    text = "\n".join(page.draw_passes(passes, 4))
    assert text.count("<rect") == sum(map(len, passes.values()))
    assert "33.3% of the time stages waited" in text
    assert "= 33.3%, of P = 3 stages and S = 4" in text


def test_copies_of_a_stage_share_its_shards() -> None:
    places = Places(((0,), (1, 2)), (range(2), range(2, 5)), (None, "wgpu"))
    assert places.holders([0, 1, 2], 4) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert places.holders([0, 2], 4) == [0, 0, 0, 0, 2, 2, 2, 2]
    assert places.empty([0]) == [1]
    assert places.unsuited("cpu") == {1, 2}
    assert places.unsuited("wgpu:1") == set()
