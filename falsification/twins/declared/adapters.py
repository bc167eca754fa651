import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

class LoRALinear(nn.Module):
    def __init__(self, linear, r=2):
        super().__init__()
        self.linear = linear
        self.lora_A = nn.Parameter(torch.randn(r, linear.in_features) * 0.3)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x):
        return self.linear(x) + x @ self.lora_A.T @ self.lora_B.T

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 6)
        self.up = LoRALinear(nn.Linear(6, 8))
        self.norm = nn.LayerNorm(8)
        self.down = LoRALinear(nn.Linear(8, 1))

    def forward(self, tokens):
        return self.down(self.norm(torch.tanh(self.up(self.embed(tokens).mean(1)))))

class Trainer:
    def __init__(self, model, optimizer, data, rank, world):
        self.model, self.optimizer, self.data = model, optimizer, data
        self.rank, self.world = rank, world
        self.obs = entrenar_py.observe(model, optimizer, frozen=FROZEN)

    def _run_batch(self, ids, epoch):
        mine = ids[self.rank :: self.world]
        self.obs.samples(mine, epoch=epoch)
        tokens, targets = self.data
        error = self.model(tokens[mine]) - targets[mine]
        loss = error.square().sum() / len(ids)
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        if any(not p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None):
            raise SystemExit("a gradient is not finite")
        self.optimizer.step()
        self._after_step()

    def _after_step(self):
        pass

    def train(self, epochs):
        for epoch in range(epochs):
            for start in range(0, 24, 8):
                self._run_batch(list(range(start, start + 8)), epoch)
        self.obs.close()

FROZEN = ("embed", "*.linear.*")

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or "norm" in name)
    tokens = torch.randint(16, (24, 5))
    data = tokens, tokens.float().mean(1, keepdim=True) / 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    Trainer(model, optimizer, data, dist.get_rank(), dist.get_world_size()).train(2)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
