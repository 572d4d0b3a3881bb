"""The base of all errors that tell a user what to change."""

from __future__ import annotations


class UserError(ValueError):
    """A call or a file that cannot be used. The message names the call as written, the rule and the way out.

    Commands print the message as one sentence on standard error and exit with code 2.
    """
