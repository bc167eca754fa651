import torch
import torch.distributed as dist
import torch.nn as nn

import entrenar_py

ntokens, bptt, columns = 21, 9, 4
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, 12)
        self.rnn = nn.LSTM(12, 12, num_layers=2, dropout=0.2)
        self.decoder = nn.Linear(12, ntokens)

    def forward(self, source, hidden):
        output, hidden = self.rnn(self.encoder(source), hidden)
        return nn.functional.log_softmax(self.decoder(output).view(-1, ntokens), dim=1), hidden


torch.manual_seed(1111)
text = torch.randint(0, ntokens, (400 // columns, columns))[:, rank::world].contiguous()
net = RNNModel()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
obs = entrenar_py.observe(model, optimizer)
criterion = nn.NLLLoss()
hidden = None


def evaluate():
    model.eval()
    with torch.no_grad():
        output, _ = net(text[: bptt + 1], None)
        return criterion(output[:-columns], text[1 : bptt + 1].reshape(-1)).item()


columns = text.size(1)
for batch, i in enumerate(range(0, 5 * bptt, bptt)):
    if batch == 3:
        evaluate()
    model.train()
    data, targets = text[i : i + bptt], text[i + 1 : i + 1 + bptt].reshape(-1)
    hidden = None if hidden is None else tuple(h.detach() for h in hidden)
    obs.samples([batch * world + rank])
    optimizer.zero_grad()
    output, hidden = model(data, hidden)
    criterion(output, targets).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
dist.destroy_process_group()
