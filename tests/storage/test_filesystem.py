"""What only the folder store does: durability, the file system's errors, links, and what it leaves alone."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreDeniedError, StoreError, StoreFullError
from orchestrator.storage.base import Unfinished
from orchestrator.storage.filesystem import FolderStore

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


# ---------------------------------------------------------------------------------------------- durability


def test_nothing_is_made_before_the_first_create(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "store"
    store = FolderStore(root)
    assert list(store.entries("")) == []
    store.delete("key")
    assert not root.parent.exists()
    store.create("key", [b"x"])
    assert (root / "key").read_bytes() == b"x"


def test_a_root_that_went_away_is_not_made_again(tmp_path: Path) -> None:
    """What is written now belongs to what was written before."""
    store = FolderStore(tmp_path / "store")
    store.create("key", [b"x"])
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="went away") as caught:
        store.create("other", [b"x"])
    assert not isinstance(caught.value, NotFoundError)
    assert not (tmp_path / "store").exists()


def test_a_name_that_is_too_long_will_not_become_shorter(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / ("n" * 300))
    for attempt in (lambda: store.create("key", [b"x"]), lambda: list(store.entries("")), lambda: store.read("key")):
        with pytest.raises(StoreDeniedError, match="too long"):
            attempt()


def test_flushes_the_file_before_the_link_and_the_folder_after(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, link = os.fsync, os.link

    def recorded_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        happened.append("file" if path.name.startswith(".tmp-") else str(path.relative_to(tmp_path)))
        fsync(descriptor)

    def recorded_link(source: str, target: str, **options: int) -> None:
        happened.append(f"link {target}")
        link(source, target, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    store.create("a/b/key", [b"x"])
    assert happened == [".", "store", "store/a", "file", "link key", "store/a/b"]
    happened.clear()
    store.create("a/b/other", [b"x"])
    assert happened == ["file", "link other", "store/a/b"]
    happened.clear()
    FolderStore(tmp_path / "store").create("a/b/third", [b"x"])  # another process may have made the folders just now
    assert happened == [".", "store", "store/a", "file", "link third", "store/a/b"]


def test_a_write_that_takes_only_a_part_goes_on(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    store.create("key", [b"0123456789", b"abcdefgh"])
    assert store.read("key") == b"0123456789abcdefgh"


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FolderStore(Path("store"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.create("key", [b"x"])
    assert (tmp_path / "store" / "key").exists()


def test_what_an_outsider_removes_is_made_again(store: FolderStore, tmp_path: Path) -> None:
    store.create("a/key", [b"x"])
    shutil.rmtree(tmp_path / "store" / "a")
    store.create("a/key", [b"y"])
    assert store.read("a/key") == b"y"


# ---------------------------------------------------------------------------------------------- the exclusive link


def test_a_link_whose_answer_got_lost_was_made(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_and_fail(source: str, target: str, **options: int) -> None:
        link(source, target, **options)  # type: ignore[arg-type]
        raise failing(errno.EEXIST)

    monkeypatch.setattr(os, "link", link_and_fail)
    store.create("key", [b"x"])
    assert store.read("key") == b"x"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links(store: FolderStore, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise failing(number)

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="has no hard links") as caught:
        store.create("key", [b"x"])
    assert type(caught.value) is StoreError


def test_a_key_that_is_a_folder_and_a_folder_that_is_a_key(store: FolderStore) -> None:
    store.create("a/b", [b"x"])
    with pytest.raises(AlreadyExistsError):
        store.create("a", [b"y"])
    with pytest.raises(StoreError, match="Not a directory"):
        store.create("a/b/c", [b"y"])


# --------------------------------------------------------------------------------------------- the file system's errors


@pytest.mark.parametrize(
    ("call", "number", "kind", "words"),
    [
        ("write", errno.ENOSPC, StoreFullError, "no space is left in"),
        ("fsync", errno.EDQUOT, StoreFullError, "the quota is used up in"),
        ("mkdir", errno.ENOSPC, StoreFullError, "bytes free"),
        ("write", errno.EIO, StoreError, "Input/output error"),
        ("fsync", errno.EIO, StoreError, "Input/output error"),
        ("link", errno.EACCES, StoreDeniedError, "Permission denied"),
        ("mkdir", errno.EROFS, StoreDeniedError, "Read-only file system"),
    ],
)
def test_errors_of_a_write(  # noqa: PLR0917
    store: FolderStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    kind: type[StoreError],
    words: str,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise failing(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=words) as caught:
            store.create("a/key", [b"x"])
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.key == "a/key"
    assert str(tmp_path / "store") in str(caught.value)
    assert files_in(tmp_path) == []
    store.create("a/key", [b"x"])  # the failure is not remembered


def test_errors_of_a_read(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> bytes:
        raise failing(errno.ESTALE)

    store.create("key", [b"x"])
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StoreError, match="Stale file handle"):
        store.read("key")


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_a_file_where_the_folder_should_be(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = FolderStore(tmp_path / below)
    for action in (lambda: store.create("key", [b"x"]), lambda: store.read("key"), lambda: store.entries("")):
        with pytest.raises(StoreDeniedError, match="a file where the folder"):
            action()


def test_a_folder_without_permission(store: FolderStore, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; the read-only mount below covers this")
    store.create("key", [b"x"])
    (tmp_path / "store").chmod(0o500)
    try:
        with pytest.raises(StoreDeniedError):
            store.create("other", [b"x"])
        with pytest.raises(StoreDeniedError):
            store.delete("key")
    finally:
        (tmp_path / "store").chmod(0o700)


def test_a_key_too_long_for_the_file_system(store: FolderStore) -> None:
    with pytest.raises(StoreError, match="too long"):
        store.create("x" * 300, [b"x"])


def in_private_mount(mount: str, program: str) -> str:
    """Runs `program` where /mnt is mounted as `mount` says, visible to it alone; gives its output. Skips if barred."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare here")
    namespace = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c"]
    probe = [*namespace, f'{mount} && "$0" -c pass', sys.executable]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this machine runs no Python in a mount namespace of its own: {tried.stderr.strip()}")
    command = [*namespace, f'{mount} && exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


FILL = """
from pathlib import Path
from orchestrator.errors import StoreFullError
from orchestrator.storage.filesystem import FolderStore
store = FolderStore(Path("/mnt/store"))
store.create("a/small", [bytes(1000)])
try:
    store.create("a/large", (bytes(100_000) for _ in range(30)))
except StoreFullError as error:
    print(error)
print([(entry.key, entry.size_bytes) for entry in store.entries("")], list(Path("/mnt").rglob(".tmp-*")))
store.create("a/next", [bytes(500_000)])
"""


@pytest.mark.processes
def test_a_full_file_system() -> None:
    lines = in_private_mount("mount -t tmpfs -o size=1m none /mnt", FILL).splitlines()
    assert lines[0].startswith("a/large: no space is left in /mnt/store (0 bytes free)")
    assert lines[1] == "[('a/small', 1000)] []"


READ_ONLY = """
from pathlib import Path
from orchestrator.errors import StoreDeniedError
from orchestrator.storage.filesystem import FolderStore
store = FolderStore(Path("/mnt/store"))
print(store.read("key"), list(store.entries("")))
for action in (lambda: store.create("other", [b"x"]), lambda: store.create("a/b", [b"x"]), lambda: store.delete("key")):
    try:
        action()
    except StoreDeniedError as error:
        print(error)
"""


@pytest.mark.processes
def test_a_read_only_file_system() -> None:
    mount = "mount -t tmpfs none /mnt && mkdir /mnt/store && printf x >/mnt/store/key && mount -o remount,bind,ro /mnt"
    lines = in_private_mount(mount, READ_ONLY).splitlines()
    assert lines[0] == "b'x' [Entry(key='key', size_bytes=1)]"
    problem = "the folder /mnt/store does not let this user do that: Read-only file system"
    assert lines[1:] == [f"other: {problem}", f"a/b: {problem}", f"key: {problem}"]


# ---------------------------------------------------------------------------------------------- symbolic links


def test_no_key_leads_outside(store: FolderStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.create("inside", [b"x"])
    (tmp_path / "store" / "folder").symlink_to(outside)
    (tmp_path / "store" / "file").symlink_to(outside / "secret")
    (tmp_path / "store" / "dangling").symlink_to(outside / "new")
    for action in (
        lambda: store.create("folder/new", [b"x"]),
        lambda: store.read("folder/secret"),
        lambda: store.delete("folder/secret"),
        lambda: store.entries("folder/"),
        lambda: store.read("file"),
    ):
        with pytest.raises(StoreError, match="is a symbolic link; the store follows none"):
            action()
    for key in ("file", "dangling"):
        with pytest.raises(AlreadyExistsError):
            store.create(key, [b"x"])
    assert [entry.key for entry in store.entries("")] == ["inside"]
    assert files_in(outside) == ["secret"]


@pytest.mark.parametrize("token", ["a/key", "../.tmp-1", ".tmp-", "a/.tmp-x/key", "/.tmp-1"])
def test_only_unfinished_writes_are_discarded(store: FolderStore, token: str) -> None:
    store.create("a/key", [b"x"])
    with pytest.raises(StoreError):
        store.discard(Unfinished(key="a", token=token))
    assert store.read("a/key") == b"x"


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    FolderStore(tmp_path / "store").create("a/key", [b"x"])
    assert files_in(tmp_path / "disk") == ["a/key"]


def test_what_is_no_file_is_no_object(store: FolderStore, tmp_path: Path) -> None:
    store.create("key", [b"x"])
    os.mkfifo(tmp_path / "store" / "pipe")
    with pytest.raises(NotFoundError):
        store.read("pipe")
    assert [entry.key for entry in store.entries("")] == ["key"]


def test_no_descriptor_stays_open(store: FolderStore) -> None:
    store.create("a/b", [b"x"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        store.read("a/b")
        list(store.entries(""))
        with pytest.raises(AlreadyExistsError):
            store.create("a/b", [b"x"])
        with pytest.raises(NotFoundError):
            store.read("a/b/c")
        with pytest.raises(StoreError):
            store.create("a/b/c", [b"x"])
    assert len(os.listdir("/proc/self/fd")) == before
