"""Sums over rows on the GPU, with their gradients: the launches of `cuda_rows` and `cuda_attend`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from adahop.ops.segments import segment_of, segment_sum
from adahop.ops.summing import cuda_attend, cuda_rows
from adahop.ops.summing.reference import Base, Copies, Drop, onto
from adahop.ops.types import Edges

LONG, PIECES = 256, 32  # a neighbourhood over LONG is summed in as many as PIECES parts


def table(x: Tensor, reader: Tensor) -> Tensor:
    """The same rows, each starting at a multiple of 64 entries: so that a warp can read 16 bytes per thread."""
    n, width = x.shape
    wide = -(-width // 64) * 64
    if wide == width:
        return x.contiguous()
    out = torch.zeros(n, wide, dtype=x.dtype, device=x.device, pin_memory=x.device.type == "cpu" and x.is_pinned())
    out[:, :width] = x
    return out[:, :width]


def _wide(h: Tensor) -> int:
    """How many entries of a row may be read: its padding too, where the storage holds it."""
    held = h.untyped_storage().nbytes() // h.element_size() - h.storage_offset()
    pad = h.stride(0) - h.shape[1] if h.dim() == 2 and len(h) else 0
    return h.stride(0) if 0 < pad < 64 and held >= len(h) * h.stride(0) else h.shape[-1]


def _tile(width: int, h: Tensor) -> int:
    """Columns that one warp takes at a time: a sum over rows then stays within its threads."""
    return min(512 if h.element_size() == 2 else 256, max(32, 1 << (width - 1).bit_length()))


class GatherSum(torch.autograd.Function):
    """out[t, a] = sum of coef[e, a] * h[source, a]; gradients for coef, and for h where no map leads to it."""

    @staticmethod
    def forward(ctx, h, src, rows, coef, ptr, drop, near, whole):
        width, heads, targets = _wide(h), coef.shape[1], ptr.numel() - 1
        out = torch.empty(targets, heads, width, device=src.device)
        ctx.save_for_backward(h, src, rows, coef, ptr)
        ctx.drop, ctx.near = drop, near
        if targets:
            wide = _tile(width, h)
            chunks = -(-width // wide)
            cuda_rows.gather_sum[(targets * chunks, heads)](
                out, h, src, src if rows is None else rows, coef, ptr, *_extra(h, src, drop, near), width,
                *_strides(h), heads, chunks, RB=4, BF=wide, **_flags(rows, drop, near), num_warps=1,
            )  # fmt: skip
        return out if whole else out[..., : h.shape[-1]]

    @staticmethod
    def backward(ctx, grad):
        h, src, rows, coef, ptr = ctx.saved_tensors
        heads, targets = coef.shape[1], ptr.numel() - 1
        dh = dc = None
        if torch.is_grad_enabled() and rows is None and ctx.drop is None and ctx.near is None:
            back = grad[segment_of(ptr, src.numel())]  # a gradient of this gradient will be asked for
            dh = segment_sum(coef.unsqueeze(-1) * back, src, len(h)).to(h.dtype) if ctx.needs_input_grad[0] else None
            dc = (h[src] * back).sum(-1).to(coef.dtype) if ctx.needs_input_grad[3] else None
            return dh, None, None, dc, None, None, None, None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            width = h.shape[-1]
            wide = _tile(width, h)
            chunks = -(-width // wide)
            dh = torch.zeros(h.shape, device=h.device)
            if targets:
                cuda_rows.scatter_sum[(targets * chunks, heads)](
                    dh, grad, src, coef, ptr, width, heads, chunks, RB=4, BF=wide, num_warps=1
                )
            dh = dh.to(h.dtype)
        if ctx.needs_input_grad[3]:
            dc = edge_dot(h, src, rows, grad, ptr, ctx.drop, ctx.near)
        return dh, None, None, dc, None, None, None, None


def _strides(h: Tensor) -> tuple[int, int]:
    """(from row to row, from head to head); a table of rows serves all heads."""
    return h.stride(0), h.stride(1) if h.dim() == 3 else 0


def _extra(h, src, drop, near):
    """(near, place, seed, keep): stand-ins where nothing is dropped or kept near."""
    here = (h, src) if near is None else near
    return (*here, *((src, 1.0) if drop is None else drop))


def _flags(rows, drop, near) -> dict[str, bool]:
    return {"MAP": rows is not None, "DROP": drop is not None, "NEAR": near is not None}


def gather_sum(
    h: Tensor, src: Tensor, coef: Tensor, ptr: Tensor, rows=None, drop=None, near=None, whole: bool = False
) -> Tensor:
    """h [S, H, C], or a table [N, C] for all heads; coef [M, H] -> [targets, H, C], with `whole` its padding too.

    `rows` maps a source's local id to its row, `drop` = (seed, share kept), `near` = (copies, place of each).
    """
    if h.stride(-1) != 1 or (h.dim() == 3 and h.stride(1) != h.shape[2]):
        h = h.contiguous()
    src, ptr, rows = src.contiguous(), ptr.contiguous(), None if rows is None else rows.contiguous()
    return GatherSum.apply(h, src, rows, coef.float().contiguous(), ptr, drop, near, whole)


def gather_rows(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor, base: Base = None) -> Tensor:
    """`gather_sum` as an operation: by target's pointer, the sums in the dtype of h."""
    if not h.is_floating_point() or h.dtype == torch.float64:
        return NotImplemented
    flat = h.dim() == 2
    if flat:
        h, coef = h.unsqueeze(1), coef.unsqueeze(1)
    out = gather_sum(h, src, coef, ptr).to(h.dtype)
    return onto(out.squeeze(1) if flat else out, base)


def table_sum(
    h: Tensor, src: Tensor, coef: Tensor, ptr: Tensor, rows: Tensor, drop: Drop = None, near: Copies = None
) -> Tensor:
    return gather_sum(h, src, coef, ptr, rows, drop, near, True)


def table_rows(h: Tensor, n_id: Tensor, drop: Drop = None, near: Copies = None) -> Tensor:
    place, one = torch.arange(n_id.numel() + 1, device=n_id.device), torch.ones(n_id.numel(), 1, device=n_id.device)
    return gather_sum(h, place[:-1], one, place, n_id, drop, near, True).squeeze(1)


def fetch(ids: Tensor, table: Tensor, near: Tensor, place: Tensor) -> Tensor:
    """table[ids]: rows without a copy are read where they lie, so that the host need not know which they are."""
    if table.device != ids.device and not table.is_pinned():
        return NotImplemented
    ids, table = ids.contiguous(), table.contiguous()
    out = torch.empty(ids.numel(), *table.shape[1:], dtype=table.dtype, device=ids.device)
    width = out[0].numel() if len(out) else 0
    if width:
        wide = _tile(width, table)
        chunks = -(-width // wide)
        cuda_rows.fetch[(ids.numel() * chunks,)](
            out, table, near if len(near) else out, place, ids, width, chunks, BF=wide, num_warps=1
        )
    return out


class TableDot(torch.autograd.Function):
    """<x_j, v> of every edge's source and row of v; the gradient of v is a weighted sum of the same rows."""

    @staticmethod
    def forward(ctx, v, h, src, ptr, rows, drop, near):
        ctx.save_for_backward(h, src, ptr, rows)
        ctx.drop, ctx.near = drop, near
        return edge_dot(h, src, rows, v.detach().float(), ptr, drop, near)

    @staticmethod
    def backward(ctx, grad):
        h, src, ptr, rows = ctx.saved_tensors
        parts = gather_sum(h, src, grad, ptr, rows, ctx.drop, ctx.near)
        return parts.sum(0), None, None, None, None, None, None


def table_dot(
    h: Tensor, src: Tensor, v: Tensor, ptr: Tensor, rows: Tensor, drop: Drop = None, near: Copies = None
) -> Tensor:
    return TableDot.apply(v, h, src.contiguous(), ptr.contiguous(), rows.contiguous(), drop, near)


def attend(
    s: Tensor, t: Tensor, src: Tensor, dst: Tensor, ptr: Tensor, scale: Tensor, slope: float, slots: int, by_edge: bool
) -> Tensor:
    """For targets of `slots` edges each, in one kernel and one for the gradients."""
    if not slots:
        return NotImplemented
    src, ptr, scale = src.contiguous(), ptr.contiguous(), scale.contiguous()
    return cuda_attend.Attend.apply(s, t, src, ptr, scale, slope, slots, by_edge)


def widened(weight: Tensor, h: Tensor) -> Tensor:
    """Rows of a table end in zeros up to a multiple of 64, for products."""
    extra = h.shape[-1] - weight.shape[-1]
    return pad(weight, (0, extra)) if h.shape[-1] % 64 == 0 and 0 < extra < 64 else weight


def edge_dot(h: Tensor, src: Tensor, rows: Tensor | None, grad: Tensor, ptr: Tensor, drop=None, near=None) -> Tensor:
    """[M, H]: <h[source, a], grad[target, a]>, or with grad [H, C] the same row for every target."""
    heads, width, every = grad.shape[-2], grad.shape[-1], int(grad.dim() == 3)
    out = torch.zeros(src.numel(), heads, device=src.device)  # edges after those of `ptr` count for nothing
    if ptr.numel() > 1:
        cuda_rows.edge_dot[(ptr.numel() - 1, heads)](
            out, h, src, src if rows is None else rows, grad.contiguous(), ptr, *_extra(h, src, drop, near), width,
            *_strides(h), heads, every, RB=4, BF=_tile(width, h), **_flags(rows, drop, near), num_warps=1,
        )  # fmt: skip
    return out


def energies(
    h: Tensor, src: Tensor, coef: Tensor, times: Tensor | None = None, divisor: tuple[Tensor, Tensor] | None = None,
    square: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[M]: |coef h[source]|^2, heads summed; h [S, C] with coef [M], or [S, H, C] with [M, H]."""
    if not h.dtype == coef.dtype == torch.float32 or any(t is not None for t in (times, divisor, square)):
        return NotImplemented
    out = torch.empty(src.numel(), device=src.device)
    if src.numel():
        h, src, coef = h.detach().contiguous(), src.contiguous(), coef.detach().contiguous()
        cuda_rows.energies[(-(-src.numel() // 16),)](
            out, h, src, coef, h.shape[-1], coef.numel() // src.numel(), src.numel(), TB=16, BF=64, num_warps=2
        )
    return out


def known_energies(square: Tensor, rows: Tensor, src: Tensor, coef: Tensor) -> Tensor:
    """[M]: |coef|^2 square[rows[source]], heads summed."""
    out = torch.empty(src.numel(), device=src.device)
    if src.numel():
        square, rows, src = square.contiguous(), rows.contiguous(), src.contiguous()
        coef = coef.detach().contiguous()
        cuda_rows.known_energies[(-(-src.numel() // 256),)](
            out, square, rows, src, coef, coef.numel() // src.numel(), src.numel(), TB=256, num_warps=4
        )
    return out


def full_sum(h: Tensor, edges: Edges, rows: Tensor, squared: bool = False) -> Tensor:
    """Sum over all edges of each row of weight * h[source]; long rows in parts when they are few."""
    if squared:
        return NotImplemented
    rows, h = rows.contiguous(), h if h.stride(1) == 1 else h.contiguous()
    many, width = rows.numel(), h.shape[1]
    wide = _tile(width, h)
    pieces, chunks = PIECES if many <= 4096 else 1, -(-width // wide)
    out = torch.empty(many, pieces, width, device=rows.device)
    if many:
        weight = edges.weight
        cuda_rows.full_sum[(many * chunks, pieces)](
            out, h, edges.begin, edges.last, edges.indices, h if weight is None else weight, rows, width, h.stride(0),
            chunks, pieces, LONG=LONG, RB=16, BF=wide, WEIGHTED=weight is not None, num_warps=1,
        )  # fmt: skip
    return out.sum(1) if pieces > 1 else out.squeeze(1)
