"""``python -m studies.wg_kv``: the sweep over thresholds (``gate_sweep``)."""

import sys

from studies.wg_kv.gate_sweep import main

if __name__ == "__main__":
    sys.exit(main())
