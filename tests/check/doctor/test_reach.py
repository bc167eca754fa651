"""The clauses that can be exercised, on machines with and without devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from entrenar_py.check.doctor import Reach, reach
from entrenar_py.compute.machine import Found

CPU = Found(name="cpu", serves=True, device="x86_64")
NO_CUDA = Found(name="cuda", serves=False, reason="no driver")
NO_WGPU = Found(name="wgpu", serves=False, reason="no adapter")
LLVMPIPE = Found(name="wgpu:0", serves=True, device="llvmpipe", software=True)
GPUS = [Found(name=f"cuda:{index}", serves=True, device="H100") for index in range(2)]


def clauses(found: Sequence[Found]) -> dict[str, Reach]:
    return {one.id: one for one in reach.clauses(found)}


def test_without_devices() -> None:
    """Without devices, clauses that need an adapter have a reason; training on the CPU works."""
    known = clauses([CPU, NO_CUDA, NO_WGPU])
    product, manifest, chain = (known[one] for one in ("F-WGPU-001", "F-HET-001", "F-DP-004"))
    assert (product.state, product.can, product.lacking) == ("no", 0, ("wgpu (no adapter)",))
    assert (manifest.state, manifest.lacking) == ("no", ("wgpu (no adapter)", "cuda (no driver)"))
    assert chain.state == "partly"
    assert chain.can == chain.planned
    assert "cuda (no driver): a stand-in fails in its place" in chain.lacking
    assert (known["F-DP-001"].state, known["F-DP-001"].lacking) == ("yes", ())


def test_with_an_adapter() -> None:
    """Two backends are enough to compare gradients; the third is listed as missing."""
    known = clauses([CPU, NO_CUDA, LLVMPIPE])
    assert known["F-WGPU-001"].state == "yes"
    assert (known["F-HET-001"].state, known["F-HET-001"].lacking) == (
        "partly",
        ("cuda (no driver)",),
    )


def test_with_everything() -> None:
    """With all devices nothing is lacking, and every clause of every contract is listed."""
    known = clauses([CPU, *GPUS, LLVMPIPE])
    assert {one.state for one in known.values()} == {"yes"}
    assert {"F-LS-001", "F-PAR-001", "F-RED-001", "F-TI-001", "F-WP-001"} <= set(known)


@pytest.mark.parametrize(
    ("found", "reference", "ddp"),
    [
        ([CPU, NO_CUDA, NO_WGPU], ("cpu",), ("cpu",)),
        ([CPU, *GPUS, LLVMPIPE], ("cpu", "cuda:0", "cuda:1", "wgpu:0"), ("cpu", "cuda")),
    ],
)
def test_trainers(found: list[Found], reference: tuple[str, ...], ddp: tuple[str, ...]) -> None:
    """Our trainers take each device by name; torch's own need a GPU for each rank."""
    known = {one.system: one for one in reach.trainers(found)}
    assert known["reference"].backends == reference
    assert known["ddp"].backends == ddp
    assert bool(known["ddp"].limits) == ("cuda" in ddp)
    assert "matmul" not in known
