"""AdaptiveSampler: our sampler behind PyG's BaseSampler, for NodeLoader and Lightning's LightningNodeData."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler.base import NegativeSampling, SubgraphType

from adahop.checks import InputError, KindError, flag, node_ids
from adahop.pyg.feedback import Learner
from adahop.pyg.hops import AnyData, Hops, add_scale, draw_hops
from adahop.pyg.loader_options import (
    data_and_graph,
    estimator_of,
    history_options,
    node_sampler,
    num_neighbors_of,
    pyg_options,
    seed_of,
    subgraph_of,
    without_graph,
)
from adahop.samplers import NeighborSampler
from adahop.typed import Relation

REFRESH = 256  # rows of the history renewed per batch, whose size is not known here


class AdaptiveSampler(Learner, BaseSampler):
    """For `NodeLoader(data, node_sampler=s, transform=s.attach)`; `attach` adds edge_weight, scale and blocks.

    With a `device` it draws there; hand NodeLoader the data on that device too, and batches are cut there.

    Learns as the loader does, by `feedback(model, batch)`, or by `learn(model)` where no batch is fetched ahead of its
    use. Keep num_workers=0: a worker process draws with a copy that never learns.

    >>> import adahop; from torch_geometric.loader import NodeLoader
    >>> data = adahop.load("digits"); s = AdaptiveSampler(data, [5, 5])
    >>> batch = next(iter(NodeLoader(data, s, data.train_mask, transform=s.attach, batch_size=32)))
    >>> batch.batch_size, batch.scale.shape == batch.e_id.shape
    (32, True)
    """

    def __init__(
        self,
        data: object,
        num_neighbors: Iterable[int] | dict[Relation, list[int]] | NumNeighbors = (10, 10),
        method: str = "adahop",
        seed: int | None = None,
        replace: bool | None = None,
        disjoint: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        weight_attr: str | None = None,
        sampler: NeighborSampler | None = None,
        estimator: str | None = None,
        noise: float = 0.0,
        history_dtype: torch.dtype | None = None,
        history_dir: str | Path | None = None,
        history_refresh: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ):
        self.data, graph = data_and_graph(data, device)
        rest = pyg_options(options, type(self).__init__)
        seed = seed_of(seed, generator)
        self.sampler = node_sampler(
            self.data, graph, num_neighbors, method, seed, replace, weight_attr, sampler, device, **rest
        )
        self.estimator = estimator_of(estimator, method, weight_attr, sampler, graph.types)
        self.noise = noise
        self._history_options = history_options(self.estimator, history_dtype, history_dir, history_refresh, REFRESH)
        self.disjoint = flag(disjoint, "disjoint")
        self._subgraph = subgraph_of(subgraph_type, disjoint, graph.types)
        self._drawn: Hops | None = None
        self._seen = torch.zeros(graph.num_nodes, dtype=torch.bool, device=graph.device)  # whether a node was a seed
        self._since = 0  # how many seeds there were since an epoch began

    @property
    def num_neighbors(self) -> list[int] | dict[Relation, list[int]]:
        return num_neighbors_of(self.sampler)

    def sample_from_nodes(self, inputs: NodeSamplerInput, **kwargs: Any) -> SamplerOutput | HeteroSamplerOutput:
        graph = self.sampler.graph
        if inputs.time is not None:
            raise InputError("`inputs` must be plain node ids, got times, which are not supported yet")
        if graph.types is None and inputs.input_type is not None:
            raise InputError("`inputs` must be plain node ids, as the data has no node types, got a node type")
        if graph.types is not None and inputs.input_type is None:
            raise InputError("`inputs` must have a node type, as the data is a HeteroData, got none")
        self._update_from_open()
        if graph.types is not None:
            seeds = graph.ids((inputs.input_type, inputs.node), "inputs")
        else:
            seeds = node_ids(inputs.node, graph.num_nodes, "inputs")
        seeds = seeds.to(graph.device)
        self._notice_epoch(seeds)
        self._drawn = draw_hops(self.sampler, seeds, self.disjoint, self._subgraph)
        return self._drawn.output(inputs.input_id, inputs.time)

    def _notice_epoch(self, seeds: Tensor) -> None:
        """An epoch begins where a seed comes again after as many seeds as there are, as far as is known.

        No loader says when an epoch begins. Seeds drawn with replacement come again early: the passes over the data
        that this costs are each twice as far apart as the one before, until an epoch lies between.
        """
        again = bool(self._seen[seeds].any())
        self._seen[seeds] = True
        if self._memory is not None and (self._since == 0 or (again and self._since >= int(self._seen.sum()))):
            self._memory.begin_epoch()
            self._since = 0
        self._since += seeds.numel()

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput:
        raise InputError("`inputs` must be nodes, got edges: link-level sampling is not supported yet")

    @property
    def edge_permutation(self) -> None:
        return None

    def attach(self, batch: AnyData) -> AnyData:
        """The transform that completes a batch of NodeLoader; it must be the one drawn last."""
        if self._drawn is None or not _is_drawn(batch, self._drawn):
            raise InputError("`batch` must be the one drawn last, got another; set num_workers=0")
        return self._hand_out(add_scale(without_graph(batch)[0], self._drawn), self._drawn)

    def state_dict(self) -> dict[str, Any]:
        """What was learned and remembered, and how far the epoch is; where its loader stands is not known."""
        self._update_from_open()
        return {
            "sampler": copy.deepcopy(self.sampler.state_dict()),
            "snapshots": self._memory_state if self._memory is None else self._memory.state(),
            "seen": self._seen.clone(),
            "since": self._since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a `state_dict` of a sampler over the same data; one of 0.1 has what was learned alone."""
        if not isinstance(state, dict) or not {"sampler", "step"} & state.keys():
            raise KindError(f"`state` must be the `state_dict` of an AdaptiveSampler, got {type(state).__name__}")
        if "sampler" not in state:
            self.sampler.load_state_dict(state)
            return
        self.sampler.load_state_dict(state["sampler"])
        self._seen.copy_(state["seen"])
        self._since, self._memory_state = state["since"], state["snapshots"]
        self._set_memory(None if self._memory is None else self._memory.model)


def _is_drawn(batch: Data | HeteroData, hops: Hops) -> bool:
    """Whether a batch has the edges that were drawn."""
    if isinstance(batch, HeteroData):
        pairs = [] if hops.typed is None else [(batch[r].edge_index, e) for r, e in hops.typed.edge_index.items()]
    else:
        pairs = [(batch.edge_index, hops.edge_index)]
    return bool(pairs) and all(torch.equal(edges, drawn.to(edges.device)) for edges, drawn in pairs)
