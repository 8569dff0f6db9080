"""Sizes: draws per layer, one number for all rows, or by relation or node type."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError, as_tensor
from adahop.ops import Rows
from adahop.typed import Types

DEFAULT = "default"  # the key for relations or types that are not named


class Sizes(NamedTuple):
    """The checked sizes, input layer first. A dict given by the user becomes one of the two tables."""

    most: list[int]  # one number per layer: the largest, -1 where any is all
    relation: Tensor | None = None  # [layers, relations]
    source: Tensor | None = None  # [layers, types] by the type of the source

    def of(self, layer: int, rows: Rows) -> Tensor:
        """How many each row of a layer draws: one number for all, or one each."""
        if self.relation is None or self.same_for_all(layer):
            return one_size(self.most[layer], rows.row.device)
        return self.relation[layer].to(rows.row.device)[rows.relation]

    def same_for_all(self, layer: int) -> bool:
        """Whether all relations of a layer have one size."""
        return self.relation is None or bool((self.relation[layer] == self.relation[layer][0]).all())

    def all_of(self, layer: int) -> Sizes:
        """The same sizes, but all neighbours in one layer, of the relations that it draws from."""
        most = [-1 if at == layer else k for at, k in enumerate(self.most)]
        if self.relation is None:
            return self._replace(most=most)
        each = self.relation.clone()
        each[layer] = torch.where(each[layer] == 0, 0, -1)
        return Sizes(most, each)

    def drawn(self, layer: int, types: Types | None) -> Tensor | None:
        """[relations] a mask of those that a layer draws from; None: all."""
        if types is None or (self.relation is None and self.source is None):
            return None
        if self.relation is not None:
            each = self.relation[layer]
        else:
            assert self.source is not None
            each = self.source[layer][[source for source, _ in types.ends]]
        only = each != 0
        return None if bool(only.all()) else only.to(types.ptr.device)


def read_sizes(sizes: Any, types: Types | None, by: tuple[str, ...]) -> Sizes:
    """A list with one number per layer; or in a typed graph, where a method counts `by` "relation" or "type", a dict
    from relations or node types to such lists, "default" for those left out."""
    if not isinstance(sizes, Mapping):
        return Sizes(check_sizes(sizes))
    if types is None:
        raise InputError(f"`sizes` must be a list, as the graph has no relations, got a dict of {len(sizes)}")
    if not by:
        raise InputError(f"`sizes` must be a list with one number per layer here, got a dict of {len(sizes)}")
    if not sizes:
        raise InputError("`sizes` must name at least one relation, got an empty dict")
    keys = [k for k in sizes if k != DEFAULT]
    typed = "type" in by and all(k in types.nodes for k in keys)
    if not typed and "relation" not in by:
        raise InputError(f"`sizes` must be a list or go by node type, {', '.join(types.nodes)}, got {keys[0]!r}")
    given = {k: _list(v, k) for k, v in sizes.items()}
    layers = {k: len(v) for k, v in given.items()}
    if len(set(layers.values())) > 1:
        (a, m), (b, n) = next((x, y) for x in layers.items() for y in layers.items() if x[1] != y[1])
        raise InputError(f"`sizes` must hold lists of one length, got {m} for {a!r} and {n} for {b!r}")
    names = list(types.nodes) if typed else list(types.relations)
    table = {(k if typed else names[types.number(k, "sizes")]): v for k, v in given.items() if k != DEFAULT}
    lacking = [name for name in names if name not in table]
    if lacking and DEFAULT not in given:
        what = "node type" if typed else "relation"
        raise InputError(f"`sizes` must name every {what} or have a '{DEFAULT}', got none for {lacking[0]!r}")
    each = torch.tensor([table.get(name, given.get(DEFAULT)) for name in names]).t().contiguous()
    most = [-1 if bool((row < 0).any()) else max(int(row.max()), 1) for row in each]
    return Sizes(most, source=each) if typed else Sizes(most, relation=each)


def check_sizes(sizes: Any) -> list[int]:
    """A list of positive fan-outs, or -1 for all, input layer first."""
    given = _whole(sizes, "sizes")
    if not all(k > 0 or k == -1 for k in given):
        raise InputError(f"`sizes` must be positive or -1, got {given}")
    return given


def _list(sizes: Any, key: Any) -> list[int]:
    """The list of one relation or type, where 0 is allowed: nothing is drawn."""
    given = _whole(sizes, f"sizes[{key!r}]")
    if not all(k >= -1 for k in given):
        raise InputError(f"`sizes[{key!r}]` must be at least -1, got {given}")
    return given


def _whole(sizes: Any, what: str) -> list[int]:
    given = as_tensor(sizes, what).tolist() if isinstance(sizes, np.ndarray | Tensor) else sizes
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) == 0:
        raise InputError(f"`{what}` must be a list with one number per layer, got {sizes!r}")
    if not all(isinstance(k, int | np.integer) and not isinstance(k, bool) for k in given):
        raise InputError(f"`{what}` must be whole numbers, positive or -1, got {list(given)}")
    if any(k >= 2**63 for k in given):
        raise InputError(f"`{what}` must be below 2^63, got {list(given)}")
    return [int(k) for k in given]


@functools.cache
def one_size(size: int, device: torch.device) -> Tensor:
    """One number for all rows, as a tensor that is never written to."""
    return torch.tensor([size], device=device)
