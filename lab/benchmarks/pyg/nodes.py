"""GraphSAGE, GCN or GAT on sampled neighbourhoods, in the style of PyG's examples; pyg_half.py runs it, converted."""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import adahop
from adahop.metrics import criterion, score

parser = argparse.ArgumentParser()
parser.add_argument("--conv", default="sage", choices=("sage", "gcn", "gat"))
parser.add_argument("--dataset", default="digits")
parser.add_argument("--features", default="auto")
parser.add_argument("--metric", default="accuracy")
parser.add_argument("--neighbors", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

data = adahop.load(args.dataset, features=args.features)


class Net(torch.nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        if args.conv == "gat":
            self.conv1, self.conv2 = GATConv(inputs, hidden // 4, heads=4), GATConv(hidden, outputs)
        else:
            conv = {"sage": SAGEConv, "gcn": GCNConv}[args.conv]
            self.conv1, self.conv2 = conv(inputs, hidden), conv(hidden, outputs)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=args.dropout, training=self.training)
        x = self.conv1(x, edge_index)
        x = F.elu(x) if args.conv == "gat" else F.relu(x)
        x = F.dropout(x, p=args.dropout, training=self.training)
        return self.conv2(x, edge_index)


torch.manual_seed(args.seed)
model = Net(data.x.shape[1], args.hidden, data.classes)
loader = NeighborLoader(data, [args.neighbors] * 2, data.train_mask, batch_size=args.batch_size, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

for epoch in range(1, args.epochs + 1):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = criterion(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
    out = adahop.inference(model, data)  # every neighbour
    val, test = (score(args.metric, out[m], data.y[m]) for m in (data.val_mask, data.test_mask))
    print(f"epoch {epoch} loss {loss.item():.4f} val {val:.4f} test {test:.4f}", flush=True)
