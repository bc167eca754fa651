"""Libraries that own the loop, or half of it, by short drivers as their documentation has them."""

from __future__ import annotations

from dataclasses import replace

from tests.field.recipe import Recipe, Trial, default, defect, of_tokens
from tests.field.usual import STEPS_AT_NAN

_DISTRIBUTED, _INTEGRITY = ("distributed-training-v1.yaml",), ("training-integrity-v1.yaml",)
_SAVED = ("--dir", "out")  # a checkpoint after each step
# Batches of 16, 16, 16 and 8: cut in two, the last of them is the rest of an accumulation.
_REST = ("--samples", "56", "--accumulation", "{accumulation}")


def _torchrun(driver: str, *options: str) -> tuple[str, ...]:
    return ("torchrun", "--standalone", "--nproc_per_node={world_size}", driver, *options)


def _only(clause: str, steps: int = 5) -> tuple[str, ...]:
    return ("--only", clause, "--steps", str(steps))


def _of_tokens(driver: str, *options: str, what: str = "") -> Trial:
    """Return a trial with two micro-batches a step, by the contract of language models."""
    command = _torchrun(driver, *options, "--accumulation", "2")
    auto = Trial(name="auto", command=command, options=("--steps", "4"), expected=())
    return of_tokens(auto, what=what)


_EVEN_BATCHES = default(
    clause="F-DP-002",
    words="samples drawn again in epoch 0 by rank 1",
    because="The last batch is too short for two ranks. `even_batches`, a default of "
    "accelerate that the Trainer shares, fills it up with samples that were "
    "already drawn in the epoch.",
    reproduction="accelerate_even_batches.py",
)
_SAME_MASKS = default(
    clause="F-TI-005",
    words="draws the same random numbers as rank 0, for other samples",
    because="The Trainer sets the same seed on all ranks, so dropout drops the same elements on "
    "each.",
    reproduction="same_dropout_on_all_ranks.py",
    known="https://github.com/huggingface/transformers/issues/31412",
)
_LIGHTNING_MASKS = replace(
    _SAME_MASKS,
    because="`seed_everything(0)` sets the same seed on all ranks, so dropout drops the same "
    "elements on each.",
    known="https://github.com/Lightning-AI/pytorch-lightning/issues/16166",
)
_LIGHTNING_RESUMED = default(
    clause="F-TI-003",
    words="the data starts over",
    because="A checkpoint within an epoch doesn't have the position of a plain "
    "DataLoader. After a resume the epoch repeats its first batches; Lightning "
    "warns about this.",
    reproduction="lightning_resumes_data_over.py",
    known="https://github.com/Lightning-AI/pytorch-lightning/issues/18780",
)
_PACKED = tuple(
    default(
        clause=clause,
        verdict="inconclusive",
        words="samples than the single device's",
        because="Two ranks draw some samples of the short last batch again, but one rank doesn't.",
    )
    for clause in ("F-DP-005", "F-TI-001")
)
_LIGHTNING_REST = defect(
    clause="F-DP-005",
    words="it is half as large",
    because="The last step of an epoch accumulates one batch instead of two, but the "
    "loss is still divided by two. So this step uses half of the gradient.",
    reproduction="lightning_short_accumulation.py",
    known="https://github.com/Lightning-AI/pytorch-lightning/issues/19987",
)
_OTHER_ORDER = defect(
    clause="F-TI-003",
    words="samples are drawn",
    because="`skip_first_batches` skips batches of a different permutation, since the "
    "epoch's permutation isn't saved. So after a resume within an epoch, some "
    "samples occur twice, and others never.",
    reproduction="accelerate_resumes_other_data.py",
    known="https://github.com/huggingface/accelerate/issues/2823",
)

RECIPES = (
    Recipe(
        name="accelerate",
        title="accelerate: a loop with checkpoints and skip_first_batches",
        driver="accelerate_loop.py",
        needs=("accelerate",),
        trials=(
            Trial(
                name="auto",
                command=_torchrun(
                    "accelerate_loop.py", "--accumulation", "{accumulation}", *_SAVED
                ),
                options=("--steps", "4"),
                expected=(STEPS_AT_NAN,),
            ),
            Trial(
                name="auto, with a seedable sampler",
                command=_torchrun(
                    *("accelerate_loop.py", "--accumulation", "{accumulation}", "--seedable"),
                    *_SAVED,
                ),
                options=("--steps", "4"),
                expected=(STEPS_AT_NAN,),
            ),
            Trial(
                name="auto, resumed within an epoch",
                command=_torchrun("accelerate_loop.py", "--steps", "{steps}", "--dir", "{workdir}"),
                options=("--only", "F-TI-003"),
                contracts=_INTEGRITY,
                expected=(_OTHER_ORDER,),
            ),
        ),
    ),
    Recipe(
        name="lightning",
        title="Lightning's Trainer",
        driver="lightning_ddp.py",
        needs=("lightning",),
        trials=(
            Trial(
                name="auto",
                command=_torchrun("lightning_ddp.py", *_SAVED),
                options=("--steps", "4"),
                expected=(STEPS_AT_NAN, _LIGHTNING_RESUMED),
            ),
            Trial(
                name="auto, with a rest to accumulate",
                command=_torchrun("lightning_ddp.py", *_REST, "--clip", "1e9"),
                options=_only("F-DP-005"),
                contracts=_DISTRIBUTED,
                expected=(_LIGHTNING_REST,),
            ),
            Trial(
                name="auto, resumed with dropout",
                command=_torchrun(
                    *("lightning_ddp.py", "--dropout", "0.1", "--steps", "{steps}"),
                    *("--dir", "{workdir}"),
                ),
                options=("--only", "F-TI-002,F-TI-003,F-TI-005"),
                contracts=_INTEGRITY,
                expected=(_LIGHTNING_RESUMED, _LIGHTNING_MASKS),
            ),
        ),
    ),
    Recipe(
        name="transformers-trainer",
        title="transformers' Trainer",
        driver="hf_trainer.py",
        needs=("transformers", "accelerate"),
        trials=(
            Trial(
                name="auto",
                command=_torchrun("hf_trainer.py", "--accumulation", "{accumulation}", *_SAVED),
                options=("--steps", "4"),
                expected=(STEPS_AT_NAN,),
            ),
            Trial(
                name="auto, with dropout",
                command=_torchrun("hf_trainer.py", "--dropout", "0.1"),
                options=_only("F-TI-005", steps=8),
                contracts=_INTEGRITY,
                expected=(_SAME_MASKS,),
            ),
            Trial(
                name="auto, resumed within an epoch",
                command=_torchrun(
                    *("hf_trainer.py", "--dropout", "0.1", "--steps", "{steps}"),
                    *("--dir", "{workdir}"),
                ),
                options=("--only", "F-TI-002,F-TI-003"),
                contracts=_INTEGRITY,
                expected=(),
            ),
            Trial(
                name="auto, with a short last batch",
                command=_torchrun("hf_trainer.py", "--samples", "56"),
                options=_only("F-DP-002"),
                contracts=_DISTRIBUTED,
                expected=(_EVEN_BATCHES,),
            ),
            _of_tokens("hf_trainer.py"),
        ),
    ),
    Recipe(
        name="trl-sft",
        title="TRL's SFTTrainer",
        driver="trl_sft.py",
        needs=("trl", "transformers", "accelerate", "datasets"),
        trials=(
            Trial(
                name="auto",
                command=_torchrun("trl_sft.py", *_SAVED),
                options=("--steps", "4"),
                expected=(STEPS_AT_NAN,),
            ),
            Trial(
                name="auto, packed",
                command=_torchrun("trl_sft.py", "--packing", "--samples", "192", *_SAVED),
                options=("--steps", "4"),
                expected=(
                    STEPS_AT_NAN,
                    replace(
                        _EVEN_BATCHES,
                        because="The packed rows are too few for the last batch of two ranks: "
                        + _EVEN_BATCHES.because.partition(". ")[2],
                    ),
                    *_PACKED,
                ),
            ),
            _of_tokens("trl_sft.py", "--samples", "192"),
            _of_tokens("trl_sft.py", "--samples", "192", "--packing", what="packed"),
        ),
    ),
)
