"""The expression behind ``ddf.infer.…``: what Dask's optimiser may do around an inference.

An inference keeps rows, order, index and partitions, so Dask may take ``head`` and the choice of partitions below it, count
rows without it, and align its columns with those of its input. Here it is added that only needed columns are read, that an
inference whose columns nobody uses is left out, and that a filter on input columns goes first.

When the optimiser is done the expression becomes one that is not fused with its neighbours: an inference has tasks of its
own, which a dashboard shows by name and :meth:`daskinfer.Driver.placement` can place.

Runs on: client; the scheduler builds the tasks.
"""

from __future__ import annotations

import functools
from typing import Any

from dask._task_spec import Task, TaskRef
from dask.dataframe.dask_expr._expr import (
    Elemwise,
    Expr,
    Filter,
    Index,
    Partitions,
    Projection,
    determine_column_projection,
    is_filter_pushdown_available,
)
from dask.typing import Key

from daskinfer.dataframe.partition import infer_partition
from daskinfer.driver.placement import PREFIX

__all__ = ["InferredFrame"]


class _Common(Expr):
    _parameters = ["frame", "inference"]  # noqa: RUF012 - so Dask names operands

    @functools.cached_property
    def _meta(self) -> Any:
        added = self.inference.added
        return added.on(self.frame._meta, added.empty())  # noqa: SLF001 - Dask's name for the frame without rows

    @functools.cached_property
    def _name(self) -> str:
        return f"{PREFIX}{self.inference.spec.task}-{self.deterministic_token}"

    def _divisions(self) -> Any:
        return self.frame.divisions

    def _task(self, name: Key, index: int) -> Task:
        return Task(name, infer_partition, TaskRef((self.frame._name, index)), self.inference, index)  # noqa: SLF001


class InferredFrame(_Common, Elemwise):
    """A frame with inferred columns, as long as the optimiser is at work."""

    _preserves_partitioning_information = True

    def _filter_passthrough_available(self, parent: Any, dependents: Any) -> bool:
        """Whether a filter asks for input columns only, and nobody wants the rows that it drops."""
        return _asks_only_for_input(self, parent.predicate) and is_filter_pushdown_available(self, parent, dependents)

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if isinstance(parent, Index):
            return type(parent)(self.frame)
        if isinstance(parent, Filter) and parent.frame._name == self._name:  # noqa: SLF001
            if self._filter_passthrough_available(parent, dependents):
                return type(self)(Filter(self.frame, parent.predicate.substitute(self, self.frame)), self.inference)
            return None
        if isinstance(parent, Projection):
            return self._projected(parent, dependents)
        return None

    def _projected(self, parent: Any, dependents: Any) -> Any:
        found = determine_column_projection(self, parent, dependents)
        wanted = set(found if isinstance(found, list) else [found])
        if wanted.isdisjoint(self.inference.added.names):
            return type(parent)(self.frame, *parent.operands[1:])
        needed = wanted.union(self.inference.prompter.columns)
        columns = [name for name in self.frame.columns if name in needed]
        if columns == list(self.frame.columns):
            return None
        return type(parent)(type(self)(self.frame[columns], self.inference), *parent.operands[1:])

    def _lower(self) -> Any:
        return InferredPartitions(self.frame, self.inference)  # type: ignore[no-untyped-call]


class InferredPartitions(_Common):
    """The same, ready to run: no Blockwise expression, so Dask does not fuse it."""

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if isinstance(parent, Partitions):
            return type(self)(Partitions(self.frame, parent.partitions), self.inference)
        return None


def _asks_only_for_input(inferred: InferredFrame, predicate: Any) -> bool:
    added = set(inferred.inference.added.names)
    stack, seen = [predicate], set()
    while stack:
        expr = stack.pop()
        if expr._name in seen:  # noqa: SLF001
            continue
        seen.add(expr._name)  # noqa: SLF001
        for below in expr.dependencies():
            if below._name != inferred._name:  # noqa: SLF001
                stack.append(below)
            elif not isinstance(expr, Projection) or added.intersection(expr.columns):
                return False
    return True
