"""All methods: name, sampler, policy, draw and estimator of each; and what combines with what.

Policy x draw x estimator x model x device: every combination is accepted, or refused in one sentence before anything is
loaded (`Config` asks `refusal`). Parts say what they need and what they offer, and nothing asks for a part by its name:
a model says how its weights come about (`weights`), a policy what it has to know of the model (`needs`).
docs/combinations.md lists what is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, NoReturn, cast

from adahop import ops
from adahop.checks import InputError, KindError, flag, of_kind, one_of, room_for
from adahop.graph import Graph
from adahop.policies import POLICIES, Policy
from adahop.policies.base import check_odds
from adahop.samplers import (
    ASGCN,
    Bliss,
    ClusterGCN,
    FastGCN,
    GraphSAINT,
    Labor,
    Ladies,
    NeighborSampler,
    RandomNodes,
    Sampler,
)
from adahop.samplers.neighbor import DRAWS as NODE_WISE_DRAWS
from adahop.samplers.neighbor import draw_refusal
from adahop.storage import MEMORY, Storage

Build = Callable[..., Sampler]

# how a model's weights a_ij come about: the graph's own; a softmax of s_i + t_j, one number per end and head; a softmax
# of a score that needs both ends together; or unknown, as in a model that is not ours
FIXED, ENDS, PAIRS, OTHER = "fixed", "ends", "pairs", "other"  # and "relations": a softmax per relation or over all


@dataclass(frozen=True)
class Method:
    """A named preset. `state` describes the memory it needs; `models` are the models it supports."""

    name: str
    family: str  # node-wise, layer-wise or subgraph
    unbiased: bool
    state: str
    build: Build
    options: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("gcn", "sage", "gat", "gatv2", "geniepath", "rgcn", "rgat", "hgt")
    why_not: str = ""  # one sentence for the models left out
    needs: tuple[str, ...] = ()  # options that come with the data: "features" is its x
    estimator: str = "plain"  # what the model remembers, see `adahop.sum`
    instead: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields that differ, by a model's `weights`

    def on(self, weights: str) -> Method:
        """The preset as it is for models with such weights."""
        return replace(self, **self.instead.get(weights, {}))


def node_wise(
    graph: Graph,
    sizes: Sequence[int],
    seed: int = 0,
    policy: str = "uniform",
    draw: str = "multinomial",
    budget: bool = False,
    storage: Storage = MEMORY,
    **options: Any,
) -> NeighborSampler:
    """Any policy with any draw; what is left of the options is the policy's."""
    kind = POLICIES[one_of(policy, POLICIES, "policy")]
    sampler = NeighborSampler(graph, sizes, None, draw, seed, budget, storage)
    place = placed(storage, parameters(kind), f"policy '{policy}'")
    sampler.policy = kind(graph, len(sampler.sizes), **place, **options)
    sampler.policy.prepare(draw, sampler.fan_out)
    return sampler


def policy_options(policy: str) -> list[str]:
    """What a policy takes by name."""
    return [p for p in parameters(POLICIES[policy]) if p not in ("graph", "layers", "storage")]


def parameters(build: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What something is made from, by name. What a class hands on as **options is what the next of its bases takes."""
    takes: dict[str, inspect.Parameter] = {}
    own = inspect.signature(build).parameters
    for base in build.__mro__[1:] if isinstance(build, type) else ():
        if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            break
        takes |= {name: p for name, p in own.items() if p.kind is not p.VAR_KEYWORD}
        own = inspect.signature(base).parameters
    return {**own, **takes}


def placed(storage: Storage, takes: Mapping[str, Any], what: str) -> dict[str, Storage]:
    """The storage as an argument, where one is given; what does not take it keeps its state in memory."""
    if storage is MEMORY:
        return {}
    if "storage" not in takes:
        raise InputError(f"`state` must be left out for {what}, which keeps its own in memory, got a folder")
    return {"storage": storage}


METHODS: dict[str, Method] = {
    m.name: m
    for m in [
        Method("adahop", "node-wise", True, "4 bytes per edge and 14 per node, per layer that is drawn (gat: 8 per "
               "node, plus 8 per head); 8 per node and hidden unit (gat: 4 per node, feature and head)", node_wise,
               {"policy": "tracked", "draw": "systematic"},
               estimator="exact+snapshot", instead={
                   FIXED: {"options": {"policy": "tracked", "draw": "auto"}},
                   ENDS: {"options": {"policy": "attended", "draw": "systematic"}, "estimator": "exact+sums"},
                   PAIRS: {"estimator": "plain"}, OTHER: {"estimator": "plain"}}),
        Method("graphsage", "node-wise", True, "none", node_wise, {"policy": "uniform"}),
        Method("bs", "node-wise", True, "4 bytes per edge and 8 per node, per layer", node_wise, {"policy": "exp3"}),
        Method("bs.m", "node-wise", True, "4 bytes per edge and 8 per node, per layer", node_wise,
               {"policy": "exp3m", "draw": "depround"}),
        Method("thanos", "node-wise", False, "4 bytes per edge and 12 per node, per layer", node_wise,
               {"policy": "thanos"}),
        Method("thanos.m", "node-wise", False, "4 bytes per edge and 12 per node, per layer", node_wise,
               {"policy": "thanosm", "draw": "depround"}),
        Method("s-gcn", "node-wise", True, "4 bytes per node and hidden unit", node_wise,
               {"policy": "uniform", "draw": "systematic"}, estimator="exact+history"),
        Method("labor", "node-wise", True, "none", Labor),
        Method("cluster-gcn", "subgraph", False, "20 bytes per node", ClusterGCN),
        Method("graphsaint", "subgraph", False, "4 bytes per edge and 4 per node", GraphSAINT),
        Method("rns", "subgraph", False, "5 bytes per node", RandomNodes),
        Method("dropedge", "subgraph", False, "5 bytes per node", RandomNodes, {"parts": 1, "drop": 0.5}),
        Method("fastgcn", "layer-wise", True, "8 bytes per node", FastGCN),
        Method("ladies", "layer-wise", True, "none", Ladies),
        Method("pladies", "layer-wise", True, "none", Ladies, {"draw": "poisson"}),
        Method("as-gcn", "layer-wise", True, "one number per feature and layer", ASGCN, needs=("features",)),
        Method("bliss", "layer-wise", True, "4 bytes per edge and 8 per node, per layer", Bliss),
    ]
}  # fmt: skip


def make(
    method: str, graph: Graph, sizes: Sequence[int], seed: int = 0, storage: Storage = MEMORY, **options: Any
) -> Sampler:
    """A sampler by its method's name; options override the preset's, so that the parts combine freely.

    `storage` is where its state lies, see `adahop.storage`.

    >>> sampler = make("bs", Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), sizes=[2], draw="systematic")
    >>> [block.num_dst for block in sampler.sample([0])]
    [1]
    """
    preset = METHODS[one_of(method, METHODS, "method")]
    check_options(preset, options)
    place = placed(storage, parameters(preset.build), f"method '{method}'")
    with room_for(f"the state of method '{method}'"):
        return preset.build(graph, sizes, seed=seed, **{**preset.options, **options}, **place)


# --- methods of a user's own -----------------------------------------------------------------------------------------

BUILT_IN = frozenset({*METHODS, *POLICIES})
SMALL = [[1, 2, 3, 3, 4], [0, 0, 0, 1, 1]]  # edges of the graph that a new policy is tried on; nodes 2 to 5 have none


def register(
    name: str,
    kind: type[Policy] | Build,
    family: str = "node-wise",
    unbiased: bool = True,
    state: str = "not stated",
    **options: Any,
) -> None:
    """Add a method of your own to `METHODS`: everything that takes `method=` then takes its name.

    `kind` is a `Policy`, or a class or function that builds a `Sampler` from (graph, sizes, seed). A policy also works
    with every other method, as `policy=name`; its odds are first tried on a small graph. `options` are the preset's: of
    the policy, and `draw` (systematic unless given). `state` says what it keeps, for `adahop list`. To register a name
    of your own again replaces it.

    >>> class Hubs(Policy):
    ...     def odds(self, layer):
    ...         return ops.Odds(node=self.graph.degree() + 1.0)
    >>> register("hubs", Hubs, draw="multinomial")
    >>> make("hubs", Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), [2]).policy.odds(0).node.tolist()
    [4.0, 1.0, 1.0, 1.0]
    >>> del METHODS["hubs"], POLICIES["hubs"]
    """
    if not re.fullmatch(r"[a-z][a-z0-9._-]*", of_kind(name, str, "name")) or name in BUILT_IN:
        raise InputError(f"`name` must be a new word of small letters, digits, '.', '_' and '-', got '{name}'")
    one_of(family, ("node-wise", "layer-wise", "subgraph"), "family")
    flag(unbiased, "unbiased")
    of_kind(state, str, "state")
    if not callable(kind) or isinstance(kind, Policy):
        raise KindError(
            f"`kind` must be a Policy class, or a function that builds a Sampler, got {type(kind).__name__}"
        )
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        METHODS[name] = Method(name, family, unbiased, state, cast(Build, kind), options)
        return
    if family != "node-wise":
        raise InputError(f"`family` must be node-wise for a policy, got '{family}'")
    _try(kind, {k: v for k, v in options.items() if k not in inspect.signature(node_wise).parameters})
    POLICIES[name] = kind
    METHODS[name] = Method(name, family, unbiased, state, node_wise, {"draw": "systematic", **options, "policy": name})


def _try(kind: type[Policy], options: dict[str, Any]) -> None:
    """A policy gives odds that can be drawn from; one that needs facts about the model is not tried."""
    graph = Graph.from_edge_index(SMALL, num_nodes=6)
    takes = inspect.signature(kind)
    try:
        takes.bind(graph, 2, **{**dict.fromkeys(kind.needs), **options})
    except TypeError as e:
        raise InputError(
            f"`kind` must be built from graph and layers, with a default for every option, got {kind.__name__}{takes}: "
            f"{e}"
        ) from None
    if not kind.needs:
        check_odds(kind(graph, 2, **options))


# --- what combines with what -----------------------------------------------------------------------------------------


def part(method: Method, options: Mapping[str, Any], name: str) -> Any:
    """The policy or the draw that a method has with these options; None where it has no such part."""
    takes = parameters(method.build)
    own = takes[name].default if name in takes else None
    return options.get(name, method.options.get(name, own))


def check_options(method: Method, options: Mapping[str, Any]) -> None:
    """Every option is one of the method's, or of its policy's; the parts that are named exist."""
    takes = parameters(method.build)
    ours = ("graph", "sizes", "seed", "storage")
    known = [name for name, p in takes.items() if p.kind is not p.VAR_KEYWORD and name not in ours]
    policy, draw = part(method, options, "policy"), part(method, options, "draw")
    if policy is not None:
        one_of(policy, POLICIES, "policy")
    if draw is not None:
        one_of(draw, ops.DRAWS if policy is None else NODE_WISE_DRAWS, "draw")
        why = None if policy is None else draw_refusal(POLICIES[policy], policy, draw)
        if why is not None:
            raise InputError(why)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for name in options:
        if open_ended and policy is not None and name not in known and name not in policy_options(policy):
            _option(name, [*known, *policy_options(policy)], method.name)
        if not open_ended and name not in known:
            _option(name, known, method.name)


def _option(name: str, known: list[str], method: str) -> NoReturn:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise InputError(f"an option of method '{method}' must be one of {', '.join(known) or 'none'}, got '{name}'{hint}")


def needs(method: Method, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The facts about data and model that a method with these options needs."""
    policy = part(method, options, "policy")
    return (*method.needs, *(POLICIES[policy].needs if policy in POLICIES else ()))


# what is remembered for the sake of attention alone, and why no other weights need it
OF_ATTENTION = {"scores": "need no normaliser", "sums": "leave the first layer's sums as they are"}


def refusal(estimator: str, model: str, weights: str) -> str | None:
    """Why an estimator and a model do not combine, in one sentence; None where they do. Policies and draws combine with
    every estimator and model."""
    what = estimator.split("+")[-1]
    if what in OF_ATTENTION and weights == FIXED:
        return (
            f"`estimator` must not remember {what} for model {model}, whose weights are the graph's own and "
            f"{OF_ATTENTION[what]}, got {estimator}"
        )
    return None
