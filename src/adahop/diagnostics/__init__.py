"""Diagnostics: how much noise a sampler leaves in each layer's sum, against uniform draws and against the oracle."""

from adahop.diagnostics.gradient import gradient_variance
from adahop.diagnostics.measure import Measured, measure
from adahop.diagnostics.report import Probe, check, probe_nodes, variance
from adahop.diagnostics.truth import Truth

__all__ = [
    "Measured",
    "Probe",
    "Truth",
    "check",
    "gradient_variance",
    "measure",
    "probe_nodes",
    "variance",
]


def __getattr__(name: str) -> object:
    if name == "normaliser_error":
        raise AttributeError("`diagnostics.normaliser_error` must be imported from adahop_lab.normaliser, got adahop")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
