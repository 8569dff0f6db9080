"""Node-wise sampling: each target draws its own neighbours."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, flag, of_kind, one_of
from adahop.graph import Graph
from adahop.messages import Reading
from adahop.ops import Drawn, Odds, Rows, random
from adahop.policies import Policy, Uniform
from adahop.policies.base import check_odds
from adahop.samplers.base import Sampler
from adahop.samplers.budget import spread
from adahop.samplers.loop import Draw
from adahop.samplers.sizes import one_size
from adahop.storage import MEMORY, Storage

BUDGET = 7  # the counter of the budget's rounding, a stream of its own
SHARED, AUTO = "shared", "auto"
DRAWS = (*ops.DRAWS, SHARED, AUTO)
LONG = 2**16  # a larger size is cut to the longest row, as draws reserve room for it
OVERLAP = 1.0  # "auto" shares sources where a node is a neighbour of so many of a batch's targets on average


class NeighborSampler(Sampler):
    """Each target takes itself exactly and k of its neighbours, drawn by `draw` with the odds of `policy`.

    scale = 1/(k q) with replacement and 1/pi without, so that sum weight * scale * h[src] has the full sum as its mean.
    With `budget`, sizes are totals per layer, spread over a batch's targets (see `spread`) by the variance of each and
    its weight in the sums above: the size of a batch is then known beforehand, whatever the degrees are.
    draw="shared": sources are drawn once for all targets of a batch, systematically, as many as k draws per target
    would bring on average, and every target uses all of them that are its neighbours. A source comes with probability
    P_j in proportion to the root of sum_i (pi_ij S_i)^2 (capped at 1), where pi_ij is its probability in a draw of
    target i's own and S_i = sum_j a_ij; its edges have scale 1/P_j. Targets are in the batch anyway, so edges between
    them are exact. A batch reads as many nodes as with other draws, and in a dense graph a target uses many more than k
    of them. The draw scans the neighbourhoods.
    draw="auto": "shared" for a batch whose targets have neighbours in common (`OVERLAP`), else "systematic"; on a GPU
    always "systematic", whose shape is fixed.
    In a typed graph each (relation, target) draws k; sizes may be a dict by relation, and budgets also by the node type
    of the sources. "auto" then decides for each relation; relations that share draw their sources together.

    >>> sampler = NeighborSampler(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), [2])
    >>> sampler.sample([0])[0].scale.tolist()
    [1.5, 1.5]
    """

    sized_by = ("relation", "type")

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int] | Mapping[Any, Sequence[int]],
        policy: Policy | None = None,
        draw: str = "multinomial",
        seed: int = 0,
        budget: bool = False,
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, sizes, seed, storage)
        self.budget = flag(budget, "budget")
        if self.sized.source is not None and not budget:
            raise InputError("`sizes` must go by relation where they are not a budget, got node types")
        self.how = one_of(draw, DRAWS, "draw")
        self.policy = Uniform(graph, len(self.sizes)) if policy is None else of_kind(policy, Policy, "policy")
        if policy is not None:
            if policy.layers != len(self.sizes):
                raise InputError(
                    f"`policy` must have as many layers as `sizes`, {len(self.sizes)}, got {policy.layers}"
                )
            check_odds(policy)
            if (why := draw_refusal(type(policy), type(policy).__name__, draw)) is not None:
                raise InputError(why)
        self.policy.prepare(self.how, self.fan_out)

    @property
    def fan_out(self) -> list[int]:
        """Draws per row of each layer; 1 where it varies."""
        return [1] * len(self.sizes) if self.budget else self.sizes

    @property
    def reads(self) -> Reading:  # type: ignore[override]
        return self.policy.reads

    @property
    def shares(self) -> bool:
        """Whether targets may share the sources drawn for a batch."""
        g = self.graph
        auto = self.how == AUTO and ops.goes_by_sums(g.indptr) and not ops.pads(g.indptr)
        return auto or self.how == SHARED

    @property
    def per_node(self) -> bool:  # type: ignore[override]
        return not self.shares

    @property
    def by_owner(self) -> bool:  # type: ignore[override]
        return not (self.budget or self.shares)

    @property
    def syncs(self) -> bool:  # type: ignore[override]
        return self.policy.syncs

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.policy.learns

    @property
    def rescales(self) -> bool:  # type: ignore[override]
        return self.policy.rescales

    @property
    def fixed_size(self) -> bool:  # type: ignore[override]
        drawn = [layer for layer in range(len(self.sizes)) if layer not in self.skip]
        fixed = all(self.sizes[layer] >= 0 and self.sized.same_for_all(layer) for layer in drawn)
        slots = self.policy.has_slots or not self.policy.own_draw
        return fixed and slots and not (self.budget or self.shares or self.how == "poisson")

    @property
    def draw_syncs(self) -> bool:  # type: ignore[override]
        return self.policy.own_draw

    @functools.cached_property
    def longest(self) -> int:
        """The most neighbours that a row has."""
        return int((self.graph.edges.last - self.graph.edges.first).max()) if self.graph.edges.last.numel() else 0

    def by_target(self) -> NeighborSampler | None:
        if self.how == SHARED:
            return None
        other = self if self.how != AUTO else self.twin()
        other.how = "systematic" if self.how == AUTO else self.how
        return other

    def expand(self, layer: int, rows: Rows, key: int | random.Stream) -> Drawn | Draw:
        k, shared = self.many(layer, rows, key), self.sharing(rows)
        if shared is None:
            return self._own(layer, rows, k, key)
        if bool(shared.all()):
            return self._shared(layer, rows, k, key)
        parts = []
        for mask, draw in ((shared, self._shared), (~shared, self._own)):
            found = draw(layer, rows.at(mask), k if k.numel() == 1 else k[mask], key)
            if isinstance(found, Draw):
                found = ops.draw(self.graph.edges, rows.at(mask), found.k, found.how, found.odds, key)
            parts.append((mask, found))
        return joined(parts)

    def _own(self, layer: int, rows: Rows, k: Tensor, key: int | random.Stream) -> Drawn | Draw:
        """Each row draws for itself."""
        how = "systematic" if self.how == AUTO else self.how
        if self.policy.own_draw and isinstance(key, random.Stream):  # a padded block
            size = self.sizes[layer]
            slots = functools.partial(self.policy.slots, layer, rows, size, how, key)
            return Draw(k, how, Odds(), key, size, slots)
        drawn = self.policy.places(layer, rows, k, how, key) if self.policy.own_draw else None
        if drawn is not None:
            return drawn
        return Draw(k, how, self.policy.odds_for(layer, how), key, self.sizes[layer])

    def sharing(self, rows: Rows) -> Tensor | None:
        """[T] whether each row shares sources; None: no row does. "auto" decides by degrees alone, never by what was
        drawn: where a relation's sources have `OVERLAP` of its targets in the batch on average."""
        if not self.shares:
            return None
        if self.how == SHARED:
            return torch.ones_like(rows.row, dtype=torch.bool)
        if rows.until is not None:
            return None
        edges, types = self.graph.edges, self.graph.types
        counts = [self.graph.num_nodes] if types is None else [types.num_nodes[kind] for kind, _, _ in types.relations]
        degrees, relation = edges.last[rows.row] - edges.first[rows.row], rows.relation
        relation = torch.zeros_like(degrees) if relation is None else relation
        total = degrees.new_zeros(len(counts)).index_add_(0, relation, degrees)
        shared = (total >= OVERLAP * torch.tensor(counts, device=total.device))[relation]
        return shared if bool(shared.any()) else None

    def _shared(self, layer: int, rows: Rows, k: Tensor, key: int | random.Stream) -> Drawn:
        """Sources drawn once for all rows, and all edges from them.

        P_j minimises sum over i, j of (a_ij |h_j|)^2 / P_j at a given number of sources, pi_ij S_i standing for
        a_ij |h_j|: the policy's odds are relative to their row.
        """
        assert isinstance(key, int), "shared sources have no fixed shape"
        edges = self.graph.edges
        near = ops.near(edges, rows, rows.targets, True, self._scratch)
        chance = self.policy.inclusion(layer, rows, near, k)
        possible = chance > 0
        if not bool(possible.all()):  # an edge with odds of 0 never comes, even where another target brings its source
            near = near._replace(row=near.row[possible], place=near.place[possible], local=near.local[possible])
            chance = chance[possible]
        weight = near.total((chance * self.policy.strength(layer, rows)[near.row]).square()).sqrt()
        expected = -torch.expm1(near.total(torch.log1p(-chance))).sum()  # sources that draws of their own would bring
        many = max(1, round(float(expected)))  # few where almost all neighbours are targets, but never none
        return ops.keep(edges, rows, near, *ops.pick(weight, many, "systematic", key))

    def scaled(self, rows: Rows, drawn: Drawn) -> Drawn:
        return self.policy.scaled(rows, drawn)

    def many(self, layer: int, rows: Rows, key: int | random.Stream) -> Tensor:
        """How many each row draws: one number for all, one per relation, or a share of the layer's budget each."""
        size, row, relation = self.sizes[layer], rows.row, self.sized.relation
        if not self.budget:
            k = self.sized.of(layer, rows)
            return k if size <= LONG else k.clamp(max=self.longest)
        if size < 0 and relation is None and self.sized.source is None:
            return one_size(size, row.device)
        assert rows.weigh is not None and isinstance(key, int), "a budget is spread on the host"
        most = self.graph.last[row] - self.graph.first[row]
        weigh = rows.weigh if rows.target is None else rows.weigh[rows.target]
        strength, key = weigh * self.policy.strength(layer, rows), random.key(key, BUDGET)
        if relation is None and self.sized.source is None:
            return spread(size, strength, most, key)
        return self._shares(layer, rows, strength, most, key)

    def _shares(self, layer: int, rows: Rows, strength: Tensor, most: Tensor, key: int) -> Tensor:
        """A budget per relation, or per type of the sources, spread over its own rows."""
        types = self.graph.types
        assert types is not None
        each, group = self.sized.relation, torch.arange(len(types.relations))
        if each is None:
            each, group = self.sized.source, torch.tensor([source for source, _ in types.ends])
        assert each is not None
        of, many = group.to(most.device)[rows.relation], torch.full_like(most, -1)
        for g, total in enumerate(each[layer].tolist()):
            own = of == g
            if total >= 0:
                many[own] = spread(total, strength[own], most[own], random.key(key, g))
        return many

    @torch.no_grad()
    def learn(self, blocks: list[Block], energy: list[Tensor]) -> None:
        for layer, (block, e) in enumerate(zip(blocks, energy, strict=True)):
            if block.num_edges:  # skipped layers have none
                self.policy.update(layer, block, e)


def joined(parts: Sequence[tuple[Tensor, Drawn]]) -> Drawn:
    """What was drawn for some rows and for the others, each given by a mask, in the order of all rows."""
    row = torch.cat([mask.nonzero().flatten()[ops.segment_of(d.ptr, d.pos.numel())] for mask, d in parts])
    order, many = row.argsort(stable=True), torch.bincount(row, minlength=parts[0][0].numel())
    each = (torch.cat(found)[order] for found in zip(*(d[1:] for _, d in parts), strict=True))
    return Drawn(ops.pointer(many), *each)


def draw_refusal(policy: type[Policy], name: str, draw: str) -> str | None:
    """Why a policy cannot draw like this; None where it can."""
    if draw in ops.DRAWS or not policy.own_draw or policy.own_inclusion:
        return None
    return f"`draw` must be one of {', '.join(ops.DRAWS)} for policy {name}, which draws by itself, got {draw}"
