"""The truth that estimates are held against: each layer's sum over all neighbours, of the exact h below."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop.checks import InputError, node_ids
from adahop.diagnostics.frozen import frozen, heard_by
from adahop.graph import Graph
from adahop.messages import Messages
from adahop.models import GNN
from adahop.ops import segment_sum, spans


class Truth:
    """One pass over the whole graph, memories at rest. `nodes` are kept sorted, each once.

    sums[l] [P, ...]: layer l's exact sum for the nodes, of h for the layers with a memory, else of the messages as the
    layer forms them (W h where it maps first, one W a head). `row` and `pos` are all the nodes' edges: which node, and
    where in the CSR; `true` those to others than the node itself.
    """

    def __init__(self, model: GNN, graph: Graph, x: Tensor, nodes: Any):
        if graph.types is not None and len(graph.relations) > 1:
            many = len(graph.relations)
            raise InputError(f"`graph` must have one relation for its variance to be measured, got {many} of them")
        nodes = node_ids(nodes, graph.num_nodes, "nodes").to(graph.device).unique()
        if nodes.numel() == 0:
            raise InputError("`nodes` must name at least one node, got none")
        self.graph, self.nodes = graph, nodes
        self.row, self.pos = spans(graph.indptr[nodes], graph.indptr[nodes + 1] - graph.indptr[nodes])
        self.src = graph.indices[self.pos].long()
        self.true = self.src != nodes[self.row]
        self.remembered = frozenset(int(layer) for layer in model.memories)
        self.sums: dict[int, Tensor] = {}
        with frozen(model, plain=True), heard_by(model, self._add):
            model.inference(graph, x)

    def _add(self, layer: int, m: Messages) -> None:
        """As the pass over the graph goes by: values are those of all nodes, a chunk's edges those of some."""
        h, block, rows = m.value(layer not in self.remembered), m.block, self.nodes.numel()
        if layer not in self.sums:
            self.sums[layer] = h.new_zeros(rows, *h.shape[1:])
        if block.num_edges == 0 or self.pos.numel() == 0:
            return
        low, high = (int(torch.searchsorted(self.pos, block.pos[i] + (i < 0))) for i in (0, -1))
        coef = m.coef[self.pos[low:high] - block.pos[0]]
        self.sums[layer] += segment_sum(coef.unsqueeze(-1) * h[self.src[low:high]], self.row[low:high], rows)

    def size(self, layer: int) -> float:
        """Mean |mu|^2: what makes a variance small or large."""
        return float(self.sums[layer].flatten(1).double().square().sum(1).mean())
