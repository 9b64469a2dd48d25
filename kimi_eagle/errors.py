"""The errors that a user sees: one sentence each, and the exit code of the command that met them."""


class KimiEagleError(Exception):
    """Base of the errors that end a command with one sentence instead of a traceback."""

    exit_code = 1


class StageFailed(KimiEagleError):
    """A stage ran and failed; what was done before it is kept (exit code 1)."""


class CallFailed(StageFailed):
    """An engine answered a call with an error, and is still there."""


class BadInput(KimiEagleError):
    """A parameter, path or artifact is wrong; the sentence says which, where, and what to do (exit code 2)."""

    exit_code = 2


class MissingCapability(KimiEagleError):
    """This machine or this vLLM cannot do what is asked; said before the long work starts (exit code 3)."""

    exit_code = 3
