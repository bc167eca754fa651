"""The attempts to break the trainers: planted bugs and benign variants, for the kill matrix.

Every bug is planted from outside, by replacing the function at a dotted path. Most of these bugs
were shipped in well-known projects.
"""

from __future__ import annotations

from entrenar_py.shared.mutants import Variant

from . import (
    accumulation,
    audits,
    averaging,
    benign,
    benign_audits,
    benign_averaging,
    benign_distillation,
    benign_elastic,
    benign_finetuning,
    benign_language_models,
    benign_local_sgd,
    benign_mesh,
    benign_parallelism,
    benign_protocol,
    benign_rings,
    benign_stages,
    benign_updates,
    benign_wgpu,
    blocks,
    checkpoint,
    clipping,
    communication,
    data,
    devices,
    distillation,
    elastic,
    fallback,
    finetuning,
    initialisation,
    language_models,
    local_sgd,
    loss,
    manifests,
    membership,
    mesh,
    non_finite,
    optimizer,
    parallelism,
    protocol,
    randomness,
    rings,
    schedule,
    stages,
    torch_benign,
    torch_canonical,
    torch_ddp,
    torch_fsdp,
    updates,
    wgpu_kernels,
    wgpu_steps,
    wire,
)

_MUTANTS = (
    *(loss, accumulation, data, communication, clipping, schedule, optimizer, initialisation),
    *(checkpoint, membership, non_finite, randomness, devices, manifests, fallback),
    *(wire, averaging, protocol, blocks, mesh, audits, rings, updates),
    *(torch_ddp, torch_fsdp, parallelism, torch_canonical, local_sgd, elastic),
    *(wgpu_steps, wgpu_kernels, finetuning, stages, distillation),
    language_models,
)
_BENIGN = (
    *(benign_protocol, benign_mesh, benign_audits, benign_rings, benign_updates),
    *(torch_benign, benign_parallelism, benign_local_sgd, benign_elastic),
    benign_wgpu,
    *(benign_finetuning, benign_stages, benign_distillation),
    benign_averaging,
    benign_language_models,
)


def variants() -> list[Variant]:
    """Return every mutant, by family, then every benign variant."""
    return [variant for family in (*_MUTANTS, benign, *_BENIGN) for variant in family.VARIANTS]
