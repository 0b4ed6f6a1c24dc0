"""Where a write-ahead log is safe: not on file systems that other machines share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(rb"\\([0-7]{3})")
_SHARED = (
    "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "fakeowner", "fuse.blobfuse",
    "fuse.ceph", "fuse.davfs", "fuse.gcsfuse", "fuse.gluster", "fuse.goofys", "fuse.grpcfuse", "fuse.juicefs",
    "fuse.osxfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "fuse.vmhgfs", "gfs2", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "ocfs2", "orangefs", "osxfs", "panfs", "prl_fs", "pvfs2", "smb", "vboxsf", "virtiofs", "vmhgfs",
    "webdav",
)  # fmt: skip


def kind_of(path: Path, mounts: Path = _MOUNTS) -> str:
    """The file system type that holds `path`, or "" where the system does not say."""
    target = os.path.realpath(path)
    best, kind = "", ""
    for point, name in _points(mounts):
        # of two mounts on one point the later one covers the other
        if (target == point or target.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name
    return kind


def is_shared(kind: str) -> bool:
    """Whether locks and shared memory of that file system type cannot be trusted."""
    return kind.startswith(_SHARED)


def _points(mounts: Path) -> Iterable[tuple[str, str]]:
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return _points_psutil() if mounts is _MOUNTS else ()
    found: list[tuple[str, str]] = []
    for line in lines:
        left, _, right = line.partition(b" - ")
        fields = left.split()
        if len(fields) > 4 and right:
            point = _OCTAL.sub(lambda match: bytes((int(match[1], 8),)), fields[4])
            found.append((os.fsdecode(point), os.fsdecode(right.split()[0])))
    return found


def _points_psutil() -> Iterable[tuple[str, str]]:
    import psutil  # noqa: PLC0415 - only where /proc is absent

    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
