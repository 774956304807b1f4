"""The public face: a context manager over a Dask client.

Runs on: client.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Self

from distributed import Client

from daskinfer.cluster import Connection, connect
from daskinfer.config import BatchPolicy, HealthPolicy, ModelSpec, RetryPolicy, from_mapping
from daskinfer.driver.aio import awaitable, iterated
from daskinfer.driver.answers import answers
from daskinfer.driver.dispatch import Dispatcher
from daskinfer.driver.hooks import Postprocess, Preprocess
from daskinfer.driver.perrow import request_maker
from daskinfer.driver.results import Results
from daskinfer.driver.run import RunOptions, execute, with_seed
from daskinfer.driver.service import Service
from daskinfer.driver.settings import configured
from daskinfer.driver.sketch import Plan, translated
from daskinfer.driver.tasks import Tasks
from daskinfer.engines import engine_class, engine_fields, resolve
from daskinfer.engines.architectures import task_of
from daskinfer.errors import ConfigError, ResourceError
from daskinfer.preflight import check_workers, lost_is_said
from daskinfer.records import Event, Request, Result, SamplingParams, WorkerView
from daskinfer.report import RunReport

__all__ = ["Driver"]


class Driver(Service):
    """Puts a model on every worker of a Dask cluster and sends rows through it.

    Parameters
    ----------
    model : str, ModelSpec or dict
        A local folder, a GGUF file, a hub name; or the whole specification; or a configuration by the names of
        :mod:`daskinfer.driver.sketch`, for which the other arguments count where it says nothing.
    task : {"auto", "generate", "embed", "classify", "score"}
        "auto" is what the model's files say that it was made for, and "generate" where they cannot be read here or the
        engine is another than "auto" and "encoder".
    engine : str or class
        "auto", the name of a registered engine, ``pkg.mod:Class``, or an engine class of your own.
    engine_options : dict
        The engine's own options.
    params : SamplingParams or dict
        Defaults for every row.
    cluster : None, str, Client, or a Dask cluster object
        None: a LocalCluster with one worker per GPU, or one on a machine without, closed with the driver.
    workers : int or None
        Workers of that LocalCluster, or what to scale the given cluster to.
    requires : dict of str to float
        Dask resources a worker must have to get the model, such as ``{"GPU": 1}``.
    batch, retry, health
        Policies; None: the defaults, as overridden in Dask's configuration under ``daskinfer``.
    isolation : {"auto", "process", "thread"}
        Where engines run; "auto" is a child process of the worker.
    name : str or None
        A name for people.
    **spec
        Further fields of :class:`~daskinfer.config.ModelSpec`: ``dtype, device, revision, trust_remote_code, threads``.

    Notes
    -----
    With an asynchronous Client the same methods are awaitable, ``stream`` and jobs are asynchronous iterators, and it is
    ``async with``. Prompts are then read in threads.

    Raises
    ------
    ConfigError
        Settings that cannot work, before anything is started.

    Examples
    --------
    >>> from daskinfer import Driver
    >>> with Driver(model="echo", engine="echo") as driver:  # doctest: +SKIP
    ...     [result.output for result in driver.generate(["a", "b"])]
    ['<a>', '<b>']
    """

    def __init__(  # noqa: PLR0913 - the one place where everything can be said
        self,
        model: str | os.PathLike[str] | ModelSpec | Mapping[str, Any],
        *,
        task: str = "auto",
        engine: str | type = "auto",
        engine_options: Mapping[str, Any] | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        cluster: Any = None,
        workers: int | None = None,
        requires: Mapping[str, float] | None = None,
        batch: BatchPolicy | None = None,
        retry: RetryPolicy | None = None,
        health: HealthPolicy | None = None,
        isolation: str = "auto",
        name: str | None = None,
        **spec: Any,
    ) -> None:
        self.batch = batch or configured(BatchPolicy)
        self.retry = retry or configured(RetryPolicy)
        self.health = health or configured(HealthPolicy)
        self._plan: Plan | None = None
        if isinstance(model, Mapping):
            self._plan = plan = translated(model, self.batch, self.health)
            model, self.batch, self.health, spec = plan.model, plan.batch, plan.health, {**plan.spec, **spec}
            cluster = plan.cluster if cluster is None else cluster
            workers = plan.workers if workers is None else workers
        if isinstance(model, ModelSpec):
            self.spec = model
        else:
            fields = {
                "model": os.fspath(model),
                "task": _task(task, engine, os.fspath(model), spec.get("revision")),
                "isolation": isolation,
                "options": dict(engine_options or {}),
                **spec,
            }
            self.spec = from_mapping(ModelSpec, {**fields, **engine_fields(engine)}, "Driver")
        self.params = params if isinstance(params, SamplingParams) else SamplingParams().updated(**(params or {}))
        self.requires = dict(requires or {})
        self.name = name or self.spec.model
        self._cluster, self._workers = cluster, workers
        self._connection: Connection | None = None
        self._dispatcher: Dispatcher | None = None
        self._tasks: Tasks | None = None
        self._lock = threading.RLock()
        if self.spec.engine_code is None:
            engine_class(self.spec)  # an engine that does not exist is said now
            self.spec = replace(self.spec, engine=resolve(self.spec))  # what "auto" means may change with a release

    # ---------------------------------------------------------------- life

    @awaitable
    def start(self) -> Self:
        """Connect, check the cluster, and begin to load the model; does nothing when it has been done.

        Raises
        ------
        ClusterError
            No scheduler, workers without daskinfer or with another version, too little memory.
        """
        with self._lock:
            if self._dispatcher is None:
                self._dispatcher = self._begin()
        return self

    def _begin(self) -> Dispatcher:
        with lost_is_said("connecting to the cluster"):
            self._connection = connect(self._cluster, workers=self._workers)
        try:
            check_workers(self._connection.client, self.spec, self.requires)
            dispatcher = Dispatcher(
                self._connection.client,
                self.spec,
                self.batch,
                self.retry,
                self.health,
                self.requires,
                expected=self._connection.expected,
                replace=self._connection.replace if self._connection.cluster is not None else None,
            )
            with lost_is_said("sending the model to the workers"):
                self._sync(dispatcher.start)
        except BaseException as error:
            connection, self._connection = self._connection, None
            connection.close()
            if isinstance(error, ResourceError) and self._plan is not None:
                raise ResourceError(f"{error}{self._plan.hint}") from None
            raise
        return dispatcher

    @awaitable
    def stop(self) -> None:
        """Let go of the model and close what was opened here; does nothing when it has been done."""
        with self._lock:
            dispatcher, self._dispatcher = self._dispatcher, None
            tasks, self._tasks = self._tasks, None
            try:
                if dispatcher is not None:
                    self._sync(dispatcher.stop)
                if tasks is not None:
                    tasks.close()
            finally:
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection.close()

    def __enter__(self) -> Self:
        if self.asynchronous:
            raise ConfigError("the Client is asynchronous: write 'async with Driver(…) as driver:'")
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def asynchronous(self) -> bool:
        """Whether methods are to be awaited: the given Client is asynchronous, and this runs on its event loop."""
        return isinstance(self._cluster, Client) and bool(self._cluster.asynchronous)

    @awaitable
    def wait_until_ready(self, timeout_s: float | None = None) -> tuple[WorkerView, ...]:
        """Wait until a worker can run the model, and return what is known of each.

        Raises
        ------
        ModelLoadError
            No worker could load it.
        NoWorkersError
            None was ready in time.
        """
        self.start()
        return self._sync(self._running.ready, timeout_s)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- rows in, results out

    @awaitable
    def generate(
        self, prompts: Iterable[Any], *, raw: bool = False, system: str | None = None, **params: Any
    ) -> Results:
        """Answer prompts and return their results in the same order.

        Parameters
        ----------
        prompts : iterable
            Texts, token ids, or chat messages.
        raw : bool
            Give text to the model as it is. Otherwise it becomes a user message where the model has a chat template.
        system : str or None
            System message for texts.
        **params
            Changes to the driver's sampling parameters, such as ``max_new_tokens=64``; a list has a value for each prompt.

        Returns
        -------
        Results
            A list with one result per prompt: ``Completed`` or ``Failed``; with ``to_numpy()`` and ``to_pandas()``.
        """
        self._for("generate")
        return Results(self.stream(prompts, raw=raw, system=system, **params))

    @awaitable
    def embed(self, texts: Iterable[Any], *, truncate: str | None = None) -> Results:
        """Return the vector of each text, in the same order; for a driver of task "embed".

        Pooling, normalisation, prompts, dimensions and precision are engine options.

        Parameters
        ----------
        texts : iterable
            Texts, or lists of token ids.
        truncate : {None, "left", "right"}
            What to do with a text that is longer than the model takes: fail it, or drop tokens from that side.

        Returns
        -------
        Results
            ``to_numpy()`` makes one array of them, of shape (texts, dimensions).

        Raises
        ------
        ConfigError
            The driver is for another task.
        """
        self._for("embed")
        return Results(self.stream(texts, truncate=truncate or self.params.truncate))

    @awaitable
    def classify(self, texts: Iterable[Any], *, truncate: str | None = None) -> Results:
        """Return the labels of each text or pair of texts, in the same order; for a driver of task "classify".

        The engine option ``labels`` asks for labels of your own (zero-shot), ``top_k`` for how many.

        Parameters
        ----------
        texts : iterable
            Texts; or pairs, for a model of pairs.
        truncate : {None, "left", "right"}
            As for :meth:`embed`.

        Returns
        -------
        Results
            An output is ``{"label": …, "score": …}``, or a list of them.
        """
        self._for("classify")
        return Results(self.stream(texts, truncate=truncate or self.params.truncate))

    @awaitable
    def score(
        self, pairs: Iterable[Any], others: Iterable[Any] | None = None, *, truncate: str | None = None
    ) -> Results:
        """Return how well the second text of each pair answers the first, in the same order; for task "score".

        Parameters
        ----------
        pairs : iterable, or str
            Pairs of texts, ``("how tall is it?", "8 m")``; or, with ``others``, their first texts, or one for all.
        others : iterable or None
            The second texts.
        truncate : {None, "left", "right"}
            As for :meth:`embed`; the longer text of a pair is cut first.

        Returns
        -------
        Results
            An output is a number; with the engine option ``rank``, and lists as second texts, a ranking.
        """
        self._for("score")
        if others is not None:
            firsts = repeat(pairs) if isinstance(pairs, str) else pairs
            pairs = list(zip(firsts, others, strict=not isinstance(pairs, str)))
        return Results(self.stream(pairs, truncate=truncate or self.params.truncate))

    def _for(self, task: str) -> None:
        if self.spec.task != task:
            raise ConfigError(
                f"{task}() is for task {task!r}, and this driver's is {self.spec.task!r}: call {self.spec.task}(), or make "
                f"the driver with task={task!r}"
            )

    @iterated
    def stream(
        self,
        prompts: Iterable[Any],
        *,
        ordered: bool = True,
        raw: bool = False,
        system: str | None = None,
        priority: int = 0,
        **params: Any,
    ) -> Iterator[Result]:
        """Answer an iterator of prompts of any length, in bounded memory.

        The iterator is advanced only as results are taken. Leaving the loop early aborts the rows in flight. The prompts of
        a live iterator, such as ``iter(queue.get, None)``, are sent one by one; while it keeps us waiting for a prompt no
        result is given, so where a prompt depends on an earlier answer use ``submit_task`` or a ``generate`` each.

        Parameters
        ----------
        prompts : iterable
            As for :meth:`generate`, or for the method of the driver's task. A result's ``id`` is its prompt's position.
        ordered : bool
            In the order of the prompts, else as they are finished.
        priority : int
            Higher is sooner.

        Yields
        ------
        Result
        """
        make = self._maker(prompts, params, raw=raw, system=system)
        return answers(self, iter(prompts), make, ordered=ordered, priority=priority)

    def _maker(
        self, prompts: Iterable[Any], params: Mapping[str, Any], *, raw: bool, system: str | None
    ) -> Callable[[int, Any], Request]:
        if isinstance(prompts, str | bytes | Mapping):
            raise ConfigError(f"prompts must be an iterable of prompts, not one {type(prompts).__name__}")
        return request_maker(prompts, with_seed(self.params), params, raw=raw, system=system, task=self.spec.task)

    @awaitable
    def run(  # noqa: PLR0913 - a run has this much to say
        self,
        source: Any,
        sink: str | os.PathLike[str],
        *,
        prompt: str | None = None,
        columns: str | Sequence[str] | None = None,
        messages: str | None = None,
        keep: Sequence[str] | None = None,
        output_column: str = "output",
        raw: bool = False,
        system: str | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        force: bool = False,
        retry_failed: bool = False,
        limit: int | None = None,
        max_failures: int | str | None = None,
        observers: Sequence[Callable[[Event], None]] = (),
        row_params: str | Mapping[str, str] | None = None,
        preprocess: Preprocess | None = None,
        postprocess: Postprocess | None = None,
        report: bool | None = None,
    ) -> RunReport:
        """Send every row of a source through the model and write it, with its answer, exactly once.

        What was done is on disk every few seconds. A run that was interrupted or killed continues with ``resume=True``. In
        the main thread the first SIGINT or SIGTERM lets rows in flight finish and commits them; the second does not wait.

        Parameters
        ----------
        source : path, pandas.DataFrame or iterable
            See :func:`daskinfer.storage.open_source`.
        sink : path
            A folder of Parquet files, or one ``.jsonl``, ``.parquet`` or ``.csv`` file.
        prompt : str
            Template over columns, such as ``"Summarise: {text}"``.
        columns : str or sequence of str
            The column that holds the prompts; for pairs of texts the two columns, such as ``("query", "passage")``.
        messages : str
            The column that holds chat messages.
        keep : sequence of str
            Input columns to write; None: all.
        output_column : str
            Name of the column with the answers, beside ``finish_reason, prompt_tokens, completion_tokens,
            truncated_tokens, error``.
        raw, system
            As for :meth:`generate`.
        params : SamplingParams or dict
            Instead of the driver's, or changes to them.
        resume, overwrite : bool
            Continue earlier output, or replace it.
        force : bool
            Resume although the configuration is another one; the manifest records both.
        retry_failed : bool
            Run only the rows that failed, and replace them.
        limit : int
            Only the first so many rows of the input.
        max_failures : int or str
            Stop when more rows fail: a number or a percentage. None: when the first 100 rows all fail alike.
        observers : sequence of callable
            Called with every event of the run, in this thread.
        row_params : str or dict of str to str
            Sampling parameters of each row: a column of mappings, or parameter to column. Null stands for ``params``.
        preprocess : callable
            Makes the prompts: a list of rows (dicts) in, a list of prompts out. Runs here; a row it cannot take fails.
        postprocess : callable
            Changes the outputs: a list of outputs in, a list of the same kind out.
        report : bool or None
            Write ``_report.html`` and ``_report.json`` into the output's folder (beside one file: ``_name.report.html``).
            None: the page only when the run took more than 10 seconds; False: neither.

        Returns
        -------
        RunReport

        Raises
        ------
        InputError, OutputError
            Source or sink cannot be used; nothing was run.
        ClusterError
            The cluster cannot do the job.
        TooManyFailuresError
            See ``max_failures``; what was done is on disk.
        JobInterruptedError
            Stopped by a signal; what was done is on disk.
        """
        changed = params if isinstance(params, SamplingParams) else self.params.updated(**(params or {}))
        options = RunOptions(
            prompt=prompt,
            columns=columns,
            messages=messages,
            keep=keep,
            output_column=output_column,
            raw=raw,
            system=system,
            params=changed,
            resume=resume,
            overwrite=overwrite,
            force=force,
            retry_failed=retry_failed,
            limit=limit,
            max_failures=max_failures,
            observers=observers,
            row_params=row_params,
            preprocess=preprocess,
            postprocess=postprocess,
            report=report,
        )
        return execute(self, source, sink, options)


def _task(task: str, engine: str | type, model: str, revision: str | None) -> str:
    if task != "auto":
        return task
    return task_of(model, revision) if engine in ("auto", "encoder") else "generate"
