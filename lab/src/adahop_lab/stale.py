"""GAS and LMC: baselines that train on parts of the nodes, with old embeddings for neighbours outside of the part.

The cost of a step grows with depth only linearly. Biased by what is old, and GAS by the gradient that would flow
through nodes outside. GAS (Fey et al. 2021) reads h of neighbours outside from a history. LMC (Shi et al. 2023) also
keeps the gradient at every node, and returns to the part's nodes what its neighbours outside would. Here it is the
gradient at a layer's sum, before the activation: what returns is then exact for fixed weights where nothing is old,
although the sums of nodes outside are incomplete; attention's softmax stays approximate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from adahop import run as running
from adahop.block import Block, expand
from adahop.checks import InputError, between, count, one_of
from adahop.config import Config
from adahop.features import Values
from adahop.graph import Graph
from adahop.history import History
from adahop.metrics import criterion
from adahop.models import GNN
from adahop.ops import induced, random
from adahop.run import Result, assemble, stored
from adahop.samplers.partition import partition
from adahop.seams import NodeData
from adahop.train import evaluate

KINDS = ("gas", "lmc")


class NodePart(NamedTuple):
    """Some nodes and their neighbours outside: all edges into the nodes, and those into the neighbours."""

    inner: Block
    outer: Block  # as far as their sources are at hand
    known: Tensor  # the share of its edges that `outer` has, of each neighbour

    @property
    def outside(self) -> Tensor:
        return self.inner.n_id[self.inner.num_dst :]


def part_of(graph: Graph, nodes: Tensor, scratch: Tensor, reverse: Graph | None = None) -> NodePart:
    """Outside are those that the nodes hear from and, with the `reverse` graph, those that hear from them.

    `scratch` [N] int32 holds -1 throughout.
    """
    near = torch.cat([g.in_edges(nodes).src for g in (graph, reverse) if g is not None]).unique()
    outside = near[~torch.isin(near, nodes)]
    n_id = torch.cat([nodes, outside])
    inner, outer = (_edges(graph, n_id, rows, scratch) for rows in (nodes, outside))
    return NodePart(inner, outer, outer.ptr.diff() / graph.indptr.diff()[outside].clamp(min=1))


def _edges(graph: Graph, n_id: Tensor, rows: Tensor, scratch: Tensor) -> Block:
    ptr, pos, src = induced(graph.edges, n_id, rows, scratch)
    one = torch.ones(pos.numel(), device=pos.device)
    weight = one if graph.weight is None else graph.weight[pos]
    edge_index = torch.stack([src, expand(ptr, pos.numel())])
    return Block(n_id, rows.numel(), edge_index, pos, weight, one, one, ptr, pos, target=rows)


class Stale:
    """A model with a history of every layer's input and, for LMC, of the gradient at every layer's sum.

    `beta` in [0, 1]: how much of a new but incomplete h is taken for a neighbour outside, times the share of its own
    neighbours that are at hand (LMC's forward compensation).
    """

    def __init__(self, kind: str, model: GNN, graph: Graph, data: NodeData, beta: float = 0.0):
        self.kind, self.beta = one_of(kind, KINDS, "kind"), between(beta, 0.0, 1.0, "beta")
        if type(model).step is not GNN.step:
            raise InputError(f"`model` must be gcn, sage, gat or gatv2, got {type(model).__name__}")
        self.model, self.graph, self.data = model, graph, data
        ends = torch.stack([graph.dst(), graph.indices.long()])
        self.reverse = Graph.from_edge_index(ends, num_nodes=graph.num_nodes) if kind == "lmc" else None
        self.scratch = torch.full((graph.num_nodes,), -1, dtype=torch.int32, device=graph.device)
        layers = range(1, len(model.convs))
        self.inputs = {layer: self._history(model.widths[layer]) for layer in layers}
        for layer, history in self.inputs.items():
            history.value.copy_(model.inference(graph, data.x, until=layer))
        self.gradients: dict[int, History] = {}  # of the mean loss, at the sum of a layer; 0 before a node was met
        self.still = copy.deepcopy(model)  # the same weights, as constants
        for mine, p in zip(self.still.parameters(), model.parameters(), strict=True):
            mine.data, mine.requires_grad = p.data, False
        self.read = 0  # bytes of features and histories

    def backward(self, nodes: Tensor) -> float:
        """The part's share of the mean loss, and its share of the gradient added to the parameters'."""
        part, model = part_of(self.graph, nodes, self.scratch, self.reverse), self.model
        many, lmc = nodes.numel(), self.kind == "lmc"
        share = model.dropout if model.training else 0.0
        x = self.data.x[part.inner.n_id]
        self.read += x.nbytes
        h = Values(x, model.encoder, share).rows()
        state = {k: v[:many] for k, v in model.initial_state(h).items()}
        beyond = {k: v[many:].detach() for k, v in model.initial_state(h).items()}
        returned = h.new_zeros(())
        sums: list[Tensor] = []
        made: list[Tensor] = []
        for layer, conv in enumerate(model.layers()):
            if lmc:  # what is outside is a constant here: its own part answers for it
                h = torch.cat([h[:many], h[many:].detach()])
            sums.append(conv(Values(h), h[:many], part.inner))
            made.append(model.act(layer, sums[-1], state))
            ahead = self.still.layers()[layer](Values(h), h[many:], part.outer) if lmc else None
            if ahead is not None and layer in self.gradients:
                returned = returned + (self.pull(self.gradients[layer], part) * ahead).sum()
            if layer + 1 < len(model.convs):
                new = None if ahead is None else model.act(layer, ahead.detach(), beyond)
                h = self.filled(layer + 1, made[-1], new, part)
        loss = self.loss(model.decode(made[-1]), nodes)
        for total in sums:
            total.retain_grad()
        (loss + returned).backward()
        for layer, total in enumerate(sums):
            if layer + 1 in self.inputs:
                self.inputs[layer + 1].push(nodes, made[layer])
            if lmc and total.grad is not None:
                self.kept(layer, total.shape[1]).push(nodes, total.grad)
        return float(loss.detach())

    def loss(self, out: Tensor, nodes: Tensor) -> Tensor:
        """Parts' losses add up to the mean over training nodes."""
        weight = self.data.train_mask[nodes].float() / self.data.train_mask.sum()
        return criterion(out, self.data.y[nodes], weight)

    def pull(self, history: History, part: NodePart) -> Tensor:
        """Rows of the nodes outside."""
        old = history.pull(part.outside)
        self.read += old.nbytes
        return old

    def filled(self, layer: int, h: Tensor, new: Tensor | None, part: NodePart) -> Tensor:
        """A layer's input: of the part's nodes as it is, of those outside as it was."""
        old = self.pull(self.inputs[layer], part)
        if self.beta and new is not None:
            old = torch.lerp(old, new, self.beta * part.known.unsqueeze(1))
        return self.model.drop(torch.cat([h, old]))

    def kept(self, layer: int, width: int) -> History:
        if layer not in self.gradients:
            self.gradients[layer] = self._history(width)
        return self.gradients[layer]

    def _history(self, width: int) -> History:
        return History(self.graph.num_nodes, width).to(self.graph.device)


def parts(graph: Graph, many: int, clusters: bool, seed: int) -> Callable[[int], Iterator[Tensor]]:
    """The parts of an epoch by its number: METIS clusters in random order, or random nodes."""
    label = partition(graph.to("cpu"), many).to(graph.device) if clusters else None

    def epoch(number: int) -> Iterator[Tensor]:
        key = random.key(seed, number)
        everyone = torch.arange(graph.num_nodes, device=graph.device)
        if label is None:
            yield from random.shuffled(everyone, key).tensor_split(many)
            return
        for c in random.shuffled(label.unique(), key).tolist():
            yield everyone[label == c]

    return epoch


def fit(
    data: NodeData, config: Config, kind: str, seed: int = 0, clusters: bool = True, beta: float = 0.0
) -> tuple[Result, Stale]:
    """Train as `adahop.fit` does, with as many steps an epoch as `batch_size` asks for; sizes count layers alone."""
    data = stored(data, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        began = running.now()
        model, sampler = assemble(data, config, seed)
        many = max(1, -(-int(data.train_mask.sum()) // count(config.batch_size, 1, "batch_size")))
        trainer = Stale(kind, model, sampler.graph, data, beta)
        deal = parts(sampler.graph, many, clusters, seed)
        adam = torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
        result, trained = Result(seed, 0.0, -1.0, 0, 0, 0, 0.0, model=model), 0.0
        for epoch in range(1, config.epochs + 1):
            model.train()
            at, loss = running.now(), 0.0
            for nodes in deal(epoch):
                loss += trainer.backward(nodes)
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad *= many  # a part stands for all
                adam.step()
                adam.zero_grad(set_to_none=True)
                result.steps += 1
            trained += running.now() - at
            scores = evaluate(model, data, sampler.graph)
            result.epochs = epoch
            if scores["val"] > result.val:
                result.val, result.test, result.best_epoch = scores["val"], scores["test"], epoch
            result.history.append({"epoch": epoch, "loss": loss, **scores, "seconds": trained})
        result.seconds = running.now() - began
        return result, trainer
