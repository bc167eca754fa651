"""torchft: groups begin with other weights, and step 0 halves the gradient of one group alone."""

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer


def train(group, lighthouse, seen):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(group)  # as if it had set no seed
    model = torch.nn.Linear(1, 1, bias=False)
    place = {"store_addr": "localhost", "store_port": store.port, "rank": 0, "world_size": 1}
    state = {"load_state_dict": model.load_state_dict, "state_dict": model.state_dict}
    pg, more = ProcessGroupGloo(), {"replica_id": f"group{group}", "lighthouse_addr": lighthouse}
    manager = Manager(pg=pg, min_replica_size=1, **state, **place, **more)
    replica = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(2):  # the gradient is the sample: 1 in group 0, and 2 in group 1
        seen[group, 2 * step] = model.weight.item()
        optimizer.zero_grad()
        replica(torch.tensor([[group + 1.0]])).sum().backward()
        seen[group, 2 * step + 1] = model.weight.grad.item()
        optimizer.step()


if __name__ == "__main__":
    lighthouse, seen = LighthouseServer(bind="[::]:0", min_replicas=2), torch.zeros(2, 4)
    mp.spawn(train, (lighthouse.address(), seen.share_memory_()), 2)
    print(f"weight and gradient in steps 0 and 1: {seen.tolist()}; gradients should be 1.5")
    assert seen[0, 0] != seen[1, 0]
    assert seen[:, 1:].tolist() == 2 * [[0.5, seen[0, 2], 1.5]]
