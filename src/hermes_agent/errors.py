"""The one error vocabulary.

    HermesError
    ├── UsageError                 the caller asked for something that cannot be
    │   ├── UnknownSession
    │   ├── AmbiguousSession
    │   ├── SessionExists          the id of a new session is taken
    │   ├── InvalidTitle           empty, or another session's
    │   └── SettingsError
    ├── StoreError
    │   ├── StoreMissing           there is nothing to read yet
    │   ├── StoreLocked            another process holds the write lock
    │   ├── StoreFull              no space left
    │   ├── StoreReadOnly
    │   ├── StoreDamaged           the file is not a sound database any more
    │   ├── StoreReplaced          the path now names another file
    │   ├── StoreForeign           somebody else's file, or a newer one
    │   ├── StoreUnsafePlace       WAL would not be safe on this file system
    │   └── CommitUnknown          a commit failed half way: it may or may not be there
    ├── LeaseError
    │   ├── SessionBusy            another live owner runs a turn on this session
    │   └── StaleLease             our lease was taken over; what we hold is void
    ├── DeliveryError              a message was not taken
    │   ├── MessageConflict        its id was used for another message
    │   ├── ConversationMoved      it does not stand where the message was to follow
    │   ├── QueueFull              too much waits already
    │   └── Draining               this process is about to stop
    ├── ProviderError              the model call failed; carries status, wait and text
    ├── ToolError                  a tool refused its arguments or could not do its work
    └── TurnInterrupted            the person stopped the turn

Every error carries one `FailureReason`; what may be done about it stands in `FAILURES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureReason(StrEnum):
    """Why something failed: one vocabulary for models, tools, the store and delivery."""

    RATE_LIMIT = "rate_limit"
    OVERLOADED = "overloaded"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    INVALID_RESPONSE = "invalid_response"
    EMPTY_RESPONSE = "empty_response"
    INVALID_TOOL_CALLS = "invalid_tool_calls"
    TRUNCATED = "truncated"
    CONTEXT_OVERFLOW = "context_overflow"
    AUTH = "auth"
    BILLING = "billing"
    MODEL_NOT_FOUND = "model_not_found"
    CONTENT_BLOCKED = "content_policy_blocked"
    BAD_REQUEST = "format_error"
    NOT_CONFIGURED = "missing_config"
    INTERRUPTED = "interrupted"
    MAX_ITERATIONS = "max_iterations"
    SESSION_BUSY = "session_busy"
    STALE_LEASE = "stale_lease"
    POISON = "poison"
    DEADLINE = "deadline"
    MESSAGE_CONFLICT = "message_conflict"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    STORE_MISSING = "store_missing"
    STORE_LOCKED = "store_locked"
    STORE_FULL = "store_full"
    STORE_READ_ONLY = "store_read_only"
    STORE_DAMAGED = "store_damaged"
    STORE_REPLACED = "store_replaced"
    STORE_FOREIGN = "store_foreign"
    STORE_UNSAFE_PLACE = "store_unsafe_place"
    STORE_IO = "store_io"
    TOOL_FAILED = "tool_failed"
    USAGE = "usage"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Failure:
    """What a reason means for the program and for the person."""

    retry: bool
    """The same request may succeed later without anybody changing anything."""
    advice: str
    """What the person can do, as one sentence."""
    exit_code: int = 1


FAILURES: dict[FailureReason, Failure] = {
    FailureReason.RATE_LIMIT: Failure(True, "Wait a little and send the message again."),
    FailureReason.OVERLOADED: Failure(True, "The model server is busy; try again soon or choose another model."),
    FailureReason.SERVER_ERROR: Failure(True, "The model server failed; try again."),
    FailureReason.TIMEOUT: Failure(True, "The model did not answer in time; try again."),
    FailureReason.CONNECTION: Failure(True, "Check the base URL and that the server is running."),
    FailureReason.INVALID_RESPONSE: Failure(
        True, "The server did not answer as an OpenAI-compatible API; check the base URL."
    ),
    FailureReason.EMPTY_RESPONSE: Failure(True, "The model returned nothing; try again or choose another model."),
    FailureReason.INVALID_TOOL_CALLS: Failure(
        False, "The model does not use the tools as they are described; say it again or choose another model."
    ),
    FailureReason.TRUNCATED: Failure(
        False, "The answer was cut by the output limit; raise max_tokens or ask for less."
    ),
    FailureReason.CONTEXT_OVERFLOW: Failure(
        False, "The conversation is longer than the model's window; start a new session."
    ),
    FailureReason.AUTH: Failure(False, "Check the API key."),
    FailureReason.BILLING: Failure(False, "Check quota and billing at the provider."),
    FailureReason.MODEL_NOT_FOUND: Failure(False, "Check the model name with -m."),
    FailureReason.CONTENT_BLOCKED: Failure(False, "The provider refused the content; rephrase the message."),
    FailureReason.BAD_REQUEST: Failure(False, "The provider refused the request."),
    FailureReason.NOT_CONFIGURED: Failure(False, "Name a model: --base-url and -m, or config.yaml."),
    FailureReason.INTERRUPTED: Failure(False, "Resume the session to go on.", exit_code=130),
    FailureReason.MAX_ITERATIONS: Failure(False, "Raise --max-turns, or say 'continue'."),
    FailureReason.SESSION_BUSY: Failure(True, "Another process runs a turn on this session; wait until it ends."),
    FailureReason.STALE_LEASE: Failure(True, "Another process took over this session; resume it to see its state."),
    FailureReason.POISON: Failure(False, "This turn crashed the process again and again; send a new message."),
    FailureReason.DEADLINE: Failure(False, "Send it again with more time."),
    FailureReason.MESSAGE_CONFLICT: Failure(False, "Use a new id for a new message."),
    FailureReason.QUEUE_FULL: Failure(True, "Wait until earlier messages are answered and send it again."),
    FailureReason.DRAINING: Failure(True, "The process is about to stop; send it again when it is back."),
    FailureReason.STORE_MISSING: Failure(False, "Begin a conversation with: hermes"),
    FailureReason.STORE_LOCKED: Failure(True, "Another process holds the store's write lock; try again."),
    FailureReason.STORE_FULL: Failure(True, "The disk is full; free some space and try again."),
    FailureReason.STORE_READ_ONLY: Failure(False, "The store cannot be written; check the permissions of HERMES_HOME."),
    FailureReason.STORE_DAMAGED: Failure(
        False, "The store is damaged and was left untouched; restore a backup of state.db."
    ),
    FailureReason.STORE_REPLACED: Failure(False, "state.db was replaced while it was open; restart hermes."),
    FailureReason.STORE_FOREIGN: Failure(
        False, "This state.db is not ours or is newer; set another HERMES_HOME or upgrade."
    ),
    FailureReason.STORE_UNSAFE_PLACE: Failure(False, "Put HERMES_HOME on a local disk."),
    FailureReason.STORE_IO: Failure(True, "The disk reported an error; check it and try again."),
    FailureReason.TOOL_FAILED: Failure(False, "Read the tool's message."),
    FailureReason.USAGE: Failure(False, "See hermes --help.", exit_code=2),
    FailureReason.UNKNOWN: Failure(False, "See logs/agent.log."),
}


class HermesError(Exception):
    """Something went wrong that the program knows how to name."""

    reason = FailureReason.UNKNOWN

    def __init__(self, message: str = "", *, reason: FailureReason | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())
        if reason is not None:
            self.reason = reason

    @property
    def failure(self) -> Failure:
        return FAILURES[self.reason]


class UsageError(HermesError):
    """The request cannot be carried out as it was made."""

    reason = FailureReason.USAGE


class UnknownSession(UsageError):
    """No session answers to that name."""


class AmbiguousSession(UsageError):
    """Several sessions answer to that prefix; give more of the id."""


class SessionExists(UsageError):
    """A session of that id exists already; choose another id."""


class InvalidTitle(UsageError):
    """A title has at least one visible character and belongs to one session only."""

    def __init__(
        self, message: str = "", *, reason: FailureReason | None = None, session_id: str | None = None
    ) -> None:
        super().__init__(message, reason=reason)
        self.session_id = session_id
        """The session that has the title, None when the title itself cannot be one."""


class SettingsError(UsageError):
    """A setting has a value that cannot be used."""


class StoreError(HermesError):
    """The store could not do what was asked."""

    reason = FailureReason.STORE_IO


class StoreMissing(StoreError):
    """There is no store at that place yet."""

    reason = FailureReason.STORE_MISSING


class StoreLocked(StoreError):
    """Another process holds the store's write lock."""

    reason = FailureReason.STORE_LOCKED


class StoreFull(StoreError):
    """No space is left on the store's disk."""

    reason = FailureReason.STORE_FULL


class StoreReadOnly(StoreError):
    """The store cannot be written."""

    reason = FailureReason.STORE_READ_ONLY


class StoreDamaged(StoreError):
    """The store is damaged; nothing more is written to it."""

    reason = FailureReason.STORE_DAMAGED


class StoreReplaced(StoreError):
    """The store's file was replaced or removed while it was open."""

    reason = FailureReason.STORE_REPLACED


class StoreForeign(StoreError):
    """The file belongs to another program or to a newer version."""

    reason = FailureReason.STORE_FOREIGN


class StoreUnsafePlace(StoreError):
    """The store lies on a file system where write-ahead logging is not safe."""

    reason = FailureReason.STORE_UNSAFE_PLACE


class CommitUnknown(StoreError):
    """A commit failed half way; it may or may not be durable."""


class LeaseError(HermesError):
    """The session's lease does not allow this write."""


class SessionBusy(LeaseError):
    """Another live process runs a turn on this session."""

    reason = FailureReason.SESSION_BUSY


class StaleLease(LeaseError):
    """This session was taken over by another owner; the write was dropped."""

    reason = FailureReason.STALE_LEASE


class DeliveryError(HermesError):
    """The message was not taken; nothing of it is stored."""


class MessageConflict(DeliveryError):
    """This id was given to another message before."""

    reason = FailureReason.MESSAGE_CONFLICT


class ConversationMoved(DeliveryError):
    """The conversation went on meanwhile; look again where it stands."""

    reason = FailureReason.SESSION_BUSY


class QueueFull(DeliveryError):
    """Too many messages wait already."""

    reason = FailureReason.QUEUE_FULL


class Draining(DeliveryError):
    """This process takes no more messages: it is about to stop."""

    reason = FailureReason.DRAINING


class ProviderError(HermesError):
    """The model could not be asked, or did not answer.

    `status` is the HTTP status (0 when there was none), `retry_after` the wait in
    seconds that the server asked for, or None. The message never holds a key.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: FailureReason,
        status: int = 0,
        retry_after: float | None = None,
        partial: str = "",
    ) -> None:
        super().__init__(message, reason=reason)
        self.status = status
        self.retry_after = retry_after
        self.partial = partial
        """Text of the answer that had arrived before the failure."""


class ToolError(HermesError):
    """A tool refused its arguments or could not do its work."""

    reason = FailureReason.TOOL_FAILED


class TurnInterrupted(HermesError):
    """The turn was stopped before it ended."""

    reason = FailureReason.INTERRUPTED
