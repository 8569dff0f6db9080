"""Peers: the ranks of one training and their collective calls, which all of them make in the same order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from adahop.checks import InputError

KINDS = (torch.int32, torch.int64, torch.float32, torch.float64, torch.bool)
TIMEOUT = timedelta(minutes=30)  # of one call, which may wait for an evaluation; `heartbeat` finds a dead rank sooner


def launched() -> bool:
    """Whether torchrun, or another launcher with its environment variables, started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def join(device: str = "cpu") -> bool:
    """Creates the process group: gloo for CPUs, NCCL for GPUs.

    False if one exists already, such as that of Ray Train or Lightning: it is used, and left to its owner to destroy.
    """
    if dist.is_initialized():
        return False
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(f"{name} must be set for several processes, as torchrun does, got none")
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself, else by rank 0
    store = shared_store(TIMEOUT, first=rank == 0 and not hosted)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return True


def shared_store(timeout: timedelta, first: bool = False) -> dist.Store:
    """A key-value store of all ranks, with a prefix per restart so that values from before it are not read."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*where, is_master=first, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"adahop/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Peers:
    """Rank, size, and collective calls; `sent` counts the bytes that this rank sent."""

    def __init__(self) -> None:
        self.rank, self.size, self.sent = dist.get_rank(), dist.get_world_size(), 0

    def total(self, *numbers: float) -> list[float]:
        """Sums over the ranks, in float64."""
        t = torch.tensor(numbers, dtype=torch.double)
        dist.all_reduce(t)
        self.sent += t.numel() * 8
        return t.tolist()

    def average(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The mean of each gradient over the ranks that have one; None where none has."""
        flat = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, like, strict=True)]
        here = torch.tensor([float(g is not None) for g in grads], device=flat[0].device)
        whole = torch.cat([*flat, here])
        dist.all_reduce(whole)
        self.sent += whole.numel() * 4
        parts = whole[: -len(here)].split([p.numel() for p in like])
        many = whole[-len(here) :].tolist()
        return [(t / n).view_as(p) if n else None for t, n, p in zip(parts, many, like, strict=True)]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all ranks, one list per rank: equal in number and dtype, with any first dimension."""
        packed, shape = _pack(tensors)
        sizes = [torch.empty_like(shape) for _ in range(self.size)]
        dist.all_gather(sizes, shape)
        most = max(int(s[0]) for s in sizes)
        if packed.numel() < most:
            packed = torch.cat([packed, packed.new_zeros(most - packed.numel())])
        got = [torch.empty_like(packed) for _ in range(self.size)]
        if most:
            dist.all_gather(got, packed)
        self.sent += (most + shape.numel() * 8) * (self.size - 1)
        return [_unpack(flat, s, tensors) for flat, s in zip(got, sizes, strict=True)]

    def all_to_all(self, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """parts[r] goes to rank r; returns what each rank sent here. All parts have the same dtypes."""
        packed = [_pack(part) for part in parts]
        shapes = [s for _, s in packed]
        theirs = [torch.empty_like(s) for s in shapes]
        _all_to_all(theirs, shapes)
        got = [packed[0][0].new_empty(int(s[0])) for s in theirs]
        _all_to_all(got, [flat for flat, _ in packed])
        head = shapes[0].numel() * 8
        self.sent += sum(packed[r][0].numel() + head for r in range(self.size) if r != self.rank)
        return [_unpack(flat, s, parts[0]) for flat, s in zip(got, theirs, strict=True)]

    def barrier(self) -> None:
        self.total(0.0)


def _all_to_all(out: list[Tensor], given: list[Tensor]) -> None:
    """One flat exchange with uneven parts, which both gloo and NCCL support."""
    flat, into = torch.cat(given), torch.cat(out)
    dist.all_to_all_single(into, flat, [t.numel() for t in out], [t.numel() for t in given])
    at = 0
    for t in out:
        t.copy_(into[at : at + t.numel()])
        at += t.numel()


def _pack(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All bytes in one row, and [bytes, first dimensions]."""
    assert all(t.dtype in KINDS for t in tensors)
    flat = [t.contiguous().view(-1).view(torch.uint8) if t.numel() else _nothing(t) for t in tensors]
    # every tensor begins at a multiple of 8: a view as int64 must be aligned
    padded = [torch.nn.functional.pad(f, (0, -f.numel() % 8)) for f in flat]
    lengths = [t.shape[0] for t in tensors]
    whole = torch.cat(padded)
    return whole, torch.tensor([whole.numel(), *lengths])


def _nothing(t: Tensor) -> Tensor:
    return torch.zeros(0, dtype=torch.uint8, device=t.device)


def _unpack(flat: Tensor, shape: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    out, at = [], 0
    for t, n in zip(like, shape[1:].tolist(), strict=True):
        size = n * torch.Size(t.shape[1:]).numel() * t.element_size()
        out.append(flat[at : at + size].view(t.dtype).view(n, *t.shape[1:]))
        at += size + -size % 8
    return out
