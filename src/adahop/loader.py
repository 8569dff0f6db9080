"""Loader: seeds -> blocks -> PyG Data, with a prefetch thread that keeps the feedback's delay exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from adahop.block import Block, Ungathered
from adahop.checks import InputError, KindError, count, flag, node_ids
from adahop.ops import get_threads
from adahop.samplers import Sampler
from adahop.samplers.ahead import Ahead


class Loader:
    """Batches for one epoch an iteration: `x` of all nodes, `y` of the seeds, `blocks`, `n_id` (seeds first), `e_id`.

    prefetch=0 is exact: each batch is drawn after the update of the one before. prefetch=d draws in a thread, d batches
    ahead; updates are then applied exactly d batches late, so runs with equal seeds stay equal. Who does not learn
    draws in as many threads as there are, up to d, a batch each.
    lean=True leaves out what only PyG's layers need: the joined edges, and a copy of the rows of x, which adahop's own
    models read where they lie. pin=True puts batches into pinned memory where there is a GPU to send them to.

    >>> import adahop
    >>> data = adahop.load("digits"); sampler = adahop.make("bs", data.graph, [5, 5])
    >>> batch = next(iter(Loader(data, sampler, data.train_mask, batch_size=32)))
    >>> bool((batch.n_id[:32] == batch.blocks[-1].n_id[:32]).all())
    True
    """

    def __init__(
        self,
        data: Any,
        sampler: Sampler,
        nodes: Any = None,
        batch_size: int = 256,
        shuffle: bool = True,
        prefetch: int = 0,
        lean: bool = False,
        pin: bool = False,
    ):
        if not isinstance(sampler, Sampler):
            raise KindError(f"`sampler` must be a sampler of adahop, got {type(sampler).__name__}")
        n = sampler.graph.num_nodes
        self.x, self.y = getattr(data, "x", None), getattr(data, "y", None)
        for name, t in (("x", self.x), ("y", self.y)):
            if t is not None and len(t) != n:
                raise InputError(f"`data.{name}` must have a row for each of the {n} nodes, got {len(t)}")
        self.sampler, self.shuffle, self.lean = sampler, flag(shuffle, "shuffle"), flag(lean, "lean")
        self.pin = flag(pin, "pin") and torch.cuda.is_available() and sampler.graph.device.type == "cpu"
        self.share: Callable[[Iterator[Tensor]], Iterator[Tensor]] = lambda seeds: seeds  # a process's part of them
        self.nodes = node_ids(torch.arange(n) if nodes is None else nodes, n, "nodes")
        self.batch_size, self.prefetch = count(batch_size, 1, "batch_size"), count(prefetch, 0, "prefetch")
        if any(True for _ in sampler.parameters()):
            self.prefetch = 0  # a sampler trained by the optimizer must not be read while it is written
        self._taken, self._waiting = 0, []  # type: int, list[Future[Data]]
        self._resumed: dict[str, Any] | None = None

    def __len__(self) -> int:
        return self.sampler.batches(self.nodes, self.batch_size)

    def __iter__(self) -> Iterator[Data]:
        state, self._resumed = self._resumed or {"taken": 0, "ahead": [], "pending": []}, None
        seeds = self._seeds(state)
        self._taken, self._waiting = state["taken"], [_done(self.batch(blocks)) for blocks in state["ahead"]]
        try:
            if self.prefetch == 0:
                for part in seeds:
                    yield self._pass(self.batch(self.sampler.sample(part)))
            else:
                yield from self._threaded(seeds, state["pending"])
        finally:
            self._taken, self._waiting = 0, []

    def seeds(self) -> Iterator[Tensor]:
        """The epoch's seeds alone, for steps that draw by themselves; goes on from a state as batches do."""
        state, self._resumed = self._resumed or {"taken": 0, "ahead": []}, None
        self._taken = state["taken"]
        try:
            for part in self._seeds(state):
                self._taken += 1
                yield part
        finally:
            self._taken = 0

    def _seeds(self, state: dict[str, Any]) -> Iterator[Tensor]:
        """The epoch's seeds, from the first that was not drawn yet."""
        past = state["taken"] + len(state["ahead"])
        if past:
            self.sampler.epochs -= 1  # the same epoch again
        seeds = self.share(self.sampler.epoch(self.nodes, self.batch_size, self.shuffle))
        for _ in range(past):
            next(seeds, None)
        return seeds

    def _threaded(self, seeds: Iterator[Tensor], pending: list[Any]) -> Iterator[Data]:
        workers = min(self.prefetch, get_threads())
        if self.sampler.apart and workers > 1:
            yield from self._side_by_side(seeds, workers)
            return
        self.sampler.defer(True)
        for blocks, energy in pending:
            self.sampler.update(blocks, energy)
        pool = ThreadPoolExecutor(1, thread_name_prefix="adahop-prefetch")
        try:
            yield from self._ahead(seeds, pool)
        finally:
            pool.shutdown(wait=True)  # what was handed out runs: it carries updates, and the steps stay countable
            self.sampler.defer(False)

    def _side_by_side(self, seeds: Iterator[Tensor], workers: int) -> Iterator[Data]:
        """Nobody learns, so that threads can draw a batch each."""
        ahead = Ahead(self.sampler, workers, self.batch)
        try:
            yield from self._hand_out(seeds, ahead.submit)
        finally:
            ahead.shutdown()

    def _ahead(self, seeds: Iterator[Tensor], pool: ThreadPoolExecutor) -> Iterator[Data]:
        return self._hand_out(seeds, lambda part: pool.submit(self._learn_then_draw, self.sampler.release(), part))

    def _hand_out(self, seeds: Iterator[Tensor], submit: Callable[[Tensor], Future[Data]]) -> Iterator[Data]:
        waiting = self._waiting
        for part in seeds:
            waiting.append(submit(part))
            if len(waiting) > self.prefetch:
                yield self._pass(waiting.pop(0).result())
        while waiting:
            yield self._pass(waiting.pop(0).result())

    def _pass(self, batch: Data) -> Data:
        self._taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands: batches taken, drawn ahead, updates that wait. The sampler's own state is apart.

        What is being drawn ahead is waited for, so take the sampler's state after this one.
        """
        ahead = [[tuple(b) for b in f.result().blocks] for f in self._waiting] if self._taken else []
        pending = [([tuple(b) for b in blocks], energy) for blocks, energy in self.sampler._pending or ()]
        return {"taken": self._taken, "ahead": ahead, "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from there; load the sampler's state as well."""
        if not isinstance(state, dict) or state.keys() != {"taken", "ahead", "pending"}:
            raise KindError(f"`state` must be the `state_dict` of a Loader, got {type(state).__name__}")
        device = self.sampler.graph.device
        ahead = [_blocks(blocks, device) for blocks in state["ahead"]]
        pending = [(_blocks(blocks, device), [e.to(device) for e in energy]) for blocks, energy in state["pending"]]
        self._resumed = {"taken": state["taken"], "ahead": ahead, "pending": pending} if state["taken"] else None

    def _learn_then_draw(self, learn: Any, seeds: Tensor) -> Data:
        learn()
        return self.batch(self.sampler.sample(seeds))

    def batch(self, blocks: list[Block]) -> Data:
        """The PyG Data of some blocks. Local ids agree in all of them, so their edges join into one `edge_index`."""
        n_id, last = blocks[0].n_id, blocks[-1]
        targets = last.n_id[: last.num_dst]
        parts: dict[str, Any] = {"n_id": n_id, "blocks": blocks, "batch_size": last.num_dst, "num_nodes": n_id.numel()}
        if not self.lean:
            parts["e_id"] = torch.cat([b.e_id for b in reversed(blocks)])
            parts["edge_index"] = torch.cat([b.edge_index for b in reversed(blocks)], dim=1)
        if self.x is not None:
            parts["x"] = Ungathered(self.x, n_id) if self.lean and torch.is_tensor(self.x) else _rows(self.x, n_id)
        if self.y is not None:
            parts["y"] = _rows(self.y, targets)
        weight = self.sampler.loss_weight(blocks)
        if weight is not None:
            parts["loss_weight"] = weight
        return Data(**parts).pin_memory() if self.pin else Data(**parts)


def _rows(table: Any, ids: Tensor) -> Tensor:
    """Some rows, in parallel where it is a tensor; what others keep has an `index_select` of its own."""
    return table.index_select(0, ids) if hasattr(table, "index_select") else table[ids]


def _blocks(plain: list[Any], device: torch.device) -> list[Block]:
    return [Block._make(t.to(device) if torch.is_tensor(t) else t for t in block) for block in plain]


def _done(value: Data) -> Future[Data]:
    future: Future[Data] = Future()
    future.set_result(value)
    return future
