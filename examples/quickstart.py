"""Train a GCN with a learned sampler: first in one call, then in your own loop."""

import os
import sys

import torch

import adahop
from adahop import Loader, make, models, watch

data = adahop.load(sys.argv[1] if len(sys.argv) > 1 else "digits")
epochs = int(os.environ.get("EPOCHS", 10))

# in one call
result = adahop.fit(data, method="bs", model="gcn", sizes=(10, 10), epochs=epochs)
print(f"fit: test {data.metric} {result.test:.3f} at epoch {result.best_epoch}")

# in your own loop
torch.manual_seed(0)
model = models.make("gcn", data.x.shape[1], 64, data.classes)
graph = data.graph.normalized(*model.graph)  # the weights a_ij and self-loops that a GCN uses
sampler = make("bs", graph, sizes=[10, 10])  # input layer first
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = Loader(data, sampler, data.train_mask, batch_size=256)

for _epoch in range(epochs):
    model.train()
    for batch in loader:
        with watch(model) as energy:  # records one number per message
            out = model(batch)
        torch.nn.functional.cross_entropy(out, batch.y).backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.update(batch.blocks, energy)  # the sampler learns

model.eval()
right = model.inference(graph, data.x).argmax(1) == data.y  # all neighbours: evaluation never samples
print(f"loop: test accuracy {right[data.test_mask].float().mean():.3f}")
