"""Scripts that hand out samples in ways of their own, right ones and ones with a bug.

`make twins` runs all of them.
"""

from __future__ import annotations

from falsification import user_samples_scripts as scripts
from falsification.user_trainers import Twin


def _right(name: str, text: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return Twin(name=name, script="train.py", text=text, changes=changes, **fields)  # type: ignore[arg-type]


def _covered(name: str, text: str, *changes: tuple[str, str]) -> Twin:
    """Return a right script whose samples are all known, so that F-DP-002 holds."""
    return _right(name, text, *changes, check="coverage", verdict="held")


def _open(name: str, text: str, *changes: tuple[str, str], words: str) -> Twin:
    """Return a right script whose samples are not all known."""
    return _right(name, text, *changes, check="coverage", verdict="inconclusive", words=words)


def _broken(name: str, text: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return _right(name, text, *changes, **{"check": "coverage", **fields})


# Right ones. Nothing at all may be found in the first few, which are judged by all checks.
VARIANTS = (
    _right("samples: a class with a split made by one seed", scripts.TRAINER),
    _right("samples: micro-batches are chunks of a batch", scripts.CHUNKED),
    _right("samples: micro-batches are fetched together", scripts.GATHERED),
    _right("samples: a loader that is its own iterator", scripts.OWN_ITERATOR),
    _right("samples: positions, and no epoch is told", scripts.POSITIONS),
    _right("samples: each rank has a slice of the tensors", scripts.SLICED),
    _covered("samples: a split by one seed holds", scripts.TRAINER),
    _covered("samples: each rank has a strided subset", scripts.STRIDED),
    _covered("samples: each rank draws a part of a training set", scripts.DRAWN_SUBSETS),
    _covered("samples: parts of one data set put together", scripts.CONCATENATED),
    _covered("samples: batches of several sizes", scripts.OWN_SAMPLER),
    _covered("samples: a prefetcher one batch ahead", scripts.PREFETCHED),
    _covered("samples: a thread that fetches", scripts.QUEUED),
    _covered("samples: gathered micro-batches hold", scripts.GATHERED),
    _covered("samples: chunks hold", scripts.CHUNKED),
    _covered("samples: an evaluation on the training loader", scripts.MEASURED),
    _covered("samples: the script drops a short batch", scripts.SKIPPED),
    _covered("samples: an endless stream, converted", scripts.ENDLESS),
    _covered("samples: told by the script and by the loader", scripts.BOTH_TOLD),
    _covered("samples: an own iterator holds", scripts.OWN_ITERATOR),
    _covered("samples: epochs follow from the positions", scripts.POSITIONS),
    _covered(
        "samples: positions that are drawn with replacement",
        scripts.POSITIONS,
        ("obs.samples(mine)", "obs.samples(mine, replacement=True)"),
        (
            'torch.randperm(N, generator=state["g"]).tolist()',
            'torch.randint(N, (N,), generator=state["g"]).tolist()',
        ),
    ),
    _open(
        "samples: copies of batches that were fetched ahead",
        scripts.AHEAD_IN_COPIES,
        words="the loader had fetched several batches",
    ),
    _open(
        "samples: a rest is dropped in a loop of positions",
        scripts.POSITIONS,
        ("N, B, steps = 20, 5, 11", "N, B, steps = 23, 5, 11"),
        words="obs.samples(ids, epoch=...)",
    ),
    _open(
        "samples: slices of tensors have numbers of their own",
        scripts.SLICED,
        words="has other contents on rank 1 than on rank 0",
    ),
)

BUGS = (
    _broken(
        "samples: a split by a seed of each rank",
        scripts.TRAINER,
        ("manual_seed(5)", "manual_seed(5 + int(os.environ['RANK']))"),
        step=-1,
        rank=1,
        words="trains on other samples than rank 0",
    ),
    _broken(
        "samples: a split without a seed, after each rank has seeded itself",
        scripts.TRAINER,
        ("torch.manual_seed(11)", "torch.manual_seed(11 + int(os.environ['RANK']))"),
        (", generator=seed", ""),
        step=-1,
        rank=1,
        words="trains on other samples than rank 0",
    ),
    _broken(
        "samples: a split by a seed of each rank, in four ranks",
        scripts.TRAINER,
        ("manual_seed(5)", "manual_seed(5 + (int(os.environ['RANK']) == 2))"),
        world_size=4,
        step=-1,
        rank=2,
        words="trains on other samples than rank 0",
    ),
    _broken(
        "samples: parts that overlap by one",
        scripts.STRIDED,
        ("range(me, len(whole), world)", "range(me * 12 - me, me * 12 + 12)[: 24 // world]"),
        step=-1,
        rank=1,
        words="1 samples are in the data of both",
    ),
    _broken(
        "samples: no part, all ranks draw everything",
        scripts.STRIDED,
        ("Subset(whole, range(me, len(whole), world))", "whole"),
        ("torch.manual_seed(100 + epoch)", "torch.manual_seed(100 + epoch + me)"),
        step=1,
        rank=1,
        words="drawn again",
    ),
    _broken(
        "samples: the training set is shuffled by each rank",
        scripts.DRAWN_SUBSETS,
        ("manual_seed(1)", "manual_seed(1 + me)"),
        step=-1,
        rank=1,
        words="trains on other samples than rank 0",
    ),
    _broken(
        "samples: every rank has all tensors",
        scripts.SLICED,
        ("x[me::world], y[me::world]", "x, y"),
        ("torch.manual_seed(100 + epoch)", "torch.manual_seed(100 + epoch + me)"),
        step=1,
        rank=1,
        words="drawn again",
    ),
    _broken(
        "samples: a bucket is padded",
        scripts.OWN_SAMPLER,
        ("[me::world]", "[me::world] + order[at:at + 1]"),
        step=0,
        words="drawn again",
    ),
    _broken(
        "samples: a prefetcher loses the last batch",
        scripts.PREFETCHED,
        ("while batch is not None:", "while prefetcher.next_batch is not None:"),
        step=1,
        words="epoch 0 ended without samples",
    ),
    _broken(
        "samples: the queue is read twice",
        scripts.QUEUED,
        (
            "        return item\n",
            "        self.queue.get() if item['t'][0] > 5 else 0\n        return item\n",
        ),
        words="epoch 0 ended without samples",
    ),
    _broken(
        "samples: the first of the gathered micro-batches is used twice",
        scripts.GATHERED,
        ("backward(micro, ", "backward(group[0], "),
        words="epoch 0 ended without samples",
    ),
    _broken(
        "samples: a chunk is left out",
        scripts.CHUNKED,
        ('big["t"].chunk(2), big["y"].chunk(2)', 'big["t"].chunk(2)[:1], big["y"].chunk(2)[:1]'),
        words="epoch 0 ended without samples",
    ),
    _broken(
        "samples: the evaluation takes batches from the training's iterator",
        scripts.MEASURED,
        ("for batch in loader:", "for batch in itertools.islice(stream, 1):"),
        step=1,
        words="epoch 0 ended without samples",
    ),
    _broken(
        "samples: every third batch is skipped",
        scripts.SKIPPED,
        ('len(batch["t"]) < BATCH // W', "i % 3 == 1"),
        words="epoch 0 ended without samples",
    ),
    _broken(
        "samples: a stream goes on in the middle",
        scripts.ENDLESS,
        ("yield from loader", "yield from itertools.islice(loader, 1, None)"),
        ("v.double().float()", "v"),
        words="epoch 0 ended without samples",
    ),
    _broken(
        "samples: told and padded",
        scripts.BOTH_TOLD,
        ("SIZE, BATCH = 24, 8", "SIZE, BATCH = 23, 8"),
        step=2,
        rank=1,
        words="drawn again",
    ),
    _broken(
        "samples: ranks overlap within an untold epoch",
        scripts.POSITIONS,
        ("ix[ddp_rank::ddp_world]", "ix[ddp_rank:ddp_rank + 3]"),
        step=0,
        rank=1,
        words="drawn again",
    ),
    _broken(
        "samples: ranks shuffle differently, and no epoch is told",
        scripts.POSITIONS,
        ("manual_seed(0)", "manual_seed(ddp_rank)"),
        rank=1,
        words="drawn again",
    ),
    _broken(
        "samples: an own iterator gives every rank the same",
        scripts.OWN_ITERATOR,
        ("[self.rank::self.world]", ""),
        step=0,
        rank=1,
        words="drawn again",
    ),
)
