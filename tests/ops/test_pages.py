"""Pages of mapped files, asked for before they are read."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pytest
import torch

from adahop import ops
from adahop.mapped import Folder, open_array
from adahop.ops import pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where a tensor lies")


@pytest.fixture
def on_disk(tmp_path):
    with Folder(tmp_path / "a") as folder:
        folder.save("x", torch.arange(1 << 20))
    return open_array(tmp_path / "a" / "x.npy")


@linux
def test_a_mapped_tensor_is_told_from_one_in_memory(on_disk):
    assert ops.in_file(on_disk) and ops.in_file(on_disk[5:])
    assert not ops.in_file(on_disk.clone()) and not ops.in_file(torch.zeros(3))


@linux
def test_rows_that_were_asked_for_are_in_memory(on_disk, tmp_path):
    """Without asking they are not: the kernel says so of each page."""
    path = tmp_path / "a" / "x.npy"
    per_page = mmap.PAGESIZE // on_disk.element_size()
    _forget(path)
    wanted = torch.tensor([3, 90, 91, 200]) * per_page
    before = _present(on_disk)
    if before.float().mean() > 0.5:
        pytest.skip("this file system keeps its files in memory")
    ops.ask_for(on_disk, wanted, wanted + 2)
    assert int(on_disk[wanted].sum()) == int(wanted.sum())
    after = _present(on_disk)
    first = (on_disk.data_ptr() + wanted * on_disk.element_size()) // mmap.PAGESIZE
    at = first - on_disk.data_ptr() // mmap.PAGESIZE
    assert after[at].all() and after[at + 1].any()
    assert int(after.sum()) < before.sum() + 100  # and not the whole file


def test_long_ranges_and_empty_ones_are_left_alone(on_disk):
    many = (pages.MOST + 2) * mmap.PAGESIZE // on_disk.element_size()
    ops.ask_for(on_disk, torch.tensor([0, 5]), torch.tensor([many, 5]))
    ops.ask_for(on_disk, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    ops.ask_for(on_disk[:0], torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))


def _forget(path):
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _present(t):
    """Which pages of a tensor are in memory."""
    start = t.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = t.data_ptr() + t.nbytes - start
    marks = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), marks) == 0
    return torch.tensor(list(marks)) & 1
