"""The documents are true: what they repeat from the code is compared with it, what they cite exists, their examples run."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import dask
import pytest

from daskinfer import errors, faults, window
from daskinfer.config import HealthPolicy, ModelSpec, RetryPolicy
from daskinfer.engines import engine_names, resolve
from daskinfer.host import host
from daskinfer.records import FailureKind

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def block(page: str, language: str, part: str) -> str:
    """The one block that has this in it."""
    (found,) = (code for code in blocks(page, language) if part in code)
    return found


def drawing(module: Any) -> str:
    """The literal block in a module's docstring."""
    return textwrap.dedent((module.__doc__ or "").split("::\n\n", 1)[1].split("\n\n", 1)[0]).strip()


def tables(page: str) -> list[dict[str, list[str]]]:
    """The tables of a page: the first cell of each row, without code marks, and the others."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", read(page), re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        found.append({first.replace("`", ""): rest for first, *rest in rows if not set(first) <= set("-: ")})
    return found


def table(page: str, *heading: str) -> dict[str, list[str]]:
    first, *rest = heading
    matching = [t for t in tables(page) if next(iter(t.items())) == (first, rest)]
    assert len(matching) == 1, f"{page}: {len(matching)} tables with the heading {heading}"
    return dict(list(matching[0].items())[1:])


# ---------------------------------------------------------------- what is cited


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_cited_tests_and_files_exist(page: Path) -> None:
    for cited in re.findall(
        r"`((?:tests|benchmarks|docs|examples|daskinfer)/[^`\s<]+)`", page.read_text(encoding="utf-8")
    ):
        name, _, test = cited.partition("::")
        assert (ROOT / name).exists(), cited
        if test:
            functions = [n.name for n in ast.walk(ast.parse(read(name))) if isinstance(n, ast.FunctionDef)]
            assert test in functions, cited


def test_the_promises_name_their_tests() -> None:
    promises = table("README.md", "promise", "held by")
    assert len(promises) >= 8
    assert all("::test_" in held for (held,) in promises.values())


def test_cited_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8"))) <= targets, page


def test_cited_options_of_the_command_line_exist() -> None:
    from daskinfer.cli import cli

    run = cli.commands["run"]
    known = {option for parameter in run.params for option in parameter.opts if option.startswith("--")}
    for page in ("README.md", "docs/files.md", "docs/errors.md"):
        text = re.sub(r"pip install[^`\n]*", "", read(page))
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known, page


# ---------------------------------------------------------------- what is repeated


def test_the_error_tree() -> None:
    assert blocks("docs/errors.md", "text") == [drawing(errors) + "\n"]


def test_the_kinds_of_failed_rows() -> None:
    assert list(table("docs/errors.md", "kind", "meaning")) == [str(kind) for kind in FailureKind]


def test_the_exit_codes() -> None:
    from daskinfer import cli

    stated = table("docs/errors.md", "code", "meaning")
    assert list(stated) == ["0", "4", "2", "1", "130, 143"]
    assert [cli.OK, cli.ROWS_FAILED, cli.USAGE, cli.ERROR] == [0, 4, 2, 1]


@pytest.mark.parametrize("title", faults.TABLES)
def test_the_verdicts(title: str) -> None:
    lines = ["| fault | history | verdict | why |", "|---|---|---|---|"]
    lines += [f"| {rule.fault} | {rule.history} | {rule.do.value} | {rule.why} |" for rule in faults.TABLES[title]]
    drawn = "\n".join(lines) + "\n\n"
    page = read("docs/faults.md")
    assert drawn in page, f"docs/faults.md must have, under the title {title}:\n{drawn}"
    assert page[: page.index(drawn)].rpartition("## ")[2].startswith(title)


@pytest.mark.parametrize("policy", [RetryPolicy, HealthPolicy])
def test_the_settings(policy: type) -> None:
    wanted = {field.name: str(field.default) for field in fields(policy)}
    stated = [t for t in tables("docs/faults.md") if next(iter(wanted)) in t]
    assert [{name: rest[0] for name, rest in t.items() if name != "field"} for t in stated] == [wanted]


def test_the_states() -> None:
    _, *states = blocks("docs/architecture.md", "text")
    assert states == [drawing(window) + "\n", drawing(host) + "\n"]


def test_every_module_has_its_place() -> None:
    stated = [
        name for (cell,) in table("docs/architecture.md", "where", "modules").values() for name in cell.split(", ")
    ]
    modules = {
        path.stem for path in (ROOT / "daskinfer").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    named = [name.strip("`") for name in stated]
    assert len(named) == len(set(named))
    assert {name for name in named if "." not in name} == modules - {"__init__", "__main__"}


def test_the_engines_and_their_options() -> None:
    from daskinfer.engines.encoder.options import EncoderOptions
    from daskinfer.engines.lm.settings import Settings
    from daskinfer.engines.transformers import TransformersEngine

    assert set(table("docs/engines.md", "name", "what it is")) == set(engine_names())
    assert f'`engine="auto"` is `{resolve(ModelSpec("any"))}`' in read("docs/engines.md")
    stated = [set(", ".join(t).split(", ")) - {"option"} for t in tables("docs/engines.md") if "option" in t]
    ours = [{field.name for field in fields(options)} for options in (Settings, EncoderOptions)]
    assert stated == [set(TransformersEngine.options), *ours]


def test_the_protocol() -> None:
    from daskinfer.engines.base import Engine

    promised = {name for name, _ in inspect.getmembers(Engine, inspect.isroutine) if not name.startswith("_")}
    stated = {name.partition("(")[0] for name in table("docs/engines.md", "method", "promise")}
    assert stated == promised | {"__init__"}


# ---------------------------------------------------------------- the files around


def bound(requirement: str) -> tuple[str, str]:
    found = re.match(r"([\w-]+)(?:\[.*\])? ?(.*)", requirement)
    assert found is not None
    return found[1], found[2]


def conda(text: str, folder: Path) -> dict[str, str]:
    """The packages of a conda environment and their limits."""
    file = folder / "environment.yml"
    file.write_text(text, encoding="utf-8")
    (environment,) = dask.config.collect_yaml([str(file)])
    assert isinstance(environment, dict)
    return dict(bound(name) for name in environment["dependencies"] if isinstance(name, str))


def test_the_conda_environments_ask_for_what_the_package_asks_for(tmp_path: Path) -> None:
    laptop = read("environment.yml")
    _, _, commented = laptop.partition("# channels:\n")
    gpu = "\n".join(line.removeprefix("# ") for line in ("# channels:\n" + commented).splitlines())
    wanted = dict(bound(requirement) for requirement in PYPROJECT["project"]["dependencies"])
    for text, torch, given in ((laptop, "pytorch-cpu", ()), (gpu, "pytorch-gpu", ("dask", "distributed"))):
        found = conda(text, tmp_path)
        found["torch"] = found.pop(torch)
        asked = {name: limit for name, limit in wanted.items() if name not in given}
        assert {name: found.get(name) for name in asked} == asked
        assert found["python"].startswith(PYPROJECT["project"]["requires-python"])


def test_coverage_is_asked_of_the_whole_core() -> None:
    core = next(c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith("The core knows"))
    listed = re.search(r"^CORE := (.*)$", read("Makefile"), re.MULTILINE)
    assert listed is not None
    assert {f"daskinfer.{name}" for name in listed[1].split()} == set(core["source_modules"])


# ---------------------------------------------------------------- the examples

MODEL = 'Driver("HuggingFaceTB/SmolLM2-135M-Instruct")'


def run_example(code: str, folder: Path) -> str:
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "countries.csv", folder / "examples")
    (folder / "example.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.cluster
def test_the_first_example_runs(tmp_path: Path) -> None:
    code = blocks("README.md", "python")[0]
    assert MODEL in code
    assert len(code.splitlines()) <= 10
    printed = run_example(code.replace(MODEL, 'Driver("echo", engine="echo")'), tmp_path)
    assert "<Name the capital of France.>" in printed
    assert "249 rows" in printed
    assert len(list((tmp_path / "capitals").glob("data-*.parquet"))) >= 1


@pytest.mark.slow
@pytest.mark.cluster
def test_the_example_of_vectors_runs(tmp_path: Path) -> None:
    model = 'Driver("sentence-transformers/all-MiniLM-L6-v2", task="embed")'
    code = block("README.md", "python", model)
    options = 'engine="echo", engine_options={"output": "vector", "dims": 384}'
    echo = f'Driver("echo", task="embed", {options})'
    assert run_example(code.replace(model, echo), tmp_path).strip() == "(2, 384) float32"
    assert len(list((tmp_path / "vectors").glob("data-*.parquet"))) == 1


def test_the_example_of_settings_runs(tmp_path: Path) -> None:
    code = block("README.md", "python", "daskinfer.health.step-timeout-s")
    assert run_example(code + "print(driver.health.step_timeout_s, driver.retry.retries)", tmp_path).split() == [
        "60",
        "5",
    ]


@pytest.mark.cluster
@pytest.mark.parametrize(("at", "printed"), [(0, "['HELLO?', 'WORLD?']"), (1, ""), (2, '["engine_died: ')])
def test_the_examples_of_engines_run(at: int, printed: str, tmp_path: Path) -> None:
    code = blocks("docs/engines.md", "python")
    assert len(code) == 3
    assert run_example(code[at], tmp_path).startswith(printed)


@pytest.mark.cluster
def test_the_example_of_an_observer_runs(tmp_path: Path) -> None:
    (code,) = blocks("docs/observe.md", "python")
    assert run_example(code, tmp_path).split() == ["2"]


def test_the_page_of_what_is_shown_names_the_metrics_that_there_are() -> None:
    from daskinfer.dashboard import prometheus

    source = Path(prometheus.__file__).read_text(encoding="utf-8")
    named = re.findall(r"daskinfer_([a-z_]+[a-z])`", read("docs/observe.md"))
    assert len(named) >= 15
    for name in named:
        bare = re.sub(r"_(total|per_second)$", "", name)
        assert f'"{bare}' in source, name
