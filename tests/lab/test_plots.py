"""Plots of variance; those of convergence are tested with `adahop compare`."""

from __future__ import annotations

import pytest

from adahop.checks import InputError
from adahop_lab.plots import variance_plot


def test_plot(tmp_path):
    rows = [
        {"method": m, "layer": n, "variance": v / k, "k": k}
        for m in "ab"
        for n in (1, 2)
        for k in (1, 2)
        for v in (0, 1)
    ]
    paths = variance_plot(rows, "k", tmp_path / "v")
    assert [p.name for p in paths] == ["v.png", "v.svg"] and all(p.stat().st_size > 1000 for p in paths)
    with pytest.raises(InputError, match="`rows` must hold at least one"):
        variance_plot([], "k", tmp_path / "v")
