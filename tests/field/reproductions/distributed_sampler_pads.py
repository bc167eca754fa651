"""torch's DistributedSampler draws a sample again at the end of an epoch with an odd number."""

from torch.utils.data import DistributedSampler

samples = range(263)  # as picotron's stories make; torch's imagenet example has 1281167
drawn = []
for rank in range(2):
    drawn += DistributedSampler(samples, num_replicas=2, rank=rank, shuffle=False)
again = sorted({one for one in drawn if drawn.count(one) > 1})
assert again == [0], again
print(f"seen: of {len(samples)} samples {len(drawn)} are drawn in an epoch, {again} twice")
