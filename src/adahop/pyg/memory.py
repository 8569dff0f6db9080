"""What is remembered of a model's layers: kept from batch to batch, and applied in a layer's forward on a batch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from adahop.pyg.arguments import pair, still
from adahop.pyg.batches import Whole
from adahop.pyg.wrap import Call, Propagate, layers_of, scale_of
from adahop.typed import Relation


class Memory:
    """That of a model's layers. `kept` has an entry per forward of a layer: one that is used n times has n."""

    def __init__(self, model: nn.Module, data: Data | HeteroData, noise: float):
        self.model, self.data, self.noise = model, data, noise
        self.layers = {name: ours for name, m in layers_of(model).items() if (ours := scale_of(m)) is not None}
        self.kept: dict[Propagate, list[Any]] = {}
        self.counts: dict[Propagate, int] = {}  # forwards on the whole graph since one of the model's began
        for layer in self.layers.values():
            layer._memory = weakref.ref(self)

    def close(self) -> None:
        for layer in self.layers.values():
            if layer.memory is self:
                layer._memory = None
        self.kept.clear()

    def begin(self) -> None:
        """A forward of the model begins."""
        self.counts.clear()

    def renew(self) -> None:
        """An epoch begins."""
        raise NotImplementedError

    def before_batch(self, whole: Whole) -> None:
        """A batch is about to be handed out."""
        raise NotImplementedError

    def of(self, layer: Propagate, call: Call, args: tuple, kwargs: dict[str, Any]) -> Remembered | None:
        """What is remembered, for this forward of a layer on a batch."""
        raise NotImplementedError

    def listen(self, layer: Propagate, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A forward in evaluation on something that is no batch: what it passes on is kept if it is the whole graph."""
        heard = self.heard(layer, [v for a in (*args, *kwargs.values()) for v in pair(a) if isinstance(v, Tensor)])
        if heard is None:
            return layer._plain(*args, **kwargs)
        with layer.within(heard):
            return layer._forward(*args, **kwargs)

    def heard(self, layer: Propagate, given: list[Tensor]) -> Any:
        """What stands for a layer's methods in its forward on the whole graph; None where it was given another."""
        raise NotImplementedError

    def parts(self, layer: Propagate, edges: dict[Relation, Tensor]) -> Callable[[Tensor], Any]:
        """The same for each `propagate` of a layer that takes all relations as dictionaries."""
        return lambda edge_index: None

    def _next(self, layer: Propagate) -> int:
        """The number of a layer's forward in the model's."""
        at = self.counts.get(layer, 0)
        self.counts[layer] = at + 1
        return at

    def cost(self) -> dict[str, float]:
        """Bytes, and milliseconds."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What later steps depend on."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`; that of a model with other layers, or of another estimator, is left alone."""
        raise NotImplementedError

    def _forwards(self, leaf: Callable[[Any], Any]) -> dict[str, Any]:
        """All that is kept, by the layers' names."""
        return {name: plain(self.kept.get(layer, []), leaf) for name, layer in self.layers.items()}


def plain(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Dataclasses as dictionaries of what they are made from; `leaf` says what is kept of other values."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name), leaf) for f in fields(value) if f.init}
    if isinstance(value, dict):
        return {k: plain(v, leaf) for k, v in value.items()}
    return [plain(v, leaf) for v in value] if isinstance(value, list) else leaf(value)


class Remembered:
    """What is remembered of a layer, in one forward on a batch.

    The layer sums f(x) + trust (F(x') - f(x')): f over the drawn edges, F over all, x' as it is remembered. Right on
    average wherever f is, and left to chance is only what changed since. Where messages are linear in x and nothing
    else of them changes, that is f(x - trust x') + trust F(x'): no message is computed twice. Where x is x', it is F.
    """

    def __init__(self, call: Call):
        self.call = call
        self.mode = "plain"  # or "known", "linear", "old" (f(x') is summed), "both" (f(x), after that)
        self.trust = 0.0
        self.total: Tensor | None = None  # what F is taken from
        self.old: tuple[Tensor, Tensor, Tensor] | None = None  # f(x'), its messages, and these with their scale
        self.some: Tensor | None = None  # the edges in use that f(x') is summed over, where those are not all

    # --- called by `Call` ---------------------------------------------------------------------------------------------

    def updated(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        """The layer's `edge_updater` gave `out`."""
        raise NotImplementedError

    def propagate(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> Tensor:
        """In place of the layer's own."""
        raise NotImplementedError

    def aggregate(self, inputs: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        call, own = self.call, self.call.layer.own("aggregate")
        if self.mode == "known":
            if call.round is not None:
                call.round.known = True  # nothing is left to chance, so that there is nothing to learn
            shape = torch.zeros_like(own(inputs, *args, **kwargs))
            return _joined(shape, self._total(shape))
        scaled = call.scaled(inputs)
        if self.mode == "old":
            self.old = own(scaled, *args, **kwargs), inputs, scaled
            return self.old[0]
        self._note(inputs, scaled)
        out = own(scaled, *args, **kwargs)
        if self.total is not None:
            total = self._total(out)
            change = total if self.old is None else total - self.old[0][: len(total)]
            out = _joined(out, self.trust * change)
        self.old = None
        call.watch(out)
        return out

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _total(self, out: Tensor) -> Tensor:
        """F of the first nodes, as `out` is."""
        assert self.total is not None
        return self.total.to(out)

    def _note(self, inputs: Tensor, scaled: Tensor) -> None:
        """What is left to chance."""
        if self.mode != "both" or "softmax" in self.call.reading.functions or not self.call.listens:
            self.call.note(inputs, scaled)
            return
        assert self.old is not None

        def left(now: Tensor, old: Tensor) -> Tensor:
            less = self.trust * old
            return now.detach() - less if self.some is None else now.detach().index_add(0, self.some, less, alpha=-1)

        _, old, old_scaled = self.old
        self.call.note(left(inputs, old), left(scaled, old_scaled))

    @contextlib.contextmanager
    def past(self) -> Iterator[None]:
        """Within, the layer runs on what is remembered, without dropout and without a gradient."""
        call = self.call
        known = call.alpha, call.used, call.place
        self.mode, call.alpha = "old", None
        try:
            with torch.no_grad(), still(call.layer.conv):
                yield
        finally:
            call.alpha, call.used, call.place = known


def _joined(out: Tensor, change: Tensor) -> Tensor:
    """`change` is that of the first nodes."""
    t = change.shape[0]
    return out + change if t == out.shape[0] else torch.cat([out[:t] + change, out[t:]])
