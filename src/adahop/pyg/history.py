"""Histories: what each layer was last sent by every node, kept up without a pass over the graph.

A layer's sum on a batch is f(x) + trust (F(x') - f(x')): f over the drawn edges, F over all, x' the rows kept. Both are
formed now, from the same rows and the same parameters, so that whatever x' holds the mean is right. F reads the rows of
all neighbours of the targets that count, those whose own neighbours were drawn; that costs their degrees. Rows are
renewed by the batches that pass, and the oldest by batches of nodes without edges, whose sums are all F.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader.utils import filter_data

from adahop.checks import tell
from adahop.pyg import batches
from adahop.pyg.arguments import CLOSE, close, first_of_each, lifted, pair, sources_of
from adahop.pyg.batches import DrawnBatch, Whole
from adahop.pyg.hops import Hops, weigh
from adahop.pyg.inference import arguments_of
from adahop.pyg.neighbours import AllNeighbours, ForwardHistory, PassHistory, Unknown
from adahop.pyg.recalled import Recalled
from adahop.pyg.root import Root
from adahop.pyg.rows import NodeRows
from adahop.pyg.wrap import Call, Propagate, backward, bare, layers_of, scale_of
from adahop.storage import MEMORY, Storage

log = logging.getLogger("adahop")
MIXED = 0.3  # of the way that a row moves to one that dropout has changed
OF_LATE = 0.9  # the weight of what earlier batches said of a row's worth


class LayerHistories:
    """Those of a model's layers, in place of `Snapshots`."""

    waiting = False

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        noise: float = 0.0,
        dtype: torch.dtype = torch.float32,
        storage: Storage = MEMORY,
        refresh: int = 0,
        disjoint: bool = False,
        transform: Callable[[Data], Data] | None = None,
        device: torch.device | str = "cpu",
    ):
        """`device` is where batches are drawn: rows lie there too."""
        self.device = torch.device(device)
        self.model, self.data, self.noise, self.disjoint, self.transform = model, data, noise, disjoint, transform
        self.dtype, self.storage, self.refresh = dtype, storage, refresh
        self.nodes = int(data.num_nodes or 0)
        self.layers = {name: scale_of(m) for name, m in layers_of(model).items()}
        self.kept: dict[Propagate, list[ForwardHistory]] = {}
        self.whole: Whole | None = None
        self.renewing = False
        self.trying: dict[tuple[int, str], Tensor] | None = None  # while it is tried whether rows are random
        self.steps, self.cursor, self.round = 0, 0, 0
        self.stamp = torch.zeros(self.nodes, dtype=torch.int32, device=device)
        self.tried = False
        self.spent = {"read": 0.0, "renew": 0.0}
        self._first: dict[Any, list[Tensor | None]] | None = (
            None  # the calls of the batch on which layers are seen first
        )
        self._tags: dict[Any, int] = {}  # of that batch: how many sums lie before a result, by its gradient
        self._serial = 0
        self._pending: list[Callable[[], Any]] = []
        self._said: set[str] = set()
        self._counts: dict[Propagate, int] = {}
        for layer in self.layers.values():
            assert layer is not None
            layer._memory = weakref.ref(self)

    def close(self) -> None:
        for layer in self.layers.values():
            if layer is not None and layer.memory is self:
                layer._memory = None
        self.kept.clear()
        self._pending.clear()

    def begin(self) -> None:
        """A forward of the model begins: what the one before has sent is written now, when nobody computes with it."""
        self.settle()
        self._counts.clear()

    def settle(self) -> None:
        for write in self._pending:
            write()
        self._pending.clear()

    def renew(self) -> None:
        """An epoch begins: what the last one cost is written to the log."""
        if self.steps:
            log.info("%s", self)

    def before_batch(self, whole: Whole) -> None:
        """A batch is about to be handed out: the oldest rows are renewed."""
        self.whole = whole
        self.settle()
        if not self.kept:
            return
        if self._first is not None and self.steps == 0:
            self._first, self._tags = None, {}
            for past in (p for fs in self.kept.values() for f in fs for p in f.passes):
                past.spare = {}
                past.sums, past.filled = (None, None) if past.own is None else (past.sums, past.filled)
            log.info("%s", self)
        self.steps += 1
        began = time.perf_counter()
        if self.refresh:
            self._renew_oldest()
        self.spent["renew"] += time.perf_counter() - began

    @property
    def bytes(self) -> int:
        return sum(t.bytes for fs in self.kept.values() for f in fs for p in f.every() for t in p.tables())

    def cost(self) -> dict[str, float]:
        """Bytes, and milliseconds per step for reading all neighbours' rows and for renewing the oldest."""
        steps = max(self.steps, 1)
        return {"bytes": float(self.bytes), **{f"{k}_ms": 1e3 * v / steps for k, v in self.spent.items()}}

    def __str__(self) -> str:
        kind, cost = str(self.dtype).removeprefix("torch."), self.cost()
        where = "memory" if self.storage is MEMORY else "files"
        without = [name for name, layer in self.layers.items() if any(f.why for f in self.kept.get(layer, []))]  # type: ignore[arg-type]
        return (
            f"history, without a pass over the graph: {self.bytes / 2**20:.1f} MiB of {kind} rows in {where}"
            + (f", none for layers {', '.join(without)}" if without else "")
            + f"; per step {cost['read_ms']:.1f} ms to read all neighbours' rows"
            + (f", {cost['renew_ms']:.1f} ms to renew the {self.refresh} oldest" if self.refresh else "")
        )

    # --- called by `Propagate` and `Recalled` -------------------------------------------------------------------------

    def listen(self, layer: Propagate, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A forward in evaluation on something that is no batch: where it is the whole graph, all rows are taken."""
        at = self._counts.get(layer, 0)
        self._counts[layer] = at + 1
        forwards = self.kept.get(layer, [])
        tensors = [v for a in (*args, *kwargs.values()) for v in pair(a) if isinstance(v, Tensor)]
        size = (2, self.data.edge_index.shape[1])
        if at >= len(forwards) or forwards[at].why or not any(tuple(t.shape) == size for t in tensors):
            return layer._plain(*args, **kwargs)
        heard: Any = _Heard(layer, forwards[at], self.nodes)
        with layer.within(heard):
            out = layer._forward(*args, **kwargs)
        self.stamp.fill_(self.steps)
        return out

    def of(self, layer: Propagate, call: Call, args: tuple, kwargs: dict[str, Any]) -> Recalled | None:
        if call.batch.num_edges is None or call.scale.numel() != call.batch.e_id.numel():
            return None
        forward = self._forward_of(layer, call, args, kwargs)
        if forward is None:
            return None
        full = missing = None
        if not self.noting(call) and not forward.why and forward.passes:
            began = time.perf_counter()
            try:
                full, missing = self._all_neighbours(call, forward, args, kwargs)
            except Unknown as e:
                self._do_without(layer, forward, str(e))
            self.spent["read"] += time.perf_counter() - began
        return Recalled(self, forward, full, missing)

    def _forward_of(self, layer: Propagate, call: Call, args: tuple, kwargs: dict[str, Any]) -> ForwardHistory | None:
        n = call.number(args, kwargs)
        forwards = self.kept.setdefault(layer, [])
        if self._first is None and not any(self.kept.values()):
            self._first = call.batch.calls
        if self.noting(call) and n == len(forwards) and not backward():
            forwards.append(ForwardHistory())
            self._ask(layer, call, forwards[-1])
        return forwards[n % len(forwards)] if forwards else None

    def _ask(self, layer: Propagate, call: Call, forward: ForwardHistory) -> None:
        if call.reading.left_alone:
            forward.why = "it stays as PyG has it"  # which is said elsewhere
        elif call.reading.estimated:
            self._do_without(layer, forward, "its degrees are estimated from the drawn edges")
        elif layer.shrinks:
            self._do_without(layer, forward, "its sums are kept at the size of the drawn neighbours")

    def _all_neighbours(
        self, call: Call, forward: ForwardHistory, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[AllNeighbours | None, Tensor | None]:
        targets = max(self.counting(call, p.level)[0] for p in forward.passes)
        nodes, missing = call.batch.n_id[:targets], None
        if len(forward.passes) == 1 and (past := forward.passes[0]).own is not None:
            assert past.filled is not None
            missing = (~past.filled[nodes]).nonzero().flatten()
            nodes = nodes[missing]
        elif not self.renewing and not any(p.trust for p in forward.passes):
            return None, None
        if not nodes.numel():
            return None, None
        full = AllNeighbours(call, nodes, forward)
        full.run(args, kwargs, call)
        if not forward.tried:  # whether edge values are the graph's alone: with other rows of nodes they stay
            alike, full.sent = full.sent, []
            full.run(args, kwargs, call, random=True)
            for a, b in zip(alike, full.sent, strict=True):
                if any(not torch.allclose(a.edge[k], b.edge[k], rtol=CLOSE, atol=CLOSE) for k in a.edge):
                    raise Unknown("it makes edge values from nodes before it passes messages")
            forward.tried = True
        return full, missing

    def _do_without(self, layer: Propagate, forward: ForwardHistory, why: str) -> None:
        forward.why = why
        name = next((n for n, one in self.layers.items() if one is layer), "?")
        self.say(f"layer '{name}' ({type(layer.conv).__name__}) goes without a history: {why}")

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            tell(text)

    def noting(self, call: Call) -> bool:
        """Whether this is the batch on which the layers are seen for the first time."""
        return self._first is not None and call.batch.calls is self._first

    def counting(self, call: Call, level: int) -> tuple[int, int]:
        """How many of the batch's first nodes have sums, and rows, that the seeds' results depend on."""
        many = call.batch.num_nodes or [0]
        if self.renewing:
            return many[0], many[0]
        edges = call.batch.num_edges or []
        hops = next((h for h, m in enumerate(edges) if m == 0), len(edges))  # a hop of none estimates nothing
        return sum(many[: max(hops - level, 0)]), sum(many[: max(hops - level + 1, 0)])

    def note(self, call: Call, forward: ForwardHistory, kwargs: dict[str, Any], out: Tensor) -> None:
        """The first sight of a `propagate`: what nodes send there, and how many sums lie before it."""
        node = lifted(call.layer.conv)
        level = self._level(kwargs)
        if isinstance(out, Tensor) and out.grad_fn is not None:
            self._tags[out.grad_fn] = level + 1
        self._serial += 1
        if forward.why:
            return
        past = self.new(call, kwargs, node)
        past.level, past.shape = level, tuple(out.shape[1:]) if isinstance(out, Tensor) else ()
        for update in forward.updates[len(forward.passes) :]:
            update.level = level
        own = self._own(call, kwargs, node) if not forward.passes else None
        for other in forward.passes:  # of several, the first is not known either: they are formed together
            other.own, other.rows = None, {**other.rows, **other.spare}
        if own is not None and call.reading.linear and not call.reading.parametric:
            past.own, past.rows, past.spare = own, {}, past.rows
            past.sums = NodeRows(self.nodes, past.shape, storage=self.storage, device=self.device)
            past.filled = torch.zeros(self.nodes, dtype=torch.bool, device=self.device)
        dims = {v.dim() for k in node for v in pair(kwargs.get(k)) if isinstance(v, Tensor)}
        if call.layer.conv.node_dim % max(dims, default=1) != 0:
            self._do_without(call.layer, forward, "its nodes are not the first dimension of what it sums")
        forward.passes.append(past)

    def new(self, call: Call, kwargs: dict[str, Any], node: dict[str, set[str]]) -> PassHistory:
        """Room for the sources' rows of some arguments."""
        past = PassHistory()
        for name, sides in node.items():
            now = sources_of(kwargs.get(name))
            if "j" in sides and now is not None and now.is_floating_point():
                past.rows[name] = NodeRows(self.nodes, tuple(now.shape[1:]), self.dtype, self.storage, self.device)
        return past

    def _own(self, call: Call, kwargs: dict[str, Any], node: dict[str, set[str]]) -> str | None:
        """The data's attribute that all nodes' arguments are, as it is in the data."""
        names = set()
        for name in node:
            value = sources_of(kwargs.get(name))
            if value is None or value.requires_grad or node[name] != {"j"}:
                return None
            names.add(batches.node_attribute(call.batch, value))
        found = names.pop() if len(names) == 1 else None
        if found is None or not isinstance(self.data[found], Tensor):
            return None
        table = self.data[found]
        same = torch.equal(table[call.batch.n_id[:64].to(table.device)], value[:64].to(table.device))
        return found if same else None  # a transform may have changed it

    def _level(self, kwargs: dict[str, Any]) -> int:
        """How many sums lie between the features and these arguments: found from the gradient's graph."""
        start = [v.grad_fn for a in kwargs.values() for v in pair(a) if isinstance(v, Tensor)]
        if len(self._tags) < self._serial or not torch.is_grad_enabled():
            return self._serial  # one after the other, where results have no gradient
        level, seen, stack = 0, set(), [f for f in start if f is not None]
        while stack:
            f = stack.pop()
            if f in seen:
                continue
            seen.add(f)
            if f in self._tags:
                level = max(level, self._tags[f])
                continue
            stack += [g for g, _ in f.next_functions if g is not None]
        return level

    def learn(
        self,
        call: Call,
        forward: ForwardHistory,
        past: PassHistory,
        kwargs: dict[str, Any],
        then: dict[str, Any] | None,
        sources: int,
        updated: list[tuple[Tensor, dict[str, Any]]],
    ) -> None:
        """Rows of now take the place of those kept, once this step's forward is over."""
        if self.trying is not None:
            self.trying.update({(id(past), name): sources_of(kwargs[name]).detach() for name in past.rows})
            return
        if backward() or not sources:
            return
        given = [(past, kwargs)]
        if call.passes == len(forward.passes) - 1:
            given += [(u, k) for u, (_, k) in zip(forward.updates, updated, strict=False)]
        n_id = call.batch.n_id[:sources]
        at = first_of_each(n_id) if self.disjoint else None
        n_id = n_id if at is None else n_id[at]
        share = MIXED if past.random and call.layer.conv.training and not self.renewing else 1.0
        for one, words in given:
            for name, rows in one.rows.items():
                now = sources_of(words[name]).detach()[:sources]
                now = now if at is None else now[at]
                self._pending.append(lambda rows=rows, now=now: rows.write(n_id, now, share))  # type: ignore[misc]
        if not self.renewing and then is not None:
            dots = self._dots(past, kwargs, then, sources)
            self._pending.append(lambda: self._weigh(past, dots))
        if past.level == max(p.level for fs in self.kept.values() for f in fs for p in f.passes):
            self._pending.append(lambda: self.stamp.index_fill_(0, n_id, self.steps))

    def _dots(self, past: PassHistory, kwargs: dict[str, Any], then: dict[str, Any], sources: int) -> list[Tensor]:
        both = [(sources_of(w[k]).detach()[:sources].flatten().float() for w in (kwargs, then)) for k in past.rows]
        pairs = [tuple(b) for b in both]
        return [torch.stack([now @ old for now, old in pairs]).sum(), torch.stack([o @ o for _, o in pairs]).sum()]

    def _weigh(self, past: PassHistory, dots: list[Tensor]) -> None:
        past.dots = [OF_LATE * a + float(b) for a, b in zip(past.dots, dots, strict=True)]

    # --- the oldest rows ----------------------------------------------------------------------------------------------

    def _oldest(self) -> Tensor:
        """The next nodes, in a round over all, that nothing has renewed since the round before."""
        found, left = [], self.refresh
        for _ in range(-(-self.nodes // self.refresh)):
            stop = min(self.cursor + self.refresh, self.nodes)
            part = torch.arange(self.cursor, stop, device=self.device)
            part = part[self.stamp[self.cursor : stop] <= self.round][:left]
            last = int(part[-1]) + 1 if part.numel() == left else stop
            found.append(part)
            left -= part.numel()
            self.cursor = last % self.nodes
            if self.cursor == 0:
                self.round = self.steps - 1
            if left == 0 or self.cursor == 0:
                break
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.long, device=self.device)

    def _renew_oldest(self) -> None:
        if any(f.why for fs in self.kept.values() for f in fs):
            self.refresh = 0  # what such a layer gives for a node without edges is not what it gives
            return
        nodes = self._oldest()
        if nodes.numel() == 0:
            return
        root, training = Root.of(self.model), [m for m in bare(self.model).modules() if m.training]
        form, self.renewing = root.form, True
        try:
            with torch.no_grad():
                if not self.tried:
                    self.tried = True
                    self._try_random(nodes)
                bare(self.model).eval()
                self._run(nodes)
            self.settle()
        except Exception as e:
            self.refresh = 0
            self._pending.clear()
            self.say(
                f"the oldest rows of {type(bare(self.model)).__name__} are not renewed ({' '.join(str(e).split())}), "
                "only those of nodes in training batches"
            )
        finally:
            self.renewing, root.form = False, form
            for m in training:
                m.training = True

    def _run(self, nodes: Tensor) -> None:
        """The model on some nodes; the one edge is there so that layers know the batch, and counts for nothing."""
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        scale, tree = torch.ones(1, device=self.device), one.new_zeros(nodes.numel())
        hops = Hops(nodes, torch.stack([one, one]), one, scale, tree, [nodes.numel()], [1], [])
        batch = filter_data(self.data, nodes, one, one, one)
        batch.num_nodes, batch.batch_size, batch.n_id, batch.e_id = nodes.numel(), nodes.numel(), nodes, one
        batch = weigh(batch, hops)
        batch = batch if self.transform is None else self.transform(batch)
        model = bare(self.model)
        device = next((p.device for p in model.parameters()), batch.edge_index.device)
        batch = batch.to(device)
        assert self.whole is not None
        drawn = DrawnBatch(nodes, one, hops.scale, self.whole, hops.num_nodes, hops.num_edges, [])
        drawn.memory = weakref.ref(self)
        batches.register(batch, drawn)
        model(**arguments_of(model, batch, device, {}))

    def _try_random(self, nodes: Tensor) -> None:
        """Twice in training mode: rows that differ then do so by chance, as with dropout."""
        kept = {name: b.clone() for name, b in bare(self.model).named_buffers()}
        seen: list[dict[tuple[int, str], Tensor]] = []
        with torch.random.fork_rng(devices=[]):
            for _ in range(2):
                self.trying = {}
                try:
                    self._run(nodes)
                finally:
                    seen.append(self.trying)
                    self.trying = None
        for name, b in bare(self.model).named_buffers():
            b.copy_(kept[name])
        self._pending.clear()
        for past in (p for fs in self.kept.values() for f in fs for p in f.passes):
            keys = [(id(past), name) for name in past.rows]
            past.random = any(not close(seen[0][k], seen[1][k]) for k in keys if k in seen[0])

    # --- a checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What later steps depend on."""
        self.settle()

        def of_pass(p: PassHistory) -> dict[str, Any]:
            return {
                "level": p.level, "own": p.own, "shape": p.shape, "random": p.random, "coefs": p.coefs,
                "dots": list(p.dots), "filled": p.filled,
                "rows": {k: (r.shape, r.tensors()) for k, r in p.rows.items()},
                "sums": None if p.sums is None else (p.sums.shape, p.sums.tensors()),
            }  # fmt: skip

        layers = {
            name: [
                {"passes": [*map(of_pass, f.passes)], "updates": [*map(of_pass, f.updates)], "why": f.why,
                 "tried": f.tried}
                for f in self.kept.get(layer, [])
            ]
            for name, layer in self.layers.items() if layer is not None
        }  # fmt: skip
        words = ("steps", "cursor", "round", "refresh", "tried")
        return {"history": layers, "stamp": self.stamp, "form": Root.of(self.model).form,
                **{k: getattr(self, k) for k in words}}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`; that of a model with other layers, or of a snapshot, is of no use and left alone."""
        layers = state.get("history", {})
        if layers.keys() != self.layers.keys() or state["stamp"].numel() != self.nodes:
            return

        def table(kept: Any, dtype: torch.dtype) -> NodeRows:
            shape, tensors = kept
            rows = NodeRows(self.nodes, shape, dtype, self.storage, self.device)
            if tensors.keys() == rows.tensors().keys() and tensors["value"].dtype == dtype:
                for k, own in rows.tensors().items():
                    own.copy_(tensors[k])
            else:  # kept in another precision
                value = tensors["value"].float()
                value = value * tensors["scale"].unsqueeze(1) if "scale" in tensors else value
                rows.write(torch.arange(self.nodes, device=self.device), value)
            return rows

        def of_pass(p: dict[str, Any]) -> PassHistory:
            rows = {k: table(r, self.dtype) for k, r in p["rows"].items()}
            sums = None if p["sums"] is None else table(p["sums"], torch.float32)
            filled = None if p["filled"] is None else p["filled"].to(self.device, copy=True)
            return PassHistory(
                p["level"],
                rows,
                p["own"],
                sums,
                {},
                filled,
                tuple(p["shape"]),
                p["random"],
                p["coefs"],
                list(p["dots"]),
            )

        for name, layer in self.layers.items():
            assert layer is not None
            self.kept[layer] = [
                ForwardHistory([*map(of_pass, f["passes"])], [*map(of_pass, f["updates"])], f["why"], f["tried"])
                for f in layers[name]
            ]
        self.stamp = state["stamp"].to(self.device, copy=True)
        for k in ("steps", "cursor", "round", "refresh", "tried"):
            setattr(self, k, state[k])
        root = Root.of(self.model)
        root.form = state["form"] if root.form is None else root.form


class _Heard:
    """A forward of a layer over the whole graph, whose rows are all taken."""

    def __init__(self, layer: Propagate, forward: ForwardHistory, nodes: int):
        self.layer, self.forward, self.nodes = layer, forward, nodes
        assert layer.reading is not None
        self.reading = layer.reading._replace(functions=frozenset())
        self.passes = self.updates = 0

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self._take(self.forward.updates, self.updates, kwargs)
        self.updates += 1
        return self.layer.own("edge_updater")(edge_index, size=size, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self._take(self.forward.passes, self.passes, kwargs)
        self.passes += 1
        return self.layer.own("propagate")(edge_index, size=size, **kwargs)

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer.own("aggregate")(inputs, *args, **kwargs)

    def _take(self, past: list[PassHistory], at: int, kwargs: dict[str, Any]) -> None:
        for name, rows in past[at].rows.items() if at < len(past) else ():
            now = sources_of(kwargs.get(name))
            if now is not None and now.shape[0] == self.nodes and tuple(now.shape[1:]) == rows.shape:
                rows.write(torch.arange(self.nodes, device=rows.value.device), now.detach())
                if at < len(self.forward.passes) and past is self.forward.passes and not past[at].dots[1]:
                    past[at].dots = [1.0, 1.0]
