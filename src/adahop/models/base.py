"""GNN: a stack of convolutions over blocks, plain or residual, and exact inference over the whole graph."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, elu

from adahop.block import Block
from adahop.checks import InputError, between, count, one_of, room_for
from adahop.features import mapped
from adahop.graph import Graph
from adahop.memory import Memory, build
from adahop.models.conv import Conv
from adahop.models.first import can_sum_first, gathered, sum_first
from adahop.models.whole import Rows, check_whole, full_block, node_chunks

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "elu": elu}
State = dict[str, Tensor]  # what a node carries along beside h; rows follow h's


class GNN(nn.Module):
    """arch="plain": h <- act(conv(h)), the last layer gives the outputs (Kipf).

    arch="residual": z = linear(x), h <- tanh(conv(h) + z), outputs linear(h) (the skeleton of the paper's own code).
    `activation` (relu, elu or tanh) replaces either's own.
    `graph` says how the model wants its graph normalised: (kind, self_loops).
    """

    graph: tuple[str, bool] = ("row", True)
    edge_width = 1  # numbers that a layer keeps for every edge
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
        **options: Any,
    ):
        super().__init__()
        self.arch = one_of(arch, ("plain", "residual"), "arch")
        self.dropout = between(dropout, 0.0, 0.999, "dropout")
        name = activation if activation is not None else ("tanh" if arch == "residual" else self.activation)
        self.bend = ACTIVATIONS[one_of(name, ACTIVATIONS, "activation")]
        inputs, hidden, outputs = (
            count(v, 1, w) for v, w in zip((inputs, hidden, outputs), ("inputs", "hidden", "outputs"), strict=True)
        )
        count(layers, 1, "layers")
        self.memories = nn.ModuleDict()
        self.whole = False  # while the whole graph is passed over, memories rest
        self._passing = True
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

    def wraps(self) -> bool:
        """Whether linear layers stand before and after the convolutions."""
        return self.arch == "residual"

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        raise NotImplementedError

    # --- a batch ---------------------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> Tensor:
        """Outputs for the targets of the last block, from `batch.x` and `batch.blocks`."""
        features, raw = getattr(batch, "features", None), False
        if features is None:
            raw = can_sum_first(self)
            h, state = sum_first(self, batch.x, batch.blocks[0]) if raw else self.encode(gathered(batch.x))
        else:
            raw = self.sums_raw()
            block = batch.blocks[0]
            h, state = self.first(features, block) if raw else self.encode(self.rows(features, block))
        for layer, block in list(enumerate(batch.blocks))[raw:]:
            n = block.num_dst
            h, state = self.step(layer, h, h[:n], {k: v[:n] for k, v in state.items()}, block)
        return self.decode(h)

    def drop(self, h: Tensor) -> Tensor:
        return dropout(h, self.dropout, self.training) if self.dropout else h

    def sums_raw(self) -> bool:
        """Whether the first layer can sum raw features and go on from there: one read of each, nothing kept."""
        conv = cast(Conv, self.convs[0])
        return conv.raw and self.memory(0) is None and conv.tap is None and conv.feedback == "energy" and not self.whole

    def first(self, features: Any, block: Block) -> tuple[Tensor, State]:
        """The first layer from the table of raw features: sum a (E x + b) = E (sum a x) + b sum a."""
        conv = cast(Conv, self.convs[0])
        drop = features.drop(self.dropout) if self.training and self.dropout else None
        own, state = self.embed(self.rows(features, block, block.num_dst, drop), wide=True)
        total = conv.raw_total(features, own, block, self.encoder, drop)
        return self.act(0, conv.combine(total, own), state), state

    def first_norms(self, x: Tensor) -> Tensor:
        """|m|^2 of what rows of x say to the first layer's sum before their coefficients, the mean over heads."""
        said = cast(Conv, self.convs[0]).prepare(self.embed(x)[0])
        value = said[0] if isinstance(said, tuple) else said
        return value.square().flatten(1).sum(1) / (value.shape[1] if value.dim() == 3 else 1)

    def rows(self, features: Any, block: Block, many: int | None = None, drop: Any = None) -> Tensor:
        """The features of a block's first nodes, or nothing where nobody reads them."""
        conv, memory = cast(Conv, self.convs[0]), self.memory(0)
        if self.encoder is None and not conv.asks_own and (many is not None or (memory and not memory.draws)):
            return torch.empty(0, device=block.scale.device)
        x = features.rows(block.n_id[:many], drop)
        return x if many is not None and self.encoder is not None else x[:, : features.value.shape[1]]

    def encode(self, x: Tensor) -> tuple[Tensor, State]:
        return self.embed(self.drop(x))

    def embed(self, x: Tensor, wide: bool = False) -> tuple[Tensor, State]:
        if self.encoder is None:
            return x, {}
        z = mapped(x, self.encoder.weight, self.encoder.bias) if wide else self.encoder(x)
        return z, {"z": z} if self.arch == "residual" else {}

    def step(self, layer: int, h: Tensor, own: Tensor, state: State, block: Block) -> tuple[Tensor, State]:
        """One layer for the targets `own` and what they carry."""
        conv, memory = cast(Conv, self.convs[layer]), self.memory(layer)
        if memory is not None and not self.whole:
            total = memory.total(conv, h, own, block, self.encoder if layer == 0 else None, self.drop)
            if conv.tap is not None:
                conv.tap(total, block, None)  # the sum itself: the memory had a part in it
            if memory.draws:  # else raw sums were dropped as raw features are, before anything was multiplied
                total, own = self.drop(total), self.drop(own)
            return self.act(layer, conv.combine(total, own), state), state
        if layer > 0:
            h = self.drop(h)
            own = h[: block.num_dst] if self.training else own
        return self.act(layer, conv(h, own, block), state), state

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        if self.arch == "residual":
            return self.bend(out + state["z"])
        return out if self.decoder is None and layer == len(self.convs) - 1 else self.bend(out)

    def decode(self, h: Tensor) -> Tensor:
        return h if self.decoder is None else self.decoder(self.drop(h))

    # --- memory ----------------------------------------------------------------------------------------------------

    def remember(self, estimator: str, graph: Graph, x: Tensor, dtype: torch.dtype = torch.float32) -> frozenset[int]:
        """Estimate with a memory from now on; returns the layers for which nothing needs to be drawn.

        Dropout then comes after the sum instead of before it: a dropped input would be noise the memory cannot know.
        """
        if estimator != "plain":  # which needs nothing of the graph, be it whole or a part
            check_whole(graph, x)
        kinds = cast(Conv, self.convs[0]).memories
        if estimator != "plain" and not kinds:
            raise InputError(f"`estimator` must be plain for {type(self).__name__}, got {estimator}")
        heads = getattr(self.convs[0], "heads", 1)
        with room_for(f"the memory of estimator '{estimator}'"):
            self.memories = build(estimator, kinds, graph, x, self.widths, dtype, heads)
        if any(m.draws for m in self.memories.values()):
            self._passing = False
            self.inference(graph, x)
            self._passing = True
        return frozenset(int(k) for k, m in self.memories.items() if not m.draws)

    def layers(self) -> list[Conv]:
        return [cast(Conv, conv) for conv in self.convs]

    def memory(self, layer: int) -> Memory | None:
        return cast(Memory, self.memories[str(layer)]) if str(layer) in self.memories else None

    # --- the whole graph -------------------------------------------------------------------------------------------

    @torch.no_grad()
    @room_for("a pass over every node")
    def inference(self, graph: Graph, x: Tensor, edges: int = 0, parts: Any = None) -> Tensor:
        """Exact outputs for every node, layer by layer, about `edges` edges (and as many rows) at a time (0: by width).

        Snapshots are taken on the way: the pass that evaluates a model also renews its memory. `parts`, where there are
        several processes, names the `rows` of this one and makes the `whole` h that they need from everyone's.
        """
        if parts is None:
            check_whole(graph, x, edges)
        was, _ = self.training, self.eval()
        self.whole = True
        try:
            low, high = (0, graph.num_nodes) if parts is None else parts.rows
            again = x.shape[1] <= self.widths[0]  # what x says is made anew, a piece at a time, instead of being held
            h, state = self._encode_all(x[low:high], not again)
            cuts = node_chunks(graph, edges or (1 << 24) // max(self.edge_width, 32), low, high)
            for layer, conv in enumerate(self.layers()):
                h = h if parts is None else parts.whole(h)
                self._prepare(layer, conv, h)
                out, kept = Rows(high - low), {}  # type: Rows, dict[str, Rows]
                for a, b in cuts:
                    held = {k: v[a - low : b - low] for k, v in state.items()}
                    given = {**(self.encode(x[a:b])[1] if again else {}), **held}
                    part, carried = self.step(layer, h, h[a:b], given, full_block(graph, a, b))
                    out.put(a - low, part)
                    for k in (k for k in given if carried[k] is not given[k]):
                        kept.setdefault(k, Rows(high - low)).put(a - low, carried[k])
                conv.ready = None
                h, state = out.all, {**state, **{k: rows.all for k, rows in kept.items()}}
            if self.decoder is None:
                return h
            outputs, state = Rows(len(h)), {}
            for a in range(0, max(len(h), 1), 1 << 16):
                outputs.put(a, self.decode(h[a : a + (1 << 16)]))
            return outputs.all
        finally:
            self.whole = False
            for conv in self.layers():
                conv.ready = None
            self.train(was)

    def _prepare(self, layer: int, conv: Conv, h: Tensor) -> None:
        """Every node's h is at hand: the memory may have it, and what the sources bring along is made once."""
        memory = self.memory(layer)
        if memory is not None:
            memory.refresh(h, conv, self._passing)
        conv.ready = conv.prepare(h)

    def _encode_all(self, x: Tensor, whole: bool) -> tuple[Tensor, State]:
        """h of everyone, and with `whole` what they carry."""
        if self.encoder is None or len(x) == 0:
            return self.encode(x)
        h = Rows(len(x))
        kept: dict[str, Rows] = {}
        for a in range(0, len(x), 1 << 14):
            part, state = self.encode(x[a : a + (1 << 14)])
            h.put(a, part)
            for k, v in state.items() if whole else ():
                kept.setdefault(k, Rows(len(x))).put(a, v)
        return h.all, {k: rows.all for k, rows in kept.items()}
