"""The first layer of fixed weights, summed before anything is multiplied: one pass over the raw features.

    W sum_j c_j (E x_j + e) + rest = (W E) sum_j c_j x_j + (W e) sum_j c_j + rest,  c = weight * scale

E is the encoder of the residual skeleton, and absent in the plain one. Only the targets' rows are multiplied, by one
small matrix, and without dropout the sources' rows are never copied: the sum reads them where they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop.block import Block, Ungathered
from adahop.estimators import gather
from adahop.ops import segment_sum


def can_sum_first(model: Any) -> bool:
    """Whether nobody needs the sources' own h: no memory, no hook, no one who listens to more than energies."""
    conv = model.convs[0]
    if not hasattr(conv, "kernel") or model.memory(0) is not None or conv.tap is not None:
        return False
    return not (conv._forward_hooks or conv._forward_pre_hooks) and (conv.watcher is None or conv.feedback == "energy")


def sum_first(model: Any, x: Tensor | Ungathered, block: Block) -> tuple[Tensor, dict[str, Tensor]]:
    """(h, state) of the first block's targets, as `encode` and the first `step` give them."""
    conv, encoder = model.convs[0], model.encoder
    if model.dropout and model.training:
        x = model.drop(gathered(x))
    asked = encoder is not None or conv.asks_own
    own, state = model.embed(gathered(x[: block.num_dst])) if asked else (block.scale, {})
    coef = block.weight * block.scale
    sums, kernel = gather(x, block, coef), conv.kernel()
    if encoder is not None:
        shares = segment_sum(coef, block.dst, block.num_dst).unsqueeze(1)
        sums, kernel = torch.cat([sums, shares], 1), kernel @ torch.cat([encoder.weight, encoder.bias.unsqueeze(1)], 1)
    if conv.watcher is not None:
        conv.tell(coef.square() * _squares(gathered(x), model).index_select(0, block.src))
    return model.act(0, torch.addmm(conv.rest(own), sums, kernel.t()), state), state


def gathered(x: Tensor | Ungathered) -> Tensor:
    return x.gathered() if isinstance(x, Ungathered) else x


@torch.no_grad()
def _squares(x: Tensor, model: Any) -> Tensor:
    """|h|^2 of every source, h as the layer's listeners know it; by the square of E where x is narrower than E x."""
    conv, encoder = model.convs[0], model.encoder
    if len(x) == 0:  # a rank without seeds; addmv would give a number instead of none
        return x.new_zeros(0)
    if encoder is None or conv.narrows() or encoder.in_features >= encoder.out_features:
        return conv.prepare(model.embed(x)[0]).square().sum(1)
    e, b = encoder.weight, encoder.bias
    square = ((x @ (e.t() @ e)) * x).sum(1)
    return square.add_(x @ (e.t() @ b), alpha=2.0).add_(b.square().sum()).clamp_(min=0.0)
