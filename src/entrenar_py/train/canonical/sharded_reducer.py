"""The canonical reduce-scatter of one model that `fully_shard` has sharded.

FSDP reduces the gradients of every micro-batch at once, so that a rank keeps only its shard of
them. So the tree adds across ranks first. Rank r of W has the micro-batches i * W + r. The i-th
reduce-scatter computes the tree node over micro-batches i * W to i * W + W - 1, and a `Counter`
adds a rank's shards of these nodes. This makes the same tree for every W that is a power of two.

For any other W these micro-batches aren't one node. A rank receives its shard of each one's
gradient, and the `Counter` adds them one after another: the same tree again. Where W doesn't divide
the number of micro-batches, some ranks have one less. They repeat their last one, as FSDP's
collectives need every rank, and what they send then isn't added.

Without `sync_each` the tree adds a rank's micro-batches first, which are neighbours, and then
across ranks: the same tree again. FSDP itself accumulates the gradients of two siblings. Then it
calls the reduce-scatter. All but the last call keep the whole gradient and exchange nothing.

Both halves of the tree round to the dtype of FSDP's reduction. The shards are therefore added in
FSDP's all-reduce hook, which gets them in this dtype. `.grad` already has the parameter's dtype, so
a sum there would round differently for each W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.canonical import exchange, requirements
from entrenar_py.train.canonical.reducer import Counter, Fold, take


class ShardedReducer(Fold):
    """The result of `canonical_reduce_scatter`; its docstring shows how to use it."""

    def __init__(
        self, model: nn.Module | FSDPModule, *, micro_batches: int, sync_each: bool
    ) -> None:
        parameters, mesh = _require_sharded(model)
        group, device = mesh.get_group(), next(iter(parameters)).device
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        requirements.require_numbers(micro_batches=micro_batches, world_size=world_size)
        if not sync_each:
            requirements.require_even(world_size, otherwise="use sync_each=True")
        requirements.require_deterministic()
        facts = {**requirements.switches(), **requirements.surroundings(device)}
        facts |= {"micro_batches": micro_batches, "sync_each": sync_each}
        requirements.require_same(facts, group)
        share = -(-micro_batches // world_size)
        shards: Sequence[int] = range(rank * share, (rank + 1) * share)
        if sync_each:
            own = range(rank, micro_batches, world_size)
            shards = own if len(own) == share else (*own, own[-1])
        super().__init__(shards, parameters, micro_batches)
        # Whether the tree adds nodes' shards, in FSDP's all-reduce hook, or whole gradients or
        # micro-batches' shards, in its reduce-scatter. With one rank FSDP only calls the hook.
        is_even = requirements.is_power_of_two(world_size)
        adds_nodes = world_size == 1 or (sync_each and is_even)
        self._scale = 1 / micro_batches
        self._counters: dict[str, Counter] = {}  # of each FSDP module
        self._reduced: set[str] = set()  # FSDP modules, in the current micro-batch
        self._sizes: dict[str, int] = {}  # of each FSDP module's shard, in elements
        assert isinstance(model, nn.Module)
        sharded = {
            name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
        }
        self._modules = list(sharded.values())
        self._groups = _groups(sharded)
        self._pairs = not sync_each and share > 1 and all(map(_adds_as_tree, self._groups.values()))
        self._seen: dict[Tensor, int] = {}  # weight -> how often its gradient was added to
        self._counted: set[Tensor] = set()  # whole weights, which tell us that
        for name, module in sharded.items():
            # Otherwise FSDP divides by the world size, before or after the sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            scatter: _Scatter = _TreeReduceScatter()
            if adds_nodes:
                module.set_all_reduce_hook(partial(self._reduce, name))
            elif is_even:
                scatter = _TreeReduceScatter(partial(self._add, name), scale=self._scale)
            else:
                scatter = _RowScatter(partial(self._add_rows, name))
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        if not adds_nodes:
            for group in self._groups.values():  # an earlier one
                group._all_reduce_hook = group._all_reduce_hook_stream = None
        self._ours = {name: _reductions(group) for name, group in self._groups.items()}

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients by one factor, so that their joint 2-norm is at most `max_norm`.

        Return the norm before that, float32 []. torch's function of this name adds one summand for
        each rank, so the bits of its norm depend on the world size. This function gathers one
        parameter's whole gradient at a time.
        """
        gradients = [
            parameter.grad for parameter in self._parameters if isinstance(parameter.grad, DTensor)
        ]
        if len(gradients) < len(self._parameters):
            raise UsageError("no gradients to clip: call it after the loop over fold()")
        norms = torch.stack([norm(gradient, dtype=torch.float32) for gradient in gradients])
        total: Tensor = torch.linalg.vector_norm(norms)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.to_local().mul_(factor)
        return total

    def _reduce(self, module: str, node: Tensor) -> None:
        """Add a module's shard to the tree: FSDP's all-reduce hook.

        On the last micro-batch, `node` becomes the mean.
        """
        if self._add(module, node):
            node.mul_(self._scale)

    def _add(self, module: str, node: Tensor) -> bool:
        """Add a module's gradient to the tree. On the last micro-batch, `node` becomes the sum.

        Returns whether it was the last.
        """
        counter = self._counter(module, node)
        if self._is_last():
            counter.complete([module], [node])
        else:
            counter.push({module: node})
        return self._is_last()

    def _add_rows(self, module: str, rows: Tensor, out: Tensor) -> None:
        """Add a module's shards `rows` [world size, n], of a micro-batch each, to the tree.

        On the last pass, the mean is written to `out` [n].
        """
        counter = self._counter(module, out)
        world_size = len(rows)
        *others, last = rows[: self._micro_batches - self._pass * world_size]
        for row in others:
            counter.push({module: row.clone()})  # of its own: all rows together are much larger
        if self._is_last():
            counter.complete([module], [last])
            torch.mul(last, self._scale, out=out)
        else:
            counter.push({module: last.clone()})

    def _counter(self, module: str, node: Tensor) -> Counter:
        """Return the counter of a module. `node`, its gradient or shard, will be added."""
        if self._shard is None:
            raise UsageError(
                "a backward pass outside of the loop over fold(): with the canonical "
                "reduce-scatter every micro-batch has to come from fold()"
            )
        if module in self._reduced:
            raise UsageError(
                f"module {module or 'model'} is reduced twice in micro-batch {self._shard}: with "
                "the canonical reduce-scatter each micro-batch has one backward pass; add its "
                "losses, and call backward() on the sum"
            )
        if node.dtype not in requirements.DTYPES:
            raise UsageError(
                f"module {module or 'model'} is reduced in {node.dtype}, in which sums over all "
                "micro-batches may overflow: use MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        size = self._sizes.setdefault(module, len(node))
        if len(node) != size:
            raise UsageError(
                f"module {module or 'model'} is reduced with {len(node)} elements in micro-batch "
                f"{self._shard}, and with {size} before: let it use every parameter"
            )
        self._reduced.add(module)
        if node.is_cuda:  # FSDP allocated it on another stream, and the counter frees it later
            node.record_stream(torch.cuda.current_stream(node.device))
        return self._counters.setdefault(module, Counter())

    def _accumulation(self) -> AbstractContextManager[None]:
        self._set_sync(not self._is_left())
        return nullcontext()

    def _is_left(self) -> bool:
        """Return whether FSDP keeps the current micro-batch's gradients, and adds its sibling's."""
        assert self._shard is not None
        return self._pairs and self._shard % 2 == 0

    def _set_sync(self, reduces: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(reduces, recurse=False)

    def _keep(self) -> None:
        if self._is_left():
            whole = [weight for weight in self._weights() if _has_whole(weight)]
            self._require_gradients([weight.sharded_param for weight in whole])
            self._count_next(whole)
            return
        if self._pairs:
            self._require_gradients(self._seen)
        # Without a reduction, `.grad` isn't ours: something else has replaced our functions.
        ours = [
            weight.sharded_param
            for name, group in self._groups.items()
            if name in self._reduced
            for weight in group.fsdp_params
        ]
        self._require_gradients([parameter for parameter in ours if parameter.grad is not None])
        self._reduced.clear()
        if not self._is_last():
            take(self._parameters)  # FSDP would add the next micro-batch's to them
            return
        for name, group in self._groups.items():
            if _reductions(group) != self._ours[name]:
                raise UsageError(
                    f"the reductions of module {name or 'model'} were changed after "
                    "canonical_reduce_scatter: leave out set_gradient_divide_factor, "
                    "set_all_reduce_hook and set_custom_reduce_scatter"
                )

    def _count_next(self, weights: Iterable[Any]) -> None:
        """Count how often each weight's gradient is added to, from now on."""
        self._seen = {}
        for weight in weights:
            if (whole := weight._unsharded_param) not in self._counted:
                self._counted.add(whole)
                whole.register_post_accumulate_grad_hook(partial(self._count, weight))

    def _count(self, weight: Any, _: Tensor) -> None:
        """Note that a gradient was added to FSDP's sum: autograd's hook.

        Autograd adds one part of a right sibling after another to the left one's gradient, which
        is another tree.
        """
        parameter = weight.sharded_param
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if self._seen[parameter] > 1 and self._shard is not None and not self._is_left():
            raise UsageError(
                f"the gradient of {self._parameters[parameter]} is added in several parts in "
                f"micro-batch {self._shard}, so its bits would depend on the world size: use "
                "checkpoint() with use_reentrant=False, or sync_each=True"
            )

    def _clear(self) -> None:
        self._counters.clear()
        self._reduced.clear()
        self._set_sync(True)
        for weight in self._weights():
            if _has_whole(weight):  # the loop was left
                weight.unsharded_accumulated_grad = weight._unsharded_param.grad = None

    def _weights(self) -> Iterator[Any]:
        """Yield what FSDP holds of each parameter, its `FSDPParam`."""
        for group in self._groups.values():
            yield from group.fsdp_params


# --- what torch doesn't export -------------------------------------------------------------------


def _groups(modules: Mapping[str, FSDPModule]) -> dict[str, Any]:
    """Return each module's `FSDPParamGroup`. Modules that share one have the last one's name.

    Modules without parameters of their own are left out.
    """
    named: dict[int, tuple[str, Any]] = {}
    for name, module in modules.items():
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            named[id(group)] = (name, group)
    return dict(named.values())


def _adds_as_tree(group: Any) -> bool:
    """Return whether FSDP's own sum of two gradients has the bits of the tree.

    It has the dtype of the reduction. A gradient of a wider one isn't rounded before it is added.
    """
    reduced, computed = group.mp_policy.reduce_dtype, group.mp_policy.param_dtype
    trained = [
        weight.sharded_param for weight in group.fsdp_params if weight.sharded_param.requires_grad
    ]
    if reduced is None:
        return True
    dtypes = [computed or parameter.dtype for parameter in trained]
    return all(torch.promote_types(dtype, reduced) == reduced for dtype in dtypes)


def _reductions(group: Any) -> tuple[object, ...]:
    """Return how FSDP reduces a group's gradients."""
    factor = group.gradient_divide_factor
    return factor, group._all_reduce_hook, getattr(group, "_reduce_scatter_comm", None)


def _has_whole(weight: Any) -> bool:
    """Return whether FSDP holds a gradient of a parameter that it hasn't reduced yet."""
    if weight.unsharded_accumulated_grad is not None:
        return True
    whole = getattr(weight, "_unsharded_param", None)  # made by the first forward pass
    return whole is not None and whole.grad is not None


def _require_sharded(
    model: nn.Module | FSDPModule,
) -> tuple[requirements.Parameters, DeviceMesh]:
    """Return the trainable parameters with their names, and the mesh over which they are sharded.

    Raises UsageError if `model` isn't supported.
    """
    if not isinstance(model, FSDPModule):
        raise UsageError(
            f"model is a {type(model).__name__}: shard it first, with "
            "torch.distributed.fsdp.fully_shard, also the outermost module"
        )
    assert isinstance(model, nn.Module)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass, the root's parameters may still be whole
    parameters = requirements.require_parameters(model)
    meshes = {_mesh_of(parameter, name) for parameter, name in parameters.items()}
    if len(meshes) > 1:
        raise UsageError(
            "parameters are on several meshes: one tree needs the ranks of one mesh; call "
            "fully_shard with the same mesh for all modules"
        )
    return parameters, meshes.pop()


def _mesh_of(parameter: Tensor, name: str) -> DeviceMesh:
    """Return the mesh over which `parameter` is sharded. Raises UsageError if there is none."""
    if not isinstance(parameter, DTensor):
        raise UsageError(
            f"parameter {name} is not sharded, so its gradients would not be reduced: freeze "
            "it, or leave it out of ignored_params"
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or not placements[0].is_shard():
        raise UsageError(
            f"parameter {name} has placements {placements} on a mesh of {mesh.ndim} dimensions: "
            "the canonical reduce-scatter needs a mesh of one dimension, which shards; hybrid "
            "sharding and tensor parallelism are not supported"
        )
    if parameter.device.type != mesh.device_type:
        raise UsageError(
            f"parameter {name} is on {parameter.device.type} and its mesh on {mesh.device_type}: "
            "leave CPUOffloadPolicy out"
        )
    return mesh


class _Scatter:
    """FSDP's interface for a reduce-scatter, `ReduceScatter`, which torch doesn't export."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _RowScatter(_Scatter):
    """Gives the ranks' shards, unadded, to a function, which writes the output."""

    def __init__(self, add: Callable[[Tensor, Tensor], None]) -> None:
        self._add = add

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        self._add(exchange.scatter(input_tensor, group=group), output_tensor)


class _TreeReduceScatter(_Scatter):
    """Adds the ranks' shards along the tree.

    With `is_due`, it exchanges a gradient only if that returns True.
    """

    def __init__(
        self, is_due: Callable[[Tensor], bool] | None = None, *, scale: float = 1.0
    ) -> None:
        self._is_due, self._scale = is_due, scale

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        if self._is_due is None or self._is_due(input_tensor):
            exchange.reduce_scatter(input_tensor, scale=self._scale, out=output_tensor, group=group)


def norm(gradient: DTensor, *, dtype: torch.dtype) -> Tensor:
    """Return the 2-norm of a whole gradient, 0-d, with the same bits for any world size.

    All ranks must call it.
    """
    # A copy, as kernels may add in another order where a tensor begins inside of another's memory.
    whole = gradient.full_tensor().clone(memory_format=torch.contiguous_format)
    value: Tensor = torch.linalg.vector_norm(whole, dtype=dtype)
    return value
