"""The table of methods: ``python -m kvjax.catalogue [--write README.md]``."""

from __future__ import annotations

from kvjax import cli
from kvjax.catalogue._table import main

if __name__ == "__main__":
    cli.start(main)
