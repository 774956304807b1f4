"""``python -m daskinfer`` is the command line.

Runs on: client.
"""

from __future__ import annotations

from daskinfer.cli import main

if __name__ == "__main__":
    main()
