"""The commands `entrenar distill logits`, `train`, `text` and `status`."""

from __future__ import annotations

import argparse
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import html_page
from entrenar_py.shared.page.arguments import write_file
from entrenar_py.shared.page.html_page import Line, chart
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.shared.wording import counted
from entrenar_py.train.distill import answers, shards, student
from entrenar_py.train.distill.answers import Asking, Written
from entrenar_py.train.distill.endpoint import Endpoint
from entrenar_py.train.distill.production import Progress, Stage
from entrenar_py.train.finetune import foresight, local, settings_file
from entrenar_py.train.model import preparation, samples
from entrenar_py.train.model.settings import Distillation, Settings
from entrenar_py.train.service import exit_codes, signals
from entrenar_py.train.service.progress import duration

PAGE_FILE = "report.html"


def write_page(section: Distillation, progress: Progress) -> Path:
    """Write the page, and return its path. Only warns if it can't be written: the shards exist.

    Processes that share the folder write the same file, so it shows the progress of the process
    that wrote it last.
    """
    path = section.shards / PAGE_FILE
    own = path.with_name(f".{PAGE_FILE}.{secrets.token_hex(8)}")
    try:
        own.write_text("\n".join(_page_lines(section, progress)) + "\n", encoding="utf-8")
        own.replace(path)
    except OSError as error:
        own.unlink(missing_ok=True)
        printing.warn(f"entrenar: {path}: can't be written ({error.strerror or error})")
    return path


def _page_lines(section: Distillation, progress: Progress) -> Iterator[str]:
    name = f"logits of {section.teacher.name if section.teacher else 'the teacher'}"
    status, badge = progress.state, "held" if progress.state == "completed" else "inconclusive"
    yield from html_page.begin(f"{name}: {status}")
    mark = f'<span class="verdict {badge}">{status}</span>'
    yield f"<header><h1>{escaping.html(name)} {mark}</h1><dl>"
    for key, value in _page_facts(section, progress):
        yield f"<dt>{escaping.html(key)}</dt><dd>{escaping.html(value)}</dd>"
    yield "</dl></header>"
    made = enumerate(progress.made, start=1)
    paces = tuple((number, one.tokens / one.seconds) for number, one in made)
    if len(paces) > 1:
        line = Line(label="this process", points=paces, colour=0)
        yield '<section><h2>Pace</h2><div class="charts">'
        yield chart("Tokens a second, by shards made here", "tokens/s", [line])
        yield "</div></section>"
    yield html_page.END


def _page_facts(section: Distillation, progress: Progress) -> Iterator[tuple[str, str]]:
    facts = progress.facts
    yield "shards", f"{progress.shards_done:,} of {facts.num_shards:,} in {section.shards}"
    behind = facts.num_shards - progress.shards_done
    yield "behind", f"{behind:,} shards, {progress.rows_left:,} rows of this process's part"
    yield "rows", f"{progress.rows_done:,} of {sum(facts.rows):,}"
    if progress.made:
        yield "pace", f"{progress.tokens_per_s:,.0f} tokens/s of this process"
    if progress.made and progress.left_s:
        yield "left", f"{duration(progress.left_s)} at this pace"
    yield "kept", f"{facts.top_k} of {facts.vocabulary} tokens, {facts.stored}"
    yield "teacher", f"{section.teacher} ({facts.teacher}), weights in {facts.precision}"
    yield "tokenizer", facts.tokenizer
    yield "rows' digest", facts.data


TELL_EVERY_S = 10.0
P = TypeVar("P")  # the progress of a command


def logits(arguments: argparse.Namespace) -> int:
    """Run the teacher; return the exit code. Raises as `production.Stage` does."""
    settings, section = settings_of(arguments.config)
    day = student.day_of(settings)
    prepared = preparation.prepare(settings, needs_weights=False, day=day)
    foresight.say_rows(prepared)
    stage = Stage(prepared, arguments.backend, arguments.part)
    facts = stage.facts
    printing.say(
        f"{sum(facts.rows)} rows of {facts.top_k} tokens in {facts.num_shards} shards, in "
        f"{section.shards}"
    )
    show = _Shown(_line_of_shards, partial(write_page, section))
    with stopped_by_signals("stops when the batch in progress is done") as stopping:
        is_done = stage.run(show, stopping)
    show.last()
    if show.progress is not None:
        printing.say(f"drawn in {write_page(section, show.progress)}")
    if not is_done:
        printing.say("stopped; start it again to continue with the first missing shard")
        return exit_codes.STOPPED
    subject = (
        "all shards are"
        if arguments.part is None
        else f"part {'/'.join(map(str, arguments.part))} is"
    )
    printing.say(f"{subject} complete")
    return exit_codes.DONE


def train(arguments: argparse.Namespace) -> int:
    """Train the student on this machine; return the exit code. Raises as `local.train` does."""
    settings_of(arguments.config)
    return local.train(
        arguments.config,
        resume=arguments.resume,
        names=arguments.backends,
        halt_on_spike=arguments.halt_on_spike,
        tensorboard=arguments.tensorboard,
        follow=arguments.follow,
    )


def look(arguments: argparse.Namespace) -> int:
    """Print the status of a folder of shards; return WRONG if a shard is missing or damaged."""
    status = shards.status(arguments.folder)
    for line in status.lines():
        printing.say(line)
    if arguments.json is not None:
        write_file(status.record(), arguments.json)
    return exit_codes.DONE if status.is_whole else exit_codes.WRONG


def settings_of(path: Path) -> tuple[Settings, Distillation]:
    """Return the configuration at `path` and its section `distill`.

    Raises as `settings_file.load` does, and UsageError without the section.
    """
    settings = settings_file.load(path)
    if settings.distill is None:
        raise UsageError(
            f"{path}: distill is missing: the section names the teacher, and the folder of its "
            "shards (logits)"
        )
    return settings, settings.distill


@contextmanager
def stopped_by_signals(told: str) -> Iterator[threading.Event]:
    """Yield an event that SIGINT, SIGTERM and SIGHUP set. A second signal ends the process.

    At the first signal, `told` is printed.
    """
    stopping = threading.Event()
    before = {}

    def stop(number: int, _: object) -> None:
        if stopping.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stopping.set()
        printing.say(told)

    signals.settle()
    if signals.noted():  # it came while something was loaded, and the interrupt was lost
        stopping.set()
    for number in signals.taken():
        before[number] = signal.signal(number, stop)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Shown(Generic[P]):
    """Prints the progress of a command at intervals, and never the same line twice."""

    def __init__(
        self, line: Callable[[P], str], draw: Callable[[P], object] = lambda _: None
    ) -> None:
        """`draw` is called each time that a `line` is due."""
        self.progress: P | None = None
        self._line, self._draw = line, draw
        self._next_s, self._said = 0.0, ""

    def __call__(self, progress: P) -> None:
        self.progress = progress
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + TELL_EVERY_S
            self.last()
            self._draw(progress)

    def last(self) -> None:
        line = "" if self.progress is None else self._line(self.progress)
        if line != self._said:
            self._said = line
            printing.say(line)


def _line_of_shards(progress: Progress) -> str:
    facts = progress.facts
    parts = [
        f"{progress.shards_done} of {facts.num_shards} shards",
        f"{progress.rows_done:,} of {sum(facts.rows):,} rows",
    ]
    if progress.made:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s here")
    if progress.made and progress.left_s:
        parts.append(f"{duration(progress.left_s)} left at this pace")
    return ", ".join(parts)


def _line_of_answers(progress: answers.Progress) -> str:
    parts = [f"{progress.done:,} of {counted(progress.total, 'prompt')} answered"]
    if progress.failed:
        parts.append(f"{len(progress.failed):,} failed")
    if progress.done > progress.before:
        parts.append(f"{progress.per_s:.2g} a second")
    if progress.done > progress.before and progress.left_s:
        parts.append(f"{duration(progress.left_s)} left at this pace")
    return ", ".join(parts)


_FAILURES_SHOWN = 20  # failed prompts that are listed


def text(arguments: argparse.Namespace) -> int:
    """Get the teacher's answers, and write the rows; return the exit code.

    Raises as `Asking` does.
    """
    settings, section = settings_of(arguments.config)
    asking = Asking(settings, section, url=arguments.endpoint, backend=arguments.backend)
    with closing(asking.journal):
        _say_what_is_there(asking, settings)
        show = _Shown(_line_of_answers)
        notice = "stops: requests in progress are cancelled"
        with stopped_by_signals(notice) as stopping:
            progress = asking.run(show, stopping)
        show.last()
        left = progress.total - progress.done - len(progress.failed)
        if left and stopping.is_set():
            printing.say(
                f"stopped; start it again to send the {counted(left, 'prompt')} without an answer"
            )
            return exit_codes.STOPPED
        return _say_end(asking, progress, asking.write())


def _say_what_is_there(asking: Asking, settings: Settings) -> None:
    prompts, text, journal = asking.prompts, asking.text, asking.journal
    repeated = f" ({prompts.repeated:,} more ask the same)" if prompts.repeated else ""
    printing.say(f"{counted(len(prompts.distinct), 'prompt')} in {text.prompts}{repeated}")
    if prompts.skipped:
        by = samples.skipped_by(settings.data, prompts.skipped)
        printing.say(f"skipped: {counted(len(prompts.skipped), 'row')} ({by})")
        printing.say_lines("\n".join(samples.listed(prompts.skipped)))
    if journal.others:
        printing.say(
            f"{journal.path} has {counted(journal.others, 'answer')} from different settings, "
            "which are kept but not used"
        )
    if journal.damaged:
        printing.say(
            f"{journal.path} has {counted(journal.damaged, 'damaged line')}; their prompts are "
            "sent again"
        )
    if text.synthetic_share == 1:
        printing.warn(
            "distill.text.synthetic_share=1: all rows come from the teacher; a model that learns "
            "from synthetic rows alone can lose what is rare in real ones; use a smaller share"
        )
    if isinstance(asking.source, Endpoint) and asking.source.shows_key:
        printing.warn(
            "the endpoint is on another machine, and its URL is http://: anyone on the network "
            "path can read the key; use https://"
        )


def _say_end(asking: Asking, progress: answers.Progress, written: Written) -> int:
    """Print what became of all prompts; return WRONG if any failed, or if there is no row."""
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
            f"data.train has {written.lacking:,} rows too few for "
            f"distill.text.synthetic_share={text.synthetic_share:g}: a larger share of "
            "the written rows is synthetic"
        )
    printing.say(
        f"not written: {truncated:,} truncated, {refused:,} refused or empty, "
        f"{counted(written.duplicates, 'duplicate')}, {len(progress.failed):,} failed"
    )
    if truncated:
        printing.say(
            f"truncated answers have more tokens than distill.text.new_tokens={text.new_tokens}, "
            "or than the teacher takes with the prompt; with a larger number only these prompts "
            "are sent again"
        )
    if progress.failed:
        shown = [
            f"{prompt.place}: {one.reason}" for prompt, one in progress.failed[:_FAILURES_SHOWN]
        ]
        more = len(progress.failed) - _FAILURES_SHOWN
        for line in [*shown, *([f"and {more:,} more"] if more > 0 else [])]:
            printing.say(line, indent=2)
        printing.say("start it again to retry those that failed")
    if not written.synthetic:
        printing.warn(f"no answer can be learned, so {text.rows} is not written")
    return exit_codes.WRONG if progress.failed or not written.synthetic else exit_codes.DONE
