"""The commands: one place that reads the command line and turns every outcome into an exit code.

0 done; 2 bad input, one sentence on standard error; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs a command; the exit code.

    Args:
      argv: the words after ``python -m kvjax.eval``; None reads them from the process.
    """
    from kvjax.algebra import PolicyError
    from kvjax.decode import RequestError
    from kvjax.eval import commands
    from kvjax.eval.errors import EvalError
    from kvjax.models.hf_config import ModelError

    try:
        commands.do(sys.argv[1:] if argv is None else argv)
    except (EvalError, PolicyError, ModelError, RequestError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    code = main()
    if code == 130:
        # The compiler's threads may still be at work, and tearing them down crashes the interpreter.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
