"""accelerate's `even_batches` gives the last rank samples a second time in an epoch."""

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler

drawn = []
for rank in range(2):  # as Accelerator.prepare and transformers' Trainer do by default
    batches = BatchSampler(SequentialSampler(range(6)), batch_size=4, drop_last=False)
    shard = BatchSamplerShard(batches, num_processes=2, process_index=rank, even_batches=True)
    drawn.append([sample for batch in shard for sample in batch])
again = sorted(set(drawn[0]).intersection(drawn[1]))
assert again, drawn
print(f"seen: rank 0 draws {drawn[0]}, rank 1 {drawn[1]}: samples {again} are drawn twice")
