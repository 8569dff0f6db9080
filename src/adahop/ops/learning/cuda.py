"""What policies learn from a step, on a GPU: the launches of the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop.ops.buffers import Scratch
from adahop.ops.drawing.cuda import power
from adahop.ops.learning import cuda_update
from adahop.ops.learning import tree as trees
from adahop.ops.learning.reference import Sight, Weights
from adahop.ops.types import Edges, Exp3Rule, TrackRule

BLOCK = 512  # weights scanned at a time
FREE = 2147483647  # of a row that nothing owns
MOST = 64  # entries of a row up to which one may stand in it twice
WIDEST = 256  # the same, where it is known to: all pairs of entries are compared


def _claim(ids: Tensor, size: int, scratch: Scratch) -> Tensor:
    """Who owns each row (or node) of a block: the first entry that has it."""
    owner = scratch.tensor("owner", size, FREE, torch.int32, ids.device)
    cuda_update.claim[(-(-ids.numel() // 256),)](owner, ids, ids.numel(), TB=256, num_warps=4)
    return owner


def _room(sight: Sight) -> int:
    """A power of two that holds the entries of a row; where rows have no slots, one of a few, for all blocks."""
    if sight.slots:
        return power(sight.slots)
    most = int(sight.ptr.diff().max())
    return next(room for room in (16 << i for i in range(0, 32, 2)) if most <= room)


def _shape(sight: Sight) -> tuple[int, bool]:
    """The room of a row's entries, and whether a place may stand in a row twice."""
    many = _room(sight)
    return many, many <= MOST or sight.pos.unique().numel() < sight.pos.numel()


def _warps(room: int) -> int:
    return min(8, max(1, room // 64))


def _dense(sight: Sight) -> Sight:
    return sight._replace(
        **{name: getattr(sight, name).contiguous() for name in ("row", "ptr", "pos", "prob", "scale")}
    )


def _summed(arms: Weights, edges: Edges) -> None:
    """Interpreted on the CPU, the sums of the weights are kept as well."""
    if arms.tree is not None:
        trees.build(edges.first, edges.last, arms.weight, arms.tree)


def grow(sight: Sight, gain: Tensor, edges: Edges, arms: Weights, scratch: Scratch) -> Any:
    """weight[pos] *= exp(gain), a row's gains at once; see `cuda_update`."""
    if sight.row.numel() == 0 or sight.pos.numel() == 0:
        return None
    sight, (many, twice) = _dense(sight), _shape(sight)
    if twice and many > WIDEST:
        return NotImplemented
    owner = _claim(sight.row, edges.first.numel(), scratch)
    cuda_update.grow[(sight.row.numel(),)](
        owner, sight.row, sight.ptr, sight.pos, gain.contiguous(), edges.first, edges.last, arms.weight, S=many,
        BLK=BLOCK, TWICE=twice, num_warps=_warps(many),
    )  # fmt: skip
    _summed(arms, edges)
    return None


def exp3(
    sight: Sight, reward: Tensor, edges: Edges, arms: Weights, mean: Tensor, visits: Tensor, rule: Exp3Rule,
    scratch: Scratch,
) -> Any:  # fmt: skip
    """One fused update of EXP3's state."""
    if sight.row.numel() == 0 or sight.pos.numel() == 0:
        return None
    sight, (many, twice) = _dense(sight), _shape(sight)
    if twice and many > WIDEST:
        return NotImplemented
    owner = _claim(sight.row, edges.first.numel(), scratch)
    cuda_update.exp3[(sight.row.numel(),)](
        owner, *sight[:5], reward.contiguous(), edges.first, edges.last, arms.weight, mean, visits,
        *map(float, (rule.step, rule.memory, rule.eta, rule.horizon)), S=many, BLK=BLOCK, ROOT=rule.root,
        ONCE=not rule.times_k, TWICE=twice, PAPER=rule.paper, num_warps=_warps(many),
    )  # fmt: skip
    _summed(arms, edges)
    return None


def track(
    sources: tuple[Tensor, Tensor, Tensor], sight: Sight, energy: Tensor, weight: Tensor,
    state: tuple[Tensor, Tensor, Tensor], rule: TrackRule, scratch: Scratch, rows: int,
) -> bool:  # fmt: skip
    """One update of the tracked norms of the sources of a block. Draws need no copy here: never due."""
    n_id, src, dst = (t.contiguous() for t in sources)
    sight, weight = _dense(sight), weight.contiguous()
    square, visits, level = state
    m, n, device = src.numel(), square.numel(), src.device
    if m == 0:
        return False
    targets = sight.row.numel()
    total, times, seen = (
        scratch.tensor("total", n, 0.0, torch.float32, device),
        scratch.tensor("times", n, 0, torch.int32, device),
        scratch.tensor("seen", 2, 0.0, torch.float32, device),
    )
    owner, mean = _claim(sight.row, rows, scratch), torch.empty(m, device=device)
    cuda_update.track_sum[(targets,)](
        owner, sight.row, n_id, sight.ptr, src, dst, weight, sight.scale, energy.contiguous(), total, times,
        S=_room(sight), num_warps=1,
    )  # fmt: skip
    blocks = (-(-m // 256),)
    cuda_update.track_mean[blocks](n_id, src, total, times, mean, seen, m, TB=256)
    cuda_update.track_level[(1,)](level, seen, float(rule.few))
    cuda_update.track_put[blocks](n_id, src, mean, level, square, visits, float(rule.memory), rule.most, m, TB=256)
    return False


def push(value: Tensor, n_id: Tensor, h: Tensor, scratch: Scratch) -> None:
    """value[n_id] = h in the table's dtype; of a node that comes twice the first row is kept."""
    if n_id.numel():
        n_id, width = n_id.contiguous(), h.shape[1]
        cuda_update.push[(n_id.numel(),)](
            _claim(n_id, len(value), scratch), n_id, h.contiguous(), value, width, value.stride(0), BF=power(width),
            num_warps=4,
        )  # fmt: skip
