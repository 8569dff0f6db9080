"""scaled(conv): the unbiased scale inside layers that know of no edge weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from adahop.checks import InputError, KindError
from adahop.ops import segment_sum
from adahop.pyg.align import align
from adahop.pyg.norm import Norm, normalises

ATTENTION = (GATConv, GATv2Conv, TransformerConv)
_NAME = "_adahop_scale"


class Scale:
    """The hooks of one layer: where the scale comes from, and how it enters the messages.

    sum: m scale. mean: m scale k/n, k the target's messages here and n those of the whole graph; where n is not known
    (no loader listens), sum of scale stands in for it. attention: alpha scale / sum of alpha scale, before the
    layer's own dropout (self-normalised, Hajek). While a loader listens, a target's k drawn edges together weigh k
    there, not n: a self-loop keeps the share that PyG's samples give it, and uniform draws change nothing.
    """

    def __init__(self, conv: MessagePassing):
        if isinstance(conv, ATTENTION):
            self.kind = "attention"
        elif conv.aggr in ("add", "sum", "mean"):
            self.kind = "mean" if conv.aggr == "mean" else "sum"
        else:
            raise InputError(f"`conv` must aggregate by sum, mean or attention to be scaled, got aggr={conv.aggr!r}")
        self.names = list(inspect.signature(conv.forward).parameters)
        self.batch: Any = None  # set while a loader listens
        self.listens = True  # whether energies are of use to it
        self.given: tuple[Tensor, Tensor] | None = None
        self.scale: Tensor | None = None
        self.index: Tensor | None = None
        self.energy: Tensor | None = None  # of the last messages
        self.degree: Tensor | None = None
        self.share: Tensor | None = None
        self.rate = 0.0
        conv.register_forward_pre_hook(self.before, with_kwargs=True)
        conv.register_propagate_forward_pre_hook(self.edges)
        conv.register_message_forward_hook(self.message)
        conv.register_forward_hook(self.after, always_call=True)

    def before(self, conv: MessagePassing, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        weight = kwargs.pop("edge_weight", None)
        if weight is not None:
            at = self.names.index("edge_index")
            self.given = (kwargs["edge_index"] if "edge_index" in kwargs else args[at], weight)
        elif self.batch is not None and conv.training:  # evaluation sees every neighbour: nothing to scale
            self.given = (self.batch.edge_index, self.batch.scale)
        if self.given is not None and self.kind == "attention":
            self.rate, conv.dropout = conv.dropout, 0.0  # comes after the scale instead
        return args, kwargs

    def edges(self, conv: MessagePassing, inputs: tuple) -> None:
        if self.given is None:
            return
        self.index, self.scale = inputs[0][1], self.lined_up(inputs[0], type(conv).__name__)
        if self.scale is None or self.batch is None or not conv.training:
            return
        if self.kind == "attention":
            self.share = self.drawn_share(inputs[0], type(conv).__name__)
            self.scale = self.scale * self.share
        elif inputs[0] is self.given[0]:
            self.degree = getattr(self.batch, "full_degree", None)

    def drawn_share(self, used: Tensor, layer: str) -> Tensor:
        """[M] k / n of each edge's target, n by the sum of scale; 1 for self-loops."""
        i, j = align(self.batch.edge_index, used, layer)
        scale, row = self.batch.scale[i], used[1, j]
        n = int(row.max()) + 1 if row.numel() else 0
        share = segment_sum(torch.ones_like(scale), row, n) / segment_sum(scale, row, n).clamp(min=1e-30)
        return scale.new_ones(used.shape[1]).index_copy(0, j, share[row])

    def lined_up(self, used: Tensor, layer: str) -> Tensor | None:
        """The scale of the edges that the layer uses; self-loops it added have none, so 1."""
        if self.given is None:
            return None
        edge_index, weight = self.given[0], self.given[1].view(-1)
        if used.shape == edge_index.shape and torch.equal(used, edge_index):
            self.given = (used, weight)
            return weight
        i, j = align(edge_index, used, layer)
        return weight.new_ones(used.shape[1]).index_copy(0, j, weight[i])

    def message(self, conv: MessagePassing, inputs: tuple, out: Tensor) -> Tensor | None:
        if self.scale is None or self.index is None:
            return None
        s, row = self.scale.to(out.dtype), self.index
        n, heard = int(row.max()) + 1 if row.numel() else 0, self.batch is not None and self.listens
        if self.kind == "attention":
            alpha = inputs[0].get("alpha")
            alpha = conv._alpha if alpha is None else alpha
            total = segment_sum(alpha * s[:, None], row, n)[row].clamp(min=1e-30)
            self.energy = deviation(out, alpha, s, total, row, n) if heard else None
            if self.energy is not None and self.share is not None:
                self.energy = self.energy / self.share.square().clamp(min=1e-30)  # of the scale as it was drawn
            factor = dropout(s[:, None] / total, self.rate, conv.training)
        elif self.kind == "mean":
            count = segment_sum(torch.ones_like(s), row, n)
            total = segment_sum(s, row, n) if self.degree is None else self.degree[:n].to(s.dtype)
            factor = s * (count / total.clamp(min=1e-30))[row]
        else:
            factor = s
        if self.kind != "attention":  # a mean's normaliser would cap what a rare edge can say: that of m scale itself
            self.energy = s.detach().float().square() * energy_of(out) if heard else None
        return out * factor.view(*factor.shape, *[1] * (out.dim() - factor.dim()))

    def after(self, conv: MessagePassing, inputs: tuple, out: Any) -> None:
        if self.given is not None and self.kind == "attention":
            conv.dropout = self.rate
        self.given = self.scale = self.index = self.degree = self.share = None


class Given:
    """The hook of a layer that takes an edge weight: while a loader listens and none is given, the batch's is."""

    energy: Tensor | None = None
    given: tuple[Tensor, Tensor] | None = None
    listens = True

    def __init__(self, conv: MessagePassing):
        self.batch: Any = None
        self.names = list(inspect.signature(conv.forward).parameters)
        conv.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, conv: MessagePassing, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        words = {**dict(zip(self.names, args, strict=False)), **kwargs}
        used = words["edge_index"]
        if self.batch is None or not conv.training or words.get("edge_weight") is not None:
            return None
        if not torch.equal(used, self.batch.edge_index[:, : used.shape[1]]):  # all, or the first hops alone
            return None
        return (), {**words, "edge_weight": self.batch.edge_weight[: used.shape[1]]}

    def lined_up(self, used: Tensor, layer: str) -> None:
        return None


def energy_of(out: Tensor) -> Tensor:
    """|m|^2 of every message, in single precision whatever the layer computes in."""
    return out.detach().float().square().flatten(1).sum(1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """[M, H] inner products of [M, H, C], without a product of that size in between."""
    return torch.einsum("mhc,mhc->mh", a, b)


@torch.no_grad()
def deviation(out: Tensor, alpha: Tensor, s: Tensor, total: Tensor, row: Tensor, n: int) -> Tensor:
    """What an edge's draw moves in an average that is normalised by the sample itself: |scale a_ij (x_j - mean)|^2.

    out [M, H, C] = alpha x_j; the mean is that of the target's other messages, and a_ij the attention over its average
    (sum of scale alpha over sum of scale), so that targets of many and of few neighbours say the same of a source.
    A message without others is taken by itself.
    """
    out, s, total = out.float(), s.float(), total.float()
    alpha, weigh = alpha.float().clamp(min=1e-12), s[:, None] / total.clamp(min=1e-12)
    mean = segment_sum((out * weigh.unsqueeze(-1)).flatten(1), row, n).view(n, *out.shape[1:])
    square = dot(out, out) / alpha.square()
    apart = square - 2.0 * dot(out, mean[row]) / alpha + dot(mean, mean)[row]  # |x_j - mean of all|^2
    rest = 1.0 - alpha * weigh
    apart = torch.where(rest > 0.05, apart.clamp(min=0.0) / rest.clamp(min=0.05).square(), square)
    relative = alpha * weigh * segment_sum(s, row, n)[row].unsqueeze(1)  # scale a_ij
    return (relative.square() * apart).sum(1)


def scale_of(conv: nn.Module) -> Scale | Norm | Given | None:
    return conv.__dict__.get(_NAME)


def scaled(conv: MessagePassing) -> MessagePassing:
    """The same layer, which now takes `edge_weight=` and applies it, if it did not before.

    GCNConv(normalize=True) takes its degrees from the whole graph then, while a loader listens (see `Norm`).
    Without `edge_weight` it uses the scale of the batch while a loader listens (`feedback`, `learn`), else none.

    >>> from torch_geometric.nn import GINConv
    >>> conv = scaled(GINConv(nn.Identity()))
    >>> conv(torch.ones(2, 1), torch.tensor([[1], [0]]), edge_weight=torch.tensor([3.0])).tolist()
    [[4.0], [1.0]]
    """
    if not isinstance(conv, MessagePassing):
        raise KindError(f"`conv` must be a PyG layer that passes messages, got {type(conv).__name__}")
    if scale_of(conv) is not None:
        return conv
    if "edge_weight" not in inspect.signature(conv.forward).parameters:
        conv.__dict__[_NAME] = Scale(conv)
    elif normalises(conv):
        conv.__dict__[_NAME] = Norm(conv)
    elif conv.aggr in ("add", "sum"):
        conv.__dict__[_NAME] = Given(conv)
    return conv


def scale_messages(model: nn.Module) -> nn.Module:
    """`scaled` for every layer of a model. PyG's own models (GraphSAGE, GIN, GAT) then heed their `edge_weight`."""
    layers = [m for m in model.modules() if isinstance(m, MessagePassing)]
    if not layers:
        raise InputError(f"`model` must have PyG layers that pass messages, got {type(model).__name__} with none")
    for m in layers:
        scaled(m)
    for m in model.modules():
        if isinstance(m, BasicGNN):
            m.__dict__["supports_edge_weight"] = True
    return model
