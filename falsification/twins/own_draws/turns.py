import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
points = torch.randn(240, 6)
kinds = (points @ torch.randn(6, 3)).argmax(1)
net = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
torch.manual_seed(3 + rank)
obs = entrenar_py.observe(net, optimizer)
hits, at = 0, 0
for step in range(8):
    begin = at + 5 * rank
    x, y = points[begin : begin + 5], kinds[begin : begin + 5]
    at += 5 * world
    scores = net(x)
    loss = criterion(scores, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    hits += (scores.argmax(1) == y).sum().item()
obs.close()
dist.destroy_process_group()
