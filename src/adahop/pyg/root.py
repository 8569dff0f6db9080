"""Root: what is known of a model as a whole: how it is called on a batch, and whether its layers used the batch."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from adahop.checks import tell
from adahop.pyg import batches
from adahop.pyg.align import plain
from adahop.pyg.arguments import Kwargs
from adahop.pyg.batches import DrawnBatch
from adahop.pyg.call import in_backward
from adahop.pyg.wrap import layers_of, propagate_of, remove_propagates, unwrapped

if TYPE_CHECKING:
    from adahop.pyg.feedback import Learner

_NAME = "_adahop_root"


class Root:
    """A pair of hooks of the outermost module, one pair however many loaders learn from it.

    Copies and saved models carry how the model is called, and no loader.
    """

    def __init__(self, model: nn.Module) -> None:
        # per tensor that `forward` was given, the attribute of the batch it was; None: none of them
        self.arguments: dict[str, str | None] | None = None
        self.argument_keys: dict[str, list[Any]] = {}  # of which types or relations, where it was a dictionary
        self._reset()
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)

    def _reset(self) -> None:
        self.learners: weakref.WeakSet[Learner] = weakref.WeakSet()
        self.drawn: DrawnBatch | None = None
        self._warned: set[str] = set()
        self._checked: list[tuple[int, bool]] = []  # what was known of the layers at the last look

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self.arguments, "argument_keys": self.argument_keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @classmethod
    def of(cls, model: nn.Module) -> Root:
        model = unwrapped(model)
        if _NAME not in model.__dict__:
            model.__dict__[_NAME] = cls(model)
        return model.__dict__[_NAME]

    @classmethod
    def find(cls, model: nn.Module) -> Root | None:
        return unwrapped(model).__dict__.get(_NAME)

    def remove(self, model: nn.Module) -> None:
        """End what was begun by `of`."""
        for learner in list(self.learners):
            if learner._model is not None and Root.find(learner._model) is self:
                learner.learn(None)
        for hooks, more in (
            (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs),
            (model._forward_hooks, model._forward_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
                more.pop(key, None)
        del model.__dict__[_NAME]

    @torch.compiler.disable
    def before(self, model: nn.Module, args: tuple, kwargs: Kwargs) -> None:
        if in_backward():
            return  # a checkpointed model runs again: it is the same step
        for learner in self.learners:
            if learner._memory is not None:
                learner._memory.begin_forward()
        args, kwargs = tuple(plain(a) for a in args), {k: plain(v) for k, v in kwargs.items()}
        drawn = _batch_of(args, kwargs)
        self.drawn = drawn
        if drawn is None:
            return
        drawn.forward_inputs.clear()
        drawn.cache["seen"] = False
        self.arguments, self.argument_keys = _arguments(model, args, kwargs, drawn)

    @torch.compiler.disable
    def after(self, model: nn.Module, args: tuple, out: Any) -> None:
        drawn, self.drawn = self.drawn, None
        if drawn is None:
            return
        if not drawn.cache.get("seen") and drawn.directional:
            self.warn_once(
                f"no layer of {type(model).__name__} took the edges of the batch: what it sums by hand is not scaled, "
                "and nothing is learnt from it; pass batch.edge_index to PyG layers, or weigh its sums by batch.scale"
            )
        else:
            self._warn_of_unscaled(model)

    def _warn_of_unscaled(self, model: nn.Module) -> None:
        """Once: which layers have no use for the scale, what happens to them, and what would be understood."""
        known = [(id(ours.reading), ours.uses_other_edges) for learner in self.learners for ours in learner._layers]
        if known == self._checked:
            return
        self._checked = known
        layers = {name: (conv, ours, ours.reading) for name, conv in layers_of(model).items()
                  if (ours := propagate_of(conv)) is not None and ours.reading is not None}  # fmt: skip
        for name, (conv, ours, _) in layers.items():
            if ours.uses_other_edges:
                self.warn_once(
                    f"layer '{name}' ({type(conv).__name__}) passes messages over other edges than those drawn for the "
                    "batch, so that there they stay as PyG has them"
                )
        left = [(name, conv, reading) for name, (conv, _, reading) in layers.items() if reading.left_alone]
        if not left:
            return
        name, conv, reading = left[0]
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        what = "all hops are" if len(left) == len(layers) else "the hops of such layers are"
        verb = "stay" if others else "stays"
        which = f"layer '{name}' ({type(conv).__name__}){others}"
        self.warn_once(f"{which} {verb} as PyG has it: {reading.why}; {what} drawn uniformly")

    def warn_once(self, text: str) -> None:
        """A warning about this model, unless it was given before."""
        if text not in self._warned:
            self._warned.add(text)
            tell(text)


def unscale_messages(model: nn.Module) -> nn.Module:
    """Undo `learn`, `feedback` and `scale_messages`: the model, and its layers, are PyG's alone again.

    For torch.export, TorchScript, torch.compile(fullgraph=True), or a saved model that is to be loaded without adahop.
    Loaders end learning from it. On a sampled batch its layers then do what PyG's do.

    >>> from torch_geometric.nn import GraphSAGE
    >>> from adahop.pyg import scale_messages
    >>> model = unscale_messages(scale_messages(GraphSAGE(4, 8, 2)))
    >>> "forward" in vars(model.convs[0])
    False
    """
    root = Root.find(model)
    if root is not None:
        root.remove(unwrapped(model))
    remove_propagates(model)
    return model


def _batch_of(args: tuple, kwargs: Kwargs) -> DrawnBatch | None:
    """The batch, of all relations, that a model's arguments belong to."""
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, Data | HeteroData) and (drawn := batches.batch_of(value)) is not None:
            return drawn
    found = batches.find([*values, *(v for d in values if isinstance(d, dict) for v in d.values())])
    return None if found is None else found.batch.root


def parameter_names(model: nn.Module) -> list[str] | None:
    """Those of a torch_geometric.nn.Sequential, whose `forward` does not name them; None of other models."""
    return list(getattr(getattr(model, "signature", None), "param_dict", ())) or None


def _arguments(
    model: nn.Module, args: tuple, kwargs: Kwargs, drawn: DrawnBatch
) -> tuple[dict[str, str | None], dict[str, list[Any]]]:
    """Which attribute of the batch each argument is, "" for the batch itself and None for a tensor that is none of
    them; and of which types or relations.
    """
    names = parameter_names(model) or list(inspect.signature(model.forward).parameters)
    found: dict[str, str | None] = {}
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in named.items():
        if isinstance(value, Data | HeteroData):
            found[name] = ""
        elif isinstance(value, Tensor):
            found[name] = batches.attribute_name(drawn, value)
        elif isinstance(value, dict) and (attribute := _common_name(drawn, value)) is not None:
            found[name] = attribute
    return found, {name: list(named[name]) for name in found if isinstance(named[name], dict)}


def _common_name(drawn: DrawnBatch, values: dict[Any, Any]) -> str | None:
    """The attribute of all types or relations that a dictionary holds."""
    names = {batches.node_attribute(drawn, v) for v in values.values() if isinstance(v, Tensor) and v.numel()}
    found = {None if name is None else name.rpartition(".")[2] for name in names}
    return found.pop() if len(found) == 1 else None
