"""The old name of `hermes_agent.cli.main`; run as a program it is the command `hermes`."""

from __future__ import annotations

import sys

from hermes_agent.cli.main import main
from hermes_agent.old_names import become

if __name__ == "__main__":
    sys.exit(main())
become(__name__)
