"""Snapshots: what each layer gave for every node at the last pass over the graph; a batch then draws what changed."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from adahop.pyg.inference import inference
from adahop.pyg.wrap import scale_of


class Snapshot:
    """The memory of one layer: its arguments, parameters and output at the last pass over the whole graph.

    On a batch the layer gives f(x) + (F' - f'(x')): f on the drawn edges, F on all, ' at the last pass. Right on
    average wherever f is, and left to chance is only what changed since. Nothing is asked of f: any layer can have one.
    """

    def __init__(self, conv: MessagePassing):
        self.names = list(inspect.signature(conv.forward).parameters)
        self.rows: dict[str, Tensor] = {}  # arguments with a row a node, by name
        self.edges: dict[str, Tensor] = {}  # arguments with a row an edge
        self.out: Tensor | None = None
        self.old: dict[str, Tensor] = {}  # parameters and buffers
        self.words: dict[str, Any] = {}  # the arguments of the call under way

    def take(self, conv: MessagePassing, words: dict[str, Any], out: Tensor, own: dict[tuple, str]) -> None:
        """`own` are the data's tensors, which stay as they are; others may be written over later."""
        n, m = out.shape[0], words["edge_index"].shape[1]
        given = {k: v.detach() for k, v in words.items() if isinstance(v, Tensor) and v.dim() and k != "edge_index"}
        kept = {k: v if _place(v) in own else v.clone() for k, v in given.items()}
        self.edges = {k: v for k, v in kept.items() if k.startswith("edge") and v.shape[0] == m}
        self.rows = {k: v for k, v in kept.items() if k not in self.edges and v.shape[0] == n}
        self.out, self.old = out.detach().clone(), {k: v.detach().clone() for k, v in conv.state_dict().items()}

    def change(self, conv: MessagePassing, words: dict[str, Any], batch: Any) -> Tensor | None:
        """F' - f'(x') of the batch's nodes; None where the layer was not given the batch's own nodes and edges."""
        index = words["edge_index"]
        n, m = words[self.names[0]].shape[0], index.shape[1]
        if self.out is None or n > batch.n_id.numel() or not torch.equal(index, batch.edge_index[:, :m]):
            return None
        nodes, places, scale = batch.n_id[:n], batch.e_id[:m], batch.scale[:m]
        then = {k: v[nodes.to(v.device)] for k, v in self.rows.items()}
        then |= {k: v[places.to(v.device)] for k, v in self.edges.items() if words.get(k) is not None}
        if words.get("edge_weight") is not None:
            own = then.get("edge_weight", torch.ones_like(scale))
            then["edge_weight"] = own * scale.to(own.dtype).view(-1, *[1] * (own.dim() - 1))
        with torch.no_grad(), _still(conv):
            return self.out[nodes.to(self.out.device)] - functional_call(conv, self.old, (), {**words, **then})


class Snapshots:
    """Those of a model's layers. They hear a pass when the model, in evaluation, runs over the whole data."""

    def __init__(self, model: nn.Module, data: Data):
        self.model, self.data, self.sizes = model, data, (data.num_nodes, data.edge_index.shape[1])
        self.layers = {name: m for name, m in model.named_modules() if isinstance(m, MessagePassing)}
        inside = {m for conv in self.layers.values() for m in conv.modules() if m is not conv}
        self.layers = {name: m for name, m in self.layers.items() if m not in inside}
        self.kept = {m: Snapshot(m) for m in self.layers.values()}
        self.batch: Any = None
        self.ear: Any = None
        self.fresh = False  # whether a pass was heard since the last step
        self.busy = False
        self.warned = False
        self.before = [m.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True) for m in self.kept]
        self.after = {m: m.register_forward_hook(self._heard) for m in self.kept}

    def close(self) -> None:
        for handle in (*self.before, *self.after.values()):
            handle.remove()

    def start(self, batch: Any, ear: Any) -> None:
        """Layers that train on this batch draw what changed, from now on; `ear` is deaf to what they say of old."""
        self.batch, self.ear = batch, ear

    def renew(self) -> None:
        """A pass over the data, unless one was heard since the last step; a model that cannot make it goes without."""
        if self.fresh:
            return
        try:
            inference(self.model, self.data)
        except Exception as e:
            if not self.warned:
                self.warned = True
                warnings.warn(
                    f"no snapshot can be taken of {type(self.model).__name__} ({' '.join(str(e).split())}); run "
                    "adahop.inference on the part of it that takes x and edge_index once an epoch, or pass "
                    "estimator='plain'",
                    stacklevel=3,
                )

    def _called(self, conv: MessagePassing, args: tuple, kwargs: dict) -> None:
        if not self.busy:
            kept = self.kept[conv]
            kept.words = {**dict(zip(kept.names, args, strict=False)), **kwargs}

    def _heard(self, conv: MessagePassing, inputs: tuple, out: Any) -> Tensor | None:
        if self.busy:
            return None
        kept = self.kept[conv]
        words, kept.words = kept.words, {}
        x: Any = words.get(kept.names[0])
        index: Any = words.get("edge_index")
        if not all(isinstance(t, Tensor) and t.layout == torch.strided for t in (x, index, out)):
            return None
        if not conv.training:
            if (len(out), index.shape[1]) == self.sizes and len(x) == len(out):
                kept.take(conv, words, out, self._own())
                self.fresh = True
            return None
        if self.batch is None or "scale" not in self.batch or self._too_early(conv):
            return None
        self.fresh = False
        with self._alone():
            change = kept.change(conv, words, self.batch)
        return None if change is None else out + change.to(out.dtype)

    def _too_early(self, conv: MessagePassing) -> bool:
        """Whether the layer was wrapped by `scaled` only after these hooks: from the next call on they come last."""
        if getattr(scale_of(conv), "given", None) is None:
            return False
        conv._forward_hooks.move_to_end(self.after[conv].id)
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, nobody learns from what layers say."""
        self.busy = True
        try:
            with self.ear.deaf():
                yield
        finally:
            self.busy = False

    # --- a checkpoint ------------------------------------------------------------------------------------------------

    def _own(self) -> dict[tuple, str]:
        return {_place(v): k for k, v in self.data.to_dict().items() if torch.is_tensor(v)}

    def state(self) -> dict[str, Any]:
        """What later steps depend on; tensors of the data itself are named, not kept."""
        own = self._own()

        def plain(part: dict[str, Tensor]) -> dict[str, Any]:
            return {k: own.get(_place(v), v) for k, v in part.items()}

        layers = {}
        for name, m in self.layers.items():
            kept = self.kept[m]
            layers[name] = {"rows": plain(kept.rows), "edges": plain(kept.edges), "out": kept.out, "old": kept.old}
        return {"fresh": self.fresh, "layers": layers}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`; that of a model with other layers is of no use and left alone."""
        if state["layers"].keys() != self.layers.keys():
            return
        self.fresh = state["fresh"]
        for name, parts in state["layers"].items():
            kept = self.kept[self.layers[name]]
            for field in ("rows", "edges"):
                part = {k: self.data[v] if isinstance(v, str) else v for k, v in parts[field].items()}
                setattr(kept, field, part)
            kept.out, kept.old = parts["out"], parts["old"]


def _place(t: Tensor) -> tuple:
    """Two tensors with the same are the same numbers."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


@contextlib.contextmanager
def _still(conv: MessagePassing) -> Iterator[None]:
    """Within, a layer drops nothing and counts nothing, though it is in training for whoever scales its messages."""
    inner = [m for m in conv.modules() if m is not conv and m.training]
    rate = getattr(conv, "dropout", None)
    for m in inner:
        m.training = False
    if isinstance(rate, float):
        conv.dropout = 0.0
    try:
        yield
    finally:
        for m in inner:
            m.training = True
        if isinstance(rate, float):
            conv.dropout = rate
