"""The command `entrenar distill text`."""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from entrenar_py.shared.untrusted import printing
from entrenar_py.shared.wording import counted
from entrenar_py.train.distill import answers
from entrenar_py.train.distill.answers import Asking, Progress, Written
from entrenar_py.train.distill.endpoint import Endpoint
from entrenar_py.train.finetune import distill_commands
from entrenar_py.train.model import samples
from entrenar_py.train.service import exit_codes
from entrenar_py.train.service.progress import duration

TELL_EVERY_S = 10.0
_SHOWN = 20  # prompts that failed


def run(given: argparse.Namespace) -> int:
    """Ask the teacher; return the exit code. Raises as `Asking` does."""
    settings, section = distill_commands.settings_of(given.config)
    asking = Asking(settings, section, url=given.endpoint, backend=given.backend)
    with closing(asking.journal):
        _say_what_is_there(asking)
        show = _Shown()
        told = "stops: what is asked now is given up"
        with distill_commands.stopped_by_signals(told) as stopping:
            progress = asking.run(show, stopping)
        show.last()
        left = progress.total - progress.done - len(progress.failed)
        if left and stopping.is_set():
            printing.say(
                f"stopped; start it again to ask the {counted(left, 'prompt')} without an answer"
            )
            return exit_codes.STOPPED
        return _say_end(asking, progress, asking.write())


def _say_what_is_there(asking: Asking) -> None:
    found, text, journal = asking.prompts, asking.text, asking.journal
    repeated = f" ({found.repeated:,} more ask the same)" if found.repeated else ""
    printing.say(f"{counted(len(found.distinct), 'prompt')} in {text.prompts}{repeated}")
    if found.skipped:
        printing.say(f"skipped: {counted(len(found.skipped), 'row')} (data.on_error: skip)")
        printing.say_lines("\n".join(samples.listed(found.skipped)))
    if journal.others:
        printing.say(
            f"{journal.path} has {counted(journal.others, 'answer')} of other settings, which are "
            "left there and not used"
        )
    if journal.damaged:
        printing.say(
            f"{journal.path} has {counted(journal.damaged, 'damaged line')}; their prompts are "
            "asked again"
        )
    if text.synthetic_share == 1:
        printing.warn(
            "distill.text.synthetic_share=1: all rows come from the teacher; a model that learns "
            "from synthetic rows alone can lose what is rare in real ones; use a smaller share"
        )
    if isinstance(asking.source, Endpoint) and asking.source.shows_key:
        printing.warn(
            "the endpoint is another machine's, and its URL is http://: the key is sent so that "
            "anyone between can read it; use https://"
        )


def _say_end(asking: Asking, progress: Progress, written: Written) -> int:
    """Say what became of all prompts; 1 if any failed, or if there is no row."""
    text = asking.text
    _, truncated, refused = answers.counts(progress)
    if written.synthetic:
        total = written.synthetic + written.original
        printing.say(
            f"written to {text.rows}: {counted(total, 'row')}, {written.synthetic:,} synthetic, "
            f"{written.original:,} original"
        )
    if written.lacking:
        printing.say(
            f"data.train has {written.lacking:,} rows too few for distill.text.synthetic_share="
            f"{text.synthetic_share:g}: more of what is written is synthetic"
        )
    printing.say(
        f"not written: {truncated:,} truncated, {refused:,} refused or empty, "
        f"{counted(written.duplicates, 'duplicate')}, {len(progress.failed):,} failed"
    )
    if truncated:
        printing.say(
            f"truncated answers have more than distill.text.new_tokens={text.new_tokens}, or than "
            "the teacher takes with the prompt; with a larger number these alone are asked again"
        )
    if progress.failed:
        shown = [f"{prompt.place}: {one.reason}" for prompt, one in progress.failed[:_SHOWN]]
        more = len(progress.failed) - _SHOWN
        for line in [*shown, *([f"and {more:,} more"] if more > 0 else [])]:
            printing.say(line, indent=2)
        printing.say("start it again to ask those that failed")
    if not written.synthetic:
        printing.warn(f"no answer can be learned, so {text.rows} is not written")
    return exit_codes.WRONG if progress.failed or not written.synthetic else exit_codes.DONE


class _Shown:
    """Prints how far the asking is, now and then."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._next_s, self._said = 0.0, ""

    def __call__(self, progress: Progress) -> None:
        """Print a line if it is time."""
        self._progress = progress
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + TELL_EVERY_S
            self.last()

    def last(self) -> None:
        """Print a line, unless it was the last one."""
        one = self._progress
        if one is None:
            return
        parts = [f"{one.done:,} of {counted(one.total, 'prompt')} answered"]
        if one.failed:
            parts.append(f"{len(one.failed):,} failed")
        if one.done > one.before:
            parts.append(f"{one.per_s:.2g} a second")
        if one.done > one.before and one.left_s:
            parts.append(f"{duration(one.left_s)} left at this pace")
        if (line := ", ".join(parts)) != self._said:
            self._said = line
            printing.say(line)
