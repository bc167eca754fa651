"""The progress of a run on a terminal, and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from entrenar_py.train.service import progress
from entrenar_py.train.service.progress import LINE_EVERY_S, Lines, Screen, summary
from entrenar_py.train.service.run_events import ClassScored, Happening, Noted, Scored
from tests.train.service.happened import made

SAVED = Noted(what="saved", step=3, text="checkpoint before step 3: run.ckpt")
LEFT = Noted(what="left", step=3, text="worker 1 left in step 3: [Errno 104] Connection reset")


def lines(*told: tuple[float, Happening]) -> list[str]:
    """Return a log's lines for these events, each shown at its time."""
    now = [0.0]
    file = io.StringIO()
    listener = Lines(Console(file=file, width=60, markup=False), clock=lambda: now[0])
    for now[0], happening in told:
        listener(happening)
    return file.getvalue().splitlines()


def test_a_step_in_a_line() -> None:
    """The line has loss, pace, workers, traffic, exchange, waiting, and the slowest worker."""
    assert summary(made()) == (
        "loss 2.25  80 steps/s  workers 0,2  in 20.8 kB out 1.23 MB  exchange 7.25 ms  "
        "reduce 0.25 ms  worker 0 waited 4.5 ms  last worker 2, 3.5 ms behind"
    )
    alone = made(
        steps_per_s=None, last=None, workers=(0,), bytes_in=999, bytes_out=10**16, waits_ms={0: 0.0}
    )
    said = "loss 2.25  workers 0  in 999 B out 1e+04 TB  exchange 7.25 ms  reduce 0.25 ms"
    assert summary(alone) == said
    untimed = made(exchange_ms=None, reduce_ms=None, last=None, waits_ms={})
    assert summary(untimed).endswith("out 1.23 MB")
    assert "in 1 MB out 0 B" in summary(made(bytes_in=999_600, bytes_out=0))
    slow = summary(made(steps_per_s=1234.5, exchange_ms=99_950.0, reduce_ms=0.0))
    assert "  1234 steps/s  " in slow
    assert "  exchange 99950 ms  reduce 0 ms  " in slow


def test_a_log_is_not_flooded() -> None:
    """Steps and checkpoints are printed now and then, the last step and other notes always."""
    soon = LINE_EVERY_S / 2
    shown = lines(
        (0.0, made(0)),
        (soon, made(1)),
        (soon, SAVED),
        (soon, SAVED),
        (soon, LEFT),
        (soon, LEFT),
        (2 * soon, made(2)),
        (2 * soon, made(3)),
        (2 * soon, made(9)),
    )
    assert [line.partition("  ")[0] for line in shown] == [
        *("step 1/10", SAVED.text, LEFT.text, LEFT.text, "step 3/10", "step 10/10"),
    ]


SCORES = Scored(
    step=5,
    loss=0.25,
    weight=10,
    perplexity=None,
    accuracy=0.9,
    classes=(
        ClassScored(label="[red]bad\x1b[2J", recall=0.5, precision=1.0, f1=2 / 3),
        ClassScored(label="good", recall=None, precision=None, f1=None),
    ),
    confusion=((1, 1), (0, 8)),
)


def test_scores_in_a_log() -> None:
    """Every evaluation is a line; a class's name can't command the terminal."""
    (line,) = lines((0.0, SCORES))
    assert line == (
        "validation after step 5: loss 0.2500, accuracy 0.900, [red]bad\\x1b[2J recall 0.500 "
        "precision 1.000 F1 0.667, good recall - precision - F1 -"
    )


def test_a_screen_has_everything() -> None:
    screen, file = Screen(num_steps=10), io.StringIO()
    screen(made(6, steps_per_s=0.01))
    screen(SCORES)
    Console(file=file, width=200).print(screen)
    assert [" ".join(line.split()) for line in file.getvalue().splitlines()] == [
        "step ━━━━━━━━━━━━━━━━━━━━━ 7/10 0:05:00 left",
        "loss 2.25, gradient norm 0.5, rate 0.001",
        "validation loss 0.2500, accuracy 0.900, [red]bad\\x1b[2J recall 0.500 precision 1.000 F1 "
        "0.667, good recall - precision - F1 - (after step 5)",
        "pace 0.01 steps/s, 2560 tokens/s, exchange 7.25 ms, reduce 0.25 ms",
        "memory 1 GB",
        "workers 0 cpu (waited 4.5 ms), 2 wgpu (waited 0 ms)",
        "traffic in 20.8 kB out 1.23 MB a step",
    ]


def test_a_terminal_shows_the_screen() -> None:
    """It is kept current, and notes stand above it."""
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True)
    with progress.opened(console, num_steps=10) as listener:
        listener(LEFT)
        listener(made(6))
    before, _, after = file.getvalue().partition(LEFT.text)
    assert "waits for workers" in before
    assert "7/10" in after


def test_a_log_gets_lines() -> None:
    """A log gets lines and no bar."""
    file = io.StringIO()
    with progress.opened(Console(file=file, width=60), num_steps=10) as listener:
        listener(made(0))
    assert file.getvalue() == f"step 1/10  {summary(made(0))}\n"
