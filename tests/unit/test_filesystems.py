"""On which file systems a store may lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_agent import errors
from hermes_agent.store import filesystems
from hermes_agent.store.filesystems import is_shared, kind_of
from hermes_agent.store.session_db import SessionDB

TABLE = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:20 / /proc rw - proc proc rw
30 22 0:40 / /home rw shared:2 master:3 - nfs4 server:/home rw
31 30 0:41 / /home/local rw - xfs /dev/sdb1 rw
32 22 0:42 / /mnt/two\\040words rw - fuse.sshfs host: rw
33 22 0:43 / /mnt/\xe9t\xe9 rw - cifs //host/share rw
34 22 0:44 / /mnt/again rw - ext4 /dev/sdc1 rw
35 34 0:45 / /mnt/again rw - virtiofs tag rw
36 22 0:46 / /data rw - 9p tag rw
broken line
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homes/x", "ext4"),
        ("/home/x/.hermes", "nfs4"),
        ("/home/local/x", "xfs"),
        ("/home/localx", "nfs4"),
        ("/mnt/two words/x", "fuse.sshfs"),
        ("/mnt/été/x", "cifs"),
        ("/mnt/again/x", "virtiofs"),
        ("/data", "9p"),
    ],
)
def test_the_innermost_and_last_mount_counts(mounts, path, kind):
    assert kind_of(Path(path), mounts) == kind


def test_a_link_is_followed_to_where_the_file_lies(mounts, tmp_path):
    (tmp_path / "link").symlink_to("/home/x")
    assert kind_of(tmp_path / "link", mounts) == "nfs4"


def test_a_system_that_does_not_say_is_trusted(tmp_path):
    assert kind_of(Path("/"), tmp_path / "missing") == ""
    assert not is_shared("")


def test_without_mountinfo_the_system_is_asked_another_way(monkeypatch, tmp_path):
    missing = tmp_path / "missing"
    monkeypatch.setattr(filesystems, "_MOUNTS", missing)
    assert kind_of(Path("/"), missing)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs", "smbfs", "afpfs"])
def test_what_other_machines_share_is_refused(kind):
    assert is_shared(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "apfs", "fuse.mergerfs", "f2fs"])
def test_what_is_local_is_not(kind):
    assert not is_shared(kind)


@pytest.mark.parametrize("there", [False, True], ids=["new", "old"])
def test_a_store_on_a_shared_file_system_is_refused_with_the_reason(tmp_path, monkeypatch, there):
    path = tmp_path / "home" / "state.db"
    if there:
        SessionDB(path).close()
    monkeypatch.setattr(filesystems, "kind_of", lambda _: "nfs4")
    with pytest.raises(errors.StoreUnsafePlace, match=r"nfs4 file system.*HERMES_HOME"):
        SessionDB(path)
    assert path.exists() == there
