"""The errors that asyncrl raises on purpose: one base, few children, all picklable.

Every message says what happened, the numbers that disagree, and what to do.
"""


class AsyncRLError(Exception):
    """The base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """An option has a value that cannot work; the message names option, value and range."""


class DataError(AsyncRLError, ValueError):
    """A record of a data set cannot be used; the message names file, line and field."""


class VersionError(AsyncRLError, ValueError):
    """A weight version went backwards, or is newer than the trainer's."""


class TagError(AsyncRLError, LookupError):
    """A group lacks a tag, or has one of the wrong kind; the message names key and tag."""


class FilterError(AsyncRLError, RuntimeError):
    """A filter broke its contract; the message names the filter."""


class DataPlaneError(AsyncRLError, RuntimeError):
    """The data plane refused an operation or gave a wrong answer."""


class DataPlaneDown(DataPlaneError):
    """A process of the data plane no longer answers."""


class StoreFull(DataPlaneError):
    """The store has no room for a put; nothing of the put was kept."""


class MissingRows(DataPlaneError, LookupError):
    """Keys or columns asked for do not exist; the message names them."""


class ClaimLost(DataPlaneError):
    """A claim was given to another owner; its fencing number no longer counts."""


class Overdue(AsyncRLError, TimeoutError):
    """A wait reached its deadline; the message says who waited for what, and how long."""


class DataPlaneSilent(Overdue):
    """The data plane did not answer a call; it may hang."""


class GenerationError(AsyncRLError, RuntimeError):
    """Groups failed in a collector; the message carries the collector's own traceback."""


class ActorDied(AsyncRLError, RuntimeError):
    """An actor of the run died or stopped answering; `actor` is its name."""

    def __init__(self, message: str, *, actor: str = "") -> None:
        super().__init__(message)
        self.actor = actor


class EngineDied(GenerationError):
    """The process of an inference engine inside a collector ended."""


class RefillExhausted(AsyncRLError, RuntimeError):
    """Dynamic sampling used up its attempts; the message names the drops by reason."""


class NothingLearned(AsyncRLError, RuntimeError):
    """Too many batches in a row had nothing to train; the message says where their samples went."""


class TraceError(AsyncRLError, ValueError):
    """An event log is not there, cannot be read, or does not hold what was asked of it."""


class CheckpointBroken(AsyncRLError, ValueError):
    """A checkpoint is not what was written; the message names the file and what is wrong with it."""


class NotWritten(AsyncRLError, OSError):
    """A file of the run could not be written; the message names it and the cause."""

    @classmethod
    def of(cls, path: object, cause: BaseException) -> "NotWritten":
        """Name the file and the cause."""
        return cls(f"{path} could not be written: {cause}")
