"""Conv and Sum: what a layer computes, and how its sum over all neighbours is estimated.

A `Conv` defines coefficients a_ij, weight W and update. A `Sum` is the estimator of sum a_ij W h_j: from the sample
alone, over all neighbours ("exact", first layer only), or from the sample and a control variate. `ESTIMATORS` are the
combinations by name: "history" and "snapshot" hold an old h of every node, "scores" holds old attention scores for the
normaliser, "sums" recomputes h from sums that an exact first layer of attention stores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, between, one_of
from adahop.features import SparseFeatures, Values, dense, gather, join, mapped
from adahop.graph import Graph, OnGraph
from adahop.history import History, LazyHistory, LazyRows
from adahop.messages import Ends, Messages, TypedMessages, estimate
from adahop.ops import segment_max, segment_sum
from adahop.storage import MEMORY, Storage

ESTIMATORS = (
    "plain",
    "history",
    "snapshot",
    "scores",
    "exact",
    "exact+history",
    "exact+snapshot",
    "exact+scores",
    "exact+sums",
)
ATTENTION = ("self-normalised", "paper", "softmax")
MIN_SHARE = 0.3  # lower bound of a corrected normaliser, as a share of the one from stored scores: keeps it positive

# --- coefficients ----------------------------------------------------------------------------------------------------


def attention(score: Tensor, block: Block, form: str = "self-normalised") -> Tensor:
    """Coefficients a * scale of attention weights a = softmax(score), from the scores [M, H] of the sample alone.

    "self-normalised" (Hajek): e^score scale / sum e^score scale, consistent for any draw.
    "paper": a' = (sum over S of q) softmax over S (Sec. 5.3), with q summing to 1 for every draw, times scale. A
    target's own edge is known exactly, so it joins the normaliser instead of the sample.
    "softmax": over the sample as if it were all neighbours; biased.
    """
    n, row = block.num_dst, block.dst
    if form != "paper":
        return ops.softmax(score, row, n, block.scale if form == "self-normalised" else None)
    raw = (score - segment_max(score.detach(), row, n)[row]).exp()
    scale = block.scale.unsqueeze(-1)
    own = block.is_self() | (block.scale == 0)
    others = raw.masked_fill(own.unsqueeze(-1), 0.0)
    k = segment_sum((~own).to(raw.dtype), row, n)
    q = torch.where(own, torch.zeros_like(block.scale), 1.0 / (k[row] * block.scale).clamp(min=1e-30))
    share = segment_sum(q, row, n).clamp(min=1e-30).unsqueeze(-1)  # estimates the sampled part of the full normaliser
    total = segment_sum(raw - others, row, n) + segment_sum(others, row, n) / share
    return raw * scale / total.clamp(min=1e-30)[row]


def attention_of_ends(ends: Ends, block: Block, slope: float, form: str) -> Tensor:
    """Coefficients of attention whose scores are leaky_relu(s_i + t_j)."""
    if form == "self-normalised":
        return ops.attend(
            ends.s, ends.t, block.src, block.dst, block.ptr, block.scale, slope, block.slots, ends.by_edge
        )
    return attention(leaky_relu(ends.added(block), slope), block, form)


def edge_map(features: int, outputs: int) -> nn.Linear | None:
    """A linear map of edge features; None where edges have none."""
    return nn.Linear(features, outputs, bias=False) if features else None


def checked_features(found: Tensor | None, width: int) -> Tensor:
    """Edge features, after a check that they have the width that a map was made for."""
    if found is None or found.shape[1] != width:
        got = "none" if found is None else found.shape[1]
        raise InputError(f"`graph` must have {width} features per edge, as the model was made for, got {got}")
    return found


def relabelled(first: Tensor, full: Block, scratch: ops.Scratch, nodes: int, fixed: bool) -> tuple[Tensor, Block]:
    """The ids of `first` and of the block's sources, each once, and the block with sources numbered by these ids.

    With `fixed`, the result has a shape that depends on the inputs' shapes alone: unused ids fill the end.
    """
    if fixed:
        ids, src = ops.relabel_within(first, full.src, nodes)
    else:
        ids, src = ops.relabel(first, full.src, scratch.marks(nodes, first.device))
    return ids, full._replace(n_id=ids, edge_index=torch.stack([src, full.dst]), target=full.targets)


# --- the sum ---------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """The estimator of a layer's sum; this class is the plain one, the sum of the sample's messages coef * W h.

    Subclasses hold something of every node and need a smaller sample, or none. Each hands the random part of its
    messages to the layer's listeners, once per forward pass.
    """

    draws = True  # whether the layer's block needs to be drawn
    fixed_shape = True  # whether its work has the same shape at every step, so that a CUDA graph can hold it
    takes_capacity = False  # whether setting `capacity` gives it such a shape
    capacity: int | None = None  # edges to pad all neighbours of a step's targets to; None: no padding
    separates_dropout = False  # whether it reads `values.mean`: what is stored of a node has no dropout in it
    needs_recompute = False  # whether it needs `values.recompute`, and so the first layer to `store_sums`
    row_offset = 0  # the node of its graph's row 0: the graph of one relation has rows for one node type only

    def forward(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        """The sum of a_ij W h_j plus `conv.rest`: [targets, out], or with heads [targets, heads, out].

        `values` are the sources' h, `own` is the targets' h.
        """
        total, messages = self.plain(conv, values, own, block)
        conv.notify(messages)
        return total

    def plain(
        self, conv: Conv, values: Values, own: Tensor | None, block: Block
    ) -> tuple[Tensor, Callable[[], Messages]]:
        """The sum over the edges of a block, from nothing else, and its messages."""
        rest = conv.rest(own)
        ends = conv.ends(values, own, block)
        coef, kernel, features = conv.coef(ends, block), conv.kernel(), conv.message_features(block)
        if features is not None:
            rest = conv.with_edge_sums(rest, segment_sum(coef.unsqueeze(1) * features, block.dst, block.num_dst))
        total = values.sum(block, coef, kernel, rest)
        after = kernel if conv.narrows() or features is not None else None
        return total, lambda: Messages(block, coef, values, after, ends, edge=conv.mapped_features(features))

    def rows(self, block: Block) -> Tensor:
        """The rows of its graph that belong to a block's targets."""
        return block.targets - self.row_offset if self.row_offset else block.targets

    def edges_needed(self, block: Block) -> Tensor:
        """The capacity that a block needs, where `takes_capacity`."""
        raise NotImplementedError

    @property
    def dial(self) -> Tensor | None:
        """The `noise` of a control variate, which may be written; None for other sums."""
        return None

    def for_relation(self, relation: int) -> Sum:
        """The sum of one relation of a typed graph: itself, unless each relation has its own."""
        return self

    @property
    def written_history(self) -> History | None:
        """The history that steps write to, whose rows several processes exchange. Snapshots need no exchange: every
        process makes the same one."""
        return None

    def store_sums(self, conv: Conv, dtype: torch.dtype, storage: Storage) -> None:
        """From now on store of every node what is needed to recompute its h, where that is possible."""

    @property
    def stored_sum(self) -> Sum | None:
        """The sum that recomputes h of any node from what is stored and the raw features `x`; None: not possible."""
        return None

    def fill_on_demand(self) -> bool:
        """Fill the memory row by row as nodes are first read, without a pass; returns whether that is possible."""
        return False

    def refresh(self, h: Tensor | SparseFeatures, conv: Conv, snapshots_only: bool) -> None:
        """Renew what is stored from h of every node; `snapshots_only`: histories stay, as their rows are newer."""

    def over_graph(self, graph: Graph, conv: Conv) -> Sum | None:
        """The sum over all neighbours of every node of this graph, where it is stored since `refresh`; else None."""
        return None

    def flush(self) -> None:
        """Write the rows that the last step left for later."""
        for _, history in self._histories():
            history.flush()

    def cancel(self) -> None:
        """Drop the rows that the last step left for later."""
        for _, history in self._histories():
            history.pending = None

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        self.flush()
        return self._stored()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state; one of version 0.1 has no `noise` and leaves it as it is set."""
        self.flush()
        for name, history in self._histories():
            history.resize(len(state[name]))
        mine = self._stored()
        for name, value in state.items():
            mine[name].copy_(value)

    def _stored(self) -> dict[str, Tensor]:
        return {k: t for name, history in self._histories() for k, t in history.stored(name).items()}

    def _histories(self) -> list[tuple[str, History]]:
        return [(name, m) for name, m in self.named_modules() if isinstance(m, History)]


PLAIN = Sum()


# --- the layer -------------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    """update(sum over j of a_ij W h_j, h_i), with a_ij the graph's own weights.

    `listeners` receive the messages while the layer runs, see `adahop.watch`; without listeners messages cost nothing.
    """

    attends = False  # whether a_ij comes from scores of both ends, see `Attention`
    is_linear = False  # whether it is W times the sum of a_ij h_j, plus `rest`, and nothing else
    reads_own = True  # whether scores or `update` read the target's own h
    ends_width = 1  # numbers that each end of an edge contributes to its score

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[Any], None]] = []  # of Messages, or of TypedMessages
        self.edge: nn.Linear | None = None  # U, where edges have features: a message is then a_ij (W h_j + U e_ij)

    def notify(self, messages: Callable[[], Messages | TypedMessages]) -> None:
        """Make the messages and hand them to the listeners, if there are any."""
        if self.listeners:
            made = messages()
            for listener in self.listeners:
                listener(made)

    @contextlib.contextmanager
    def only(self, *listeners: Callable[[Any], None]) -> Iterator[None]:
        """Inside, these listeners are called, and no others."""
        self.listeners, before = list(listeners), self.listeners
        try:
            yield
        finally:
            self.listeners = before

    def forward(self, h: Tensor | Values, own: Tensor | None, block: Block, estimator: Sum = PLAIN) -> Tensor:
        """The targets' new h from the sources' and the targets' own."""
        values = h if isinstance(h, Values) else Values(h)
        return self.update(estimator(self, values, own, block), own)

    # --- edge features -----------------------------------------------------------------------------------------------

    def features(self, block: Block) -> Tensor | None:
        """[M, D] edge features of a block of one relation; None where the layer reads none."""
        if self.edge is None:
            return None
        return checked_features(None if block.attr is None else block.attr[0], self.edge.in_features)

    def message_features(self, block: Block) -> Tensor | None:
        """The edge features that join the messages."""
        return self.features(block)

    @torch.no_grad()
    def mapped_features(self, features: Tensor | None) -> Tensor | None:
        """U e of every edge."""
        return None if features is None or self.edge is None else self.edge(features)

    def with_edge_sums(self, rest: Tensor | None, sums: Tensor | None) -> Tensor | None:
        """rest + U sums, `sums` being those of a_ij e_ij; just rest where the layer reads no edge features."""
        if self.edge is None:
            return rest
        part = self.edge(checked_features(sums, self.edge.in_features))
        return part if rest is None else rest + part

    # --- what a model writes -----------------------------------------------------------------------------------------

    def kernel(self) -> Tensor:
        """W: [out, in], or with heads [heads, out, in]."""
        raise NotImplementedError

    def rest(self, own: Tensor | None) -> Tensor | None:
        """What is added to the sum: a bias, or a row per target. It is fused into the product with W."""
        return None

    def update(self, total: Tensor, own: Tensor | None) -> Tensor:
        """The targets' new h from the sum of a_ij W h_j plus the rest."""
        return total

    def ends(self, values: Values, own: Tensor | None, block: Block) -> Ends | None:
        """What the two ends of an edge contribute to its attention score; None without attention."""
        return None

    def coef(self, ends: Ends | None, block: Block) -> Tensor:
        """a_ij scale_ij of every edge: [M], or with heads [M, heads]. Horvitz-Thompson for fixed weights."""
        return block.weight * block.scale

    def narrows(self) -> bool:
        """Whether W h is smaller than h: messages are measured on the narrower side, whichever is summed."""
        out, width = self.kernel().shape[-2:]
        return out < width


class Attention(Conv):
    """a_ij = softmax over j of a score of h_i and h_j, to which edge features add U e_ij."""

    attends = True

    def __init__(self, form: str):
        super().__init__()
        self.form = one_of(form, ATTENTION, "attention")

    def target(self, own: Tensor) -> Tensor:
        """s: [targets, ends_width]."""
        raise NotImplementedError

    def source(self, values: Values, block: Block | None = None) -> tuple[Tensor, bool]:
        """t: [sources, ends_width] and False, or [M, ends_width] and True where values are read edge by edge."""
        raise NotImplementedError

    def scores(self, added: Tensor) -> Tensor:
        """[M, heads] of every edge, from s + t."""
        raise NotImplementedError

    def ends(self, values: Values, own: Tensor | None, block: Block) -> Ends:
        assert own is not None
        return Ends(self.target(own), *self.source(values, block))

    def message_features(self, block: Block) -> Tensor | None:
        return None  # they join the scores

    def with_edge_scores(self, ends: Ends, block: Block) -> Ends:
        """The ends, with U e of every edge added to t."""
        features = self.features(block)
        if features is None or self.edge is None:
            return ends
        return Ends(ends.s, ends.over(block)[1] + self.edge(features), by_edge=True)

    def scored(self, ends: Ends, block: Block) -> Tensor:
        """[M, heads] the scores of a block's edges."""
        return self.scores(self.with_edge_scores(ends, block).added(block))

    def coef(self, ends: Ends | None, block: Block) -> Tensor:
        assert ends is not None
        return attention(self.scored(ends, block), block, self.form)


# --- dropout ---------------------------------------------------------------------------------------------------------


def dropout_std(share: float) -> float:
    """The standard deviation of an input of 1 under dropout of this share, which scales up what it keeps."""
    return (share / (1.0 - share)) ** 0.5


def dropout_part(values: Values, block: Block, coef: Tensor) -> Tensor:
    """What dropout adds to the sum without dropout: sum over S of a sqrt(scale) (h - mean h), coef = a * scale.

    An edge is drawn 1 / scale of the time, so the variance is that of dropout over all neighbours (CVD, Chen et al.
    2018). With a * scale it would be `scale` times as large, and no control variate could reduce it.
    """
    assert values.mean is not None
    return gather(values.rows() - values.mean.rows(), block, sqrt_scaled(block, coef))


def sqrt_scaled(block: Block, coef: Tensor) -> Tensor:
    """a sqrt(scale) from a * scale."""
    root = block.scale.clamp(min=1e-30).rsqrt()
    return coef * (root if coef.dim() == 1 else root.unsqueeze(1))


# --- sums over all neighbours ----------------------------------------------------------------------------------------


class FullSum(Sum):
    """Over all neighbours, read straight from the graph, of h of all nodes: for weights that are the graph's own.

    No gradients. `sums` are those of h where they are known.
    """

    draws = False

    def __init__(self, graph: Graph, sums: Tensor | None = None):
        super().__init__()
        self.graph, self.known = graph, sums

    @staticmethod
    def serves(graph: Graph, conv: Conv, h: Tensor | SparseFeatures) -> bool:
        return graph.types is None and not conv.attends and (torch.is_tensor(h) or conv.narrows())

    def forward(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        nodes, kernel = block.targets, conv.kernel()
        rest = conv.with_edge_sums(conv.rest(own), edge_sums(self.graph, nodes))
        if self.known is None and conv.narrows():
            self.graph.prefetch(nodes)
            total = ops.full_sum(values.mapped(kernel), self.graph.edges, nodes)
            return total if rest is None else total + rest
        return mapped(self.sums(values, nodes), kernel, rest)

    def sums(self, values: Values, nodes: Tensor) -> Tensor:
        """Of h, for some nodes."""
        if self.known is not None:
            return self.known.index_select(0, nodes)
        self.graph.prefetch(nodes)
        return ops.full_sum(values.rows(), self.graph.edges, nodes)


# --- exact sums of the first layer -----------------------------------------------------------------------------------


def zero_messages(block: Block, coef: Tensor, total: Callable[[], Tensor]) -> Messages:
    """Messages of size 0, for a sum that is exact: edges that were drawn anyway contribute nothing to it."""
    values, ends = Values(coef.new_zeros(block.num_src, 1)), None
    if coef.dim() == 2:
        ends = Ends(coef.new_zeros(block.num_dst, coef.shape[1]), coef, by_edge=True)
    return Messages(block, coef, values, ends=ends, total=total)


class ExactSum(OnGraph, Sum):
    """The first layer of fixed weights: A x, which never changes. No variance, nothing to draw.

    On the CPU a row is formed when it is first read, so that training starts without a pass over the graph.
    With `drops`, `spread` = sqrt(sum of a^2 x^2) is stored too: dropout of a share p of all inputs changes the sum by a
    standard deviation of spread * sqrt(p / (1 - p)) per entry, and noise of this size is added for it.
    """

    draws = False
    x: Tensor
    sums: Tensor
    weights: Tensor
    spread: Tensor | None

    def __init__(self, graph: Graph, x: Tensor, storage: Storage = MEMORY, drops: bool = False):
        super().__init__()
        check_sources(graph, x)
        self.graph = graph
        lazy, self.on_disk = ops.may_wait(x), ops.in_file(x)
        self.lazy = LazyRows(graph.num_rows, storage, x.device) if lazy else None  # the rows that are formed

        def full(x: Tensor, squared: bool = False) -> Tensor:
            if lazy:
                return storage.sparse(graph.num_rows + 1, x.shape[1])
            sums = full_sums(graph, x, storage, squared=squared)
            return ops.table(sums.sqrt_() if squared else sums, x)

        tables = {"x": x, "sums": full(x), "spread": full(x, squared=True) if drops else None}
        tables["weights"] = full(torch.ones(1, 1, device=x.device).expand(len(x), 1))
        for name, t in tables.items():
            self.register_buffer(name, t, persistent=False)

    @property
    def stored_sum(self) -> Sum | None:
        return None if self.lazy is None else self

    @property
    def left(self) -> int:
        """Rows that are not formed yet."""
        return 0 if self.lazy is None else self.graph.num_rows + 1 - self.lazy.used

    def over_graph(self, graph: Graph, conv: Conv) -> Sum | None:
        """Itself, which then forms what is missing; not where h is narrower than x."""
        return self if graph is self.graph and self.x.shape[1] <= len(conv.kernel()) else None

    def form(self, rows: Tensor) -> None:
        """Form the sums of those rows that were not read before."""
        assert self.lazy is not None
        for some in self.lazy.new(rows).split(1 << 14):
            self.graph.prefetch(some)
            if self.on_disk:
                source = self.graph.sources_of(some)
                ops.ask_for(self.x, source, source + 1)
            sums, weights, square = ops.row_sums(self.x, self.graph.edges, some, self.spread is not None)
            row = self.lazy.add(some)
            self.sums[row], self.weights[row, 0] = sums, weights
            if self.spread is not None:
                self.spread[row] = square.sqrt_()

    def sums_at(self, row: Tensor, share: float) -> Tensor:
        """Some rows of the sums, with the noise that dropout of a share of the inputs adds."""
        sums = ops.table_rows(self.sums, row)
        if not share:
            return sums
        if self.spread is None:
            raise InputError("`dropout` must be set before `remember`, got an exact first layer made without it")
        size = ops.table_rows(self.spread, row)
        return ops.noisy(sums, size, dropout_std(share))

    def moved(self) -> None:
        """On a GPU all rows are formed at once: a captured step cannot form any."""
        if self.left and not ops.may_wait(self.x):
            self.form(torch.arange(self.graph.num_rows, device=self.x.device))

    def forward(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        rest, nodes = conv.rest(own), self.rows(block)
        if self.left:
            self.form(nodes)
        row = nodes if self.lazy is None else self.lazy.row[nodes].long()
        sums = self.sums_at(row, values.share)

        def total(kernel: Tensor | None, rest: Tensor | None = None) -> Tensor:
            kernel, bias = join(kernel, values.encoder)
            out = sums if kernel is None else mapped(sums, kernel, rest)
            return out if bias is None else out + self.weights[row] * bias

        conv.notify(lambda: zero_messages(block, torch.zeros_like(block.scale), lambda: total(None)))
        return total(conv.kernel(), conv.with_edge_sums(rest, edge_sums(self.graph, nodes)))


class AllNeighboursSum(OnGraph, Sum):
    """A sum that reads all neighbours of every target; with a `capacity`, their edges are padded to this number."""

    fixed_shape, takes_capacity = False, True

    def full_block(self, block: Block) -> Block:
        """All in-edges of a block's targets."""
        nodes = self.rows(block)
        return self.graph.in_edges(nodes) if self.capacity is None else self.graph.in_edges_within(nodes, self.capacity)

    def edges_needed(self, block: Block) -> Tensor:
        nodes = self.rows(block)
        return (self.graph.last[nodes] - self.graph.indptr[nodes]).sum()


class ExactAttention(AllNeighboursSum):
    """The first layer of attention over *all* neighbours, from raw features.

    a_ij = softmax of the scores s_i + t_j, t = x (E' v) + e v; then sum a_ij (E x_j + e) = E (sum a_ij x_j) + e.
    Costs O(n F) per target instead of O(k H) but has no variance, forward or backward. After `store_sums`, `kept` holds
    sum a_ij x_j of every node as of the last step that had the node as a target, see `StoredSums`.
    """

    draws = False
    x: Tensor

    def __init__(self, graph: Graph, x: Tensor):
        super().__init__()
        self.graph, self.kept = graph, cast("History | None", None)  # checkpoints have the history under this name
        self.register_buffer("x", x, persistent=False)
        self.scratch = ops.Scratch()

    def forward(self, conv: Attention, values: Values, own: Tensor | None, block: Block) -> Tensor:  # type: ignore[override]
        rest = conv.rest(own)
        if not values.share:  # a step with dropout calls this twice
            self.flush()
        full = self.full_block(block)
        if values.share or full.num_edges < len(self.x):  # gather the rows that are read: all of x may be much more
            ids, full = relabelled(full.src[:0], full, self.scratch, len(self.x), self.capacity is not None)
            sources = Values(self.x[ids].float(), values.encoder, values.share)
        else:
            sources = Values(self.x.float(), values.encoder)
        ends = conv.ends(sources, own, full)
        coef = attention(conv.scored(ends, full), full)
        stores = self.kept is not None and not values.share
        if stores:
            sources = Values(sources.x, sources.encoder)  # sums of x are stored, though scores may have needed h
        sums = sources.summed(full, coef)
        if self.kept is not None and stores and self.training:
            self.kept.push_later(block.targets, sums.detach().flatten(1))  # the layer above still reads the old rows

        def total(kernel: Tensor | None) -> Tensor:
            return self.total(sources, sums, full.ptr.diff() > 0, kernel)

        def messages() -> Messages:
            zero = torch.zeros(block.num_edges, coef.shape[1], device=coef.device)
            return zero_messages(block, zero, lambda: total(None))

        conv.notify(messages)
        out = total(conv.kernel())
        return out if rest is None else out + rest

    def total(self, values: Values, sums: Tensor, has_neighbours: Tensor, kernel: Tensor | None) -> Tensor:
        """W (E sums + e); without e for targets without neighbours, whose weights sum to 0 instead of 1."""
        kernel, bias = values.joined(kernel)
        out = sums if kernel is None else mapped(sums, kernel)
        return out if bias is None else out + has_neighbours.view(-1, *[1] * (out.dim() - 1)) * bias

    def store_sums(self, conv: Conv, dtype: torch.dtype, storage: Storage) -> None:
        kernel = conv.kernel()
        heads = kernel.shape[0] if kernel.dim() == 3 else 1
        self.kept = History(self.graph.num_nodes, heads * self.x.shape[1], dtype, storage)

    @property
    def stored_sum(self) -> StoredSums | None:
        return None if self.kept is None else StoredSums(self)

    @property
    def written_history(self) -> History | None:
        return self.kept

    @torch.no_grad()
    def refresh(self, h: Tensor, conv: Attention, snapshots_only: bool) -> None:  # type: ignore[override]
        """Form the sums of every node at the start; later, steps do."""
        self.flush()
        if self.kept is None or snapshots_only or len(h) != len(self.kept.value):
            return
        values, x = Values(h, shared=True), self.x.float()
        for nodes in torch.arange(len(h), device=h.device).split(1 << 12):
            full = self.graph.in_edges(nodes)
            coef = attention(conv.scored(conv.ends(values, h[nodes], full), full), full, "softmax")
            self.kept.push(nodes, gather(x, full, coef).flatten(1))


class StoredSums(Sum):
    """The first layer's sum of any nodes as stored by `ExactAttention`: sums of raw features, with the present E and W.

    No neighbour is read, so h of many nodes is recomputed at the cost of two products; gradients reach everything that
    the layer learns except its scores.
    """

    draws = False

    def __init__(self, first: ExactAttention):
        super().__init__()
        self.first, self.x = first, first.x

    def forward(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        rest, first, nodes = conv.rest(own), self.first, block.targets
        assert first.kept is not None
        sums = first.kept.pull(nodes).unflatten(1, (-1, first.x.shape[1]))
        has_neighbours = first.graph.last[nodes] > first.graph.indptr[nodes]
        out = first.total(Values(first.x, values.encoder), sums, has_neighbours, conv.kernel())
        return out if rest is None else out + rest


class ReadNeighbours(OnGraph, Sum):
    """The first layer over *all* neighbours, read at every step instead of summed beforehand.

    Costs O(n) rows per target; no variance in forward or backward.
    """

    draws = fixed_shape = False

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph

    def read(self, nodes: Tensor, values: Values) -> Values:
        """The values of some nodes, dropped and encoded as `values` are."""
        raise NotImplementedError

    def forward(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        full = self.graph.in_edges(self.rows(block), compact=True)
        total, messages = self.plain(conv, self.read(full.n_id, values), own, full)

        def drawn() -> Messages:
            sent = messages()
            coef = sent.coef.new_zeros(block.num_edges, *sent.coef.shape[1:])
            return zero_messages(block, coef, lambda: estimate(sent, mapped=False))

        conv.notify(drawn)
        return total


class ExactEmbeddings(ReadNeighbours):
    """Neighbours have learnt embeddings instead of features.

    An embedding whose gradient comes from drawn edges alone is often not updated, and Adam, which scales the steps of
    each row by that row's own gradients, does not make up for it.
    """

    def __init__(self, graph: Graph, table: nn.Embedding):
        super().__init__(graph)
        self.tables = [table]  # in a list, so that it is not registered twice: the model owns it

    def read(self, nodes: Tensor, values: Values) -> Values:
        return Values(self.tables[0](nodes), share=values.share)


class ExactSparse(ReadNeighbours):
    """Neighbours have sparse features, whose sums A x would be less sparse, or not at all."""

    def __init__(self, graph: Graph, x: SparseFeatures):
        super().__init__(graph)
        self.x = x

    @property
    def stored_sum(self) -> Sum:
        return self

    def read(self, nodes: Tensor, values: Values) -> Values:
        return Values(self.x[nodes], values.encoder, values.share)


# --- control variates ------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A sum from a memory and a sample, the sample's coefficients, and the messages that were left to chance.

    The values it was made from keep it, so it does not refer to them: `messages` is given them.
    """

    total: Tensor
    coef: Tensor
    messages: Callable[[Values], Messages | TypedMessages]


class Missing(NamedTuple):
    """Of each node, whether a snapshot lacks its row, and whether it lacks the sum over its neighbours."""

    rows: Tensor
    sums: Tensor


class Variate(OnGraph, Sum):
    """What control variates share: H, an old h of each of the `nodes`, and `noise`.

    `noise` in [0, 1]: at 0 the sample estimates only h - H, at 1 all of h; both are unbiased. It is a tensor, so that a
    captured step follows it. Dropout is separate: H and `noise` apply to h without dropout, and what dropout adds has
    the variance of dropout over all neighbours (see `dropout_part`).
    """

    separates_dropout = True
    stores_sums = False  # whether a snapshot also holds the sum of H over every node's neighbours
    stores_h = True  # whether H is stored here
    noise: Tensor

    def __init__(
        self,
        graph: Graph,
        width: int,
        kind: str = "history",
        dtype: torch.dtype = torch.float32,
        noise: float = 0.0,
        storage: Storage = MEMORY,
        nodes: int | None = None,
        passes: bool = True,
    ):
        super().__init__()
        self.graph, self.kind = graph, one_of(kind, ("history", "snapshot"), "kind")
        self.nodes = graph.num_nodes if nodes is None else nodes
        form = History if passes else LazyHistory
        if not passes:  # nodes that are seen first make room for themselves
            self.fixed_shape = self.takes_capacity = False
        self.history = form(self.nodes if self.stores_h else 0, width, dtype, storage)
        noise = between(noise, 0.0, 1.0, "noise")
        self.register_buffer("noise", torch.tensor(noise, device=graph.device), persistent=False)
        stores_sums = self.stores_sums and kind == "snapshot"
        self.sums = History(graph.num_nodes, width, dtype, storage) if stores_sums else None
        self.scratch = ops.Scratch()

    @property
    def dial(self) -> Tensor:
        return self.noise

    @property
    def written_history(self) -> History | None:
        return self.history if self.stores_h and self.kind == "history" else None

    @property
    def trust(self) -> Tensor:
        """1 - noise: the coefficient of the control variate."""
        return 1.0 - self.noise

    def forward(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        rest = conv.rest(own)
        return mapped(self.total(conv, values, own, block), conv.kernel(), self.constant_part(conv, block, rest))

    def constant_part(self, conv: Conv, block: Block, rest: Tensor | None) -> Tensor | None:
        """What is added to W times the sum, whatever is drawn."""
        return rest

    def total(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        """The sum of a_ij h_j: of h without dropout from the memory and the sample, plus dropout's part if any."""
        mean = values if values.mean is None else values.mean
        if own is not None and mean is not values:
            own = mean.rows(block.num_dst)
        # once: the forward pass without dropout runs this layer too, to reach the next one
        made = mean.once("estimate", lambda: self.estimated(conv, mean, own, block))
        conv.notify(lambda: made.messages(mean))
        return made.total if mean is values else made.total + self.dropout_sum(conv, values, block, made.coef)

    def dropout_sum(self, conv: Conv, values: Values, block: Block, coef: Tensor) -> Tensor:
        """What dropout adds."""
        return dropout_part(values, block, coef)

    def estimated(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Estimate:
        """The sum from the memory and the sample, without dropout."""
        raise NotImplementedError

    @torch.no_grad()
    def refresh(self, h: Tensor | SparseFeatures, conv: Conv, snapshots_only: bool) -> None:
        """Store h of every node, unless it is another graph's."""
        self.flush()
        if len(h) == len(self.history.value) and not (snapshots_only and self.kind == "history"):
            self.store(dense(h), conv)

    def store(self, h: Tensor, conv: Conv) -> None:
        self.history.value.copy_(h)

    def _stored(self) -> dict[str, Tensor]:
        return {**super()._stored(), "noise": self.noise}


class ControlVariate(Variate):
    """sum over S of a scale (h - H') + sum over all of a H', H' = (1 - noise) H, H an old h of every node.

    VR-GCN (Chen et al. 2018) at noise 0. Unbiased for any draw, and the messages left to chance are only what changed
    since H. kind="history": H is the latest h seen, the second sum reads all n neighbours' rows. kind="snapshot": H and
    its sums date from the last pass over the whole graph, and the second sum is one row.
    """

    stores_sums = True
    missing: Missing | None = None  # of a snapshot that is filled on demand, what is not filled yet

    def estimated(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Estimate:
        nodes, h = self.rows(block), values.rows()
        if self.missing is not None:
            self.fill(values, nodes, block.n_id)
        trust, coef = self.trust, block.weight * block.scale
        change, square = self.history.change(block.n_id, h, trust)
        if self.sums is None:
            total = gather(change, block, coef, (self.history.sums(self.graph, nodes), None, trust))
        else:
            total = gather(change, block, coef, (self.sums.value, nodes, trust))
        if self.training and self.sums is None:
            self.history.push(block.n_id, h)
        return Estimate(
            total, coef, lambda _: Messages(block, coef, Values(change, square=square), total=lambda: total)
        )

    def constant_part(self, conv: Conv, block: Block, rest: Tensor | None) -> Tensor | None:
        return conv.with_edge_sums(rest, edge_sums(self.graph, self.rows(block)))

    def fill_on_demand(self) -> bool:
        if self.sums is None or not ops.may_wait(self.history.value):
            return False
        self.missing = Missing(torch.ones(self.nodes, dtype=torch.bool), torch.ones(self.nodes, dtype=torch.bool))
        return True

    @torch.no_grad()
    def fill(self, values: Values, targets: Tensor, sources: Tensor) -> None:
        """H of these sources and the sums of these targets, where they are missing, by the present weights.

        A row is filled once and stays until the next pass, so that sums and rows agree.
        """
        assert self.missing is not None and self.sums is not None and values.recompute is not None
        missing = self.missing.sums
        new = targets[missing[targets]].unique()
        missing[new] = False
        for some in new.split(1 << 10):
            self.graph.prefetch(some)
            self._fill_rows(values.recompute, self.graph.sources_of(some))
            self.sums.push(some, self.history.sums(self.graph, some))
        self._fill_rows(values.recompute, sources)

    def _fill_rows(self, recompute: Callable[[Tensor], Tensor], nodes: Tensor) -> None:
        assert self.missing is not None
        missing = self.missing.rows
        for some in nodes[missing[nodes]].unique().split(1 << 14):
            self.history.push(some, recompute(some))
            missing[some] = False

    def store(self, h: Tensor, conv: Conv) -> None:
        super().store(h, conv)
        self.missing = None
        if self.sums is not None:
            for nodes in torch.arange(len(self.sums.value), device=h.device).split(1 << 14):
                self.sums.push(nodes, self.history.sums(self.graph, nodes))

    def over_graph(self, graph: Graph, conv: Conv) -> Sum | None:
        known = None if self.sums is None or self.missing is not None else self.sums.value
        exact = graph is self.graph and known is not None and known.dtype == torch.float32
        return FullSum(graph, known) if exact else None

    def restore(self, state: dict[str, Tensor]) -> None:
        self.missing = None
        if "missing.rows" in state and not self.fill_on_demand():
            raise InputError("`device` must be the CPU to go on from a first epoch on a CPU, got another")
        super().restore(state)

    def _stored(self) -> dict[str, Tensor]:
        missing = {} if self.missing is None else {f"missing.{k}": t for k, t in self.missing._asdict().items()}
        return {**super()._stored(), **missing}


def corrected(
    full_old: Tensor, new: Tensor, old: Tensor, full: Block, block: Block, trust: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From scores: e^score of all neighbours as stored, of the sample as it is and as stored, and the normaliser."""
    n, scale = block.num_dst, block.scale.unsqueeze(1)
    top = torch.maximum(segment_max(full_old.detach(), full.dst, n), segment_max(new.detach(), block.dst, n))
    full_old = trust * full.scale.unsqueeze(1) * (full_old - top[full.dst]).exp()
    new = scale * (new - top[block.dst]).exp()
    old = trust * scale * (old - top[block.dst]).exp()
    base = segment_sum(full_old, full.dst, n)
    den = base + segment_sum(new - old, block.dst, n)
    return full_old, new, old, torch.maximum(den, MIN_SHARE * base).clamp(min=1e-30)


class AttentionVariate(AllNeighboursSum, Variate):
    """A control variate for attention: numerator and normaliser over all neighbours from H, corrected by the sample.

    num = sum over all of w' H_j + sum over S of scale (w h_j - w' H_j), den likewise; the output is num / den, with
    w = e^score from h and w' = (1 - noise) e^score from H. Scores take the current parameters, so that only H is old.
    """

    def estimated(  # type: ignore[override]
        self, conv: Attention, values: Values, own: Tensor | None, block: Block
    ) -> Estimate:
        self.flush()
        ids, full = relabelled(block.n_id, self.full_block(block), self.scratch, self.nodes, self.capacity is not None)
        h, full_old_h = values.rows(), self.old_rows(values, ids)
        old_h = full_old_h[: block.num_src]
        ends = conv.ends(values, own, block)
        full_old_ends = Ends(ends.s, conv.source(Values(full_old_h))[0])
        old_ends = ends._replace(t=full_old_ends.t[: block.num_src], by_edge=False)
        full_old, new, old, den = self.normalised(conv, ends, old_ends, full_old_ends, block, full)
        num = gather(full_old_h, full, full_old) + gather(h, block, new) - gather(old_h, block, old)
        total = num / den.unsqueeze(-1)
        new, old = new / den[block.dst], old / den[block.dst]
        if self.training and self.written_history is not None:
            self.history.push_later(block.n_id, h.detach())  # the backward pass still reads the old rows
        return Estimate(
            total,
            new,
            lambda h: Messages(block, new, h, ends=ends, old=(old.detach(), old_h.detach()), total=lambda: total),
        )

    def old_rows(self, values: Values, ids: Tensor) -> Tensor:
        """H of some nodes."""
        return self.history.pull(ids)

    def normalised(
        self, conv: Attention, ends: Ends, old_ends: Ends, full_old_ends: Ends, block: Block, full: Block
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`corrected` by the scores of these ends."""
        pairs = ((full_old_ends, full), (ends, block), (old_ends, block))
        full_old, new, old = (conv.scored(e, b) for e, b in pairs)
        return corrected(full_old, new, old, full, block, self.trust)


class AttentionScores(AttentionVariate):
    """The normaliser over all neighbours from t alone, a few numbers per node; values from the sample alone.

    den = sum over all of w' + sum over S of scale (w - w'), w' from the t_j last seen; the output is
    sum over S of scale w h_j / den. 4 bytes per node and head where a history has 4 per unit of width.
    """

    def __init__(self, graph: Graph, heads: int, noise: float = 0.0, storage: Storage = MEMORY):
        super().__init__(graph, heads, "history", torch.float32, noise, storage)

    def estimated(  # type: ignore[override]
        self, conv: Attention, values: Values, own: Tensor | None, block: Block
    ) -> Estimate:
        full = self.full_block(block)
        ends = conv.ends(values, own, block)
        full_old_ends = Ends(ends.s, self.history.value)
        old_ends = ends._replace(t=self.history.pull(block.n_id), by_edge=False)
        _, new, _, den = self.normalised(conv, ends, old_ends, full_old_ends, block, full)
        coef = new / den[block.dst]
        total = gather(values.rows(), block, coef)
        if self.training:
            self.history.push(block.n_id, ends.t)
        return Estimate(total, coef, lambda h: Messages(block, coef, h, ends=ends))

    def store(self, h: Tensor, conv: Attention) -> None:  # type: ignore[override]
        self.history.value.copy_(conv.source(Values(h))[0])


class AttentionSums(AttentionVariate):
    """The same over an exact first layer: H is recomputed from the sums that the first layer stores, with gradients.

    Only the first layer's attention weights are old in it, so the sample has little left to correct, and gradients
    reach the first layer's maps and the encoder through all neighbours instead of the drawn ones alone.
    """

    stores_h, needs_recompute = False, True

    def old_rows(self, values: Values, ids: Tensor) -> Tensor:
        assert values.recompute is not None
        return values.recompute(ids)


# --- by name ---------------------------------------------------------------------------------------------------------


def controlled(estimator: str) -> bool:
    """Whether an estimator's name has a control variate in it."""
    return bool({"history", "snapshot", "scores", "sums"} & set(estimator.split("+")))


def dial(noise: float | Sequence[float], layers: int) -> list[float]:
    """One number per layer from `noise`, a number or one per layer."""
    each = list(noise) if isinstance(noise, list | tuple) else [noise] * layers
    if len(each) != layers:
        raise InputError(f"`noise` must be a number or one per layer, {layers} in all, got {len(each)}")
    return [between(n, 0.0, 1.0, "noise") for n in each]


def make_exact(
    conv: Conv, graph: Graph, x: Tensor | SparseFeatures, storage: Storage = MEMORY, drops: bool = False
) -> Sum:
    """The exact first layer of such a convolution; `drops`: the model drops inputs in training."""
    if isinstance(x, SparseFeatures):
        return ExactSparse(graph, x)
    return ExactAttention(graph, x) if conv.attends else ExactSum(graph, x, storage, drops)


def make_variate(
    conv: Conv,
    graph: Graph,
    width: int,
    kind: str,
    dtype: torch.dtype,
    noise: float,
    storage: Storage = MEMORY,
    nodes: int | None = None,
    passes: bool = True,
) -> Variate:
    """A control variate of this kind for such a convolution; without `passes`, a history starts empty."""
    if kind in ("scores", "sums") and not conv.attends:
        raise InputError(f"`estimator` must not remember {kind} for a model without attention, got {kind}")
    if kind == "sums":
        return AttentionSums(graph, width, noise=noise)
    if kind == "scores":
        return AttentionScores(graph, cast(Attention, conv).ends_width, noise, storage)
    if conv.attends:
        return AttentionVariate(graph, width, kind, dtype, noise, storage, nodes)
    return ControlVariate(graph, width, kind, dtype, noise, storage, nodes, passes)


def edge_sums(graph: Graph, rows: Tensor) -> Tensor | None:
    """Sums over whole rows of weight * edge features, which do not depend on the draw. None without features."""
    return None if graph.attr_sums is None else graph.attr_sums[rows]


@torch.no_grad()
def check_sources(graph: Graph, x: Tensor) -> None:
    if graph.num_edges and len(x) < graph.num_nodes and int(graph.indices.max()) >= len(x):
        raise InputError(f"`x` must have a row for each of the {graph.num_nodes} nodes, got {len(x)}")


def full_sums(graph: Graph, x: Tensor, storage: Storage = MEMORY, rows: int = 1 << 14, squared: bool = False) -> Tensor:
    """A x for every row of the graph, in chunks; x has a row for every source. `squared`: of squared weights and x."""
    check_sources(graph, x)
    edges = graph.edges
    if squared and not edges.mean:  # only kernels for mean weights square by themselves
        if edges.weight is not None:
            edges = edges._replace(weight=edges.weight.square())
        square = storage.empty(tuple(x.shape), x.dtype, x.device)
        for a in range(0, len(x), rows):
            square[a : a + rows] = x[a : a + rows].square()
        x = square
    out = storage.empty((graph.num_rows, *x.shape[1:]), x.dtype, x.device)
    for nodes in torch.arange(graph.num_rows, device=x.device).split(rows):
        graph.prefetch(nodes)
        out[nodes] = ops.full_sum(x, edges, nodes, squared and edges.mean)
    return out
