"""A `to_hetero` script in the style of PyG's examples. It needs pyg-lib or torch-sparse; hetero_after.py does not."""

import os

import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv, to_hetero

import adahop

digits = adahop.load("digits")  # images of 8 x 8 pixels; node types: digits, linked if similar, and their bright pixels
bright = (digits.x > digits.x.mean()).nonzero().t()

data = HeteroData()
data["digit"].x, data["digit"].y = digits.x, digits.y
data["pixel"].x = torch.eye(digits.x.shape[1])
data["digit", "near", "digit"].edge_index = digits.edge_index
data["pixel", "in", "digit"].edge_index = bright.flip(0)
data["digit", "has", "pixel"].edge_index = bright
epochs = int(os.environ.get("EPOCHS", 10))


class SAGE(torch.nn.Module):
    def __init__(self, hidden: int, outputs: int):
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), hidden)
        self.conv2 = SAGEConv((-1, -1), outputs)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        return self.conv2(x, edge_index)


torch.manual_seed(0)
model = to_hetero(SAGE(64, digits.classes), data.metadata())
with torch.no_grad():
    model(data.x_dict, data.edge_index_dict)  # lazy layers get their shapes
loader = NeighborLoader(data, [5, 5], ("digit", digits.train_mask), batch_size=256, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for _epoch in range(epochs):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        seeds = batch["digit"].batch_size
        out = model(batch.x_dict, batch.edge_index_dict)["digit"][:seeds]
        loss = F.cross_entropy(out, batch["digit"].y[:seeds])
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    right = model(data.x_dict, data.edge_index_dict)["digit"].argmax(1) == data["digit"].y
print(f"test accuracy {right[digits.test_mask].float().mean():.3f}")
