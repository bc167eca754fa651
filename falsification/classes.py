"""The classes of bugs that a user's script is tried for, by how the names of the twins begin.

docs/auto.md has the table: of each class at least five broken scripts are tried by `make twins`,
and right ones that look like them. A script may belong to several classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from falsification.twins import Twin

# What explains an error -> beginnings of names, of broken scripts and of right ones.
EXPLAINED: dict[str, tuple[str, ...]] = {
    "gradients of an earlier pass are not cleared": (
        *("BUFFER-ALIAS", "STATE-PROBE", "explained: gradients of a look", "explained: the disc"),
        *("gradients are never cleared", "gradients are zeroed", "explained: a probe of"),
        *("micro-batches that are left", "left: ", "wrapped: the gradient of", "two networks ag"),
    ),
    "a factor on gradients or losses": (
        *("GA-", "EP-SCALE", "the sum over", "a scaled loss", "fed: the", "explained: a "),
        *("explained: the l", "explained: the s", "explained: three", "explained: h", "a sum over"),
        *(
            "public: a sum",
            "unseeded: means",
            "tokens are",
            "own draws: gradients",
            "explained: ad",
        ),
    ),
    "a part is missing, or counts twice": (
        *("AVG-TAIL", "HOOK-PREACC", "1F1B", "GA-DROP", "the last micro-batch", "only the first m"),
        *("a bucket is reduced twice", "the last bucket", "every micro-batch", "explained: rank 0"),
        *("the last sample", "REGATHER", "gradients reduced in buckets", "gradients that a rank"),
    ),
    "clipped in parts, too early, or not at all": (
        *("clip_norm:", "CLIP", "clipped", "each tensor is clipped", "explained: two groups"),
        *("each rank clips", "explained: each", "explained: the parameters", "two networks, each"),
        *("flat parameters: each rank clips", "brief line: clipped", "CLIP-VALUE", "all knobs"),
    ),
    "settings of a different optimizer or group, or one step too many": (
        *("GA-STEP-EACH", "rank 1 of three", "the optimizer steps twice", "rules: ", "SCHED-LOST"),
        *("only the second group's", "the weight decay of", "the critic's weights", "LR-TIMES"),
        *("explained: the learning rate makes up for the sum, and w", "NAN-SKIP", "a cycle of"),
    ),
    "tensors without gradients change": (
        *("declared frozen:", "teacher: ", "public: a teacher", "a teacher in", "adapters are m"),
        *("rules: adapters", "rules: decay by hand", "validated, as it is", "an average that only"),
    ),
    "the order or the random numbers of a different epoch or rank": (
        *("every epoch has", "augmentation", "own draws: all", "fed: an e", "together: an ev"),
        *("own draws: one seed", "own draws: rank 0", "own draws: windows", "own draws: under"),
        *("workers that live on", "every rank drops", "diffusion", "masks: ", "mixup", "masked p"),
    ),
    "a resume that restores too little": (
        *("a resume", "resumed by", "RNG-RESTORE", "CKPT", "BUF-", "GAS-RESUME", "ELASTIC"),
        *("a thread", "names ", "sharded state", "the stream of batches", "buffers: ", "Adam's"),
        *("snapshot.pt", "stopped and", "two optimizers, stopped", "a folder every"),
    ),
    "an average or weights that something else changes": (
        *("an average", "the best weights", "the weights follow", "wrapped: weights", "EMA-SHARD"),
        *("rank 0 edits", "rank 0 goes on", "slow weights", "wrapped: slow", "weights are h"),
    ),
    "ranks that never synchronise, or have diverged": (
        *("the wrapper is bypassed", "DDP-BYPASS", "together: two", "together: each rank sh"),
        *("together: a hybrid", "two trainings", "ranks that draw weights", "unseeded: ranks"),
        *("unseeded: weights", "each rank starts", "unseeded: the wrapper is bypassed"),
    ),
    "masks, noise or coupled samples that hide a bug": ("controlled: ", "explained: noise"),
    "non-finite values that the script itself causes": (
        *("a training that diverges", "NAN-", "INF-ONE", "nan_to_num", "a NaN is clipped"),
        *("together: a root", "a GradScaler", "all ranks skip"),
    ),
}
INFERRED: dict[str, tuple[str, ...]] = {
    "pieces in plain tensors": (
        *("pieces: ", "norms drift", "labels are shifted within", "each piece counts"),
        *("tensor parallelism in", "stages in plain", "sequence parallelism by", "an expert on"),
    ),
    "which ranks share samples, which are replicas": ("samples: ", "SHUFFLE-UNSYNC", "SPLIT-"),
    "tied tensors, precision, and losses that couple samples": (
        *("tied:", "a tied weight", "reduce_dtype:", "what is gathered", "contrast", "balanced"),
        *("the balancing loss", "each rank tells", "the margin", "padding counts", "reduced in"),
    ),
    "two axes of data, four ranks": (
        *("pieces: samples are split along", "pieces: four ranks", "pieces: replicas of two"),
        *("samples: a split by a s", "diffusion on four"),
    ),
    "partitions of an optimizer, flat parameters (ZeRO, FSDP)": (
        *("flat parameters: ", "a flat partition", "an optimizer that red", "a sharded optimizer"),
        *("zero", "ZeRO", "the owner", "the last tensors", "parameters are shared out"),
    ),
}
# What stays as it was if one thing is turned -> the like.
TURNED: dict[str, tuple[str, ...]] = {
    "parameters of a group in a different order": ("orders: ",),
    "the same random numbers for all samples, one order, mirrored ranks": (
        "controlled: ",
        "made: ",
    ),
    "batches of all workers at once, or replayed": ("fed: ", "own draws: "),
    "micro-batches in a different order, an incomplete step": (
        *("left: ", "micro-batches that are left", "a short window", "style: a short last", "1F1B"),
        *("GA-DROP", "HOOK-PREACC", "fed: gradients are scaled", "tokens, as it is"),
    ),
    "a teacher, or frozen layers, in the wrong mode (training or evaluation)": (
        *("teacher: ", "a teacher in", "public: a teacher", "modes: "),
    ),
    "a schedule at the same step": (
        *("LR-TIMES", "the schedule moves", "SCHED-LOST", "resumed by an option, with a sched"),
        *("a resume with the schedule", "a schedule as long as", "public: the length of a sched"),
        *("all knobs", "the schedule of the second"),
    ),
}


def counts(twins: Iterable[Twin]) -> Iterator[tuple[str, str, str, str]]:
    """Yield how each class is decided, the class, and how many broken and right scripts it has."""
    every = [*twins]
    kinds = {"explained": EXPLAINED, "inferred": INFERRED, "turned": TURNED}
    for kind, classes in kinds.items():
        for title, beginnings in classes.items():
            own = [twin for twin in every if twin.name.startswith(beginnings)]
            broken = sum(bool(twin.check) and twin.verdict == "falsified" for twin in own)
            right = sum(not twin.check or twin.verdict == "held" for twin in own)
            yield kind, title, str(broken), str(right)
