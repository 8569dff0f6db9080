"""GNN: a stack of convolutions over blocks, plain or residual, and exact inference over the whole graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from adahop.block import Block, nothing
from adahop.checks import InputError, between, count, fields, of_kind, one_of, room_for
from adahop.features import Features, SparseFeatures, TableValues, Values, dense, mapped
from adahop.graph import Graph
from adahop.models.full_graph import ChunkedRows, full_batch, in_chunks
from adahop.ops import dropout, ranges
from adahop.seams import NodeBatch
from adahop.storage import MEMORY, Storage
from adahop.sum import ESTIMATORS, PLAIN, Conv, FullSum, Sum, controlled, dial, make_exact, make_variate

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "elu": elu}
State = dict[str, Tensor]  # what a node carries from layer to layer beside h, a row per row of h


class Parts(Protocol):
    """A pass over the graph by several processes: the range of rows of this one, and h of all rows from every one's."""

    rows: tuple[int, int]

    def all_rows(self, h: Tensor) -> Tensor: ...


class GNN(nn.Module):
    """arch="plain": h <- act(conv(h)), the last layer gives the outputs (Kipf).

    arch="residual": z = linear(x), h <- tanh(conv(h) + z), outputs linear(h) (the architecture of the paper's code).
    A model may have more, see `arches`. `activation` (relu, elu or tanh) replaces the default of each.
    `graph` is the normalisation of the graph that the model expects: (kind, self_loops). `edges` is the number of edge
    features that it reads, 0 by default: U e_ij joins the message, or the score where there is attention.
    """

    graph: tuple[str, bool] = ("row", True)
    weights = "fixed"  # where a_ij comes from, see `adahop.methods`
    estimators: tuple[str, ...] = ESTIMATORS  # those that it supports
    typed = False  # whether it is a model of graphs with several node types and relations
    takes_padded = True  # whether its layers take padded blocks
    arches: tuple[str, ...] = ("plain", "residual")
    activation = "relu"  # default of all but arch="residual", which has tanh

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        layers: int = 2,
        arch: str = "residual",
        dropout: float = 0.0,
        activation: str | None = None,
        edges: int = 0,
        **options: Any,
    ):
        super().__init__()
        self.edges = count(edges, 0, "edges")
        self.arch = one_of(arch, self.arches, "arch")
        self.dropout = between(dropout, 0.0, 0.999, "dropout")
        name = activation if activation is not None else ("tanh" if arch == "residual" else self.activation)
        self.activate = ACTIVATIONS[one_of(name, ACTIVATIONS, "activation")]
        inputs, hidden, outputs = (
            count(v, 1, w) for v, w in zip((inputs, hidden, outputs), ("inputs", "hidden", "outputs"), strict=True)
        )
        count(layers, 1, "layers")
        self.memories = nn.ModuleDict()
        self.storage = MEMORY  # of what is held per node
        self.remembers = True  # whether sums use the memories; while False, memories are not changed either
        self.passes = True  # whether passes over the whole graph are made
        self.encoder: nn.Linear | None = None
        self.decoder: nn.Linear | None = None
        if self.wraps():
            self.encoder, self.decoder = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
            widths = [hidden] * (layers + 1)
        else:
            widths = [inputs] + [hidden] * (layers - 1) + [outputs]
        self.widths = widths[:-1]
        pairs = list(pairwise(widths))
        last = len(pairs) - 1
        self.convs = nn.ModuleList(
            self.conv(a, b, not self.wraps() and i == last, **options) for i, (a, b) in enumerate(pairs)
        )

    @classmethod
    def smallest(cls) -> Any:
        """The smallest valid `inputs`, for checks of the other arguments."""
        return 1

    def wraps(self) -> bool:
        """Whether linear layers stand before and after the convolutions."""
        return self.arch != "plain"

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        raise NotImplementedError

    # --- a batch ---------------------------------------------------------------------------------------------------

    def forward(self, batch: NodeBatch) -> Tensor:
        """Outputs for the targets of the last block, from `batch.blocks` and `batch.x` or `batch.features`."""
        return self.decode(self.hidden(fields(batch, ("blocks",), "batch")))

    def hidden(self, batch: NodeBatch, layers: int | None = None) -> Tensor:
        """h of the targets after the first `layers` (all).

        With dropout, the layers below one that `separates_dropout` run a second time without dropout.
        """
        blocks, share = batch.blocks[:layers], self.dropout if self.training else 0.0
        separating = [layer for layer in range(len(blocks)) if share and self.sums(layer).separates_dropout]
        path, mean = Path(self, batch, share), Path(self, batch, 0.0) if separating else None
        for layer, block in enumerate(blocks):
            if mean is not None and layer <= separating[-1]:
                path.at(layer).mean = mean.at(layer)
                if layer < separating[-1]:
                    with self.layers()[layer].only():
                        mean.step(layer, block)
            self.set_recompute(layer, path.at(layer))
            path.step(layer, block)
        return path.h

    def set_recompute(self, layer: int, values: Values) -> Values:
        """Set `recompute` of a layer's values where the layer below can recompute h of any node."""
        stored = self.sums(0).stored_sum if layer == 1 else None
        if stored is not None:
            (values if values.mean is None else values.mean).recompute = partial(self.recompute, stored)
        return values

    def recompute(self, stored: Sum, nodes: Tensor) -> Tensor:
        """h of any nodes after the first layer from its stored sums, without dropout, with gradients."""
        values = Values(cast(Tensor, stored.x)[nodes].float(), self.encoder)
        own = values.rows()
        with self.layers()[0].only():
            return self.step(0, values, own, self.initial_state(own), nothing(nodes), stored)[0]

    def read(self, batch: NodeBatch, share: float) -> Values:
        """The values of the first block's sources, a share of the features dropped."""
        table = getattr(batch, "features", None)
        if table is not None:
            return TableValues(table, batch.blocks[0].n_id, self.encoder, share)
        return Values(batch.x, self.encoder, share)

    def initial_state(self, own: Tensor | None) -> State:
        """The state of the first layer's targets, from their own h."""
        return {"z": own} if self.arch != "plain" and own is not None else {}

    def step(
        self, layer: int, values: Values, own: Tensor | None, state: State, block: Block, estimator: Sum
    ) -> tuple[Tensor, State]:
        """One layer: the targets' new h and state, from their `own` h and state."""
        return self.act(layer, self.convs[layer](values, own, block, estimator), state), state

    def drop(self, h: Tensor) -> Tensor:
        return dropout(h, self.dropout) if self.dropout and self.training else h

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        if self.arch == "residual":
            return self.activate(out + state["z"])
        return out if self.decoder is None and layer == len(self.convs) - 1 else self.activate(out)

    def decode(self, h: Tensor) -> Tensor:
        return h if self.decoder is None else mapped(self.drop(h), self.decoder.weight, self.decoder.bias)

    def first_norms(self, x: Tensor) -> Tensor:
        """|m|^2 of the first layer's messages from rows of x, without coefficients, the mean over heads."""
        conv = self.layers()[0]
        norm = Values(x, self.encoder).norms(conv.kernel() if conv.narrows() else None)
        return norm if norm.dim() == 1 else norm.mean(1)

    def renew(self, table: Features) -> None:
        """Renew the norms that stand for |m|^2 in a first layer that sums a table's raw features without forming m."""
        table.renew(self.first_norms)

    def learn_by_rows(self) -> None:
        """From now on embedding tables, if any, have sparse gradients: see `adahop.step.step_rows`."""

    # --- memory ----------------------------------------------------------------------------------------------------

    def remember(
        self,
        estimator: str,
        graph: Graph,
        x: Tensor | SparseFeatures,
        dtype: torch.dtype = torch.float32,
        noise: float | Sequence[float] = 0.0,
        storage: Storage = MEMORY,
        passes: bool = True,
        on_demand: bool = False,
    ) -> frozenset[int]:
        """Use this estimator from now on; returns the layers for which nothing needs to be drawn.

        `noise` in [0, 1], one for all layers or one each: how much of the sampling noise a control variate leaves in.
        Dropout adds noise of its own to these sums, as large as over all neighbours. What is stored per node, here and
        by passes over the graph, lies in `storage`. Without `passes` over the whole graph, histories start empty, and a
        snapshot stays empty and is of no use. With `on_demand`, the first snapshot is filled row by row as nodes are
        read, where the layer below can recompute h of any node. Its rows then depend on the weights at that moment, so
        several processes would not agree on them.
        """
        self.storage, self.passes = storage, passes
        if estimator != "plain":  # the plain one also runs on a part of a graph
            self.check(graph, x)
        with room_for(f"the memory of estimator '{estimator}'"):
            self.memories = self.make_memories(estimator, self.views(graph), x, dtype, noise)
            if self.sums(1).needs_recompute:
                self.sums(0).store_sums(self.layers()[0], dtype, storage)
            self.memories.to(graph.device)
        if passes and any(m.draws for m in self.memories.values()):
            last = max(int(k) for k, m in self.memories.items() if m.draws)
            if on_demand and last == 1 and self.sums(0).stored_sum is not None and self.sums(1).fill_on_demand():
                return self.known
            self.inference(graph, x, renew="all", until=last)
        return self.known

    def make_memories(
        self,
        estimator: str,
        views: list[Graph],
        x: Tensor | SparseFeatures,
        dtype: torch.dtype,
        noise: float | Sequence[float],
    ) -> nn.ModuleDict:
        """The sums of an estimator's name that store something, by layer."""
        *exact, kind = one_of(estimator, ESTIMATORS, "estimator").split("+")
        levels, memories = dial(noise, len(self.widths)), {}
        if "exact" in (*exact, kind):
            memories["0"] = self.exact(views, x)
        for layer in range(len(memories), len(self.widths)) if controlled(kind) else ():
            of = "history" if kind == "sums" and layer > 1 else kind  # h can be recomputed for layer 1 only
            memories[str(layer)] = self.variate(views, self.widths[layer], of, levels[layer], dtype)
        return nn.ModuleDict(memories)

    @property
    def known(self) -> frozenset[int]:
        """The layers whose sums are known: nothing needs to be drawn for them."""
        return frozenset(int(k) for k, m in self.memories.items() if self.remembers and not m.draws)

    def check(self, graph: Graph, x: Tensor | SparseFeatures, edges: int = 0, parts: Parts | None = None) -> None:
        """Refuse what is not a graph with a row of features for each of its nodes."""
        count(edges, 0, "edges")
        of_kind(graph, Graph, "graph")
        if parts is not None or isinstance(x, SparseFeatures):
            return
        if of_kind(x, Tensor, "x").dim() != 2 or len(x) != graph.num_nodes or not x.is_floating_point():
            raise InputError(f"`x` must be floating-point of shape [{graph.num_nodes}, F], got {tuple(x.shape)}")

    def views(self, graph: Graph) -> list[Graph]:
        """The graph as its memories read it: whole, or the edges of each relation."""
        return [graph]

    def exact(self, views: list[Graph], x: Tensor | SparseFeatures) -> Sum:
        """The first layer's sum over all neighbours."""
        return make_exact(self.layers()[0], views[0], x, self.storage, self.dropout > 0)

    def variate(self, views: list[Graph], width: int, kind: str, noise: float, dtype: torch.dtype) -> Sum:
        """A layer's sum with a memory of its inputs."""
        return make_variate(self.layers()[0], views[0], width, kind, dtype, noise, self.storage, None, self.passes)

    def set_noise(self, noise: float | Sequence[float]) -> None:
        """Set the noise of all control variates: one number for all layers, or one each."""
        for layer, level in enumerate(dial(noise, len(self.convs))):
            memory = self.memory(layer)
            if memory is not None and memory.dial is not None:
                memory.dial.fill_(level)

    def noise(self) -> float | list[float] | None:
        """The noise of the control variates: one number where all agree, else one each; None without any."""
        found = [float(m.dial) for m in self.active_memories() if m.dial is not None]
        return found or None if len(set(found)) != 1 else found[0]

    def facts(self) -> dict[str, float]:
        """What a policy may need to know: `heads`, the number of scores per end of an edge, and their `slope`."""
        return {"heads": 0, "slope": 0.0}

    def layers(self) -> list[Conv]:
        return [cast(Conv, conv) for conv in self.convs]

    def memory(self, layer: int) -> Sum | None:
        used = self.remembers and str(layer) in self.memories
        return cast(Sum, self.memories[str(layer)]) if used else None

    def active_memories(self) -> list[Sum]:
        """The sums that store something; none while memories are not used."""
        return [cast(Sum, m) for m in self.memories.values()] if self.remembers else []

    def sums(self, layer: int) -> Sum:
        """The estimator of a layer's sum."""
        return self.memory(layer) or PLAIN

    # --- exact outputs of some nodes -------------------------------------------------------------------------------

    @torch.no_grad()
    def outputs(self, graph: Graph, x: Tensor | SparseFeatures, nodes: Tensor, rows: int = 1024) -> Tensor:
        """Exact outputs for some nodes, `rows` at a time, each from all its neighbours and all of theirs."""
        was, _ = self.training, self.eval()
        try:
            return torch.cat(
                [self(full_batch(graph, x, some, len(self.convs), self.known)) for some in nodes.split(rows)]
            )
        finally:
            self.train(was)

    # --- the whole graph -------------------------------------------------------------------------------------------

    @torch.no_grad()
    @room_for("a pass over every node")
    def inference(
        self,
        graph: Graph,
        x: Tensor | SparseFeatures,
        edges: int = 0,
        parts: Parts | None = None,
        renew: str = "snapshots",
        until: int | None = None,
    ) -> Tensor:
        """Exact outputs for every node, layer by layer, about `edges` edges (and as many rows) at a time (0: by width).

        The pass also renews snapshots (`renew` "all": histories too), so an evaluation needs no second pass for them.
        With several processes, `parts` has the `rows` of this one and gathers h of all rows before each layer. With
        `until` the pass ends at that layer and returns its inputs.
        """
        self.check(graph, x, edges, parts)
        was, _ = self.training, self.eval()
        try:
            low, high = (0, graph.num_nodes) if parts is None else parts.rows
            most = (1 << 24) // max(32, *(conv.ends_width for conv in self.layers()))  # numbers kept per edge
            cuts = ranges(graph.begin(slice(None)), edges or most, low, high)
            h = self.encoded(x, low, high)
            reencode = self.encoder is not None and x.shape[1] <= self.widths[0]  # per chunk: less to hold than h
            state = {} if reencode else self.initial_state(self.own_rows(h, self.layers()[0]))
            for layer, conv in enumerate(self.layers()):
                h = h if parts is None else parts.all_rows(dense(h))
                memory = self.memory(layer)
                if memory is not None:
                    memory.refresh(h, conv, renew != "all")
                if layer == until:
                    return dense(h)
                straight = not conv.listeners  # who listens is told the messages of all edges
                known = memory.over_graph(graph, conv) if straight and memory is not None else None
                full = known or (FullSum(graph) if straight and FullSum.serves(graph, conv, h) else None)
                raw = layer == 0 and known is not None  # its sums are those of x
                values = Values(x, self.encoder) if raw else Values(h, shared=True)
                out = ChunkedRows(high - low, self.storage)
                changed: dict[str, ChunkedRows] = {}
                for a, b in cuts:
                    given = {k: v[a - low : b - low] for k, v in state.items()}
                    if reencode:
                        given = {**self.initial_state(Values(x[a:b].float(), self.encoder).rows()), **given}
                    own = self.own_rows(h[a:b], conv)
                    nodes = range(a, b)
                    block = graph.in_edges(nodes) if full is None else nothing(torch.arange(a, b, device=graph.device))
                    part, after = self.step(layer, values, own, given, block, full or PLAIN)
                    out.put(a - low, part)
                    for k in (k for k in given if after[k] is not given[k]):
                        changed.setdefault(k, ChunkedRows(high - low, self.storage)).put(a - low, after[k])
                h, state = out.all, {**state, **{k: rows.all for k, rows in changed.items()}}
            return dense(h) if self.decoder is None else in_chunks(h, self.decode, self.storage)
        finally:
            self.train(was)

    def own_rows(self, h: Tensor | SparseFeatures, conv: Conv) -> Tensor | None:
        """The targets' own h as a layer reads it: nothing of sparse features where it does not."""
        return dense(h) if isinstance(h, Tensor) or conv.reads_own else None

    def encoded(self, x: Tensor | SparseFeatures, low: int, high: int) -> Tensor | SparseFeatures:
        """The inputs of the first layer for the nodes low..high."""
        h = x[low:high]
        if self.encoder is None:
            is_float = isinstance(h, SparseFeatures) or h.dtype == torch.float32
            return h if is_float else in_chunks(h, Tensor.float, self.storage)
        return in_chunks(h, lambda part: Values(part.float(), self.encoder).rows(), self.storage)


class Path:
    """A forward pass over a batch: the values of the next layer's sources, and the targets' state."""

    h: Tensor

    def __init__(self, model: GNN, batch: NodeBatch, share: float):
        self.model, self.share = model, share
        self.values = model.read(batch, share)
        reads_own = model.encoder is not None or model.layers()[0].reads_own
        self.own = self.values.rows(batch.blocks[0].num_dst) if reads_own else None
        self.state = model.initial_state(self.own)
        self.here = 0  # the layer that `values` are for

    def at(self, layer: int) -> Values:
        """The values of the layer's sources, a share of them dropped."""
        if self.here < layer:
            self.here, self.values = layer, Values(self.h, share=self.share)
            self.own = self.values.rows()
        return self.values

    def step(self, layer: int, block: Block) -> None:
        values, n = self.at(layer), block.num_dst
        if layer > 0:
            assert self.own is not None
            self.own, self.state = self.own[:n], {k: v[:n] for k, v in self.state.items()}
        self.h, self.state = self.model.step(layer, values, self.own, self.state, block, self.model.sums(layer))
