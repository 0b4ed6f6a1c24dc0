"""Where a write-ahead log is safe: not on file systems that other machines share."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_SHARED = ("nfs", "cifs", "smb", "9p", "virtiofs", "fuse.sshfs", "afs", "ceph", "glusterfs", "fuse.gluster", "lustre",
           "beegfs", "ocfs2", "gfs2", "fuse.s3fs", "fuse.rclone", "prl_fs", "vboxsf", "drvfs")  # fmt: skip


def kind_of(path: Path, mounts: Path = _MOUNTS) -> str:
    """The file system type that holds `path`, or "" where the system does not say."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = fields[4].encode().decode("unicode_escape")
        if (target == point or target.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def is_shared(kind: str) -> bool:
    """Whether locks and shared memory of that file system type cannot be trusted."""
    return kind.startswith(_SHARED)
