"""Which half of sampled attention costs score: GAT with the preset, one half of its second layer exact in training.

    python lab/benchmarks/attention_halves.py GRAPH.npz MODE [--k 5] [--epochs 12] [--estimator exact+sums]

MODE: `both` halves sampled; `backward` alone sampled (sums are exact, gradients flow through drawn edges); `forward`
alone sampled (sums are estimated, gradients flow as through all neighbours); `all`: no sampling. Prints validation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import adahop
from adahop.block import Block
from adahop.features import Values, gather
from adahop.models import GNN
from adahop.samplers.loop import nothing
from adahop.sum import Attention, AttentionVariate

estimated, remember = AttentionVariate.total, GNN.remember


def exact_sum(model: GNN, memory: AttentionVariate, conv: Attention, x: Tensor, block: Block) -> Tensor:
    """The second layer's sum over all neighbours, with gradients; the first layer is exact as it is."""
    nodes = block.targets
    every = memory.graph.in_edges(nodes)
    ids, place = torch.cat([nodes, every.src]).unique(return_inverse=True)
    with model.layers()[0].only():
        h = model.hidden(SimpleNamespace(x=x[ids], blocks=[nothing(ids)]), 1)
    every = every._replace(edge_index=torch.stack([place[nodes.numel() :], every.dst]))
    values = Values(h)
    return gather(h, every, conv.coef(conv.ends(values, h[place[: nodes.numel()]], every), every))


def patch(mode: str, x: Tensor) -> None:
    """From now on training has one half exact."""
    models: list[GNN] = []

    def noted(self: GNN, *args, **options):
        models.append(self)
        return remember(self, *args, **options)

    def total(self, conv, values, own, block):
        mine = estimated(self, conv, values, own, block)
        if not self.training:
            return mine
        true = exact_sum(models[-1], self, conv, x, block)
        return mine + (true - mine).detach() if mode == "backward" else true + (mine - true).detach()

    GNN.remember = noted
    AttentionVariate.total = total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graph")
    parser.add_argument("mode", choices=("both", "backward", "forward", "all"))
    for name, default in (("k", 5), ("epochs", 12), ("hidden", 256), ("lr", 0.002), ("seed", 1),
                          ("heads", 1), ("dropout", 0.0), ("estimator", "exact+history")):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    said = parser.parse_args()
    data = adahop.load(said.graph)
    if said.mode in ("backward", "forward"):
        patch(said.mode, data.x)
    k = -1 if said.mode == "all" else said.k
    if said.mode == "all":
        said.estimator = "plain"
    result = adahop.fit(data, model="gat", sizes=(k, k), hidden=said.hidden, epochs=said.epochs, lr=said.lr,
                        dropout=said.dropout, noise=0.0, seed=said.seed, estimator=said.estimator,
                        method="graphsage" if said.mode == "all" else "adahop",
                        model_options={"heads": said.heads})  # fmt: skip
    kept = {**vars(said), "graph": Path(said.graph).stem, "val": round(result.val, 4)}
    print(json.dumps({**kept, "history": [round(row["val"], 4) for row in result.history]}))


if __name__ == "__main__":
    main()
