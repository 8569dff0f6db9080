"""Loaders: seeds -> sample -> view, with prefetch and a state to resume from."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch_geometric.data import Data

from adahop import ops
from adahop.block import Block, Ungathered
from adahop.checks import InputError, KindError, count, flag, node_ids
from adahop.samplers import Sampler
from adahop.samplers.parallel import ParallelDraws

Own = TypeVar("Own", bound=Sampler)
Drawn = TypeVar("Drawn")  # what is sampled for the seeds of a batch: blocks, or what a loader of PyG's kind makes
STATE = ("taken", "ahead", "pending")


class Made(NamedTuple, Generic[Drawn]):
    """A batch, its seeds and what was drawn for them."""

    seeds: Tensor
    drawn: Drawn
    batch: Data


class Epoch(Generic[Drawn]):
    """One pass over the seeds: its number, how many batches were taken, and those that were drawn ahead."""

    def __init__(self, number: int, taken: int = 0):
        self.number, self.taken, self.waiting = number, taken, []  # type: int, int, list[Future[Made[Drawn]]]


class Batches(Generic[Own, Drawn]):
    """The base of all loaders. A subclass defines an epoch's seeds, what is drawn for them, and the batch.

    `seeds_of(number)` are the seeds of an epoch, one tensor per batch; `sample(sampler, seeds)` draws for them; `view`
    makes the batch. `sample` and `view` may run in another thread. `opened`, `give` and `back` run in the caller's
    thread, when an epoch begins and around each batch.

    prefetch=0: each batch is drawn after the update of the one before. prefetch=d draws d batches ahead in a thread;
    updates are then applied exactly d batches late, whatever the timing, so that runs with equal seeds stay equal. A
    sampler that does not learn draws in up to d threads, one batch each; its batches are the same as without prefetch.
    """

    def __init__(self, sampler: Own, batch_size: int, prefetch: int, pin: bool):
        self.sampler = sampler
        self.batch_size, self.prefetch = count(batch_size, 1, "batch_size"), count(prefetch, 0, "prefetch")
        if any(True for _ in sampler.parameters()):
            self.prefetch = 0  # parameters must not be read while the optimizer writes them
        self.pin = pin
        self._epoch: Epoch[Drawn] | None = None  # the current one; None after its end
        self._resumed: dict[str, Any] | None = None
        self._deferring: weakref.WeakSet[Epoch[Drawn]] = weakref.WeakSet()  # epochs that draw ahead of updates

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with an epoch of its own."""
        return {name: value for name, value in vars(self).items() if name not in ("_epoch", "_deferring")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._epoch, self._deferring = None, weakref.WeakSet()

    # --- the steps of a kind of loader --------------------------------------------------------------------------------

    def seeds_of(self, number: int) -> Iterator[Tensor]:
        """The seeds of an epoch by its number, one tensor per batch."""
        raise NotImplementedError

    def sample(self, sampler: Own, seeds: Tensor) -> Drawn:
        """What this loader's sampler, or a twin of it, draws for a batch's seeds."""
        raise NotImplementedError

    def view(self, seeds: Tensor, drawn: Drawn) -> Data:
        """The batch that a user gets."""
        raise NotImplementedError

    def opened(self) -> None:
        """A new epoch begins; not called for one that is resumed."""

    def give(self, made: Made[Drawn]) -> Data:
        """The last step, just before a batch is handed out."""
        return made.batch

    def back(self, done: bool) -> None:
        """The caller asks for the next batch (`done`), or leaves the loop."""

    def pack(self, made: Made[Drawn]) -> Any:
        """Plain tuples and tensors, for a checkpoint."""
        raise NotImplementedError

    def unpack(self, plain: Any) -> Made[Drawn]:
        raise NotImplementedError

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Data]:
        epoch, state = self._begin()
        seeds = self._seeds(epoch, len(state.get("ahead", ())))
        epoch.waiting = [_done(self.unpack(plain)) for plain in state.get("ahead", ())]
        if self.prefetch == 0:
            for part in seeds:
                yield from self._pass(epoch, self.make(self.sampler, part))
        else:
            yield from self._threaded(epoch, seeds, state.get("pending", ()))
        self._end(epoch)

    def _begin(self) -> tuple[Epoch[Drawn], dict[str, Any]]:
        state, self._resumed = self._resumed or {}, None
        number = int(self.sampler.epochs)
        epoch: Epoch[Drawn] = Epoch(state.get("epoch", number - 1) if state else number, state.get("taken", 0))
        self._epoch = epoch
        if not state:
            self.opened()
        return epoch, state

    def _end(self, epoch: Epoch[Drawn]) -> None:
        if self._epoch is epoch:
            self._epoch = None

    def _seeds(self, epoch: Epoch[Drawn], ahead: int = 0) -> Iterator[Tensor]:
        """The epoch's seeds, from the first batch that was neither taken nor drawn ahead."""
        seeds = self.seeds_of(epoch.number)
        for _ in range(epoch.taken + ahead):
            next(seeds, None)
        return seeds

    def make(self, sampler: Own, seeds: Tensor) -> Made[Drawn]:
        return self.made(seeds, self.sample(sampler, seeds))

    def made(self, seeds: Tensor, drawn: Drawn) -> Made[Drawn]:
        batch = self.view(seeds, drawn)
        return Made(seeds, drawn, batch.apply(ops.pinned) if self.pin else batch)

    def _pass(self, epoch: Epoch[Drawn], made: Made[Drawn]) -> Iterator[Data]:
        epoch.taken += 1
        try:
            yield self.give(made)
        except GeneratorExit:
            if not sys.is_finalizing():  # at exit, nothing needs to learn any more
                self.back(done=False)
            raise
        self.back(done=True)

    def _threaded(self, epoch: Epoch[Drawn], seeds: Iterator[Tensor], pending: Any) -> Iterator[Data]:
        workers = min(self.prefetch, ops.get_threads(self.sampler.graph.indptr))
        if self.sampler.parallel and workers > 1:
            draws = ParallelDraws(self.sampler, workers, self.make)
            try:
                yield from self._in_turn(epoch, seeds, draws.submit)
            finally:
                draws.shutdown()
            return
        self.sampler.defer(True)
        self._deferring.add(epoch)
        for blocks, energy in pending:
            self.sampler.update(blocks, energy)
        pool = ops.helper(self.sampler.graph.indptr)
        try:
            yield from self._in_turn(
                epoch, seeds, lambda part: pool.submit(self._learn_then_make, self.sampler.release(), part)
            )
        finally:
            pool.shutdown(wait=True)  # submitted work still runs: it applies updates and counts steps
            self._deferring.discard(epoch)
            if not self._deferring:
                self.sampler.defer(False)

    def _learn_then_make(self, learn: Callable[[], None], seeds: Tensor) -> Made[Drawn]:
        learn()
        return self.make(self.sampler, seeds)

    def _in_turn(
        self, epoch: Epoch[Drawn], seeds: Iterator[Tensor], submit: Callable[[Tensor], Future[Made[Drawn]]]
    ) -> Iterator[Data]:
        waiting = epoch.waiting
        for part in seeds:
            waiting.append(submit(part))
            if len(waiting) > self.prefetch:
                yield from self._pass(epoch, waiting.pop(0).result())
        while waiting:
            yield from self._pass(epoch, waiting.pop(0).result())

    # --- its state ----------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """The position in the epoch: batches taken, batches drawn ahead, updates not applied yet.

        The sampler's state is not part of it. Take that one afterwards: this call waits for what is being drawn.
        """
        epoch = self._epoch
        taken = 0 if epoch is None else epoch.taken
        ahead = [self.pack(f.result()) for f in epoch.waiting] if epoch is not None and taken else []
        pending = [([tuple(b) for b in blocks], energy) for blocks, energy in self.sampler._pending or ()]
        return {"taken": taken, "ahead": ahead, "pending": pending, "batch_size": self.batch_size}

    def check(self, state: dict[str, Any]) -> None:
        """Refuse another batch size within an epoch: seeds would be left out or repeated."""
        size = state.get("batch_size", self.batch_size)  # states of version 0.1 have none
        if state["taken"] and size != self.batch_size:
            raise InputError(
                f"`batch_size` must be {size} to go on within the epoch of this state, got {self.batch_size}"
            )

    def go_on(self, state: dict[str, Any]) -> None:
        """The next iteration continues from a `position`; load the sampler's state first."""
        device = self.sampler.graph.device
        pending = [(as_blocks(blocks, device), [e.to(device) for e in energy]) for blocks, energy in state["pending"]]
        self._epoch, self._resumed = None, {**state, "pending": pending} if state["taken"] else None
        for blocks, energy in () if self._resumed else pending:
            self.sampler.update(blocks, energy)


class RowTable(Protocol):
    """Rows to look up: a tensor, or an object that holds them elsewhere."""

    def __len__(self) -> int: ...
    def __getitem__(self, ids: Tensor) -> Tensor: ...


class Loader(Batches[Sampler, list[Block]]):
    """Batches for one epoch per iteration: `x` of all nodes, `y` of the seeds, `blocks`, `n_id` (seeds first), `e_id`.

    prefetch=0: each batch is drawn after the update of the one before. prefetch=d draws in a thread, d batches ahead;
    updates are then applied exactly d batches late, so runs with equal seeds stay equal. A sampler that does not learn
    draws in as many threads as there are, up to d, one batch each.
    lean=True leaves out what only PyG's layers need: the joined edges, and a copy of the rows of x, which adahop's own
    models read in place. pin=True puts batches into pinned memory where there is a GPU to send them to.

    >>> import adahop
    >>> data = adahop.load("digits"); sampler = adahop.make("bs", data.graph, [5, 5])
    >>> batch = next(iter(Loader(data, sampler, data.train_mask, batch_size=32)))
    >>> bool((batch.n_id[:32] == batch.blocks[-1].n_id[:32]).all())
    True
    """

    def __init__(
        self,
        data: object,
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
        self.x: RowTable | None = getattr(data, "x", None)
        self.y: RowTable | None = getattr(data, "y", None)
        for name, t in (("x", self.x), ("y", self.y)):
            if t is not None and len(t) != n:
                raise InputError(f"`data.{name}` must have a row for each of the {n} nodes, got {len(t)}")
        self.on_disk = torch.is_tensor(self.x) and ops.in_file(self.x)
        if self.on_disk:
            ops.no_more_than_asked(cast(Tensor, self.x))
        self.shuffle, self.lean = flag(shuffle, "shuffle"), flag(lean, "lean")
        self.split: Callable[[Iterator[Tensor]], Iterator[Tensor]] = lambda seeds: seeds  # this rank's part of them
        self.nodes = node_ids(torch.arange(n) if nodes is None else nodes, n, "nodes")
        super().__init__(sampler, batch_size, prefetch, flag(pin, "pin"))

    def __len__(self) -> int:
        return self.sampler.batches(self.nodes, self.batch_size)

    def seeds(self) -> Iterator[Tensor]:
        """The epoch's seeds alone, for steps that draw by themselves; resumes from a state as batches do."""
        epoch, _ = self._begin()
        for part in self._seeds(epoch):
            epoch.taken += 1
            yield part
        self._end(epoch)

    def seeds_of(self, number: int) -> Iterator[Tensor]:
        self.sampler.epochs.fill_(number)
        return self.split(self.sampler.epoch(self.nodes, self.batch_size, self.shuffle))

    def sample(self, sampler: Sampler, seeds: Tensor) -> list[Block]:
        return sampler.sample(seeds)

    def view(self, seeds: Tensor, drawn: list[Block]) -> Data:
        return self.batch(drawn)

    def pack(self, made: Made[list[Block]]) -> Any:
        return [tuple(b) for b in made.drawn]

    def unpack(self, plain: Any) -> Made[list[Block]]:
        blocks = as_blocks(plain, self.sampler.graph.device)
        return self.made(blocks[-1].n_id[: blocks[-1].num_dst], blocks)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, see `position`; the sampler's state is not part of it and is taken afterwards."""
        return self.position()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration continues from there; load the sampler's state as well."""
        if not isinstance(state, dict) or not state.keys() >= set(STATE):
            raise KindError(f"`state` must be the `state_dict` of a Loader, got {type(state).__name__}")
        self.check(state)
        self.go_on(state)

    def batch(self, blocks: list[Block]) -> Data:
        """The PyG Data of some blocks. They share their local ids, so one `edge_index` holds the edges of all."""
        n_id, last = blocks[0].n_id, blocks[-1]
        targets = last.n_id[: last.num_dst]
        parts: dict[str, Any] = {"n_id": n_id, "blocks": blocks, "batch_size": last.num_dst, "num_nodes": n_id.numel()}
        if not self.lean:
            parts["e_id"] = torch.cat([b.e_id for b in reversed(blocks)])
            parts["edge_index"] = torch.cat([b.edge_index for b in reversed(blocks)], dim=1)
        if self.x is not None:
            if self.on_disk:
                ops.ask_for(cast(Tensor, self.x), n_id, n_id + 1)
            parts["x"] = Ungathered(self.x, n_id) if self.lean and torch.is_tensor(self.x) else _rows(self.x, n_id)
        if self.y is not None:
            parts["y"] = _rows(self.y, targets)
        weight = self.sampler.loss_weight(blocks)
        if weight is not None:
            parts["loss_weight"] = weight
        return Data(**parts)


def _rows(table: RowTable, ids: Tensor) -> Tensor:
    """Some rows, by `index_select` where the table has one: on tensors it runs in parallel."""
    select: Callable[[int, Tensor], Tensor] | None = getattr(table, "index_select", None)
    return table[ids] if select is None else select(0, ids)


def as_blocks(plain: list[Any], device: torch.device) -> list[Block]:
    """Blocks that a checkpoint holds as tuples."""
    return [cast(Any, Block)(*block) for block in moved(plain, device)]  # states of version 0.1 have fewer fields


def moved(plain: Any, device: torch.device) -> Any:
    """Nested tuples and lists with their tensors on a device."""
    if isinstance(plain, tuple | list):
        return type(plain)(moved(t, device) for t in plain)
    return plain.to(device) if torch.is_tensor(plain) else plain


def _done(value: Made[Drawn]) -> Future[Made[Drawn]]:
    future: Future[Made[Drawn]] = Future()
    future.set_result(value)
    return future
