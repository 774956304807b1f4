"""The driver: enacts the window's actions on a Dask client.

Runs on: client.
"""

from __future__ import annotations

from daskinfer.driver.driver import Driver

__all__ = ["Driver"]
