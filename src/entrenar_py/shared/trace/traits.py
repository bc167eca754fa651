"""The traits of a run: facts that a judge must know and that the scenario does not state.

Systems declare traits, the recorder of a user's trainer observes them, and checks read them, so
that no check needs a system's name. Promises about bits are in `Trace.promises`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from entrenar_py.shared.codec import Schema
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario, TrainingPlan

# Field -> its allowed values, for fields with a fixed choice.
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
    "stepped_by": ("", "inner"),
    "outer": ("nesterov", "momentum", "other"),
    "epochs": ("told", "untold"),
    "population": ("known", "guessed", "varied"),
    "sample_ids": ("known", "seen", "content"),
    "losses": ("known", "backward"),
    "loss_over": ("", "batch", "micro-batch"),
    "arranged": ("known", "guessed"),
    "saves": ("", "nothing", "weights"),
    "loads": ("", "nothing", "late", "other"),
    "restarts": ("", "nothing"),
    "starts": ("", "one"),
}


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts of a run that its scenario does not state.

    Between workers:

    - `topology`: how gradients travel (`star`, `mesh`, `ring`); "" if their bytes aren't counted.
    - `updates`: whether every worker steps its own optimizer, or a server steps for all.
    - `shared`: true if ranks with the same samples compute one shard together.
    - `alone`: true if no rank was seen to communicate with another rank during training.
    - `compressed`: the dtype or hook that compresses gradients in transit, from step
      `compressed_from` on; `float32` if a script declares that they aren't compressed.

    In the model and the data:

    - `masks`: what draws the masks of dropout: each rank (`rank`), or each logical shard, either as
      a single device would (`shard`) or from generators that no single device has (`shard_apart`).
    - `batch_norm`: true if batch normalisation uses only each rank's own samples.
    - `drop_last`: true if a short last batch of an epoch is left out.
    - `replacement`: true if a sample may be drawn again within an epoch.
    - `selects`: the line of a script that selects rows at random anew for each step.
    - `one_source`: true if the line of `selects` runs unconditionally for each micro-batch of a
      step.
    - `by_epoch`: the line of a script that compares the epoch number, so that later epochs may
      differ.
    - `seeded`: true if the script received the seed of its scenario.
    - `unseeded`: true if the script sets no seed, so that the harness seeded each rank.
    - `epochs`: `untold` if it is not known to which epoch a sample belongs.
    - `population`: `guessed` if it is not known which samples an epoch should have, because the
      scenario's number of samples only counts the drawn ones, or because the user's own sampler
      decides. `varied` if epochs draw from several data sets, or from different parts of one.
    - `cut`: the epochs that a script ended before its loader had yielded all batches.
    - `ordered`: true if a sampler has an order of its own, and nothing draws an order at random for
      an epoch.
    - `splits`: true if a sampler splits one data set between the ranks, so that an id means the
      same sample on all ranks.
    - `sample_ids`: `content` if ids are digests of the model's input; `seen` if they were observed
      in a loader because the script reports none.
    - `losses`: `backward` if the losses are the values on which `backward` was called, with an
      unknown scale.
    - `loss_over`: `batch` if a step's loss is over all its samples, however they are divided among
      ranks; `micro-batch` if each micro-batch of all ranks has a loss of its own. A script declares
      it, or torch's `Join` implies it; "" if neither does.
    - `arranged`: `guessed` if nothing shows that each rank draws its own samples.

    About a script's checkpoints ("" if unknown):

    - `saves`: `weights` if any rank saved at least its weights after training began.
    - `saved_after`: the number of steps before each save.
    - `saved_behind`: how many steps before a save its weights may have been handed to the thread
      that saves them.
    - `unreached`: the line that would have saved a checkpoint, but was not reached.
    - `loads`: `nothing` if no line of the script loads a file that it may have saved; `late` if all
      such lines run only after training; `other` if no process that trained read such a file, and
      the script has no word for resuming: its lines load other files, or on other occasions.
    - `resume_option`: the script's first option with a name that suggests resuming (`--resume
      PATH`), or such a setting (`--start=resume`, or an environment variable, `START=resume`).
    - `read_back`: the line that loaded a saved file before training.
    - `restarts`: `nothing` if the launcher restarts no worker.
    - `starts`: `one` if the command starts one worker and has no option to start more.

    About the optimizer: the constants of its rule, named as in torch.optim, and

    - `rule`: `own` if the optimizer is none of those that a scenario can name; `other` if it is one
      of them but applies gradients differently from torch's.
    - `decay`: `coupled` if Adam's weight decay is added to the gradient.
    - `betas_in`: the dtype of Adam's betas and their powers: `float32` in torch's fused and
      capturable GPU kernels.
    - `clipping`: `other` if gradients were recorded only as they were applied, perhaps after
      clipping.
    - `clip_norm`: the largest norm of an applied gradient.
    - `clip_source`: how `clip_norm` is known: `line` (the script declares it) or `calls` (it calls
      torch's function); "" in traces of releases that didn't record this.
    - `steps`: `copies` if the optimizer updates copies of the weights, which are written back
      later.
    - `stepped_by`: `inner` if the script's optimizer is never called as a whole, and an optimizer
      inside it takes the steps, as in sharpness-aware minimisation.
    - `schedule`: `other` if the learning rate changes in a way that the scenario doesn't state.
    - `outer`: the rule that synchronises workers that step alone: `momentum` means without
      Nesterov's look-ahead, `other` an unknown rule.

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
    cut: tuple[int, ...] = ()
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
    stepped_by: str = ""
    outer: str = "nesterov"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                allowed = ", ".join(map(repr, choices))
                message = f"trait {name}={getattr(self, name)!r}: allowed are {allowed}"
                raise UsageError(message, field=name)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as a dict that JSON can hold."""
        return _SCHEMA.dump(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Traits:
        """Return the traits in `record`. Raises UsageError that names a wrong key or value."""
        return _SCHEMA.load(record)


_SCHEMA = Schema(Traits, what="trait", sparse=True)
_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Traits)}
# The traits of a run without declared traits.
USUAL = Traits()
# The constants of an optimizer's rule that users of torch.optim can choose, with defaults.
CONSTANTS: Mapping[str, Any] = {
    name: _DEFAULTS[name] for name in ("momentum", "dampening", "nesterov", "betas", "eps")
}


# --- traces of releases without traits ------------------------------------------------------------

# The traits of those releases' systems, by name without the suffix `_simulated`.
_WERE: Mapping[str, Traits] = {
    "reference": Traits(masks="shard"),
    "parameter_server": Traits(masks="shard", topology="star"),
    "mesh": Traits(masks="shard", topology="mesh"),
    "ring": Traits(masks="shard", topology="ring"),
    "ddp_canonical": Traits(masks="shard_apart"),
}


def from_header(record: Mapping[str, Any]) -> tuple[TrainingPlan, Traits]:
    """Return the plan or the scenario, and the traits, in a trace's header.

    A header without traits was written by hand or by an earlier release, which stored the traits of
    a user's trainer in its scenario's `options`. They are moved to the traits here.
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
