"""Bad input, and nothing else: every public function, every flag, files, disks and folders. One sentence each.

Every parameter of every public function meets every value of `JUNK`: it is taken, or an InputError says what must
hold. A public name without a call in `calls()` fails `test_every_public_name_is_here`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import typer
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import adahop
from adahop import Graph, Loader, cli, diagnostics, draws, models, policies, pyg, samplers
from adahop.checkpoint import Checkpoints, read
from adahop.checks import InputError
from adahop.config import Config
from adahop.convert import convert
from adahop.features import Schema
from adahop.history import History
from adahop.methods import METHODS, parameters
from adahop.policies import POLICIES
from adahop.records import Records
from conftest import toy_data

TESTS = Path(__file__).parent
PROGRAM = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from adahop.cli import main; main()",
]
SMALL = ["--dataset", "synthetic:60,300,4,2", "--sizes", "2,2", "--hidden", "4", "--epochs", "1", "--batch-size", "32"]


class Thing:
    pass


JUNK = {
    "None": None, "True": True, "a word": "x", "nothing": "", "-1": -1, "0": 0, "1.5": 1.5, "nan": math.nan,
    "inf": math.inf, "huge": 10**30, "an object": Thing(), "[]": [], "{}": {}, "[[1]]": [[1]], "[nan]": [math.nan],
    "[-1]": [-1], "words": np.array(["a"]), "a float tensor": torch.tensor([1.5]), "3-d": torch.zeros(2, 2, 2),
    "bytes": b"x", "complex": torch.tensor([1j]), "7s": torch.full((3, 3), 7), "repeated": [0, 0],
    "meta": torch.zeros(2, dtype=torch.long, device="meta"), "sparse": torch.eye(2).to_sparse(),
    "a device": torch.device("cpu"), "large": [10**12] * 2,
}  # fmt: skip
Call = tuple[Callable[..., Any], dict[str, Any]]


def gcn() -> models.GNN:
    return models.make("gcn", 8, 4, 3)


def registered(**given: Any) -> None:
    before = dict(METHODS), dict(POLICIES)
    try:
        adahop.register(**given)
    finally:
        for known, kept in zip((METHODS, POLICIES), before, strict=True):
            known.clear()
            known.update(kept)


SCHEMA = Schema({"a": 2, "b": 3}, {"a": 4, "b": 0}, (("a", "to", "b"),))


def calls(tmp_path: Path) -> dict[str, Call]:
    """A call that is right (or at least of the right kinds) for every public function, by its name."""
    data = toy_data(60)
    graph = data.graph
    whole = graph.normalized("row", True)
    plain = Data(x=data.x, y=data.y, edge_index=graph.edge_index())
    sampler, model = adahop.make("bs", graph, [2, 2]), gcn()
    blocks = sampler.sample([0, 1])
    energy = [torch.ones(b.num_edges) for b in blocks]
    loader = {
        "data": plain, "num_neighbors": [2, 2], "input_nodes": None, "batch_size": 30, "shuffle": False,
        "drop_last": False, "method": "bs.m", "seed": 0, "prefetch": 0, "replace": None, "disjoint": False,
        "subgraph_type": "directional", "directed": True, "weight_attr": None, "transform": None, "sampler": None,
        "estimator": None, "transform_sampler_output": None, "batch_sampler": None, "neighbor_sampler": None,
        "input_id": None, "generator": None, "pin_memory": False, "filter_per_worker": None,
    }  # fmt: skip
    measured = {"nodes": [0, 1], "repeats": 2, "seed": 0, "against": ("uniform",), "gradient": False}
    return {
        "Graph.from_csr": (Graph.from_csr, {"indptr": [0, 1, 2], "indices": [1, 0], "weight": None, "edge_attr": None}),
        "Graph.from_edge_index": (
            Graph.from_edge_index,
            {"edge_index": [[0, 1], [1, 0]], "weight": None, "num_nodes": 2, "edge_attr": None}),
        "Graph.from_scipy": (Graph.from_scipy, {"matrix": sp.eye(3, format="csr")}),
        "Graph.from_data": (Graph.from_data, {"data": plain, "edge_attr": True}),
        "Graph.from_relations": (Graph.from_relations, {
            "num_nodes": {"a": 2, "b": 3}, "edge_index": {("a", "to", "b"): [[0, 1], [2, 0]]}, "weight": None,
            "edge_attr": None}),
        "Graph.ids": (graph.ids, {"values": [0, 1]}),
        "Graph.load": (Graph.load, {"path": str(tmp_path / "nowhere.npz")}),
        "Graph.normalized": (graph.normalized, {"kind": "row", "self_loops": True}),
        "Graph.to": (graph.to, {"device": "cpu"}),
        "load": (adahop.load, {"name_or_path": "synthetic:30,90,4,2", "root": None, "features": "auto"}),
        "make": (adahop.make, {"method": "bs", "graph": graph, "sizes": [2], "seed": 0}),
        "register": (registered, {
            "name": "own", "kind": policies.Policy, "family": "node-wise", "unbiased": True, "state": "none"}),
        "models.make": (models.make, {
            "name": "gcn", "inputs": 4, "hidden": 4, "outputs": 2, "layers": 2, "arch": "plain", "dropout": 0.1,
            "activation": None, "norm": "row"}),
        "models.GAT": (lambda **k: models.GAT(4, 4, 2, **k), {"heads": 1, "score": "relu", "attention": "paper"}),
        "models.GATv2": (lambda **k: models.GATv2(4, 4, 2, **k), {"heads": 1, "attention": "paper"}),
        "models.GeniePath": (lambda **k: models.GeniePath(4, 4, 2, **k), {"attention": "paper", "layers": 1}),
        "models.RGCN": (lambda **k: models.RGCN(hidden=4, outputs=2, **k), {
            "inputs": SCHEMA, "conv": "gcn", "bases": 0, "layers": 2}),
        "models.RGAT": (lambda **k: models.RGAT(hidden=4, outputs=2, **k), {"inputs": SCHEMA, "heads": 1}),
        "models.HGT": (lambda **k: models.HGT(hidden=4, outputs=2, **k), {"inputs": SCHEMA, "heads": 2}),
        "models.GNN.inference": (lambda **k: gcn().inference(**k), {"graph": whole, "x": data.x, "edges": 0}),
        "models.GNN.remember": (
            lambda **k: gcn().remember(**k), {"estimator": "exact", "graph": whole, "x": data.x}),
        "Loader": (lambda **k: list(Loader(**k)), {
            "data": data, "sampler": adahop.make("bs", graph, [2]), "nodes": None, "batch_size": 30, "shuffle": True,
            "prefetch": 0}),
        "Loader.load_state_dict": (
            Loader(data, sampler).load_state_dict, {"state": {"taken": 0, "ahead": [], "pending": []}}),
        "fit": (adahop.fit, {
            "data": data, "config": None, "seed": 0, "on_epoch": None, "on_step": None, "probe": None,
            "checkpoint": None, "epochs": 1, "sizes": (2,), "hidden": 4, "device": "cpu", "state": None, "tf32": True,
            "half": False, "capture": None, "partition": None, "cache": None, "model_options": {"norm": "row"}}),
        "Config": (Config, {f: getattr(Config(), f) for f in Config.__dataclass_fields__}),
        "Checkpoints": (Checkpoints, {"folder": str(tmp_path), "every": 1, "name": "run", "say": None}),
        "draws.draw": (draws.draw, {
            "method": "systematic", "weight": [1.0, 2.0, 3.0], "ptr": [0, 3], "k": 2, "seed": 0, "eta": 0.1}),
        "draws.inclusion": (draws.inclusion, {"weight": [1.0, 2.0, 3.0], "ptr": [0, 3], "k": 2, "eta": 0.1}),
        "History": (History, {"num_nodes": 3, "width": 2, "dtype": torch.float32}),
        "watch": (lambda **k: adahop.watch(**k).__enter__(), {"model": gcn(), "reads": adahop.messages.energy}),
        "convert": (convert, {
            "source": str(tmp_path / "nowhere"), "out": str(tmp_path / "o.npz"), "split": None, "seed": 0,
            "ids": "numbers", "undirected": False, "name": None, "mmap": False}),
        "inference": (pyg.inference, {
            "model": GraphSAGE(8, 4, 2, 3), "data": plain, "batch_size": 8, "device": None}),
        "pyg.AdaptiveNeighborLoader": (lambda **k: list(pyg.AdaptiveNeighborLoader(**k)), loader),
        "pyg.AdaptiveNeighborLoader.load_state_dict": (
            pyg.AdaptiveNeighborLoader(plain, [2]).load_state_dict,
            {"state": pyg.AdaptiveNeighborLoader(plain, [2]).state_dict()}),
        "pyg.AdaptiveSampler": (pyg.AdaptiveSampler, {
            "data": plain, "num_neighbors": [2, 2], "method": "bs", "seed": None, "generator": None, "estimator": None,
            "sampler": None}),
        "pyg.AdaptiveSampler.load_state_dict": (
            pyg.AdaptiveSampler(plain, [2]).load_state_dict, {"state": pyg.AdaptiveSampler(plain, [2]).state_dict()}),
        "diagnostics.variance": (diagnostics.variance, {
            "model": model, "sampler": adahop.make("bs", whole, [2, 2]), "data": data, "graph": None, **measured}),
        "diagnostics.Probe": (diagnostics.Probe, {"data": data, "every": 1, "at": (), "nodes": 3, **measured}),
        "samplers.Sampler.sample": (sampler.sample, {"seeds": [0, 1]}),
        "samplers.Sampler.epoch": (
            lambda **k: list(sampler.epoch(**k)), {"nodes": [0, 1, 2], "batch_size": 2, "shuffle": True}),
        "samplers.Sampler.update": (sampler.update, {"blocks": blocks, "energy": energy}),
        **{f"make {name}": _options(name, graph) for name in METHODS},
        **{f"policy {name}": _policy(name, graph) for name in POLICIES},
    }  # fmt: skip


def _defaults(f: Any, *hidden: str) -> dict[str, Any]:
    known = parameters(f).items()
    return {k: p.default for k, p in known if p.default is not p.empty and k not in hidden}


def _options(name: str, graph: Graph) -> Call:
    def build(**options: Any) -> Any:
        return adahop.make(name, graph, [2], **options)

    return build, _defaults(METHODS[name].build, "seed")


def _policy(name: str, graph: Graph) -> Call:
    def build(**options: Any) -> Any:
        return adahop.make("graphsage", graph, [2], policy=name, **options)

    return build, _defaults(POLICIES[name].__init__)


# public names that take nothing from a user, or what is checked where they are made
EXEMPT = {
    "METHODS", "Block", "InputError", "models", "pyg", "Graph", "pyg.inference", "pyg.CSVLog", "pyg.TensorBoardLog",
    "pyg.callback", "pyg.scale_messages", "pyg.scaled", "pyg.stats", "pyg.unscale_messages", "models.MODELS",
    "models.GCN", "models.SAGE",
    "models.GNN", "models.Conv", "models.GCNConv", "models.SAGEConv", "models.GATConv", "models.GATv2Conv",
    "models.BreadthConv", "models.TypedGNN", "Graph.of_relation", "Graph.relations", "Graph.to_data",
    "Graph.degree", "Graph.dst", "Graph.edge_index", "Graph.edge_weight", "Graph.hash", "Graph.device",
    "Graph.num_edges", "Graph.num_nodes", "Graph.row", "Graph.rows", "Graph.num_rows", "Graph.num_sources",
    "Graph.prefetch", "Graph.sources_of", "Graph.at", "Graph.begin", "Graph.in_edges", "Graph.in_edges_within",
    "Graph.attr", "Graph.attr_sums",
    "Graph.with_edge_features", "Graph.without_edge_features", "Graph.relative",
    "Graph.edges", "Graph.last", "Graph.replace", "Graph.shift", "Loader.batch", "Loader.seeds", "Loader.seeds_of",
    "Loader.sample", "Loader.view", "Loader.pack", "Loader.unpack", "Loader.state_dict",
    "diagnostics.Measured",
    "diagnostics.Truth", "diagnostics.check", "diagnostics.gradient_variance", "diagnostics.measure",
    "diagnostics.probe_nodes",
}  # fmt: skip


def public() -> set[str]:
    """Every name a user can import by the documented doors."""
    names = set(adahop.__all__)
    for room in (pyg, models, diagnostics):
        names |= {f"{room.__name__.rpartition('.')[2]}.{name}" for name in room.__all__}
    for kind in (Graph, Loader):
        names |= {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}
    names |= {f"draws.{n}" for n, f in vars(draws).items() if inspect.isfunction(f) and f.__module__ == draws.__name__
              and not n.startswith("_")}  # fmt: skip
    return names


def test_every_public_name_is_here(tmp_path):
    known = set(calls(tmp_path)) | EXEMPT
    assert not public() - known, "a public name must have a call in `calls()`, or a reason in `EXEMPT`"
    assert {f"policy {name}" for name in POLICIES} | {f"make {name}" for name in METHODS} <= known
    assert set(samplers.__all__) and set(policies.__all__)


NAMES = sorted(calls(Path("x")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_value_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a word may be taken for a folder
    call, right = calls(tmp_path)[name]
    for parameter in right:
        for what, junk in JUNK.items():
            try:
                call(**{**right, parameter: junk})
            except InputError as e:
                said = str(e)
                assert "must" in said or "needs" in said, f"{parameter}={what}: {said}"
                assert len(said.splitlines()) == 1, f"{parameter}={what}: {said}"
            except Exception as e:
                pytest.fail(f"{name}({parameter}={what}) ended in {type(e).__name__}: {e}")


def test_what_belongs_elsewhere_is_said():
    data = toy_data(60)
    own, other = adahop.make("bs", data.graph, [2, 2]), adahop.make("bs", data.graph, [2])
    for call, sentence in {
        lambda: adahop.fit(data, heads=2): "`heads` must be given as model_options",
        lambda: adahop.fit(data, eta=0.2): "`eta` must be given as method_options",
        lambda: adahop.fit(data, partition="metis"): "`partition` must be None for a whole data set",
        lambda: Config(model_options={"layers": 3}): "`model_options` must be without layers, which `sizes` decides",
        lambda: Config(half="x"): "`half` must be true or false",
        lambda: own.load_state_dict(other.state_dict()): "`state_dict` must be that of a sampler with this method",
        lambda: own.load_state_dict({}): "`state_dict` must be that of a sampler with this method",
        lambda: own.sample(data.train_mask.byte()): "a mask for `seeds` must be of bool, got uint8",
        lambda: gcn()(data.x): "`batch` must have blocks, got Tensor",
    }.items():
        with pytest.raises(InputError, match=sentence):
            call()
    assert Config(device=torch.device("cpu"), state=Path("scratch")).as_dict()["state"] == "scratch"


# --- the command line ------------------------------------------------------------------------------------------------

WORDS = ["", "x", "-7", "nan", "inf", "None"]
RIGHT = {
    "train": SMALL,
    "compare": [*SMALL, "--methods", "graphsage", "--runs", "1"],
    "variance": [*SMALL, "--methods", "graphsage", "--repeats", "1", "--nodes", "4"],
    "advise": ["--dataset", "synthetic:60,300,4,2", "--minutes", "0.001"],
    "convert": ["nowhere.csv", "--out", "o.npz"],
    "bench sampling": [
        "--graph",
        "star:100",
        "--sizes",
        "3",
        "--batch-size",
        "32",
        "--rounds",
        "1",
        "--seconds",
        "0",
        "--methods",
        "graphsage",
        "--peers",
        "none",
    ],
    "bench epoch": [
        "--graph",
        "rmat:200,1000",
        "--sizes",
        "3,3",
        "--batch-size",
        "64",
        "--rounds",
        "1",
        "--hidden",
        "4",
        "--methods",
        "graphsage",
        "--peers",
        "none",
    ],
    "bench degrees": [
        "--graph",
        "rmat:200,1000",
        "--degrees",
        "4",
        "--size",
        "3",
        "--batch-size",
        "32",
        "--rounds",
        "1",
        "--seconds",
        "0",
        "--methods",
        "graphsage",
    ],
    "partition": ["synthetic:60,300,4,2", "--out", "parts", "--how", "range"],
    "report": ["nowhere"],
    "reproduce": ["all", "--cells", "nowhere"],
    "list": [],
}


# these measure in processes of their own, too slow for two hundred of them; see test_bench.py
ELSEWHERE = {"bench inference", "bench setup"}


def flags() -> list[tuple[str, str]]:
    importlib.import_module("adahop.cli.train")
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    commands = typer.main.get_command(cli.build()).commands  # type: ignore[attr-defined]
    groups = {name: getattr(c, "commands", {"": c}) for name, c in commands.items()}
    flat = {f"{name} {below}".strip(): c for name, found in groups.items() for below, c in found.items()}
    taken = [(name, p) for name, c in flat.items() if name not in ELSEWHERE for p in c.params if hasattr(p, "is_flag")]
    return [(name, max(p.opts, key=len)) for name, p in taken if not p.is_flag and p.name != "help"]


@pytest.mark.parametrize("command, flag", flags())
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_flag_is_one_sentence(command, flag, tmp_path, monkeypatch, capsys):
    assert command in RIGHT, "a new command must have a call in `RIGHT`"
    monkeypatch.chdir(tmp_path)
    for word in WORDS:
        with pytest.raises(SystemExit) as left:
            cli.main([*command.split(), *RIGHT[command], flag, word])
        out, err = capsys.readouterr()
        assert left.value.code in (0, 1, 2) and "Traceback" not in out + err, f"{flag} {word!r}"
        if left.value.code == 2:
            said = err.strip().splitlines()
            assert said[-1].startswith("adahop: "), f"{flag} {word!r}: {err}"


# --- disks, folders, signals -----------------------------------------------------------------------------------------

small_files = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes past the limit fail like those on a full disk
from adahop.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
main()
"""


@pytest.mark.parametrize("limit", [0, 200, 3000])
def test_a_full_disk(tmp_path, limit):
    """The config, then the rows, then a checkpoint do not fit: one sentence, and no part of a file."""
    args = [sys.executable, "-c", small_files.format(limit), "train", *SMALL, "--epochs", "30", "--out", str(tmp_path)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(r"adahop: .* must be writable, got File too large", done.stderr.splitlines()[-1])
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not [p for p in left if p.name.endswith(".part")]
    for path in left:
        if path.suffix == ".jsonl":
            assert all(line.endswith("}") for line in path.read_text().splitlines())
        if path.suffix == ".ckpt":
            read(path)


def test_dev_full(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match="must be writable, got No space left on device"):
        Records(tmp_path).row("metrics.jsonl", {"a": 1})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="must be a folder that can be written"):
        adahop.fit(toy_data(40), epochs=1, sizes=(2,), checkpoint=tmp_path / "a")


def test_a_file_where_a_folder_must_be(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(InputError, match=r"must be a folder that can be written, got .*a.b"):
        adahop.fit(toy_data(40), epochs=1, sizes=(2,), checkpoint=tmp_path / "a" / "b")


def test_ctrl_c_leaves_a_run_that_can_go_on(tmp_path):
    args = [*PROGRAM, "train", *SMALL, "--epochs", "100000", "--out", str(tmp_path), "--checkpoint-every", "1"]
    with subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        until = time.monotonic() + 200
        while not list(tmp_path.glob("checkpoints/*.ckpt")) and time.monotonic() < until and program.poll() is None:
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        out, err = (text.decode() for text in program.communicate(timeout=200))
    assert program.returncode == 130 and "Traceback" not in out + err
    assert err.splitlines()[-1] == f"adahop: interrupted; `adahop train --resume {tmp_path}` continues it"
    files = sorted((tmp_path / "checkpoints").iterdir())
    assert files and all(read(p) for p in files)


# --- what breaks elsewhere -------------------------------------------------------------------------------------------

# areas where libraries of this kind were seen to break, and the test that holds ours to it
ROWS = {
    "uniformity": "test_draws.py::test_every_subset_is_as_likely",
    "uniformity of hubs": "test_draws.py::test_no_block_of_a_hub_comes_more_often",
    "inclusion probability": "test_draws.py::test_marginals_and_sizes",
    "zero weights": "test_draws.py::test_zero_weights_never_come",
    "nan, infinite, negative weights": "test_graph.py::test_refusals_name_the_place",
    "skew": "test_policies.py::test_a_million_updates_of_the_largest_reward",
    "bad ids": "test_conformance.py::test_bad_seeds",
    "isolated nodes, empty or repeated seeds": "test_conformance.py::test_isolated_empty_and_repeated_seeds",
    "no edges, one node": "test_conformance.py::test_graphs_without_edges",
    "multi-edges": "test_neighbor.py::test_parallel_edges_are_arms_of_their_own",
    "self-loops": "test_graph.py::test_one_node_with_parallel_self_loops",
    "edge ids": "test_graph.py::test_e_id_points_into_the_users_list",
    "seeds first": "test_conformance.py::test_blocks",
    "determinism of threads": "test_conformance.py::test_thread_counts_do_not_matter",
    "determinism of processes": "test_conformance.py::test_a_fresh_process_draws_the_same",
    "learning and prefetch": "test_loader.py::test_two_runs_of_a_learning_method_are_equal",
    "evaluation never updates": "test_train.py::test_training_teaches_and_evaluation_does_not",
    "independent runs": "test_train.py::test_equal_seeds_give_equal_runs_alone_or_after_others",
    "resume": "test_checkpoint.py::test_a_stopped_run_ends_as_one_that_was_not",
    "truncated or changed files": "test_fuzz.py::test_a_damaged_file_is_one_sentence",
    "caches keyed by content": "test_subgraph.py::test_the_cache_is_keyed_by_content_and_survives_damage",
    "int32": "test_graph.py::test_int64_indices_draw_the_same",
    "memory": "test_memory_use.py::test_resident_size_is_flat",
    "METIS": "test_subgraph.py::test_metis_on_directed_disconnected_isolated_graphs",
    "SAINT norms": "test_subgraph.py::test_norms_are_right_on_average",
    "layer-wise inference": "test_models.py::test_inference_equals_forward_on_full_blocks",
}


@pytest.mark.parametrize("area", ROWS)
def test_every_area_has_its_test(area):
    file, _, name = ROWS[area].partition("::")
    tree = ast.parse(next(TESTS.rglob(file)).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
