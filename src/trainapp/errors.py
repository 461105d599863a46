"""Errors for the user: printed as one message, without a stack trace."""

import traceback

# Kinds of errors, as `error_kind` in result.json and in the journal of a sweep.
OUT_OF_MEMORY = "out_of_memory"
NOT_FINITE = "not_finite"
EXCEPTION = "exception"  # any other than a UserError, of a user's module or of the program


class UserError(Exception):
    """A mistake in settings, data or files. The message names the setting, its value, the rule, and what to do."""

    exit_code = 2
    kind = "mistake"

    def __init__(self, *message: object):
        # torch re-raises it from a loader worker, with that process's traceback before the message.
        super().__init__(*(str(text).rpartition("trainapp.errors.UserError: ")[2].strip() for text in message))


class TrainingStopped(UserError):
    """Training cannot continue (a non-finite loss, no smaller micro-batch to try); saved checkpoints are kept."""

    exit_code = 1
    kind = "training_stopped"


class NotFinite(TrainingStopped):
    """An inf or nan in a loss or gradient has ended the training."""

    kind = NOT_FINITE


class OutOfMemory(TrainingStopped):
    """Memory has run out, and no smaller micro-batch can help."""

    kind = OUT_OF_MEMORY


class MustRestart(OutOfMemory):
    """Memory has run out in a way that has broken this process: a new one can continue from the last checkpoint.

    Args:
        message: for the user.
        has_saved: whether this process has saved a checkpoint.
    """

    def __init__(self, message: str, has_saved: bool = False):
        super().__init__(message)
        self.has_saved = has_saved


class Reported(SystemExit):
    """Carries a UserError past Hydra, which prints its own line before every Exception, or hides it."""

    def __init__(self, error: UserError):
        super().__init__(error.exit_code)
        self.error = error


def add_note(error: BaseException, note: str) -> None:
    """Add a line to the error's traceback (shown from Python 3.11 on)."""
    setattr(error, "__notes__", [*getattr(error, "__notes__", []), note])  # noqa: B010  # `BaseException.add_note` is newer


def summary_of(error: BaseException) -> str:
    """Return an error's type and the first line of its message, for a report; of an `assert` without a message, its
    code.
    """
    first_line = str(error).strip().partition("\n")[0]
    if not first_line and isinstance(error, AssertionError):
        frames = traceback.extract_tb(error.__traceback__)
        first_line = (frames[-1].line or "") if frames else ""
    return f"{type(error).__name__}: {first_line}".removesuffix(": ")
