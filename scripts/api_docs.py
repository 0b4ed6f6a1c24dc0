"""Write the table of operations in docs/api.md from the routes that the gateway has.

python scripts/api_docs.py           writes it
python scripts/api_docs.py --check   changes nothing; exit code 1 if it is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hermes_agent.gateway.app import ROUTES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
BEGIN, END = "<!-- made by scripts/api_docs.py: begin -->\n", "<!-- end -->\n"


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| operation | key may | what it does | `operationId` |\n"
    yield "|---|---|---|---|\n"
    for route in ROUTES:
        scope = f"`{route.scope}`" if route.scope is not None else "(no key)"
        stream = " As an event stream too." if route.streams and route.media == "application/json" else ""
        stream = " An event stream." if route.media == "text/event-stream" else stream
        yield f"| `{route.method} {route.path}` | {scope} | {route.about}{stream} | `{route.name}` |\n"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.stderr.write(f"{PAGE}: the lines between which the table stands are missing\n")
        return 1
    fresh = f"{before}{BEGIN}{''.join(table())}{END}{after}"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        sys.stderr.write(f"{PAGE} is not up to date: python scripts/api_docs.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
