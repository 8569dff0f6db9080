"""The laboratory of adahop: experiments, benchmarks, comparisons, the report and every plot."""
