"""Root: what is noted of a model as a whole: how it is called on a batch, and whether its layers took the batch."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from adahop.checks import tell
from adahop.pyg import batches
from adahop.pyg.batches import DrawnBatch
from adahop.pyg.wrap import backward, bare, layers_of, scale_of

if TYPE_CHECKING:
    from adahop.pyg.feedback import Learner

_NAME = "_adahop_root"


class Root:
    """A pair of hooks of the outermost module, one pair however many loaders learn from it.

    Copies and saved models carry the form in which the model is called, and no loader.
    """

    def __init__(self, model: nn.Module) -> None:
        self.form: dict[str, str] | None = None  # per argument of `forward`, the attribute of the batch it was
        self.keys: dict[str, list[Any]] = {}  # of which types or relations, where it was a dictionary
        self._fresh()
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)

    def _fresh(self) -> None:
        self.learners: weakref.WeakSet[Learner] = weakref.WeakSet()
        self.drawn: DrawnBatch | None = None
        self.said: set[str] = set()
        self.order: list[str] | None = None  # attributes by argument, where all arguments are some
        self.checked: list[tuple[int, bool]] = []  # what was known of the layers when they were last asked about

    def __getstate__(self) -> dict[str, Any]:
        return {"form": self.form, "keys": self.keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    @classmethod
    def of(cls, model: nn.Module) -> Root:
        model = bare(model)
        if _NAME not in model.__dict__:
            model.__dict__[_NAME] = cls(model)
        return model.__dict__[_NAME]

    @classmethod
    def find(cls, model: nn.Module) -> Root | None:
        return bare(model).__dict__.get(_NAME)

    def join(self, learner: Learner) -> None:
        self.learners.add(learner)

    def leave(self, learner: Learner) -> None:
        self.learners.discard(learner)

    @torch.compiler.disable
    def before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if backward():
            return  # a checkpointed model runs again: nothing of the step begins anew
        for learner in self.learners:
            if learner._snapshots is not None:
                learner._snapshots.begin()
        drawn = _batch_of(args, kwargs)
        self.drawn = drawn
        if drawn is None:
            return
        drawn.calls.clear()
        drawn.kept["seen"] = False
        if not self._as_before(args, kwargs, drawn):
            self.form, self.keys = _form(model, args, kwargs, drawn)
            whole = not self.keys and len(self.form) == len(args) + len(kwargs)
            self.order = list(self.form.values()) if whole else None

    def _as_before(self, args: tuple, kwargs: dict[str, Any], drawn: DrawnBatch) -> bool:
        """Whether each argument is the attribute of the batch that it was in the last call."""
        data = None if self.order is None else batches.data_of(drawn)
        if data is None or self.order is None or self.form is None or len(args) + len(kwargs) != len(self.order):
            return False
        if list(self.form)[len(args) :] != list(kwargs):
            return False
        values = (*args, *kwargs.values())
        return all((data if name == "" else data.get(name)) is v for name, v in zip(self.order, values, strict=True))

    @torch.compiler.disable
    def after(self, model: nn.Module, args: tuple, out: Any) -> None:
        drawn, self.drawn = self.drawn, None
        if drawn is None:
            return
        if not drawn.kept.get("seen") and drawn.directional:
            self.say(
                f"no layer of {type(model).__name__} took the edges of the batch: what it sums by hand is not scaled, "
                "and nothing is learnt from it; pass batch.edge_index to PyG layers, or weigh its sums by batch.scale"
            )
        else:
            self.say_left_alone(model)

    def say_left_alone(self, model: nn.Module) -> None:
        """Once: which layers have no use for the scale, what happens to them, and what would be understood."""
        known = [(id(ours.reading), ours.elsewhere) for learner in self.learners for ours in learner._layers]
        if known == self.checked:
            return
        self.checked = known
        readings = {name: (conv, ours.reading) for name, conv in layers_of(model).items()
                    if (ours := scale_of(conv)) is not None and ours.reading is not None}  # fmt: skip
        for name, (conv, _) in readings.items():
            if (ours := scale_of(conv)) is not None and ours.elsewhere:
                self.say(
                    f"layer '{name}' ({type(conv).__name__}) passes messages over other edges than those drawn for the "
                    "batch, so that there they stay as PyG has them"
                )
        left = {name: (conv, r) for name, (conv, r) in readings.items() if r.left_alone}
        if not left:
            return
        name, (conv, reading) = next(iter(left.items()))
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        what = "all hops are" if len(left) == len(readings) else "the hops of such layers are"
        verb = "stay" if others else "stays"
        which = f"layer '{name}' ({type(conv).__name__}){others}"
        self.say(f"{which} {verb} as PyG has it: {reading.why}; {what} drawn uniformly")

    def say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            tell(text)


def _batch_of(args: tuple, kwargs: dict[str, Any]) -> DrawnBatch | None:
    values = [*args, *kwargs.values()]
    drawn = batches.owner(values)
    if drawn is not None:
        return drawn
    for value in values:
        if isinstance(value, Data | HeteroData) and (drawn := batches.of(value)) is not None:
            return drawn
    found = batches.find([*values, *(v for d in values if isinstance(d, dict) for v in d.values())])
    return None if found is None else found.batch.root


def _form(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], drawn: DrawnBatch
) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Which attribute of the batch each argument is, "" for the batch itself; and of which types or relations."""
    signature: Any = getattr(model, "signature", None)  # of torch_geometric.nn.Sequential
    names = list(
        signature.param_dict if hasattr(signature, "param_dict") else inspect.signature(model.forward).parameters
    )
    form: dict[str, str] = {}
    words = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in words.items():
        if isinstance(value, Data | HeteroData):
            form[name] = ""
        elif isinstance(value, Tensor | dict):
            found = batches.name_of(drawn, value) if isinstance(value, Tensor) else _name_of_each(drawn, value)
            if found is not None:
                form[name] = found
    return form, {name: list(words[name]) for name in form if isinstance(words[name], dict)}


def _name_of_each(drawn: DrawnBatch, values: dict[Any, Any]) -> str | None:
    """The attribute of all types or relations that a dictionary holds."""
    names = {batches.node_attribute(drawn, v) for v in values.values() if isinstance(v, Tensor) and v.numel()}
    found = {None if name is None else name.rpartition(".")[2] for name in names}
    return found.pop() if len(found) == 1 else None
