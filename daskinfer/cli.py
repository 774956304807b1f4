"""The command line: ``daskinfer run``, ``daskinfer demo``, ``daskinfer doctor`` and ``daskinfer top``.

Exit codes: 0 all rows completed; 4 finished, but rows failed; 2 the command or its settings are wrong; 1 another error;
130 and 143 interrupted by SIGINT and SIGTERM, resumable.

Runs on: client.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from daskinfer.config import TASKS, HealthPolicy, replaced
from daskinfer.errors import ConfigError, DaskinferError, JobInterruptedError
from daskinfer.records import SamplingParams
from daskinfer.version import __version__

if TYPE_CHECKING:
    from daskinfer.report import RunReport

__all__ = ["main"]

F = TypeVar("F", bound=Callable[..., Any])

OK, ERROR, USAGE, ROWS_FAILED, INTERRUPTED = 0, 1, 2, 4, 130
DEFAULTS = SamplingParams()


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


model_options = _options(
    click.option("--model", required=True, help="A local folder, a GGUF file, or a hub name."),
    click.option("--revision", help="Revision of a hub model."),
    click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16."),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda:0."),
    click.option("--trust-remote-code", is_flag=True, help="Let the model's own Python code run on the workers."),
    click.option(
        "--task",
        type=click.Choice(["auto", *TASKS]),
        default="auto",
        show_default=True,
        help="auto: what the model was made for, as its files say.",
    ),
    click.option("--engine", default="auto", show_default=True, help="auto, the name of one, or pkg.mod:Class."),
    click.option("--engine-options", metavar="JSON", help="The engine's own options, as a JSON object."),
)
prompt_options = _options(
    click.option("--prompt", help="Template over the input's columns, such as 'Summarise: {text}'."),
    click.option(
        "--column", multiple=True, help="The column that holds the prompts or texts; for pairs of texts given twice."
    ),
    click.option("--messages", help="The column that holds chat messages."),
    click.option("--system", help="System message for texts."),
    click.option("--raw", is_flag=True, help="Give text to the model as it is, without its chat template."),
    click.option("--labels", metavar="A,B,…", help="classify: labels of your own (zero-shot), comma-separated."),
)
sampling_options = _options(
    click.option("--max-new-tokens", type=int, default=DEFAULTS.max_new_tokens, show_default=True),
    click.option("--temperature", type=float, default=DEFAULTS.temperature, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, default=DEFAULTS.top_p, show_default=True),
    click.option("--seed", type=int, help="For sampling; drawn and recorded when not given."),
    click.option("--stop", multiple=True, help="Generation ends before this text; may be given several times."),
    click.option(
        "--truncate", type=click.Choice(["left", "right"]), help="Cut a prompt that is too long, on that side."
    ),
)
cluster_options = _options(
    click.option("--workers", type=int, help="Workers of the local cluster; by default one per GPU, or one."),
    click.option("--scheduler", metavar="ADDR", help="Address or file of a running Dask scheduler."),
    click.option(
        "--step-timeout",
        type=float,
        help=f"Seconds after which an engine's step counts as hung; by default {HealthPolicy().step_timeout_s:g}.",
    ),
)
output_options = _options(
    click.option("--keep", metavar="COLS", help="Input columns to keep, comma-separated; by default all."),
    click.option("--output-column", default="output", show_default=True, help="Name of the column with the answers."),
    click.option(
        "--row-params",
        metavar="COL|NAME=COL,…",
        help="Where rows have sampling parameters of their own: a column of JSON objects, or a column for each parameter.",
    ),
    click.option("--limit", type=int, help="Only the first N rows."),
    click.option(
        "--max-failures", metavar="N|P%", help="Stop when more rows fail; by default when the first 100 all do."
    ),
    click.option("--resume", is_flag=True, help="Continue what an earlier run began."),
    click.option("--overwrite", is_flag=True, help="Begin again, replacing earlier output."),
    click.option("--force", is_flag=True, help="Resume although the configuration is another one."),
    click.option("--retry-failed", is_flag=True, help="Run only the rows that failed, and replace them."),
    click.option("--quiet", is_flag=True, help="No progress."),
    click.option(
        "--report/--no-report",
        default=None,
        help="Write a report beside the output; by default its page only after 10 seconds or more.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="daskinfer")
def cli() -> None:
    """Batch inference for Dask: a model on every worker, every row back exactly once."""


@cli.command()
@click.argument("source", metavar="IN")
@click.argument("sink", metavar="OUT")
@model_options
@prompt_options
@sampling_options
@cluster_options
@output_options
def run(source: str, sink: str, **options: Any) -> None:
    """Send the rows of IN through a model and write them, with its answers, to OUT.

    The answers are texts, vectors (--task embed), labels (classify) or scores of pairs (score). How vectors are made is for
    --engine-options, such as '{"pooling": "mean", "normalize": true, "dims": 128, "precision": "float16"}'.

    IN is a .jsonl, .parquet or .csv file, a folder of them, or a pattern. OUT is a folder of Parquet files, or one .jsonl,
    .parquet or .csv file.
    """
    with _interruptible(sink):
        report = _run(source, sink, options)
    _finish(report, as_json=options["as_json"])


@cli.command()
@click.option("--output", default="demo-output", show_default=True, type=click.Path(path_type=Path))
@click.option("--limit", type=int, help="Only the first N countries.")
@click.option("--workers", type=int, help="Workers of the local cluster.")
@click.option("--quiet", is_flag=True, help="No progress.")
def demo(output: Path, limit: int | None, workers: int | None, *, quiet: bool) -> None:
    """Ask a small language model for the capitals of 249 countries; run it again to see it resume."""
    from daskinfer.demo import countries, generation_model

    arguments = [countries(), str(output), "--model", generation_model(), "--max-new-tokens", "32"]
    arguments += ["--prompt", "Name the capital of {country}. Answer with the city only."]
    arguments += ["--resume"] if output.exists() else []
    options = {**run.make_context("run", arguments).params, "workers": workers, "limit": limit, "quiet": quiet}
    with _interruptible(str(output)):
        report = _run(options.pop("source"), options.pop("sink"), options)
    _show_sample(output)
    _finish(report, as_json=False)


@contextmanager
def _interruptible(sink: str) -> Iterator[None]:
    """Exit with 130 on Ctrl-C, which click would make "Aborted!" and 1 of, and say how to go on where there is output."""
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error.__context__, JobInterruptedError):  # the run had ended so; this one came while closing
            raise error.__context__ from None
        from daskinfer.checkpoint.layout import locate

        begun = locate(sink).manifest.exists()
        again = f". To continue:\n  {_resume_command(sys.argv[1:])}" if begun else ""
        click.echo(f"interrupted{again}", err=True)
        sys.exit(INTERRUPTED)


def _run(source: str, sink: str, options: dict[str, Any]) -> RunReport:
    from daskinfer.driver import Driver
    from daskinfer.driver.settings import configured
    from daskinfer.progress import watcher

    driver = Driver(
        options["model"],
        task=options["task"],
        engine=options["engine"],
        engine_options=_engine_options(options),
        params=_sampling(options),
        cluster=options["scheduler"],
        workers=options["workers"],
        health=replaced(configured(HealthPolicy), step_timeout_s=options["step_timeout"]),
        **{name: options[name] for name in ("revision", "dtype", "device", "trust_remote_code")},
    )
    keep = options["keep"]
    try:
        with watcher(quiet=options["quiet"]) as progress:
            return driver.run(
                source,
                sink,
                columns=options["column"] or None,
                keep=None if keep is None else _listed(keep),
                row_params=_row_params(options["row_params"]),
                observers=[progress],
                **{name: options[name] for name in RUN_OPTIONS},
            )
    finally:
        driver.stop()


@cli.command()
@click.option(
    "--scheduler", metavar="ADDRESS", help="A Dask scheduler's address, or a scheduler file; else this machine."
)
@click.option("--model", help="A local model, to compare its size with the memory there is.")
def doctor(scheduler: str | None, model: str | None) -> None:
    """Look a cluster over: what is wrong, what it costs, how to mend it.

    Exits with 1 when something is wrong.
    """
    from daskinfer.doctor import diagnose

    lines, findings = diagnose(scheduler, model)
    for line in [*lines, *map(str, findings)]:
        click.echo(line)
    wrong = sum(finding.wrong for finding in findings)
    click.echo(f"{wrong} wrong, {len(findings) - wrong} notes")
    sys.exit(ERROR if wrong else OK)


@cli.command()
@click.argument("address", default="localhost:8787", metavar="[ADDRESS]")
@click.option("--once", is_flag=True, help="Print the figures once.")
@click.option("--every", default=1.0, show_default=True, help="Seconds between two looks.")
def top(address: str, every: float, *, once: bool) -> None:
    """Watch the jobs and workers of a cluster.

    ADDRESS is that of the scheduler's dashboard, such as localhost:8787 or http://host:8787/status.
    """
    from rich.console import Console

    from daskinfer.top import address_of, watch

    with suppress(KeyboardInterrupt):
        watch(address_of(address), Console(), once=once, every_s=every)


RUN_OPTIONS = (
    *("prompt", "messages", "system", "raw", "output_column", "limit", "max_failures"),
    *("resume", "overwrite", "force", "retry_failed", "report"),
)


def _sampling(options: dict[str, Any]) -> SamplingParams:
    names = ("max_new_tokens", "temperature", "top_p", "seed", "stop", "truncate")
    return SamplingParams(**{name: options[name] for name in names if name in options})


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    found = _json_object("--engine-options", options["engine_options"])
    return found if options["labels"] is None else {**found, "labels": _listed(options["labels"])}


def _row_params(text: str | None) -> str | dict[str, str] | None:
    """Return a column, or the column of each parameter."""
    if text is None or "=" not in text:
        return text
    pairs = [item.partition("=") for item in _listed(text)]
    wrong = next((name for name, sign, column in pairs if not (name and sign and column)), None)
    if wrong is not None:
        raise ConfigError(f"--row-params={text!r}: {wrong!r} must be NAME=COLUMN, such as temperature=temp")
    return {name.strip(): column.strip() for name, _, column in pairs}


def _listed(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _json_object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"{option}={text!r}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}={text!r}: must be a JSON object such as '{{\"max_batch_rows\": 16}}'")
    return value


def _show_sample(
    output: Path, names: tuple[str, ...] = ("France", "Japan", "Kenya", "Norway", "Peru", "Egypt")
) -> None:
    """Print some answers of the demo."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    table = ds.dataset(output, format="parquet").to_table(columns=["country", "output", "error"])
    chosen = table.filter(pc.is_in(table["country"], value_set=pc.cast(list(names), table["country"].type)))
    for row in (chosen if len(chosen) else table.slice(0, 6)).to_pylist():
        click.echo(f"  {row['country']:<10} {row['output'] or row['error']}")


def _finish(report: RunReport, *, as_json: bool) -> None:
    click.echo(json.dumps(report.to_dict(timeline=False), ensure_ascii=False, indent=1) if as_json else str(report))
    sys.exit(ROWS_FAILED if report.failed else OK)


def _resume_command(arguments: list[str]) -> str:
    """Return the command that goes on; with --retry-failed alone, --resume would add all rows that never ran."""
    if arguments[:1] == ["demo"] or "--retry-failed" in arguments:
        return shlex.join(["daskinfer", *arguments])
    return shlex.join(["daskinfer", *(a for a in arguments if a not in ("--overwrite", "--resume")), "--resume"])


def main() -> None:
    """Run the command line; every error of ours is one sentence and an exit code."""
    try:
        cli(standalone_mode=True)
    except JobInterruptedError as error:
        click.echo(
            f"interrupted: {error.done} rows are done and safe. To continue:\n  {_resume_command(sys.argv[1:])}",
            err=True,
        )
        sys.exit(128 + error.signum)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(USAGE)
    except DaskinferError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ERROR)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
