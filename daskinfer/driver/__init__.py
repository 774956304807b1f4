"""The driver: enacts the window's actions on a Dask client.

Runs on: client.
"""

from __future__ import annotations

from daskinfer.driver.driver import Driver
from daskinfer.driver.jobs import Job, JobStatus
from daskinfer.driver.manager import WorkerManager, WorkerStatus
from daskinfer.driver.results import Results

__all__ = ["Driver", "Job", "JobStatus", "Results", "WorkerManager", "WorkerStatus"]
