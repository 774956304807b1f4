"""The notebooks run, and give what is committed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def outputs(notebook: Path) -> list[list[str]]:
    """The text that each code cell wrote or gave."""
    read: dict[str, Any] = json.loads(notebook.read_text("utf-8"))
    return [
        ["".join(o["text"] if "text" in o else o["data"]["text/plain"]) for o in cell["outputs"]]
        for cell in read["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.cluster
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_what_is_committed(notebook: Path, tmp_path: Path) -> None:
    copy = tmp_path / notebook.name
    copy.write_bytes(notebook.read_bytes())
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert outputs(copy) == outputs(notebook)
    assert any(outputs(notebook))


def test_there_is_a_quickstart() -> None:
    assert "01-quickstart" in [path.stem for path in NOTEBOOKS]
