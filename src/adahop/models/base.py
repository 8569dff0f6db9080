"""GNN: a stack of convolutions over blocks, plain or residual, and exact inference over the whole graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, elu

from adahop.block import Block, nothing
from adahop.checks import InputError, between, count, of_kind, one_of, room_for
from adahop.features import Features, TableValues, Values, mapped
from adahop.graph import Graph
from adahop.models.whole import Filled, from_all, in_pieces
from adahop.ops import ranges
from adahop.seams import NodeBatch
from adahop.storage import MEMORY, Storage
from adahop.sum import ESTIMATORS, PLAIN, Conv, Sum, build, dial, sum_of_all, sum_with_variate

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "elu": elu}
State = dict[str, Tensor]  # what a node carries along beside h; rows follow h's


class Parts(Protocol):
    """Several processes' pass over the graph: the rows of this one, and h of all rows from those of every process."""

    rows: tuple[int, int]

    def whole(self, h: Tensor) -> Tensor: ...


class GNN(nn.Module):
    """arch="plain": h <- act(conv(h)), the last layer gives the outputs (Kipf).

    arch="residual": z = linear(x), h <- tanh(conv(h) + z), outputs linear(h) (the skeleton of the paper's own code).
    `activation` (relu, elu or tanh) replaces either's own.
    `graph` says how the model wants its graph normalised: (kind, self_loops). `edges` are the features of an edge that
    it reads, none unless told: U e_ij joins the message, or the score where there is attention.
    """

    graph: tuple[str, bool] = ("row", True)
    weights = "fixed"  # how a_ij comes about, see `adahop.methods`
    estimators: tuple[str, ...] = ESTIMATORS  # that it has sums for
    typed = False  # whether it is a model over nodes of several types, with several relations
    pads = True  # whether its layers take padded blocks
    activation = "relu"  # of arch="plain"; the residual skeleton has tanh

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
        self.arch = one_of(arch, ("plain", "residual"), "arch")
        self.dropout = between(dropout, 0.0, 0.999, "dropout")
        name = activation if activation is not None else ("tanh" if arch == "residual" else self.activation)
        self.bend = ACTIVATIONS[one_of(name, ACTIVATIONS, "activation")]
        inputs, hidden, outputs = (
            count(v, 1, w) for v, w in zip((inputs, hidden, outputs), ("inputs", "hidden", "outputs"), strict=True)
        )
        count(layers, 1, "layers")
        self.memories = nn.ModuleDict()
        self.storage = MEMORY  # where what is held per node lies
        self.remembers = True  # whether sums use the memories; while not, memories stay as they are
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
        """Inputs to check the other arguments with."""
        return 1

    def wraps(self) -> bool:
        """Whether linear layers stand before and after the convolutions."""
        return self.arch == "residual"

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        raise NotImplementedError

    # --- a batch ---------------------------------------------------------------------------------------------------

    def forward(self, batch: NodeBatch) -> Tensor:
        """Outputs for the targets of the last block, from `batch.blocks` and `batch.x` or `batch.features`."""
        return self.decode(self.hidden(batch))

    def hidden(self, batch: NodeBatch, layers: int | None = None) -> Tensor:
        """h of the targets after the first `layers` (all).

        Where dropout is on and a layer's memory keeps it apart, the layers below run a second time without it.
        """
        blocks, share = batch.blocks[:layers], self.dropout if self.training else 0.0
        parted = [layer for layer in range(len(blocks)) if share and self.sums(layer).parted]
        path, mean = Path(self, batch, share), Path(self, batch, 0.0) if parted else None
        for layer, block in enumerate(blocks):
            if mean is not None and layer <= parted[-1]:
                path.at(layer).mean = mean.at(layer)
                if layer < parted[-1]:
                    with self.layers()[layer].without_listeners():
                        mean.step(layer, block)
            self.informed(layer, path.at(layer))
            path.step(layer, block)
        return path.h

    def informed(self, layer: int, values: Values) -> Values:
        """A layer's values, which now know h of any node where the first layer below keeps enough for that."""
        again = self.sums(0).again if layer == 1 else None
        if again is not None:
            (values if values.mean is None else values.mean).anew = partial(self.anew, again)
        return values

    def anew(self, again: Sum, nodes: Tensor) -> Tensor:
        """h of any nodes after the first layer, undropped, from the sums that are kept of it; with gradients."""
        values = Values(cast(Tensor, again.x)[nodes].float(), self.encoder)
        own = values.rows()
        with self.layers()[0].without_listeners():
            return self.step(0, values, own, self.carried(own), nothing(nodes), again)[0]

    def read(self, batch: NodeBatch, share: float) -> Values:
        """What the first block's sources bring, a share of the features dropped."""
        table = getattr(batch, "features", None)
        if table is not None:
            return TableValues(table, batch.blocks[0].n_id, self.encoder, share)
        return Values(batch.x, self.encoder, share)

    def carried(self, own: Tensor | None) -> State:
        """What targets of the first layer carry along, from their own h."""
        return {"z": own} if self.arch == "residual" and own is not None else {}

    def step(
        self, layer: int, values: Values, own: Tensor | None, state: State, block: Block, how: Sum
    ) -> tuple[Tensor, State]:
        """One layer for the targets `own` and what they carry."""
        return self.act(layer, self.convs[layer](values, own, block, how), state), state

    def drop(self, h: Tensor) -> Tensor:
        return dropout(h, self.dropout, self.training) if self.dropout else h

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        if self.arch == "residual":
            return self.bend(out + state["z"])
        return out if self.decoder is None and layer == len(self.convs) - 1 else self.bend(out)

    def decode(self, h: Tensor) -> Tensor:
        return h if self.decoder is None else mapped(self.drop(h), self.decoder.weight, self.decoder.bias)

    def first_norms(self, x: Tensor) -> Tensor:
        """|m|^2 of the first layer's messages from rows of x, without coefficients, the mean over heads."""
        conv = self.layers()[0]
        norm = Values(x, self.encoder).norms(conv.kernel() if conv.narrows() else None)
        return norm if norm.dim() == 1 else norm.mean(1)

    def renew(self, table: Features) -> None:
        """Renew the message norms of a first layer that sums raw features of a table and never forms its messages."""
        table.renew(self.first_norms)

    def learn_by_rows(self) -> None:
        """From now on tables of learnt rows, if any, have sparse gradients: see `adahop.step.step_rows`."""

    # --- memory ----------------------------------------------------------------------------------------------------

    def remember(
        self,
        estimator: str,
        graph: Graph,
        x: Tensor,
        dtype: torch.dtype = torch.float32,
        noise: float | Sequence[float] = 0.0,
        storage: Storage = MEMORY,
        passes: bool = True,
        waits: bool = False,
    ) -> frozenset[int]:
        """Estimate with a memory from now on; returns the layers for which nothing needs to be drawn.

        `noise` in [0, 1], one for all layers or one each: how much of the sampling noise a control variate leaves in.
        Dropout is noise of its own in the sums of a memory, as large as over all neighbours. What is remembered, and
        what a pass over the graph makes per node, lies in `storage`. Unless `passes` over the whole graph are made,
        histories begin empty; a snapshot then stays empty, and is of no use. With `waits`, the first snapshot is made
        row by row as nodes are met, where the layer below tells h of any node: by the weights of that moment, so that
        several processes would not agree on it.
        """
        self.storage, self.passes = storage, passes
        if estimator != "plain":  # which needs nothing of the graph, be it whole or a part
            self.check(graph, x)
        with room_for(f"the memory of estimator '{estimator}'"):
            views = self.views(graph)
            self.memories = build(
                estimator, self.widths, noise, lambda: self.exact(views, x),
                lambda width, kind, level: self.variate(views, width, kind, level, dtype),
            )  # fmt: skip
            if self.sums(1).below:
                self.sums(0).keep(self.layers()[0], dtype, storage)
            self.memories.to(graph.device)
        if passes and any(m.draws for m in self.memories.values()):
            last = max(int(k) for k, m in self.memories.items() if m.draws)
            if waits and last == 1 and self.sums(0).again is not None and self.sums(1).wait():
                return self.known
            self.inference(graph, x, renew="all", until=last)
        return self.known

    @property
    def known(self) -> frozenset[int]:
        """The layers whose sums are known: nothing needs to be drawn for them."""
        return frozenset(int(k) for k, m in self.memories.items() if self.remembers and not m.draws)

    def check(self, graph: Graph, x: Tensor, edges: int = 0, parts: Parts | None = None) -> None:
        """A graph, and a row of features for each of its nodes."""
        count(edges, 0, "edges")
        of_kind(graph, Graph, "graph")
        if parts is None and (
            of_kind(x, Tensor, "x").dim() != 2 or len(x) != graph.num_nodes or not x.is_floating_point()
        ):
            raise InputError(f"`x` must be floating-point of shape [{graph.num_nodes}, F], got {tuple(x.shape)}")

    def views(self, graph: Graph) -> list[Graph]:
        """The graph as its memories read it: whole, or the edges of each relation."""
        return [graph]

    def exact(self, views: list[Graph], x: Tensor) -> Sum:
        """The first layer's sum over all neighbours."""
        return sum_of_all(self.layers()[0], views[0], x, self.storage, self.dropout > 0)

    def variate(self, views: list[Graph], width: int, kind: str, noise: float, dtype: torch.dtype) -> Sum:
        """A layer's sum with a memory of its inputs."""
        return sum_with_variate(self.layers()[0], views[0], width, kind, dtype, noise, self.storage, None, self.passes)

    def set_noise(self, noise: float | Sequence[float]) -> None:
        """Turn the dials of all control variates: one number for all layers, or one each."""
        for layer, level in enumerate(dial(noise, len(self.convs))):
            memory = self.memory(layer)
            if memory is not None and memory.dial is not None:
                memory.dial.fill_(level)

    def noise(self) -> float | list[float] | None:
        """Where the dials of the control variates stand: one number where all agree; None without any."""
        found = [float(m.dial) for m in self.sums_kept() if m.dial is not None]
        return found or None if len(set(found)) != 1 else found[0]

    def facts(self) -> dict[str, float]:
        """What a policy may have to know: `heads`, the scores that an end brings to an edge, and their `slope`."""
        return {"heads": 0, "slope": 0.0}

    def layers(self) -> list[Conv]:
        return [cast(Conv, conv) for conv in self.convs]

    def memory(self, layer: int) -> Sum | None:
        kept = self.remembers and str(layer) in self.memories
        return cast(Sum, self.memories[str(layer)]) if kept else None

    def sums_kept(self) -> list[Sum]:
        """The sums that remember something, while memories are used."""
        return [cast(Sum, m) for m in self.memories.values()] if self.remembers else []

    def sums(self, layer: int) -> Sum:
        """How a layer's sum is formed."""
        return self.memory(layer) or PLAIN

    # --- from all neighbours ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def outputs(self, graph: Graph, x: Tensor, nodes: Tensor, rows: int = 1024) -> Tensor:
        """Exact outputs for some nodes, `rows` at a time, each from all its neighbours and all of theirs."""
        was, _ = self.training, self.eval()
        try:
            return torch.cat(
                [self(from_all(graph, x, some, len(self.convs), self.known)) for some in nodes.split(rows)]
            )
        finally:
            self.train(was)

    # --- the whole graph -------------------------------------------------------------------------------------------

    @torch.no_grad()
    @room_for("a pass over every node")
    def inference(
        self,
        graph: Graph,
        x: Tensor,
        edges: int = 0,
        parts: Parts | None = None,
        renew: str = "snapshots",
        until: int | None = None,
    ) -> Tensor:
        """Exact outputs for every node, layer by layer, about `edges` edges (and as many rows) at a time (0: by width).

        Snapshots are taken on the way: the pass that evaluates a model also renews its memory (`renew` "all": histories
        too). `parts`, where there are several processes, names the `rows` of this one and makes the `whole` h that they
        need from everyone's. With `until` the pass ends at that layer and returns its inputs.
        """
        self.check(graph, x, edges, parts)
        was, _ = self.training, self.eval()
        try:
            low, high = (0, graph.num_nodes) if parts is None else parts.rows
            most = (1 << 24) // max(32, *(conv.ends_width for conv in self.layers()))  # numbers kept per edge
            cuts = ranges(graph.begin(slice(None)), edges or most, low, high)
            h = self.embedded(x, low, high)
            again = self.encoder is not None and x.shape[1] <= self.widths[0]  # x is read again: less than h to hold
            state = {} if again else self.carried(h)
            for layer, conv in enumerate(self.layers()):
                h = h if parts is None else parts.whole(h)
                memory = self.memory(layer)
                if memory is not None:
                    memory.refresh(h, conv, renew != "all")
                if layer == until:
                    return h
                values, out = Values(h, shared=True), Filled(high - low, self.storage)
                kept: dict[str, Filled] = {}
                for a, b in cuts:
                    given = {k: v[a - low : b - low] for k, v in state.items()}
                    if again:
                        given = {**self.carried(Values(x[a:b].float(), self.encoder).rows()), **given}
                    part, carried = self.step(layer, values, h[a:b], given, graph.in_edges(range(a, b)), PLAIN)
                    out.put(a - low, part)
                    for k in (k for k in given if carried[k] is not given[k]):
                        kept.setdefault(k, Filled(high - low, self.storage)).put(a - low, carried[k])
                h, state = out.all, {**state, **{k: rows.all for k, rows in kept.items()}}
            return h if self.decoder is None else in_pieces(h, self.decode, self.storage)
        finally:
            self.train(was)

    def embedded(self, x: Tensor, low: int, high: int) -> Tensor:
        """What the nodes low..high bring to the first layer."""
        h = x[low:high]
        if self.encoder is None:
            return h if h.dtype == torch.float32 else in_pieces(h, Tensor.float, self.storage)
        return in_pieces(h, lambda part: Values(part.float(), self.encoder).rows(), self.storage)


class Path:
    """A batch's way through the layers: what the next layer's sources bring, and what nodes carry beside it."""

    h: Tensor

    def __init__(self, model: GNN, batch: NodeBatch, share: float):
        self.model, self.share = model, share
        self.values = model.read(batch, share)
        asked = model.encoder is not None or model.layers()[0].reads_own
        self.own = self.values.rows(batch.blocks[0].num_dst) if asked else None
        self.state = model.carried(self.own)
        self.here = 0  # the layer that `values` are for

    def at(self, layer: int) -> Values:
        """What the layer's sources bring, a share of it dropped."""
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
