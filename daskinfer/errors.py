"""Everything daskinfer raises, in one tree.

::

    DaskinferError
    ├── ConfigError (ValueError)          the settings contradict themselves: fix the call
    │   ├── UnknownOptionError            a setting that does not exist
    │   └── UntrustedModelError           the model would run code of its own, which was not allowed
    ├── InputError (ValueError)           the job's input cannot be used: nothing was run
    │   ├── MissingColumnError            a column that the job needs is not there
    │   ├── TemplateError                 a prompt template that cannot be filled
    │   └── SourceError                   a file that cannot be read
    ├── OutputError (ValueError)          the job's output cannot be used: nothing was run
    │   ├── OutputClashError              an output column has the name of an input column
    │   ├── OutputExistsError             there is output already: resume or overwrite
    │   ├── OutputLockedError             another driver is writing there
    │   ├── FingerprintError              resuming would mix two configurations
    │   └── SourceChangedError            an input file changed since the run began
    ├── ClusterError                      the cluster cannot do the job
    │   ├── VersionError                  workers lack daskinfer, or have another version
    │   ├── ResourceError                 memory, threads or devices do not suffice
    │   ├── ModelLoadError                no worker could load the model
    │   └── NoWorkersError                no worker is able to run, and none is coming
    ├── EngineError                       raised by engines; the class says what may be tried next
    │   ├── RowError (ValueError)         this row cannot be served: do not try again
    │   ├── TransientError                the same row may succeed later: try again
    │   ├── OutOfMemoryError              did not fit on the device: try smaller
    │   └── EngineDiedError               the engine is unusable: restart it
    ├── JobError                          the job was stopped
    │   ├── TooManyFailuresError          more rows failed than the job allows
    │   ├── RowFailedError                a row failed and the caller asked for an exception
    │   ├── JobCancelledError             its owner cancelled it
    │   └── JobInterruptedError           stopped on request; what was done is on disk
    ├── NotRunningError (RuntimeError)    the driver was not started, or was stopped
    ├── UnknownTaskError (KeyError, ValueError)  no task has this id
    └── RemoteError                       a foreign exception from another process, as text

Every class pickles: fields go to ``Exception.__init__``, the text is made in ``__str__``. Foreign exceptions cross
processes only as :class:`RemoteError`, since they may need constructor arguments or modules that the other side lacks.

Runs on: anywhere.
"""

from __future__ import annotations

import traceback
from typing import ClassVar

__all__ = [
    "ClusterError",
    "ConfigError",
    "DaskinferError",
    "EngineDiedError",
    "EngineError",
    "FingerprintError",
    "InputError",
    "JobCancelledError",
    "JobError",
    "JobInterruptedError",
    "MissingColumnError",
    "ModelLoadError",
    "NoWorkersError",
    "NotRunningError",
    "OutOfMemoryError",
    "OutputClashError",
    "OutputError",
    "OutputExistsError",
    "OutputLockedError",
    "RemoteError",
    "ResourceError",
    "RowError",
    "RowFailedError",
    "SourceChangedError",
    "SourceError",
    "TemplateError",
    "TooManyFailuresError",
    "TransientError",
    "UnknownOptionError",
    "UnknownTaskError",
    "UntrustedModelError",
    "VersionError",
]

_TEXT_LIMIT = 10_000


class DaskinferError(Exception):
    """Base class of everything daskinfer raises on purpose."""


# ---------------------------------------------------------------- the caller's settings


class ConfigError(DaskinferError, ValueError):
    """A setting has an impossible value, or two settings contradict each other."""


class UnknownOptionError(ConfigError):
    """A setting that does not exist.

    Attributes
    ----------
    option, where : str
        The unknown name, and what it was given to.
    known : tuple of str
        The names that exist there.
    """

    def __init__(self, option: str, where: str, known: tuple[str, ...]) -> None:
        super().__init__(option, where, known)
        self.option, self.where, self.known = option, where, known

    def __str__(self) -> str:
        return f"{self.where} has no option {self.option!r}; it has {', '.join(sorted(self.known))}"


class UntrustedModelError(ConfigError):
    """Loading the model could run code that comes with it, and the settings do not allow that.

    Attributes
    ----------
    model, reason : str
    remedy : str
        What to do, with the name of the setting.
    """

    def __init__(self, model: str, reason: str, remedy: str) -> None:
        super().__init__(model, reason, remedy)
        self.model, self.reason, self.remedy = model, reason, remedy

    def __str__(self) -> str:
        return f"model {self.model!r} is not loaded: {self.reason}; {self.remedy}"


# ---------------------------------------------------------------- the job's input


class InputError(DaskinferError, ValueError):
    """The input cannot be used as it is; nothing was run."""


class MissingColumnError(InputError):
    """A column the job needs is not in the input."""

    def __init__(self, column: str, available: tuple[str, ...], needed_by: str) -> None:
        super().__init__(column, available, needed_by)
        self.column, self.available, self.needed_by = column, available, needed_by

    def __str__(self) -> str:
        return f"{self.needed_by} needs a column {self.column!r}; the input has {', '.join(map(repr, self.available))}"


class TemplateError(InputError):
    """A prompt template cannot be parsed or filled."""

    def __init__(self, template: str, reason: str) -> None:
        super().__init__(template, reason)
        self.template, self.reason = template, reason

    def __str__(self) -> str:
        return f"prompt template {self.template!r}: {self.reason}"


class SourceError(InputError):
    """An input file cannot be read.

    Attributes
    ----------
    path : str
    reason : str
        What is wrong and what to do.
    line : int or None
        1-based line number, where there is one.
    """

    def __init__(self, path: str, reason: str, line: int | None = None) -> None:
        super().__init__(path, reason, line)
        self.path, self.reason, self.line = path, reason, line

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}, line {self.line}"
        return f"{where}: {self.reason}"


# ---------------------------------------------------------------- the job's output


class OutputError(DaskinferError, ValueError):
    """The output cannot be used as it is; nothing was run."""


class OutputClashError(OutputError):
    """An output column has the name of a kept input column."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        super().__init__(columns)
        self.columns = columns

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.columns))
        return (
            f"the input already has {names}, which the job would write; choose another output column "
            "(output_column=, --output-column) or leave those input columns out (keep=, --keep)"
        )


class OutputExistsError(OutputError):
    """There is output already, and neither resume nor overwrite was asked for."""

    def __init__(self, path: str, done: int) -> None:
        super().__init__(path, done)
        self.path, self.done = path, done

    def __str__(self) -> str:
        return (
            f"{self.path} holds output already ({self.done} rows done): "
            "continue it with resume=True (--resume) or replace it with overwrite=True (--overwrite)"
        )


class OutputLockedError(OutputError):
    """Another driver is writing to this output."""

    def __init__(self, path: str, owner: str, age_s: float) -> None:
        super().__init__(path, owner, age_s)
        self.path, self.owner, self.age_s = path, owner, age_s

    def __str__(self) -> str:
        return (
            f"{self.path} is being written by {self.owner} (last sign of life {self.age_s:.0f} s ago); "
            "wait for it to end or stop it, then resume"
        )


class FingerprintError(OutputError):
    """Resuming would mix the answers of two configurations in one output."""

    def __init__(self, path: str, differences: tuple[str, ...]) -> None:
        super().__init__(path, differences)
        self.path, self.differences = path, differences

    def __str__(self) -> str:
        listed = "\n  ".join(self.differences)
        return (
            f"{self.path} was begun with another configuration:\n  {listed}\n"
            "use the old settings, another output, overwrite=True (--overwrite) to start again, "
            "or force=True (--force) to mix the two knowingly"
        )


class SourceChangedError(OutputError):
    """An input file is not the one the run began with."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"{self.path} {self.reason} since this run began, so its rows can no longer be matched with the output; "
            "restore the file, or start again with overwrite=True (--overwrite)"
        )


# ---------------------------------------------------------------- the cluster


class ClusterError(DaskinferError):
    """The cluster cannot do the job."""


class VersionError(ClusterError):
    """Some workers lack daskinfer, or have another version of it.

    Attributes
    ----------
    wanted : str
        The version in the driver's process.
    found : dict of str to str or None
        Worker address to its version; None where daskinfer cannot be imported.
    """

    def __init__(self, wanted: str, found: dict[str, str | None]) -> None:
        super().__init__(wanted, found)
        self.wanted, self.found = wanted, found

    def __str__(self) -> str:
        listed = ", ".join(f"{a}: {v or 'not installed'}" for a, v in sorted(self.found.items())[:5])
        more = f" and {len(self.found) - 5} more" if len(self.found) > 5 else ""
        return (
            f"the driver has daskinfer {self.wanted}, but {listed}{more}; on the scheduler and every worker run: "
            f"pip install 'daskinfer=={self.wanted}'"
        )


class ResourceError(ClusterError):
    """Memory, threads or devices do not suffice; the text names the setting to change."""


class ModelLoadError(ClusterError):
    """No worker could load the model.

    Attributes
    ----------
    model : str
    reasons : dict of str to str
        Worker address to the reason it gave.
    """

    def __init__(self, model: str, reasons: dict[str, str]) -> None:
        super().__init__(model, reasons)
        self.model, self.reasons = model, reasons

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for address, reason in self.reasons.items():
            by_reason.setdefault(reason, []).append(address)
        listed = "\n".join(f"  on {', '.join(sorted(a)[:3])}: {r}" for r, a in by_reason.items())
        return f"no worker could load {self.model}:\n{listed}"


class NoWorkersError(ClusterError):
    """No worker is able to run the job, and none is coming."""


# ---------------------------------------------------------------- engines


class EngineError(DaskinferError):
    """Base class of what engines raise; the subclass says what may be tried next.

    Attributes
    ----------
    kind : str
        The ``Failed.kind`` of a row that fails with this error; an instance may carry its own.
    """

    kind: ClassVar[str] = "engine"


class RowError(EngineError, ValueError):
    """This row cannot be served; trying again cannot help."""

    kind = "rejected"

    def __init__(self, message: str, kind: str = "rejected") -> None:
        super().__init__(message, kind)
        self.message, self.row_kind = message, kind

    def __str__(self) -> str:
        return self.message


class TransientError(EngineError):
    """The same row may succeed on another try."""

    kind = "transient"


class OutOfMemoryError(EngineError):
    """The work did not fit on the device; a smaller piece may."""

    kind = "out_of_memory"


class EngineDiedError(EngineError):
    """The engine's process or device context is unusable: it must be restarted."""

    kind = "engine_died"


# ---------------------------------------------------------------- jobs


class JobError(DaskinferError):
    """The job was stopped before its end."""


class TooManyFailuresError(JobError):
    """More rows failed than the job allows.

    Attributes
    ----------
    failed, seen : int
        Failed rows, and rows that had come back when the job was stopped.
    limit : str
        The rule that was broken.
    example : str
        The most frequent reason.
    """

    def __init__(self, failed: int, seen: int, limit: str, example: str) -> None:
        super().__init__(failed, seen, limit, example)
        self.failed, self.seen, self.limit, self.example = failed, seen, limit, example

    def __str__(self) -> str:
        return f"stopped: {self.failed} of the first {self.seen} rows failed ({self.limit}); most often: {self.example}"


class RowFailedError(JobError):
    """A row failed and the caller asked for an exception rather than a Failed result."""

    def __init__(self, row: int, kind: str, message: str) -> None:
        super().__init__(row, kind, message)
        self.row, self.kind, self.message = row, kind, message

    def __str__(self) -> str:
        return f"row {self.row} failed ({self.kind}): {self.message}"


class JobCancelledError(JobError):
    """The job was cancelled by its owner, so there is no result for some of its rows."""


class JobInterruptedError(JobError):
    """The job was stopped on request; what was done is on disk and can be resumed.

    Attributes
    ----------
    done : int
        Rows whose result is safe.
    path : str or None
        Where the output is, for a run.
    signum : int
        The signal that asked for it.
    """

    def __init__(self, done: int, path: str | None = None, signum: int = 2) -> None:
        super().__init__(done, path, signum)
        self.done, self.path, self.signum = done, path, signum

    def __str__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"interrupted with {self.done} rows done{where}; run again with resume=True (--resume) to continue"


class NotRunningError(DaskinferError, RuntimeError):
    """The driver was not started, or was stopped."""


class UnknownTaskError(DaskinferError, KeyError, ValueError):
    """No task has this id: it was never given out, or its result is older than those that are kept.

    Attributes
    ----------
    task_id : str
    kept : int
        How many finished results are kept.
    """

    def __init__(self, task_id: str, kept: int) -> None:
        super().__init__(task_id, kept)
        self.task_id, self.kept = task_id, kept

    def __str__(self) -> str:
        return (
            f"there is no task {self.task_id!r}: submit_task gives the ids, and of the finished tasks only the last "
            f"{self.kept} are kept"
        )


class RemoteError(DaskinferError):
    """A foreign exception from another process, reduced to text (at most 10 kB).

    Attributes
    ----------
    type_name : str
        Qualified name of the original class.
    message : str
    details : str
        A short traceback, or "".
    """

    def __init__(self, type_name: str, message: str, details: str = "") -> None:
        super().__init__(type_name, message, details)
        self.type_name, self.message, self.details = type_name, message, details

    def __str__(self) -> str:
        head = f"{self.type_name}: {self.message}" if self.message else self.type_name
        return f"{head}\n{self.details}" if self.details else head

    @classmethod
    def from_exception(cls, error: BaseException, *, with_traceback: bool = True) -> RemoteError:
        """Describe any exception as text, whatever its class does when asked for it.

        Parameters
        ----------
        error : BaseException
        with_traceback : bool
            Keep the last frames, shortened so that the whole stays under 10 kB.
        """
        details = ""
        if with_traceback and error.__traceback__ is not None:
            details = _text("".join(traceback.format_tb(error.__traceback__)[-8:]))
            details = details.encode()[-_TEXT_LIMIT // 2 :].decode(errors="ignore")
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return cls(name, safe_str(error), details)


def describe(error: BaseException) -> str:
    """Return ``ClassName: text``, or the class name alone when there is no text."""
    text = safe_str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def safe_str(error: BaseException) -> str:
    """Return ``str(error)`` as valid text of at most 4 kB; a ``__str__`` that raises is said instead of raised."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - any exception may come out of foreign code
        text = f"<its __str__ raised {type(broken).__name__}>"
    limit = 4_000
    data = _text(text[: limit + 1]).encode()
    return data.decode() if len(data) <= limit else data[: limit - 20].decode(errors="ignore") + " … (shortened)"


def _text(text: str) -> str:
    """Return text that can be encoded: half surrogate pairs become their escapes."""
    return text.encode(errors="backslashreplace").decode()
