"""RMAT graphs: heavy-tailed degrees at any size, the same for the same numbers, kept on disk once made."""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError, count
from adahop.graph import Graph
from adahop.mapped import cache_path, cached_arrays
from adahop.ops.random import base, key, mix

QUARTERS = (0.57, 0.19, 0.19)  # of the adjacency matrix, at every level; the last has the rest
CHUNK = 1 << 22  # edges drawn at once
TRIES = 64  # rounds of chunks before a graph is too dense to be filled by chance
_A, _B, _C = (round(65536 * sum(QUARTERS[: i + 1])) for i in range(3))


def rmat(spec: str) -> Graph:
    """`rmat:N,E[,SEED]`: N nodes and exactly E in-edges, no loops, no parallel edges, ids shuffled.

    With `,types=T,relations=R` the nodes are of T types and the edges of R relations, of one size each; a relation goes
    from one type to another, the pairs of types taken in turn.

    Each edge walks down the quarters of the adjacency matrix (Chakrabarti et al. 2004), so few nodes have very many
    neighbours. Kept under `$ADAHOP_CACHE/rmat` (~/.cache/adahop/rmat) where that can be written.

    >>> rmat("rmat:100,500")
    Graph(num_nodes=100, num_edges=500, weighted=False)
    """
    spec, kinds = _kinds(spec)
    n, m, seed = _parse(spec)
    if kinds is not None:
        return _typed(n, m, seed, *kinds)
    return Graph(*_found(n, m, seed))


def _kinds(spec: str) -> tuple[str, tuple[int, int] | None]:
    """The spec without its words, and how many types and relations they ask for."""
    numbers, *words = (part.strip() for part in spec.replace(",types=", ";types=").replace(",rel", ";rel").split(";"))
    if not words:
        return spec, None
    named = dict(word.partition("=")[::2] for word in words)
    if set(named) != {"types", "relations"} or not all(value.isdecimal() for value in named.values()):
        raise InputError(f"`graph` rmat:N,E may end with types=T,relations=R, got '{spec}'")
    types, relations = count(int(named["types"]), 2, "types"), count(int(named["relations"]), 1, "relations")
    return numbers, (types, relations)


def _typed(n: int, m: int, seed: int, types: int, relations: int) -> Graph:
    """Every relation is a graph of its own over the nodes of a type, whose sources are read as another type's."""
    sizes = [n // types] * types
    edges = {}
    for r in range(relations):
        source, step = r % types, 1 + r // types % (types - 1)
        part = m * (r + 1) // relations - m * r // relations
        of = Graph(*_found(sizes[0], part, seed * relations + r))
        edges[f"t{source}", f"r{r}", f"t{(source + step) % types}"] = of.edge_index()
    return Graph.from_relations({f"t{i}": size for i, size in enumerate(sizes)}, edges)


def _found(n: int, m: int, seed: int) -> tuple[Tensor, Tensor, None, None, Tensor]:
    """The arrays of a graph, from the cache where it has them."""
    found = cached_arrays(
        cache_path("rmat", f"{n}-{m}-{seed}.npz"),
        lambda a: a["indptr"].shape == (n + 1,) and a["indices"].shape == (m,),
        lambda: _make(n, m, seed),
    )
    indptr, indices = (torch.from_numpy(found[name]) for name in ("indptr", "indices"))
    return indptr, indices, None, None, indptr[:-1]


def _parse(spec: str) -> tuple[int, int, int]:
    try:
        numbers = [int(word) for word in spec.partition(":")[2].split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or min(numbers) < 0:
        raise InputError(f"`graph` must be rmat:N,E or rmat:N,E,SEED, got '{spec}'")
    n, m, seed = [*numbers, 0][:3]
    if not (2 <= n < 2**31 and 1 <= m <= n * (n - 1) // 8):
        raise InputError(f"`graph` rmat:N,E must have 2 <= N < 2^31 and 1 <= E <= N (N - 1) / 8, got '{spec}'")
    return n, m, seed


def _make(n: int, m: int, seed: int) -> dict[str, np.ndarray]:
    """Draw until there are E different edges, then drop the surplus at random."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(n).astype(np.int64)
    levels, edges, chunk = max(int(n - 1).bit_length(), 1), np.empty(0, np.int64), 0
    for _ in range(TRIES):
        lacking = m - edges.size
        if lacking <= 0:
            break
        fresh = [edges]
        for _ in range(-(-int(lacking * 1.3) // CHUNK)):
            fresh.append(_chunk(min(CHUNK, int(lacking * 1.3) + 64), levels, names, key(seed, chunk)))
            chunk += 1
        edges = np.concatenate(fresh)
        edges.sort()
        edges = edges[np.concatenate([[True], edges[1:] != edges[:-1]])]
    else:
        raise InputError(f"`graph` rmat:{n},{m} must be sparser: {TRIES} rounds found {edges.size} edges")
    if edges.size > m:
        edges = np.delete(edges, rng.choice(edges.size, edges.size - m, replace=False))
    indptr = np.searchsorted(edges, np.arange(n + 1) * n)
    edges %= n
    return {"indptr": indptr.astype(np.int64), "indices": edges.astype(np.int32)}


def _chunk(size: int, levels: int, names: np.ndarray, stream: int) -> np.ndarray:
    out = np.empty(size, np.int64)
    return out[: _walk(levels, names, stream, out)]


@nb.njit(nogil=True, cache=True)
def _walk(levels, names, stream, out):
    """out[:k] = target * N + source of the walks that end at two different nodes; 16 random bits per level."""
    n, k = names.shape[0], 0
    for e in range(out.shape[0]):
        bits = base(stream, e)
        i, j = 0, 0
        for level in range(levels):
            if level % 4 == 0 and level > 0:
                bits = mix(bits)
            u = np.int64((bits >> np.uint64(16 * (level % 4))) & np.uint64(0xFFFF))
            i, j = 2 * i + int(u >= _B), 2 * j + int((_A <= u < _B) or u >= _C)
        if i != j and i < n and j < n:
            out[k] = names[i] * n + names[j]
            k += 1
    return k
