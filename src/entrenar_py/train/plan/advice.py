"""Which strategy to take, and why, in two sentences; and what would fit where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from entrenar_py.shared import wording
from entrenar_py.train.plan import plan
from entrenar_py.train.plan.plan import BY_PROTOCOL, COMPARED, Option, Run
from entrenar_py.train.plan.shape import Shape
from entrenar_py.train.plan.units import seconds, size

_SHORTEST = 64  # tokens: shorter rows are not advised


def choose(run: Run, found: Sequence[Option]) -> Option | None:
    """Return the strategy to take, None if none fits.

    Alike GPUs take what torch's collectives offer; of several that fit, the one that is fastest on
    the wire. All others take the reference trainer, whose bits do not depend on the devices.
    """
    fitting = [one for one in _advised(found) if one.fits(recompute=run.recompute)]
    by_protocol = [one for one in fitting if one.strategy in BY_PROTOCOL]
    others = [one for one in fitting if one.strategy not in BY_PROTOCOL]
    are_gpus = all(one.kind == "cuda" for one in run.devices)
    pool = others if are_gpus and others else by_protocol or others
    return min(pool, key=lambda one: one.seconds, default=None)


def _advised(found: Sequence[Option]) -> list[Option]:
    return [one for one in found if one.strategy not in COMPARED]


def why(run: Run, found: Sequence[Option], chosen: Option | None) -> str:
    """Return two sentences: why this strategy, and why not another."""
    found = _advised(found)
    if chosen is None:
        return _none_fits(run, found)
    return f"{_reason(run, chosen)} {_others(run, found, chosen)}"


def _reason(run: Run, chosen: Option) -> str:
    worker = max(chosen.workers, key=lambda one: one.sharing * one.memory.needed)
    needed = (worker.recomputed if run.recompute else worker.memory).needed * worker.sharing
    limit = worker.device.memory
    room = f"{size(limit)} of {worker.device.name}" if limit else f"{worker.device.name}"
    whom = f"{worker.sharing} workers need" if worker.sharing > 1 else "a worker needs"
    if run.num_workers == 1:
        return f"One worker shares nothing: it needs {size(needed)} of the {room}."
    return (
        f"With {chosen.strategy} {whom} {size(needed)} of the {room}, and a step moves "
        f"{size(chosen.traffic.sent)} from a worker, {seconds(chosen.seconds)} on the wire."
    )


def _others(run: Run, found: Sequence[Option], chosen: Option) -> str:
    full = [one for one in found if not one.problem and not one.fits(recompute=run.recompute)]
    if full:
        least = min(full, key=lambda one: one.peak(recompute=run.recompute))
        names = wording.listed([one.strategy for one in full], most=len(full))
        return (
            f"There is no room for {names}: the least of them peaks at "
            f"{size(least.peak(recompute=run.recompute))}."
        )
    able = [one for one in found if one is not chosen and not one.problem]
    faster = [one.strategy for one in able if one.seconds < chosen.seconds]
    if faster and chosen.strategy in BY_PROTOCOL:
        are = "is" if len(faster) == 1 else "are"
        return (
            f"{wording.listed(faster, most=len(faster))} {are} faster on the wire; weights of "
            f"{chosen.strategy} have the same bits however many workers take part."
        )
    slower = [one for one in able if one.seconds > chosen.seconds]
    if slower:
        next_best = min(slower, key=lambda one: one.seconds)
        return (
            f"Every strategy that can run here fits, and {next_best.strategy} is the next on the "
            f"wire with {seconds(next_best.seconds)}."
        )
    if not all(one.kind == "cuda" for one in run.devices):
        return "Its weights have the same bits however many workers take part."
    return "No other strategy moves fewer bytes."


def _none_fits(run: Run, found: Sequence[Option]) -> str:
    able = [one for one in found if not one.problem]
    if not able:
        return "No strategy can run here: " + "; ".join(
            f"{one.strategy}: {one.problem}" for one in found
        )
    least = min(able, key=lambda one: one.peak(recompute=run.recompute))
    worst = max(
        (one for one in least.workers if not one.fits(recompute=run.recompute)),
        key=lambda one: one.sharing * one.memory.needed - plan.memory_or_infinite(one.device),
    )
    needed = worst.sharing * (worst.recomputed if run.recompute else worst.memory).needed
    what = remedies(run, least.strategy)
    told = "; ".join(what) if what else "nothing that the configuration can change"
    return (
        f"Nothing fits: {least.strategy}, which needs least, takes {size(needed)} on "
        f"{worst.device.name}, which has {size(worst.device.memory or 0)}. What would fit: {told}."
    )


def remedies(run: Run, strategy: str) -> list[str]:
    """Return changes of the configuration with which `strategy` fits, each with what it needs."""
    told = list[str]()
    for text, changed in _changes(run):
        if any(text.startswith(one.rpartition(" (")[0]) for one in told):
            continue  # less than this is enough
        tried = plan.option(changed, strategy)
        if tried.fits(recompute=changed.recompute):
            told.append(f"{text} ({size(tried.peak(recompute=changed.recompute))})")
    return told


def _changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield what could be changed, one thing at a time; then these together, one after another.

    Those come first that change the least of what is learned.
    """
    texts, together = list[str](), run
    for text, change in _steps(run):
        yield text, change(run)
        texts.append(text)
        together = change(together)
        if len(texts) > 1:
            yield " and ".join(texts), together


def _steps(run: Run) -> Iterator[tuple[str, Callable[[Run], Run]]]:
    settings = run.settings
    if not run.recompute:
        yield "recompute: blocks", lambda one: _with(one, recompute="blocks")
    if run.rows > 1:
        most = settings.training.batch_size
        finest = replace(settings.training, num_shards=most)
        yield f"training.num_shards: {most}", lambda one: _with(one, training=finest)
    if settings.num_workers > len(run.devices):
        fewer = len(run.devices)
        yield f"workers: {fewer}", lambda one: _with(one, workers=fewer)
    if run.length > _SHORTEST:
        half = max(_SHORTEST, run.length // 2)
        data = replace(settings.data, max_tokens=half)
        yield (
            f"data.max_tokens: {half}",
            lambda one: replace(_with(one, data=data), longest=half),
        )
    if settings.precision == "float32":
        yield "precision: bfloat16", lambda one: _with(one, precision="bfloat16")
    if settings.method == "full":
        yield "method: lora", lambda one: _with(one, method="lora")
    if settings.method == "lora":
        yield "method: qlora", lambda one: _with(one, method="qlora")


def _with(run: Run, **changes: object) -> Run:
    """Return the run with other settings, and with a shape of its own if the model is another."""
    settings = replace(run.settings, **changes)  # type: ignore[arg-type]
    other = {"method", "precision"} & changes.keys()
    shape = Shape(settings) if other else run.shape
    return replace(run, settings=settings, shape=shape)
