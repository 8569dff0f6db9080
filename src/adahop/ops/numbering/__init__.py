"""Local ids of the nodes of a batch: targets first, then sources as they first appear."""

from adahop.ops.numbering import cpu, reference
from adahop.ops.registry import register

relabel = register("relabel", reference=reference.relabel, cpu=cpu.relabel)
number = register("number", reference=reference.number, cpu=cpu.number)
forget = register("forget", reference=reference.forget, cpu=cpu.forget)
induced = register("induced", reference=reference.induced, cpu=cpu.induced)
in_order, relabel_within = reference.in_order, reference.relabel_within
