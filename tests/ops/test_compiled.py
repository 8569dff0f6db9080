"""Every Triton kernel compiles for a GPU, as the library launches it, on a machine without one; see `launches`.

Triton's interpreter, in which the kernels are tested elsewhere, knows neither types nor what is known at compile time.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adahop import capture, ops
from adahop.config import Config
from adahop.graph import Graph
from adahop.methods import make
from adahop.ops import Odds
from adahop.run import Run, device_features
from adahop.samplers.loop import Padded
from conftest import messy_graph, toy_data
from typed_graphs import typed_data

triton = pytest.importorskip("triton")
from launches import Binary, Launch, compiled, kernels, noted, reached  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process")
MOST_SECONDS = 10.0  # to compile what a method launches, where nothing is kept from before


def steps(data: Any, model: str, method: str, **options: Any) -> None:
    """An epoch of steps as on a device, whose last batch is smaller, and what comes after it."""
    config = Config(model=model, method=method, hidden=8, sizes=(3, 2), batch_size=16, device="cpu", **options)
    torch.manual_seed(0)
    data.to = lambda device: SimpleNamespace(**{k: v for k, v in vars(data).items() if k != "to"})
    run = Run(data, config, 0)
    run.padded = Padded.of(run.sampler, bare=True, seeds=run.loader.nodes)
    if run.padded is None:
        for batch in run.loader:
            capture.train_step(run.model, run.sampler, run.optimizer, batch)
        return
    run.features = device_features(run.data.x, run.sampler, config)
    for _ in capture.DeviceSteps(run, False):
        pass
    run.renew()
    run.model.eval()
    run.model.inference(run.sampler.graph, run.data.x)


def draws(size: int) -> None:
    """What a user, or PyG's loader, draws: any odds, as many a row as it says, clipped rows, relations."""
    graph = messy_graph(size, 9 * size)
    dst, node = torch.arange(size), torch.rand(2 * size) + 0.1
    whole = graph.rows(dst)
    clipped = whole._replace(since=graph.first, until=graph.last)
    for how in ("multinomial", "systematic"):
        for odds in (Odds(), Odds(edge=torch.rand(graph.num_edges)), Odds(node=node, eta=0.1, shift=dst)):
            for rows, k in ((whole, torch.tensor([3])), (clipped, dst % 7 + size % 3)):
                ops.draw(graph.edges, rows, k, how, odds, 7 << 40)


def sums(size: int) -> None:
    """In every precision."""
    graph = messy_graph(size, 9 * size)
    src, dst = graph.indices.long(), graph.dst()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        h = torch.rand(size, 2, 8).to(dtype).requires_grad_()
        coef = torch.rand(graph.num_edges, 2, requires_grad=True)
        ops.gather_sum(h, src, dst, coef, graph.indptr)
        ops.full_sum(h.detach()[:, 0].contiguous(), graph.edges, torch.arange(size))
        ops.push(torch.zeros(size, 8, dtype=dtype), torch.arange(size), torch.rand(size, 8), ops.Scratch())
        table = torch.rand(size, 8).to(dtype)
        ops.fetch(src, table, table[:20], torch.arange(size, dtype=torch.int32) % 25 - 5)


def numbered(size: int) -> None:
    """Policies learn from blocks without slots, as PyG's loader has them."""
    for method in ("bs", "bs.m", "thanos", "thanos.m", "adahop"):
        sampler = make(method, messy_graph(size, 9 * size), [2, 3])
        blocks = sampler.sample(torch.arange(9))
        assert not any(b.slots for b in blocks)
        sampler.update(blocks, [torch.rand(b.num_edges) for b in blocks])


def dataset(size: int) -> Any:
    return toy_data(nodes=size, seed=size)


CASES: dict[str, Callable[[int], None]] = {
    **{f"{model} {method}": lambda n, model=model, method=method: steps(dataset(n), model, method)
       for model in ("gcn", "sage", "gat") for method in ("graphsage", "bs", "bs.m", "adahop", "s-gcn")},
    **{f"{model} {method}": lambda n, model=model, method=method: steps(typed_data(seed=n), model, method)
       for model, method in (("rgcn", "graphsage"), ("rgcn", "bs"), ("rgcn", "adahop"), ("rgat", "bs"))},
    "gcn thanos": lambda n: steps(dataset(n), "gcn", "thanos"),
    "gatv2 adahop": lambda n: steps(dataset(n), "gatv2", "adahop"),
    "gcn bliss": lambda n: steps(dataset(n), "gcn", "bliss"),
    "half": lambda n: steps(dataset(n), "gcn", "bs", half=True, dropout=0.1),
    "half attention": lambda n: steps(dataset(n), "gat", "bs", half=True, dropout=0.1),
    "cache": lambda n: steps(dataset(n), "gcn", "bs", cache=0.3),
    "printed step": lambda n: steps(dataset(n), "gcn", "bs", method_options={"step": "paper"}),
    "draws": draws, "sums": sums, "numbered": numbered,
}  # fmt: skip


@pytest.fixture(scope="module")
def launches() -> dict[str, dict[tuple[str, str], Launch]]:
    """What each case launches, and then once more with a graph of another size."""
    out: dict[str, dict[tuple[str, str], Launch]] = {}
    for name, case in CASES.items():
        with noted() as found:
            case(60)
            out[name] = dict(found)
            case(97)
            out[f"{name}, again"] = {k: v for k, v in found.items() if k not in out[name]}
    return out


@pytest.fixture(scope="module")
def binaries(launches, tmp_path_factory) -> dict[tuple[str, str], Binary]:
    """Compiled, each once, with nothing kept from before."""
    every = {key: launch for case in launches.values() for key, launch in case.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        return {key: compiled(launch) for key, launch in every.items()}


def test_every_kernel_is_launched(launches):
    launched = {launch.kernel.__name__: launch.kernel for case in launches.values() for launch in case.values()}
    assert reached(list(launched.values())) == set(kernels())


@pytest.mark.parametrize("case", CASES)
def test_a_second_graph_compiles_nothing(launches, case):
    assert launches[case]
    assert not launches[f"{case}, again"]


@pytest.mark.parametrize("method", ["bs", "thanos"])
def test_a_row_with_very_many_draws_is_left_to_the_reference(method):
    """A kernel compares all of a row's draws with each other, where some are of one place."""
    graph = Graph.from_edge_index([list(range(1, 2001)), [0] * 2000])
    sampler = make(method, graph, [1500], draw="multinomial", seed=1)
    with noted() as found:
        (block,) = sampler.sample(torch.tensor([0]))
        sampler.update([block], [torch.rand(1500)])
    assert block.pos.unique().numel() < 1500 and not {"exp3", "grow"} & {name for name, _ in found}
    assert bool((sampler.policy.arms.weight != 1).any())


def test_a_number_has_one_type(launches):
    """One that is sometimes whole and sometimes not would be two kernels, and whole divisions in one of them."""
    types: dict[tuple[str, str], set[str]] = {}
    for case in launches.values():
        for launch in case.values():
            for name, kind in launch.signature.items():
                if not kind.startswith("*") and kind != "constexpr":
                    types.setdefault((launch.name, name), set()).add(kind)
    assert len(types) > 20 and not {k: v for k, v in types.items() if len(v) > 1}


def test_kernels_compile(binaries):
    for binary in binaries.values():
        assert "cubin" in binary.compiled.asm, binary.launch.name


def usage(binary: Binary, folder: Path) -> dict[str, int]:
    """Registers and bytes of stack that a thread has, as CUDA's own tool reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("cuobjdump is not there")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.compiled.asm["cubin"])
    told = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", told.stdout + told.stderr))
    return {name: int(n) for name, n in found.items()}


def test_registers_hold_what_kernels_compute(binaries, tmp_path):
    """A few words of a thread at most lie in memory, and shared memory leaves room for many programs at a time."""
    for binary in binaries.values():
        used = usage(binary, tmp_path)
        assert used["STACK"] <= (128 if binary.launch.name == "subset" else 16), (binary.launch, used)
        assert binary.compiled.metadata.shared <= 16 << 10, binary.launch


def test_a_method_is_compiled_within_seconds(launches, binaries):
    for name in CASES:
        assert sum(binaries[key].seconds for key in launches[name]) < MOST_SECONDS, name
