"""The report: one page of tables, plots and details that needs no network and no other file."""

from adahop_lab.experiments.page.build import build

__all__ = ["build"]
