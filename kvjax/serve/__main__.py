"""The command: one place that turns every outcome into an exit code.

0 done; 2 bad input, one sentence on standard error; 130 stopped by Ctrl-C; 141 the reader went away.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs the command; the exit code.

    Args:
      argv: the words after ``python -m kvjax.serve``; None reads them from the process.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # What is left in the buffer has no reader; without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str]) -> int:
    from kvjax.algebra import PolicyError
    from kvjax.decode import RequestError
    from kvjax.models.hf_config import ModelError
    from kvjax.serve.arguments import InputError, parse
    from kvjax.serve.command import run

    try:
        run(parse(argv))
    except (InputError, PolicyError, ModelError, RequestError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    if code == 130:
        # The compiler's threads may still be at work, and tearing them down crashes the interpreter.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
