"""Sums over rows on the GPU, with their gradients: the launches of `gpu_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.ops import gpu_rows

LONG, PIECES = 256, 32  # a neighbourhood over LONG is summed in as many as PIECES parts


def table(x: Tensor) -> Tensor:
    """The same rows, each starting at a multiple of 64 entries: what lets a warp read 16 bytes a thread."""
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
            gpu_rows.gather_sum[(targets * chunks, heads)](
                out, h, src, src if rows is None else rows, coef, ptr, *_extra(h, src, drop, near), width,
                *_strides(h), heads, chunks, RB=4, BF=wide, **_flags(rows, drop, near), num_warps=1,
            )  # fmt: skip
        return out if whole else out[..., : h.shape[-1]]

    @staticmethod
    def backward(ctx, grad):
        h, src, rows, coef, ptr = ctx.saved_tensors
        heads, targets = coef.shape[1], ptr.numel() - 1
        dh = dc = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            width = h.shape[-1]
            wide = _tile(width, h)
            chunks = -(-width // wide)
            dh = torch.zeros(h.shape, device=h.device)
            if targets:
                gpu_rows.scatter_sum[(targets * chunks, heads)](
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
    return GatherSum.apply(h, src, rows, coef.float().contiguous(), ptr, drop, near, whole)


def rows(h: Tensor, n_id: Tensor, drop=None, near=None) -> Tensor:
    """h[n_id] of a table, float32, its padding too."""
    place, one = torch.arange(n_id.numel() + 1, device=n_id.device), torch.ones(n_id.numel(), 1, device=n_id.device)
    return gather_sum(h, place[:-1], one, place, n_id, drop, near, True).squeeze(1)


def edge_dot(h: Tensor, src: Tensor, rows: Tensor | None, grad: Tensor, ptr: Tensor, drop=None, near=None) -> Tensor:
    """[M, H]: <h[source, a], grad[target, a]>, or with grad [H, C] the same row for every target."""
    heads, width, every = grad.shape[-2], grad.shape[-1], int(grad.dim() == 3)
    out = torch.empty(src.numel(), heads, device=src.device)
    if ptr.numel() > 1:
        gpu_rows.edge_dot[(ptr.numel() - 1, heads)](
            out, h, src, src if rows is None else rows, grad.contiguous(), ptr, *_extra(h, src, drop, near), width,
            *_strides(h), heads, every, RB=4, BF=_tile(width, h), **_flags(rows, drop, near), num_warps=1,
        )  # fmt: skip
    return out


def energies(h: Tensor, src: Tensor, coef: Tensor) -> Tensor:
    """[M]: |coef h[source]|^2, heads summed; h [S, C] with coef [M], or [S, H, C] with [M, H]."""
    out = torch.empty(src.numel(), device=src.device)
    if src.numel():
        h, coef = h.detach().contiguous(), coef.detach().contiguous()
        gpu_rows.energies[(-(-src.numel() // 16),)](
            out, h, src, coef, h.shape[-1], coef.numel() // src.numel(), src.numel(), TB=16, BF=64, num_warps=2
        )
    return out


def known_energies(square: Tensor, rows: Tensor, src: Tensor, coef: Tensor) -> Tensor:
    """[M]: |coef|^2 square[rows[source]], heads summed."""
    out = torch.empty(src.numel(), device=src.device)
    if src.numel():
        coef = coef.detach().contiguous()
        gpu_rows.known_energies[(-(-src.numel() // 256),)](
            out, square, rows, src, coef, coef.numel() // src.numel(), src.numel(), TB=256, num_warps=4
        )
    return out


def full_sum(h: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, nodes: Tensor) -> Tensor:
    """Sum over all in-edges of each node of weight * h[source]; long neighbourhoods in parts when nodes are few."""
    many, width = nodes.numel(), h.shape[1]
    wide = _tile(width, h)
    pieces, chunks = PIECES if many <= 4096 else 1, -(-width // wide)
    out = torch.empty(many, pieces, width, device=nodes.device)
    if many:
        gpu_rows.full_sum[(many * chunks, pieces)](
            out, h, indptr, indices, h if weight is None else weight, nodes, width, h.stride(0), chunks, pieces,
            LONG=LONG, RB=16, BF=wide, WEIGHTED=weight is not None, num_warps=1,
        )  # fmt: skip
    return out.sum(1) if pieces > 1 else out.squeeze(1)
