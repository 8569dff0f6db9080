"""AdaptiveSampler: our sampler behind PyG's BaseSampler, for NodeLoader and Lightning's LightningNodeData."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from adahop.checks import InputError, node_ids
from adahop.graph import Graph
from adahop.pyg.feedback import Learner
from adahop.pyg.hops import Hops, draw_hops, unplaced, weigh
from adahop.pyg.loader import _subgraph
from adahop.pyg.norm import gcn_degree
from adahop.pyg.source import node_sampler, pyg_options, source
from adahop.samplers import NeighborSampler


class AdaptiveSampler(Learner, BaseSampler):
    """For `NodeLoader(data, node_sampler=s, transform=s.attach)`; `attach` adds edge_weight, scale and blocks.

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
        data: Any,
        num_neighbors: Any = (10, 10),
        method: str = "adahop",
        seed: int = 0,
        replace: bool | None = None,
        disjoint: bool = False,
        subgraph_type: Any = "directional",
        weight_attr: str | None = None,
        sampler: NeighborSampler | None = None,
        **options: Any,
    ):
        data, graph = source(data)
        self.sampler = node_sampler(
            data, graph, num_neighbors, method, seed, replace, weight_attr, sampler, **pyg_options(options)
        )
        self.disjoint, self.subgraph = disjoint, _subgraph(subgraph_type, disjoint)
        self._place, self._degree = unplaced(graph.num_nodes), gcn_degree(graph)
        self._drawn: Hops | None = None

    @property
    def num_neighbors(self) -> list[int]:
        return self.sampler.sizes[::-1]

    def sample_from_nodes(self, inputs: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        if inputs.input_type is not None or inputs.time is not None:
            raise InputError("`inputs` must be plain node ids, got a node type or times, which are not supported yet")
        self._take_back()
        seeds = node_ids(inputs.node, self.sampler.graph.num_nodes, "inputs")
        hops = self._drawn = draw_hops(self.sampler, seeds, self.disjoint, self.subgraph, self._place)
        row, col = hops.edge_index
        return SamplerOutput(
            node=hops.n_id, row=row, col=col, edge=hops.e_id, batch=hops.tree, num_sampled_nodes=hops.num_nodes,
            num_sampled_edges=hops.num_edges, metadata=(inputs.input_id, inputs.time),
        )  # fmt: skip

    def sample_from_edges(self, inputs: Any, neg_sampling: Any = None) -> Any:
        raise InputError("`inputs` must be nodes, got edges: link-level sampling is not supported yet")

    @property
    def edge_permutation(self) -> None:
        return None

    def attach(self, batch: Any) -> Any:
        """The transform that completes a batch of NodeLoader; it must be the one drawn last."""
        if self._drawn is None or not torch.equal(batch.edge_index.cpu(), self._drawn.edge_index.cpu()):
            raise InputError("`batch` must be the one drawn last, got another; set num_workers=0")
        if isinstance(batch.to_dict().get("graph"), Graph):  # our own data sets; their graph must not travel along
            batch = Data.from_dict({k: v for k, v in batch.to_dict().items() if k != "graph"})
        return self._hand_out(weigh(batch, self._drawn, self.sampler.graph, self._degree))

    def state_dict(self) -> dict[str, Any]:
        self._take_back()
        return copy.deepcopy(self.sampler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)
