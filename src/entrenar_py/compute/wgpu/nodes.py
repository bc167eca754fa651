"""The operation, shape, type and source line of a node of a captured graph."""

from __future__ import annotations

import torch
from torch.fx import Node

from entrenar_py.shared.errors import UsageError

DTYPES = {
    torch.float32: "f32",
    torch.int64: "i32",
    torch.int32: "i32",
    torch.bool: "bool",
}

# Only in memory: what is computed with them is a float32 or an i32.
STORED = {torch.bfloat16: "bf16", torch.float16: "f16", torch.uint8: "u8"}
LOADED = {"bf16": "f32", "f16": "f32", "u8": "i32"}

# torch uses these dtypes for small indices that are only compared, which i32 can hold. For
# arithmetic, i32 can't replace them: they wrap around at other values.
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
_COUNTING = frozenset({"arange", "unsqueeze", "view", "expand"})


def name_of(node: Node) -> str:
    if node.op != "call_function":
        return node.op
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def line_of(node: Node) -> str:
    return str(node.meta.get("line", "a line outside of the model"))


def shape_of(node: Node) -> tuple[int, ...]:
    shape = tuple(int(size) for size in node.meta["val"].shape)
    if 0 in shape:
        raise UsageError(
            f"{node.target} at {line_of(node)}: shape={list(shape)} has no elements; backend wgpu "
            "needs sizes of at least 1"
        )
    return shape


def stored_dtype_of(node: Node) -> str:
    """Return the dtype in memory of a tensor that the graph is given."""
    return STORED.get(node.meta["val"].dtype) or dtype_of(node)


def dtype_of(node: Node) -> str:
    dtype = node.meta["val"].dtype
    if dtype in _NARROW and name_of(node) in _COUNTING:
        return "i32"
    if dtype not in DTYPES:
        raise UsageError(
            f"{node.target} at {line_of(node)}: dtype={dtype}; backend wgpu computes in "
            f"{', '.join(str(one) for one in DTYPES)}: cast it, or use another backend"
        )
    return DTYPES[dtype]
