"""Diagnostics: how much noise a sampler leaves in each layer's sum, against uniform draws and against the oracle."""

from adahop.diagnostics.gradient import gradient_variance
from adahop.diagnostics.measure import Measured, measure
from adahop.diagnostics.normaliser import normaliser_error
from adahop.diagnostics.report import Probe, check, probe_nodes, variance
from adahop.diagnostics.truth import Truth

__all__ = [
    "Measured",
    "Probe",
    "Truth",
    "check",
    "gradient_variance",
    "measure",
    "normaliser_error",
    "probe_nodes",
    "variance",
]
