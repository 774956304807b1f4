"""Results as they are taken on from here: a list of them, one array, or a DataFrame.

Runs on: client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskinfer.errors import ConfigError, RowFailedError
from daskinfer.records import Completed, Failed, Result

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

__all__ = ["Results"]


class Results(list[Result]):
    """One result per row, in the order of the rows.

    Examples
    --------
    >>> import numpy as np
    >>> from daskinfer.records import Completed, Failed
    >>> results = Results([Completed(0, np.array([1.0, 2.0])), Failed(1, "too_long", "9 tokens")])
    >>> results.to_numpy(failed=0)
    array([[1., 2.],
           [0., 0.]])
    """

    @property
    def outputs(self) -> list[Any]:
        """The output of each row; None for a failed one."""
        return [result.output if isinstance(result, Completed) else None for result in self]

    @property
    def failures(self) -> list[Failed]:
        """The failed rows."""
        return [result for result in self if isinstance(result, Failed)]

    def to_numpy(self, *, failed: float | None = None) -> npt.NDArray[Any]:
        """Return the outputs as one array: vectors of n rows have shape (n, dims), scores (n,), anything else is objects.

        Parameters
        ----------
        failed : float or None
            What fills the place of a failed row, such as ``float("nan")``, or 0 in vectors of whole numbers; among objects
            it is None that does. None: a failed row is an error.

        Raises
        ------
        RowFailedError
            A row has failed, and ``failed`` is None; it says how many, and why the first did. Or all rows have failed, so
            that nothing says what their vectors are like.
        ConfigError
            The vectors' type cannot hold ``failed``, such as nan in whole numbers.
        """
        import numpy as np

        outputs, failures = self.outputs, self.failures
        found = next((output for output in outputs if output is not None), None)
        if failures and (failed is None or len(failures) == len(self)):
            raise _failed(failures, len(self), found)
        if isinstance(found, np.ndarray) and found.ndim:
            filled = outputs
            if failures:
                nothing = _filled(found, failed)
                filled = [nothing if output is None else output for output in outputs]
            return np.concatenate(filled).reshape(len(filled), *found.shape)
        if isinstance(found, float | np.floating):
            return np.array([failed if output is None else output for output in outputs], np.float32)
        array = np.empty(len(outputs), object)
        array[:] = outputs
        return array

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with the columns that a run writes: output, finish_reason, the counts of tokens, error.

        A vector is an array in its cell, a view of the block that it came in. The index holds the rows' ids.
        """
        import pandas as pd

        done = [result if isinstance(result, Completed) else None for result in self]
        outputs: Any = self.outputs
        is_plain = all(isinstance(output, str | float | None) for output in outputs)
        columns = {
            "output": pd.Series(outputs, dtype=None if is_plain else object),
            "finish_reason": _column([r and r.finish_reason and str(r.finish_reason) for r in done], "string"),
            "prompt_tokens": _column([r and r.usage.prompt_tokens for r in done], "Int64"),
            "completion_tokens": _column([r and r.usage.completion_tokens for r in done], "Int64"),
            "truncated_tokens": _column([r and r.usage.truncated_tokens for r in done], "Int64"),
            "error": _column([r.error if isinstance(r, Failed) else None for r in self], "string"),
        }
        return pd.DataFrame(columns).set_axis(pd.Index([result.id for result in self], name="id"))


def _failed(failures: list[Failed], rows: int, found: Any) -> RowFailedError:
    """Return the error that says how many rows failed, and what to do about them."""
    first = failures[0]
    if len(failures) == rows:
        advice = "all rows failed, so that there is nothing to make an array of; see results.failures"
    else:
        whole = getattr(getattr(found, "dtype", None), "kind", "f") in "iub"
        filler = "0" if whole else "float('nan')"
        advice = (
            f"{len(failures)} of {rows} rows failed; say what is to stand for them, such as to_numpy(failed={filler})"
        )
    return RowFailedError(first.id, first.kind, f"{first.message}. {advice}")


def _filled(like: npt.NDArray[Any], value: float | None) -> npt.NDArray[Any]:
    """Return such an array that is this value everywhere."""
    import numpy as np

    try:
        with np.errstate(invalid="raise", over="raise"):
            made = np.full(like.shape, value, like.dtype)
        exact = like.dtype.kind in "fc" or bool((made == value).all())
    except (ArithmeticError, ValueError, TypeError):
        exact = False
    if not exact:
        raise ConfigError(
            f"failed={value!r}: vectors of type {like.dtype} cannot hold it; give a number that they can, such as 0, and "
            "see results.failures for the rows it stands for"
        )
    return made


def _column(values: list[Any], dtype: str) -> Any:
    import pandas as pd

    made: Any = pd.Series(values, dtype=dtype)
    return made
