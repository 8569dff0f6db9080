"""The backward half: gradients flow through drawn edges alone. Two unbiased remedies, measured beside the plain form.

    python lab/benchmarks/backward.py GRAPH.npz ... [--k 2] [--epochs 10] [--seeds 3] [--out FILE]

Both use the last pass over the graph, at the parameters t' of that moment, with the same draw (residual GCN, exact
first layer, snapshot in the second, uniform systematic draws, no dropout):
  svrg    grad f_B(t) - grad f_B(t') + grad F(t')
  stored  to a source of the second layer return the sum over S of a scale (g_i - G_i), G the gradient at the sums of
          t', and the whole sum of a G through as many nodes as the batch has, drawn uniformly from all
Rows: E|g - grad F|^2 / |grad F|^2 over batches and draws, at some steps after the pass (`all` has every neighbour: what
is left is the batch's noise); `bias` is |mean of g - grad F|^2 over what its noise explains, 1 on average if there is
none; `seconds` of the processor a step. Then validation scores of training with each, all forms with the same rates.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import adahop
from adahop.config import Config
from adahop.datasets.base import Dataset
from adahop.features import Values, gather
from adahop.metrics import criterion
from adahop.run import Run
from adahop.samplers import NeighborSampler
from adahop.samplers.loop import nothing
from adahop.train import evaluate
from adahop_lab.rows import add_row

RATES = (0.003, 0.01)
REPEATS = 100
Grads = list[Tensor]


class Halves:
    """A two-layer residual GCN, and its gradient in several forms."""

    def __init__(self, run: Run):
        self.run, self.model, self.data = run, run.model, run.data
        self.graph = run.sampler.graph
        self.every = NeighborSampler(self.graph, [-1, -1])
        self.train = self.data.train_mask.nonzero().flatten()
        self.then = copy.deepcopy(list(self.model.parameters()))
        self.whole: Grads = []
        self.at_sums = torch.zeros(self.graph.num_nodes, self.model.widths[1])  # G: of a training node's own loss
        self.to_sources = torch.zeros_like(self.at_sums)  # sum over targets of a G
        self.seed = torch.Generator().manual_seed(0)

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def anchor(self) -> None:
        """The pass over the graph: snapshot, t', grad F(t'), and G."""
        self.model.inference(self.graph, self.data.x)
        for kept, p in zip(self.then, self.parameters, strict=True):
            kept.data.copy_(p.data)
        self.whole = self.exact(self.train)
        h = self.model.inference(self.graph, self.data.x, until=1)
        edges = self.graph.in_edges(self.train)
        total = gather(h, edges, edges.weight).requires_grad_()
        with torch.enable_grad():
            out = self.top(total, self.carried(self.train))
            loss = criterion(out, self.data.y[self.train]) * self.train.numel()
        (grad,) = torch.autograd.grad(loss, total)
        self.at_sums[self.train] = grad
        self.to_sources.zero_().index_add_(0, edges.src, edges.weight.unsqueeze(1) * grad[edges.dst])

    def carried(self, nodes: Tensor) -> Tensor:
        return Values(self.data.x[nodes], self.model.encoder).rows()

    def top(self, total: Tensor, z: Tensor) -> Tensor:
        """Outputs from the second layer's sums."""
        conv = self.model.layers()[1]
        return self.model.decode(self.model.act(1, total @ conv.kernel().t() + conv.rest(None), {"z": z}))

    def first(self, nodes: Tensor) -> Tensor:
        """h after the first layer, which is exact."""
        return self.model.hidden(SimpleNamespace(x=self.data.x[nodes], blocks=[nothing(nodes)]), 1)

    def gradient(self, loss: Tensor) -> Grads:
        return list(torch.autograd.grad(loss, self.parameters))

    # --- the forms ---------------------------------------------------------------------------------------------------

    def loss(self, blocks: list[Any], nodes: Tensor) -> Tensor:
        batch = SimpleNamespace(x=self.data.x[blocks[0].n_id], blocks=blocks)
        return criterion(self.model(batch), self.data.y[nodes])

    def exact(self, nodes: Tensor) -> Grads:
        kept, self.model.memories = self.model.memories, torch.nn.ModuleDict()
        try:
            return self.gradient(self.loss(self.every.sample(nodes), nodes))
        finally:
            self.model.memories = kept

    def plain(self, nodes: Tensor) -> Grads:
        return self.gradient(self.loss(self.run.sampler.sample(nodes), nodes))

    def svrg(self, nodes: Tensor) -> Grads:
        blocks = self.run.sampler.sample(nodes)
        new = self.gradient(self.loss(blocks, nodes))
        self.swap()
        old = self.gradient(self.loss(blocks, nodes))
        self.swap()
        return [a - b + c for a, b, c in zip(new, old, self.whole, strict=True)]

    def swap(self) -> None:
        for kept, p in zip(self.then, self.parameters, strict=True):
            kept.data, p.data = p.data, kept.data

    def stored(self, nodes: Tensor) -> Grads:
        blocks = self.run.sampler.sample(nodes)
        low, high = blocks
        h = self.model.hidden(SimpleNamespace(x=self.data.x[low.n_id], blocks=[low]), 1)
        how = self.model.sums(1)
        conv = self.model.layers()[1]
        total = how.total(conv, Values(h), h[: high.num_dst], high)
        loss = criterion(self.top(total, self.carried(nodes)), self.data.y[nodes])
        less = gather(h, high, high.weight * high.scale) * self.at_sums[nodes]
        some = torch.randint(self.graph.num_nodes, (nodes.numel(),), generator=self.seed)
        more = (self.first(some) * self.to_sources[some]).sum() * (self.graph.num_nodes / some.numel())
        return self.gradient(loss - less.sum() / nodes.numel() + more / self.train.numel())

    @property
    def forms(self) -> dict[str, Callable[[Tensor], Grads]]:
        return {"all": self.exact, "plain": self.plain, "svrg": self.svrg, "stored": self.stored}


def flat(grads: Grads) -> Tensor:
    return torch.cat([g.flatten() for g in grads]).double()


def begun(data: Dataset, k: int, rate: float, epochs: int, seed: int) -> tuple[Halves, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = Config(sizes=(k, k), hidden=64, epochs=epochs, lr=rate, dropout=0.0, noise=0.0,
                    method_options={"policy": "uniform"})  # fmt: skip
    halves = Halves(Run(data, config, seed))
    halves.model.train()
    return halves, torch.optim.Adam(halves.parameters, lr=rate)


def step(halves: Halves, adam: torch.optim.Optimizer, form: str, nodes: Tensor) -> None:
    for p, g in zip(halves.parameters, halves.forms[form](nodes), strict=True):
        p.grad = g
    adam.step()


def epoch(halves: Halves, adam: torch.optim.Optimizer, form: str) -> None:
    halves.anchor()
    for nodes in halves.run.sampler.epoch(halves.train, halves.run.config.batch_size):
        step(halves, adam, form, nodes)


def variances(data: Dataset, k: int, epochs: int) -> list[dict[str, Any]]:
    """After some epochs of plain training: 1, 8 and all steps after the pass."""
    halves, adam = begun(data, k, RATES[-1], epochs, 0)
    for _ in range(epochs):
        epoch(halves, adam, "plain")
    halves.anchor()
    rows, taken = [], 0
    batches = list(halves.run.sampler.epoch(halves.train, halves.run.config.batch_size))
    for mark in sorted({1, min(8, len(batches)), len(batches)}):
        for nodes in batches[taken:mark]:
            step(halves, adam, "plain", nodes)
        taken = mark
        truth = flat(halves.exact(halves.train))
        for form, grads in halves.forms.items():
            began, dev = time.process_time(), []
            for _ in range(REPEATS):
                nodes = halves.train[torch.randperm(halves.train.numel(), generator=halves.seed)[:256]]
                dev.append(flat(grads(nodes)) - truth)
            spent = (time.process_time() - began) / REPEATS
            got = torch.stack(dev)
            noise = got.var(0).sum() / REPEATS
            rows.append({
                "steps": mark, "form": form, "variance": float(got.square().sum(1).mean() / truth.square().sum()),
                "bias": float(got.mean(0).square().sum() / noise), "seconds": spent,
            })  # fmt: skip
    return rows


def scores(data: Dataset, k: int, epochs: int, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for form in ("all", "plain", "svrg", "stored"):
        tried = {}
        for rate in RATES:
            vals = []
            for seed in range(seeds):
                halves, adam = begun(data, k, rate, epochs, seed)
                best = 0.0
                for _ in range(epochs):
                    epoch(halves, adam, form)
                    best = max(best, evaluate(halves.model, data, halves.graph)["val"])
                vals.append(best)
            tried[rate] = vals
        rate = max(tried, key=lambda r: statistics.fmean(tried[r]))
        spread = statistics.stdev(tried[rate]) if seeds > 1 else None
        rows.append({"form": form, "rate": rate, "val": statistics.fmean(tried[rate]), "deviation": spread})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", nargs="+")
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/backward.jsonl")
    said = parser.parse_args()
    for name in said.graphs:
        data = adahop.load(name)
        row = {"graph": Path(name).stem, "k": said.k, "epochs": said.epochs, "seeds": said.seeds}
        row["variance"] = variances(data, said.k, said.epochs)
        print(json.dumps(row), flush=True)
        row["scores"] = scores(data, said.k, said.epochs, said.seeds) if said.seeds else []
        add_row(said.out, row)
        print(json.dumps(row["scores"]), flush=True)


if __name__ == "__main__":
    main()
