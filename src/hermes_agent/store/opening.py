"""Opening the store of a home as its settings say."""

from __future__ import annotations

from hermes_agent.settings import Settings
from hermes_agent.store.database import StoreOptions
from hermes_agent.store.session_db import SessionDB


def open_store(settings: Settings) -> SessionDB:
    """Open the store of the settings' home; it is made when it is missing."""
    chosen, default = settings.database, StoreOptions()
    size = chosen.journal_size_limit
    options = StoreOptions(
        synchronous=chosen.synchronous.upper(),
        wal_autocheckpoint=chosen.wal_autocheckpoint or default.wal_autocheckpoint,
        journal_size_limit=default.journal_size_limit if size is None else size,
    )
    return SessionDB(settings.home / "state.db", options=options)
