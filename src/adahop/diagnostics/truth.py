"""The truth that estimates are compared with: each layer's sum over all neighbours, of the exact h below."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop.checks import InputError
from adahop.diagnostics.frozen import frozen, listening
from adahop.graph import Graph
from adahop.messages import Messages, TypedMessages
from adahop.models import GNN
from adahop.ops import segment_of, segment_sum, spans


class Truth:
    """Exact sums from one pass over the whole graph without memories. `nodes` are sorted and unique.

    sums[l, r] [P, ...]: layer l's exact sum over relation r for the nodes of its target type (all, in a graph of one
    relation), of h for the layers with a memory, else of the messages as the layer forms them (W h where it maps first,
    one W a head). `pos` are the places of all the nodes' edges in the CSR, `relation` theirs, and `true` says which go
    to others than the node itself.
    """

    def __init__(self, model: GNN, graph: Graph, x: Tensor, nodes: Any):
        nodes = graph.ids(nodes, "nodes").to(graph.device).unique()
        if nodes.numel() == 0:
            raise InputError("`nodes` must name at least one node, got none")
        self.graph, self.nodes, t = graph, nodes, graph.types
        row, self.pos = spans(graph.begin(nodes), graph.begin(nodes + 1) - graph.begin(nodes))
        self.true = graph.indices[self.pos].long() != nodes[row]
        kind = torch.zeros_like(nodes) if t is None else t.type_of(nodes)
        many = torch.bincount(kind, minlength=1 if t is None else len(t.nodes)).tolist()
        self.place = torch.full((graph.num_nodes,), -1, device=graph.device)  # among the nodes of its type
        self.relation = torch.zeros_like(self.pos)
        self.first = {0: nodes.numel()}  # how many of the nodes have a sum over a relation: those of its target type
        if t is not None:
            self.relation = t.relation[segment_of(graph.indptr, graph.num_edges)[self.pos]]
            self.first = {r: many[target] for r, (_, target) in enumerate(t.ends) if many[target]}
        for of, n in enumerate(many):
            self.place[nodes[kind == of]] = torch.arange(n, device=graph.device)
        self.with_memory = frozenset(int(layer) for layer in model.memories)
        self.sums: dict[tuple[int, int], Tensor] = {}
        with frozen(model, plain=True), listening(model, self._add):
            model.inference(graph, x)

    def _add(self, layer: int, messages: Messages | TypedMessages) -> None:
        """Called during the pass, chunk by chunk: values are those of all nodes, edges those of the chunk."""
        mapped = layer not in self.with_memory
        for r, m in messages.by_relation():
            if r not in self.first:
                continue
            m = m.per_edge() if mapped else m
            h, row = m.value(mapped), self.place[m.block.targets][m.block.dst]
            mine = (row >= 0).nonzero().flatten()
            if (layer, r) not in self.sums:
                self.sums[layer, r] = h.new_zeros(self.first[r], *h.shape[1:])
            part = m.coef[mine].unsqueeze(-1) * h[m.block.src[mine]]
            self.sums[layer, r] += segment_sum(part, row[mine], self.first[r])

    def size(self, layer: int, relation: int = 0) -> float:
        """Mean |mu|^2, which variances are compared with."""
        return float(self.sums[layer, relation].flatten(1).double().square().sum(1).mean())
