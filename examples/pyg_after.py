"""pyg_before.py with three lines changed: it learns which neighbours matter, and needs no native wheel."""

import os
import sys

import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

import adahop
from adahop.pyg import AdaptiveNeighborLoader

data = adahop.load(sys.argv[1] if len(sys.argv) > 1 else "digits")
epochs = int(os.environ.get("EPOCHS", 10))


class SAGE(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.conv1 = SAGEConv(inputs, hidden)
        self.conv2 = SAGEConv(hidden, outputs)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        return self.conv2(F.dropout(x, p=0.3, training=self.training), edge_index)


torch.manual_seed(0)
model = SAGE(data.x.shape[1], 64, data.classes)
loader = AdaptiveNeighborLoader(data, [5, 5], data.train_mask, batch_size=256, shuffle=True)
loader.learn(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for _epoch in range(epochs):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    right = model(data.x, data.edge_index).argmax(1) == data.y
print(f"test accuracy {right[data.test_mask].float().mean():.3f}")
