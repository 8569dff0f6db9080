"""Conv and Sum: what a layer is, and how its sum over all neighbours is formed.

A `Conv` says which coefficients, which map and which update; a `Sum` forms sum a_ij W h_j from the sample alone,
exactly, or with a control variate, and notes the messages. Names combine: "exact" first layer; "history", "snapshot",
"scores" (attention's normaliser) or "sums" (of the layer below, for attention) in the others.
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
from adahop.features import Values, gather, join, mapped
from adahop.graph import Graph, OnGraph
from adahop.history import History, Seen, SeenHistory
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
LEAST = 0.3  # the corrected normaliser is kept above this share of the remembered one

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
    share = segment_sum(q, row, n).clamp(min=1e-30).unsqueeze(-1)  # stands for the sampled part of the full normaliser
    total = segment_sum(raw - others, row, n) + segment_sum(others, row, n) / share
    return raw * scale / total.clamp(min=1e-30)[row]


def attended(ends: Ends, block: Block, slope: float, form: str) -> Tensor:
    """Coefficients from both ends' scores through a leaky relu."""
    if form == "self-normalised":
        return ops.attend(
            ends.s, ends.t, block.src, block.dst, block.ptr, block.scale, slope, block.slots, ends.by_edge
        )
    s, t = ends.over(block)
    return attention(leaky_relu(s + t, slope), block, form)


def edge_map(features: int, outputs: int) -> nn.Linear | None:
    """A map of edge features, where edges have any."""
    return nn.Linear(features, outputs, bias=False) if features else None


def checked_features(found: Tensor | None, width: int) -> Tensor:
    """Features of edges, as many as a map takes."""
    if found is None or found.shape[1] != width:
        got = "none" if found is None else found.shape[1]
        raise InputError(f"`graph` must have {width} features per edge, as the model was made for, got {got}")
    return found


def named(first: Tensor, every: Block, scratch: ops.Scratch, nodes: int, fixed: bool) -> tuple[Tensor, Block]:
    """The nodes that are read, `first` and then the block's sources, each once; and the block with these numbers.

    Where the shape is `fixed`, others follow that nothing reads.
    """
    if fixed:
        ids, src = ops.relabel_within(first, every.src, nodes)
    else:
        ids, src = ops.relabel(first, every.src, scratch.marks(nodes, first.device))
    return ids, every._replace(n_id=ids, edge_index=torch.stack([src, every.dst]), target=every.targets)


# --- the sum ---------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """Plain: the sample's messages, coef * W h, are added up.

    Others remember something of every node and need fewer samples, or none: they replace `total`, the sum of a_ij h_j
    before W. Every form notes the messages that are left to chance, once, for the layer's listeners.
    """

    draws = True  # whether the layer's block still needs to be drawn
    shaped = True  # whether its work has the same shape at every step, so that a CUDA graph can hold it
    roomy = False  # whether a `room` gives its work such a shape
    room: int | None = None  # for the edges of all neighbours of a step's targets; None: as many as they have
    parted = False  # whether it asks for `values.mean`: a memory knows no dropped h
    below = False  # whether it needs the first layer to `keep` what h of any node is made anew from
    start = 0  # the node that row 0 of its graph stands for: that of one relation has rows for one type of nodes

    def forward(
        self,
        conv: Conv,
        values: Values,
        own: Tensor | None,
        block: Block,
        rest: Tensor | None = None,
    ) -> Tensor:
        """rest + the sum of a_ij W h_j: [targets, out], or with heads [targets, heads, out]; own: the targets' h."""
        total, messages = self.plain(conv, values, own, block, rest)
        conv.note(messages)
        return total

    def plain(
        self, conv: Conv, values: Values, own: Tensor | None, block: Block, rest: Tensor | None
    ) -> tuple[Tensor, Callable[[], Messages]]:
        """The sum over the edges of a block, nothing remembered, and its messages."""
        ends = conv.ends(values, own, block)
        coef, kernel, features = conv.coef(ends, block), conv.kernel(), conv.joining(block)
        if features is not None:
            rest = conv.beside(rest, segment_sum(coef.unsqueeze(1) * features, block.dst, block.num_dst))
        total = values.sum(block, coef, kernel, rest)
        after = kernel if conv.narrows() or features is not None else None
        return total, lambda: Messages(block, coef, values, after, ends, edge=conv.added(features))

    def rows(self, block: Block) -> Tensor:
        """The rows of its graph that a block's targets have."""
        return block.targets - self.start if self.start else block.targets

    def needs(self, block: Block) -> Tensor:
        """How much room a block needs, where it is `roomy`."""
        raise NotImplementedError

    @property
    def dial(self) -> Tensor | None:
        """How much sampling noise is left in, where that can be set."""
        return None

    def of(self, relation: int) -> Sum:
        """The sum of one relation of a typed graph: itself, unless each has its own."""
        return self

    @property
    def written(self) -> History | None:
        """The history that steps write: several processes tell each other its rows. A snapshot is made by all."""
        return None

    def keep(self, conv: Conv, dtype: torch.dtype, storage: Storage) -> None:
        """From now on keep of every node what its h is made anew from, where that is possible."""

    @property
    def again(self) -> Sum | None:
        """How h of any node is made anew, where enough is kept of it: a sum over raw features `x`."""
        return None

    def wait(self) -> bool:
        """Make what is remembered of a node when it is first asked for, if that can be: no pass is needed then."""
        return False

    def refresh(self, h: Tensor, conv: Conv, passed: bool) -> None:
        """Every node's h is at hand: `passed` after a pass over the graph during training, else at the start."""

    def settle(self) -> None:
        """What the last step saw is written, where that had to wait."""

    def state(self) -> dict[str, Tensor]:
        """What later steps depend on and nothing else can tell."""
        self.settle()
        return self._remembered()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state; one of version 0.1, which knew no dial, leaves the dial as it is set."""
        self.settle()
        for name, m in self._histories():
            m.resize(len(state[name]))
        mine = self._remembered()
        for name, value in state.items():
            mine[name].copy_(value)

    def _remembered(self) -> dict[str, Tensor]:
        return {k: t for name, m in self._histories() for k, t in m.remembered(name).items()}

    def _histories(self) -> list[tuple[str, History]]:
        return [(name, m) for name, m in self.named_modules() if isinstance(m, History)]


PLAIN = Sum()


# --- the layer -------------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    """update(sum over j of a_ij W h_j, h_i), with a_ij the graph's own weights.

    `listeners` are told of the messages as the layer passes them, see `adahop.watch`; they cost nothing while there are
    none.
    """

    attends = False  # whether a_ij comes from scores of both ends, see `Attention`
    fixed = False  # whether it is W times the sum of a_ij h_j, and `rest`, and nothing else
    reads_own = True  # whether the target's own h has a part in the scores or in `update`
    ends_width = 1  # numbers that an end of an edge brings to its score

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[Any], None]] = []  # of Messages, or of TypedMessages
        self.edge: nn.Linear | None = None  # U of features of edges: a message is then a_ij (W h_j + U e_ij)

    def note(self, messages: Callable[[], Messages | TypedMessages]) -> None:
        """Tell the listeners, if there are any."""
        if self.listeners:
            made = messages()
            for listener in self.listeners:
                listener(made)

    @contextlib.contextmanager
    def without_listeners(self) -> Iterator[None]:
        """Inside, no listener is called."""
        self.listeners, kept = [], self.listeners
        try:
            yield
        finally:
            self.listeners = kept

    def forward(self, h: Tensor | Values, own: Tensor | None, block: Block, how: Sum = PLAIN) -> Tensor:
        """The targets' new h from the sources' and the targets' own."""
        values = h if isinstance(h, Values) else Values(h)
        return self.update(how(self, values, own, block, self.rest(own)), own)

    # --- features of edges -------------------------------------------------------------------------------------------

    def features(self, block: Block) -> Tensor | None:
        """[M, D] of the edges of a block of one relation; None where the layer reads none."""
        if self.edge is None:
            return None
        return checked_features(None if block.attr is None else block.attr[0], self.edge.in_features)

    def joining(self, block: Block) -> Tensor | None:
        """Those that join the messages."""
        return self.features(block)

    @torch.no_grad()
    def added(self, features: Tensor | None) -> Tensor | None:
        """U e of every edge."""
        return None if features is None or self.edge is None else self.edge(features)

    def beside(self, rest: Tensor | None, sums: Tensor | None) -> Tensor | None:
        """The rest, and U of the sums of a_ij e_ij, where the layer reads features of edges."""
        if self.edge is None:
            return rest
        part = self.edge(checked_features(sums, self.edge.in_features))
        return part if rest is None else rest + part

    # --- what a model writes -----------------------------------------------------------------------------------------

    def kernel(self) -> Tensor:
        """W: [out, in], or with heads [heads, out, in]."""
        raise NotImplementedError

    def rest(self, own: Tensor | None) -> Tensor | None:
        """What is added to the sum: a bias, or a row per target; it joins the product with W."""
        return None

    def update(self, total: Tensor, own: Tensor | None) -> Tensor:
        """The targets' new h from the sum of a_ij W h_j and the rest."""
        return total

    def ends(self, values: Values, own: Tensor | None, block: Block) -> Ends | None:
        """What both ends of an edge bring to its coefficient, beside the graph's weight; None: nothing."""
        return None

    def coef(self, ends: Ends | None, block: Block) -> Tensor:
        """a_ij scale_ij of every edge: [M], or with heads [M, heads]. Horvitz-Thompson for fixed weights."""
        return block.weight * block.scale

    def narrows(self) -> bool:
        """Whether W h is smaller than h: messages are measured on the narrower side, whichever is summed."""
        out, width = self.kernel().shape[-2:]
        return out < width


class Attention(Conv):
    """a_ij = softmax over j of a score that both ends have a part in, and U e_ij where edges have features."""

    attends = True

    def __init__(self, form: str):
        super().__init__()
        self.form = one_of(form, ATTENTION, "attention")

    def target(self, own: Tensor) -> Tensor:
        """[targets, ends_width]: s."""
        raise NotImplementedError

    def source(self, values: Values, block: Block | None = None) -> tuple[Tensor, bool]:
        """[sources, ends_width]: t; or by edge and True, where the values are read that way."""
        raise NotImplementedError

    def scores(self, s: Tensor, t: Tensor) -> Tensor:
        """[M, heads] of every edge, from s and t."""
        raise NotImplementedError

    def ends(self, values: Values, own: Tensor | None, block: Block) -> Ends:
        assert own is not None
        return Ends(self.target(own), *self.source(values, block))

    def joining(self, block: Block) -> Tensor | None:
        return None  # scores have them

    def seen(self, ends: Ends, block: Block) -> Ends:
        """The ends with what the features of the edges between them add to the scores."""
        features = self.features(block)
        if features is None or self.edge is None:
            return ends
        return Ends(ends.s, ends.over(block)[1] + self.edge(features), by_edge=True)

    def scored(self, ends: Ends, block: Block) -> Tensor:
        """[M, heads] the scores of a block's edges."""
        return self.scores(*self.seen(ends, block).over(block))

    def coef(self, ends: Ends | None, block: Block) -> Tensor:
        assert ends is not None
        return attention(self.scored(ends, block), block, self.form)


# --- dropout ---------------------------------------------------------------------------------------------------------


def deviation(share: float) -> float:
    """The standard deviation of an input of 1 of which a share is dropped and the rest scaled up."""
    return (share / (1.0 - share)) ** 0.5


def dropped_part(values: Values, block: Block, coef: Tensor) -> Tensor:
    """What dropout adds to the mean's sum, coef = a * scale: sum over S of a sqrt(scale) (h - mean h).

    An edge is drawn 1 / scale of the time, so that the variance is that of the sum over all neighbours (CVD, Chen et
    al. 2018). With a * scale it would be `scale` times as much, and no memory could take it away.
    """
    assert values.mean is not None
    return gather(values.rows() - values.mean.rows(), block, calmed(block, coef))


def calmed(block: Block, coef: Tensor) -> Tensor:
    """a sqrt(scale) from a * scale."""
    root = block.scale.clamp(min=1e-30).rsqrt()
    return coef * (root if coef.dim() == 1 else root.unsqueeze(1))


# --- sums with a memory ----------------------------------------------------------------------------------------------


def certain(block: Block, coef: Tensor, total: Callable[[Tensor | None], Tensor]) -> Messages:
    """Messages of nothing: the sum is known, and what was drawn all the same has no part in it."""
    nothing, ends = Values(coef.new_zeros(block.num_src, 1)), None
    if coef.dim() == 2:
        ends = Ends(coef.new_zeros(block.num_dst, coef.shape[1]), coef, by_edge=True)
    return Messages(block, coef, nothing, ends=ends, total=lambda: total(None))


class ExactSum(OnGraph, Sum):
    """The first layer of fixed weights: A x, known once and for all. No variance, nothing to draw.

    On the CPU a row is formed when it is first asked for, so that training need not wait for all of them.
    With `drops`, sqrt(sum of a^2 x^2) is known too: dropping a share p of all inputs moves the sum by that times
    sqrt(p / (1 - p)), entry by entry, and a normal variable of this size stands for it.
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
        waits, self.far = ops.may_wait(x), ops.in_file(x)
        self.seen = Seen(graph.num_rows, storage, x.device) if waits else None  # the rows that are formed, one by one

        def every(x: Tensor, squared: bool = False) -> Tensor:
            if waits:
                return storage.sparse(graph.num_rows + 1, x.shape[1])
            sums = full_sums(graph, x, storage, squared=squared)
            return ops.table(sums.sqrt_() if squared else sums, x)

        given = {"x": x, "sums": every(x), "spread": every(x, squared=True) if drops else None}
        given["weights"] = every(torch.ones(1, 1, device=x.device).expand(len(x), 1))
        for name, t in given.items():
            self.register_buffer(name, t, persistent=False)

    @property
    def again(self) -> Sum | None:
        return None if self.seen is None else self

    @property
    def left(self) -> int:
        """Rows that are not formed yet."""
        return 0 if self.seen is None else self.graph.num_rows + 1 - self.seen.many

    def form(self, rows: Tensor) -> None:
        """The sums of those rows that were not asked for before."""
        assert self.seen is not None
        for some in self.seen.new(rows).split(1 << 14):
            self.graph.soon(some)
            if self.far:
                edges = self.graph.edges
                place = ops.spans(edges.begin[some], edges.last[some] - edges.begin[some])[1]
                source = edges.indices[place].long()
                ops.ask_for(self.x, source, source + 1)
            sums, weights, square = ops.row_sums(self.x, self.graph.edges, some, self.spread is not None)
            row = self.seen.add(some)
            self.sums[row], self.weights[row, 0] = sums, weights
            if self.spread is not None:
                self.spread[row] = square.sqrt_()

    def at(self, row: Tensor, share: float) -> Tensor:
        """Some rows of sums, and what dropping a share of the inputs adds to them."""
        sums = ops.table_rows(self.sums, row)
        if not share:
            return sums
        if self.spread is None:
            raise InputError("`dropout` must be set before `remember`, got an exact first layer made without it")
        size = ops.table_rows(self.spread, row)
        return torch.addcmul(sums, size, torch.randn_like(size), value=deviation(share))

    def moved(self) -> None:
        """On a GPU nothing waits: a captured step cannot."""
        if self.left and not ops.may_wait(self.x):
            self.form(torch.arange(self.graph.num_rows, device=self.x.device))

    def forward(
        self,
        conv: Conv,
        values: Values,
        own: Tensor | None,
        block: Block,
        rest: Tensor | None = None,
    ) -> Tensor:
        nodes = self.rows(block)
        if self.left:
            self.form(nodes)
        row = nodes if self.seen is None else self.seen.row[nodes].long()
        sums = self.at(row, values.share)

        def total(kernel: Tensor | None, rest: Tensor | None = None) -> Tensor:
            kernel, bias = join(kernel, values.encoder)
            out = sums if kernel is None else mapped(sums, kernel, rest)
            return out if bias is None else out + self.weights[row] * bias

        conv.note(lambda: certain(block, torch.zeros_like(block.scale), total))
        return total(conv.kernel(), conv.beside(rest, edge_sums(self.graph, nodes)))


class AllNeighboursSum(OnGraph, Sum):
    """What reads all neighbours of every target: as many edges as they have, or a `room` that is never exceeded."""

    shaped, roomy = False, True

    def every(self, block: Block) -> Block:
        """All in-edges of a block's targets."""
        nodes = self.rows(block)
        return self.graph.in_edges(nodes) if self.room is None else self.graph.in_edges_within(nodes, self.room)

    def needs(self, block: Block) -> Tensor:
        nodes = self.rows(block)
        return (self.graph.last[nodes] - self.graph.indptr[nodes]).sum()


class ExactAttention(AllNeighboursSum):
    """The first layer of attention over *all* neighbours, from raw features.

    a_ij = softmax of the scores s_i + t_j, t = x (E' v) + e v; then sum a_ij (E x_j + e) = E (sum a_ij x_j) + e.
    Costs O(n F) per target instead of O(k H) but has no variance, forward or backward. `kept`, where there is one, has
    sum a_ij x_j of every node as it was when the node was last a target: see `KeptSums`.
    """

    draws = False
    x: Tensor

    def __init__(self, graph: Graph, x: Tensor):
        super().__init__()
        self.graph, self.kept = graph, cast("History | None", None)
        self.register_buffer("x", x, persistent=False)
        self.waiting: tuple[Tensor, Tensor] | None = None
        self.scratch = ops.Scratch()

    def forward(  # type: ignore[override]
        self,
        conv: Attention,
        values: Values,
        own: Tensor | None,
        block: Block,
        rest: Tensor | None = None,
    ) -> Tensor:
        if not values.share:  # a step with dropout comes here twice
            self.settle()
        every = self.every(block)
        if values.share or every.num_edges < len(self.x):  # what is read of x, once: all of it may be much more
            ids, every = named(every.src[:0], every, self.scratch, len(self.x), self.room is not None)
            whole = Values(self.x[ids].float(), values.encoder, values.share)
        else:
            whole = Values(self.x.float(), values.encoder)
        ends = conv.ends(whole, own, every)
        coef = attention(conv.scored(ends, every), every)
        keeps = self.kept is not None and not values.share
        if keeps:
            whole = Values(whole.x, whole.encoder)  # of raw features, though scores may have needed h
        sums = whole.summed(every, coef)
        if keeps and self.training:
            self.waiting = block.targets, sums.detach().flatten(1)

        def total(kernel: Tensor | None) -> Tensor:
            return self.total(whole, sums, every.ptr.diff() > 0, kernel)

        conv.note(lambda: certain(block, torch.zeros(block.num_edges, coef.shape[1], device=coef.device), total))
        out = total(conv.kernel())
        return out if rest is None else out + rest

    def total(self, values: Values, sums: Tensor, met: Tensor, kernel: Tensor | None) -> Tensor:
        """W (E sums + e); the weights of a target that met no neighbour sum to 0."""
        kernel, bias = values.joined(kernel)
        out = sums if kernel is None else mapped(sums, kernel)
        return out if bias is None else out + met.view(-1, *[1] * (out.dim() - 1)) * bias

    def keep(self, conv: Conv, dtype: torch.dtype, storage: Storage) -> None:
        kernel = conv.kernel()
        heads = kernel.shape[0] if kernel.dim() == 3 else 1
        self.kept = History(self.graph.num_nodes, heads * self.x.shape[1], dtype, storage)

    @property
    def again(self) -> KeptSums | None:
        return None if self.kept is None else KeptSums(self)

    @property
    def written(self) -> History | None:
        return self.kept

    @torch.no_grad()
    def refresh(self, h: Tensor, conv: Attention, passed: bool) -> None:  # type: ignore[override]
        """Form the sums of every node, at the start: later, steps do."""
        self.settle()
        if self.kept is None or passed or len(h) != len(self.kept.value):
            return
        values, x = Values(h, shared=True), self.x.float()
        for nodes in torch.arange(len(h), device=h.device).split(1 << 12):
            every = self.graph.in_edges(nodes)
            coef = attention(conv.scored(conv.ends(values, h[nodes], every), every), every, "softmax")
            self.kept.push(nodes, gather(x, every, coef).flatten(1))

    def settle(self) -> None:
        """Write what the last step formed: only now, as the layer above still read the old rows."""
        if self.kept is not None and self.waiting is not None:
            self.kept.push(*self.waiting)
            self.waiting = None


class KeptSums(Sum):
    """The first layer's sum of any nodes as it was last formed, from raw features; its maps are today's.

    No neighbour is read, so that h of many nodes is made anew at the cost of two products, with the gradient of all
    that the layer learns but its scores.
    """

    draws = False

    def __init__(self, first: ExactAttention):
        super().__init__()
        self.first, self.x = first, first.x

    def forward(
        self,
        conv: Conv,
        values: Values,
        own: Tensor | None,
        block: Block,
        rest: Tensor | None = None,
    ) -> Tensor:
        first, nodes = self.first, block.targets
        assert first.kept is not None
        sums = first.kept.pull(nodes).unflatten(1, (-1, first.x.shape[1]))
        met = first.graph.last[nodes] > first.graph.indptr[nodes]
        out = first.total(Values(first.x, values.encoder), sums, met, conv.kernel())
        return out if rest is None else out + rest


class ExactRows(OnGraph, Sum):
    """The first layer over *all* neighbours where these have learnt rows: read as they are, each with its gradient.

    A row whose gradient comes through drawn edges alone is often left where it is, and Adam, which measures every row's
    steps by that row's own gradients, does not make up for it. Costs O(n) rows per target; no variance either way.
    """

    draws = shaped = False

    def __init__(self, graph: Graph, learnt: nn.Embedding):
        super().__init__()
        self.graph, self.tables = graph, [learnt]  # in a list: the model's own part, not this one's

    def forward(
        self,
        conv: Conv,
        values: Values,
        own: Tensor | None,
        block: Block,
        rest: Tensor | None = None,
    ) -> Tensor:
        every = self.graph.in_edges(self.rows(block), compact=True)
        total, messages = self.plain(conv, Values(self.tables[0](every.n_id), share=values.share), own, every, rest)

        def noted() -> Messages:
            sent = messages()
            nothing = sent.coef.new_zeros(block.num_edges, *sent.coef.shape[1:])
            return certain(block, nothing, lambda kernel: estimate(sent, mapped=False))

        conv.note(noted)
        return total


class Formed(NamedTuple):
    """A sum from a memory and a sample: with the sample's coefficients, and the messages that were left to chance."""

    total: Tensor
    coef: Tensor
    messages: Callable[[], Messages | TypedMessages]


class Missing(NamedTuple):
    """Of each node, whether a snapshot lacks its row, and whether it lacks the sum over its neighbours."""

    rows: Tensor
    sums: Tensor


class Variate(OnGraph, Sum):
    """What control variates share: H, an old h of every node (there are `nodes`), and the dial.

    `noise` in [0, 1]: 0 takes from the sample what H knows already, 1 leaves the sample alone; unbiased for each. It is
    a tensor, so that a captured step follows it. Dropout is kept apart: memory and dial see the mean's h alone, and
    what dropout adds is as large as over all neighbours (see `dropped_part`).
    """

    parted = True
    sums_up = False  # whether a snapshot keeps the sum of H over every node's neighbours, too
    keeps = True  # whether H lies here
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
        form = History if passes else SeenHistory
        if not passes:  # nodes that are seen first make room for themselves
            self.shaped = self.roomy = False
        self.history = form(self.nodes if self.keeps else 0, width, dtype, storage)
        noise = between(noise, 0.0, 1.0, "noise")
        self.register_buffer("noise", torch.tensor(noise, device=graph.device), persistent=False)
        kept = self.sums_up and kind == "snapshot"
        self.sums = History(graph.num_nodes, width, dtype, storage) if kept else None
        self.waiting: tuple[Tensor, Tensor] | None = None  # rows for the history, see `settle`
        self.scratch = ops.Scratch()

    @property
    def dial(self) -> Tensor:
        return self.noise

    @property
    def written(self) -> History | None:
        return self.history if self.keeps and self.kind == "history" else None

    @property
    def trust(self) -> Tensor:
        """1 - noise: how much of the control variate is taken."""
        return 1.0 - self.noise

    def forward(
        self,
        conv: Conv,
        values: Values,
        own: Tensor | None,
        block: Block,
        rest: Tensor | None = None,
    ) -> Tensor:
        return mapped(self.total(conv, values, own, block), conv.kernel(), self.known(conv, block, rest))

    def known(self, conv: Conv, block: Block, rest: Tensor | None) -> Tensor | None:
        """What joins the sum and is not left to chance."""
        return rest

    def total(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Tensor:
        """The sum of a_ij h_j: of the mean's h from the memory and the sample, then dropout's part, if there is one."""
        mean = values if values.mean is None else values.mean
        if own is not None and mean is not values:
            own = mean.rows(block.num_dst)
        made = mean.once("formed", lambda: self.formed(conv, mean, own, block))  # the mean goes on to the next layer
        conv.note(made.messages)
        return made.total if mean is values else made.total + self.dropped(conv, values, block, made.coef)

    def dropped(self, conv: Conv, values: Values, block: Block, coef: Tensor) -> Tensor:
        """What dropout adds."""
        return dropped_part(values, block, coef)

    def formed(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Formed:
        """The sum from the memory and the sample, without dropout."""
        raise NotImplementedError

    @torch.no_grad()
    def refresh(self, h: Tensor, conv: Conv, passed: bool) -> None:
        """Take h of every node, unless it is another graph's; a history has newer rows than an epoch's end would."""
        self.settle()
        if len(h) == len(self.history.value) and not (passed and self.kind == "history"):
            self.take(h, conv)

    def take(self, h: Tensor, conv: Conv) -> None:
        self.history.value.copy_(h)

    def settle(self) -> None:
        """Write what the last step saw: only now, as its backward pass still read the old rows."""
        if self.waiting is not None:
            self.history.push(*self.waiting)
            self.waiting = None

    def _remembered(self) -> dict[str, Tensor]:
        return {**super()._remembered(), "noise": self.noise}


class ControlVariate(Variate):
    """sum over S of a scale (h - H') + sum over all of a H', H' = (1 - noise) H, H an old h of every node.

    VR-GCN (Chen et al. 2018) at noise 0. Unbiased for any draw, and the messages left to chance are only what changed
    since H. kind="history": H is the latest h seen, the second sum reads all n neighbours' rows. kind="snapshot": H and
    its sums date from the last pass over the whole graph, and the second sum is one row.
    """

    sums_up = True
    missing: Missing | None = None  # what a snapshot that waits has not been asked for yet

    def formed(self, conv: Conv, values: Values, own: Tensor | None, block: Block) -> Formed:
        nodes, h = self.rows(block), values.rows()
        if self.missing is not None:
            self.form(values, nodes, block.n_id)
        trust, coef = self.trust, block.weight * block.scale
        change, square = self.history.change(block.n_id, h, trust)
        if self.sums is None:
            total = gather(change, block, coef, (self.history.sums(self.graph, nodes), None, trust))
        else:
            total = gather(change, block, coef, (self.sums.value, nodes, trust))
        if self.training and self.sums is None:
            self.history.push(block.n_id, h)
        return Formed(total, coef, lambda: Messages(block, coef, Values(change, square=square), total=lambda: total))

    def known(self, conv: Conv, block: Block, rest: Tensor | None) -> Tensor | None:
        return conv.beside(rest, edge_sums(self.graph, self.rows(block)))

    def wait(self) -> bool:
        if self.sums is None or not ops.may_wait(self.history.value):
            return False
        self.missing = Missing(torch.ones(self.nodes, dtype=torch.bool), torch.ones(self.nodes, dtype=torch.bool))
        return True

    @torch.no_grad()
    def form(self, values: Values, targets: Tensor, sources: Tensor) -> None:
        """H of these sources and the sums of these targets, as far as they are missing, by today's weights.

        A row is made once and stays until the next pass, so that sums and rows agree.
        """
        assert self.missing is not None and self.sums is not None and values.anew is not None
        sums = self.missing.sums
        new = targets[sums[targets]].unique()
        sums[new] = False
        edges = self.graph.edges
        for some in new.split(1 << 10):
            self.graph.soon(some)
            place = ops.spans(edges.begin[some], edges.last[some] - edges.begin[some])[1]
            self._form_rows(values.anew, edges.indices[place].long())
            self.sums.push(some, self.history.sums(self.graph, some))
        self._form_rows(values.anew, sources)

    def _form_rows(self, anew: Callable[[Tensor], Tensor], nodes: Tensor) -> None:
        assert self.missing is not None
        rows = self.missing.rows
        for some in nodes[rows[nodes]].unique().split(1 << 14):
            self.history.push(some, anew(some))
            rows[some] = False

    def take(self, h: Tensor, conv: Conv) -> None:
        super().take(h, conv)
        self.missing = None
        if self.sums is not None:
            for nodes in torch.arange(len(self.sums.value), device=h.device).split(1 << 14):
                self.sums.push(nodes, self.history.sums(self.graph, nodes))

    def restore(self, state: dict[str, Tensor]) -> None:
        self.missing = None
        if "missing.rows" in state and not self.wait():
            raise InputError("`device` must be the CPU to go on from a first epoch on a CPU, got another")
        super().restore(state)

    def _remembered(self) -> dict[str, Tensor]:
        waits = {} if self.missing is None else {f"missing.{k}": t for k, t in self.missing._asdict().items()}
        return {**super()._remembered(), **waits}


def corrected(
    whole: Tensor, new: Tensor, gone: Tensor, every: Block, block: Block, trust: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e^score of all neighbours as stored, of the sample as it is and as stored; and the normaliser, from scores."""
    n, scale = block.num_dst, block.scale.unsqueeze(1)
    top = torch.maximum(segment_max(whole.detach(), every.dst, n), segment_max(new.detach(), block.dst, n))
    whole = trust * every.scale.unsqueeze(1) * (whole - top[every.dst]).exp()
    new = scale * (new - top[block.dst]).exp()
    gone = trust * scale * (gone - top[block.dst]).exp()
    base = segment_sum(whole, every.dst, n)
    den = base + segment_sum(new - gone, block.dst, n)
    return whole, new, gone, torch.maximum(den, LEAST * base).clamp(min=1e-30)


class AttentionVariate(AllNeighboursSum, Variate):
    """A control variate for attention: numerator and normaliser over all neighbours from H, corrected by the sample.

    num = sum over all of w' H_j + sum over S of scale (w h_j - w' H_j), den likewise; the output is num / den, with
    w = e^score from h and w' = (1 - noise) e^score from H. Scores take the current parameters, so that only H is old.
    """

    def formed(  # type: ignore[override]
        self, conv: Attention, values: Values, own: Tensor | None, block: Block
    ) -> Formed:
        self.settle()
        ids, every = named(block.n_id, self.every(block), self.scratch, self.nodes, self.room is not None)
        h, before = values.rows(), self.recalled(values, ids)
        old = before[: block.num_src]
        ends = conv.ends(values, own, block)
        then = Ends(ends.s, conv.source(Values(before))[0])
        stale = ends._replace(t=then.t[: block.num_src], by_edge=False)
        whole, new, gone, den = self.normalised(conv, ends, stale, then, block, every)
        num = gather(before, every, whole) + gather(h, block, new) - gather(old, block, gone)
        total = num / den.unsqueeze(-1)
        new, gone = new / den[block.dst], gone / den[block.dst]
        if self.training and self.written is not None:
            self.waiting = block.n_id, h.detach()
        return Formed(
            total,
            new,
            lambda: Messages(block, new, values, ends=ends, old=(gone.detach(), old.detach()), total=lambda: total),
        )

    def recalled(self, values: Values, ids: Tensor) -> Tensor:
        """H of some nodes."""
        return self.history.pull(ids)

    def normalised(self, conv: Attention, ends: Ends, stale: Ends, then: Ends, block: Block, every: Block):
        """e^score of all neighbours as stored, of the sample as it is and as stored; and the normaliser."""
        whole, new, gone = (conv.scored(e, b) for e, b in ((then, every), (ends, block), (stale, block)))
        return corrected(whole, new, gone, every, block, self.trust)


class AttentionScores(AttentionVariate):
    """The normaliser over all neighbours from t alone, a few numbers per node; values from the sample alone.

    den = sum over all of w' + sum over S of scale (w - w'), w' from the t_j last seen; the output is
    sum over S of scale w h_j / den. 4 bytes per node and head where a history keeps 4 per unit of width.
    """

    def __init__(self, graph: Graph, heads: int, noise: float = 0.0, storage: Storage = MEMORY):
        super().__init__(graph, heads, "history", torch.float32, noise, storage)

    def formed(  # type: ignore[override]
        self, conv: Attention, values: Values, own: Tensor | None, block: Block
    ) -> Formed:
        every = self.every(block)
        ends = conv.ends(values, own, block)
        then = Ends(ends.s, self.history.value)
        stale = ends._replace(t=self.history.pull(block.n_id), by_edge=False)
        _, new, _, den = self.normalised(conv, ends, stale, then, block, every)
        coef = new / den[block.dst]
        total = gather(values.rows(), block, coef)
        if self.training:
            self.history.push(block.n_id, ends.t)
        return Formed(total, coef, lambda: Messages(block, coef, values, ends=ends))

    def take(self, h: Tensor, conv: Attention) -> None:  # type: ignore[override]
        self.history.value.copy_(conv.source(Values(h))[0])


class AttentionSums(AttentionVariate):
    """The same over an exact first layer: H is made anew from the sums that the first layer keeps, with gradients.

    Only the first layer's attention weights are old in it, so that little is left to the sample, and gradients reach
    the first layer's maps and the encoder through all neighbours instead of the drawn ones alone.
    """

    keeps, below = False, True

    def recalled(self, values: Values, ids: Tensor) -> Tensor:
        assert values.anew is not None
        return values.anew(ids)


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


def build(
    estimator: str,
    widths: Sequence[int],
    noise: float | Sequence[float],
    exact: Callable[[], Sum],
    variate: Callable[[int, str, float], Sum],
) -> nn.ModuleDict:
    """The memories of an estimator's name, by layer; `widths` are those of the layers' inputs.

    `exact()` makes the first layer's, `variate(width, kind, noise)` that of another.
    """
    *parts, kind = one_of(estimator, ESTIMATORS, "estimator").split("+")
    each, memories = dial(noise, len(widths)), {}
    if "exact" in (*parts, kind):
        memories["0"] = exact()
    if controlled(kind):
        for layer in range(len(memories), len(widths)):
            of = "history" if kind == "sums" and layer > 1 else kind  # higher up, what is summed changes itself
            memories[str(layer)] = variate(widths[layer], of, each[layer])
    return nn.ModuleDict(memories)


def sum_of_all(conv: Conv, graph: Graph, x: Tensor, storage: Storage = MEMORY, drops: bool = False) -> Sum:
    """The exact first layer of such a convolution; `drops`: the model drops inputs in training."""
    return ExactAttention(graph, x) if conv.attends else ExactSum(graph, x, storage, drops)


def sum_with_variate(
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
    """A sum with a memory of this kind for such a convolution; unless `passes` are made, a history begins empty."""
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
    """Sums over whole rows of weight * features of the edge: constants, whatever is drawn. None without features."""
    return None if graph.attr_sums is None else graph.attr_sums[rows]


@torch.no_grad()
def check_sources(graph: Graph, x: Tensor) -> None:
    if graph.num_edges and len(x) < graph.num_nodes and int(graph.indices.max()) >= len(x):
        raise InputError(f"`x` must have a row for each of the {graph.num_nodes} nodes, got {len(x)}")


def full_sums(graph: Graph, x: Tensor, storage: Storage = MEMORY, rows: int = 1 << 14, squared: bool = False) -> Tensor:
    """A x for every row of the graph, in chunks; x has a row for every source. `squared`: of squared weights and x."""
    check_sources(graph, x)
    edges = graph.edges
    if squared and not edges.mean:  # kernels that know no squares sum squared rows
        if edges.weight is not None:
            edges = edges._replace(weight=edges.weight.square())
        square = storage.empty(tuple(x.shape), x.dtype, x.device)
        for a in range(0, len(x), rows):
            square[a : a + rows] = x[a : a + rows].square()
        x = square
    out = storage.empty((graph.num_rows, *x.shape[1:]), x.dtype, x.device)
    for nodes in torch.arange(graph.num_rows, device=x.device).split(rows):
        graph.soon(nodes)
        out[nodes] = ops.full_sum(x, edges, nodes, squared and edges.mean)
    return out
