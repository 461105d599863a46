"""Errors meant for the person at the keyboard: printed as one message, without a stack trace."""


class UserError(Exception):
    """A mistake in settings, data or files. The message names the setting, its value, the rule, and what to do."""

    exit_code = 2


class TrainingStopped(UserError):
    """Training cannot continue (a non-finite loss, no smaller micro-batch to try); saved checkpoints are kept."""

    exit_code = 1
