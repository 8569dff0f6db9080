"""A table of features reads the same rows on any device; without a GPU by the plain references."""

from __future__ import annotations

import torch

from adahop import Graph
from adahop.features import Features
from adahop.samplers import NeighborSampler


def test_a_table_is_what_it_was_made_from():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    block = NeighborSampler(Graph.from_edge_index([[1, 2, 3, 4], [0, 0, 5, 5]]), [-1]).sample([0, 5])[0]
    coef, v = torch.rand(block.num_edges, 2), torch.randn(3, 5)
    for table in (Features(x, "cpu"), Features(x, "cpu", cache=2, often=torch.arange(6))):
        assert torch.equal(table.rows(block.n_id)[:, :5], x[block.n_id])
        total = torch.zeros(block.num_dst, 2, 5).index_add_(
            0, block.dst, coef[:, :, None] * x[block.n_id][block.src, None]
        )
        assert torch.allclose(table.sum(block, coef)[:, :, :5], total)
        assert torch.allclose(table.dot(block, v), x[block.n_id][block.src] @ v.t(), atol=1e-6)
        energy = coef.square().sum(1) * x.square().sum(1)[block.n_id][block.src]
        assert torch.allclose(table.energies(block, coef), energy)
