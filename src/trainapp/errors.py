"""Errors meant for the person at the keyboard: printed as one message, without a stack trace."""


class UserError(Exception):
    """A mistake in settings, data or files. The message names the setting, its value, the rule, and what to do."""

    exit_code = 2


class TrainingStopped(UserError):
    """Training cannot go on (a non-finite loss, no memory left to halve); nothing that was saved is lost."""

    exit_code = 1
