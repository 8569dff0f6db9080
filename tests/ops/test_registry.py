"""The registry: which form of an operation runs, and that each has the forms it says."""

from __future__ import annotations

import contextlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from adahop import ops
from adahop.ops.registry import Op, register


@pytest.fixture
def op():
    made = register("a test", reference=lambda t: "reference", cpu=lambda t: NotImplemented if t.numel() else "cpu")
    yield made
    del ops.OPS["a test"]


def test_the_device_and_the_environment_decide(op, monkeypatch):
    assert op(torch.zeros(0)) == "cpu" and op.form(torch.zeros(0)) == "cpu" and repr(op) == "<op a test>"
    assert op(torch.zeros(2)) == "reference"  # what a form does not serve is left to the reference
    assert op.form(torch.zeros(0, device="meta")) == "reference"
    monkeypatch.setenv("ADAHOP_TRITON", "1")
    assert op(torch.zeros(0)) == "reference"  # there is no such form
    monkeypatch.delenv("ADAHOP_TRITON")
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    assert op(torch.zeros(0)) == "reference"


def test_another_argument_may_decide():
    op = Op("x", lambda *a: "reference", lambda *a: "cpu", None, 1)
    assert op(torch.zeros(0, device="meta"), torch.zeros(1)) == "cpu"
    assert op(torch.zeros(1), (torch.zeros(0, device="meta"), 3)) == "reference"


def test_every_operation_has_a_reference_that_says_what_it_does():
    assert len(ops.OPS) > 25
    for name, op in ops.OPS.items():
        assert op.name == name and callable(op.reference) and op.reference.__doc__, name
        assert op.cpu is None or callable(op.cpu), name


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_gpu_s_forms_can_be_imported():
    found = [op.cuda for op in ops.OPS.values() if op._cuda is not None]
    assert len(found) > 10 and all(callable(form) for form in found)


def test_a_table_read_in_plain_torch_is_the_table():
    x, n_id = torch.rand(9, 5), torch.tensor([3, 3, 8])
    table = ops.table(x, x)
    assert torch.equal(ops.table_rows(table, n_id), x[n_id])
    drop = (torch.tensor(7), 0.75)
    read = ops.table_rows(torch.ones(4000, 5), torch.arange(4000), drop)
    assert torch.equal(read, ops.table_rows(torch.ones(4000, 5), torch.arange(4000), drop))
    assert abs(float((read > 0).float().mean()) - 0.75) < 0.02 and float(read.max()) == pytest.approx(1 / 0.75)
    src, ptr, coef = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 4]), torch.rand(4, 2, requires_grad=True)
    total = ops.table_sum(table, src, coef, ptr, n_id)
    want = torch.stack([coef[0, :, None] * x[3], (coef[1:, :, None] * x[n_id[src[1:]]][:, None]).sum(0)])
    assert torch.allclose(total, want) and total.requires_grad
    v = torch.rand(2, 5, requires_grad=True)
    assert torch.allclose(ops.table_dot(table, src, v, ptr, n_id), x[n_id[src]] @ v.t())
    assert torch.equal(
        ops.known_energies(torch.arange(9.0), n_id, src, coef), coef.detach().square().sum(1) * n_id[src]
    )


def test_spans_of_both_forms():
    g = torch.Generator().manual_seed(0)
    start, length = torch.randint(1000, (50,), generator=g), torch.randint(0, 9, (50,), generator=g)
    for lengths in (length, torch.zeros_like(length)):
        fast, plain = ops.spans.cpu(start, lengths), ops.spans.reference(start, lengths)
        assert all(torch.equal(*pair) for pair in zip(fast, plain, strict=True))
    assert [t.tolist() for t in ops.spans(start[:0], length[:0])] == [[], []]


def test_kernels_run_where_their_arguments_lie(op, monkeypatch):
    """Triton launches on the current device, whatever it is given."""
    current = [0]

    @contextlib.contextmanager
    def device(which):
        current.append(which.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    op.reference = lambda t: len(current)
    first, second = (SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in range(2))
    assert op((first,)) == 1 and op((second,)) == 2 and current == [0]
