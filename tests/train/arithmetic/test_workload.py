"""Workloads and their data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import datasets, workload
from entrenar_py.train.arithmetic.tensors import Workload

NUM_DIGIT_SAMPLES = 1797


def test_digits_are_the_published_test_set() -> None:
    """Pixels and labels have the digest of those that scikit-learn's `load_digits` returns."""
    pixels, labels = datasets.digits(NUM_DIGIT_SAMPLES)
    assert pixels.dtype == np.float32
    assert labels.dtype == np.int64
    rows = np.concatenate([pixels * 16, labels[:, None]], axis=1).astype(np.uint8)
    assert datasets.digest(rows) == "871a762edb23c6d138f1434d0b23e9fe"
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_do_not_need_torch() -> None:
    """Reading the digits doesn't import torch, which would cost seconds."""
    code = (
        "import sys; from entrenar_py.train.arithmetic import datasets; datasets.digits(5);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=NUM_DIGIT_SAMPLES))
def test_a_smaller_set_is_a_prefix_of_a_larger(num_samples: int) -> None:
    """Sample k is the same whatever the number of samples."""
    pixels, labels = datasets.digits(num_samples)
    all_pixels, all_labels = datasets.digits(NUM_DIGIT_SAMPLES)
    np.testing.assert_array_equal(pixels, all_pixels[:num_samples])
    np.testing.assert_array_equal(labels, all_labels[:num_samples])
    assert datasets.lines(num_samples) == datasets.lines(NUM_DIGIT_SAMPLES)[:num_samples]


def test_a_callers_change_does_not_reach_the_next_caller() -> None:
    """The arrays handed out are copies: the cached table stays as the file has it."""
    pixels, labels = datasets.digits(3)
    before = pixels.copy(), labels.copy()
    pixels[:] = 7
    labels[:] = 7
    again = datasets.digits(3)
    np.testing.assert_array_equal(again[0], before[0])
    np.testing.assert_array_equal(again[1], before[1])


def test_lines_are_bounded_unindented_and_of_many_lengths() -> None:
    """Every line has something to predict, fits a sequence, and lengths differ early on."""
    lines = datasets.lines(50)
    lengths = {len(line) for line in lines}
    assert lengths <= set(range(datasets.LINE_BYTES_MIN, datasets.LINE_BYTES_MAX + 1))
    assert len(lengths) >= 5
    assert all(line == line.lstrip() and b"\n" not in line for line in lines)


def test_digest_sees_values_and_boundaries_of_rows() -> None:
    """The digest has 32 hex digits, repeats, and changes with one element or with the order."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    digest = datasets.digest(rows)
    assert len(digest) == 32
    assert int(digest, 16) >= 0
    assert digest == datasets.digest(rows.copy())
    assert digest == datasets.digest(rows[0], rows[1])
    assert digest != datasets.digest(rows[1], rows[0])
    assert digest != datasets.digest(rows.T)


def test_asking_for_more_digits_than_there_are_names_both_numbers() -> None:
    """Too many samples of `mlp` is a usage error that says how many there are."""
    with pytest.raises(UsageError, match=r"num_samples=1798 with workload=mlp.*<=1797"):
        datasets.digits(NUM_DIGIT_SAMPLES + 1)


def test_asking_for_more_lines_than_there_are_names_both_numbers() -> None:
    """Too many samples of `decoder` is a usage error that says how many there are."""
    with pytest.raises(UsageError, match=r"num_samples=999999 with workload=decoder.*has (\d+)"):
        datasets.lines(999_999)


NAMES = ("linear", "mlp", "decoder", "vectors")
NUM_SAMPLES = 24
IDS = [3, 0, 17, 5, 23]

every_workload = pytest.mark.parametrize("name", NAMES)


def built(name: str, *, num_samples: int = NUM_SAMPLES, seed: int = 1) -> Workload:
    data = np.random.default_rng(seed)
    return workload.build(name, num_samples=num_samples, width=7, data=data)


def anywhere(model: Workload, dtype: torch.dtype, seed: int = 2) -> dict[str, Tensor]:
    """Return tensors without zeros, since LoRA's initial B would hide the gradient of A."""
    rng = np.random.default_rng(seed)
    return {
        spec.name: torch.from_numpy(rng.normal(0, 0.3, spec.shape).astype(np.float32))
        .to(dtype)
        .requires_grad_(spec.role == "trainable")
        for spec in model.specs
    }


def identity(x: Tensor) -> Tensor:
    return x


def loss(model: Workload, tensors: Mapping[str, Tensor], ids: list[int]) -> Tensor:
    return model.loss_of(tensors, model.batch(ids), linear=F.linear, drop=identity)


@every_workload
def test_initial_follows_the_specs(name: str) -> None:
    """Starting values come in the order, shapes, dtype and layout that the specs promise."""
    model = built(name)
    values = model.initial(np.random.default_rng(0))
    assert list(values) == [spec.name for spec in model.specs]
    for spec in model.specs:
        array = values[spec.name]
        assert array.shape == spec.shape
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert np.isfinite(array).all()


@every_workload
def test_initial_is_a_function_of_its_stream(name: str) -> None:
    """The same stream gives the same starting bits, another stream gives others."""
    model = built(name)
    first, again, other = (model.initial(np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert all(first[key].tobytes() == again[key].tobytes() for key in first)
    assert any(first[key].tobytes() != other[key].tobytes() for key in first)


@every_workload
def test_specs_describe_the_model(name: str) -> None:
    """The model knows its name, its tensors' names are unique, and only trainables decay."""
    model = built(name)
    assert model.name == name
    assert model.num_samples == NUM_SAMPLES
    assert len({spec.name for spec in model.specs}) == len(model.specs)
    assert any(spec.role == "trainable" for spec in model.specs)
    assert all(spec.role == "trainable" for spec in model.specs if spec.decayed)


@every_workload
def test_each_trainable_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Along a random direction per tensor, the gradient is the float64 central difference."""
    model = built(name)
    tensors = anywhere(model, torch.float32)
    torch.autograd.backward(loss(model, tensors, IDS))
    exact = {key: value.detach().double() for key, value in tensors.items()}
    rng = np.random.default_rng(3)
    step = 1e-5
    for spec in model.specs:
        if spec.role != "trainable":
            continue
        direction = torch.from_numpy(rng.normal(size=spec.shape))
        ahead = loss(model, exact | {spec.name: exact[spec.name] + step * direction}, IDS)
        behind = loss(model, exact | {spec.name: exact[spec.name] - step * direction}, IDS)
        gradient = tensors[spec.name].grad
        assert gradient is not None
        slope = (gradient.double() * direction).sum()
        # float32 rounding (2^-24) of some 10^3 additions; the difference adds about 1e-9.
        bound = 1e-4 * gradient.double().norm() * direction.norm()
        assert abs((ahead - behind) / (2 * step) - slope) <= bound
        assert gradient.abs().sum() > 0


@every_workload
def test_only_trainables_get_a_gradient(name: str) -> None:
    """Backward reaches every trainable tensor and leaves frozen ones and buffers alone."""
    model = built(name)
    tensors = anywhere(model, torch.float32)
    torch.autograd.backward(loss(model, tensors, IDS))
    reached = {key for key, value in tensors.items() if value.grad is not None}
    assert reached == {spec.name for spec in model.specs if spec.role == "trainable"}


@every_workload
def test_loss_is_a_float32_scalar_with_repeatable_bits(name: str) -> None:
    """Two evaluations, of two builds of the workload, agree to the bit."""
    values = []
    for model in (built(name), built(name)):
        value = loss(model, anywhere(model, torch.float32), IDS)
        assert value.shape == ()
        assert value.dtype == torch.float32
        values.append(value.detach().numpy().tobytes())
    assert values[0] == values[1]


@every_workload
@settings(deadline=None, max_examples=20)
@given(ids=st.lists(st.integers(0, NUM_SAMPLES - 1), min_size=1, max_size=9))
def test_loss_and_weight_are_sums_over_samples(name: str, ids: list[int]) -> None:
    """A batch's loss and weight are the sums of its samples', repeated ones included."""
    model = built(name)
    tensors = anywhere(model, torch.float32)
    with torch.no_grad():
        together = loss(model, tensors, ids).item()
        apart = sum(loss(model, tensors, [i]).item() for i in ids)
    # float32: 2^-24 times some 10^2 terms, which of `vectors` may cancel.
    assert together == pytest.approx(apart, rel=1e-5, abs=1e-5)
    weights = [model.weight([i]) for i in ids]
    assert model.weight(ids) == sum(weights)
    assert all(1 <= weight <= model.weight_max for weight in weights)


@every_workload
@settings(deadline=None, max_examples=20)
@given(ids=st.lists(st.integers(0, NUM_SAMPLES - 1), min_size=1, max_size=9))
def test_statistics_are_sums_over_samples(name: str, ids: list[int]) -> None:
    """Each buffer has one statistic of its shape, the exact sum of the samples' own."""
    model = built(name)
    buffers = {spec.name: spec.shape for spec in model.specs if spec.role == "buffer"}
    together = model.statistics(ids)
    assert {key: value.shape for key, value in together.items()} == buffers
    for key, value in together.items():
        assert value.dtype == np.float32
        apart = np.sum([model.statistics([i])[key] for i in ids], axis=0)
        np.testing.assert_array_equal(value, apart)


@every_workload
def test_data_digest_is_the_data_sets(name: str) -> None:
    """The digest repeats over builds and differs when there are fewer samples."""
    digest = built(name).data_digest
    assert len(digest) == 32
    assert digest == built(name).data_digest
    assert digest != built(name, num_samples=NUM_SAMPLES - 1).data_digest


def test_digests_tell_data_sets_apart() -> None:
    """The data sets, and `linear` drawn from another stream, have different digests."""
    digests = {built(name).data_digest for name in NAMES} | {built("linear", seed=9).data_digest}
    assert len(digests) == len(NAMES) + 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A workload that does not exist is a usage error that says what does."""
    with pytest.raises(UsageError, match="workload='cnn': allowed are linear, mlp, decoder"):
        built("cnn")


@pytest.mark.parametrize("name", ["mlp", "decoder"])
def test_too_many_samples_is_a_usage_error(name: str) -> None:
    """A data set with too few samples is refused with both numbers before anything runs."""
    with pytest.raises(UsageError, match=rf"num_samples=50000 with workload={name}.*use num_"):
        built(name, num_samples=50_000)


def test_linear_is_solved_by_two_and_one() -> None:
    """y = 2x + 1: at weight 2 and bias 1 the loss is zero; at 2 and 1.5 it is 1/4 a sample."""
    model = built("linear")
    tensors = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])}
    assert loss(model, tensors, IDS).item() == 0
    tensors["bias"] = torch.tensor([1.5])
    assert loss(model, tensors, IDS).item() == pytest.approx(len(IDS) / 4, rel=1e-5)


def test_mlp_subtracts_its_running_mean() -> None:
    """A running mean m acts as if the first bias were smaller by W m."""
    model = built("mlp")
    tensors = {key: value.detach() for key, value in anywhere(model, torch.float64).items()}
    folded = tensors | {
        "running_mean": torch.zeros(64, dtype=torch.float64),
        "hidden1.bias": tensors["hidden1.bias"]
        - tensors["hidden1.weight"] @ tensors["running_mean"],
    }
    torch.testing.assert_close(loss(model, tensors, IDS), loss(model, folded, IDS))


def test_mlp_has_two_parameter_groups() -> None:
    """Weights decay, biases do not, and the buffer starts at zero."""
    model = built("mlp")
    decayed = {spec.name for spec in model.specs if spec.decayed}
    assert decayed == {"hidden1.weight", "hidden2.weight", "output.weight"}
    assert not model.initial(np.random.default_rng(0))["running_mean"].any()


@pytest.mark.parametrize(("name", "num_calls"), [("linear", 0), ("mlp", 2), ("decoder", 4)])
def test_dropout_has_its_places(name: str, num_calls: int) -> None:
    """`drop` is called once at each place in the forward pass, and its result is used."""
    model = built(name)
    tensors = anywhere(model, torch.float32)
    shapes = []

    def drop(x: Tensor) -> Tensor:
        shapes.append(x.shape)
        return torch.zeros_like(x)

    dropped = model.loss_of(tensors, model.batch(IDS), linear=F.linear, drop=drop)
    assert len(shapes) == num_calls
    assert (dropped.item() != loss(model, tensors, IDS).item()) == (num_calls > 0)


@every_workload
def test_every_dense_layer_goes_through_linear(name: str) -> None:
    """All matrices but the looked-up embedding reach the backend's `linear`, on [rows, in]."""
    model = built(name)
    tensors = anywhere(model, torch.float32)
    seen: list[Tensor] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert x.ndim == 2
        seen.append(weight)
        return F.linear(x, weight, bias)

    model.loss_of(tensors, model.batch(IDS), linear=linear, drop=identity)
    matrices = {id(tensors[spec.name]) for spec in model.specs if len(spec.shape) == 2}
    assert {id(weight) for weight in seen} == matrices
    assert len(seen) == len(matrices)


@given(st.sampled_from(NAMES), st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_gradients_are_those_of_the_summed_loss(name: str, seed: int) -> None:
    """`gradients` gives autograd's gradient of `loss_of`, scaled, in the order of the specs."""
    rng = np.random.default_rng(seed)
    model = workload.build(name, num_samples=12, width=5, data=np.random.default_rng(1))
    tensors = {n: torch.tensor(value) for n, value in model.initial(rng).items()}
    trainable = [spec.name for spec in model.specs if spec.role == "trainable"]
    for tensor_name in trainable:
        tensors[tensor_name].requires_grad_()
    ids = rng.permutation(12)[:5].tolist()
    given_loss, given_parts = model.gradients(tensors, ids, drop=lambda x: x, scale=0.125)
    loss = model.loss_of(tensors, model.batch(ids), linear=F.linear, drop=lambda x: x)
    loss.backward()  # type: ignore[no-untyped-call]
    assert given_loss == pytest.approx(loss.item(), rel=1e-6)
    assert len(given_parts) == len(trainable)
    for part, tensor_name in zip(given_parts, trainable, strict=True):
        gradient = tensors[tensor_name].grad
        assert gradient is not None
        expected = gradient.reshape(-1).numpy() * 0.125
        assert part.shape == gradient.shape
        assert part.dtype == np.float32
        np.testing.assert_allclose(np.reshape(part, -1), expected, rtol=1e-5, atol=1e-6)
