"""The text of a turn as one reader is shown it: each word once, and what was said in the end complete."""

from __future__ import annotations

APART = "\n\n"
"""Stands between two texts that one reader sees as one."""


class Words:
    """What of a turn's texts was sent to a reader, and what still is to be.

    Provisional pieces are sent as they come. When they turn out to be void, they cannot be
    taken back: what is said instead is compared with them, and only what goes beyond is
    sent, or, if it is something else, all of it behind a blank line. When a text is
    settled, the rest of it is sent, so that the reader has all of it.
    """

    def __init__(self) -> None:
        self._begun = False
        """Something was sent before the present text."""
        self._sent: list[str] = []
        self._again: str | None = None
        """What is said of the present text after what was sent of it turned out to be void."""

    def say(self, piece: str) -> str:
        """What to send for a provisional piece."""
        if self._again is None:
            return self._send(piece)
        self._again += piece
        return self._catch_up(self._again, is_whole=False)

    def void(self) -> None:
        """What was said of the present text does not count."""
        if self._sent:
            self._again = ""

    def settle(self, text: str) -> str:
        """What to send so that the reader has the whole of the present text, which ends here."""
        rest = self._catch_up(text, is_whole=True)
        self._begun = self._begun or bool(self._sent)
        self._sent, self._again = [], None
        return rest

    @property
    def is_open(self) -> bool:
        """Whether something of the present text was sent."""
        return bool(self._sent)

    def _catch_up(self, said: str, *, is_whole: bool) -> str:
        sent = "".join(self._sent)
        if said.startswith(sent):
            self._again = None
            return self._send(said[len(sent) :])
        if sent.startswith(said) and not is_whole:
            return ""
        self._again, self._sent, self._begun = None, [], True
        return self._send(said)

    def _send(self, text: str) -> str:
        if not text:
            return ""
        apart = APART if self._begun and not self._sent else ""
        self._sent.append(text)
        return apart + text
