"""Fingerprints of batches: two hashes per method and graph, over twenty steps with updates.

What a user draws today must be drawn tomorrow, unless a change says why not. `python tests/fingerprints.py` prints what
differs from the committed `fingerprints.json`; `--record NAME ...` writes the named entries (all without names) again.
The first hash is of whole numbers (nodes, edges), the second of floating-point ones (probabilities, scales, features):
learned odds go through sums and roots whose last bit depends on the processor's vector instructions, so the second one
is compared where it was recorded, on processors of the kind in "cpu".
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import llvmlite.binding
import torch
from torch import Tensor

import adahop
from adahop import METHODS, Graph, Loader, make
from adahop.block import Block
from adahop.messages import Reading, scores
from adahop.pyg import AdaptiveNeighborLoader
from adahop.samplers import Sampler
from adahop.samplers.loop import Numbering, Padded
from adahop_lab.bench.rmat import rmat

from conftest import messy_graph  # isort: skip

FILE = Path(__file__).with_name("fingerprints.json")
STEPS, SEEDS = 20, 48
LAYER_WISE = {"layer-wise": [40, 30], "node-wise": [3, 4], "subgraph": [3, 4]}
PYG = {
    "uniform": {"method": "graphsage"},
    "bs": {"method": "bs"},
    "tracked": {"method": "adahop", "estimator": "plain"},
    "disjoint": {"method": "bs", "disjoint": True},
    "bidirectional": {"method": "graphsage", "subgraph_type": "bidirectional"},
}


def graphs() -> dict[str, Graph]:
    """Weighted with self-loops and parallel edges; heavy-tailed; a real one as a GCN wants it."""
    return {
        "messy": messy_graph(),
        "rmat": rmat("rmat:2000,30000"),
        "digits": adahop.load("digits").graph.normalized("sym", True),
    }


def energies(blocks: list[Block], reads: Reading, step: int) -> list[Tensor]:
    """Numbers that depend on nodes and step alone, as a model's would on its weights."""
    out = []
    for block in blocks:
        size = ((block.n_id[block.src] * 7919 + step * 104729) % 1000 + 1).float() / 500
        square = (block.weight * block.scale * size).square()
        if reads is scores:  # a norm, then the scores of the two ends
            ends = (block.n_id[block.dst] % 13).float() / 13, (block.n_id[block.src] % 17).float() / 17
            square = torch.stack([size.square(), *ends], 1)
        out.append(square)
    return out


class Hash:
    """A digest of the whole numbers and one of the others, dtypes and shapes included."""

    def __init__(self) -> None:
        self.whole, self.real = hashlib.blake2b(digest_size=12), hashlib.blake2b(digest_size=12)

    def add(self, *tensors: Tensor) -> None:
        for t in tensors:
            t = t.detach().cpu().contiguous()
            to = self.real if t.is_floating_point() else self.whole
            t = t if t.is_floating_point() else t.long()
            to.update(f"{t.dtype}{tuple(t.shape)}".encode())
            to.update(t.numpy().tobytes())

    def __str__(self) -> str:
        return f"{self.whole.hexdigest()} {self.real.hexdigest()}"


def cpu() -> str:
    """The kind of processor that kernels are compiled for."""
    return f"{llvmlite.binding.get_host_cpu_name()} {torch.backends.cpu.get_cpu_capability()}"


def same(now: str, then: str | None, here: bool) -> bool:
    """Equal, the floating-point half only where it was recorded on such a processor."""
    return now == then if here or then is None else now.split()[0] == then.split()[0]


def seeds_of(graph: Graph, step: int) -> Tensor:
    n = graph.num_nodes
    return (torch.arange(SEEDS) * 31 + step * 17) % n if n > SEEDS * 4 else torch.arange(min(SEEDS, n) // 2) * 2 % n


def sampled(sampler: Sampler, numbering: Numbering | None = None) -> str:
    """Twenty steps of `sample` and `update`; parameters, where there are any, follow the penalty's gradient."""
    found, parameters = Hash(), list(sampler.parameters())
    if sampler_draws_its_own_seeds(sampler):
        parts: Iterator[Tensor] = own_seeds(sampler)
    else:
        parts = (seeds_of(sampler.graph, step) for step in range(STEPS))
    for step, seeds in enumerate(parts):
        blocks = sampler.sample(seeds.to(sampler.graph.device), numbering)
        for block in blocks:
            found.add(block.n_id, block.edge_index, block.e_id, block.prob, block.scale)
        energy = energies(blocks, sampler.reads, step)
        penalty = sampler.penalty(blocks, energy)
        if parameters and torch.is_tensor(penalty):
            for p, g in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
                p.data -= 0.01 * g
        sampler.update(blocks, energy)
    return str(found)


def sampler_draws_its_own_seeds(sampler: Sampler) -> bool:
    return type(sampler).epoch is not Sampler.epoch


def own_seeds(sampler: Sampler) -> Iterator[Tensor]:
    """Subgraph methods: the batches of an epoch, and of the next, until there are enough."""
    step = 0
    while step < STEPS:
        for seeds in sampler.epoch(torch.arange(sampler.graph.num_nodes), SEEDS):
            yield seeds
            step += 1
            if step == STEPS:
                return


def method(name: str, graph: Graph) -> str:
    options = {"features": features(graph)} if "features" in METHODS[name].needs else {}
    return sampled(make(name, graph, LAYER_WISE[METHODS[name].family], seed=5, **options))


def features(graph: Graph) -> Tensor:
    return (torch.arange(graph.num_nodes * 6).view(-1, 6) * 37 % 101).float() / 101


def loaded(graph: Graph, name: str, prefetch: int) -> str:
    """Our loader's batches of two epochs, learned from as they come."""
    found = Hash()
    sampler = make(name, graph, [3, 4], seed=5)
    data = adahop_data(graph)
    loader = Loader(data, sampler, torch.arange(0, graph.num_nodes, 2), batch_size=64, prefetch=prefetch)
    for epoch in range(2):
        for i, batch in enumerate(loader):
            found.add(batch.n_id, batch.edge_index, batch.e_id, batch.x, batch.y)
            found.add(*(t for b in batch.blocks for t in (b.prob, b.scale)))
            sampler.update(batch.blocks, energies(batch.blocks, sampler.reads, 100 * epoch + i))
            if i == 9:
                break
    return str(found)


def adahop_data(graph: Graph):
    from torch_geometric.data import Data

    y = torch.arange(graph.num_nodes) % 5
    return Data(x=features(graph), y=y, edge_index=graph.edge_index(), num_nodes=graph.num_nodes)


def pyg_loaded(graph: Graph, options: dict) -> str:
    """The PyG loader's batches of two epochs, learned from as they come."""
    found = Hash()
    data = adahop_data(graph)
    loader = AdaptiveNeighborLoader(
        data, [4, 3], input_nodes=torch.arange(0, graph.num_nodes, 2), batch_size=64, shuffle=True, seed=5, **options
    )
    for epoch in range(2):
        for i, batch in enumerate(loader):
            found.add(batch.n_id, batch.edge_index, batch.e_id, batch.scale, batch.x, batch.y)
            blocks = getattr(batch, "blocks", None)
            if blocks is not None:
                found.add(*(b.prob for b in blocks))
                loader.sampler.update(blocks, energies(blocks, loader.sampler.reads, 100 * epoch + i))
            if i == 9:
                break
    return str(found)


def entries(cuda: bool = False) -> dict[str, Callable[[], str]]:
    """Every fingerprint by name, as a function that finds it."""
    found: dict[str, Callable[[], str]] = {}
    for where, graph in graphs().items():
        if cuda:
            for how in ("multinomial", "systematic"):
                for shape in ("compact", "padded"):
                    found[f"cuda uniform {how} {shape} {where}"] = partial(on_cuda, graph, how, shape == "padded")
            continue
        for name in METHODS:
            found[f"{name} {where}"] = partial(method, name, graph)
        for name in ("graphsage", "bs", "adahop"):
            for prefetch in (0, 2):
                found[f"loader {name} prefetch {prefetch} {where}"] = partial(loaded, graph, name, prefetch)
        for name, options in PYG.items():
            found[f"pyg loader {name} {where}"] = partial(pyg_loaded, graph, options)
    return found


def on_cuda(graph: Graph, how: str, padded: bool) -> str:
    """Uniform draws on a GPU: numbered as on the CPU, or with a fixed number of slots per target."""
    sampler = make("graphsage", graph.to("cuda"), [3, 4], seed=5, draw=how).to("cuda")
    numbering = Padded.of(sampler) if padded else None
    if padded and numbering is None:
        return "no fixed shape"
    return sampled(sampler, numbering)


def kept() -> dict[str, str]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    table, changed, record = kept(), 0, words[:1] == ["--record"]
    here = table.get("cpu") == cpu()
    todo = entries(cuda=True) if "--cuda" in words else entries()
    for name, find in todo.items():
        now = find()
        if not same(now, table.get(name), here or name.startswith("cuda")):
            print(name, table.get(name), "->", now)
            changed += 1
        if record and (not set(words) - {"--record", "--cuda"} or name in words):
            table[name] = now
    if record:
        table["cpu"] = table["cpu"] if "--cuda" in words else cpu()
        FILE.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
    return int(changed > 0 and not record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
