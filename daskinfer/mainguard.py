"""A script that starts processes must be importable: each new process imports it again.

Runs on: client.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType

from daskinfer.errors import ConfigError

__all__ = ["check_main_guard"]


def check_main_guard() -> None:
    """Refuse to start workers from the top level of a script, where every worker would start workers again.

    Raises
    ------
    ConfigError
        The running script calls this outside ``if __name__ == "__main__":``.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:  # a notebook, a console, or python -c
        return
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - how the standard library asks who called
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename == script and not _guarded(script, frame.f_lineno):
            raise ConfigError(
                f"{script}, line {frame.f_lineno}: this starts worker processes, and each of them imports the script again; "
                'put what the script does under if __name__ == "__main__":'
            )
        frame = frame.f_back


def _guarded(script: str, line: int) -> bool:
    """Whether the line stands inside an ``if`` that asks for ``__name__``; also when that cannot be found out."""
    try:
        tree = ast.parse(Path(script).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return True
    return any(
        node.lineno <= line <= (node.end_lineno or line)
        and any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
    )
