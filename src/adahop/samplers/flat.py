"""Blocks of a fixed shape for a GPU: as many slots for every target, sources not numbered anew.

What is drawn is what the other blocks hold, slot by slot; nodes repeat in `n_id`, and as a node's draws depend on the
step and the node alone, its copies draw alike. A shape that chance does not change can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.policies import Policy


class Slots:
    """How a node-wise sampler's blocks are laid out: self-loops first, then one slot a draw."""

    def __init__(self, loops: int):
        self.loops = loops
        self.bare = False  # whether blocks may leave `e_id` out: training does not read it
        self.layouts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, sampler: Any) -> Slots | None:
        """For a sampler with the same fan-out everywhere, on a device whose kernels are there; else None."""
        g = sampler.graph
        if ops.padded.form(g.indptr) != "cuda" or sampler.budget or sampler.how == "poisson" or g.num_edges == 0:
            return None
        if type(sampler.policy).places is not Policy.places:
            return None  # it draws by itself
        if any(k < 0 for layer, k in enumerate(sampler.sizes) if layer not in sampler.skip):
            return None
        many = g.first - g.indptr[:-1]
        loops = int(many.max())
        alike = loops == int(many.min()) or not sampler.policy.rescales
        return cls(loops) if alike and loops <= 8 else None

    def draw(self, sampler: Any, seeds: Tensor) -> list[Block]:
        dst, blocks = seeds, []
        for layer in reversed(range(len(sampler.sizes))):
            block = sampler.nothing(dst) if layer in sampler.skip else self.block(sampler, layer, dst)
            blocks.append(block)
            dst = block.n_id
        return blocks[::-1]

    def block(self, sampler: Any, layer: int, dst: Tensor) -> Block:
        g, k = sampler.graph, sampler.sizes[layer]
        f = ops.padded(
            g.edges, g.rows(dst), dst, k, self.loops, sampler.how, sampler.policy.odds(layer), sampler.stream(layer)
        )
        edge_index, ptr = self.layout(dst, k)
        scale = f.scale
        if sampler.policy.rescales:
            scale = sampler.policy.scaled(dst, ops.Drawn(ptr, f.pos, f.prob, f.scale)).scale * (f.scale > 0)
        e_id = f.pos if g.eid is None or self.bare else g.eid[f.pos]
        return Block(f.n_id, f.rows, edge_index, e_id, f.weight, f.prob, scale, ptr, f.pos, self.loops + k)

    def layout(self, dst: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(edge_index, ptr): a loop's source is its target's own row, a drawn slot's is a row of its own."""
        rows = dst.numel()
        if (rows, k) not in self.layouts:
            row = torch.arange(rows, device=dst.device)
            drawn = rows + torch.arange(rows * k, device=dst.device).view(rows, k)
            src = torch.cat([row[:, None].expand(rows, self.loops), drawn], 1)
            slots = self.loops + k
            edge_index = torch.stack([src.flatten(), row.repeat_interleave(slots)])
            self.layouts[rows, k] = edge_index, torch.arange(rows + 1, device=dst.device) * slots
        return self.layouts[rows, k]
