"""What is kept of a model's layers from batch to batch, and how it is applied: as a control variate of their sums."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from adahop.pyg.arguments import Kwargs, as_tuple, eval_mode
from adahop.pyg.call import Call
from adahop.pyg.readings import Reading
from adahop.pyg.whole_graph import WholeGraph
from adahop.pyg.wrap import Propagate, layers_of, propagate_of
from adahop.typed import Relation


class Memory:
    """That of a model's layers. `forwards` has an entry per forward of a layer: one that is used n times has n."""

    def __init__(self, model: nn.Module, data: Data | HeteroData, noise: float):
        self.model, self.data, self.noise = model, data, noise
        self.layers = {name: ours for name, m in layers_of(model).items() if (ours := propagate_of(m)) is not None}
        self.forwards: dict[Propagate, list[Any]] = {}
        self.forward_counts: dict[Propagate, int] = {}  # forwards on the whole graph since one of the model's began
        for layer in self.layers.values():
            layer.memory_ref = weakref.ref(self)

    def close(self) -> None:
        for layer in self.layers.values():
            if layer.memory is self:
                layer.memory_ref = None
        self.forwards.clear()

    def begin_epoch(self) -> None:
        raise NotImplementedError

    def begin_batch(self, whole_graph: WholeGraph) -> None:
        """A batch is about to be handed out."""
        raise NotImplementedError

    def begin_forward(self) -> None:
        """A forward of the model begins."""
        self.forward_counts.clear()

    def control_for(self, call: Call, args: tuple, kwargs: Kwargs) -> ControlledSum | None:
        """The control variate for a layer's forward on a batch."""
        raise NotImplementedError

    def record_forward(self, layer: Propagate, args: tuple, kwargs: Kwargs) -> Any:
        """A forward in evaluation on something that is no batch: it is recorded if that is the whole graph."""
        tensors = [v for a in (*args, *kwargs.values()) for v in as_tuple(a) if isinstance(v, Tensor)]
        recorder = self.recorder(layer, tensors)
        if recorder is None:
            return layer.original_forward(*args, **kwargs)
        with layer.installed(recorder):
            return layer.forward(*args, **kwargs)

    def recorder(self, layer: Propagate, tensors: list[Tensor]) -> ForwardRecorder | None:
        """What records a layer's forward on the whole graph; None where these tensors are of another graph."""
        raise NotImplementedError

    def recorders(self, layer: Propagate, edges: dict[Relation, Tensor]) -> Callable[[Tensor], ForwardRecorder | None]:
        """The same for each `propagate`, by its edges, of a layer that takes all relations as dictionaries."""
        return lambda edge_index: None

    def _next_forward(self, layer: Propagate) -> int:
        """The number of a layer's forward within the model's."""
        at = self.forward_counts.get(layer, 0)
        self.forward_counts[layer] = at + 1
        return at

    def cost(self) -> dict[str, float]:
        """Bytes, and milliseconds."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What later steps depend on."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`; that of a model with other layers, or of another estimator, is ignored."""
        raise NotImplementedError

    def _serialized(self, leaf: Callable[[Any], Any]) -> dict[str, Any]:
        """All that is kept, by the layers' names."""
        return {name: to_dicts(self.forwards.get(layer, []), leaf) for name, layer in self.layers.items()}

    def _restore_forwards(self, stored: dict[str, Any], forward: Any, part: Callable[[dict[str, Any]], Any]) -> None:
        """Back from `_serialized`: of each `forward` the parts, one per `propagate` and one per `edge_updater`."""
        for name, layer in self.layers.items():
            self.forwards[layer] = [
                forward(**{**one, **{key: [part(p) for p in one[key]] for key in ("passes", "updates")}})
                for one in stored[name]
            ]


def to_dicts(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Dataclasses as dictionaries of their fields, for a checkpoint; `leaf` says what is stored of other values."""
    if is_dataclass(value):
        return {f.name: to_dicts(getattr(value, f.name), leaf) for f in fields(value) if f.init}
    if isinstance(value, dict):
        return {k: to_dicts(v, leaf) for k, v in value.items()}
    return [to_dicts(v, leaf) for v in value] if isinstance(value, list) else leaf(value)


class ForwardRecorder:
    """In place of a layer's methods while its forward over the whole graph is recorded."""

    reading = Reading()

    def __init__(self, layer: Propagate):
        self.layer = layer

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        return self.layer.original("edge_updater")(edge_index, size=size, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        return self.layer.original("propagate")(edge_index, size=size, **kwargs)

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer.original("aggregate")(inputs, *args, **kwargs)


class ControlledSum:
    """The sum of a layer with a control variate, in one forward on a batch.

    The layer sums f(x) + c (F(x') - f(x')): f over the drawn edges, F over all, x' the inputs kept from earlier, c the
    `cv_weight`. That is right on average wherever f is, and only what changed since is sampled. Where messages are
    linear in x and nothing else of them changes, it is f(x - c x') + c F(x'): no message is computed twice. Where x is
    x' and c is 1, it is F(x').
    """

    def __init__(self, call: Call):
        self.call = call
        self.cv_weight = 0.0
        self.total: Tensor | None = None  # what F(x') is taken from
        self.previous: tuple[Tensor, Tensor, Tensor] | None = None  # f(x'), its messages, and these with their scale
        self.subset: Tensor | None = None  # the edges in use that f(x') is summed over, where those are not all

    # --- called by `Call` ---------------------------------------------------------------------------------------------

    def after_edge_update(self, edge_index: Tensor, size: Any, kwargs: Kwargs, out: Tensor) -> None:
        """The layer's `edge_updater` gave `out`."""
        raise NotImplementedError

    def propagate(self, edge_index: Tensor, size: Any, kwargs: Kwargs) -> Tensor:
        """In place of the layer's own."""
        raise NotImplementedError

    def aggregate(self, inputs: Tensor, args: tuple, kwargs: Kwargs) -> Tensor:
        """f(x), or f(x - c x'), to which what is known of F(x') and f(x') is added."""
        call, scaled = self.call, self.call.scaled(inputs)
        self._record(inputs, scaled)
        out = call.layer.original("aggregate")(scaled, *args, **kwargs)
        if self.total is not None:
            total = self._total(out)
            change = total if self.previous is None else total - self.previous[0][: len(total)]
            out = _add_to_first(out, self.cv_weight * change)
        self.previous = None
        call.watch_gradient(out)
        return out

    # --- other ways to aggregate, for `Propagate.propagate_by` --------------------------------------------------------

    def aggregate_exact(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """F(x'), where x is x' and c is 1: nothing is sampled, so that there is nothing to learn."""
        if self.call.recorded is not None:
            self.call.recorded.exact = True
        zeros = torch.zeros_like(self.call.layer.original("aggregate")(inputs, *args, **kwargs))
        return _add_to_first(zeros, self._total(zeros))

    def aggregate_previous(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """f(x'), which is kept until f(x) is summed."""
        scaled = self.call.scaled(inputs)
        self.previous = self.call.layer.original("aggregate")(scaled, *args, **kwargs), inputs, scaled
        return self.previous[0]

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _total(self, out: Tensor) -> Tensor:
        """F(x') of the first nodes, in the dtype and on the device of `out`."""
        assert self.total is not None
        return self.total.to(out)

    def _record(self, inputs: Tensor, scaled: Tensor) -> None:
        """The energies of what is sampled: the change of each message."""
        if self.previous is None or "softmax" in self.call.reading.functions or not self.call.records_energies:
            self.call.record(inputs, scaled)
            return

        def change(current: Tensor, previous: Tensor) -> Tensor:
            previous = self.cv_weight * previous
            if self.subset is None:
                return current.detach() - previous
            return current.detach().index_add(0, self.subset, previous, alpha=-1)

        _, messages, messages_scaled = self.previous
        self.call.record(change(inputs, messages), change(scaled, messages_scaled))

    @contextlib.contextmanager
    def on_previous(self) -> Iterator[None]:
        """Within, the layer runs on the inputs kept, without dropout and without a gradient."""
        call = self.call
        saved, call.alpha = (call.alpha, call.used, call.aligned), None
        try:
            with torch.no_grad(), eval_mode(call.layer.conv):
                yield
        finally:
            call.alpha, call.used, call.aligned = saved


def _add_to_first(out: Tensor, change: Tensor) -> Tensor:
    """`change` is that of the first nodes."""
    t = change.shape[0]
    return out + change if t == out.shape[0] else torch.cat([out[:t] + change, out[t:]])
