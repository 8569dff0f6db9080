"""Your own policy: it sets the odds and learns from energies; the library draws, scales and loads."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import adahop
from adahop.block import Block
from adahop.ops import Odds
from adahop.policies import Policy
from adahop.pyg import AdaptiveNeighborLoader
from adahop.samplers import NeighborSampler


class Largest(Policy):
    """Neighbours in proportion to the largest |h_j| observed so far, mixed with a tenth of uniform sampling."""

    def __init__(self, graph: adahop.Graph, layers: int):
        super().__init__(graph, layers)
        self.register_buffer("largest", torch.ones(layers, graph.num_nodes))  # buffers are saved with the sampler

    def odds(self, layer: int) -> Odds:
        return Odds(node=self.largest[layer], eta=0.1)

    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        size = energy.sqrt() / block.scale  # |h_j|, independent of the odds
        self.largest[layer].scatter_reduce_(0, block.n_id[block.src], size, "amax")


data = adahop.load(sys.argv[1] if len(sys.argv) > 1 else "digits")
epochs = int(os.environ.get("EPOCHS", 10))

torch.manual_seed(0)
model = GraphSAGE(data.x.shape[1], 64, num_layers=2, out_channels=data.classes, dropout=0.3)
sampler = NeighborSampler(data.graph, [5, 5], Largest(data.graph, layers=2), draw="systematic")
loader = AdaptiveNeighborLoader(data, input_nodes=data.train_mask, batch_size=256, shuffle=True, sampler=sampler)
loader.learn(model)  # from now on, whenever the model trains on a batch of this loader
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for _epoch in range(epochs):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        optimizer.step()

right = adahop.inference(model, data).argmax(1) == data.y
print(f"test accuracy {right[data.test_mask].float().mean():.3f}")
