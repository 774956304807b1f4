"""The notebooks run, and give what is committed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
FIRST = "01-quickstart"


def outputs(notebook: Path) -> list[list[str]]:
    """The text that each code cell wrote or gave; Dask's warnings about closing are another matter."""
    read: dict[str, Any] = json.loads(notebook.read_text("utf-8"))
    return [
        ["".join(o["text"] if "text" in o else o["data"]["text/plain"]) for o in told(cell)]
        for cell in read["cells"]
        if cell["cell_type"] == "code"
    ]


def told(cell: Any) -> list[Any]:
    return [output for output in cell["outputs"] if output.get("name") != "stderr"]


def marked(notebook: Path) -> Any:
    """The first one runs every time; the others take longer."""
    marks = [] if notebook.stem == FIRST else [pytest.mark.slow, pytest.mark.timeout(400)]
    return pytest.param(notebook, marks=marks, id=notebook.stem)


@pytest.mark.cluster
@pytest.mark.parametrize("notebook", [marked(path) for path in NOTEBOOKS])
def test_a_notebook_gives_what_is_committed(notebook: Path, tmp_path: Path) -> None:
    copy = tmp_path / notebook.name
    copy.write_bytes(notebook.read_bytes())
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(copy)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110 if notebook.stem == FIRST else 380,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert outputs(copy) == outputs(notebook)
    assert any(outputs(notebook))


def test_there_is_a_quickstart_and_what_follows_it() -> None:
    assert [path.stem for path in NOTEBOOKS[:5]] == [
        FIRST,
        "02-dataframes",
        "03-embeddings",
        "04-fault-tolerance",
        "05-cluster",
    ]
