"""``python -m studies.wg_kv``: the sweep over thresholds (``gate_sweep``)."""

from kvjax import cli
from studies.wg_kv.gate_sweep import main

if __name__ == "__main__":
    cli.start(main)
