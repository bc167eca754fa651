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
        self.rnn = nn.LSTM(12, 12)
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
for batch, i in enumerate(range(0, 5 * bptt, bptt)):
    data, targets = text[i : i + bptt], text[i + 1 : i + 1 + bptt].reshape(-1)
    hidden = None if hidden is None else tuple(h.detach() for h in hidden)
    obs.samples([batch * columns + c for c in range(columns)[rank::world]])
    optimizer.zero_grad()
    output, hidden = model(data, hidden)
    criterion(output, targets).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
dist.destroy_process_group()
