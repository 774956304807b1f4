"""Batch inference for Dask: a model on every worker, every row back exactly once.

Runs on: anywhere.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
