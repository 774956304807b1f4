"""The shape of the code: layers, sizes, and where each module runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "daskinfer").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in MODULES]
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
DECLARATIONS = {"daskinfer/errors.py", "daskinfer/records.py", "daskinfer/driver/driver.py"}
"""Modules that mostly declare and document: their docstrings and comments are not counted."""


def code_lines(source: str) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for n, line in lines if line.strip() and not line.lstrip().startswith("#") and n not in docstrings)


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's own docstring: what it promises may be long, what it does may not."""
    first = function.body[0]
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def test_imports_keep_to_the_layers() -> None:
    pytest.importorskip("importlinter")
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_files_are_short(name: str) -> None:
    source = (ROOT / name).read_text()
    lines = code_lines(source) if name in DECLARATIONS else len(source.splitlines())
    assert lines <= MAX_LINES, f"{name} has {lines} lines; split it"


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_short(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1 - docstring_lines(f)) for f in functions]
    assert [(f, n) for f, n in lengths if n > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_module_says_where_it_runs(name: str) -> None:
    doc = ast.get_docstring(ast.parse((ROOT / name).read_text())) or ""
    last = doc.rpartition("\n\n")[2]
    assert re.match(r"Runs on: .*\b(client|worker|scheduler|anywhere|nowhere)\b", last), f"{name} ends with {last!r}"
