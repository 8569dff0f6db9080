"""Partitions by METIS, cached on disk under the graph's hash."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError
from adahop.graph import Graph
from adahop.mapped import cache_path, cached_arrays


def partition(graph: Graph, parts: int) -> Tensor:
    """[N] the cluster of each node, 0, 1, ... without gaps; no more clusters than nodes.

    METIS sees the graph as undirected, without self-loops and weights. The result is cached in
    `$ADAHOP_CACHE/partitions` (~/.cache/adahop/partitions); a file that cannot be read is replaced.
    """
    n = graph.num_nodes
    if parts >= n:
        return torch.arange(n)
    if parts == 1:
        return torch.zeros(n, dtype=torch.long)
    home = cache_path("partitions", f"{graph.hash()}-{parts}.npz")
    found = cached_arrays(
        home, lambda a: _fits(a["part"], n, parts), lambda: {"part": _metis(graph, parts).int().numpy()}
    )
    return torch.from_numpy(found["part"]).long()


def _fits(part: np.ndarray, n: int, parts: int) -> bool:
    return part.shape == (n,) and part.dtype == np.int32 and 0 <= part.min() <= part.max() < parts


def _metis(graph: Graph, parts: int) -> Tensor:
    try:
        import pymetis
    except ImportError:
        raise InputError("`cluster-gcn` needs pymetis: pip install adahop[metis]") from None
    n, src, dst = graph.num_nodes, graph.indices.long().cpu(), graph.dst().cpu()
    true = src != dst
    src, dst = src[true], dst[true]
    pairs = torch.unique(torch.cat([dst * n + src, src * n + dst]))  # both ways, each once, in order
    if pairs.numel() == 0:
        return torch.arange(n) * parts // n
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(pairs // n, minlength=n).cumsum(0)])
    _, part = pymetis.part_graph(parts, xadj=ptr.numpy(), adjncy=(pairs % n).numpy(), options=pymetis.Options(seed=0))
    return torch.unique(torch.as_tensor(part, dtype=torch.long), return_inverse=True)[1]
