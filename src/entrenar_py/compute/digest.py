"""The digest of a tensor: a 128-bit hash of its bytes, dtype and shape (docs/watch.md defines it).

Each chunk of the bytes is hashed by XXH3-128. Then the list of these digests is hashed in the same
way, until one digest is left. So a GPU can hash all chunks at once, and a stock library can
recompute every intermediate result.

On the CPU `root` computes the digest. On a GPU a `DigestTable` has the chunks of many tensors: it
is created once, and run at every watched step. Each level of hashes takes one launch of
`digest_triton.hash_chunks`: the first reads the tensors, the later ones read the lists of digests,
which are small. Nothing here waits for the device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128_digest

from entrenar_py.shared.errors import BackendUnavailable

CHUNK_BYTES = 8192  # small enough that a few hundred megabytes keep every core of a GPU busy
DIGEST_BYTES = 16
MAGIC = b"entrenar-digest1"
HEADER_BYTES = 64
_NAME_BYTES = 16
_ZEROS = bytes(CHUNK_BYTES)


def digest(tensor: Tensor) -> str:
    """Return a tensor's digest as 32 hex digits. It does not depend on device or strides."""
    return text(root(header(tensor), memory(tensor)))


def of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests of `tensors`, which are on one device, as int64 [tensors, 2] on it."""
    if tensors[0].device.type == "cpu":
        return all_words(root(header(tensor), memory(tensor)) for tensor in tensors)
    return DigestTable(tensors).run()[:, :2].clone()


def text(number: bytes) -> str:
    """Return a digest in hex, highest byte first. In `number` the lowest byte is first."""
    return number[::-1].hex()


def header(tensor: Tensor) -> bytes:
    """Return the header that precedes the digests of a tensor's chunks: size, dtype and shape."""
    name = str(tensor.dtype).removeprefix("torch.").encode()
    assert len(name) <= _NAME_BYTES, name
    sizes = struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
    num_bytes = tensor.numel() * tensor.element_size()
    fields = struct.pack("<2Q", num_bytes, tensor.dim())
    return MAGIC + name.ljust(_NAME_BYTES, b"\0") + fields + _little(xxh3_128_digest(sizes))


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of the tensor's elements in logical order.

    They are copied unless the tensor is in CPU memory in that order.
    """
    plain = tensor.detach().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def root(head: bytes, data: memoryview) -> bytes:
    """Return the digest of `data` with the header `head`: DIGEST_BYTES bytes, lowest byte first."""
    message = head + _digests(data)
    while len(message) > DIGEST_BYTES:
        message = _digests(memoryview(message))
    return message


def _digests(data: memoryview) -> bytes:
    whole = len(data) - len(data) % CHUNK_BYTES
    digests = [xxh3_128_digest(data[i : i + CHUNK_BYTES]) for i in range(0, whole, CHUNK_BYTES)]
    if whole < len(data):
        rest = bytes(data[whole:])
        digests.append(xxh3_128_digest(rest + _ZEROS[len(rest) :]))
    return _little(b"".join(reversed(digests)))


def _little(numbers: bytes) -> bytes:
    """Return `numbers` reversed: xxhash writes the highest byte first, but `root` the lowest."""
    return numbers[::-1]


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN or Inf, in one pass and without a copy of the tensor."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return all(bool(extreme.isfinite()) for extreme in real.aminmax())


def all_words(roots: Iterable[bytes]) -> Tensor:
    """Return the low and high halves of all digests as int64 [tensors, 2]."""
    joined = bytearray(b"".join(roots))
    if not joined:
        return torch.empty((0, 2), dtype=torch.int64)
    return torch.frombuffer(joined, dtype=torch.int64).view(-1, 2)


ROW_WORDS = 4  # per tensor: low half, high half, 1 if NaN or Inf, a mark of the watch
_WORD = 8
_DIGEST_WORDS = DIGEST_BYTES // _WORD
_HEADER_WORDS = HEADER_BYTES // _WORD
_CHUNK_WORDS = CHUNK_BYTES // _WORD
_ALIGNMENT = 16  # bytes that a thread loads at once

# XXH3's default secret (192 bytes), from its specification.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# The value that each of the 8 lanes starts with.
_START = (
    *(0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1),
)
# dtype -> (exponent bits of an element, lowest exponent bit, bits of an element). NaN and Inf have
# an exponent of all ones: adding the lowest exponent bit to the exponent carries into the bit
# above, the sign bit.
_FORMATS = {
    torch.float64: (0x7FF0000000000000, 0x0010000000000000, 64),
    torch.float32: (0x7F800000, 0x00800000, 32),
    torch.bfloat16: (0x7F80, 0x0080, 16),
    torch.float16: (0x7C00, 0x0400, 16),
    torch.complex128: (0x7FF0000000000000, 0x0010000000000000, 64),
    torch.complex64: (0x7F800000, 0x00800000, 32),
}


def secrets() -> NDArray[np.int64]:
    """Return the constants of XXH3 that the kernel reads, int64 [56].

    They are the 24 words of the secret; its 8 words from byte 121 on, for the last stripe; 8 words
    each from bytes 11 and 117 on, for the merges into the low and the high half; and the start
    values of the 8 lanes.
    """
    parts = [_SECRET[at : at + 64] for at in (121, 11, 117)]
    words = np.frombuffer(_SECRET + b"".join(parts), dtype="<u8")
    return np.concatenate([words, np.array(_START, dtype="<u8")]).astype("<u8").view(np.int64)


class DigestTable:
    """Computes the digests of `tensors` on one device, as long as `places(tensors)` stays the same.

    `rows` is int64 [tensors, ROW_WORDS] on the device. A row has the low half and the high half of
    the digest, then 1 if an element is NaN or Inf (only for floating-point dtypes of at least 16
    bits), then a 0 that the watch may overwrite.

    Raises BackendUnavailable if Triton is not installed.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        tensors = [tensor.detach() for tensor in tensors]
        self._kernel = kernels().hash_chunks
        self._device = tensors[0].device
        sources = self._stage(tensors)
        lists = _Lists(tensors)
        self._arena = torch.zeros(lists.num_words, dtype=torch.int64, device=self._device)
        self.rows = self._arena[: ROW_WORDS * len(tensors)].view(-1, ROW_WORDS)
        lists.write_headers(self._arena, tensors)
        levels = lists.levels(sources, self._arena.data_ptr())
        self._levels = [self._level(chunks) for chunks in levels if chunks]
        kinds = np.array([_kind(tensor.dtype) for tensor in tensors] + [(0, 0, 0)], dtype=np.uint64)
        self._kinds = torch.from_numpy(kinds.view(np.int64)).to(self._device)
        self._secret = torch.from_numpy(secrets()).to(self._device)

    def run(self, *, per_program: int = 32, **options: int) -> Tensor:
        """Fill `rows` on the current stream, and return it.

        `per_program` is the number of chunks that one program of the kernel hashes. `options` are
        Triton's. Both are for benchmarks that search for faster values.
        """
        if self._copies:
            torch._foreach_copy_(self._stages, self._copies)
        self.rows.zero_()
        on_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            for level in self._levels:
                num_chunks = len(level[0])
                self._kernel[(-(-num_chunks // per_program),)](
                    *level,
                    self._kinds,
                    self._secret,
                    self._arena,
                    num_chunks,
                    per_program=per_program,
                    **{"num_warps": max(1, per_program // 8), **options},
                )
        return self.rows

    def _stage(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return for each tensor the address at which the kernel reads it, and its number of words.

        A tensor is read from a copy if its elements are not contiguous, or if it begins or ends
        within a block of 16 bytes. Every run makes these copies again.
        """
        staged = [tensor for tensor in tensors if not _is_readable(tensor)]
        sizes = [_up(tensor.nbytes) for tensor in staged]
        self._room = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        offsets = np.cumsum([0, *sizes])
        self._copies = staged
        self._stages = [
            self._room[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, offset in zip(staged, offsets.tolist(), strict=False)
        ]
        copies = {id(tensor): stage for tensor, stage in zip(staged, self._stages, strict=True)}
        return [
            (copies.get(id(tensor), tensor).data_ptr(), _up(tensor.nbytes) // _WORD)
            for tensor in tensors
        ]

    def _level(self, chunks: list[NDArray[np.int64]]) -> tuple[Tensor, ...]:
        """Return the chunks of one launch on the device, as the arguments of `hash_chunks`.

        The first argument is the address, int64 [chunks]. The others are int32 [chunks]: the number
        of words, the index of the tensor that gets the chunk's flags, and the index of the word in
        the arena for the chunk's digest.
        """
        address, *rest = np.concatenate(chunks, axis=1)
        small = torch.from_numpy(np.stack(rest).astype(np.int32)).to(self._device)
        return torch.from_numpy(address.copy()).to(self._device), *small


class _Lists:
    """The places of all lists of digests in the arena.

    The arena is a tensor of `num_words` 64-bit words that begins with the rows. Each list is
    aligned to 16 bytes. A tensor's first list begins with its header. The digest of its last list
    is stored in its row.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.num_words = ROW_WORDS * len(tensors)
        self._of: list[list[tuple[int, int]]] = []  # (offset, words) of each list, by tensor
        for tensor in tensors:
            num_digests = -(-tensor.nbytes // CHUNK_BYTES)
            words = _HEADER_WORDS + _DIGEST_WORDS * num_digests
            lists = [(self._take(words), words)]
            while words > _CHUNK_WORDS:
                words = _DIGEST_WORDS * -(-words // _CHUNK_WORDS)
                lists.append((self._take(words), words))
            self._of.append(lists)

    def _take(self, words: int) -> int:
        self.num_words += words
        return self.num_words - words

    def write_headers(self, arena: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the header of each tensor to its place in `arena`."""
        heads = np.frombuffer(b"".join(map(header, tensors)), dtype=np.int64)
        starts = np.array([lists[0][0] for lists in self._of])
        where = (starts[:, None] + np.arange(_HEADER_WORDS)).reshape(-1)
        arena[torch.from_numpy(where).to(arena.device)] = torch.from_numpy(heads.copy()).to(
            arena.device
        )

    def levels(
        self, sources: Sequence[tuple[int, int]], arena: int
    ) -> list[list[NDArray[np.int64]]]:
        """Return for each launch the chunks of all tensors that take part, int64 [4, chunks].

        The four rows are address, number of words, index of the tensor that gets the flags (an
        unused index for lists of digests), and word of `arena` for the digest. `sources` are
        (address, words) pairs of the tensors, and `arena` is the address of the arena.
        """
        depth = 1 + max(map(len, self._of))
        levels: list[list[NDArray[np.int64]]] = [[] for _ in range(depth)]
        for index, ((address, num_words), lists) in enumerate(zip(sources, self._of, strict=True)):
            slots = [offset for offset, _ in lists] + [ROW_WORDS * index]
            slots[0] += _HEADER_WORDS
            if num_words:
                levels[0].append(_chunks(address, num_words, index, slots[0]))
            for level, (offset, words) in enumerate(lists, start=1):
                none = len(sources)
                levels[level].append(_chunks(arena + _WORD * offset, words, none, slots[level]))
        return levels


def _chunks(address: int, num_words: int, tensor: int, slot: int) -> NDArray[np.int64]:
    index = np.arange(-(-num_words // _CHUNK_WORDS), dtype=np.int64)
    words = np.minimum(_CHUNK_WORDS, num_words - _CHUNK_WORDS * index)
    return np.stack(
        [
            address + CHUNK_BYTES * index,
            words,
            np.full_like(index, tensor),
            slot + _DIGEST_WORDS * index,
        ]
    )


def places(tensors: Sequence[Tensor]) -> list[tuple[int, torch.Size, torch.dtype]]:
    """Return the addresses, shapes and dtypes that a digest table of `tensors` depends on."""
    return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]


def _is_readable(tensor: Tensor) -> bool:
    aligned = tensor.data_ptr() % _ALIGNMENT == 0 and tensor.nbytes % _ALIGNMENT == 0
    return aligned and tensor.is_contiguous()


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _kind(dtype: torch.dtype) -> tuple[int, int, int]:
    # Exponent bits, lowest bit of each exponent, and sign bits of a word of 64 bits. All are 0 for
    # a dtype in which NaN and Inf are not recognised.
    if dtype not in _FORMATS:
        return (0, 0, 0)
    exponent, carry, bits = _FORMATS[dtype]
    ones = sum(1 << at for at in range(0, 64, bits))
    return exponent * ones, carry * ones, (1 << (bits - 1)) * ones


def kernels() -> Any:
    """Return the module of the kernels. Raises BackendUnavailable without Triton."""
    try:
        from entrenar_py.compute import digest_triton
    except ImportError as error:
        raise BackendUnavailable(
            f"the digest of a tensor on a GPU needs Triton ({error}); pip install triton"
        ) from error
    return digest_triton
