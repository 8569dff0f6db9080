"""PyG's loader with `device="cuda"`, on a machine without a GPU; see `pretended_cuda`.

`test_pyg_device.py` does the same on a device that has no kernels.
"""

from __future__ import annotations

import pytest
import torch
from test_pyg_device import (
    CONVS,
    AdaptiveSampler,
    Net,
    NodeLoader,
    alike,  # noqa: F401  a fixture
    loader_of,
    some_data,
    tensors,
    trained,
    trained_typed,
    typed_data,
)

from adahop.pyg.inference import inference

triton = pytest.importorskip("triton")
from pretended_cuda import pretended_cuda  # noqa: E402

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and test_pyg_device.py runs on it"),
    pytest.mark.usefixtures("alike"),
]
slow = pytest.mark.slow


def agree(ours: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == want.keys()
    for name, value in want.items():
        assert torch.allclose(ours[name].double(), value.double(), rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("estimator", ["plain", "snapshot", "history"])
@pytest.mark.parametrize("kind", ["sage", *(pytest.param(k, marks=slow) for k in CONVS if k != "sage")])
def test_a_model_trains_and_teaches(kind, estimator):
    want = trained(kind=kind, estimator=estimator)
    with pretended_cuda():
        agree(trained("cuda", kind, estimator=estimator), want)


@pytest.mark.parametrize("method", ["bs", pytest.param("bs.m", marks=slow), pytest.param("graphsage", marks=slow)])
def test_every_method_does(method):
    want = trained(method=method)
    with pretended_cuda() as (_, launches):
        agree(trained("cuda", method=method), want)
        drawn = {"bs": "multinomial", "bs.m": "subset", "graphsage": "uniform"}[method]
        assert drawn in {name for name, _ in launches}


@pytest.mark.parametrize(
    "words",
    [
        {"disjoint": True}, {"subgraph_type": "induced"}, {"subgraph_type": "bidirectional"}, {"replace": True},
        {"weight_attr": "edge_kind"}, {"budget": True}, {"padded": True}, {"cache": 0.3}, {"cache": 0.0},
        {"prefetch": 2},
    ],
    ids=str,
)  # fmt: skip
def test_batches_with_other_words(words):
    own = {"method": "graphsage"} if "weight_attr" not in words else {}
    want = [b.to_dict() for b in loader_of(**{k: v for k, v in words.items() if k != "cache"}, **own)]
    with pretended_cuda():
        batches = (b.to_dict().items() for b in loader_of("cuda", **words, **own))
        found = [{k: v for k, v in items if torch.is_tensor(v)} for items in batches]
        assert all(v.is_cuda for b in found for v in b.values())
        ours = [{k: v.cpu() for k, v in b.items()} for b in found]
    assert len(ours) == len(want) > 0
    assert all(torch.equal(v, b[k]) for a, b in zip(ours, want, strict=True) for k, v in a.items())


@pytest.mark.parametrize(
    ("kind", "words"),
    [("to_hetero", {"cache": 0.4}), *(pytest.param(kind, {"estimator": how}, marks=slow)
                                      for kind in ("to_hetero", "mixed", "hgt") for how in ("plain", "snapshot"))],
)  # fmt: skip
def test_typed_data(kind, words):
    want = trained_typed(kind, **{k: v for k, v in words.items() if k != "cache"})
    with pretended_cuda():
        agree(trained_typed(kind, "cuda", **words), want)


@pytest.mark.parametrize("typed", [False, True])
def test_a_sampler_of_pyg_draws_there(typed):
    data = typed_data() if typed else some_data()
    words = {"batch_size": 8, "input_nodes": ("paper", data["paper"].train_mask) if typed else data.train_mask}
    own = AdaptiveSampler(data, [3, 2], seed=4)
    want = list(NodeLoader(data, node_sampler=own, transform=own.attach, **words))
    with pretended_cuda():
        sampler = AdaptiveSampler(data, [3, 2], seed=4, device="cuda")
        found = list(NodeLoader(data.clone().to("cuda"), node_sampler=sampler, transform=sampler.attach, **words))
        kept = [{k: v for k, v in tensors(b).items() if "input_id" not in k} for b in found]  # PyG's own, on the CPU
        assert all(v.is_cuda for b in kept for v in b.values())
        assert all(torch.equal(v.cpu(), tensors(b)[k]) for a, b in zip(kept, want, strict=True) for k, v in a.items())


def test_inference():
    torch.manual_seed(0)
    data, model = some_data(), Net("sage")
    want = inference(model, data)
    with pretended_cuda():
        assert torch.allclose(inference(model.to("cuda"), data, device="cuda").cpu(), want, atol=1e-5)
