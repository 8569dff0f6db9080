"""Estimators: plain and attention forms by hand, and the weighted sum they all rest on."""

from __future__ import annotations

import pytest
import torch

from adahop import ops
from adahop.block import Block, expand
from adahop.features import Values, gather
from adahop.graph import Graph
from adahop.messages import Messages, energy
from adahop.models import GCNConv
from adahop.policies import Exp3, Exp3M
from adahop.samplers import NeighborSampler
from adahop.sum import ATTENTION, attention
from conftest import block_sum, messy_graph, star


def hub_block(sources: list[int], scale: list[float], prob: list[float]) -> Block:
    """Target 0 with the given sources (0: its own edge)."""
    m = len(sources)
    edge_index = torch.stack([torch.tensor(sources), torch.zeros(m, dtype=torch.long)])
    n_id = torch.arange(max(sources) + 1)
    return Block(n_id, 1, edge_index, torch.arange(m), torch.ones(m), torch.tensor(prob), torch.tensor(scale),
                 torch.tensor([0, m]), torch.arange(m))  # fmt: skip


# --- plain ---------------------------------------------------------------------------------------------------------


def test_plain_is_horvitz_thompson():
    g = messy_graph().normalized("row")
    h = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    block = NeighborSampler(g, [3], draw="systematic").sample(torch.arange(60))[0]
    coef = GCNConv(5, 5).coef(None, block)
    out = Values(h[block.n_id]).sum(block, coef, torch.eye(5))
    assert torch.equal(coef, block.weight * block.scale)
    assert torch.allclose(out.double(), block_sum(block, h), atol=1e-5)


# --- attention by hand ---------------------------------------------------------------------------------------------

SCORE = torch.tensor([0.3, -0.2, 1.1])
RAW = SCORE.exp()


def test_self_normalised_by_hand():
    block = hub_block([0, 1, 2], [1.0, 2.5, 4.0], [1.0, 0.4, 0.25])
    w = RAW * block.scale
    assert torch.allclose(attention(SCORE[:, None], block)[:, 0], w / w.sum())


def test_softmax_form_by_hand():
    block = hub_block([0, 1, 2], [1.0, 2.5, 4.0], [1.0, 0.4, 0.25])
    assert torch.allclose(attention(SCORE[:, None], block, "softmax")[:, 0], SCORE.softmax(0))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["bs", "bs.m"])
def test_the_papers_form_by_hand(kind, own):
    # q sums to 1 over the neighbours in both: for BS.M it is the inclusion probability over k
    k, q = 2, torch.tensor([0.2, 0.35])
    prob = q if kind == "bs" else k * q
    scale = 1 / (k * q)  # the same for both: 1 / (k q) and 1 / pi
    score = SCORE[1:]
    if own:
        block = hub_block([0, 1, 2], [1.0, *scale.tolist()], [1.0, *prob.tolist()])
        got = attention(SCORE[:, None], block, "paper")[:, 0]
        # the sampled part of the normaliser, sum e^s over N(i), is estimated by sum over S of e^s / sum over S of q
        total = RAW[0] + RAW[1:].sum() / q.sum()
        assert torch.allclose(got[0], RAW[0] / total)
        assert torch.allclose(got[1:], scale * RAW[1:] / total)
    else:
        block = hub_block([1, 2], scale.tolist(), prob.tolist())
        got = attention(score[:, None], block, "paper")[:, 0]
        assert torch.allclose(got, q.sum() * score.softmax(0) * scale)  # a' = (sum of q) softmax, times 1 / (k q)


@pytest.mark.parametrize(("policy", "draw"), [(Exp3, "multinomial"), (Exp3M, "depround")])
def test_the_papers_form_on_real_blocks(policy, draw):
    g = star(12, 30).normalized("row")
    kind = policy(g, 1)
    kind.arms.put(0, torch.exp(torch.randn(g.num_edges, generator=torch.Generator().manual_seed(0)) * 0.3))
    k = 4
    block = NeighborSampler(g, [k], kind, draw).sample(torch.arange(30))[0]
    score = torch.randn(block.num_edges, 1, generator=torch.Generator().manual_seed(1))
    got = attention(score, block, "paper")[:, 0]
    for i in range(30):
        a, b = block.ptr[i : i + 2].tolist()
        own, others = a, slice(a + 1, b)
        q = block.prob[others] / (1 if draw == "multinomial" else k)
        raw = score[a:b, 0].exp()
        total = raw[0] + raw[1:].sum() / q.sum()
        assert block.is_self()[own] and torch.allclose(got[own], raw[0] / total)
        assert torch.allclose(got[others], raw[1:] / total / (k * q), rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("form", ATTENTION)
def test_all_forms_are_the_softmax_when_nothing_is_sampled(form, heads):
    g = messy_graph().normalized("row")
    block = NeighborSampler(g, [-1]).sample(torch.arange(60))[0]
    score = 5 * torch.randn(block.num_edges, heads, generator=torch.Generator().manual_seed(0))
    got = attention(score, block, form)
    for i in range(60):
        a, b = block.ptr[i : i + 2].tolist()
        assert torch.allclose(got[a:b], score[a:b].softmax(0), atol=1e-6)


def test_large_scores_do_not_overflow():
    block = hub_block([0, 1, 2], [1.0, 2.0, 2.0], [1.0, 0.5, 0.5])
    for form in ATTENTION:
        for shift in (300.0, -300.0):
            score = SCORE[:, None] + shift
            assert torch.allclose(attention(score, block, form), attention(SCORE[:, None], block, form), rtol=1e-4)


def test_self_normalised_is_consistent():
    # mean squared error over 400 stars falls as k grows; a plain softmax over a weighted sample keeps its bias
    n, copies = 60, 400
    g = star(n, copies)
    gen = torch.Generator().manual_seed(0)
    value, score = torch.rand(n, generator=gen), torch.randn(n, generator=gen)
    true = (score.softmax(0) * value).sum()
    policy = Exp3M(g, 1)
    policy.arms.put(0, (2 * value).exp().repeat(copies))  # drawn by their value: the sample alone is far from fair
    error, bias = {}, {}
    for form in ("self-normalised", "softmax"):
        for k in (3, 12, 48):
            block = NeighborSampler(g, [k], policy, "depround").sample(torch.arange(copies))[0]
            leaf = block.n_id[block.src] - copies
            coef = attention(score[leaf][:, None], block, form)[:, 0]
            out = torch.zeros(copies).index_add_(0, block.dst, coef * value[leaf])
            error[form, k], bias[form, k] = float((out - true).square().mean()), float((out - true).mean())
    assert error["self-normalised", 12] < error["self-normalised", 3] / 2
    assert error["self-normalised", 48] < error["self-normalised", 12] / 2
    assert abs(bias["softmax", 12]) > 5 * abs(bias["self-normalised", 12])


def test_gradients_flow_through_the_coefficients():
    block = hub_block([0, 1, 2], [1.0, 2.5, 4.0], [1.0, 0.4, 0.25])
    for form in ATTENTION:
        score = SCORE[:, None].double().clone().requires_grad_()
        wide = block._replace(scale=block.scale.double())
        assert torch.autograd.gradcheck(lambda s, form=form, wide=wide: attention(s, wide, form), score)


# --- energies ------------------------------------------------------------------------------------------------------


def test_energies_are_squared_norms_heads_summed():
    g = messy_graph()
    block = NeighborSampler(g, [3]).sample([1, 2, 3])[0]
    gen = torch.Generator().manual_seed(0)
    h, coef = torch.randn(block.num_src, 2, 4, generator=gen), torch.randn(block.num_edges, 2, generator=gen)
    want = (coef[:, :, None] * h[block.src]).flatten(1).square().sum(1)
    assert torch.allclose(energy(Messages(block, coef, Values(h))), want, rtol=1e-4)
    flat = (coef[:, :1] * h[block.src, 0]).square().sum(1)
    assert torch.allclose(energy(Messages(block, coef[:, 0], Values(h[:, 0]))), flat, rtol=1e-4)
    assert torch.allclose(energy(Messages(block, coef, Values(h[:, 0]))), flat * (1 + (coef[:, 1] / coef[:, 0]) ** 2),
                          rtol=1e-3)  # fmt: skip
    assert not energy(Messages(block, coef, Values(h.requires_grad_()))).requires_grad


# --- the weighted sum ----------------------------------------------------------------------------------------------


def sum_case(heads: int | None, width: int, dtype=torch.float32, seed: int = 0):
    """h, src, dst, coef, ptr with empty rows, sources used twice and sources never used."""
    gen = torch.Generator().manual_seed(seed)
    ptr = torch.tensor([0, 0, 3, 3, 10, 40, 40])
    src = torch.randint(9, (40,), generator=gen)
    inner = () if heads is None else (heads,)
    h = torch.randn(12, *inner, width, generator=gen, dtype=torch.double).to(dtype).requires_grad_()
    coef = torch.randn(40, *inner, generator=gen, dtype=torch.double).to(dtype).requires_grad_()
    return h, src, expand(ptr, 40), coef, ptr


def dense_sum(h, src, dst, coef, rows):
    """The same by a dense [rows, S] matrix a head."""
    if h.dim() == 2:
        h, coef = h.unsqueeze(1), coef.unsqueeze(1)
        return dense_sum(h, src, dst, coef, rows).squeeze(1)
    a = torch.zeros(h.shape[1], rows, h.shape[0], dtype=h.dtype)
    head = torch.arange(h.shape[1])[None].expand(len(src), -1)
    a = a.index_put((head, dst[:, None].expand_as(head), src[:, None].expand_as(head)), coef, accumulate=True)
    return torch.einsum("hrs,shc->rhc", a, h)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize(("heads", "width"), [(None, 1), (None, 7), (1, 4), (3, 5), (2, 32)])
def test_gather_sum_forward_and_backward(heads, width, threads, many_threads):
    h, src, dst, coef, ptr = sum_case(heads, width)
    with ops.threads(threads):
        out = ops.gather_sum(h, src, dst, coef, ptr)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        got = torch.autograd.grad((out * weight).sum(), (h, coef))
    plain = dense_sum(h, src, dst, coef, 6)
    want = torch.autograd.grad((plain * weight).sum(), (h, coef))
    assert torch.allclose(out, plain, atol=1e-5) and (out[[0, 2, 5]] == 0).all()
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_gather_sum_passes_gradcheck_in_double():
    h, src, dst, coef, ptr = sum_case(2, 3, torch.double)
    assert torch.autograd.gradcheck(lambda h, c: ops.gather_sum(h, src, dst, c, ptr), (h, coef))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gather_sum_keeps_the_dtype(dtype):
    h, src, dst, coef, ptr = sum_case(None, 4)
    out = ops.gather_sum(h.to(dtype), src, dst, coef, ptr)
    assert out.dtype == dtype
    assert torch.allclose(
        out.double(), dense_sum(h, src, dst, coef, 6).double(), atol=0.2 if dtype != torch.float64 else 1e-5
    )


@pytest.mark.parametrize("edges", [0, 3])
def test_gather_sum_of_next_to_nothing(edges):
    ptr = torch.tensor([0, 0, edges])
    src = torch.zeros(edges, dtype=torch.long)
    h, coef = torch.ones(1 if edges else 0, 2, requires_grad=True), torch.ones(edges, requires_grad=True)
    out = ops.gather_sum(h, src, expand(ptr, edges), coef, ptr)
    assert out.tolist() == [[0, 0], [edges, edges]]
    out.sum().backward()
    assert h.grad.tolist() == [[edges, edges]] * (1 if edges else 0) and coef.grad.tolist() == [2] * edges
    none = ops.gather_sum(torch.ones(2, 3), src[:0], src[:0], torch.ones(0), torch.zeros(1, dtype=torch.long))
    assert none.shape == (0, 3)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize(("heads", "width"), [(1, 4), (3, 5), (2, 32)])
def test_edge_dot_is_its_reference(heads, width, threads, many_threads):
    """With its gradients and the gradients of these, in rows without edges too."""
    h, src, dst, coef, ptr = sum_case(heads, width)
    q = torch.randn(6, heads, width, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = []
    for form in (ops.edge_dot.cpu, ops.edge_dot.reference):
        with ops.threads(threads):
            out = form(q, h, dst, src, ptr)
            plain = torch.autograd.grad((out * coef).sum(), (q, h), retain_graph=True)
            first = torch.autograd.grad((out * coef).square().sum(), (q, h), create_graph=True)
            found.append((out, *plain, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (q, h))))
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_gather_takes_views_and_skips_unneeded_gradients():
    block = NeighborSampler(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), [-1]).sample([0])[0]
    wide = torch.arange(24.0).view(4, 6)
    coef = torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0]])[:, 0].requires_grad_()
    h = wide[:, ::2]
    out = gather(h, block, coef)
    assert torch.allclose(out[0], (coef.detach()[:, None] * h[1:]).sum(0))
    out.sum().backward()
    assert torch.allclose(coef.grad, h[1:].sum(1))
