"""Draws by key and position: published bits, and the same ones on every device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar_py.compute import draws, open_backend
from entrenar_py.compute.wgpu.program import compile_step
from entrenar_py.shared.errors import BackendUnavailable

KEY = torch.tensor([-5, 123456], dtype=torch.int32)
# An odd number of elements, more than a block; one element; none.
SHAPES = [(33, 1001), (1,), (3, 0), ()]
SHARES = [0.0, 0.1, 0.5, 1.0]


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_published_bits(
    key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]
) -> None:
    """The known answers that Random123 publishes for 20 rounds."""
    first, second = (np.array([one], np.uint32) for one in counter)
    found = draws.threefry(key, first, second)
    assert tuple(int(one[0]) for one in found) == words


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", SHARES)
def test_torch_draws_the_same(shape: tuple[int, ...], share: float) -> None:
    """Operations of torch, which any device has, give numpy's draws."""
    found = draws.kept(KEY, 3, shape, share)
    assert found.shape == shape
    assert torch.equal(found, draws.by_torch(KEY, 3, shape, share))
    assert share > 0 or bool(found.all())
    assert share < 1 or not bool(found.any())


def test_an_element_s_draw_follows_from_its_index() -> None:
    """The draws of fewer elements are the first ones of more. Keys and numbers differ."""
    whole = draws.kept(KEY, 3, (40_001,), 0.3)
    assert torch.equal(draws.kept(KEY, 3, (2, 1001), 0.3).reshape(-1), whole[:2002])
    others = [
        draws.kept(KEY, 4, (40_001,), 0.3),
        draws.kept(KEY + torch.tensor([0, 1]).int(), 3, (40_001,), 0.3),
        draws.kept(KEY + torch.tensor([1, 0]).int(), 3, (40_001,), 0.3),
    ]
    for one in (whole, *others):
        assert float(one.float().mean()) == pytest.approx(0.7, abs=0.01)
    for one in others:  # as often equal as independent draws are
        assert float((one == whole).float().mean()) == pytest.approx(0.58, abs=0.01)
    neighbours = whole[1:] == whole[:-1]
    assert float(neighbours.float().mean()) == pytest.approx(0.58, abs=0.01)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [*SHAPES, (3, 500_001)])
@pytest.mark.parametrize("share", SHARES)
def test_cuda_draws_the_same(shape: tuple[int, ...], share: float) -> None:
    """A GPU's draws are the CPU's, also those of draw number 1."""
    try:
        open_backend("cuda")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    for number in (0, 1, 7):
        found = draws.kept(KEY.cuda(), number, shape, share)
        assert torch.equal(found.cpu(), draws.kept(KEY, number, shape, share))


@pytest.mark.wgpu
def test_wgpu_draws_the_same() -> None:
    """A captured step draws by its key, an input: the CPU's draws for each key."""
    try:
        device = open_backend("wgpu").programs.device  # type: ignore[attr-defined]
    except BackendUnavailable as error:
        pytest.skip(str(error))

    def fn(key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = draws.kept(key, 2, (3, 5, 7), 0.4).transpose(0, 2).float().sum(1)
        return turned, *(draws.kept(key, 1, (7, 501), share) for share in SHARES)

    program = compile_step(device, fn, [KEY])
    for key in (KEY, torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)):
        for one, right in zip(program.run([key.numpy()]), fn(key), strict=True):
            np.testing.assert_array_equal(one, right.numpy())
