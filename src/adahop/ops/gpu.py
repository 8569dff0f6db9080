"""The GPU's form of each operation: Triton kernels on CUDA tensors (or, interpreted, on the CPU's in tests)."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.ops import gpu_draw, gpu_learn, gpu_rows, gpu_subset
from adahop.ops.kinds import Drawn, Flat, Odds
from adahop.ops.random import Stream

BLOCK, WARPS = 512, 4  # neighbours scanned at a time
LONG, PIECES = 256, 16  # a neighbourhood over LONG is summed in as many as PIECES parts
_owner: dict[tuple, Tensor] = {}  # scratch of the updates, by device and size; at rest nobody owns a node
_track: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}


def power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def flat(
    graph: tuple[Tensor, Tensor, Tensor, Tensor | None], dst: Tensor, k: int | Tensor, loops: int, how: str,
    odds: Odds, key: int | Stream,
) -> Flat:  # fmt: skip
    """`loops` + k slots a target, see `gpu_draw`; `graph` is (indptr, first, indices, weight), `k` one or a tensor."""
    indptr, first, indices, weight = graph
    each = isinstance(k, Tensor)
    rows, most = dst.numel(), int(k.max()) if each and k.numel() else 0 if each else k
    m, device = rows * (loops + most), dst.device
    out = Flat(
        torch.empty(rows * (1 + most), dtype=torch.long, device=device),
        torch.empty(m, dtype=torch.long, device=device),
        *(torch.empty(m, device=device) for _ in range(3)),
        rows, loops, most,
    )  # fmt: skip
    stream = key if isinstance(key, Stream) else Stream(key, indptr, 0)
    args = (indptr, first, indices, indptr if weight is None else weight, dst, k if each else dst, *out[:5], *stream, rows)
    flags = {"K": most, "L": loops, "EACH": each, "STEPS": isinstance(key, Stream), "WEIGHTED": weight is not None,
             "KP": power(max(most, 2))}  # fmt: skip
    if rows == 0:
        return out
    if odds.edge is None and odds.node is None:
        tb = max(1, 256 // flags["KP"])
        gpu_draw.uniform[(-(-rows // tb),)](*args, **flags, TB=tb, SUBSET=how != "multinomial", num_warps=2)
        return out
    form = 0 if odds.edge is None else 2 if odds.log else 1
    args = (*args, indptr if odds.edge is None else odds.edge, indptr if odds.node is None else odds.node, odds.eta)
    flags |= {"BLK": BLOCK, "EDGE": form, "NODE": odds.node is not None, "num_warps": WARPS}
    if how == "multinomial":
        gpu_draw.multinomial[(rows,)](*args, **flags)
    else:
        gpu_subset.subset[(rows,)](*args, **flags, LEVELS=BLOCK.bit_length() - 1, PAIRS=how == "depround")
    return out


def draw(
    indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: Tensor, how: str, odds: Odds, key: int | Stream
) -> Drawn:
    """The same without empty slots."""
    loops = int((first[dst] - indptr[dst]).max()) if dst.numel() else 0
    size = int(k[0]) if k.numel() == 1 else k.contiguous()
    f = flat((indptr, first, indices, None), dst, size, loops, how, odds, key)
    used = f.scale > 0
    ptr = torch.zeros(f.rows + 1, dtype=torch.long, device=dst.device)
    if used.numel():
        torch.cumsum(used.view(f.rows, -1).sum(1), 0, out=ptr[1:])
    return Drawn(ptr, f.pos[used], f.prob[used], f.scale[used])


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


class GatherSum(torch.autograd.Function):
    """out[t, a] = sum of coef[e, a] * h[source, a]; gradients for h (where it is not a table read by a map) and coef."""

    @staticmethod
    def forward(ctx, h, src, rows, coef, ptr, drop, near):
        width, heads, targets = _wide(h), coef.shape[1], ptr.numel() - 1
        out = torch.empty(targets, heads, width, device=src.device)
        ctx.save_for_backward(h, src, rows, coef, ptr)
        ctx.drop, ctx.near = drop, near
        if targets:
            chunks = -(-width // 128)
            gpu_rows.gather_sum[(targets * chunks, heads)](
                out, h, src, src if rows is None else rows, coef, ptr, *_extra(h, src, drop, near), width,
                *_strides(h), heads, chunks, RB=16, BF=128, **_flags(rows, drop, near), num_warps=4,
            )  # fmt: skip
        return out[..., : h.shape[-1]]

    @staticmethod
    def backward(ctx, grad):
        h, src, rows, coef, ptr = ctx.saved_tensors
        heads, targets = coef.shape[1], ptr.numel() - 1
        dh = dc = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            width = h.shape[-1]
            chunks = -(-width // 128)
            dh = torch.zeros(h.shape, device=h.device)
            if targets:
                gpu_rows.scatter_sum[(targets * chunks, heads)](
                    dh, grad, src, coef, ptr, width, heads, chunks, RB=16, BF=128, num_warps=4
                )
            dh = dh.to(h.dtype)
        if ctx.needs_input_grad[3]:
            dc = edge_dot(h, src, rows, grad, ptr, ctx.drop, ctx.near)
        return dh, None, None, dc, None, None, None


def _strides(h: Tensor) -> tuple[int, int]:
    """(from row to row, from head to head); a table of rows serves all heads."""
    return h.stride(0), h.stride(1) if h.dim() == 3 else 0


def _extra(h, src, drop, near):
    """(near, place, seed, keep): stand-ins where nothing is dropped or kept near."""
    here = (h, src) if near is None else near
    return (*here, *((src, 1.0) if drop is None else drop))


def _flags(rows, drop, near) -> dict[str, bool]:
    return {"MAP": rows is not None, "DROP": drop is not None, "NEAR": near is not None}


def gather_sum(h: Tensor, src: Tensor, coef: Tensor, ptr: Tensor, rows=None, drop=None, near=None) -> Tensor:
    """h [S, H, C], or a table [N, C] for all heads; coef [M, H] -> [targets, H, C].

    `rows` maps a source's local id to its row, `drop` = (seed tensor, share kept), `near` = (copies, place of each row).
    """
    if h.stride(-1) != 1 or (h.dim() == 3 and h.stride(1) != h.shape[2]):
        h = h.contiguous()
    return GatherSum.apply(h, src, rows, coef.float().contiguous(), ptr, drop, near)


def edge_dot(h: Tensor, src: Tensor, rows: Tensor | None, grad: Tensor, ptr: Tensor, drop=None, near=None) -> Tensor:
    """[M, H]: <h[source, a], grad[target, a]>, or with grad [H, C] the same row for every target."""
    heads, width, every = grad.shape[-2], grad.shape[-1], int(grad.dim() == 3)
    out = torch.empty(src.numel(), heads, device=src.device)
    if ptr.numel() > 1:
        gpu_rows.edge_dot[(ptr.numel() - 1, heads)](
            out, h, src, src if rows is None else rows, grad.contiguous(), ptr, *_extra(h, src, drop, near), width,
            *_strides(h), heads, every, RB=16, BF=128, **_flags(rows, drop, near), num_warps=4,
        )  # fmt: skip
    return out


def full_sum(h: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, nodes: Tensor) -> Tensor:
    """Sum over all in-edges of each node of weight * h[source]; long neighbourhoods in parts when nodes are few."""
    many, width = nodes.numel(), h.shape[1]
    pieces, chunks = PIECES if many <= 4096 else 1, -(-width // 128)
    out = torch.empty(many, pieces, width, device=nodes.device)
    if many:
        gpu_rows.full_sum[(many * chunks, pieces)](
            out, h, indptr, indices, h if weight is None else weight, nodes, width, h.stride(0), chunks, pieces,
            LONG=LONG, RB=32, BF=128, WEIGHTED=weight is not None, num_warps=4,
        )  # fmt: skip
    return out.sum(1) if pieces > 1 else out.squeeze(1)


def _claim(node: Tensor, nodes: int) -> Tensor:
    """Who owns each node of a block: the first row that has it."""
    name = (node.device, nodes)
    if name not in _owner:
        _owner[name] = torch.full((nodes,), 2147483647, dtype=torch.int32, device=node.device)
    gpu_learn.claim[(-(-node.numel() // 256),)](_owner[name], node, node.numel(), TB=256, num_warps=4)
    return _owner[name]


def add_log_weights(dst, ptr, pos, gain, first, indptr, log_weight, log=True) -> None:
    if dst.numel() == 0 or pos.numel() == 0:
        return
    most = int(ptr.diff().max()) if pos.numel() % dst.numel() else pos.numel() // dst.numel()
    owner = _claim(dst, first.numel())
    gpu_learn.add_weights[(dst.numel(),)](
        owner, dst, ptr, pos, gain, first, indptr, log_weight, S=power(most), BLK=BLOCK, LOG=log, num_warps=1
    )


def exp3(node, ptr, pos, prob, scale, energy, first, indptr, weight, mean, visits, step, root, memory, once, slots, log):
    """One fused update of EXP3's state for a block with as many as `slots` edges a target."""
    if node.numel() == 0:
        return
    owner = _claim(node, first.numel())
    gpu_learn.exp3[(node.numel(),)](
        owner, node, ptr, pos, prob, scale, energy, first, indptr, weight, mean, visits, step, memory,
        S=power(slots), BLK=BLOCK, LOG=log, ROOT=root, ONCE=once, num_warps=1,
    )  # fmt: skip


def track(n_id, targets, src, ptr, weight, scale, energy, square, root, visits, level, memory, few, slots) -> None:
    """One update of the tracked norms of the sources of a block; `level` is one number, in place."""
    m = src.numel()
    if m == 0:
        return
    name = (src.device, square.numel())
    if name not in _track:
        total = torch.zeros(square.numel(), device=src.device)
        _track[name] = total, torch.zeros_like(total, dtype=torch.int32), total.new_zeros(2)
    total, times, seen = _track[name]
    owner, mean = _claim(n_id[:targets], square.numel()), torch.empty(m, device=src.device)
    gpu_learn.track_sum[(targets,)](
        owner, n_id, ptr, src, weight, scale, energy, total, times, S=power(slots), num_warps=1
    )
    blocks = (-(-m // 256),)
    gpu_learn.track_mean[blocks](n_id, src, total, times, mean, seen, m, TB=256)
    gpu_learn.track_level[(1,)](level, seen, float(few))
    gpu_learn.track_put[blocks](n_id, src, mean, level, square, root, visits, memory, m, TB=256)
