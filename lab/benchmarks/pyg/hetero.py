"""GraphSAGE made heterogeneous by `to_hetero`, in the style of PyG's examples; typed_pyg.py runs it, converted."""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv, to_hetero

import adahop
from adahop.metrics import score

parser = argparse.ArgumentParser()
parser.add_argument("--dataset")
parser.add_argument("--neighbors", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

data = adahop.load(args.dataset)
kind, own = data.labelled, data[data.labelled]
for store in data.node_stores:
    store.n_id = torch.arange(store.num_nodes)


class HeteroSAGE(torch.nn.Module):
    def __init__(self, hidden, outputs):
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), hidden)
        self.drop = torch.nn.Dropout(args.dropout)  # `to_hetero` would fix the mode of a function
        self.conv2 = SAGEConv((-1, -1), outputs)

    def forward(self, x, edge_index):
        return self.conv2(self.drop(self.conv1(x, edge_index).relu()), edge_index)


class HeteroNet(torch.nn.Module):
    """Features as they are; types without have a learnt row per node, as a linear layer over one-hot features has."""

    def __init__(self):
        super().__init__()
        bare = [t for t in data.node_types if "x" not in data[t]]
        self.rows = torch.nn.ModuleDict({t: torch.nn.Embedding(data[t].num_nodes, args.hidden) for t in bare})
        for rows in self.rows.values():
            torch.nn.init.uniform_(rows.weight, -(len(rows.weight) ** -0.5), len(rows.weight) ** -0.5)
        self.gnn = to_hetero(HeteroSAGE(args.hidden, data.classes), data.metadata(), aggr="sum")

    def forward(self, batch):
        x = {t: self.rows[t](batch[t].n_id) if t in self.rows else batch[t].x for t in batch.node_types}
        return self.gnn(x, batch.edge_index_dict)[kind]


torch.manual_seed(args.seed)
model = HeteroNet()
with torch.no_grad():
    model(data)  # lazy layers get their shapes
loader = NeighborLoader(data, [args.neighbors] * 2, (kind, own.train_mask), batch_size=args.batch_size, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

for epoch in range(1, args.epochs + 1):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        many = batch[kind].batch_size
        loss = F.cross_entropy(model(batch)[:many], batch[kind].y[:many])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(data)  # every neighbour
    val, test, macro = (
        score(name, out[m], own.y[m])
        for name, m in (("accuracy", own.val_mask), ("accuracy", own.test_mask), ("macro-f1", own.test_mask))
    )
    print(f"epoch {epoch} loss {loss.item():.4f} val {val:.4f} test {test:.4f} macro {macro:.4f}", flush=True)
