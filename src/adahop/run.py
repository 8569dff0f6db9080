"""Run: everything that one training holds, from the model to the position; what a checkpoint keeps is here."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from adahop import models, ops
from adahop.checkpoint import content_hash
from adahop.checks import InputError
from adahop.config import Config
from adahop.distributed import strategy
from adahop.features import Features, Schema, SparseFeatures, TypedFeatures
from adahop.graph import Graph
from adahop.loader import Loader
from adahop.methods import METHODS, OTHER, needs
from adahop.methods import make as make_sampler
from adahop.race import UNIFORM, Race, arms, length
from adahop.samplers import NeighborSampler, Sampler
from adahop.samplers.loop import Padded
from adahop.seams import NodeData
from adahop.step import Steps, step_rows
from adahop.storage import storage_in
from adahop.sum import Sum

now: Callable[[], float] = time.perf_counter  # the seconds of a run; benchmarks may count processor time instead
SPARSE_WIDTH, SPARSE_SHARE = 256, 16  # features are sparse from this width on, with one entry in so many not 0


@dataclass
class Result:
    """The result of a run: scores at the best validation epoch, and a row per epoch."""

    seed: int
    test: float
    val: float
    best_epoch: int
    epochs: int
    steps: int
    seconds: float
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    noise: float | list[float] | str | None = (
        None  # where the dial stood in the end, or "uniform 2", "uniform 10"; None: no dial
    )
    race: dict[str, Any] | None = field(default=None, repr=False)  # how noise="auto" chose: why, arms, evaluations
    model: models.GNN | None = field(default=None, repr=False)
    sampler: Sampler | None = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        """What is written and printed: `noise` where there is a dial, `race` where it was chosen."""
        kept = {k: getattr(self, k) for k in ("seed", "test", "val", "best_epoch", "epochs", "steps", "seconds")}
        return {**kept, **{k: v for k, v in (("noise", self.noise), ("race", self.race)) if v is not None}}


class Drawing(NamedTuple):
    """A sampler, and the fixed shape of its blocks on a GPU, or why they have none."""

    sampler: Sampler
    padded: Padded | None
    unpadded: str | None


class Average:
    """A running average of a model's weights, to evaluate with: smoother than the last step's. keep=0 does nothing."""

    def __init__(self, model: nn.Module, keep: float):
        self.model, self.keep, self.steps = model, keep, 0
        self.mean = [p.detach().clone() for p in model.parameters()] if keep else []

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        keep = min(self.keep, self.steps / (self.steps + 9))  # the first steps are forgotten faster
        for mean, p in zip(self.mean, self.model.parameters(), strict=bool(self.keep)):
            mean.lerp_(p, 1.0 - keep)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": list(self.mean), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for mean, kept in zip(self.mean, state["mean"], strict=True):
            mean.copy_(kept)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the average for its weights."""
        pairs = list(zip(self.mean, self.model.parameters(), strict=bool(self.keep)))
        for mean, p in pairs:
            mean.data, p.data = p.data, mean.data
        try:
            yield
        finally:
            for mean, p in pairs:
                mean.data, p.data = p.data, mean.data


def stored(data: NodeData, config: Config) -> NodeData:
    """The data as a run keeps them, on its device, features as `config.features` says: "auto" is sparse or float32.

    What is given stays as it is and where it is.
    """
    out: Any = copy.copy(data)
    if config.features == "bfloat16":
        if ops.in_file(data.x):
            raise InputError("`features` must be float32 for features in a file, which has its own type, got bfloat16")
        out.x = data.x.to(torch.bfloat16)
    elif config.features == "auto" and reads_sparse(config):
        out.x = as_sparse(data.x, data.graph)
    return out.to(config.device)


def reads_sparse(config: Config) -> bool:
    """Whether model and method read features through products with a weight matrix alone."""
    on_cpu = config.device == "cpu" and config.partition is None
    reads_x = "features" in needs(config.preset, config.method_options)
    stores_sums = "sums" in (config.remembers or config.preset.estimator)  # of features
    return on_cpu and not reads_x and not stores_sums


def as_sparse(x: Any, graph: Graph) -> Any:
    """Features without their zeros where that is faster; in a typed graph, those of some types."""
    if isinstance(x, TypedFeatures):
        tables = {kind: as_sparse(table, graph) for kind, table in x.tables.items()}
        return TypedFeatures(tables, x.schema.counts, x.schema.relations)
    return SparseFeatures.of(x) if is_sparse(x, graph) else x


def is_sparse(x: Any, graph: Graph) -> bool:
    """Whether so few entries are not 0 that products and sums over neighbours are faster without the zeros."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.shape[1] < SPARSE_WIDTH or ops.in_file(x):
        return False
    width, degree = x.shape[1], graph.num_edges / max(graph.num_nodes, 1)

    def few(part: Tensor) -> bool:
        entries = float(part.count_nonzero()) / max(len(part), 1)  # per row
        return entries * SPARSE_SHARE <= width and entries * (degree + 1) <= 2 * width

    return few(x[:: max(1, len(x) // 1024)]) and few(x)


def inputs_of(data: NodeData, model: str) -> int | Schema:
    """The inputs of a model: the width of the features, or the schema of a typed graph."""
    typed, fitting = data.graph.types is not None, [k for k, m in models.MODELS.items() if m.typed]
    if typed != models.MODELS[model].typed:
        known = fitting if typed else [k for k in models.MODELS if k not in fitting]
        kind = "several node types or relations" if typed else "one node type and one relation"
        raise InputError(f"`model` must be one of {', '.join(known)} for a graph with {kind}, got {model}")
    return data.x.schema if typed else data.x.shape[1]


def edges_of(graph: Graph) -> int | tuple[int, ...]:
    """The width of the edge features that a model reads, per relation in a typed graph."""
    if graph.attr is None:
        return 0
    return graph.attr.widths[0] if graph.types is None else graph.attr.widths


def assemble(
    data: NodeData, config: Config, seed: int, remembers: bool = True, waits: bool = False
) -> tuple[models.GNN, Sampler]:
    """The model and the sampler of a config, fitted to each other: its graph, its memory, what need not be drawn.

    `waits`: the first snapshot may be made row by row, see `GNN.remember`.
    """
    of_model = {"edges": edges_of(data.graph), **config.model_options}
    model = models.make(
        config.model, inputs_of(data, config.model), config.hidden, data.classes, layers=len(config.sizes),
        arch=config.arch, dropout=config.dropout, **of_model,
    ).to(config.device)  # fmt: skip
    graph = (data.graph if of_model["edges"] else data.graph.without_edge_features()).normalized(*model.graph)
    method = METHODS[config.method].on(model.weights if remembers else OTHER)
    known = {"features": data.x if graph.types is None else None, **model.facts()}  # types have other columns each
    told = {k: known[k] for k in needs(method, config.method_options)}
    options = {**method.options, **told, **config.method_options}
    storage = storage_in(config.state, graph.num_nodes)
    sampler = make_sampler(config.method, graph, config.sizes, seed, storage, **options).to(config.device)
    dtype = torch.float16 if config.half else torch.float32
    without = {} if config.judged is None else {"passes": False}
    estimator = config.remembers or method.estimator
    sampler.skip = model.remember(estimator, graph, data.x, dtype, config.dial, storage, on_demand=waits, **without)
    return model, sampler


def device_features(x: torch.Tensor | TypedFeatures, sampler: Sampler, config: Config) -> Features:
    """The table that steps on a GPU read; the types of a typed graph share one."""
    x = x.joined(torch.float16 if config.half else torch.float32) if isinstance(x, TypedFeatures) else x
    x = x.half() if config.half else x
    if config.cache is None:
        return Features(x, config.device)
    often = torch.bincount(sampler.graph.indices.long(), minlength=len(x))  # read once for every target they have
    return Features(x, config.device, int(config.cache * len(x)), often)


class Run:
    """The parts of one training, built from a config and a seed; `train` moves it on, an epoch at a time."""

    def __init__(self, data: NodeData, config: Config, seed: int):
        self.start = now()
        self.config, self.data = config, stored(data, config)
        self.strategy = strategy(self.data)
        if not self.strategy.total(float(self.data.val_mask.sum()))[0]:
            raise InputError("`val_mask` must name at least one node, which decides the best epoch, got none")
        kind = models.MODELS[config.model].weights if self.strategy.allows_memory else OTHER
        if config.judged is not None and self.strategy.size > 1:
            raise InputError(f"`judged` must be None with several processes, got {config.judged}")
        self.strategy.check_estimator(config.estimator or METHODS[config.method].on(kind).estimator)
        self.model, sampler = assemble(
            self.data, config, seed, self.strategy.allows_memory, waits=self.strategy.size == 1
        )
        self.net, self.sampler = self.strategy.wrap_model(self.model), self.strategy.wrap_sampler(sampler)
        parameters = [*self.model.parameters(), *self.sampler.parameters()]
        captured: dict[str, Any] = {"capturable": True} if config.device.startswith("cuda") else {}
        self.optimizer = torch.optim.Adam(
            parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True, **captured
        )
        self.model.learn_by_rows()
        self.optimizer.register_step_pre_hook(step_rows)
        nodes = self.data.train_mask.nonzero().flatten()
        shape = self.fixed_shape(nodes)
        self.unpadded = shape if isinstance(shape, str) else None  # why blocks of steps have no fixed shape
        self.padded = None if isinstance(shape, str) else shape  # the blocks of steps on a GPU
        self.features = None if self.padded is None else device_features(self.data.x, self.sampler, config)
        rows = self.strategy.row_source(self.data, self.sampler)
        lean = rows is self.data
        self.loader = Loader(rows, self.sampler, nodes, config.batch_size, prefetch=config.prefetch, lean=lean)
        self.average = Average(self.model, config.average)
        self.race = self._race()
        self.result = Result(seed, 0.0, -1.0, 0, 0, 0, 0.0, model=self.model, sampler=self.sampler)
        self.own = Drawing(self.sampler, self.padded, self.unpadded)
        others = [] if self.race is None else [str(arm.noise) for arm in self.race.arms[1:]]
        self.uniform = {noise: self._uniform(UNIFORM[noise]) for noise in others}  # how other arms of the race draw
        self.steps: Steps | None = None  # while it trains
        self.best: dict[str, Any] | None = None  # the model's state at the best epoch on validation
        self.trained, self._since = 0.0, None  # type: float, float | None  # seconds of training alone; since when
        self.loss, self.seen = torch.zeros((), device=config.device), 0.0  # of this epoch: sum of losses, seeds
        self.strategy.setup(self)

    def fixed_shape(self, nodes: Tensor) -> Padded | str:
        """Blocks of a fixed shape for these seeds, which a CUDA graph can hold; or why there are none."""
        if not self.config.device.startswith("cuda"):
            return "it needs a CUDA device"
        if self.strategy.size > 1:  # ranks exchange numbered blocks
            return "it runs in several processes"
        if not ops.pads(self.sampler.graph.indptr):
            return "Triton is not there"
        if not self.model.takes_padded:
            return f"the layers of {self.config.model} read all relations of a target together"
        x = self.data.x
        why = x.why_separate() if isinstance(x, TypedFeatures) else None
        return why or Padded.fitted(self.sampler, bare=True, seeds=nodes)

    def _race(self) -> Race | None:
        """The race of noise="auto", where there is a dial and time for it."""
        ways = arms(self.data.graph)
        first, second = length(self.config.epochs, self.config.patience, len(ways))
        wanted = self.config.noise == "auto" and second and self.model.noise() is not None
        return Race(ways, first, second) if wanted else None

    def _uniform(self, k: int) -> Drawing:
        """Uniform draws of k in every layer; step and epoch are those of the method's own sampler."""
        own = self.own.sampler
        even = NeighborSampler(own.graph, [k] * len(self.config.sizes), seed=own.seed).to(self.config.device)
        even.step, even.epochs = own.step, own.epochs
        if self.padded is None:
            return Drawing(even, None, self.unpadded)
        shape = Padded.fitted(even, bare=True, seeds=self.loader.nodes)
        return Drawing(even, None, shape) if isinstance(shape, str) else Drawing(even, shape, None)

    def turn(self, noise: float | str) -> None:
        """From the next epoch on: draw as the method does, the dial at `noise`; or uniformly, with plain sums."""
        even = isinstance(noise, str)
        self.sampler, self.padded, self.unpadded = self.uniform[noise] if isinstance(noise, str) else self.own
        self.loader.sampler = self.sampler
        self.model.remembers = not even
        self.strategy.split_seeds(self)
        if not isinstance(noise, str):
            self.model.set_noise(noise)

    def over(self) -> bool:
        """Whether nothing is left to do."""
        r, patience = self.result, self.config.patience
        if self.race is not None and not self.race.over:
            return False
        return r.epochs >= self.config.epochs or bool(patience and r.epochs and r.epochs - r.best_epoch >= patience)

    def clock(self, on: bool) -> None:
        """Training's seconds count from here, or up to here."""
        at = now()
        if self._since is not None:
            self.trained += at - self._since
        self._since = at if on else None

    def moved(self, loss: Tensor, seeds: float) -> None:
        """A step was taken."""
        self.loss += loss * seeds
        self.average.update()
        self.seen += seeds
        self.result.steps += 1

    def renew(self) -> None:
        """Renew the message norms of a GPU's first layer, which sums raw features and never forms the messages."""
        if self.features is not None and self.sampler.listens and self.model.memory(0) is None:
            self.model.renew(self.features)

    def closed(self, scores: dict[str, float]) -> dict[str, Any]:
        """An epoch is over and was judged: its row of the history. The best on validation is kept."""
        r = self.result
        r.epochs += 1
        if scores["val"] > r.val:
            r.val, r.test, r.best_epoch = scores["val"], scores["test"], r.epochs
            self.best = copy.deepcopy(self.model.state_dict())
        loss, seen = self.strategy.total(float(self.loss), self.seen)
        loss /= max(seen, 1)
        r.history.append({"epoch": r.epochs, "loss": loss, **scores, "seconds": self.trained})
        if self.race is not None:
            r.history[-1].update(noise=self.race.noise, evaluation=self.race.evaluations + 1)
        self.loss, self.seen = torch.zeros_like(self.loss), 0.0
        return r.history[-1]

    def identity(self) -> dict[str, Any]:
        """What a state belongs to: it fits no other run."""
        config = {k: list(v) if isinstance(v, tuple) else v for k, v in self.config.as_dict().items()}
        if config["features"] == "auto":
            x = self.data.x
            tables = x.tables.values() if isinstance(x, TypedFeatures) else [x]
            config["features"] = "sparse" if any(isinstance(t, SparseFeatures) for t in tables) else "float32"
        return {**config, "seed": self.result.seed, "data": content_hash(self.data)}

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on, taken between two steps."""
        return {
            **self.line(),
            "race": None if self.race is None else self.race.state_dict(),
            "trained": self.trained,
            "seconds": now() - self.start,
        }

    def line(self) -> dict[str, Any]:
        """The same without what goes on whichever line of epochs is taken up: the clocks, and the race itself."""
        loader = self.loader.state_dict()  # first: it waits for draws that still move the sampler
        r = self.result
        return {
            "loader": loader,
            "sampler": dict(self.own.sampler.state_dict()),
            "model": dict(self.model.state_dict()),
            "memory": {name: cast(Sum, m).state() for name, m in self.model.memories.items()},
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "norms": None if self.features is None else self.features.square,
            "best": None if self.best is None else dict(self.best),
            "result": {k: getattr(r, k) for k in ("test", "val", "best_epoch", "epochs", "steps", "history")},
            "loss": self.loss,
            "seen": self.seen,
            "random": _random(self.config.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of a run with the same data, config and seed."""
        self.take_up(state)
        if self.race is not None:
            self.race.load_state_dict(state["race"])
            self.turn(self.race.noise)
        self.trained, self.start = state["trained"], now() - state["seconds"]

    def take_up(self, state: dict[str, Any]) -> None:
        """Go on from a line's state; what a captured step reads and writes stays where it is."""
        self.own.sampler.load_state_dict(state["sampler"])
        self.loader.load_state_dict(state["loader"])
        self.model.load_state_dict(state["model"])
        for name, kept in state["memory"].items():
            cast(Sum, self.model.memories[name]).restore(kept)
        self._take_up_optimizer(state["optimizer"])
        self.average.load_state_dict(state["average"])
        if self.features is not None:
            self.features.square.copy_(state["norms"])
        self.best = state["best"]
        for name, value in state["result"].items():
            setattr(self.result, name, list(value) if name == "history" else value)
        self.loss, self.seen = torch.zeros_like(self.loss) + state["loss"].to(self.loss.device), state["seen"]
        _set_random(state["random"], self.config.device)

    def _take_up_optimizer(self, state: dict[str, Any]) -> None:
        mine = self.optimizer.state_dict()["state"]
        if not mine:  # before the first step
            return self.optimizer.load_state_dict(state)
        for key, moments in state["state"].items():
            for name, value in moments.items():
                mine[key][name].copy_(value)

    def finished(self) -> Result:
        """The result, its model as it was at its best."""
        self.result.seconds = now() - self.start
        self.result.noise, self.result.sampler = self.model.noise(), self.sampler
        if self.race is not None:
            r = self.race
            self.result.noise = r.noise
            self.result.race = {"why": r.why, "arms": r.table, "evaluations": r.evaluations}
        if self.best is not None:
            self.model.load_state_dict(self.best)
        return self.result


def _random(device: str) -> dict[str, Tensor]:
    """torch's generators: dropout draws from them."""
    states = {"cpu": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state(device)} if device.startswith("cuda") else states


def _set_random(states: dict[str, Tensor], device: str) -> None:
    torch.set_rng_state(states["cpu"])
    if device.startswith("cuda"):
        torch.cuda.set_rng_state(states["cuda"], device)
