"""Batch inference for Dask: a model on every worker, every row back exactly once."""

__version__ = "0.1.0"
