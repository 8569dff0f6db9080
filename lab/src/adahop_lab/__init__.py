"""The laboratory of adahop: experiments, benchmarks, comparisons, the report and every plot."""

__version__ = "0.1.0"
