"""`entrenar plan`: prints what a run needs and which strategy to take; writes it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.plan import advice, plan, text
from entrenar_py.train.plan import devices as device_texts
from entrenar_py.train.plan.devices import Device


def show(
    settings: Settings,
    *,
    longest: int | None,
    devices: Sequence[Device],
    bandwidth: str,
    json: Path | None,
) -> bool:
    """Print the plan of a run; return whether some strategy fits.

    `longest` is the number of tokens of the longest row, None if rows were not read. Raises
    UsageError for a bandwidth of another form, or a file that can't be written.
    """
    if json is not None:
        arguments.require_writable(json, "json")
    run = plan.of(
        settings,
        devices,
        longest=longest,
        bandwidth=device_texts.bandwidth(bandwidth),
    )
    found = plan.options(run)
    chosen = advice.choose(run, found)
    why = advice.why(run, found, chosen)
    length_from = "data.max_tokens" if longest is None else "the longest row"
    printing.say_lines("\n".join(text.lines(run, found, chosen, why, length_from=length_from)))
    if json is not None:
        arguments.write_file(plan.to_record(run, found, chosen, why), json)
    return chosen is not None


def of_run(settings: Settings, described: Sequence[str] = ()) -> list[Device]:
    """Return the devices to plan for: described ones, the configuration's, or this machine's.

    Raises UsageError for a description of another form, and if no device works.
    Of this machine's, GPUs of CUDA come before other adapters, and these before the CPU.
    """
    texts = described or settings.devices
    if texts:
        return device_texts.described(texts)
    found = device_texts.found()
    for kind in ("cuda", "wgpu", "cpu"):
        alike = [one for one in found if one.kind == kind]
        if alike:
            return alike
    raise UsageError("this machine has no device that works; describe one with --device")
