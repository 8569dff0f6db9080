"""What one GPU does: kernels, epochs of a Reddit-size graph, growth with batch and degree, accuracy, peers; epochs of a
typed graph of ogbn-mag's size.

    python lab/benchmarks/gpu_epoch.py --parts kernels,epochs,growth,million,accuracy,methods,peers --out results.json
    python lab/benchmarks/gpu_epoch.py --parts typed --out typed.json

Parts are independent: one that fails leaves its traceback in the file and the others run. `--share 0.02` takes graphs
of that part of the size, `--captured` leaves eager epochs out. The typed part runs without a GPU, too, step by step and
on a part of the graph, to see that it would run:

    python lab/benchmarks/gpu_epoch.py --parts typed --device cpu --share 0.002 --out typed.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
import traceback
import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import adahop
from adahop import capture, ops
from adahop.block import Block, Seeds
from adahop.config import Config
from adahop.datasets.base import Dataset
from adahop.features import TypedFeatures
from adahop.graph import Graph
from adahop.ops import Exp3Rule, Odds, Scratch, Sight, TrackRule, Weights, random
from adahop.ops.drawing import cuda as drawing
from adahop.ops.summing import cuda_rows
from adahop.run import Run, device_features
from adahop.samplers.loop import Padded, sample
from adahop_lab.bench import gpu_epoch
from adahop_lab.bench.clock import take_turns
from adahop_lab.process import turn

DEV = "cuda"
NODES, EDGES, WIDTH, CLASSES, TRAIN = 232_965, 114_000_000, 602, 41, 153_932
RESULT: dict[str, Any] = {}
OUT: list[str] = []
PROFILE = False
HOW = (True, False)  # captured and eager epochs


def reddit_like(nodes: int = NODES, edges: int = EDGES, seed: int = 0) -> Graph:
    """A power law of degrees, and sources that prefer low numbers; no self-loops."""
    g = torch.Generator(DEV).manual_seed(seed)
    degree = torch.rand(nodes, device=DEV, generator=g).pow(-0.6)
    degree = (degree * edges / degree.sum()).long().clamp(1, 20_000)
    indptr = torch.zeros(nodes + 1, dtype=torch.long, device=DEV)
    indptr[1:] = degree.cumsum(0)
    many = int(indptr[-1])
    source = (torch.rand(many, device=DEV, generator=g).pow(1.5) * nodes).long().clamp(max=nodes - 1)
    target = torch.repeat_interleave(torch.arange(nodes, device=DEV), degree)
    source = torch.where(source == target, (source + 1) % nodes, source).int()
    return Graph(indptr, source, None, None, indptr[:-1].clone())


def as_data(graph: Graph, seed: int = 0, width: int = WIDTH, train: int = TRAIN) -> Any:
    g = torch.Generator(DEV).manual_seed(seed)
    n = graph.num_nodes
    order = torch.randperm(n, device=DEV, generator=g)
    masks = [torch.zeros(n, dtype=torch.bool, device=DEV) for _ in range(3)]
    cuts = (0, min(train, int(0.66 * n) + 1), int(0.76 * n), n)
    for mask, a, b in zip(masks, cuts[:-1], cuts[1:], strict=True):
        mask[order[a:b]] = True
    data = SimpleNamespace(
        graph=graph, x=torch.randn(n, width, device=DEV, generator=g), metric="accuracy", name="reddit-like",
        y=torch.randint(CLASSES, (n,), device=DEV, generator=g), classes=CLASSES,
        train_mask=masks[0], val_mask=masks[1], test_mask=masks[2],
    )  # fmt: skip
    data.to = lambda device: data
    return data


def clock(f: Any, n: int = 20) -> float:
    """Median milliseconds of f, by events around replays of a graph of it where that can be."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a, b in marks:
        a.record()
        graph.replay()
        b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks)


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernels(graph: Graph) -> dict[str, Any]:
    out: dict[str, Any] = {"copy_TB_s": copy_rate()}
    norm = graph.normalized("row", True)
    edge = torch.rand(norm.num_edges, device=DEV) + 0.1
    node = torch.rand(norm.num_nodes, device=DEV) + 0.1
    step = torch.zeros((), dtype=torch.long, device=DEV)
    stream = random.Stream(random.key(0), step, 0)
    odds = {
        "uniform": Odds(), "edge": Odds(edge=edge, eta=0.1),
        "node": Odds(edge=norm.weight, node=node, eta=0.05),
    }  # fmt: skip
    sizes = {rows: norm.indices[torch.randint(norm.num_edges, (rows,), device=DEV)].long() for rows in (1024, 11_264)}
    tried = {}
    for block, warps in ((512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4)):
        drawing.BLOCK, drawing.WARPS = block, warps
        for rows, dst in sizes.items():
            ms = clock(lambda: ops.padded(norm.edges, norm.rows(dst), dst, 10, 1, "multinomial", odds["edge"], stream))  # noqa: B023
            out[f"draw_edge_{rows}_{block}_{warps}"] = ms
            tried[block, warps] = tried.get((block, warps), 0.0) + ms
    drawing.BLOCK, drawing.WARPS = min(tried, key=lambda k: tried[k])
    out["block_and_warps"] = [drawing.BLOCK, drawing.WARPS]
    for rows, dst in sizes.items():
        for how, name in (("multinomial", "uniform"), ("multinomial", "node"), ("systematic", "edge"),
                          ("systematic", "node"), ("depround", "edge")):  # fmt: skip
            out[f"{how}_{name}_{rows}"] = clock(
                lambda: ops.padded(norm.edges, norm.rows(dst), dst, 10, 1, how, odds[name], stream)  # noqa: B023
            )
    for name, run in (("draws", lambda: out), ("sums", lambda: sums(norm)), ("updates", lambda: updates(norm, stream))):
        RESULT[name] = part(run)
        save()
    return out


def copy_rate() -> float:
    """TB/s that a plain copy moves, bytes read and written: the memory's own pace."""
    a = torch.randn(1 << 29, device=DEV)
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / min(clock(lambda: b.copy_(a)), clock(lambda: torch.mul(a, 2.0, out=b))) / 1e9


def sums(norm: Graph) -> dict[str, Any]:
    """The fused gather as a share of the copy's rate: rows chosen evenly, every byte counted once a read."""
    out: dict[str, Any] = {}
    rows, k = 11_264, 11
    peak = copy_rate()
    n_id = torch.randint(NODES, (rows * k,), device=DEV)
    src = torch.arange(rows * k, device=DEV)
    ptr = torch.arange(rows + 1, device=DEV) * k
    coef = torch.rand(rows * k, 1, device=DEV)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(NODES, WIDTH, device=DEV).to(dtype)
        for name, h in (("padded", ops.table(x, x)), ("plain", x)):
            ms = clock(lambda: ops.table_sum(h, src, coef, ptr, n_id))  # noqa: B023
            moved = rows * k * WIDTH * x.element_size() + rows * WIDTH * 4
            out[f"gather_{str(dtype)[6:]}_{name}"] = {
                "ms": ms,
                "TB_s": moved / ms / 1e9,
                "share": moved / ms / 1e9 / peak,
            }
    for dtype in (torch.float32, torch.float16):
        h = torch.randn(NODES, 256, device=DEV).to(dtype)
        nodes = torch.randint(NODES, (1024,), device=DEV)
        read = int((norm.indptr[nodes + 1] - norm.indptr[nodes]).sum()) * 256 * h.element_size()
        ms = clock(lambda: ops.full_sum(h, norm.edges, nodes))  # noqa: B023
        out[f"full_sum_{str(dtype)[6:]}"] = {"ms": ms, "TB_s": read / ms / 1e9, "share": read / ms / 1e9 / peak}
    h = torch.randn(rows, 1, 256, device=DEV, requires_grad=True)
    src = torch.arange(1024 * k, device=DEV)
    small = torch.arange(1025, device=DEV) * k
    row = torch.arange(1024, device=DEV).repeat_interleave(k)
    total = ops.gather_sum(h, src, row, coef[: 1024 * k], small)
    out["hidden_forward"] = clock(lambda: ops.gather_sum(h, src, row, coef[: 1024 * k], small))
    grad, dh = torch.randn_like(total), torch.zeros_like(h)
    out["hidden_backward"] = clock(lambda: cuda_rows.scatter_sum[(1024, 1)](
        dh, grad, src, coef, small, 256, 1, 1, RB=4, BF=256, num_warps=1))  # fmt: skip
    return out


def updates(norm: Graph, stream: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    edge, node = torch.ones(norm.num_edges, device=DEV), torch.ones(norm.num_nodes, device=DEV)
    n = norm.num_nodes
    for rows in (1024, 11_264):
        dst = norm.indices[torch.randint(norm.num_edges, (rows,), device=DEV)].long()
        f = ops.padded(norm.edges, norm.rows(dst), dst, 10, 1, "multinomial", Odds(edge=edge, eta=0.1), stream)
        ptr, energy = torch.arange(rows + 1, device=DEV) * 11, torch.rand(rows * 11, device=DEV)
        mean, visits = torch.zeros(n, device=DEV), torch.zeros(n, dtype=torch.int32, device=DEV)
        seen, scratch = Sight(dst, ptr, f.pos, f.prob, f.scale, 11), Scratch()
        rule = Exp3Rule(True, False, 0.3, True, 0.1, 0.0, 0.1)
        out[f"exp3_{rows}"] = clock(
            lambda: ops.exp3(seen, energy, norm.edges, Weights(edge, None), mean, visits, rule, scratch)  # noqa: B023
        )
        src = torch.cat([torch.arange(rows, device=DEV)[:, None],
                         rows + torch.arange(rows * 10, device=DEV).view(rows, 10)], 1).flatten()  # fmt: skip
        ends, state = (f.n_id, src, src), (node, visits.short(), mean[:1])
        out[f"track_{rows}"] = clock(
            lambda: ops.track(ends, seen, energy, f.weight, state, TrackRule(0.2, 256, 50), scratch, n)  # noqa: B023
        )
    return out


# --- epochs ----------------------------------------------------------------------------------------------------------


def epoch_seconds(
    data: Dataset, captured: bool, profile: bool = False, warm: int = 2, timed: int = 5, **options: Any
) -> Any:
    """Median seconds of an epoch's steps, policy updates included."""
    config = Config(
        **{"batch_size": 1024, "hidden": 256, "sizes": (10, 10), "dropout": 0.0, "device": DEV, "noise": 0.0, **options}
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with capture.products(config.tf32):
        torch.manual_seed(0)
        waited = Waited()
        run = Run(data, config, 0)
        waited.note("run")
        if config.device == "cpu":
            run.padded = Padded.fitted(run.sampler, bare=True, seeds=run.loader.nodes)
            run.features = device_features(run.data.x, run.sampler, config)
        assert run.features is not None, run.unpadded
        steps = capture.DeviceSteps(run, captured)
        seconds, losses, setup = [], [], {}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(warm + timed):
                steps.finish()
                began = time.perf_counter()
                total = torch.zeros((), device=config.device)
                for loss, batch in steps:
                    total += loss * batch.batch_size
                    if not setup:
                        waited.note("first step")
                        setup = dict(waited.seconds)
                steps.finish()
                seconds.append(time.perf_counter() - began)
                losses.append(float(total) / len(steps.nodes))
        got = {
            "seconds": statistics.median(seconds[warm:]), "all": seconds, "losses": losses,
            "setup": setup, "captured": len(steps.recorded), "said": [str(w.message) for w in said],
            "memory_GB": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
            "options": {k: str(v) for k, v in options.items()},
        }  # fmt: skip
        if data.graph.types is not None:
            got |= counted(run)
        if profile:
            got["profile"] = profiled(steps) if captured else host_profile(steps)
        if config.cache is not None:
            got["hit_rate"] = run.features.hit_rate()
        return got


class Waited:
    """Seconds since the last note, by name; the device's work included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.at = self.now()

    def note(self, name: str) -> None:
        at = self.now()
        self.seconds[name], self.at = at - self.at, at

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def profiled(steps: Any) -> list[str]:
    """Where a step's time goes: kernels by their share, microseconds a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for _ in islice(steps, 10):
            pass
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    all_of_it = sum(e.self_device_time_total for e in rows) / 10
    count = sum(e.count for e in rows) / 10
    lines = [f"{e.self_device_time_total / 10:8.1f} us {e.count / 10:6.1f} x {e.key[:90]}" for e in rows[:45]]
    return [f"total {all_of_it:.0f} us in {count:.0f} kernels", *lines]


def host_profile(steps: Any) -> list[str]:
    """Where the host's time goes in an eager step."""
    import cProfile
    import io
    import pstats

    watch = cProfile.Profile()
    watch.enable()
    for _ in islice(steps, 40):
        pass
    watch.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(watch, stream=text).sort_stats("tottime").print_stats(40)
    return text.getvalue().splitlines()


CASES: dict[str, dict[str, Any]] = {
    "gcn uniform": {"method": "graphsage", "arch": "plain", "half": True},
    "gcn bs": {"method": "bs", "arch": "plain", "half": True},
    "gcn adahop": {"method": "adahop", "arch": "plain", "half": True},
    "gat bs": {"method": "bs", "model": "gat", "arch": "plain", "half": True},
    "gcn bs residual": {"method": "bs", "half": True},
    "gcn adahop residual": {"method": "adahop", "half": True},
    "gcn bs float32": {"method": "bs", "arch": "plain"},
    "gcn adahop float32": {"method": "adahop", "arch": "plain"},
    "gcn bs dropout": {"method": "bs", "arch": "plain", "half": True, "dropout": 0.1},
}
EAGER = ("gcn uniform", "gcn bs", "gcn adahop")


def epochs(data: Dataset, only: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for captured in HOW:  # eager epochs come last
        for name, options in CASES.items():
            if (only and name not in only.split(",")) or not (captured or name in EAGER):
                continue
            label = f"{name} {'captured' if captured else 'eager'}"
            with turn():
                out[label] = part(lambda: epoch_seconds(data, captured, profile=PROFILE, **options))  # noqa: B023
            note(label, out[label])
            RESULT["epochs"] = out
            save()
    return out


def growth(data: Dataset) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for size in (512, 1024, 2048, 4096):
        options = {"method": "bs", "arch": "plain", "half": True, "batch_size": size}
        got = part(lambda: epoch_seconds(data, True, **options))  # noqa: B023
        if "seconds" in got:
            got["step_ms"] = 1000 * got["seconds"] / -(-TRAIN // size)
        out[f"batch {size}"] = got
        note(f"batch {size}", got)
    for degree in (50, 500):
        small = as_data(reddit_like(edges=NODES * degree))
        for method in ("graphsage", "bs", "adahop"):
            options = {"method": method, "arch": "plain", "half": True}
            RESULT["growth"] = out
            save()
            out[f"degree {degree} {method}"] = part(lambda: epoch_seconds(small, True, **options))  # noqa: B023
            note(f"degree {degree} {method}", out[f"degree {degree} {method}"])
    return out


def million(share: float) -> dict[str, Any]:
    """A million nodes of 50 neighbours, 100 features, 600,000 of them to train on: from the host's memory to epochs.

    `setup` of the second method on is without compiling what the first needed, too.
    """
    there = as_data(reddit_like(int(1e6 * share), int(5e7 * share)), width=100, train=int(6e5 * share))
    data, out = on_host(there), {}
    del there
    for method in ("graphsage", "adahop", "bs.m", "bs"):
        options = {"method": method, "arch": "plain", "half": True}
        with turn():
            out[method] = part(lambda: epoch_seconds(data, HOW[0], profile=PROFILE, warm=1, timed=3, **options))  # noqa: B023
        note(method, out[method])
        RESULT["million"] = out
        save()
    return out


def on_host(data: Any) -> Any:
    """The data as a user has them, in the host's memory."""
    host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in vars(data).items()}
    host["graph"] = data.graph.to("cpu")

    def moved(device: str) -> Any:
        there = {k: v.to(device) if isinstance(v, torch.Tensor | Graph) else v for k, v in host.items() if k != "to"}
        return SimpleNamespace(**there, to=lambda _: SimpleNamespace(**there))

    return SimpleNamespace(**{**host, "to": moved})


# --- a typed graph ---------------------------------------------------------------------------------------------------

PAPERS, AUTHORS, INSTITUTIONS, FIELDS = 736_389, 1_134_649, 8_740, 59_965
MAG = {  # as many edges as ogbn-mag has
    ("author", "affiliated with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has topic", "field"): 7_505_078,
}
MAG_WIDTH, MAG_CLASSES, MAG_TRAIN = 128, 349, 629_571


def mag_like(share: float = 1.0, seed: int = 0) -> Any:
    """Four types, four relations and their reverses, of ogbn-mag's sizes times `share`; a power law of both ends."""
    g = torch.Generator().manual_seed(seed)
    kinds = {"paper": PAPERS, "author": AUTHORS, "institution": INSTITUTIONS, "field": FIELDS}
    counts = {kind: max(int(n * share), 10) for kind, n in kinds.items()}
    edges: dict[tuple[str, str, str], torch.Tensor] = {}
    for (source, name, target), many in MAG.items():
        ends = [
            (torch.rand(max(int(many * share), 50), generator=g).pow(1.5) * counts[kind]).long()
            for kind in (source, target)
        ]
        edges[source, name, target] = torch.stack(ends)
        edges[target, f"rev {name}", source] = torch.stack(ends[::-1])
    n, papers = sum(counts.values()), counts["paper"]
    order, train = torch.randperm(papers, generator=g), int(MAG_TRAIN / PAPERS * papers)
    masks = [torch.zeros(n, dtype=torch.bool) for _ in range(3)]
    for mask, some in zip(masks, (order[:train], order[train : train + papers // 10], order[train:]), strict=True):
        mask[some] = True
    x = {kind: torch.randn(many, MAG_WIDTH, generator=g) for kind, many in counts.items()}
    graph = Graph.from_relations(counts, edges)
    data = {
        "graph": graph, "x": TypedFeatures(x, counts, graph.relations), "classes": MAG_CLASSES, "metric": "accuracy",
        "y": torch.randint(MAG_CLASSES, (n,), generator=g), "name": "mag-like",
        "train_mask": masks[0], "val_mask": masks[1], "test_mask": masks[2],
    }  # fmt: skip

    def moved(device: str) -> Any:
        there = SimpleNamespace(**{k: v.to(device) if hasattr(v, "to") else v for k, v in data.items()})
        there.to = lambda _: there
        return there

    return moved(DEV)


def counted(run: Run) -> dict[str, Any]:
    """Edges drawn in an epoch, and the slots that hold them: what lies below an empty slot is not counted."""
    edges = slots = 0
    with torch.no_grad():
        for seeds in run.loader.seeds():
            blocks = sample(run.sampler, Seeds(seeds), run.padded)
            slots += sum(b.num_edges for b in blocks)
            edges += drawn(blocks)
            run.sampler.step += 1
    return {"edges": int(edges), "slots": slots}


def drawn(blocks: list[Block]) -> torch.Tensor:
    live = torch.ones(blocks[-1].num_dst, dtype=torch.bool, device=blocks[-1].n_id.device)
    total = torch.zeros((), dtype=torch.long, device=live.device)
    for block in reversed(blocks):
        used = (block.scale > 0) & live[block.dst]
        total += used.sum()
        live = torch.cat([live, live.new_zeros(block.num_src - block.num_dst)])
        live[block.src[used]] = True
    return total


TYPED: dict[str, dict[str, Any]] = {
    "rgcn uniform": {"method": "graphsage"},
    "rgcn adahop": {"method": "adahop", "method_options": {"draw": "systematic"}},  # as "auto" is on a GPU
    "rgcn bs": {"method": "bs"},
    "rgat uniform": {"method": "graphsage", "model": "rgat"},
}


def typed(share: float, only: str = "") -> dict[str, Any]:
    """rgcn over a graph of ogbn-mag's size: hidden 64, half precision, batch 1,024, sizes 10,10 per relation."""
    data, out = mag_like(share), {}
    RESULT["typed_graph"] = f"{data.graph}, {MAG_WIDTH} features, {int(data.train_mask.sum())} training papers"
    for captured in HOW:  # eager epochs take long: they come last
        for name, options in TYPED.items():
            if only and name not in only.split(","):
                continue
            label = f"{name} {'captured' if captured else 'eager'}"
            given = {"model": "rgcn", "hidden": 64, "half": True, "arch": "plain", "device": DEV, **options}
            times = {"warm": 2, "timed": 5} if captured else {"warm": 1, "timed": 1}
            with turn():
                out[label] = part(lambda: epoch_seconds(data, captured, profile=PROFILE, **times, **given))  # noqa: B023
            if "edges" in out[label]:
                out[label]["M_edges_s"] = out[label]["edges"] / out[label]["seconds"] / 1e6
            note(label, out[label])
            RESULT["typed"] = out
            save()
    return out


# --- what it is worth ------------------------------------------------------------------------------------------------


def accuracy(folder: Path, device: str, seeds: int = 3, epochs: int = 6) -> dict[str, Any]:
    """Test scores of a few methods on real graphs: the same runs on the CPU and on the GPU."""
    out: dict[str, Any] = {}
    for path in sorted(folder.glob("*.npz")):
        data = adahop.load(str(path))
        for method, model in (("graphsage", "gcn"), ("bs", "gcn"), ("adahop", "gcn"), ("bs", "gat")):

            def go() -> dict[str, Any]:
                began = time.perf_counter()
                scores = [
                    adahop.fit(data, method=method, model=model, sizes=(5, 5), epochs=epochs, seed=s, device=device,  # noqa: B023
                               batch_size=512, noise=0.0).test for s in range(seeds)]  # fmt: skip
                return {"test": scores, "mean": statistics.fmean(scores), "seconds": time.perf_counter() - began}

            name = f"{path.stem} {model} {method} {device}"
            out[name] = part(go)
            note(name, out[name])
            RESULT["accuracy"] = out
            save()
    return out


def methods(_: Any = None) -> dict[str, Any]:
    """Every method and model, two epochs on the device."""
    from adahop.methods import METHODS

    data = adahop.load("digits")
    out: dict[str, Any] = {}
    for method, preset in METHODS.items():
        for model in ("gcn", "sage", "gat", "geniepath"):
            if model not in preset.models:
                continue
            sizes = (60, 60) if preset.family == "layer-wise" else (5, 5)
            out[f"{method} {model}"] = part(lambda: {"test": adahop.fit(
                data, method=method, model=model, sizes=sizes, epochs=4, device=DEV).test})  # noqa: B023  # fmt: skip
            note(f"{method} {model}", out[f"{method} {model}"])
            RESULT["methods"] = out
            save()
    return out


def peers(data: Dataset, rounds: int = 3) -> dict[str, Any]:
    """PyG's own model on the GPU: with a loader of ours that samples on the CPU, and full-batch, a step an epoch."""
    runners = gpu_epoch.pyg(data, 256, (10, 10), 1024, DEV)
    turns = take_turns(runners, [data.train_mask.nonzero().flatten()], rounds, 0.0, DEV)
    return {
        one.name: {"seconds": statistics.median(t.seconds for t in turns[one]), "threads": ops.get_threads()}
        for one in runners
    }


def cached(data: Dataset) -> dict[str, Any]:
    """Features in host memory: all of them, and with a share of the rows on the device."""
    out: dict[str, Any] = {}
    for share in (0.0, 0.2):
        options = {"method": "bs", "arch": "plain", "half": True, "cache": share}
        out[f"cache {share}"] = part(lambda: epoch_seconds(data, True, warm=1, timed=2, **options))  # noqa: B023
        note(f"cache {share}", out[f"cache {share}"])
        RESULT["cached"] = out
        save()
    return out


def part(f: Any) -> Any:
    try:
        return f()
    except Exception:
        return {"failed": traceback.format_exc()[-3000:]}
    finally:
        if torch.cuda.is_available():
            with contextlib.suppress(Exception):  # after a kernel that failed, every call of CUDA fails
                torch.cuda.synchronize()
                torch.cuda.empty_cache()


def note(name: str, got: Any) -> None:
    told = ("seconds", "setup", "mean", "test", "hit_rate", "captured", "edges", "said")
    print(name, {k: got[k] for k in told if k in got} or str(got)[-400:], flush=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="kernels,epochs,growth,peers,cached,methods")
    parser.add_argument("--out", default="gpu.json")
    parser.add_argument("--data", default=os.environ.get("ADAHOP_DATA", "data"))
    parser.add_argument("--device", default=DEV)
    parser.add_argument("--only", default="")
    parser.add_argument("--share", type=float, default=1.0, help="of the graphs' full size")
    parser.add_argument("--captured", action="store_true", help="no eager epochs")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args(words)
    on_gpu = given.device.startswith("cuda")
    globals().update(DEV=given.device, PROFILE=given.profile, HOW=HOW[: 2 - given.captured] if on_gpu else (False,))
    parts = given.parts.split(",")
    OUT.append(given.out)
    RESULT.update(
        command="python " + " ".join(sys.argv if words is None else [sys.argv[0], *words]),
        torch=torch.__version__, python=platform.python_version(),
        adahop=adahop.__version__, device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    if torch.cuda.is_available():
        import triton

        RESULT["triton"] = triton.__version__
    needs = {"kernels", "epochs", "growth", "peers", "cached"} & set(parts)
    data = None
    if needs:
        nodes, edges, train = (int(many * given.share) for many in (NODES, EDGES, TRAIN))
        data = as_data(reddit_like(nodes, edges), train=train)
        RESULT["graph"] = f"{data.graph.num_nodes} nodes, {data.graph.num_edges} edges, {WIDTH} features"
    todo = {
        "kernels": lambda: kernels(data.graph), "epochs": lambda: epochs(data, given.only),
        "growth": lambda: growth(data), "million": lambda: million(given.share),
        "peers": lambda: peers(data), "cached": lambda: cached(data), "methods": methods,
        "accuracy": lambda: accuracy(Path(given.data), given.device), "typed": lambda: typed(given.share, given.only),
    }  # fmt: skip
    save()
    for name in parts:
        began = time.perf_counter()
        RESULT[name] = part(todo[name])
        print(name, "took", round(time.perf_counter() - began, 1), "s", flush=True)
        save()


def save() -> None:
    Path(OUT[0]).write_text(json.dumps(RESULT, indent=1))


if __name__ == "__main__":
    main()
