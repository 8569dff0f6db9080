"""AdaptiveNeighborLoader: PyG's NeighborLoader with one changed line, and batches whose sampler learns."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.utils import filter_data

from adahop.block import Block
from adahop.checks import InputError, KindError, count, flag, function, node_ids, one_of
from adahop.ops import random
from adahop.pyg.feedback import Learner
from adahop.pyg.hops import SUBGRAPHS, Hops, draw_hops, unplaced, weigh
from adahop.pyg.norm import gcn_degree
from adahop.pyg.source import node_sampler, pyg_options, source
from adahop.samplers import NeighborSampler
from adahop.samplers.base import EPOCH

ESTIMATORS = ("plain", "snapshot")
STATE = {"sampler", "snapshots", "epoch", "taken", "ahead", "pending"}


class AdaptiveNeighborLoader(Learner):
    """Batches as of PyG's NeighborLoader, drawn by a method of ours, with `edge_weight`, `scale` and `blocks` added.

    A batch has the data's node and edge attributes, `edge_index` in local ids (seeds first), `n_id`, `e_id` (the place
    in `data.edge_index`), `input_id`, `batch_size`, `num_sampled_nodes` and `num_sampled_edges` a hop, and with
    `disjoint` also `batch`. `num_neighbors` counts from the seeds outwards, as in PyG; each node draws once, where it
    first appears. `scale` makes the sum over a node's drawn edges unbiased, and `edge_weight` is scale times the data's
    own `edge_weight`: pass it to the model, and call `scale_messages(model)` once, for layers that take none and for
    GCNConv, which needs the degrees of the whole graph. `weight_attr` draws in proportion to fixed weights.
    estimator="snapshot" (of method "adahop", once it learns) remembers each layer's output for all nodes from a pass
    over the data, made at an epoch's start unless the model was just evaluated, and draws what changed since.

    Differences to PyG: a node with no more neighbours than are to be drawn takes them all, also with `replace`;
    self-loops of the data are always taken and not counted; `replace=None` leaves it to the method; in `disjoint` trees
    a node's draw is the same in all trees of a batch; bidirectional and induced subgraphs estimate no sum (scale 1).

    One seed gives the same batches for any number of threads. prefetch=d draws in a thread, d batches ahead.

    >>> import adahop
    >>> data = adahop.load("digits")
    >>> batch = next(iter(AdaptiveNeighborLoader(data, [5, 5], data.train_mask, batch_size=32)))
    >>> batch.batch_size, batch.num_sampled_nodes[0], batch.edge_weight.shape == batch.e_id.shape
    (32, 32, True)
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any = (10, 10),
        input_nodes: Any = None,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        method: str = "adahop",
        seed: int = 0,
        prefetch: int = 0,
        replace: bool | None = None,
        disjoint: bool = False,
        subgraph_type: Any = "directional",
        directed: bool = True,
        weight_attr: str | None = None,
        estimator: str | None = None,
        transform: Callable[[Data], Any] | None = None,
        sampler: NeighborSampler | None = None,
        **options: Any,
    ):
        self.data, graph = source(data)
        self.sampler = node_sampler(
            self.data, graph, num_neighbors, method, seed, replace, weight_attr, sampler, **pyg_options(options)
        )
        own = "snapshot" if method == "adahop" and weight_attr is None and sampler is None else "plain"
        self.estimator = one_of(estimator or own, ESTIMATORS, "estimator")
        self.nodes = _inputs(input_nodes, graph.num_nodes)
        self.batch_size, self.prefetch = count(batch_size, 1, "batch_size"), count(prefetch, 0, "prefetch")
        self.subgraph = _subgraph(
            subgraph_type if flag(directed, "directed") else "induced", flag(disjoint, "disjoint")
        )
        self.shuffle, self.drop_last = flag(shuffle, "shuffle"), flag(drop_last, "drop_last")
        self.disjoint, self.transform = disjoint, function(transform, "transform")
        self._place, self._degree = unplaced(graph.num_nodes), gcn_degree(graph)
        self._epoch, self._taken, self._waiting = 0, 0, []  # type: int, int, list[Future]
        self._resumed: dict[str, Any] | None = None

    @property
    def num_neighbors(self) -> list[int]:
        return self.sampler.sizes[::-1]

    @property
    def input_nodes(self) -> Tensor:
        return self.nodes

    @property
    def dataset(self) -> range:
        return range(self.nodes.numel())

    def __len__(self) -> int:
        n = self.nodes.numel()
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __call__(self, index: Any) -> Data:
        """The batch of some positions in `input_nodes`."""
        return self._hand_out(self._draw(node_ids(index, self.nodes.numel(), "index"))[2])

    # --- one epoch ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Data]:
        state, self._resumed = self._resumed, None
        if state is None:
            self._epoch, self._taken = int(self.sampler.epochs), 0
            self.sampler.epochs += 1
            if self._snapshots is not None:
                self._snapshots.renew()
        return self._threaded(state) if self.prefetch else self._plain()

    def _parts(self) -> list[Tensor]:
        """Positions in `input_nodes`, a batch each, in an order that the seed and the epoch's number decide."""
        place = torch.arange(self.nodes.numel())
        if self.shuffle:
            place = random.shuffled(place, random.key(self.sampler.seed, EPOCH, self._epoch))
        return list(place.split(self.batch_size))[: len(self)]

    def _plain(self) -> Iterator[Data]:
        for part in self._parts()[self._taken :]:
            yield from self._pass(self._draw(part)[2])
        self._taken = -1  # nothing is left of this epoch

    def _pass(self, batch: Data) -> Iterator[Data]:
        self._taken += 1
        try:
            yield self._hand_out(batch)
        except GeneratorExit:
            if not sys.is_finalizing():  # nobody is left to learn
                self._take_back(done=False)
            raise
        self._take_back()

    def _threaded(self, state: dict[str, Any] | None) -> Iterator[Data]:
        self.sampler.defer(True)
        pool = ThreadPoolExecutor(1, thread_name_prefix="adahop-prefetch")
        waiting = self._waiting = [
            _done(self._finish(part, Hops.of(hops))) for part, hops in (state or {}).get("ahead", ())
        ]
        for blocks, energy in (state or {}).get("pending", ()):
            self.sampler.update(blocks, energy)
        try:
            for part in self._parts()[self._taken + len(waiting) :]:
                waiting.append(pool.submit(self._learn_then_draw, self.sampler.release(), part))
                if len(waiting) > self.prefetch:
                    yield from self._pass(waiting.pop(0).result()[2])
            while waiting:
                yield from self._pass(waiting.pop(0).result()[2])
            self._taken = -1
        finally:
            pool.shutdown(wait=True)  # what was handed out runs: it carries updates, and the steps stay countable
            self.sampler.defer(False)

    def _learn_then_draw(self, learn: Callable[[], None], part: Tensor) -> tuple[Tensor, Hops, Data]:
        learn()
        return self._draw(part)

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _draw(self, part: Tensor) -> tuple[Tensor, Hops, Data]:
        hops = draw_hops(self.sampler, self.nodes[part], self.disjoint, self.subgraph, self._place)
        return self._finish(part, hops)

    def _finish(self, part: Tensor, hops: Hops) -> tuple[Tensor, Hops, Data]:
        row, col = hops.edge_index
        batch = filter_data(self.data, hops.n_id, row, col, hops.e_id)
        for name, ids in (("n_id", hops.n_id), ("e_id", hops.e_id)):
            if name not in batch:  # as in PyG, the data's own ids stay
                batch[name] = ids
        batch.input_id, batch.batch_size = part, part.numel()
        batch.num_nodes = hops.n_id.numel()
        batch.num_sampled_nodes, batch.num_sampled_edges = hops.num_nodes, hops.num_edges
        if hops.tree is not None:
            batch.batch = hops.tree
        weigh(batch, hops, self.sampler.graph, self._degree)
        return part, hops, batch if self.transform is None else self.transform(batch)

    # --- a checkpoint ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything the remaining batches depend on; taken within an epoch, the next iteration goes on from there."""
        self._take_back()
        ahead = [f.result() for f in self._waiting] if self._taken > 0 else []
        return {
            "sampler": copy.deepcopy(self.sampler.state_dict()),
            "snapshots": self._found if self._snapshots is None else self._snapshots.state(),
            "epoch": self._epoch,
            "taken": self._taken if 0 < self._taken < len(self) else 0,  # after the last batch the next epoch begins
            "ahead": [(part, hops.plain()) for part, hops, _ in ahead],
            "pending": [([tuple(b) for b in blocks], energy) for blocks, energy in self.sampler._pending or ()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a `state_dict` of a loader over the same data with the same options."""
        if not isinstance(state, dict) or not state.keys() >= STATE:
            raise KindError(f"`state` must be the `state_dict` of such a loader, got {type(state).__name__}")
        self.sampler.load_state_dict(state["sampler"])
        self._found = state["snapshots"]
        self._remember(None if self._snapshots is None else self._snapshots.model)
        self._epoch, self._taken, self._waiting = state["epoch"], state["taken"], []
        pending = [([Block(*b) for b in blocks], energy) for blocks, energy in state["pending"]]
        self._resumed = {**state, "pending": pending} if state["taken"] else None
        for blocks, energy in () if self._resumed else pending:
            self.sampler.update(blocks, energy)


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def _inputs(input_nodes: Any, n: int) -> Tensor:
    if isinstance(input_nodes, str) or (isinstance(input_nodes, tuple) and isinstance(input_nodes[0], str)):
        raise InputError("`input_nodes` must be ids or a mask, got a node type: HeteroData is not supported yet")
    return torch.arange(n) if input_nodes is None else node_ids(input_nodes, n, "input_nodes").cpu()


def _subgraph(kind: Any, disjoint: bool) -> str:
    kind = one_of(str(getattr(kind, "value", kind)), SUBGRAPHS, "subgraph_type")
    if kind == "induced" and disjoint:
        raise InputError("`disjoint` must be False for induced subgraphs, got True")
    return kind
