"""Start one process and report its wall time, CPU time and peak memory as one line of JSON.

    python -I -S bench/timed.py OUTPUT PROGRAM [ARGUMENT ...]

A process of its own that imports next to nothing, because the peak that the system
reports of a child is never below what its parent held when it started it.
"""

from __future__ import annotations

import os
import sys
import time


def main() -> int:
    output, *command = sys.argv[1:]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [(os.POSIX_SPAWN_OPEN, 1, output, flags, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
    began = time.perf_counter()
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    _, status, used = os.wait4(pid, 0)
    wall = time.perf_counter() - began
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    cpu = used.ru_utime + used.ru_stime
    print(f'{{"wall": {wall}, "cpu": {cpu}, "peak": {peak}, "status": {status}}}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
