"""Values: h of the sources of a layer, multiplied out only where that is cheaper; and tables of raw features: sparse,
of several node types, on a GPU.

    sum_j c_j W (E x_j + e) = (W E) sum_j c_j x_j + (W e) sum_j c_j

E is the encoder before the first layer, W the layer's own map; either may be missing. `Values` decides on which side of
the sum to multiply, so that models, estimators and samplers need not know whether h_j was ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from adahop import ops
from adahop.block import Block, Ungathered
from adahop.checks import InputError

T = TypeVar("T")
Drop = tuple[Tensor, float] | None  # (seed, share kept): kernels apply dropout while they read
MAX_PADDING = 2  # one table of all types may have at most this many times the entries of the separate ones


def mapped(h: Tensor | SparseFeatures, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W h + b. W [out, in] for h [..., in]; or W [heads, out, in] for h [rows, heads, in], b [heads, out].

    b may have a row for each row of h; either way it is fused into the product.
    """
    if isinstance(h, SparseFeatures):
        return h.product(weight, bias)
    weight = ops.widened(weight, h)
    if weight.dim() == 2:
        return ops.product(h, weight, bias)
    out = torch.einsum("dhi,hoi->dho", h, weight)
    return out if bias is None else out + bias


def gather(h: Tensor | Ungathered, block: Block, coef: Tensor, base: ops.Base = None) -> Tensor:
    """sum over a target's edges of coef * h[src]: h [S, C] with coef [M]; h [S, H, C] or [S, C] with coef [M, H].

    With `base` (table, rows, keep), keep * table[rows] is added: not for h [S, C] with coef [M, H].
    """
    if not torch.is_tensor(h) and h.table.dtype != torch.float32:  # read in place where coef needs no gradient
        if base is None and not coef.requires_grad:
            total = ops.table_sum(h.table, block.src, coef.view(len(coef), -1), block.ptr, h.n_id)
            return total if coef.dim() == 2 else total.squeeze(1)
        h = h.gathered()
    src = block.src if torch.is_tensor(h) else h.n_id.index_select(0, block.src)
    h = h if torch.is_tensor(h) else h.table
    if coef.dim() == 2 and h.dim() == 2:
        return ops.gather_heads(h, src, block.dst, coef, block.ptr)
    return ops.gather_sum(h, src, block.dst, coef, block.ptr, base)


def shares(block: Block, coef: Tensor) -> Tensor:
    """The sum of the coefficients of each target."""
    if block.slots:
        return coef.view(block.num_dst, block.slots, *coef.shape[1:]).sum(1)
    return ops.segment_sum(coef, block.dst, block.num_dst)


class Values:
    """h_j = E x_j + e of the sources of a block, multiplied out only where that is cheaper.

    x holds a row per source, gathered or not; without an `encoder` h is x itself. A `share` of x is dropped, once.
    `shared`: many blocks read the same values, as in a pass over the whole graph. `mean`: the values of the same
    sources without dropout, here and in the layers below, for a sum that `separates_dropout`. `square`: |h|^2 of every
    source where it is known. `recompute`: h of any nodes, from what the layer below stores of them.

    >>> values = Values(torch.eye(3), nn.Linear(3, 2))
    >>> values.rows().shape, values.rows(1).shape
    (torch.Size([3, 2]), torch.Size([1, 2]))
    """

    def __init__(
        self,
        x: Tensor | Ungathered | SparseFeatures,
        encoder: nn.Linear | None = None,
        share: float = 0.0,
        shared: bool = False,
        mean: Values | None = None,
        square: Tensor | None = None,
    ):
        self.x, self.encoder, self.share, self.shared, self.mean = x, encoder, share, shared, mean
        self.square = square
        self.recompute: Callable[[Tensor], Tensor] | None = None
        self.cached: dict[str, Any] = {}
        self.views: dict[int, Values] = {}

    def of_relation(self, relation: int, source: str) -> Values:
        """The same values for one relation, with sources of one type and a cache of their own."""
        if relation not in self.views:
            self.views[relation] = self._for_source(source)
        view = self.views[relation]
        view.mean = None if self.mean is None else self.mean.of_relation(relation, source)
        return view

    def _for_source(self, source: str) -> Values:
        return Values(self.rows(), shared=self.shared)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make`, cached under this name."""
        if name not in self.cached:
            self.cached[name] = make()
        return self.cached[name]

    def raw(self, n: int | None = None) -> Tensor | SparseFeatures:
        """x of the first n sources (all)."""
        if self.share:
            return self.once("raw", lambda: dropped(gathered(self.x), self.share))[:n]
        return gathered(self.x if n is None else self.x[:n])

    def rows(self, n: int | None = None) -> Tensor:
        """h of the first n sources (all)."""
        if self.encoder is None:
            return dense(self.raw(n))
        if n is None or self._has_rows():
            return self.once("rows", lambda: self._encoded(self.raw()))[:n]
        return self._encoded(self.raw(n))

    def _encoded(self, x: Tensor | SparseFeatures) -> Tensor:
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
        """<h, v> for each row of v: [S, heads] and False, or [M, heads] and True where it is computed edge by edge."""
        direction, bias = self.joined(v)
        assert direction is not None
        return mapped(self._unmapped(), direction, bias), False

    def mapped(self, kernel: Tensor) -> Tensor:
        """W h of every source, cached: [S, out], or with heads [S, heads, out]."""
        return self.once("mapped", lambda: self._mapped(kernel))

    def _mapped(self, kernel: Tensor | None) -> Tensor:
        """W h of every source; h itself without W."""
        x, w, bias = self._unmapped(), *self.joined(kernel)
        if w is None:
            return dense(x)
        out = mapped(x, w.flatten(0, -2), None if bias is None else bias.flatten())
        return out.unflatten(1, w.shape[:-1]) if w.dim() == 3 else out

    @torch.no_grad()
    def norms(self, kernel: Tensor | None = None) -> Tensor:
        """|W h|^2 of every source (|h|^2 without W): [S], or with heads [S, heads]."""
        x, w, bias = self._unmapped(), *self.joined(kernel)
        if w is not None and bias is not None and self._squared(w) and len(x) and "mapped" not in self.cached:
            assert isinstance(x, Tensor)
            square = ((x @ (w.t() @ w)) * x).sum(1)
            return square.add_(x @ (w.t() @ bias), alpha=2.0).add_(bias.square().sum()).clamp_(min=0.0)
        return self._measured(kernel).square().sum(-1)

    def _squared(self, w: Tensor) -> bool:
        """Whether |W E x|^2 is computed from (W E)' W E: where x is narrower than W E x."""
        return w.dim() == 2 and w.shape[1] < w.shape[0] and not self._is_sparse()

    def _measured(self, kernel: Tensor | None) -> Tensor:
        """W h of every source (h without W), for norms: read from the cache, but not written to it."""
        return self.cached["mapped"] if kernel is not None and "mapped" in self.cached else self._mapped(kernel)

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

    # --- on which side of the sum to multiply ------------------------------------------------------------------------

    def _maps_first(self, kernel: Tensor, block: Block) -> bool:
        """Whether W h of every source is cached already, or costs less than wider sums and W times these."""
        if kernel.dim() == 3 or "mapped" in self.cached or (self.encoder is None and self._is_sparse()):
            return True
        out, width = kernel.shape[0], self._width()
        costly = (block.num_src - block.num_dst) * out * width > block.num_edges * (width - out)
        return out < width and (self.shared or not costly)

    def _width(self) -> int:
        return self.x.table.shape[1] if isinstance(self.x, Ungathered) else self.x.shape[1]

    def _has_rows(self) -> bool:
        """Whether E x + e is computed already, or is to be in any case: that of sparse rows costs little."""
        return "rows" in self.cached or (self.encoder is not None and self._is_sparse())

    def _is_sparse(self) -> bool:
        return isinstance(self.x, SparseFeatures)

    def _has_h(self) -> bool:
        """Whether h is computed already: then it is read instead of x."""
        return self.encoder is None or self._has_rows()

    def joined(self, kernel: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(W E, W e), which apply to x; (W, None) where h is computed already."""
        return join(kernel, None if self._has_h() else self.encoder)

    def joined_each(self, kernels: Sequence[Tensor], sources: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """The same for several relations, stacked; `sources` are their source types."""
        return torch.stack(list(kernels)), None

    def _unmapped(self) -> Tensor | SparseFeatures:
        return self.rows() if self._has_rows() else self.raw()

    def summed(self, block: Block, coef: Tensor) -> Tensor:
        """sum of coef * h where h is computed already, else of coef * x; rows not gathered yet are read in place."""
        if self.encoder is not None and self._has_rows():
            return gather(self.rows(), block, coef)
        if isinstance(self.x, SparseFeatures):
            return gather(dense(self.raw()), block, coef)
        return gather(dense(self.raw()) if self.share else self.x, block, coef)


def join(kernel: Tensor | None, encoder: nn.Linear | None) -> tuple[Tensor | None, Tensor | None]:
    """(W E, W e); W or E alone where the other is missing."""
    if encoder is None:
        return kernel, None
    if kernel is None:
        return encoder.weight, encoder.bias
    return kernel @ encoder.weight, kernel @ encoder.bias


def padded_to(wide: int, w: Tensor) -> Tensor:
    """w with zero columns appended, up to this width."""
    return w if w.shape[-1] == wide else pad(w, (0, wide - w.shape[-1]))


def join_each(kernels: Sequence[Tensor], encoders: Sequence[nn.Linear], wide: int) -> tuple[Tensor, Tensor]:
    """(W E [R, out, wide], W e [R, out]) of several relations, by one product each; zeros behind a narrower E."""
    w = torch.stack(list(kernels))
    e = torch.stack([padded_to(wide, encoder.weight) for encoder in encoders])
    return torch.bmm(w, e), torch.bmm(w, torch.stack([encoder.bias for encoder in encoders]).unsqueeze(2)).squeeze(2)


def gathered(x: Tensor | Ungathered | SparseFeatures) -> Tensor | SparseFeatures:
    return x.gathered() if isinstance(x, Ungathered) else x


def dropped(x: Tensor | SparseFeatures, share: float) -> Tensor | SparseFeatures:
    """x with a share of its entries dropped and the others scaled up."""
    return x.dropped(share) if isinstance(x, SparseFeatures) else ops.dropout(x, share)


def dense(x: Tensor | SparseFeatures) -> Tensor:
    return x.dense() if isinstance(x, SparseFeatures) else x


class SparseFeatures:
    """A row of features per node, of which only the entries that are not 0 are stored, row by row (CSR).

    A product with W reads these alone. Some rows of a table are a table again.

    >>> x = SparseFeatures.of(torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 1.0]]))
    >>> x.column.tolist(), x[1:].dense().tolist()
    ([1, 0, 1], [[0.0, 0.0], [3.0, 1.0]])
    """

    def __init__(self, ptr: Tensor, column: Tensor, value: Tensor, width: int, row: Tensor | None = None):
        self.ptr, self.column, self.value, self.width = ptr, column, value, width
        self.row = ops.segment_of(ptr, column.numel()) if row is None else row  # of every entry

    @classmethod
    def of(cls, x: Tensor) -> SparseFeatures:
        row, column = x.nonzero().unbind(1)
        ptr = ops.pointer(torch.bincount(row, minlength=len(x)))
        return cls(ptr, column.contiguous(), x[row, column].float(), x.shape[1])

    def __len__(self) -> int:
        return self.ptr.numel() - 1

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.width

    @property
    def tables(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        return {"ptr": self.ptr, "column": self.column, "value": self.value}

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return sum(t.nbytes for t in self.tables.values())

    def __getitem__(self, rows: slice | Tensor) -> SparseFeatures:
        if isinstance(rows, Tensor):
            return self.index_select(0, rows)
        first, last, _ = rows.indices(len(self))
        ptr = self.ptr[first : last + 1]
        entries = slice(int(ptr[0]), int(ptr[-1]))
        return SparseFeatures(ptr - ptr[0], self.column[entries], self.value[entries], self.width)

    def index_select(self, dim: int, rows: Tensor) -> SparseFeatures:
        first = self.ptr.index_select(0, rows)
        count = self.ptr.index_select(0, rows + 1) - first
        row, place = ops.spans(first, count)
        column, value = (t.index_select(0, place) for t in (self.column, self.value))
        return SparseFeatures(ops.pointer(count), column, value, self.width, row)

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """W x + b of every row."""
        out = ops.gather_sum(weight.t().contiguous(), self.column, self.row, self.value, self.ptr)
        return out if bias is None else out + bias

    def dropped(self, share: float) -> SparseFeatures:
        """With a share of all entries dropped, and the others scaled up."""
        return SparseFeatures(self.ptr, self.column, ops.dropout(self.value, share), self.width, self.row)

    def dense(self) -> Tensor:
        out = self.value.new_zeros(self.shape)
        out[self.row, self.column] = self.value
        return out

    def float(self) -> SparseFeatures:
        return self

    def to(self, *args: Any, **options: Any) -> SparseFeatures:
        ptr, column, value, row = (t.to(*args, **options) for t in (self.ptr, self.column, self.value, self.row))
        return SparseFeatures(ptr, column, value, self.width, row)


class Schema(NamedTuple):
    """What a model of a typed graph needs to know: numbers of nodes and features (0: none) by type, and relations."""

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
    """A table of features per node type, None where a type has none; rows are addressed by ids over all types.

    >>> x = TypedFeatures({"paper": torch.ones(2, 3), "author": None}, {"paper": 2, "author": 4}, ())
    >>> len(x), x.schema.starts
    (6, {'paper': 0, 'author': 2})
    """

    def __init__(
        self,
        tables: Mapping[str, Tensor | SparseFeatures | None],
        counts: Mapping[str, int],
        relations: Sequence[tuple[str, str, str]],
    ):
        self.tables = {kind: tables.get(kind) for kind in counts}
        for kind, x in self.tables.items():
            if x is not None and (len(x.shape) != 2 or len(x) != counts[kind]):
                n, got = counts[kind], tuple(x.shape)
                raise InputError(f"`x` of type '{kind}' must have a row for each of its {n} nodes, got shape {got}")
        widths = {kind: 0 if x is None else x.shape[1] for kind, x in self.tables.items()}
        self.schema = Schema(dict(counts), widths, tuple(relations))

    def __len__(self) -> int:
        return sum(self.schema.counts.values())

    def why_separate(self) -> str | None:
        """Why the rows of all types cannot lie in one table; None: they can."""
        widths, counts = self.schema.widths, self.schema.counts
        if not all(widths.values()):
            return "its types without features have learnt rows, which steps update as many as they read"
        if len(self) * max(widths.values()) > MAX_PADDING * sum(n * widths[kind] for kind, n in counts.items()):
            return "its types' features differ too much in width to lie in one table"
        return None

    def joined(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, widest] the rows of all types in one table, narrower ones with zeros behind them."""
        wide = max(self.schema.widths.values())
        tables = [dense(x) for x in self.tables.values() if x is not None]
        out = torch.zeros(len(self), wide, dtype=dtype, device=tables[0].device)
        for start, x in zip(self.schema.starts.values(), tables, strict=True):
            out[start : start + len(x), : x.shape[1]] = x
        return out

    def index_select(self, dim: int, n_id: Tensor) -> TypedRows:
        """Some rows, not gathered yet; a row's id says in which table it lies."""
        return TypedRows(self, n_id)

    __getitem__ = partialmethod(index_select, 0)
    __iter__ = None  # rows of several widths: no array can be made of them

    def to(self, *args: Any, **options: Any) -> TypedFeatures:
        moved = {kind: None if x is None else x.to(*args, **options) for kind, x in self.tables.items()}
        return TypedFeatures(moved, self.schema.counts, self.schema.relations)


class TypedRows:
    """The rows of typed features that a batch reads."""

    def __init__(self, features: TypedFeatures, n_id: Tensor):
        self.features, self.n_id = features, n_id

    def __getitem__(self, rows: slice) -> TypedRows:
        return TypedRows(self.features, self.n_id[rows])

    def to(self, *args: Any, **options: Any) -> TypedRows:
        return TypedRows(self.features.to(*args, **options), self.n_id.to(*args, **options))


class Features:
    """Rows of x, in any floating dtype, on the GPU or, with `cache`, in pinned host memory.

    The `cache` rows that are read most, by `often`, then have a copy on the device; kernels read the others over the
    bus. `hit_rate` is the share of sampled rows that had a copy since the last call.
    """

    def __init__(self, x: Tensor, device: torch.device | str, cache: int | None = None, often: Tensor | None = None):
        here = torch.zeros(0, device=device)
        self.hits, self.reads = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        self.value = ops.table(x.to(device) if cache is None else ops.pinned(x.cpu()), here)
        self.square = _squares(self.value, device)
        self.near: tuple[Tensor, Tensor] | None = None  # the copies, and the place of each row among them or -1
        if cache is None:
            return
        order = torch.arange(len(x)) if often is None else often.cpu().argsort(descending=True, stable=True)
        copied = order[:cache]
        place = torch.full((len(x),), -1, dtype=torch.int32)
        place[copied] = torch.arange(copied.numel(), dtype=torch.int32)
        self.near = ops.table(self.value[copied].to(device), here), place.to(device)

    def drop(self, share: float) -> Drop:
        """A seed for this step's dropout, from torch's generator of the device, and the share that is kept."""
        return torch.empty((), dtype=torch.long, device=self.square.device).random_(), 1.0 - share

    def rows(self, n_id: Tensor, drop: Drop = None) -> Tensor:
        """x[n_id] in float32, with zero columns up to a width that suits matrix products (`mapped` takes them)."""
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
        """From now on, `energies` takes `norms` of a row's raw features for its |m|^2."""
        for at in range(0, len(self.value), 1 << 16):
            part = self.value[at : at + (1 << 16)].to(self.square.device).float()
            self.square[at : at + len(part)] = norms(part)

    @torch.no_grad()
    def energies(self, block: Block, coef: Tensor) -> Tensor:
        """|coef m[source]|^2 of every edge, heads summed, with |m|^2 as of the last `renew`, or |x|^2 before."""
        return ops.known_energies(self.square, block.n_id, block.src, coef)

    def hit_rate(self) -> float:
        """The share of sampled rows that had a copy on the device since the last call; 1 where x itself is there."""
        hits, reads = int(self.hits), int(self.reads)
        self.hits.zero_()
        self.reads.zero_()
        return hits / reads if reads else 1.0


class TableValues(Values):
    """Values over a table of features: kernels read its rows in place, and apply dropout as they read."""

    def __init__(self, table: Features, n_id: Tensor, encoder: nn.Linear | None = None, share: float = 0.0):
        super().__init__(table.value, encoder, share)
        self.table, self.n_id = table, n_id
        self.drop = table.drop(share) if share else None

    def raw(self, n: int | None = None) -> Tensor:
        x = self.table.rows(self.n_id[:n], self.drop)
        return x if self.encoder is not None else x[:, : self._width()]

    def dot(self, v: Tensor, block: Block | None = None) -> tuple[Tensor, bool]:
        if self._has_rows():
            return super().dot(v, block)
        direction, bias = self.joined(v)
        assert block is not None and direction is not None
        t = self.table.dot(block, direction, self.drop)
        return (t if bias is None else t + bias), True

    @torch.no_grad()
    def energies(self, block: Block, coef: Tensor, kernel: Tensor | None = None) -> Tensor:
        if self._has_rows():
            return Values(self.rows()).energies(block, coef, kernel)
        return self.table.energies(block, coef)

    def _maps_first(self, kernel: Tensor, block: Block) -> bool:
        return False

    def summed(self, block: Block, coef: Tensor) -> Tensor:
        if self._has_rows():
            return gather(self.rows(), block, coef)
        total = self.table.sum(block, coef if coef.dim() == 2 else coef.unsqueeze(1), self.drop)
        return total if coef.dim() == 2 else total.squeeze(1)


def _squares(x: Tensor, device: torch.device | str) -> Tensor:
    parts = [part.to(device).float().square().sum(1) for part in x.split(1 << 16)]
    return torch.cat(parts) if parts else torch.zeros(0, device=device)
