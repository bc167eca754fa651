"""Captures a function of tensors, forward and backward, as one graph of core ATen operations.

Functions that read values of their inputs on the host, draw random numbers, or write to their
inputs are refused; the error names the source line.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from entrenar_py.compute.wgpu import decompositions
from entrenar_py.shared.errors import UsageError

DTYPES = {torch.float32: "f32", torch.int64: "i32", torch.int32: "i32", torch.bool: "bool"}

# Dtypes that exist only in device memory: kernels compute in float32 or i32.
STORED = {torch.bfloat16: "bf16", torch.float16: "f16", torch.uint8: "u8"}
LOADED = {"bf16": "f32", "f16": "f32", "u8": "i32"}

# torch uses these dtypes for small indices that are only compared, which i32 can hold. In
# arithmetic, i32 can't replace them, because they wrap around at different values.
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
    """Return the dtype in memory of a tensor that is an input of the graph."""
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


# Values that depend on no input, such as positions, masks and sines, are computed on the host.
#
# They are the same in every step, and the host is more accurate: a device's sine may have an error
# of 2^-11.

_ATEN = torch.ops.aten

# Operations that give a fixed number for empty operands, and this number.
_NEUTRAL: dict[Any, float | bool] = {
    _ATEN.any.default: False,
    _ATEN.any.dim: False,
    _ATEN.bmm.default: 0,
    _ATEN.mm.default: 0,
    _ATEN.prod.default: 1,
    _ATEN.prod.dim_int: 1,
    _ATEN.sum.default: 0,
    _ATEN.sum.dim_IntList: 0,
}
# Operations that overlay their first operand with other tensors, and don't change it if these are
# empty.
_OVERLAYS = frozenset(
    {
        _ATEN.index_put.default,
        _ATEN.scatter.src,
        _ATEN.scatter.value,
        _ATEN.scatter_add.default,
        _ATEN.slice_scatter.default,
    }
)


def is_empty(node: Node) -> bool:
    """Return whether the result of `node` is a tensor without elements."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 0


def drop_empties(graph: GraphModule) -> None:
    """Replace operations that read empty tensors by operations that don't.

    Afterwards, only results of the graph, and the operands they are computed from, can be empty.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_empty(node):
            continue
        if not any(is_empty(operand) for operand in node.all_input_nodes):
            continue
        if node.target is _ATEN.cat.default:
            rest = [operand for operand in node.args[0] if not is_empty(operand)]
            node.args = (rest, *node.args[1:])
        elif node.target in _OVERLAYS and not is_empty(node.args[0]):
            node.replace_all_uses_with(node.args[0])
        elif (value := _repeated(node)) is not None:
            _fill(graph, node, value)
    graph.graph.eliminate_dead_code()


def _repeated(node: Node) -> float | bool | None:
    """Return the value of all elements of the result for empty operands; None if it isn't known."""
    if node.target is _ATEN.constant_pad_nd.default:
        return node.args[2] if len(node.args) > 2 else 0  # type: ignore[return-value]
    return _NEUTRAL.get(node.target)


def _fill(graph: GraphModule, node: Node, value: float | bool) -> None:
    result = node.meta["val"]
    full: Callable[..., Tensor] = _ATEN.full.default
    with graph.graph.inserting_before(node):
        filled = graph.graph.call_function(
            full, (list(result.shape), value), {"dtype": result.dtype, "pin_memory": False}
        )
    filled.meta.update(node.meta)
    node.replace_all_uses_with(filled)


# The device computes larger values itself, in less time than an upload would take.
TABLE_ELEMENTS_MAX = 2**18

# Operations that are free on the device: they repeat one number, or only change indices.
_FREE = frozenset(
    {
        _ATEN.alias.default,
        _ATEN.clone.default,
        _ATEN.expand.default,
        _ATEN.full.default,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.squeeze.dims,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
    }
)


def fold_constants(graph: GraphModule) -> None:
    """Replace operations that read only constants by constants named `_table<i>`."""
    known: dict[Node, Tensor] = {}
    computed: dict[Node, None] = {}  # in order
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, str(node.target))
        elif _is_constant(node, known):
            known[node] = _value(node, known)
            if node.target not in _FREE or any(one in computed for one in node.all_input_nodes):
                computed[node] = None
    needed = [one for one in computed if any(user not in computed for user in one.users)]
    for index, node in enumerate(needed):
        _replace(graph, node, f"_table{index}", known[node])
    graph.graph.eliminate_dead_code()


def _is_constant(node: Node, known: dict[Node, Tensor]) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and all(one in known for one in node.all_input_nodes)
        and isinstance(value, Tensor)
        and value.numel() <= TABLE_ELEMENTS_MAX
    )


def _value(node: Node, known: dict[Node, Tensor]) -> Tensor:
    def take(one: Any) -> Any:
        return torch.fx.node.map_arg(one, lambda operand: known[operand])

    with torch.no_grad():
        result: Tensor = node.target(*take(node.args), **take(node.kwargs))  # type: ignore[operator]
    return result


def _replace(graph: GraphModule, node: Node, name: str, value: Tensor) -> None:
    graph.register_buffer(name, value.contiguous())
    with graph.graph.inserting_before(node):
        table = graph.graph.get_attr(name)
    table.meta.update(node.meta)
    node.replace_all_uses_with(table)


# The known values of tensors that depend on no input, while a function is traced without values.
#
# A branch on such a tensor (a mask made of positions, say) is decided while capturing.

NUM_ELEMENTS_MAX = 2**18  # most elements of a tensor with known values

_RANDOM = torch.Tag.nondeterministic_seeded


class KnownValues:
    """The known values of traced tensors, each as a tensor outside the trace."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def operands(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with known values for traced tensors; None if one isn't known."""
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(self._of(one) is None for one in tensors):
            return None

        def take(one: Any) -> Any:
            return self._of(one) if isinstance(one, Tensor) else one

        taken: tuple[Any, Any] = pytree.tree_map(take, (args, kwargs))
        return taken

    def compute(self, func: Any, operands: tuple[Any, Any]) -> Any:
        """Return the result of `func` on known operands, outside the trace."""
        args, kwargs = operands
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def follow(self, func: Any, args: Any, operands: tuple[Any, Any] | None, result: Any) -> None:
        """Note the values of `result`, traced tensors that `func` computed from known operands.

        If `func` writes to a tensor, the tensor's values stay known only if all operands have known
        values.
        """
        if operands is None or _RANDOM in func.tags:
            if func._schema.is_mutable:
                self._forget(func, args)
            return
        traced_results = [
            leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, FakeTensor)
        ]
        if traced_results and all(leaf.numel() <= NUM_ELEMENTS_MAX for leaf in traced_results):
            found = pytree.tree_leaves(self.compute(func, operands))
            values = [leaf for leaf in found if isinstance(leaf, Tensor)]
            for traced, value in zip(traced_results, values, strict=True):
                self._known[traced] = value
        elif func._schema.is_mutable:
            self._forget(func, args)

    def _of(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, FakeTensor):
            return self._known.get(tensor)
        return tensor if tensor.numel() <= NUM_ELEMENTS_MAX else None

    def _forget(self, func: Any, args: Any) -> None:
        """Forget the tensors that share memory with a tensor that `func` writes to."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in pytree.tree_leaves(value):
                known = self._known.get(written) if isinstance(written, FakeTensor) else None
                if known is not None:
                    memory = known.untyped_storage()._cdata
                    for traced, other in list(self._known.items()):
                        if other.untyped_storage()._cdata == memory:
                            del self._known[traced]


Function = Callable[..., tuple[Tensor, ...]]

_LEAVES_TORCH = frozenset({Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__})
_IDENTITIES = frozenset(
    {_ATEN.alias.default, _ATEN.detach.default, _ATEN.lift_fresh_copy.default, _ATEN.lift.default}
)
# Directories with files that don't belong to the model: torch itself, and the backends.
_NOT_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def capture(fn: Function, inputs: Sequence[Tensor]) -> GraphModule:
    """Return the graph of `fn`, which returns a flat tuple and may call `torch.autograd.grad`.

    The graph depends on the shapes, dtypes, strides and `requires_grad` of `inputs`, not on values.
    Tensors that `fn` takes from elsewhere become constants, as do small tensors computed from
    constants alone. No operation of the graph writes to its operands. Every node has `meta["val"]`,
    a fake tensor, and `meta["line"]`, the model's source line that it comes from (`decoder.py:12
    in forward`). A node made by autograd has the line of its forward operation.
    Raises UsageError for operations that can't be in a graph.
    """
    graph = _trace(fn, [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs])
    names = list(dict.fromkeys(n.target for n in graph.graph.nodes if n.op == "get_attr"))
    constants = {str(name): getattr(graph, str(name)).detach() for name in names}
    if any(map(_writes, graph.graph.nodes)):
        graph = _functionalise(graph, [tensor.detach() for tensor in inputs], constants)
    _hold_constants(graph, len(inputs), constants)
    _drop_identities(graph.graph)
    graph.graph.eliminate_dead_code()
    _check(graph.graph)
    drop_empties(graph)
    fold_constants(graph)
    graph.recompile()
    return graph


def _trace(fn: Function, leaves: Sequence[Tensor]) -> GraphModule:
    """Return the graph of the decomposed operations that `fn` runs, each with its line."""

    def record(*tensors: Tensor) -> tuple[Tensor, ...]:
        # MATH computes attention, and its derivative, with matrix products and a softmax.
        with sdpa_kernel(SDPBackend.MATH), _OnHost(), _Lines(tensors):
            return tuple(fn(*tensors))

    traced: GraphModule = make_fx(
        record, decompositions.table(), tracing_mode="fake", _allow_non_fake_inputs=True
    )(*leaves)
    return traced


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functionalise(
    traced: GraphModule, inputs: Sequence[Tensor], constants: dict[str, Tensor]
) -> GraphModule:
    """Return the same graph without operations that write to their operands.

    Traces the graph again, so call it only for graphs with such operations. Constants become
    the last inputs of the result, so that a write to a constant is traced as a write to an input.
    """

    def run(*tensors: Tensor) -> Any:
        by_name = dict(zip(constants, tensors[len(inputs) :], strict=True))
        return _Replay(traced, by_name).run(*tensors[: len(inputs)])

    functional = torch.func.functionalize(run)
    with torch.no_grad():
        graph: GraphModule = make_fx(functional, decompositions.table(), tracing_mode="fake")(
            *inputs, *constants.values()
        )
    return graph


class _OnHost(TorchFunctionMode):
    """A mode that refuses calls that move data out of torch, such as `Tensor.numpy`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _LEAVES_TORCH and isinstance(args[0], FakeTensor):
            raise _reads(f"Tensor.{func.__name__}", _line_of(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


class _Lines(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that gives nodes their source lines, and refuses reads of data and illegal writes.

    Writes to inputs and constants are illegal.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = _current_graph()
        self._given = {one.untyped_storage()._cdata: one for one in inputs}
        # Sequence numbers and lines of forward operations. Autograd gives a backward operation the
        # sequence number of its forward operation.
        self._known = KnownValues()
        self._numbers: list[int] = []
        self._lines: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        line = self._line()
        known = self._known.operands(args, kwargs or {})
        if _reads_values(func, args):
            if known is None:
                raise _reads(str(func), line)
            return self._known.compute(func, known)
        self._refuse_writing(func, args, line)
        last = _last(self._graph)
        result = func(*args, **(kwargs or {}))
        _mark(self._graph, last, line)
        self._follow_views(func, args, result)
        self._known.follow(func, args, known, result)
        return result

    def _follow_views(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Add views of inputs and constants to the memory that must not be written to."""
        if func._schema.is_mutable or func is _ATEN.lift_fresh.default:  # lift_fresh copies
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and self._is_given(value):
                for view in pytree.tree_leaves(result):
                    self._given[view.untyped_storage()._cdata] = view

    def _is_given(self, value: object) -> bool:
        return isinstance(value, Tensor) and (
            not isinstance(value, FakeTensor) or value.untyped_storage()._cdata in self._given
        )

    def _refuse_writing(self, func: Any, args: tuple[Any, ...], line: str) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(self._is_given(one) for one in pytree.tree_leaves(value)):
                raise UsageError(
                    f"{func} at {line}: writes to an input or a constant of the step; "
                    "return the new value as another output"
                )

    def _line(self) -> str:
        node: Any = torch._C._current_autograd_node()  # may be None, which its type denies
        if node is not None:
            index = bisect_right(self._numbers, node._sequence_nr()) - 1
            if index >= 0:
                return self._lines[index]
            return _line_of(sys._getframe(2))
        line = _line_of(sys._getframe(2))
        number = torch._C._autograd._get_sequence_nr() - 1
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._lines.append(line)
        return line


class _Replay(Interpreter):
    """Runs a graph while it is traced into a new graph, and copies the lines of its nodes."""

    def __init__(self, traced: GraphModule, constants: dict[str, Tensor]) -> None:
        super().__init__(traced)
        self._constants = constants
        self._recorded = _current_graph()

    def run_node(self, n: Node) -> Any:
        """Return the result of `n`; the nodes recorded meanwhile get its line."""
        last = _last(self._recorded)
        result = super().run_node(n)
        _mark(self._recorded, last, n.meta.get("line", ""))
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant, which `_functionalise` traces as an input."""
        return self._constants[target]


def _current_graph() -> Graph:
    mode = get_proxy_mode()
    assert mode is not None, "only called while make_fx traces"
    graph: Graph = mode.tracer.graph
    return graph


def _last(graph: Graph) -> Node:
    return graph._root.prev


def _mark(graph: Graph, last: Node, line: str) -> None:
    node = _last(graph)
    while node is not last:
        node.meta["line"] = line
        node = node.prev


def _line_of(frame: FrameType | None) -> str:
    """Return the innermost source line of the model among `frame` and its callers."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_NOT_MODEL, "<")):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "a line that is not known"


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether tracing `func` needs the values of tensors."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    tensors = [one for one in pytree.tree_leaves(args) if isinstance(one, Tensor)]
    return func is not _ATEN.index.Tensor or any(one.dtype == torch.bool for one in tensors[1:])


def _reads(operation: str, line: str) -> UsageError:
    return UsageError(
        f"{operation} at {line}: reads the values of tensors, but a captured step has neither "
        "branches nor shapes that depend on data; use torch.where, or decide before the step and "
        "pass the result in"
    )


def _hold_constants(graph: GraphModule, num_inputs: int, constants: dict[str, Tensor]) -> None:
    """Make each constant a buffer read by one node, even if `_functionalise` made it an input."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    as_inputs = dict(zip(constants, placeholders[num_inputs:], strict=False))
    for name, value in constants.items():
        if hasattr(graph, name):
            delattr(graph, name)
        graph.register_buffer(name, value)
        readers = [n for n in graph.graph.nodes if n.op == "get_attr" and n.target == name]
        readers += [as_inputs[name]] if name in as_inputs else []
        with graph.graph.inserting_after(placeholders[-1]):
            constant = graph.graph.get_attr(name)
        constant.meta.update(readers[0].meta)
        for node in readers:
            node.replace_all_uses_with(constant)
            graph.graph.erase_node(node)


def _drop_identities(graph: Graph) -> None:
    """Bypass operations that change neither values nor strides, such as `detach`."""
    for node in graph.nodes:
        same = node.target in _IDENTITIES or (
            node.target is _ATEN.clone.default
            and node.meta["val"].stride() == node.args[0].meta["val"].stride()
        )
        if same:
            node.replace_all_uses_with(node.args[0])


def _check(graph: Graph) -> None:
    """Raise UsageError if an operation draws random numbers."""
    for node in graph.nodes:
        node.meta.setdefault("line", "")
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        writes = _writes(node)
        assert not writes, f"{node.target} at {node.meta['line']}"
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise UsageError(
                f"{node.target} at {node.meta['line']}: draws random numbers; "
                "draw them on the host and pass them in, as dropout's masks are"
            )
