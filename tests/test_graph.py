"""Graph: its doors, its ids, its normalisation."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData

from adahop.checks import IdError, InputError, KindError
from adahop.graph import Graph
from adahop.samplers import NeighborSampler
from conftest import messy_edges, messy_graph, same_blocks


def dense(graph: Graph) -> torch.Tensor:
    """A[i, j] = total weight of the edges j -> i, float64."""
    a = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.double)
    return a.index_put_((graph.dst(), graph.indices.long()), graph.edge_weight().double(), accumulate=True)


def check_layout(graph: Graph) -> None:
    """Grouped by target, self-loops first in each segment, `first` right behind them."""
    assert graph.indptr[0] == 0 and graph.indptr[-1] == graph.num_edges
    loop = graph.indices.long() == graph.dst()
    place = torch.arange(graph.num_edges)
    assert torch.equal(loop, place < graph.first[graph.dst()])
    if graph.eid is not None:
        assert torch.equal(graph.eid.long().sort().values, place)


# --- the doors -----------------------------------------------------------------------------------------------------


def test_edge_list_keeps_the_users_order():
    edge_index, weight = messy_edges()
    g = Graph.from_edge_index(edge_index, weight, num_nodes=60)
    check_layout(g)
    assert g.num_nodes == 60 and g.num_edges == 900
    assert torch.equal(g.edge_index(), edge_index)
    assert torch.equal(g.edge_weight(), weight[g.eid.long()])
    a = torch.zeros(60, 60, dtype=torch.double)
    a.index_put_((edge_index[1], edge_index[0]), weight.double(), accumulate=True)
    assert torch.allclose(dense(g), a)
    assert torch.equal(g.degree(), torch.bincount(edge_index[1], minlength=60))


def test_sorted_input_needs_no_map():
    g = Graph.from_edge_index([[1, 2, 2, 0], [0, 0, 1, 2]])
    assert g.eid is None
    assert g.edge_index().tolist() == [[1, 2, 2, 0], [0, 0, 1, 2]]


def test_csr_rows_are_targets_and_loops_move_first():
    g = Graph.from_csr([0, 3, 3, 4], [1, 0, 2, 1], [0.1, 0.2, 0.3, 0.4])
    check_layout(g)
    assert g.indices.tolist() == [0, 1, 2, 1] and g.first.tolist() == [1, 3, 3]
    assert g.eid.tolist() == [1, 0, 2, 3]
    assert torch.allclose(g.edge_weight(), torch.tensor([0.2, 0.1, 0.3, 0.4]))
    assert g.edge_index().tolist() == [[1, 0, 2, 1], [0, 0, 0, 2]]


def test_scipy_product_is_the_full_sum():
    a = scipy.sparse.random(30, 30, 0.2, format="coo", random_state=0)
    g = Graph.from_scipy(a)
    assert np.allclose(dense(g).numpy(), a.toarray(), atol=1e-7)
    assert np.allclose(dense(Graph.from_scipy(scipy.sparse.csc_array(a))).numpy(), a.toarray(), atol=1e-7)


def test_pyg_data_with_and_without_weights():
    edge_index, weight = messy_edges()
    plain = Graph.from_data(Data(edge_index=edge_index, num_nodes=61))
    assert plain.num_nodes == 61 and plain.weight is None and torch.equal(plain.edge_index(), edge_index)
    weighted = Graph.from_data(Data(edge_index=edge_index, edge_weight=weight, x=torch.zeros(60, 1)))
    assert weighted.hash() == messy_graph().hash()


def test_npz_file(tmp_path):
    path = tmp_path / "g.npz"
    np.savez(path, indptr=[0, 2, 3], indices=[1, 1, 0], weight=[1.0, 2.0, 3.0])
    g = Graph.load(path)
    assert g.hash() == Graph.from_csr([0, 2, 3], [1, 1, 0], [1.0, 2.0, 3.0]).hash()
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match="readable"):
        Graph.load(path)
    with pytest.raises(InputError, match="existing"):
        Graph.load(tmp_path / "none.npz")
    np.savez(tmp_path / "half.npz", indptr=[0, 0])
    with pytest.raises(InputError, match="indptr and indices"):
        Graph.load(tmp_path / "half.npz")


def test_ids_are_small_where_they_fit():
    g = messy_graph()
    assert g.indices.dtype == torch.int32 and g.eid.dtype == torch.int32
    assert g.indptr.dtype == torch.int64 and g.first.dtype == torch.int64
    for dtype in (np.int32, np.int64, np.uint8, np.uint32):
        assert Graph.from_edge_index(np.array([[1, 2], [0, 0]], dtype=dtype)).indices.tolist() == [1, 2]


# --- small and odd graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [0, 1, 7])
def test_no_edges(nodes):
    for g in (
        Graph.from_edge_index(torch.empty(2, 0), num_nodes=nodes),
        Graph.from_csr(torch.zeros(nodes + 1, dtype=torch.long), []),
        Graph.from_edge_index([[], []], weight=[], num_nodes=nodes),
    ):
        assert (g.num_nodes, g.num_edges) == (nodes, 0)
        assert g.edge_index().shape == (2, 0) and g.degree().tolist() == [0] * nodes
        with_loops = g.normalized("row")
        assert torch.equal(dense(with_loops), torch.eye(nodes, dtype=torch.double))
        assert with_loops.edge_index().tolist() == [list(range(nodes))] * 2


def test_one_node_with_parallel_self_loops():
    g = Graph.from_edge_index([[0, 0], [0, 0]])
    assert g.num_nodes == 1 and g.first.tolist() == [2]
    assert torch.allclose(g.normalized("row").edge_weight(), torch.full((3,), 1 / 3))


def test_parallel_edges_are_separate():
    g = Graph.from_edge_index([[1, 1, 1], [0, 0, 0]], weight=[1.0, 2.0, 3.0])
    block = NeighborSampler(g, [-1]).sample([0])[0]
    assert block.e_id.tolist() == [0, 1, 2] and block.weight.tolist() == [1.0, 2.0, 3.0]
    assert block.num_src == 2


# --- edge ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [False, True])
def test_e_id_points_into_the_users_list(graph, normalise):
    edge_index, weight = messy_edges()
    g = graph.normalized("row") if normalise else graph
    block = NeighborSampler(g, [4]).sample(torch.arange(60))[0]
    ours = block.n_id[block.edge_index]
    assert torch.equal(g.edge_index()[:, block.e_id], ours)
    own = block.e_id >= 900
    assert torch.equal(edge_index[:, block.e_id[~own]], ours[:, ~own])
    assert int(own.sum()) == (60 if normalise else 0)
    assert torch.equal(block.e_id[own] - 900, ours[0, own]) and torch.equal(ours[0, own], ours[1, own])
    if not normalise:
        assert torch.equal(block.weight, weight[block.e_id])
        assert torch.equal(g.weight[block.pos], weight[block.e_id])


# --- normalisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", [None, "row", "sym"])
@pytest.mark.parametrize("weighted", [False, True])
def test_normalised_against_dense(kind, loops, weighted):
    edge_index, weight = messy_edges()
    g = Graph.from_edge_index(edge_index, weight if weighted else None, num_nodes=60)
    a = dense(g) + (torch.eye(60, dtype=torch.double) if loops else 0)
    total = a.sum(1)
    safe = torch.where(total > 0, total, 1.0)
    if kind == "row":
        a = a / safe[:, None]
    elif kind == "sym":
        root = torch.where(total > 0, safe.rsqrt(), 0.0)
        a = root[:, None] * a * root[None]
    n = g.normalized(kind, self_loops=loops)
    check_layout(n)
    assert torch.allclose(dense(n), a, atol=1e-6)
    assert torch.equal(n.edge_index()[:, :900], edge_index)
    assert n.num_edges == 900 + 60 * loops
    assert g.hash() == messy_graph_hash(weighted)  # the old graph is left as it was


def messy_graph_hash(weighted: bool) -> str:
    edge_index, weight = messy_edges()
    return Graph.from_edge_index(edge_index, weight if weighted else None, num_nodes=60).hash()


def test_unknown_kind():
    with pytest.raises(InputError, match="did you mean 'row'"):
        messy_graph().normalized("rows")


# --- identity and moves --------------------------------------------------------------------------------------------


def test_hash_tells_content():
    g = messy_graph()
    assert g.hash() == messy_graph().hash() and len(g.hash()) == 32
    edge_index, weight = messy_edges()
    weight[5] += 0.5
    others = [
        Graph.from_edge_index(edge_index, weight, num_nodes=60),
        Graph.from_edge_index(edge_index, num_nodes=60),
        Graph.from_edge_index(edge_index.flip(0), weight, num_nodes=60),
        Graph.from_edge_index(edge_index, messy_edges()[1], num_nodes=61),
        g.normalized("row"),
    ]
    assert len({g.hash(), *(o.hash() for o in others)}) == 6


def test_to_keeps_everything():
    g = messy_graph()
    moved = g.to("cpu")
    assert moved.hash() == g.hash()
    plain = Graph.from_edge_index([[1], [0]])
    assert plain.to("cpu").weight is None and plain.to("cpu").eid is None
    assert "num_nodes=60" in repr(g)


def test_int64_indices_draw_the_same():
    g = messy_graph()
    wide = Graph(g.indptr, g.indices.long(), g.weight, g.eid.long(), g.first)
    a, b = NeighborSampler(g, [3, 3]).sample([1, 2, 3]), NeighborSampler(wide, [3, 3]).sample([1, 2, 3])
    assert same_blocks(a, b)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Graph.from_csr([], []), "`indptr` must start with 0"),
        (lambda: Graph.from_csr([1, 2], [0, 0]), r"`indptr` must start with 0, got \[1\]"),
        (lambda: Graph.from_csr([0, 2, 1], [0]), r"indptr\[2\] = 1 after 2"),
        (lambda: Graph.from_csr([0, 1], [0, 0]), "number of edges, 2, got 1"),
        (lambda: Graph.from_csr([0, 2], [0, 1]), r"\[0, 1\), got indices\[1\] = 1"),
        (lambda: Graph.from_csr([0, 1], [0], [1.0, 2.0]), "one number per edge, 1 in all"),
        (lambda: Graph.from_csr([0, 2], [0, 0], [1.0, -2.0]), r"got weight\[1\] = -2.0"),
        (lambda: Graph.from_edge_index([[0, 1, 1], [1, 1, 0]], [1.0, np.nan, np.inf]), r"weight\[1\] = nan"),
        (lambda: Graph.from_edge_index([[0, 1], [1, 0]], [1.0, np.inf]), r"weight\[1\] = inf"),
        (lambda: Graph.from_edge_index([[0, 1], [1, 0]], [1.0, 1e300]), r"weight\[1\] = inf"),
        (lambda: Graph.from_edge_index([[0, 5], [1, 1]], num_nodes=3), r"edge_index\[0\]\[1\] = 5"),
        (lambda: Graph.from_edge_index([[0, 1], [1, -2]]), r"edge_index\[1\]\[1\] = -2"),
        (lambda: Graph.from_edge_index([[0, 1], [1, 0]], num_nodes=-1), "`num_nodes` must be"),
        (lambda: Graph.from_edge_index([[0, 1, 2]]), r"shape \[2, E\], got \(1, 3\)"),
        (lambda: Graph.from_edge_index([[0.0, 1.0], [1.0, 0.0]]), "whole numbers, got dtype"),
        (lambda: Graph.from_scipy(scipy.sparse.random(3, 4, 0.5)), r"square .* got \(3, 4\)"),
        (lambda: Graph.from_scipy(np.eye(3)), "must be a square scipy sparse matrix"),
        (lambda: Graph.from_data(HeteroData()), "must have at least one relation"),
        (lambda: Graph.from_data(Data(x=torch.zeros(2, 1))), "must have an `edge_index`"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(make, words):
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_refusals_are_also_the_builtin_kinds():
    with pytest.raises(IndexError):
        Graph.from_edge_index([[0, 9], [1, 1]], num_nodes=3)
    with pytest.raises(TypeError):
        Graph.from_edge_index([[0.5], [1.0]])
    assert issubclass(IdError, ValueError) and issubclass(KindError, ValueError)
