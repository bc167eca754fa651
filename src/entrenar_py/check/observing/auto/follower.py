"""Finds out what a script without the line `observe` trains, and drives an Observer or a Watch.

Errors of the observation must not affect the script, which didn't request it (`guarded`). After the
last requested step, the process is ended from within the script, in the same way on all ranks
(`Ending`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from entrenar_py.check.observing import BATCHES, FAULTS, FOLDER, call_sites
from entrenar_py.check.observing.auto import Settings
from entrenar_py.check.observing.loss_terms import Losses
from entrenar_py.check.rank_files import notes
from entrenar_py.shared import hook_calls
from entrenar_py.shared.errors import EntrenarError
from entrenar_py.shared.untrusted import printing

if TYPE_CHECKING:
    from entrenar_py.check.observing import Observation
    from entrenar_py.check.observing.auto.recorder import Recorder
    from entrenar_py.check.observing.batches import Iteration
    from entrenar_py.check.observing.generators import States
    from entrenar_py.check.observing.iterations import LoaderListener
    from entrenar_py.check.observing.seen_samples import Batches

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def guarded(
    method: Callable[Concatenate[Any, _Given], _Result],
) -> Callable[Concatenate[Any, _Given], _Result | None]:
    """Return `method` for use as a hook: an error of ours ends the observation, not the script.

    The class of `method` needs `is_off()`, and `give_up(reason)`, which switches all hooks off. The
    hook returns None if hooks are off or if the method fails.
    """

    @hook_calls.ours
    @wraps(method)
    def run(self: Any, /, *given: _Given.args, **named: _Given.kwargs) -> _Result | None:
        if hook_calls.is_traced() or self.is_off():
            return None
        try:
            return method(self, *given, **named)
        except EntrenarError as error:
            self.give_up(str(error))
        except Exception as error:  # noqa: BLE001  (the user's script must continue)
            self.give_up(
                f"the observation failed ({type(error).__name__}: {error}): a bug of "
                "entrenar-py, please report it"
            )
        return None

    return run


TRIES = 3  # a script that catches SystemExit more often is ended without unwinding
# Seconds for the script's own `finally` and exit handlers: a collective in them may never return.
PATIENCE_S = 10.0


class Ending:
    """Ends this process with exit code 0, once `is_due` is true.

    `SystemExit` lets the script unwind: context managers close files and process groups, and exit
    handlers end a loader's workers. If they take too long, the process ends without them.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._tries = 0
        self._pid = os.getpid()
        # Registered early, so that it runs after the exit handlers of everything imported later.
        # The interpreter isn't shut down, since gloo's threads sometimes abort it at that time.
        atexit.register(self.at_exit)

    def leave(self) -> NoReturn:
        """End the process. Called where the script begins a step that should not be taken."""
        self._tries += 1
        if self._tries == 1:
            watchdog = threading.Timer(PATIENCE_S, self._end)
            watchdog.daemon = True
            watchdog.start()
        if self._tries > TRIES or threading.current_thread() is not threading.main_thread():
            self._end()
        raise SystemExit(0)

    def at_exit(self) -> None:
        """End the process at once, after the exit handlers, if `leave` was called."""
        if self._tries and os.getpid() == self._pid:
            self._end()

    def _end(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)


_LOG = logging.getLogger("entrenar_py")

CURRENT: Follower | None = None  # the follower of this process


def _stepped_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _inside(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    from entrenar_py.check.observing import tensors

    return [inner for opt in optimizers for inner in tensors.inner_optimizers(opt)]


def _gets_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.requires_grad for p in _stepped_by(optimizer))


def _takes_turns(optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer has a model's parameters, which may be frozen at times.

    While they are frozen, another model trains. Copies of another optimizer's tensors don't count.
    """
    own = _stepped_by(optimizer)
    return all(isinstance(p, nn.Parameter) for p in own) and not any(
        _are_copies(own, _stepped_by(other)) for other in others if other is not optimizer
    )


def _steps_a_copy(
    optimizer: torch.optim.Optimizer, called: nn.Module, others: Iterable[torch.optim.Optimizer]
) -> bool:
    """Return whether an optimizer has copies of what another one steps in the module `called`.

    Such an optimizer is the outer optimizer of ranks that step alone (DiLoCo): no backward pass
    reaches its tensors, although they may require a gradient.
    """
    trained = {*called.parameters()}
    own = _stepped_by(optimizer)
    if not trained.isdisjoint(own):
        return False
    return any(
        not trained.isdisjoint(peers) and _are_copies(own, peers)
        for peers in map(_stepped_by, others)
    )


def _are_copies(own: list[Any], peers: list[Any]) -> bool:
    return (
        len(peers) == len(own)
        and all(a.device == b.device for a, b in zip(own, peers, strict=True))
        and all(torch.equal(a, b) for a, b in zip(own, peers, strict=True))  # also of shapes
    )


class Follower:
    """Follows the training in one process, starting with the import of torch.

    An optimizer is followed if it exists in the first training forward pass of a module that has
    some of its parameters.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._calls: Any = None  # the hook on the calls of all modules
        self._losses = Losses()
        # From the script's own call of `observe`, or created here.
        self.observation: Observation | None = None
        self._recorder: Recorder | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._batches: Batches | None = None
        # The generators' states when a loader handed out a batch, before anything is observed.
        self._at_batch: States = {}
        # A module that is called in training mode while no optimizer has its parameters, and the
        # inputs of these calls before the first backward pass.
        self._untrained: weakref.ref[nn.Module] | None = None
        self._untrained_inputs: list[Any] = []
        self._pid = os.getpid()
        self._gave_up = False
        self._depth = 0  # backward passes that have begun, as one may run inside another
        self._stepping = 0  # steps that have begun, as one may run inside another
        self._ending = Ending()
        # Optimizer -> the module with its tensors; None if there is none.
        self._watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, nn.Module | None] = (
            weakref.WeakKeyDictionary()
        )
        os.register_at_fork(after_in_child=self._forked)

    def is_off(self) -> bool:
        """Return whether this process isn't followed."""
        return self._gave_up

    def give_up(self, reason: str) -> None:
        """Stop following, and report the reason to the harness."""
        self._gave_up = True
        if self._recorder is not None:
            self._recorder.fail(reason)
            return
        folder = os.environ.get(FOLDER)
        if folder:
            notes.write_problem(Path(folder), reason)
        else:
            printing.warn(f"entrenar: this process is not watched: {reason}")

    def wins(self, observation: Observation) -> None:
        """Record that the script calls `observe` itself, and drop the record that was made here.

        In production the line does nothing unless it watches, so a line that only records doesn't
        end a watch.
        """
        if self.settings.every is not None:
            self._gave_up |= observation.watch is not None
            return
        if self._recorder is not None:
            self._recorder.withdraw()
            self._recorder = None
        self.observation = observation

    def _forked(self) -> None:
        # A loader's worker is a child of a process that has begun to train.
        if self.observation is not None:
            self._gave_up = True

    # --- the optimizers ---------------------------------------------------------------------------

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that were created and are alive, without inner ones.

        If two have the same parameters, the later one counts, because the script created it again.
        If one is an attribute of the other, it is an inner one, whichever was created first. An
        optimizer is left out if no backward pass reaches its tensors (DiLoCo's outer optimizer),
        unless these are the parameters of a model that is frozen until its turn.
        """
        alive = [opt for ref in self._optimizers if (opt := ref()) is not None]
        inside = _inside(alive)
        alive = [opt for opt in alive if not any(opt is inner for inner in inside)]
        alive = [opt for opt in alive if _gets_gradients(opt) or _takes_turns(opt, alive)] or alive
        by_optimizer = [{*_stepped_by(opt)} for opt in alive]
        return [
            opt
            for index, opt in enumerate(alive)
            if by_optimizer[index]
            and not any(
                by_optimizer[index] < other or (by_optimizer[index] == other and index < at)
                for at, other in enumerate(by_optimizer)
            )
        ]

    @guarded
    def built(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the script created `optimizer`."""
        if torch.utils.data.get_worker_info() is None:
            self._optimizers.append(weakref.ref(optimizer))
            self._control()

    def _begin(self, called: nn.Module | None, inputs: Any = ()) -> None:
        """Begin to observe, if there are optimizers.

        `called` is the module that the script called with `inputs`; None in a backward pass. If no
        optimizer has any of its parameters, the module is only remembered as not trained yet.
        """
        from entrenar_py.check.observing import flat_parameters

        optimizers = self.optimizers()
        if called is not None:
            optimizers = [o for o in optimizers if not _steps_a_copy(o, called, optimizers)]
            zero = getattr(flat_parameters.zero_optimizer(called), "optimizer", None)
            if zero is not None and not any(zero is opt for opt in optimizers):
                optimizers.append(zero)  # between its steps it has no tensors
        own = set() if called is None else flat_parameters.parameters_and_partitions(called)
        parameters = {p for opt in optimizers for p in _stepped_by(opt)}
        if called is not None and zero is None and parameters.isdisjoint(own):
            if self._untrained is None and any(p.requires_grad for p in called.parameters()):
                self._untrained = weakref.ref(called)
            if self._untrained is not None and self._untrained() is called:
                self._untrained_inputs.append(inputs)
            return
        from entrenar_py.check.observing import surroundings, tensors
        from entrenar_py.check.observing.auto.recorder import Recorder

        instead = None if self._untrained is None else self._untrained()
        optimizers = [one for optimizer in optimizers for one in tensors.stepping(optimizer)]
        model = surroundings.model_of(called, optimizers, instead=instead)
        before = self._untrained_inputs if instead and model is tensors.unwrapped(instead) else []
        self._untrained_inputs = []
        if model is None:
            return
        self._recorder = Recorder(
            model,
            optimizers,
            self.batches,
            called,
            drawn_since=self._at_batch,
            give_up=self.give_up,
            stepped=self.step_ended,
        )
        self.observation = self._recorder
        for given in before:
            self._recorder.was_called(given)
        if called is not None:  # otherwise compiled code may call the model and contain the hook
            self.look_at_calls(False)

    def _watch(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        """Watch the modules that an optimizer steps, from its first step on."""
        if optimizer in self._watched:
            return
        from entrenar_py.check.observing import PATIENCE, surroundings
        from entrenar_py.check.watch.watch import Watch

        model = surroundings.model_of(None, [optimizer])
        self._watched[optimizer] = model
        kind = type(optimizer).__name__
        if model is None:
            _LOG.warning(
                "entrenar watch: %s steps tensors that belong to no module, and is not "
                "watched: call observe(model, optimizer, every=...) in the script",
                kind,
            )
            return
        others = [other for known, other in self._watched.items() if known is not optimizer]
        if any(model is other for other in others):
            _LOG.warning(
                "entrenar watch: %s is not watched: the module that it steps is watched "
                "with a different optimizer",
                kind,
            )
            return
        Watch(
            model,
            optimizer,
            every=every,
            contract=self.settings.contract,
            on_finding=None,
            patience=PATIENCE,
            step=0,
        )

    @property
    def batches(self) -> Batches:
        """The batches that the process's DataLoaders yield."""
        if self._batches is None:
            from entrenar_py.check.observing.seen_samples import Batches

            self._batches = Batches()
        return self._batches

    def look_at_calls(self, wanted: bool) -> bool:
        """Set or remove a hook for the calls of all modules. Return whether it was set before.

        The hook costs time, and torch compiles it with the module, so it is removed early.
        """
        was_set = self._calls is not None
        if was_set and not wanted:
            self._calls.remove()
            self._calls = None
        elif wanted and not was_set:
            self._calls = register_module_forward_pre_hook(self.forward)
        return was_set

    # --- called by torch's hooks and the patches --------------------------------------------------

    @guarded
    def forward(self, module: nn.Module, inputs: Any) -> None:
        """Begin to observe in the first training pass of a module that an optimizer trains."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self._leave_if_due()
        if self.observation is None and self._optimizers:
            self._begin(module, inputs)

    @guarded
    def backward_begins(self, tensors: Any, *, is_plain: bool) -> None:
        """Record the loss of a backward pass. Passes inside it belong to it."""
        self._depth += 1
        if self._depth > 1:
            return
        self._stepping = 0  # the last step may have ended by an exception
        self._leave_if_due()
        if self.observation is None and self._optimizers:
            self._begin(None)  # no module is called, only functions of its parameters
        if self._recorder is not None:
            self._recorder.backward_begins(self._losses.begun(tensors, is_plain=is_plain))

    @guarded
    def backward_ended(self) -> None:
        """Record that a backward pass has ended, perhaps with an exception."""
        self._depth -= 1
        if self._recorder is not None and not self._depth:
            self._recorder.backward_ended()

    @guarded
    def iterated(self, loader: Any) -> LoaderListener:
        """Record that an iteration over a DataLoader begins, and return a listener for it."""
        from entrenar_py.check.observing.batches import Iteration

        call_sites.Samples.drawn()
        self._control()
        return _GuardedPass(self, Iteration(self.batches, loader))

    def _control(self) -> None:
        """Begin to draw common random numbers, or to keep batches, if that is planned.

        Called when the model has been built.
        """
        if os.environ.get(BATCHES):
            from entrenar_py.check.observing import replayed_batches

            replayed_batches.listen()
        if os.environ.get(FAULTS, "[]") != "[]":
            from entrenar_py.check.observing import common_numbers

            common_numbers.begin_if_planned()

    def note_generators(self) -> None:
        """Record the generators' states when a loader hands out a batch before the observation."""
        if self.observation is None and self._optimizers and torch.is_grad_enabled():
            from entrenar_py.check.observing import generators

            self._at_batch = generators.global_states()

    @guarded
    def scaled(self, scale: float, losses: Any) -> None:
        """Record that a `GradScaler` multiplies `losses` by `scale`."""
        self._losses.scaled(scale, losses)

    @guarded
    def skipped(self) -> None:
        """Record that a `GradScaler` skipped a step on all ranks."""
        if self._recorder is not None:
            self._recorder.skipped()

    @guarded
    def saved(self) -> None:
        """Record that the script saves a file."""
        if self._recorder is not None:
            self._recorder.saved()

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Examine an optimizer when its step begins, and follow its closure if it has one.

        If the first training pass is in this closure, the hooks of an Observer would be too late
        for it. The returned value replaces the arguments of the step; None leaves them unchanged.
        """
        self.step_begins(optimizer)
        if self.is_off() or self.observation is not None or self.settings.every is not None:
            return None
        from entrenar_py.check.observing.step_in_work import look_before_step

        first = partial(self._closure_ran, optimizer, again=False)
        again = partial(self._closure_ran, optimizer, again=True)
        return look_before_step(first, again, arguments, named)

    @guarded
    def clipped(self, parameters: Any, max_norm: float | None, norm_type: float) -> None:
        """Record that the script clips gradients by their norm."""
        if self._recorder is not None:
            self._recorder.clipped(parameters, max_norm, norm_type)

    @guarded
    def _closure_ran(self, optimizer: torch.optim.Optimizer, *, again: bool) -> None:
        if self._recorder is not None:
            self._recorder.closure_ran(optimizer, again=again)

    @guarded
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """End the process if that is due. Begin to observe or watch, if nothing did before."""
        self._stepping += 1
        self._leave_if_due()
        if self.settings.every is not None and self._stepping == 1:
            self._watch(optimizer, self.settings.every)
        if self._stepping > 1:
            return
        if self._recorder is None:
            self._begin_late(optimizer)
        if self._recorder is None:
            self._note_unseen(optimizer)
            return
        known = self._recorder.optimizers
        family = (*known, *_inside(known))
        if not any(one is each for one in (optimizer, *_inside([optimizer])) for each in family):
            self._end(self._recorder.stranger_steps(optimizer))

    def _end(self, where: str) -> None:
        """End the run before this step if `where` is given: what follows is not observed."""
        if where and not self._ending.is_due and self._recorder is not None:
            self._recorder.note_limit(where)
            self._recorder.close()
            self._ending.is_due = True
            self._leave_if_due()

    def _begin_late(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to observe in a step with gradients that the script set, without a backward pass.

        A step with gradients of zeros trains nothing: torch.distributed.checkpoint creates
        optimizer state in this way.
        """
        from entrenar_py.check.observing import surroundings, tensors

        graded = [
            p for p in _stepped_by(optimizer) if p.grad is not None and tensors.local(p.grad).any()
        ]
        is_known = any(optimizer is own for own in self.optimizers())
        if self.observation is None and is_known and surroundings.have_modules(graded):
            self._begin(None)

    def _note_unseen(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a step was not recorded, which matters only if no step ever is."""
        folder = os.environ.get(FOLDER)
        if self.observation is None and self.settings.every is None and folder:
            notes.write_problem(
                Path(folder),
                f"{type(optimizer).__name__} stepped tensors that were added to it after "
                "the forward and backward passes: such steps are not observed",
                notes.UNSEEN,
            )

    @guarded
    def step_ended(self, *_: Any) -> None:
        """End the run after the last requested step."""
        self._stepping = max(0, self._stepping - 1)
        if self._recorder is not None:
            self._recorder.step_ended()
        self._perhaps_last()

    def _perhaps_last(self) -> None:
        """Let the next step end the process if this one was the last requested step."""
        made = getattr(self.observation, "num_steps", 0)
        if self.settings.steps is None or made < self.settings.steps or self._ending.is_due:
            return
        observer: Any = self.observation
        observer.note_limit()
        if not observer.has_late_weights:
            observer.close()
        self._ending.is_due = True
        self.look_at_calls(True)

    def _leave_if_due(self) -> None:
        if not self._ending.is_due:
            return
        observer: Any = self.observation
        if observer.has_late_weights:
            observer.close()
        self._ending.leave()


class _GuardedPass:
    """One iteration over a DataLoader. Errors of the observation don't reach the script."""

    def __init__(self, follower: Follower, loader_pass: Iteration) -> None:
        self._follower, self._pass = follower, loader_pass
        self.is_off, self.give_up = follower.is_off, follower.give_up

    @guarded
    def drawn(self, index: Any) -> None:
        self._pass.drawn(index)

    @guarded
    def item(self, batch: Any) -> None:
        self._pass.item(batch)
        self._follower.note_generators()

    @guarded
    def failed(self) -> None:
        self._pass.failed()

    @guarded
    def over(self) -> None:
        self._pass.over()
