"""AdaptiveNeighborLoader: PyG's NeighborLoader with one changed line, and batches whose sampler learns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from adahop.checks import InputError, KindError, flag, function, node_ids, tell
from adahop.loader import STATE, Batches, Made, moved
from adahop.ops import random
from adahop.pyg.align import align
from adahop.pyg.batches import edge_index_of
from adahop.pyg.cache import FeatureCache, cache_of, cached
from adahop.pyg.feedback import Learner
from adahop.pyg.hops import Hops, add_scale, cut, draw_hops
from adahop.pyg.loader_options import (
    data_and_graph,
    estimator_of,
    history_options,
    inputs,
    inputs_of_type,
    node_sampler,
    num_neighbors_of,
    positions,
    pyg_options,
    seed_of,
    split_samplers,
    subgraph_of,
)
from adahop.pyg.padding import PaddedShape, add_masks, check_no_batch_norm, is_padded, pad, padded_shape
from adahop.samplers import NeighborSampler
from adahop.samplers.base import EPOCH
from adahop.typed import Relation

NEEDED = {*STATE, "sampler", "snapshots", "epoch"}  # of a state


class AdaptiveNeighborLoader(Learner, Batches[NeighborSampler, Hops]):
    """Batches as of PyG's NeighborLoader, drawn by a method of ours, with `edge_weight`, `scale` and `blocks` added.

    A batch has the data's node and edge attributes, `edge_index` in local ids (seeds first), `n_id`, `e_id` (the place
    in `data.edge_index`), `input_id`, `batch_size`, `num_sampled_nodes` and `num_sampled_edges` per hop, and with
    `disjoint` also `batch`. `num_neighbors` counts from the seeds outwards, as in PyG; each node draws once, where it
    first appears. `scale` makes the sum over a node's drawn edges unbiased; `scale_messages(model)`, called once,
    applies it inside the layers. `edge_weight` is the data's own where it has one, else the scale. `weight_attr` draws
    in proportion to fixed weights.
    estimator="snapshot" (of method "adahop", once it learns) remembers each layer's output for all nodes from a pass
    over the data, made at an epoch's start unless the model was just evaluated, and draws what changed since.
    estimator="history" needs no pass: it keeps the rows that layers were last sent, in `history_dtype` (torch.float32,
    float16 or int8), in memory or in files of the folder `history_dir`; training batches renew theirs, and between two
    batches the `history_refresh` (as many as a batch has seeds, by default) oldest are renewed. `noise` in [0, 1] is
    the share of what is remembered that is left out.

    Differences to PyG: a node with no more neighbours than are to be drawn takes them all, also with `replace`;
    self-loops of the data are always taken and not counted; `replace=None` leaves it to the method; in `disjoint` trees
    a node's draw is the same in all trees of a batch; bidirectional and induced subgraphs estimate no sum (scale 1).

    `sampler` is an adahop NeighborSampler, or one of torch's (ImbalancedSampler, DistributedSampler), which then says
    which positions of `input_nodes` an epoch has; `neighbor_sampler` takes ours where both are wanted. A number of 0 in
    `num_neighbors` draws nothing in that hop, -1 takes all. With `budget=True` a number is the total of a hop.

    With a `device` the graph, the sampler's state and all tensors of the data lie there, and batches are drawn and cut
    there, in the caller's thread: nothing of a batch goes through the host. Without one, draws are the CPU's. With a
    `cache` besides, tables of node features stay in pinned memory of the host, and the rows that are most likely to be
    read have a copy on the device: a share of the features (a float) or so many bytes (a whole number).

    padded=True gives every batch as many nodes and edges, those that the largest could need: the ones added come last
    (`node_mask` and `edge_mask` are False), with edges of scale 0 among themselves, so that sums, means, softmax and
    any other aggregation of the batch's own nodes are what they were. A model that is compiled sees one shape.

    One seed gives the same batches for any number of threads. Without `seed` it is that of `generator`, else the one
    last given to `torch.manual_seed` or `seed_everything` (if below 2^32), else 0. prefetch=d draws d batches ahead in
    threads; `transform` still runs in the caller's, unless `filter_per_worker` is set. `pin_memory` is as in PyG.

    >>> import adahop
    >>> data = adahop.load("digits")
    >>> batch = next(iter(AdaptiveNeighborLoader(data, [5, 5], data.train_mask, batch_size=32)))
    >>> batch.batch_size, batch.num_sampled_nodes[0], batch.edge_weight.shape == batch.e_id.shape
    (32, 32, True)
    """

    def __init__(
        self,
        data: object,
        num_neighbors: Iterable[int] | dict[Relation, list[int]] | NumNeighbors = (10, 10),
        input_nodes: Any = None,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        method: str = "adahop",
        seed: int | None = None,
        prefetch: int = 0,
        replace: bool | None = None,
        disjoint: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        directed: bool = True,
        weight_attr: str | None = None,
        estimator: str | None = None,
        noise: float = 0.0,
        history_dtype: torch.dtype | None = None,
        history_dir: str | Path | None = None,
        history_refresh: int | None = None,
        transform: Callable[..., Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        sampler: NeighborSampler | Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        neighbor_sampler: object = None,
        input_id: Tensor | None = None,
        generator: torch.Generator | None = None,
        pin_memory: bool = False,
        filter_per_worker: bool | None = None,
        device: torch.device | str | None = None,
        cache: float | int | None = None,
        padded: bool = False,
        **options: Any,
    ):
        cache_size = cache_of(cache, device)
        self.data, graph = data_and_graph(data, device, tables=cache_size is None)
        ours, self._order = split_samplers(sampler, neighbor_sampler)
        rest = pyg_options(options, type(self).__init__)
        seed = seed_of(seed, generator)
        drawn_by = node_sampler(
            self.data, graph, num_neighbors, method, seed, replace, weight_attr, ours, device, **rest
        )
        super().__init__(drawn_by, batch_size, prefetch, flag(pin_memory, "pin_memory"))
        self.estimator = estimator_of(estimator, method, weight_attr, ours, graph.types)
        self.noise = noise
        self._history_options = history_options(
            self.estimator, history_dtype, history_dir, history_refresh, self.batch_size
        )
        self.input_type: str | None = None  # of the seeds, where the data has types
        if graph.types is None:
            self.nodes, self._input_ids = inputs(input_nodes, graph.num_nodes, input_id)
        else:
            self.nodes, self._input_ids, self.input_type = inputs_of_type(input_nodes, graph.types, input_id)
        self.nodes, self._input_ids = self.nodes.to(graph.device), self._input_ids.to(graph.device)
        self.disjoint = flag(disjoint, "disjoint")
        self._subgraph = subgraph_of(subgraph_type if flag(directed, "directed") else "induced", disjoint, graph.types)
        self.shuffle, self.drop_last = flag(shuffle, "shuffle"), flag(drop_last, "drop_last")
        self._batch_order = batch_sampler
        self._check_order()
        self.transform = function(transform, "transform")
        self.transform_sampler_output = function(transform_sampler_output, "transform_sampler_output")
        self.filter_per_worker = filter_per_worker is not None and flag(filter_per_worker, "filter_per_worker")
        self.cache: FeatureCache | None = None
        self._cut_from = self.data  # what batches are cut from
        if cache_size is not None:
            self.cache = cached(self.data, cache_size, drawn_by, self.nodes, self.batch_size)
            self.data, self._cut_from = self.cache.with_tables(self.data), self.cache.without_tables(self.data)
        self._shape: PaddedShape | None = None  # of padded batches
        if is_padded(padded, drawn_by, self._subgraph, self.estimator, batch_sampler):
            repeats = self._order is not None or self.nodes.unique().numel() < self.nodes.numel()
            self._shape = padded_shape(drawn_by, self.batch_size, self.disjoint, repeats)
            self.check_model = check_no_batch_norm
        self._warned = False  # that a transform gave a batch other edges
        self._epoch_seeds: list[Tensor] | None = None  # of the epoch that began last, where a torch sampler decides

    def _check_order(self) -> None:
        """As in torch, two ways to say which seeds a batch has exclude each other."""
        given = {"sampler": self._order is not None, "shuffle": self.shuffle, "drop_last": self.drop_last}
        if self._order is not None and self.shuffle:
            raise InputError("`shuffle` must be left out where a `sampler` decides the order, got both")
        if self._batch_order is not None:
            for name in (name for name, is_given in given.items() if is_given):
                raise InputError(f"`{name}` must be left out where a `batch_sampler` decides the batches, got both")
            if not hasattr(self._batch_order, "__len__") or not isinstance(self._batch_order, Iterable):
                kind = type(self._batch_order).__name__
                raise KindError(f"`batch_sampler` must give lists of positions and have a length, got {kind}")

    @property
    def num_neighbors(self) -> list[int] | dict[Relation, list[int]]:
        return num_neighbors_of(self.sampler)

    @property
    def input_nodes(self) -> Tensor | tuple[str, Tensor]:
        types = self.sampler.graph.types
        return self.nodes if self.input_type is None or types is None else (
            self.input_type, self.nodes - types.nodes[self.input_type]
        )  # fmt: skip

    @property
    def dataset(self) -> range:
        return range(self.nodes.numel())

    def __len__(self) -> int:
        if self._batch_order is not None:
            return len(self._batch_order)  # type: ignore[arg-type]
        n = self.nodes.numel() if self._order is None else len(self._order)  # type: ignore[arg-type]
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __call__(self, index: Any) -> Any:
        """The batch of some positions in `input_nodes`."""
        places = node_ids(index, self.nodes.numel(), "index").to(self.nodes.device)
        return self.give(self.make(self.sampler, places))

    # --- the steps of a batch -----------------------------------------------------------------------------------------

    def opened(self) -> None:
        self._epoch_seeds = None
        if self._memory is not None:
            self._memory.begin_epoch()

    def seeds_of(self, number: int) -> Iterator[Tensor]:
        """Positions in `input_nodes`, one tensor per batch: by seed and number, or by a torch sampler."""
        self.sampler.epochs.fill_(number + 1)
        if self._order is None and self._batch_order is None:
            place = torch.arange(self.nodes.numel(), device=self.nodes.device)
            if self.shuffle:
                place = random.shuffled(place, random.key(self.sampler.seed, EPOCH, number))
            return iter(place.split(self.batch_size)[: len(self)])
        if self._epoch_seeds is None:  # not a resumed epoch
            self._epoch_seeds = self._ordered()
        return (part.to(self.nodes.device) for part in self._epoch_seeds)

    def _ordered(self) -> list[Tensor]:
        n = self.nodes.numel()
        if self._batch_order is not None:
            return [positions(part, n, "batch_sampler") for part in self._batch_order]
        assert self._order is not None
        place = positions(self._order, n, "sampler")
        parts = place.split(self.batch_size) if place.numel() else ()
        return [part for part in parts if part.numel() == self.batch_size or not self.drop_last]

    def sample(self, sampler: NeighborSampler, seeds: Tensor) -> Hops:
        hops = draw_hops(sampler, self.nodes[seeds], self.disjoint, self._subgraph)
        return hops if self._shape is None else pad(hops, self._shape)

    def view(self, seeds: Tensor, drawn: Hops) -> Any:
        out = self._transformed(self._input_ids[seeds], drawn)
        batch = add_scale(cut(self._cut_from, out, self.input_type), drawn)
        batch = batch if self._shape is None else add_masks(batch, drawn)
        if self.cache is not None:
            self.cache.fill(batch, out.node)
        return self.transform(batch) if self.transform is not None and self.filter_per_worker else batch

    def _transformed(self, ids: Tensor, hops: Hops) -> Any:
        """After `transform_sampler_output`, which may change anything but the drawn nodes and edges."""
        drawn = hops.output(ids)
        if self.transform_sampler_output is None:
            return drawn
        out = self.transform_sampler_output(hops.output(ids))
        if not all(_equal(getattr(out, name), getattr(drawn, name)) for name in ("node", "row", "col", "edge")):
            raise InputError("`transform_sampler_output` must leave node, row, col and edge as drawn, got others")
        out.metadata = drawn.metadata
        return out

    def give(self, made: Made[Hops]) -> Any:
        batch = made.batch
        if self.transform is not None and not self.filter_per_worker:
            batch = self.transform(batch)
        if self.transform is not None and not self._warned:
            self._warn_of_other_edges(batch, made.drawn)
        return self._hand_out(batch, made.drawn)

    def _warn_of_other_edges(self, batch: Data | HeteroData, hops: Hops) -> None:
        """Once: edges that were not drawn estimate no sum, so that layers treat them as any other edges."""
        if isinstance(batch, HeteroData):
            drawn = {} if hops.typed is None else hops.typed.edge_index
            pairs = [(drawn.get(r), edge_index_of(batch[r]), r[0] != r[2]) for r in batch.edge_types]
        else:
            pairs = [(hops.edge_index, edge_index_of(batch), False)]
        if hops.blocks is None or all(
            edges is None or (drawn is not None and align(drawn.to(edges.device), edges, bipartite=two) is not None)
            for drawn, edges, two in pairs
        ):
            return
        self._warned = True
        tell(
            "`transform` gave the batch edges that were not drawn, so its layers are not scaled and teach the sampler "
            "nothing; apply it to the data before the loader, as in ToUndirected()(data)"
        )

    def hit_rate(self) -> float:
        """The share of feature rows that were on the device since this was asked last; 1 where all of them are."""
        return 1.0 if self.cache is None else self.cache.hit_rate()

    def back(self, done: bool) -> None:
        self._update_from_open(done)

    # --- a checkpoint -------------------------------------------------------------------------------------------------

    def pack(self, made: Made[Hops]) -> Any:
        return made.seeds, made.drawn.plain()

    def unpack(self, plain: Any) -> Made[Hops]:
        seeds, hops = moved(plain, self.nodes.device)
        return self.made(seeds, Hops.of(hops).by_type(self.sampler.graph.types))

    def state_dict(self) -> dict[str, Any]:
        """Everything the remaining batches depend on; taken within an epoch, the next iteration goes on from there."""
        self._update_from_open()
        position = self.position()
        if position["taken"] >= len(self):  # after the last batch the next epoch begins
            position.update(taken=0, ahead=[])
        return {
            "sampler": copy.deepcopy(self.sampler.state_dict()),
            "snapshots": self._memory_state if self._memory is None else self._memory.state(),
            "epoch": 0 if self._epoch is None else self._epoch.number,
            "nodes": self.nodes.numel(),
            "seed": self.sampler.seed,
            "parts": self._epoch_seeds if position["taken"] else None,
            **position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a `state_dict` of a loader over the same data with the same options."""
        if not isinstance(state, dict) or not state.keys() >= NEEDED:
            raise KindError(f"`state` must be the `state_dict` of such a loader, got {type(state).__name__}")
        self.check(state)
        many, needed = self.nodes.numel(), state.get("nodes", self.nodes.numel())
        if state["taken"] and many != needed:
            raise InputError(
                f"the number of `input_nodes` must be {needed} to go on within the epoch of this state, got {many}"
            )
        self.sampler.load_state_dict(state["sampler"])
        self.sampler.seed = state.get("seed", self.sampler.seed)
        self._memory_state = state["snapshots"]
        self._set_memory(None if self._memory is None else self._memory.model)
        self._epoch_seeds = state.get("parts")
        self.go_on(state)


def _equal(a: Any, b: Any) -> bool:
    """Whether two outputs of a sampler hold the same, per type where they are dicts."""
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b)
    return torch.equal(a, b)
