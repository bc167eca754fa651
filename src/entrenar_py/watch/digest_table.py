"""Which chunks a GPU's digests are made of, and where they go: built once, run every time.

One launch of `digest_kernel.hash_chunks` a level: the first reads the tensors, the others the lists
of digests, which are small. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.errors import BackendUnavailable
from entrenar_py.watch import digest

ROW_WORDS = 4  # of a tensor: low half, high half, whether NaN or Inf is in it, one for the watch
_WORD = 8
_DIGEST_WORDS = digest.DIGEST_BYTES // _WORD
_HEADER_WORDS = digest.HEADER_BYTES // _WORD
_CHUNK_WORDS = digest.CHUNK_BYTES // _WORD
_ALIGNMENT = 16  # bytes that a thread loads at once

# XXH3's default secret (192 bytes), from its specification.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# Where a lane starts.
_START = (
    *(0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1),
)
# Exponent bits of a format's element, and the lowest of them: added to an exponent of ones alone it
# carries into the bit above, which is the sign's.
_FORMATS = {
    torch.float64: (0x7FF0000000000000, 0x0010000000000000, 64),
    torch.float32: (0x7F800000, 0x00800000, 32),
    torch.bfloat16: (0x7F80, 0x0080, 16),
    torch.float16: (0x7C00, 0x0400, 16),
    torch.complex128: (0x7FF0000000000000, 0x0010000000000000, 64),
    torch.complex64: (0x7F800000, 0x00800000, 32),
}


def secrets() -> NDArray[np.int64]:
    """int64 [56]: the secret's 24 words, then 8 of it each as the last stripe and both merges read
    them (at byte 121, 11 and 117), then the lanes' starts.
    """
    parts = [_SECRET[at : at + 64] for at in (121, 11, 117)]
    words = np.frombuffer(_SECRET + b"".join(parts), dtype="<u8")
    return np.concatenate([words, np.array(_START, dtype="<u8")]).astype("<u8").view(np.int64)


@dataclass(frozen=True)
class _Level:
    """The chunks of one launch. All [chunks], on the device."""

    address: Tensor
    num_words: Tensor
    tensor: Tensor
    slot: Tensor


class DigestTable:
    """Digests of `tensors`, all on one device, over and over while they stay where they are
    (`places`).

    `rows` is int64 [tensors, 4] on the device: the digest's low and high half; 1 if an element is
    NaN or Inf (of floating-point formats of 16 bits and more); and a word that is left alone.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        tensors = [one.detach() for one in tensors]
        self._kernel = _kernel()
        self._device = tensors[0].device
        sources = self._stage(tensors)
        lists = _Lists(tensors)
        self._arena = torch.zeros(lists.num_words, dtype=torch.int64, device=self._device)
        self.rows = self._arena[: ROW_WORDS * len(tensors)].view(-1, ROW_WORDS)
        lists.write_headers(self._arena, tensors)
        self._levels = [
            self._level(one) for one in lists.levels(sources, self._arena.data_ptr()) if one
        ]
        kinds = np.array([_kind(one.dtype) for one in tensors] + [(0, 0, 0)], dtype=np.uint64)
        self._kinds = torch.from_numpy(kinds.view(np.int64)).to(self._device)
        self._secret = torch.from_numpy(secrets()).to(self._device)

    def run(self, *, per_program: int = 32, **options: int) -> Tensor:
        """Fills `rows`, in the order of the current stream. `per_program` is how many chunks a
        program does; it and `options`, Triton's own, are for whoever looks for faster ones.
        """
        if self._copies:
            torch._foreach_copy_(self._stages, self._copies)
        self.rows.zero_()
        with _on(self._device):
            for level in self._levels:
                num_chunks = len(level.address)
                self._kernel[(-(-num_chunks // per_program),)](
                    level.address,
                    level.num_words,
                    level.tensor,
                    level.slot,
                    self._kinds,
                    self._secret,
                    self._arena,
                    num_chunks,
                    per_program=per_program,
                    **{"num_warps": max(1, per_program // 8), **options},
                )
        return self.rows

    def _stage(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Address and words of each tensor: its own, or those of a copy, made again in every run,
        where its elements lie out of order, or it begins or ends in the middle of 16 bytes.
        """
        staged = [one for one in tensors if not _is_readable(one)]
        sizes = [_up(one.numel() * one.element_size()) for one in staged]
        self._room = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        offsets = np.cumsum([0, *sizes])
        self._copies = staged
        self._stages = [
            self._room[at : at + one.numel() * one.element_size()].view(one.dtype).view(one.shape)
            for one, at in zip(staged, offsets.tolist(), strict=False)
        ]
        copied = {id(one): stage for one, stage in zip(staged, self._stages, strict=True)}
        return [
            (copied.get(id(one), one).data_ptr(), _up(one.numel() * one.element_size()) // _WORD)
            for one in tensors
        ]

    def _level(self, chunks: list[NDArray[np.int64]]) -> _Level:
        address, num_words, tensor, slot = np.concatenate(chunks, axis=1)
        small = np.stack([num_words, tensor, slot]).astype(np.int32)
        return _Level(
            torch.from_numpy(address.copy()).to(self._device),
            *torch.from_numpy(small).to(self._device),
        )


class _Lists:
    """Where in the arena, in words, the lists of digests stand: after the rows, each of 16 bytes'
    alignment. A tensor's first list begins with its header; its last digest goes to its row.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.num_words = ROW_WORDS * len(tensors)
        self._of: list[list[tuple[int, int]]] = []  # (offset, words) of each list of a tensor
        for one in tensors:
            num_digests = -(-one.numel() * one.element_size() // digest.CHUNK_BYTES)
            words = _HEADER_WORDS + _DIGEST_WORDS * num_digests
            found = [(self._take(words), words)]
            while words > _CHUNK_WORDS:
                words = _DIGEST_WORDS * -(-words // _CHUNK_WORDS)
                found.append((self._take(words), words))
            self._of.append(found)

    def _take(self, words: int) -> int:
        self.num_words += words
        return self.num_words - words

    def write_headers(self, arena: Tensor, tensors: Sequence[Tensor]) -> None:
        """Puts each tensor's in its place."""
        heads = np.frombuffer(b"".join(map(digest.header, tensors)), dtype=np.int64)
        starts = np.array([lists[0][0] for lists in self._of])
        where = (starts[:, None] + np.arange(_HEADER_WORDS)).reshape(-1)
        arena[torch.from_numpy(where).to(arena.device)] = torch.from_numpy(heads.copy()).to(
            arena.device
        )

    def levels(
        self, sources: Sequence[tuple[int, int]], arena: int
    ) -> list[list[NDArray[np.int64]]]:
        """For each launch, of each tensor that has part in it: int64 [4, chunks], which are
        address, words, whose flags, and where the digest goes. Lists have no flags.
        """
        depth = 1 + max(map(len, self._of))
        found: list[list[NDArray[np.int64]]] = [[] for _ in range(depth)]
        for index, ((address, num_words), lists) in enumerate(zip(sources, self._of, strict=True)):
            slots = [at for at, _ in lists] + [ROW_WORDS * index]
            slots[0] += _HEADER_WORDS
            if num_words:
                found[0].append(_chunks(address, num_words, index, slots[0]))
            for level, (at, words) in enumerate(lists, start=1):
                nobody = len(sources)
                found[level].append(_chunks(arena + _WORD * at, words, nobody, slots[level]))
        return found


def _chunks(address: int, num_words: int, tensor: int, slot: int) -> NDArray[np.int64]:
    index = np.arange(-(-num_words // _CHUNK_WORDS), dtype=np.int64)
    words = np.minimum(_CHUNK_WORDS, num_words - _CHUNK_WORDS * index)
    return np.stack(
        [
            address + digest.CHUNK_BYTES * index,
            words,
            np.full_like(index, tensor),
            slot + _DIGEST_WORDS * index,
        ]
    )


def places(tensors: Sequence[Tensor]) -> list[tuple[int, torch.Size, torch.dtype]]:
    """What has to stay as it is for a table to stand."""
    return [(one.data_ptr(), one.shape, one.dtype) for one in tensors]


def _is_readable(tensor: Tensor) -> bool:
    num_bytes = tensor.numel() * tensor.element_size()
    aligned = tensor.data_ptr() % _ALIGNMENT == 0 and num_bytes % _ALIGNMENT == 0
    return aligned and tensor.is_contiguous()


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _kind(dtype: torch.dtype) -> tuple[int, int, int]:
    """Exponent bits, carry, sign bits of a word of `dtype`; nothing of what has no exponent."""
    if dtype not in _FORMATS:
        return (0, 0, 0)
    exponent, carry, bits = _FORMATS[dtype]
    ones = sum(1 << at for at in range(0, 64, bits))
    return exponent * ones, carry * ones, (1 << (bits - 1)) * ones


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _kernel() -> Any:
    try:
        from entrenar_py.watch import digest_kernel
    except ImportError as error:
        raise BackendUnavailable(
            f"the watch of tensors on a GPU needs Triton ({error}); pip install triton"
        ) from error
    return digest_kernel.hash_chunks
