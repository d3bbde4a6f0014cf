"""The one exception of the experiment that is meant for the person at the command line."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: the message is one sentence that says what and how.

    The command line prints it as ``error: <sentence>`` without a traceback and exits with 2.
    """
