"""Which edges of a row are taken, with which probability and scale."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.ops.drawing import cpu, reference, reference_prefix
from adahop.ops.registry import register
from adahop.ops.types import Edges, Odds, Rows

CUDA = "adahop.ops.drawing.cuda"
SMALLEST = 1e-30  # positive odds are kept at least this far above zero, beside a largest of 1

target_rows = register("target_rows", reference=reference.target_rows, cpu=cpu.target_rows)
draw = register("draw", reference=reference.draw, cpu=cpu.draw, cuda=f"{CUDA}:draw")
plan = register("plan", reference=reference.draw, cpu=cpu.plan, cuda=f"{CUDA}:draw")
hop = register("hop", reference=reference.hop, cpu=cpu.hop)
padded = register("padded", reference=reference.padded, cuda=f"{CUDA}:padded")
labor = register("labor", reference=reference.labor, cpu=cpu.labor)
near = register("near", reference=reference.near, cpu=cpu.near)
total = register("total", reference=reference.total, cpu=cpu.total)
chances = register("chances", reference=reference.chances, cpu=cpu.chances)
keep = register("keep", reference=reference.keep, cpu=cpu.keep)
draw_by_prefix = register("draw_by_prefix", reference=reference_prefix.draw)
renew = register("renew", reference=reference_prefix.renew, cpu=cpu.renew)
visit = register("visit", reference=reference_prefix.visit, cpu=cpu.visit)
inclusion, lifted = reference.inclusion, reference.lifted


def pick(odds: Tensor, k: int, how: str, key: int) -> tuple[Tensor, Tensor]:
    """(prob, scale) of every item after k draws in proportion to the odds; scale 0 where it was not drawn.

    With replacement prob = q and scale = count / (k q), else prob = pi and scale = 1 / pi. No more than k items: all,
    exactly.
    """
    n = odds.numel()
    if k < 0 or n <= k:
        one = torch.ones(n, device=odds.device)
        return one, one.clone()
    edge = (odds / odds.max().clamp(min=1e-300)).clamp(min=SMALLEST).masked_fill(odds <= 0, 0.0).float()
    start, end = torch.tensor([[0], [n]], device=odds.device)
    none = torch.empty(0, dtype=torch.int32, device=odds.device)
    size = torch.tensor([k], device=odds.device)
    drawn = draw(Edges(start, start, end, none), Rows(start), size, how, Odds(edge=edge), key)
    prob, scale = torch.zeros(n, device=odds.device), torch.zeros(n, device=odds.device)
    prob[drawn.pos] = drawn.prob
    return prob, scale.index_add_(0, drawn.pos, drawn.scale)  # a node drawn twice is one source of twice the scale


def pads(at: Tensor) -> bool:
    """Whether draws where `at` lies fill a fixed number of slots without a synchronisation with the host."""
    return padded.form(at) == "cuda"


def goes_by_sums(at: Tensor) -> bool:
    """Whether draws by odds where `at` lies go by prefix sums; a GPU is quicker with a scan of the row."""
    return at.is_cpu
