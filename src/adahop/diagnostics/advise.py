"""advise: recommends settings for a graph, from its statistics and a race on validation within a given time.

    look at the graph | time, memory and variance of every candidate | race: all, then three, then two | one command

Candidates are fixed beforehand. Each is an ordinary run; all get equal *seconds*, so that a method is compared by its
results on this machine. The advice says how sure it is: candidates within the error of the best are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from adahop.capture import products, steps
from adahop.checks import between, room_for
from adahop.config import Config
from adahop.diagnostics.report import probe_nodes, variance
from adahop.features import SparseFeatures, TypedFeatures
from adahop.graph import Graph
from adahop.models import GNN
from adahop.race import Arm
from adahop.run import Run, inputs_of
from adahop.seams import NodeData
from adahop.sum import full_sums
from adahop.train import Judged

CANDIDATES = (  # method, k; control variates at noise 0
    ("adahop", 2),
    ("adahop", 5),
    ("adahop", 10),
    ("graphsage", 2),
    ("graphsage", 5),
    ("graphsage", 10),
)
LEFT = (3, 2)  # candidates in the second and in the third round
FEW = 5  # steps that are timed
ENOUGH = 10  # epochs of the winner, below which the race is reported as short
NOT_TRIED = (
    "other learning rates, widths, depths and dropout",
    "the methods `adahop list` names besides " + " and ".join(dict.fromkeys(m for m, _ in CANDIDATES)),
    "training on all neighbours at once",
    "more than one seed",
)


# --- the graph -------------------------------------------------------------------------------------------------------


def look(data: NodeData) -> dict[str, Any]:
    """Degrees, how alike neighbours' labels are, and features, from training labels alone."""
    degree = data.graph.degree().float()
    marks = torch.quantile(degree[torch.randperm(len(degree))[: 1 << 20]] if len(degree) > 1 << 20 else degree,
                           torch.tensor([0.5, 0.9]))  # fmt: skip
    same, chance = homophily(data)
    return {
        "nodes": data.graph.num_nodes,
        "edges": data.graph.num_edges,
        "training": int(data.train_mask.sum()),
        "validation": int(data.val_mask.sum()),
        "degree": {
            "mean": float(degree.mean()), "median": float(marks[0]), "nine in ten below": float(marks[1]),
            "most": int(degree.max()), "none": float((degree == 0).float().mean()),
        },
        "homophily": same,
        "homophily_by_chance": chance,
        **_features(data.x),
        "classes": data.classes,
        "metric": data.metric,
    }  # fmt: skip


def _features(x: Tensor | TypedFeatures) -> dict[str, Any]:
    """Columns of the features and how many entries are not zero; of a typed graph by node type, and its relations."""
    if isinstance(x, TypedFeatures):
        tables = {kind: _columns(table) for kind, table in x.tables.items()}
        return {"features": tables, "relations": [list(relation) for relation in x.schema.relations]}
    return {"features": _columns(x)}


def _columns(x: Tensor | SparseFeatures | None) -> dict[str, float]:
    if x is None:
        return {"columns": 0, "not zero": 0.0}
    if isinstance(x, SparseFeatures):
        return {"columns": x.width, "not zero": x.value.numel() / max(len(x) * x.width, 1)}
    return {"columns": x.shape[1], "not zero": float((x[:: max(len(x) // 10_000, 1)] != 0).float().mean())}


def homophily(data: NodeData) -> tuple[float | None, float | None]:
    """The share of edges between training nodes whose labels agree, and what it would be by chance.

    Of several labels per node, the mean overlap (common labels over those of either). None without such edges.
    """
    graph, known = data.graph, data.train_mask
    pick = torch.arange(0, graph.num_edges, max(graph.num_edges // 1_000_000, 1), device=graph.device)
    source = graph.indices[pick].long()
    row = torch.searchsorted(graph.indptr, pick, right=True) - 1
    target = row if graph.types is None else torch.searchsorted(graph.types.ptr, row, right=True) - 1
    both = known[source] & known[target]
    if not bool(both.any()):
        return None, None
    source, target = source[both], target[both]
    other = source[torch.randperm(len(source), generator=torch.Generator().manual_seed(0))]
    return _agreement(data.y[source], data.y[target]), _agreement(data.y[other], data.y[target])


def _agreement(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point():
        return float((a == b).float().mean())
    common, either = (a * b).sum(1), ((a + b) > 0).sum(1)
    return float((common / either.clamp(min=1)).mean())


def max_reduction(graph: Graph, h: Tensor) -> float:
    """How much of uniform draws' variance the best odds could take away: 1 - sum (sum a|h|)^2 / sum n sum (a|h|)^2.

    Draws with replacement, before what both lose by the square of the mean; the sums are over a node's n neighbours,
    then over nodes. 0: all messages are equally large, and nothing can be learned.

    >>> star = Graph.from_edge_index([[1, 2], [0, 0]])
    >>> [max_reduction(star, torch.tensor([[0.0], [h], [1.0]])) for h in (1.0, 0.0)]
    [0.0, 0.5]
    """
    size = torch.linalg.vector_norm(h.float(), dim=1, keepdim=True)
    best = full_sums(graph, size).double().square().sum()
    even = (graph.degree().unsqueeze(1) * full_sums(graph, size, squared=True)).double().sum()
    return float(1.0 - best / even) if float(even) > 0 else 0.0


def learnable_share(model: GNN, graph: Graph, x: Tensor) -> list[float] | list[dict[str, float]]:
    """`max_reduction` of every layer, with the messages that a model passes now; in a typed graph, of each relation."""
    inputs = (model.inference(graph, x, until=layer) for layer in range(len(model.convs)))
    if graph.types is None:
        return [max_reduction(graph, h) for h in inputs]
    views = {"__".join(name): graph.of_relation(r) for r, name in enumerate(graph.relations)}
    return [{name: max_reduction(view, h) for name, view in views.items()} for h in inputs]


def in_words(learning: list[float] | list[dict[str, float]]) -> list[str]:
    """A word per layer; over relations, the least and the most."""
    words = []
    for share in learning:
        each = sorted(share.values()) if isinstance(share, dict) else [share]
        words.append(f"{each[0]:.0%} to {each[-1]:.0%}" if len(each) > 1 else f"{each[0]:.0%}")
    return words


# --- a candidate -----------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """A method with k: its run, and what was measured of it."""

    method: str
    k: int
    run: Run
    step_ms: float = 0.0
    memory_mb: float = 0.0
    relative: float = 0.0  # variance of the last layer's sum over its square, the mean over relations
    rounds: int = 0
    seconds: float = 0.0
    best: Arm = field(default_factory=lambda: Arm(0.0))

    def row(self) -> dict[str, Any]:
        return {
            "method": self.method, "k": self.k, "step_ms": self.step_ms, "memory_mb": self.memory_mb,
            "variance": self.relative, "val": self.run.result.val, "epochs": self.run.result.epochs,
            "seconds": self.seconds, "rounds": self.rounds,
        }  # fmt: skip

    def measure(self) -> None:
        """Time of a step, memory of what is kept, and the variance of what is estimated."""
        run = self.run
        self.memory_mb = sum(_bytes(m) for m in (run.sampler, run.model.memories)) / 2**20
        assert run.steps is not None
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) <= FEW:  # an epoch may have fewer, and the first takes longer: kernels are compiled
            for loss, batch in run.steps:
                run.moved(loss, batch.stands_for)
                run.steps.finish()
                taken.append(time.perf_counter() - began)
                began = time.perf_counter()
                if len(taken) > FEW:
                    break
        self.step_ms = 1e3 * sorted(taken)[len(taken) // 2]
        rows = variance(run.model, run.sampler, run.data, nodes=probe_nodes(run.data, 128), repeats=4, against=(),
                        gradient=False)  # fmt: skip
        last = [row for row in rows if row["layer"] == rows[-1]["layer"]]
        self.relative = sum(row["relative"] for row in last) / len(last)

    def go(self, seconds: float) -> None:
        """Train and evaluate for about this long; at least one epoch where it takes less than twice the time."""
        run, began = self.run, time.perf_counter()
        assert run.steps is not None
        self.rounds += 1
        while True:
            at = time.perf_counter()
            for loss, batch in run.steps:
                run.moved(loss, batch.stands_for)
                if time.perf_counter() - began > 2 * seconds:
                    break
            with run.average.applied():
                judged = Judged(run.model, run.data, run.sampler.graph, run.data.metric, run.strategy)
                run.closed(judged.scores())
            if run.result.best_epoch == run.result.epochs:
                self.best = Arm(0.0, [run.result.val], judged.without_groups())
            run.renew()
            now = time.perf_counter()
            if now - began + (now - at) / 2 > seconds:
                break
        self.seconds += time.perf_counter() - began


def _bytes(part: nn.Module) -> int:
    return sum(b.numel() * b.element_size() for b in part.buffers())


# --- the advice ------------------------------------------------------------------------------------------------------


def advise(
    data: NodeData, config: Config, minutes: float = 5.0, seed: int = 0, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure and race the candidates for about `minutes`, with the model, width, rate and so on of `config`.

    Returns the graph's facts, `learning` (per layer, and per relation of a typed graph, what learned odds can take away
    of uniform draws' variance at most), a row per candidate, `recommended` (settings, why) and `not_tried`.
    """
    say = say or (lambda sentence: None)
    until = time.perf_counter() + 60 * between(minutes, 1e-3, 1e5, "minutes")
    inputs_of(data, config.model)  # which must fit each other
    facts = look(data)
    cuda = config.device.startswith("cuda")
    devices = [torch.cuda.current_device()] if cuda else []
    with torch.random.fork_rng(devices=devices), products(cuda and config.tf32), room_for("a candidate of the race"):
        running = [_candidate(data, config, seed, *given) for given in CANDIDATES]
        try:
            for one in running:
                one.measure()
                cost = f"{one.step_ms:.1f} ms a step, {one.memory_mb:.1f} MB kept"
                say(f"{_name(one)}: {cost}, variance {one.relative:.2g}")
            _race(running, until, say)
            first, *others = sorted(running, key=lambda one: (-one.rounds, -one.run.result.val))
            learning = learnable_share(first.run.model, first.run.sampler.graph, first.run.data.x)
        finally:
            for one in running:
                one.run.steps = None
    return {
        "graph": facts,
        "learning": learning,
        "candidates": [one.row() for one in [first, *others]],
        "recommended": {
            "method": first.method,
            "sizes": [first.k] * len(config.sizes),
            "why": _why(first, others, learning),
            **_sure(first, others),
        },
        "not_tried": list(NOT_TRIED),
    }


def _candidate(data: NodeData, config: Config, seed: int, method: str, k: int) -> Candidate:
    torch.manual_seed(seed)
    own = replace(config, method=method, sizes=(k,) * len(config.sizes), noise=0.0)
    run = Run(data, own, seed)
    run.steps = steps(run)
    run.renew()
    return Candidate(method, k, run)


def _race(candidates: list[Candidate], until: float, say: Callable[[str], None]) -> None:
    """A third of what is left to all of them, half of the rest to the best, the rest to the last."""
    running = list(candidates)
    for at, many in enumerate((len(candidates), *LEFT)):
        running = sorted(running, key=lambda one: -one.run.result.val)[:many]
        share = max(until - time.perf_counter(), 0.0) / (len(LEFT) + 1 - at) / many
        for one in running:
            one.go(share)
        best = max(running, key=lambda one: one.run.result.val)
        say(f"round {at + 1}: {_name(best)} leads {many} with validation {best.run.result.val:.4f}")


def _name(one: Candidate) -> str:
    return f"{one.method}, k = {one.k}"


def _level(first: Candidate, others: list[Candidate]) -> list[Candidate]:
    """Those that the first is not ahead of by more than the error of the difference."""
    return [one for one in others if not (first.best.groups and one.best.groups and first.best.beats(one.best))]


def _sure(first: Candidate, others: list[Candidate]) -> dict[str, Any]:
    """Whether the first is clearly ahead of all others, and the others that it is not clearly ahead of."""
    level = [_name(one) for one in _level(first, others)]
    return {"sure": not level and first.run.result.epochs >= ENOUGH, "as_good": level}


def _why(first: Candidate, others: list[Candidate], learning: list[float] | list[dict[str, float]]) -> str:
    second = others[0]
    both = bool(first.best.groups and second.best.groups)
    gap, error = (first.best.ahead_of(second.best), first.best.error(second.best)) if both else (0.0, 0.0)
    clear = "clearly" if gap > error else "within the error"
    epochs = first.run.result.epochs
    short = ", too few to be sure: more minutes would say more" if epochs < ENOUGH else ""
    lead = (
        f"validation {first.run.result.val:.4f} after {epochs} epochs{short}; ahead of {_name(second)} by {gap:.4f} ± "
        f"{error:.4f} ({clear})"
    )
    slowest = max(one.step_ms for one in [first, *others])
    shares = ", ".join(in_words(learning))
    return (
        f"{lead}; a step takes {first.step_ms:.1f} ms where the slowest candidate takes {slowest:.1f}; learned "
        f"probabilities can take away at most {shares} of uniform draws' variance, by layer"
    )
