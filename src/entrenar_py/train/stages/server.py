"""The coordinator's work in a layer pipeline: it has the whole state and applies every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from entrenar_py.shared import trace, workers
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import checkpoint, reduction, sharding
from entrenar_py.train.arithmetic.tensors import (
    Batch,
    DropFunction,
    LinearFunction,
    Tensors,
    Workload,
)
from entrenar_py.train.coordinator import replicas
from entrenar_py.train.coordinator.recorder import Deliveries, Recorder, injected
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.model import model, model_folder
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.workload import Tuned
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.wire.effects import Stop
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Applied, Loaded, Message, TreeNode, Welcome
from entrenar_py.train.wire.terms import Run, Terms


def plan_of_stages(plain: TrainingPlan) -> TrainingPlan:
    """Return the plan `plain` for training by stages; it doesn't depend on their number."""
    options = {**plain.options, workers.OPTION: workers.SERVER}
    return plain.with_(world_size=1, options=options)


class Coordinated(Tuned):
    """The coordinator's workload: the trainable tensors of a model; workers have its stages."""

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        """Raise AssertionError, because the coordinator has no model."""
        raise AssertionError("a coordinator of stages computes no loss")


def workload_of(prepared: Prepared) -> Coordinated:
    """Return the workload of a run, with the initial values of the trainable tensors.

    Adapters are drawn as in a single process. With `method: full` all weights are read, because all
    are trained. Raises UsageError for a checkpoint that can't be used.
    """
    settings = prepared.settings
    if settings.adapts:
        module = model.without_weights(settings, prepared.pad_token)
    else:
        module = model.load(settings, prepared.pad_token)
    both = (prepared.train, prepared.validation)
    model_folder.require_samples(settings, module, both, prepared.pad_token)
    model_folder.require_own_loss(settings, module)
    return Coordinated(
        module,
        prepared.train,
        pad_token=prepared.pad_token,
        class_weights=prepared.class_weights,
    )


class StageDeliveries(Deliveries):
    """Events from workers, which count when their step is applied in their round.

    Of a void round, only injected faults are recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._of_round: list[trace.Event] = []

    def deliver(self, rank: int) -> None:
        """See `Deliveries`."""
        self._of_round += self._events.pop(rank, [])

    def clear(self) -> None:
        """See `Deliveries`."""
        for recorded in (self._of_round, *self._events.values()):
            self._recorder.record(injected(recorded))
        self._of_round.clear()
        super().clear()

    def settle(self) -> None:
        """Record all events delivered in this round."""
        self._recorder.record(self._of_round)
        self._of_round.clear()


class PipelineServer(Server):
    """The coordinator's part of a run; `cut` says which tensors belong to each stage."""

    deliveries: StageDeliveries

    def __init__(self, plan: TrainingPlan, *, cut: Cut, workload: Workload, **named: Any) -> None:
        """Start a run without a state; `plan` and `workload` are as in `Server`."""
        super().__init__(plan, workload=workload, deliveries=StageDeliveries, **named)
        self.cut_by(cut)
        # a step, and the record of the weights before it
        self._recorded: tuple[int, trace.Tensors] = (-1, {})

    def cut_by(self, cut: Cut) -> None:
        """Use `cut` from now on. Call this only while no worker takes part."""
        assert not self.present, "workers have stages of the cut before"
        self.cut = cut
        self.reduction.blocks = cast(Any, cut.blocks)
        self.reduction.of_loss = cut.blocks.of_stage[-1]  # the other stages don't know the loss

    @property
    def terms(self) -> Terms:
        """The digests of the run; the manifest's digest covers tensors and stages."""
        return self.cut.terms(super().terms)

    def run_between(self, first: int, last: int) -> Run:
        """Return the same as `Server.run_between`, with the ranks of the stages."""
        return self.cut.placed(super().run_between(first, last))

    def apply_average(self, step: int) -> None:
        """See `Server`."""
        self.deliveries.settle()
        super().apply_average(step)

    def stop(self, effect: Stop) -> None:
        """See `Server`."""
        self.deliveries.settle()
        self.deliveries.clear()
        super().stop(effect)

    def restore(self) -> int:
        """See `Server`."""
        self._recorded = (-1, {})
        return super().restore()

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        """See `Server`. A worker with weights different from the sent weights is refused, too."""
        super().require(rank, message, payload)
        if isinstance(message, TreeNode):
            self._require_weight(message)
        if isinstance(message, Loaded | Applied):
            found = self.deliveries.read(rank, message, payload)
            records = [one for one in found if isinstance(one, trace.Start | trace.Update)]
            kind = trace.Start if isinstance(message, Loaded) else trace.Update
            if [type(one) for one in records] != [kind]:
                raise ProtocolError(
                    f"{type(message).__name__} of rank {rank} without the weights that it holds"
                )
            self._require_own(records[0])

    def _require_weight(self, node: TreeNode) -> None:
        """Raise ProtocolError if a sum doesn't have the weight of the samples under it."""
        num_shards = self.plan.num_shards
        shards = sharding.cut(self.replicas.batch(), num_shards)
        none = np.zeros(0, np.float32)
        leaves = [
            reduction.Node(0, shard, none, 0.0, self._weight(shards[shard]))
            for shard in reduction.shards_under(node.level, node.index, num_shards)
        ]
        due = [one.weight for one in reduction.fold(leaves, num_shards)]
        if [node.weight] != due[:1]:
            raise ProtocolError(
                f"TreeNode level={node.level} index={node.index} weight={node.weight:g}: its "
                f"samples have {due[0] if due else 0:g}"
            )

    def _weight(self, ids: sharding.Ids) -> float:
        return float(self.replicas.workload.weight(ids)) if ids else 0.0

    def _require_own(self, event: trace.Start | trace.Update) -> None:
        """Raise ProtocolError if a worker's weights of its stage differ from the coordinator's."""
        names = [spec.name for spec in self.cut.specs[self.cut.stage_of_rank(event.rank)]]
        if isinstance(event, trace.Start):
            arrays = self.replica.replica.arrays
            own = self.recorder.tensors({name: arrays[name] for name in names})
        elif self._recorded[0] == event.step + 1:
            own = self._recorded[1]
        else:
            return  # no such step is prepared; the state machine refuses the message
        for name in names:
            theirs = event.weights.get(name)
            if theirs is None or theirs.digest != own[name].digest:
                raise ProtocolError(
                    f"rank {event.rank} holds different weights from those that it was sent: "
                    f"{name}, step {event.step}"
                )

    def _completed(self, event: trace.Event) -> trace.Event:
        """Add the weights of the other stages to the weights that a worker recorded for its stage.

        So each worker's record has the weights of the whole model.
        """
        event = super()._completed(event)
        if not isinstance(event, trace.Start | trace.Update):
            return event
        weights = self._held(event.step + isinstance(event, trace.Update))
        if isinstance(event, trace.Update):
            return replace(event, weights=weights)
        specs = self.replicas.layout.specs
        return replace(
            event,
            weights=weights,
            trainable=tuple(spec.name for spec in specs),
            decayed=tuple(spec.name for spec in specs if spec.decayed),
        )

    def prepare(self, step: int) -> tuple[float, float]:
        """See `Server`. The new weights are also recorded here, in the background."""
        total = super().prepare(step)
        assert self._beside is not None, "it has just made the step"
        self._recorded = step + 1, self._record_of(self._beside)
        return total

    def _held(self, step: int) -> trace.Tensors:
        """Return the record of all weights before `step`, which are the current ones."""
        if self._recorded[0] != step:
            self._recorded = step, self._record_of(self.replica)
        return self._recorded[1]

    def _record_of(self, worker: replicas.Worker) -> trace.Tensors:
        arrays, specs = worker.replica.arrays, self.replicas.layout.specs
        return self.recorder.tensors({spec.name: arrays[spec.name] for spec in specs})

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`; a worker gets only the state of its own stage."""
        if isinstance(message, Welcome):
            return self._stage_state(self.cut.stage_of_rank(message.rank))
        return super().payload(message)

    def _stage_state(self, stage: int) -> Buffer:
        arrays: Mapping[str, Any] = self.replica.replica.arrays
        optimizer = workers.optimizer_of_workers(self.plan)
        stands = self.replicas.stands
        return checkpoint.dump_state(self.cut.specs[stage], optimizer, stands, arrays, {})
