"""Sums over edges: gathered rows, whole neighbourhoods, tables; softmax over neighbourhoods; norms of messages."""

import torch
from torch import Tensor

from adahop.ops.registry import register
from adahop.ops.summing import cpu, reference

CUDA = "adahop.ops.summing.cuda"
gather_sum = register("gather_sum", reference=reference.gather_sum, cpu=cpu.gather_sum, cuda=f"{CUDA}:gather_rows")


def each_head(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
    """[targets, H, C]: the `gather_sum` of the same h [S, C] with the coefficients [M, H] of each head."""
    return torch.stack([gather_sum(h, src, dst, c, ptr) for c in coef.unbind(1)], 1)


gather_heads = register("gather_heads", reference=each_head, cpu=cpu.gather_heads)
edge_dot = register("edge_dot", reference=reference.edge_dot, cpu=cpu.edge_dot)
full_sum = register("full_sum", reference=reference.full_sum, cpu=cpu.full_sum, cuda=f"{CUDA}:full_sum")
row_sums = register("row_sums", reference=reference.row_sums, cpu=cpu.row_sums)
change = register("change", reference=reference.change, cpu=cpu.change)
spread = register("spread", reference=reference.spread, cpu=cpu.spread)
rows_dot = register("rows_dot", reference=reference.rows_dot, cpu=cpu.rows_dot)
softmax = register("softmax", reference=reference.softmax, cpu=cpu.softmax)
add_ends = register("add_ends", reference=reference.add_ends, cpu=cpu.add_ends)
attend = register("attend", reference=reference.attend, cpu=cpu.attend, cuda=f"{CUDA}:attend")
energies = register("energies", reference=reference.energies, cpu=cpu.energies, cuda=f"{CUDA}:energies")
known_energies = register("known_energies", reference=reference.known_energies, cuda=f"{CUDA}:known_energies")
table = register("table", reference=reference.table, cuda=f"{CUDA}:table", by=1)
fetch = register("fetch", reference=reference.fetch, cuda=f"{CUDA}:fetch")
table_rows = register("table_rows", reference=reference.table_rows, cpu=cpu.table_rows, cuda=f"{CUDA}:table_rows", by=1)
table_sum = register("table_sum", reference=reference.table_sum, cpu=cpu.table_sum, cuda=f"{CUDA}:table_sum", by=1)
table_dot = register("table_dot", reference=reference.table_dot, cuda=f"{CUDA}:table_dot", by=1)
widened = register("widened", reference=reference.widened, cuda=f"{CUDA}:widened", by=1)


def may_wait(x: Tensor) -> bool:
    """Whether full sums of rows of x can be formed when they are first asked for; what a GPU captured cannot."""
    return full_sum.form(x) == "cpu"
