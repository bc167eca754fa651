import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


class Trainer:
    def __init__(self, model, data, optimizer, save_every, snapshot_path):
        self.rank, self.model, self.data = int(os.environ["RANK"]), model, data
        self.optimizer, self.save_every = optimizer, save_every
        self.epochs_run, self.snapshot_path = 0, snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path, weights_only=True)
            model.load_state_dict(snapshot["model"])
            self.epochs_run = snapshot["epochs"]
        self.ddp = DDP(model)
        self.obs = entrenar_py.observe(model, optimizer, sampler=data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.ddp(source), targets)
        self.obs.loss(loss, len(source))
        loss.backward()
        if any(not p.grad.isfinite().all() for p in self.model.parameters()):
            raise RuntimeError("the gradient is not finite")
        self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.data.sampler.set_epoch(epoch)
            for source, targets in self.data:
                self._run_batch(source, targets)
            if self.rank == 0 and epoch % self.save_every == 0:
                state = {"model": self.model.state_dict(), "epochs": epoch + 1}
                torch.save(state, self.snapshot_path)


def main(save_every=1, total_epochs=3, batch_size=8, snapshot_path="snapshot.pt"):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    share = batch_size // dist.get_world_size()
    loader = DataLoader(data, batch_size=share, sampler=DistributedSampler(data))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, loader, optimizer, save_every, snapshot_path)
    trainer.train(total_epochs)
    trainer.obs.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
