"""The driver: enacts the window's actions on a Dask client.

Runs on: client.
"""

from __future__ import annotations

from daskinfer.driver.driver import Driver
from daskinfer.driver.jobs import Job, JobStatus
from daskinfer.driver.manager import WorkerManager, WorkerStatus

__all__ = ["Driver", "Job", "JobStatus", "WorkerManager", "WorkerStatus"]
