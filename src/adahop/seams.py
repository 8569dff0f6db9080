"""Protocols: the attributes that one part of the library needs of objects that another part, or a user, made."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from adahop.block import Block
from adahop.graph import Graph


class LabelledData(Protocol):
    """Features, labels and which nodes to train on."""

    train_mask: Tensor

    @property
    def x(self) -> Any: ...  # a tensor; PyG's Data says `Tensor | None`
    @property
    def y(self) -> Any: ...
    def to(self, device: Any) -> Any: ...


class NodeData(LabelledData, Protocol):
    """A data set to train on: what `fit` reads of it."""

    graph: Graph
    classes: int
    metric: str
    val_mask: Tensor
    test_mask: Tensor


class StepBatch(Protocol):
    """The batch of a training step."""

    @property
    def stands_for(self) -> float: ...  # seeds that its loss stands for


class NodeBatch(Protocol):
    """Blocks, input layer first; features of the first one's nodes, or None beside a table `features`; labels."""

    @property
    def x(self) -> Any: ...
    @property
    def blocks(self) -> list[Block]: ...
    @property
    def y(self) -> Any: ...
