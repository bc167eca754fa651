"""torch's DistributedSampler, as picotron makes it, draws a sample again at the end of an epoch."""

from torch.utils.data import DistributedSampler

blocks = range(263)  # that the stories make: an odd number
drawn = []
for rank in range(2):  # as in picotron/data.py
    drawn += DistributedSampler(blocks, num_replicas=2, rank=rank, shuffle=False)
again = sorted({one for one in drawn if drawn.count(one) > 1})
assert again == [0], again
print(f"seen: of {len(blocks)} samples {len(drawn)} are drawn in an epoch, {again} twice")
