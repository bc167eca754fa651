"""The traits of a run: facts that a judge must know and that the scenario does not state.

Systems declare them, the recorder of a user's trainer observes them, and checks read them, so that
no check needs a system's name. Promises about bits are in `Trace.promises`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from entrenar_py.shared.codec import Schema
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario, TrainingPlan

# The allowed values of each field with a fixed choice.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "topology": ("", "star", "mesh", "ring"),
    "updates": ("workers", "server"),
    "masks": ("rank", "shard", "shard_apart"),
    "clipping": ("told", "other"),
    "rule": ("known", "other", "own"),
    "decay": ("decoupled", "coupled"),
    "betas_in": ("float64", "float32"),
    "schedule": ("known", "other"),
    "clip_source": ("", "line", "calls"),
    "steps": ("model", "copies"),
    "outer": ("nesterov", "momentum", "other"),
    "epochs": ("told", "untold"),
    "population": ("known", "guessed", "varied"),
    "sample_ids": ("known", "seen", "content"),
    "losses": ("known", "backward"),
    "loss_over": ("", "batch", "micro-batch"),
    "arranged": ("known", "guessed"),
    "saves": ("", "nothing", "weights"),
    "loads": ("", "nothing", "late"),
    "restarts": ("", "nothing"),
    "starts": ("", "one"),
}


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts of a run that its scenario does not state.

    Between workers:

    - `topology`: how gradients travel (`star`, `mesh`, `ring`), "" if their bytes aren't counted.
    - `updates`: whether every worker steps with its own optimizer, or a server steps for all.
    - `shared`: ranks that draw the same samples compute one shard together.
    - `alone`: no rank was seen to communicate with another rank during training.
    - `compressed`: the dtype or hook that compresses gradients in transit, from step
      `compressed_from` on; `float32` if a script declares that they aren't compressed.

    In the model and the data:

    - `masks`: what draws the masks of dropout: each rank (`rank`), or each logical shard. Those of
      a shard are drawn as on a single device (`shard`), or from generators that no single device
      has (`shard_apart`).
    - `batch_norm`: batch normalisation uses only each rank's own samples.
    - `drop_last`: the last batch of an epoch is left out if it would be short.
    - `replacement`: a sample may be drawn again within an epoch.
    - `selects`: the line of a script that selects rows with random numbers, again for each step.
    - `one_source`: that line selects them for each micro-batch of a step, unconditionally.
    - `by_epoch`: the line of a script that compares the number of an epoch, so that later epochs
      may be different.
    - `seeded`: the run was given the seed in its scenario.
    - `unseeded`: the script seeds nothing, so the harness has seeded each rank.
    - `epochs`: `untold` if it is not known to which epoch a sample belongs.
    - `population`: `guessed` if it is not known which samples an epoch should have: the scenario's
      number of samples only counts those that were drawn, or a sampler of the user decides.
      `varied` if epochs draw from several data sets, or from different parts of one.
    - `ordered`: a sampler of the script has an order, and no line of the script draws one.
    - `splits`: a sampler splits one data set between the ranks, so that ids mean the same on all.
    - `sample_ids`: `content` if they are digests of what the model was given; `seen` if a loader of
      the script drew them and the script reports none.
    - `losses`: `backward` if they are the values on which `backward` was called, with an unknown
      scale.
    - `loss_over`: the samples of all ranks that a loss covers, however they are divided. A script
      declares it, or torch's `Join` implies it; "" if neither does.
    - `arranged`: `guessed` if nothing shows that each rank draws its own samples.

    Of a script's checkpoints, "" if unknown:

    - `saves`: `weights` if any rank saved its weights or more, after training began.
    - `saved_after`: the numbers of steps that were taken before each save.
    - `saved_behind`: the number of steps before that at which the weights may have been handed to a
      thread that saves them.
    - `unreached`: the line that would have saved a checkpoint, but was not reached.
    - `loads`: `nothing` if no line of the script loads what it may have saved, `late` if all lines
      that do run only after training.
    - `resume_option`: the first of the script's options with a name for resuming, as
      `--resume PATH`, or a setting (`--start=resume`, or an environment variable, `START=resume`).
    - `read_back`: the line that has loaded a saved file before training.
    - `restarts`: `nothing` if the launcher restarts no worker.
    - `starts`: `one` if the command starts one worker and has no option to start more.

    Of the optimizer: the constants of its rule as in torch.optim, and

    - `rule`: `own` if it is none of the scenario's optimizers, `other` if it is one that doesn't
      apply gradients as torch's does.
    - `decay`: `coupled` if Adam's weight decay is added to the gradient.
    - `betas_in`: the dtype in which its betas and their powers are kept: `float32` in torch's
      kernels for GPUs that are fused or capturable.
    - `clipping`: `other` if gradients were recorded only as applied, perhaps after clipping.
    - `clip_norm`: the largest norm of an applied gradient.
    - `clip_source`: the source of `clip_norm`: a declaration in the script's `line`, or its `calls`
      of torch; "" in traces of releases that didn't record it.
    - `steps`: `copies` if it updates copies of the weights, which are written back later.
    - `schedule`: `other` if the learning rate changes in a way that the scenario doesn't state.
    - `outer`: the rule that synchronises workers that step alone: `momentum` without Nesterov's
      look-ahead, `other` if it is unknown here.

    Raises UsageError for a value that is not among a field's CHOICES.
    """

    topology: str = ""
    updates: str = "workers"
    shared: bool = False
    alone: bool = False
    compressed: str = ""
    compressed_from: int = 0
    masks: str = "rank"
    batch_norm: bool = False
    drop_last: bool = False
    replacement: bool = False
    selects: str = ""
    one_source: bool = False
    by_epoch: str = ""
    seeded: bool = False
    unseeded: bool = False
    epochs: str = "told"
    population: str = "known"
    ordered: bool = False
    splits: bool = False
    sample_ids: str = "known"
    losses: str = "known"
    loss_over: str = ""
    arranged: str = "known"
    saves: str = ""
    saved_after: tuple[int, ...] = ()
    saved_behind: int = 0
    unreached: str = ""
    loads: str = ""
    resume_option: str = ""
    read_back: str = ""
    restarts: str = ""
    starts: str = ""
    rule: str = "known"
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: str = "decoupled"
    betas_in: str = "float64"
    clipping: str = "told"
    clip_norm: float | None = None
    clip_source: str = ""
    schedule: str = "known"
    steps: str = "model"
    outer: str = "nesterov"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                allowed = ", ".join(map(repr, choices))
                message = f"trait {name}={getattr(self, name)!r}: allowed are {allowed}"
                raise UsageError(message, field=name)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON can hold them."""
        return _SCHEMA.dump(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Traits:
        """Return the traits in `record`. Raises UsageError, which names a wrong key or value."""
        return _SCHEMA.load(record)


_SCHEMA = Schema(Traits, what="trait", sparse=True)
_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Traits)}
# The traits of a run that declares none.
USUAL = Traits()
# The constants of an optimizer's rule that users of torch.optim can choose.
CONSTANTS: Mapping[str, Any] = {
    name: _DEFAULTS[name] for name in ("momentum", "dampening", "nesterov", "betas", "eps")
}


# --- traces of releases without traits ------------------------------------------------------------

# The traits of the systems of those releases, by name without `_simulated` at the end.
_WERE: Mapping[str, Traits] = {
    "reference": Traits(masks="shard"),
    "parameter_server": Traits(masks="shard", topology="star"),
    "mesh": Traits(masks="shard", topology="mesh"),
    "ring": Traits(masks="shard", topology="ring"),
    "ddp_canonical": Traits(masks="shard_apart"),
}


def from_header(record: Mapping[str, Any]) -> tuple[TrainingPlan, Traits]:
    """Return the plan, or the scenario, and the traits in a trace's header.

    A header without traits was written by hand or by an earlier release, which stored the traits of
    a user's trainer among its scenario's `options`. They are moved to the traits.
    """
    if "plan" in record:
        return TrainingPlan.from_dict(record["plan"]), Traits.from_dict(record["traits"])
    scenario = Scenario.from_dict(record["scenario"])
    if "traits" in record:
        traits = Traits.from_dict(record["traits"])
    else:
        updates = scenario.options.get("updates", "workers")
        was = _WERE.get(scenario.system.removesuffix("_simulated"), USUAL)
        traits = Traits.from_dict({**was.to_dict(), "updates": updates})
    if scenario.workload != "own":
        return scenario, traits
    observed = {name: value for name, value in scenario.options.items() if name in _DEFAULTS}
    options = {name: value for name, value in scenario.options.items() if name not in _DEFAULTS}
    traits = Traits.from_dict({**observed, **traits.to_dict()})
    return scenario.with_(options=options), traits
