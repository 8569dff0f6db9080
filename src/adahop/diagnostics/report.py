"""variance: measures a sampler's noise layer by layer; and a probe that does so during training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from adahop.checks import InputError, KindError, count, fields, flag, function, of_kind, one_of
from adahop.diagnostics.frozen import frozen, twin
from adahop.diagnostics.gradient import gradient_variance
from adahop.diagnostics.measure import Measured, measure
from adahop.diagnostics.oracle import oracle
from adahop.diagnostics.truth import Truth
from adahop.graph import Graph
from adahop.models import GNN
from adahop.ops import random
from adahop.samplers import Sampler
from adahop.seams import LabelledData
from adahop.typed import Relation

ROUNDING = 1e-10  # a variance below this share of |mu|^2 is rounding error


def variance(
    model: GNN,
    sampler: Sampler,
    data: LabelledData,
    graph: Graph | None = None,
    nodes: Any = None,
    repeats: int = 20,
    seed: int = 0,
    against: tuple[str, ...] = ("uniform", "oracle"),
    gradient: bool = True,
) -> list[dict[str, Any]]:
    """For every layer (1 is the input's) a row: E|mu' - mu|^2 of its aggregate, the sum before the linear map.

    mu is the sum over all neighbours of the exact h below, mu' the estimate with the layer and all those below it drawn
    as in training, without dropout. Every layer is measured at the same fixed `nodes`: they are the first targets of
    every block, so all methods are compared at the same places. `over_uniform`: over that of uniform draws with
    replacement, plain estimator, same sizes and model. `over_oracle`: over that of q = a sqrt(E|h_j|^2) with the same
    draw and estimator. `effective` is the part that q decides, sum a^2 E|h|^2 / (k q), and `effective_over_oracle` its
    ratio. See `Measured` for the rest. In a typed graph a layer has a row for each relation into the types of the
    nodes. Model and sampler are left unchanged.

    >>> import adahop
    >>> result = adahop.fit(adahop.load("digits"), method="bs", sizes=(2, 2), epochs=1, hidden=8)
    >>> rows = variance(result.model, result.sampler, adahop.load("digits"), nodes=range(32), repeats=2)
    >>> [row["layer"] for row in rows], 0 < rows[0]["over_uniform"] < 2
    ([1, 2], True)
    """
    check(model, sampler)
    _wanted(data, seed, against, gradient)
    graph = sampler.graph if graph is None else of_kind(graph, Graph, "graph")
    nodes = probe_nodes(data, 256, seed) if nodes is None else nodes
    with frozen(model):
        truth = Truth(model, graph, data.x, nodes)
        own = measure(model, twin(sampler, random.key(seed, 1)), data.x, truth, repeats)
    uniform = _uniform(model, sampler, data.x, truth, repeats, seed) if "uniform" in against else [None] * len(own)
    best = _oracles(model, sampler, data.x, truth, repeats, seed) if "oracle" in against else [None] * len(own)
    noise = gradient_variance(model, sampler, data, truth.nodes, repeats, random.key(seed, 3)) if gradient else None
    names = graph.relations or (None,)
    return [
        _row(names[mine.relation], mine, worse, better, truth.size(mine.layer, mine.relation), noise)
        for mine, worse, better in zip(own, uniform, best, strict=True)
    ]


def check(model: GNN, sampler: Sampler) -> None:
    if not isinstance(model, GNN):
        raise InputError(f"`model` must be one of adahop.models, got {type(model).__name__}")
    of_kind(sampler, Sampler, "sampler")
    if sampler.by_subgraph:
        kind = type(sampler).__name__
        raise InputError(f"`sampler` must be node-wise or layer-wise, got {kind}, which draws subgraphs and no sums")


def _wanted(data: LabelledData, seed: int, against: Any, gradient: Any) -> None:
    fields(data, ("x", "y", "train_mask"), "data")
    count(seed, 0, "seed")
    for word in of_kind(against, tuple, "against"):
        one_of(word, ("uniform", "oracle"), "against")
    flag(gradient, "gradient")


def probe_nodes(data: LabelledData, many: int, seed: int = 0) -> Tensor:
    """Some training nodes, the same for a seed."""
    nodes = data.train_mask.nonzero().flatten()
    return random.shuffled(nodes, random.key(seed, 5))[:many]


def _oracles(model: GNN, sampler: Sampler, x: Tensor, truth: Truth, repeats: int, seed: int) -> list[Measured | None]:
    with frozen(model):
        seeds = [random.key(seed, 4, layer) for layer in range(len(model.convs))]
        found = [oracle(model, twin(sampler, s), x, truth, layer, repeats) for layer, s in enumerate(seeds)]
    nothing: list[Measured | None] = [None] * len(truth.first)
    return [m for each in found for m in each or nothing]


def _uniform(model: GNN, sampler: Sampler, x: Tensor, truth: Truth, repeats: int, seed: int) -> list[Measured | None]:
    with frozen(model, plain=True):
        return measure(model, twin(sampler.uniform(), random.key(seed, 2)), x, truth, repeats)


def _row(
    relation: Relation | None,
    mine: Measured,
    uniform: Measured | None,
    best: Measured | None,
    size: float,
    noise: float | None,
) -> dict[str, Any]:
    def over(name: str, other: Measured | None) -> float | None:
        if other is None:
            return None
        top, bottom = getattr(mine, name), getattr(other, name)
        if bottom > ROUNDING * size:
            return top / bottom
        return 1.0 if top <= ROUNDING * size else None  # nothing over nothing

    return {
        "layer": mine.layer + 1,
        **({} if relation is None else {"relation": list(relation)}),
        "variance": mine.variance,
        "error": mine.error,
        "relative": mine.variance / max(size, 1e-30),
        "over_uniform": over("variance", uniform),
        "over_oracle": over("variance", best),
        "effective": mine.effective,
        "effective_over_oracle": over("effective", best),
        "ess": mine.ess,
        "coverage": mine.coverage,
        "gradient_variance": noise,
    }


class Probe:
    """Call it after every step of `fit`: measures each `every` steps, and at the steps `at`, on a few nodes.

    What it measures goes to `rows`, with the step, and to `write`, if given. A pass over the whole graph each time is
    the cost; against=("uniform", "oracle") and gradient=True ask for more.

    >>> import adahop
    >>> data = adahop.load("digits"); probe = Probe(data, every=3)
    >>> _ = adahop.fit(data, method="bs", sizes=(2, 2), epochs=1, hidden=8, probe=probe)
    >>> [(row["step"], row["layer"]) for row in probe.rows]
    [(3, 1), (3, 2)]
    """

    def __init__(
        self,
        data: LabelledData,
        every: int = 0,
        at: Any = (),
        nodes: Any = 64,
        repeats: int = 5,
        seed: int = 0,
        against: tuple[str, ...] = ("uniform",),
        gradient: bool = False,
        write: Callable[[dict[str, Any]], None] | None = None,
    ):
        _wanted(data, seed, against, gradient)
        try:
            self.data, self.every, self.at = data, count(every, 0, "every"), frozenset(at)
        except TypeError:
            raise KindError(f"`at` must hold steps, got {type(at).__name__}") from None
        self.nodes = probe_nodes(data, nodes, seed) if isinstance(nodes, int) else nodes
        count(repeats, 1, "repeats")
        self.options: dict[str, Any] = {"repeats": repeats, "seed": seed, "against": against, "gradient": gradient}
        self.rows: list[dict[str, Any]] = []
        self.there: LabelledData | None = None  # the data on the sampler's device
        self.write = function(write, "write")

    def __call__(self, step: int, model: GNN, sampler: Sampler) -> None:
        if step not in self.at and not (self.every and step % self.every == 0):
            return
        if self.there is None or self.there.train_mask.device != sampler.graph.device:
            self.there = copy.copy(self.data).to(sampler.graph.device)
        for row in variance(model, sampler, self.there, nodes=self.nodes, **self.options):
            self.rows.append({"step": step, **row})
            if self.write is not None:
                self.write(self.rows[-1])
