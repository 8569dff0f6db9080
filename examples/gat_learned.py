"""PyG's GAT, from whose attention the sampler learns: `feedback` around each step, and a CSV log."""

import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT

import adahop
from adahop.pyg import AdaptiveNeighborLoader, CSVLog, scale_messages, stats

data = adahop.load(sys.argv[1] if len(sys.argv) > 1 else "digits")
epochs = int(os.environ.get("EPOCHS", 10))

torch.manual_seed(0)
model = scale_messages(GAT(data.x.shape[1], 64, num_layers=2, out_channels=data.classes, heads=4, dropout=0.3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
loader = AdaptiveNeighborLoader(data, [4, 4], data.train_mask, batch_size=256, shuffle=True, prefetch=1)
log = CSVLog(os.path.join(tempfile.mkdtemp(), "gat.csv"))

step = 0
for epoch in range(1, epochs + 1):
    model.train()
    for batch in loader:
        with loader.feedback(model, batch):  # records the messages; the sampler learns when the block ends
            out = model(batch.x, batch.edge_index, edge_weight=batch.edge_weight)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log(step, loss=loss.item(), **stats(batch))
    right = adahop.inference(model, data).argmax(1) == data.y  # all neighbours, layer by layer
    print(f"epoch {epoch} validation accuracy {right[data.val_mask].float().mean():.3f}")
print(f"test accuracy {right[data.test_mask].float().mean():.3f}; the log is {log.path}")
