"""Values: what the sources of a layer bring to its sum, and where raw features lie.

    sum_j c_j W (E x_j + e) = (W E) sum_j c_j x_j + (W e) sum_j c_j

E is the encoder before the first layer, W the layer's own map; either may be missing. `Values` decides on which side of
the sum to multiply, so that models, estimators and samplers need not know whether h_j was ever formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad

from adahop import ops
from adahop.block import Block, Ungathered
from adahop.checks import InputError

T = TypeVar("T")
Drop = tuple[Tensor, float] | None  # (seed, share kept): entries dropped while they are read
WIDER = 2  # times as many entries as the features have: the most that one table of all types may take


def mapped(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W h + b. W [out, in] for h [..., in]; or W [heads, out, in] for h [rows, heads, in], b [heads, out].

    b may have a row for each of h; either way it joins the product, which costs no pass of its own.
    """
    weight = ops.widened(weight, h)
    if weight.dim() == 2:
        return ops.product(h, weight, bias)
    out = torch.einsum("dhi,hoi->dho", h, weight)
    return out if bias is None else out + bias


def gather(h: Tensor | Ungathered, block: Block, coef: Tensor, base: ops.Base = None) -> Tensor:
    """sum over a target's edges of coef * h[src]: h [S, C] with coef [M]; h [S, H, C] or [S, C] with coef [M, H].

    With `base` (table, rows, keep), on top of keep * table[rows]: not for h [S, C] with coef [M, H].
    """
    if not torch.is_tensor(h) and h.table.dtype != torch.float32:  # read as they lie, where no gradient reads them too
        if base is None and not coef.requires_grad:
            total = ops.table_sum(h.table, block.src, coef.view(len(coef), -1), block.ptr, h.n_id)
            return total if coef.dim() == 2 else total.squeeze(1)
        h = h.gathered()
    src = block.src if torch.is_tensor(h) else h.n_id.index_select(0, block.src)
    h = h if torch.is_tensor(h) else h.table
    if coef.dim() == 2 and h.dim() == 2:
        return torch.stack([ops.gather_sum(h, src, block.dst, c, block.ptr) for c in coef.unbind(1)], 1)
    return ops.gather_sum(h, src, block.dst, coef, block.ptr, base)


def shares(block: Block, coef: Tensor) -> Tensor:
    """The sum of the coefficients of each target."""
    if block.slots:
        return coef.view(block.num_dst, block.slots, *coef.shape[1:]).sum(1)
    return ops.segment_sum(coef, block.dst, block.num_dst)


class Values:
    """h_j = E x_j + e of the sources of a block, multiplied out only where that is cheaper.

    x holds a row per source, gathered or not; without an `encoder` h is x itself. A `share` of x is dropped, once.
    `shared` where many blocks read the same values, as in a pass over the whole graph. `mean` are the values of the
    same sources had nothing been dropped, here or below, where a layer keeps dropout apart. `square` is |h|^2 of every
    source where it is known. `anew` makes h of any nodes from what the layer below keeps of them.

    >>> values = Values(torch.eye(3), nn.Linear(3, 2))
    >>> values.rows().shape, values.rows(1).shape
    (torch.Size([3, 2]), torch.Size([1, 2]))
    """

    def __init__(
        self,
        x: Tensor | Ungathered,
        encoder: nn.Linear | None = None,
        share: float = 0.0,
        shared: bool = False,
        mean: Values | None = None,
        square: Tensor | None = None,
    ):
        self.x, self.encoder, self.share, self.shared, self.mean = x, encoder, share, shared, mean
        self.square = square
        self.anew: Callable[[Tensor], Tensor] | None = None
        self.kept: dict[str, Any] = {}
        self.views: dict[int, Values] = {}

    def of_relation(self, relation: int, source: str) -> Values:
        """The same values as one relation's map reads them, from sources of one type: what it makes is kept apart."""
        if relation not in self.views:
            self.views[relation] = self._from(source)
        view = self.views[relation]
        view.mean = None if self.mean is None else self.mean.of_relation(relation, source)
        return view

    def _from(self, source: str) -> Values:
        return Values(self.rows(), shared=self.shared)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gives, made once for these values."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def raw(self, many: int | None = None) -> Tensor:
        """x of the first `many` sources."""
        if self.share:
            return self.once("raw", lambda: dropout(gathered(self.x), self.share))[:many]
        return gathered(self.x if many is None else self.x[:many])

    def rows(self, many: int | None = None) -> Tensor:
        """h of the first `many` sources."""
        if self.encoder is None:
            return self.raw(many)
        if many is None:
            return self.once("rows", lambda: self._encoded(self.raw()))
        return self.kept["rows"][:many] if "rows" in self.kept else self._encoded(self.raw(many))

    def _encoded(self, x: Tensor) -> Tensor:
        assert self.encoder is not None
        return mapped(x, self.encoder.weight, self.encoder.bias)

    def sum(self, block: Block, coef: Tensor, kernel: Tensor, rest: Tensor | None = None) -> Tensor:
        """rest + sum over a target's edges of coef * W h: [targets, out], or with heads [targets, heads, out]."""
        if self._maps_first(kernel, block):
            total = gather(self.mapped(kernel), block, coef)
            return total if rest is None else total + rest
        w, bias = self.joined(kernel)
        assert w is not None
        total = mapped(self.summed(block, coef), w, rest)
        return total if bias is None else total + shares(block, coef).unsqueeze(-1) * bias

    def dot(self, v: Tensor, block: Block | None = None) -> tuple[Tensor, bool]:
        """<h, v> for each row of v: [S, heads], or [M, heads] and True where it is found by edge."""
        direction, bias = self.joined(v)
        assert direction is not None
        t = self._unmapped() @ direction.t()
        return (t if bias is None else t + bias), False

    def mapped(self, kernel: Tensor) -> Tensor:
        """W h of every source, made once: [S, out], or with heads [S, heads, out]."""

        def make() -> Tensor:
            x, w, bias = self._unmapped(), *self.joined(kernel)
            assert w is not None
            out = mapped(x, w.flatten(0, -2), None if bias is None else bias.flatten())
            return out.unflatten(1, w.shape[:-1]) if w.dim() == 3 else out

        return self.once("mapped", make)

    @torch.no_grad()
    def norms(self, kernel: Tensor | None = None) -> Tensor:
        """|W h|^2 of every source (|h|^2 without W): [S], or with heads [S, heads]."""
        x, w, bias = self._unmapped(), *self.joined(kernel)
        if w is not None and bias is not None and self._squared(w) and len(x) and "mapped" not in self.kept:
            square = ((x @ (w.t() @ w)) * x).sum(1)
            return square.add_(x @ (w.t() @ bias), alpha=2.0).add_(bias.square().sum()).clamp_(min=0.0)
        return self._measured(kernel).square().sum(-1)

    def _squared(self, w: Tensor) -> bool:
        """Whether |W E x| is found by the square of W E: where x is narrower than W E x."""
        return w.dim() == 2 and w.shape[1] < w.shape[0]

    def _measured(self, kernel: Tensor | None) -> Tensor:
        """W h of every source (h without W), for a look at its size alone."""
        if kernel is not None and "mapped" in self.kept:
            return self.kept["mapped"]
        x, w, bias = self._unmapped(), *self.joined(kernel)
        if w is None:
            return x
        value = mapped(x, w.flatten(0, -2), None if bias is None else bias.flatten())
        return value.unflatten(1, w.shape[:-1])

    @torch.no_grad()
    def energies(self, block: Block, coef: Tensor, kernel: Tensor | None = None) -> Tensor:
        """|coef W h[src]|^2 of every edge, heads summed."""
        if kernel is None and self.square is not None:
            return coef.square() * self.square.index_select(0, block.src)
        w, bias = self.joined(kernel)
        if w is None or bias is None or not self._squared(w):
            h = self._measured(kernel)
            if h.dim() == coef.dim() + 1:
                return ops.energies(h, block.src, coef)
        square, norm = coef.square(), self.norms(kernel)[block.src]
        if square.dim() == 1:
            return square * norm
        return (square * (norm if norm.dim() == 2 else norm.unsqueeze(1))).sum(1)

    # --- on which side -----------------------------------------------------------------------------------------------

    def _maps_first(self, kernel: Tensor, block: Block) -> bool:
        """Whether W h of every source, if not at hand, costs less than W of the sums and wider sums."""
        if kernel.dim() == 3 or "mapped" in self.kept:
            return True
        out, width = kernel.shape[0], self._width()
        dear = (block.num_src - block.num_dst) * out * width > block.num_edges * (width - out)
        return out < width and (self.shared or not dear)

    def _width(self) -> int:
        return self.x.table.shape[1] if isinstance(self.x, Ungathered) else self.x.shape[1]

    def _formed(self) -> bool:
        """Whether h itself is at hand: then nothing is gained by going back to x."""
        return self.encoder is None or "rows" in self.kept

    def joined(self, kernel: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(W E, W e), which apply to x; W itself where h is at hand."""
        return join(kernel, None if self._formed() else self.encoder)

    def joined_each(self, kernels: Sequence[Tensor], sources: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """The same for several relations, which read these values from sources of these types, side by side."""
        return torch.stack(list(kernels)), None

    def _unmapped(self) -> Tensor:
        return self.rows() if self._formed() else self.raw()

    def summed(self, block: Block, coef: Tensor) -> Tensor:
        """sum of coef * h where h is at hand, else of coef * x; rows that were not gathered are read where they lie."""
        if self.encoder is not None and "rows" in self.kept:
            return gather(self.rows(), block, coef)
        return gather(self.raw() if self.share else self.x, block, coef)


def join(kernel: Tensor | None, encoder: nn.Linear | None) -> tuple[Tensor | None, Tensor | None]:
    """(W E, W e), W or E where there is no other."""
    if encoder is None:
        return kernel, None
    if kernel is None:
        return encoder.weight, encoder.bias
    return kernel @ encoder.weight, kernel @ encoder.bias


def widened_to(wide: int, w: Tensor) -> Tensor:
    """So many columns, zeros behind those that are there."""
    return w if w.shape[-1] == wide else pad(w, (0, wide - w.shape[-1]))


def join_each(kernels: Sequence[Tensor], encoders: Sequence[nn.Linear], wide: int) -> tuple[Tensor, Tensor]:
    """(W E [R, out, wide], W e [R, out]) of several relations, by one product each; zeros behind a narrower E."""
    w = torch.stack(list(kernels))
    e = torch.stack([widened_to(wide, encoder.weight) for encoder in encoders])
    return torch.bmm(w, e), torch.bmm(w, torch.stack([encoder.bias for encoder in encoders]).unsqueeze(2)).squeeze(2)


def gathered(x: Tensor | Ungathered) -> Tensor:
    return x.gathered() if isinstance(x, Ungathered) else x


class Schema(NamedTuple):
    """What a model over a typed graph has to know: its types with their nodes and features (0: none), its relations."""

    counts: dict[str, int]
    widths: dict[str, int]
    relations: tuple[tuple[str, str, str], ...]  # (source type, name, target type)

    @property
    def starts(self) -> dict[str, int]:
        """The first id of each type."""
        return dict(zip(self.counts, accumulate(self.counts.values(), initial=0), strict=False))

    def first(self, kind: int) -> int:
        """The first id of a type, by its place among the types."""
        return list(self.starts.values())[kind]

    def into(self, kind: int) -> list[int]:
        """The relations into a type, by its place among the types."""
        return [r for r, (_, _, target) in enumerate(self.relations) if target == list(self.counts)[kind]]

    def kind_of(self, n_id: Tensor) -> Tensor:
        """Which type each node has, counted from 0."""
        starts = torch.tensor(list(self.starts.values())[1:], dtype=torch.long, device=n_id.device)
        return torch.bucketize(n_id, starts, right=True)


class TypedFeatures:
    """A table of features per node type, or None where a type has none; nodes are known by their ids over all types.

    >>> x = TypedFeatures({"paper": torch.ones(2, 3), "author": None}, {"paper": 2, "author": 4}, ())
    >>> len(x), x.schema.starts
    (6, {'paper': 0, 'author': 2})
    """

    def __init__(
        self,
        tables: Mapping[str, Tensor | None],
        counts: Mapping[str, int],
        relations: Sequence[tuple[str, str, str]],
    ):
        self.tables = {kind: tables.get(kind) for kind in counts}
        for kind, x in self.tables.items():
            if x is not None and (x.dim() != 2 or len(x) != counts[kind]):
                n, got = counts[kind], tuple(x.shape)
                raise InputError(f"`x` of type '{kind}' must have a row for each of its {n} nodes, got shape {got}")
        widths = {kind: 0 if x is None else x.shape[1] for kind, x in self.tables.items()}
        self.schema = Schema(dict(counts), widths, tuple(relations))

    def __len__(self) -> int:
        return sum(self.schema.counts.values())

    def unjoined(self) -> str | None:
        """Why the rows of all types cannot lie in one table; None: they can."""
        widths, counts = self.schema.widths, self.schema.counts
        if not all(widths.values()):
            return "its types without features have learnt rows, which steps update as many as they read"
        if len(self) * max(widths.values()) > WIDER * sum(n * widths[kind] for kind, n in counts.items()):
            return "its types' features differ too much in width to lie in one table"
        return None

    def joined(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, widest] the rows of all types in one table, narrower ones with zeros behind them."""
        wide = max(self.schema.widths.values())
        tables = [x for x in self.tables.values() if x is not None]
        out = torch.zeros(len(self), wide, dtype=dtype, device=tables[0].device)
        for start, x in zip(self.schema.starts.values(), tables, strict=True):
            out[start : start + len(x), : x.shape[1]] = x
        return out

    def index_select(self, dim: int, n_id: Tensor) -> TypedRows:
        """Some rows, not gathered yet: which table a row lies in is known by its id."""
        return TypedRows(self, n_id)

    __getitem__ = partialmethod(index_select, 0)

    def to(self, *args: Any, **options: Any) -> TypedFeatures:
        moved = {kind: None if x is None else x.to(*args, **options) for kind, x in self.tables.items()}
        return TypedFeatures(moved, self.schema.counts, self.schema.relations)


class TypedRows:
    """Rows of typed features that a batch reads."""

    def __init__(self, features: TypedFeatures, n_id: Tensor):
        self.features, self.n_id = features, n_id

    def __getitem__(self, rows: slice) -> TypedRows:
        return TypedRows(self.features, self.n_id[rows])

    def to(self, *args: Any, **options: Any) -> TypedRows:
        return TypedRows(self.features.to(*args, **options), self.n_id.to(*args, **options))


class Features:
    """Rows of x, in any floating dtype, on the GPU or in pinned host memory (then with copies of `cache` rows near).

    With `cache`, the rows that are read most, by `often`, have a copy on the device; kernels read the others over the
    bus. `hit_rate` says what share of the sampled rows was near since it was asked last.
    """

    def __init__(self, x: Tensor, device: torch.device | str, cache: int | None = None, often: Tensor | None = None):
        here = torch.zeros(0, device=device)
        self.near: tuple[Tensor, Tensor] | None = None
        self.hits, self.reads = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        if cache is None:
            self.value = ops.table(x.to(device), here)
            self.square = _squares(self.value, device)
            return
        self.value = ops.table(ops.pinned(x.cpu()), here)
        self.square = _squares(self.value, device)
        order = torch.arange(len(x)) if often is None else often.cpu().argsort(descending=True, stable=True)
        kept = order[:cache]
        place = torch.full((len(x),), -1, dtype=torch.int32)
        place[kept] = torch.arange(kept.numel(), dtype=torch.int32)
        self.near = ops.table(self.value[kept].to(device), here), place.to(device)

    def drop(self, share: float) -> Drop:
        """A seed for this step's dropout, from torch's own generator on the device."""
        return torch.empty((), dtype=torch.long, device=self.square.device).random_(), 1.0 - share

    def rows(self, n_id: Tensor, drop: Drop = None) -> Tensor:
        """x[n_id] in float32, with columns of zeros up to a width that products like (`mapped` takes them)."""
        return ops.table_rows(self.value, n_id, drop, self.near)

    def sum(self, block: Block, coef: Tensor, drop: Drop = None) -> Tensor:
        """[targets, heads, F and zeros]: sum over a target's edges of coef[:, head] * x[source]."""
        if self.near is not None:
            read = self.near[1][block.n_id]
            self.hits += (read >= 0).sum()
            self.reads += read.numel()
        return ops.table_sum(self.value, block.src, coef, block.ptr, block.n_id, drop, self.near)

    def dot(self, block: Block, v: Tensor, drop: Drop = None) -> Tensor:
        """[M, heads]: <x[source], v[head]>."""
        return ops.table_dot(self.value, block.src, v, block.ptr, block.n_id, drop, self.near)

    @torch.no_grad()
    def renew(self, norms: Callable[[Tensor], Tensor]) -> None:
        """What `energies` takes for |m|^2 of a row from now on: `norms` of its raw features."""
        for at in range(0, len(self.value), 1 << 16):
            part = self.value[at : at + (1 << 16)].to(self.square.device).float()
            self.square[at : at + len(part)] = norms(part)

    @torch.no_grad()
    def energies(self, block: Block, coef: Tensor) -> Tensor:
        """|coef m[source]|^2 of every edge, heads summed: |x|^2 for |m|^2, or what it was when it was renewed."""
        return ops.known_energies(self.square, block.n_id, block.src, coef)

    def hit_rate(self) -> float:
        """The share of sampled rows that had a copy on the device; 1 where all of them live there."""
        hits, reads = int(self.hits), int(self.reads)
        self.hits.zero_()
        self.reads.zero_()
        return hits / reads if reads else 1.0


class TableValues(Values):
    """Values over a table of features: kernels read its rows where they lie, and drop entries as they read."""

    def __init__(self, table: Features, n_id: Tensor, encoder: nn.Linear | None = None, share: float = 0.0):
        super().__init__(table.value, encoder, share)
        self.table, self.n_id = table, n_id
        self.dropped = table.drop(share) if share else None

    def raw(self, many: int | None = None) -> Tensor:
        x = self.table.rows(self.n_id[:many], self.dropped)
        return x if self.encoder is not None else x[:, : self._width()]

    def dot(self, v: Tensor, block: Block | None = None) -> tuple[Tensor, bool]:
        if "rows" in self.kept:
            return super().dot(v, block)
        direction, bias = self.joined(v)
        assert block is not None and direction is not None
        t = self.table.dot(block, direction, self.dropped)
        return (t if bias is None else t + bias), True

    @torch.no_grad()
    def energies(self, block: Block, coef: Tensor, kernel: Tensor | None = None) -> Tensor:
        if "rows" in self.kept:
            return Values(self.rows()).energies(block, coef, kernel)
        return self.table.energies(block, coef)

    def _maps_first(self, kernel: Tensor, block: Block) -> bool:
        return False

    def summed(self, block: Block, coef: Tensor) -> Tensor:
        if "rows" in self.kept:
            return gather(self.rows(), block, coef)
        total = self.table.sum(block, coef if coef.dim() == 2 else coef.unsqueeze(1), self.dropped)
        return total if coef.dim() == 2 else total.squeeze(1)


def _squares(x: Tensor, device: torch.device | str) -> Tensor:
    parts = [part.to(device).float().square().sum(1) for part in x.split(1 << 16)]
    return torch.cat(parts) if parts else torch.zeros(0, device=device)
