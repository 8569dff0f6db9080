"""Regret: how a sampler's variance falls over visits on stars with fixed rewards, beside the theorem's bound."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adahop.block import Block
from adahop.draws import inclusion
from adahop.graph import Graph
from adahop.methods import make
from adahop.samplers import NeighborSampler

MARKS = (0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
STARS, WIDTH, REPEATS, SPREAD = 32, 8, 30, 0.7
CONSTANT = 2 * (1 - 0.4) ** 0.5 / 0.4**2 / (1 - 2 * 0.4)  # 48.4; the paper prints 10, see docs/errata.md


class Stars:
    """Disjoint hubs of `n` neighbours: weights that sum to 1, log-normal norms of at most 1, random directions."""

    def __init__(self, n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        hubs = torch.arange(STARS)
        dst = hubs.repeat_interleave(n)
        a = torch.rand(STARS, n, generator=g) + 0.5
        norm = (SPREAD * torch.randn(STARS, n, generator=g)).exp()
        norm = norm / norm.amax(1, keepdim=True)
        ways = torch.nn.functional.normalize(torch.randn(STARS * n, WIDTH, generator=g), dim=1)
        self.n, self.hubs = n, hubs
        self.a, self.norm = (a / a.sum(1, keepdim=True)).double(), norm.double()
        edges = torch.stack([STARS + torch.arange(STARS * n), dst])
        self.graph = Graph.from_edge_index(edges, self.a.flatten().float(), num_nodes=STARS * (n + 1))
        self.h = torch.cat([torch.zeros(STARS, WIDTH), ways * norm.flatten()[:, None]])
        self.mean = (self.a.flatten()[:, None] * self.h[STARS:].double()).view(STARS, n, WIDTH).sum(1)

    def sampler(self, settings: dict[str, Any], k: int, seed: int) -> NeighborSampler:
        """The policy "oracle" draws in proportion to a |h|, which no other policy knows."""
        options = dict(settings.get("method_options", {}))
        if options.get("policy") == "oracle":
            options |= {"policy": "static", "weight": (self.a * self.norm).flatten().float()}
        made = make(settings["method"], self.graph, [k], seed=seed, **options)
        assert isinstance(made, NeighborSampler), "regret is of one node's own draw"
        return made

    def taken(self, sampler: NeighborSampler, k: int) -> Tensor:
        """[stars, n]: how many times each neighbour comes on average, by the policy's odds and the kind of draw."""
        odds = sampler.policy.odds(0)
        w = torch.ones(STARS * self.n) if odds.edge is None else odds.edge
        w = w.double()
        w = w if odds.node is None else w * odds.node[STARS:].double()
        if sampler.how == "multinomial":
            w = w.view(STARS, self.n)
            return k * ((1 - odds.eta) * w / w.sum(1, keepdim=True) + odds.eta / self.n)
        return self.capped(w, k, odds.eta)

    def capped(self, w: Tensor, k: int, eta: float = 0.0) -> Tensor:
        ptr = torch.arange(0, STARS * self.n + 1, self.n)
        return inclusion(w.flatten().float(), ptr, k, eta).view(STARS, self.n)

    def error(self, sampler: NeighborSampler) -> float:
        """E|estimate - truth|^2 over repeated draws, the mean over the stars."""
        total = 0.0
        for _ in range(REPEATS):
            (block,) = sampler.sample(self.hubs)
            part = (block.weight * block.scale).double()[:, None] * self.h[block.n_id[block.src]].double()
            got = torch.zeros_like(self.mean).index_add_(0, block.dst, part)
            total += float((got - self.mean).square().sum(1).mean())
        return total / REPEATS


def regret(settings: dict[str, Any], more: dict[str, Any], seed: int) -> dict[str, Any]:
    """Variance at marked visits; the mean over visits of the paper's V = sum a |h|^2 / pi, and what the theorem allows.

    `effective` is sum a^2 |h|^2 / pi over its minimum with the same kind of draw: 1 is the oracle.
    """
    n, k, visits = more.get("degree", 50), more.get("draws", 10), more.get("visits", 2000)
    stars = Stars(n, seed)
    sampler = stars.sampler(settings, k, seed)
    best = (stars.a * stars.norm).square() / _best(stars, sampler, k, stars.a * stars.norm)
    rows: list[dict[str, float]] = []
    spent = 0.0
    for t in range(visits + 1):
        taken = stars.taken(sampler, k)
        if t in MARKS or t == visits:
            part = (stars.a * stars.norm).square() / taken
            rows.append({"visits": t, "variance": stars.error(sampler), "effective": float(part.sum() / best.sum())})
        if t == visits:
            break
        spent += float((stars.a * stars.norm.square() / taken).sum(1).mean())
        blocks = sampler.sample(stars.hubs)
        sampler.update(blocks, [_energy(stars, blocks[0])])
    least = float((stars.a * stars.norm.square() / stars.capped(stars.a.sqrt() * stars.norm, k)).sum(1).mean())
    bound = 3 * least + CONSTANT * math.sqrt(n**4 * math.log(n / k) / (visits * k**3))
    return {"rows": rows, "mean": spent / visits, "least": least, "bound": bound}


def _energy(stars: Stars, block: Block) -> Tensor:
    return ((block.weight * block.scale)[:, None] * stars.h[block.n_id[block.src]]).square().sum(1)


def _best(stars: Stars, sampler: NeighborSampler, k: int, w: Tensor) -> Tensor:
    """The visits of the oracle, with replacement or without."""
    return k * w / w.sum(1, keepdim=True) if sampler.how == "multinomial" else stars.capped(w, k)
