"""An object store in a folder: a local disk, NFS, Lustre or any other POSIX file system with hard links.

An object is written under a temporary name in its own folder, flushed to the disk, and then hard-linked to its
name. The link is the create-if-absent: the kernel (or the NFS server) lets exactly one through. A rename would
overwrite; O_EXCL on the final name would show half an object.

Symbolic links below the root are no part of the store: they are followed for nothing, so that no key leads outside.
The root itself may be one. Empty folders stay behind after deletes; they are invisible in listings.

What killed writers left (`.tmp-*`) is listed by `unfinished`. Not here: retries. Called through `storage/opening`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreDeniedError, StoreError, StoreFullError
from orchestrator.storage.arguments import TEMPORARY_PREFIX, byte_views, bytes_of, check_range, key_parts, prefix_parts
from orchestrator.storage.base import Entry, Piece, Unfinished

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OPEN_OBJECT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_BUFFERS_MAX = os.sysconf("SC_IOV_MAX")
"""The most that one system call fills."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderStore:
    """Objects as files below `root`, which is made at the first `create`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._durable_folders: set[tuple[str, ...]] = set()

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    def create(self, key: str, pieces: Iterable[Piece]) -> None:
        """See the port. Two flushes to the disk per object, one more for each folder used for the first time."""
        *folders, name = key_parts(key)
        try:
            self._create(key, folders, name, pieces)
        except NotFoundError as error:  # of the folder: nothing is there to be found yet
            raise StoreError(key, f"the folder {self._root} went away, or cannot be made") from error

    def _create(self, key: str, folders: list[str], name: str, pieces: Iterable[Piece]) -> None:
        with self._made_folder(key, folders) as folder:
            if _exists(folder, name):  # spares writing gigabytes in vain; the link below is what decides
                raise AlreadyExistsError(key, "is there already")
            with self._temporary_file(key, folder) as (temporary, descriptor):
                for piece in pieces:
                    with self._translated(key):
                        _write(descriptor, piece)
                with self._translated(key):
                    os.fsync(descriptor)
                    self._link(key, folder, temporary, name)
            with self._translated(key):
                os.fsync(folder)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See the port."""
        check_range(key, start, stop)
        with self._opened_object(key) as descriptor, self._translated(key):
            size_bytes = os.fstat(descriptor).st_size
            return _read(descriptor, start, size_bytes if stop is None else min(stop, size_bytes))

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """See the port. The kernel writes into the buffers; nothing is copied here."""
        check_range(key, start, None)
        with self._opened_object(key) as descriptor, self._translated(key):
            return _read_into(descriptor, start, byte_views(buffers))

    def size(self, key: str) -> int:
        """See the port."""
        with self._opened_object(key) as descriptor, self._translated(key):
            return os.fstat(descriptor).st_size

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See the port. The whole listing is read before the first entry comes."""
        folders, beginning = prefix_parts(prefix)
        found: list[Entry] = []
        try:
            with self._opened_folder(prefix, folders) as folder, self._translated(prefix):
                _collect(folder, "".join(f"{name}/" for name in folders), beginning, found)
        except NotFoundError:
            pass
        return iter(sorted(found, key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        """See the port. Not flushed: an object that a crash of the machine brings back is deleted again later."""
        *folders, name = key_parts(key)
        try:
            with self._opened_folder(key, folders) as folder, self._translated(key):
                os.unlink(name, dir_fd=folder)
        except NotFoundError:
            pass

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """See SweepableStore: temporary files, by folder. What is written into one is not looked at."""
        folders, beginning = prefix_parts(prefix)
        found: list[str] = []
        try:
            with self._opened_folder(prefix, folders) as folder, self._translated(prefix):
                for path, child in _files(folder, "".join(f"{name}/" for name in folders), beginning):
                    if child.name.startswith(TEMPORARY_PREFIX):
                        found.append(f"{path}{child.name}")
        except NotFoundError:
            pass
        return iter([Unfinished(key=path.rpartition("/")[0], token=path) for path in sorted(found)])

    def discard(self, write: Unfinished) -> None:
        """See SweepableStore."""
        *folders, name = write.token.split("/")
        key_parts("/".join([*folders, name.removeprefix(TEMPORARY_PREFIX)]))
        if not name.startswith(TEMPORARY_PREFIX):
            raise StoreError(write.token, "is no unfinished write")
        try:
            with self._opened_folder(write.token, folders) as folder, self._translated(write.token):
                os.unlink(name, dir_fd=folder)
        except NotFoundError:
            pass

    # ------------------------------------------------------------------------------------------ folders

    @contextmanager
    def _opened_folder(self, key: str, folders: list[str]) -> Iterator[int]:
        """A descriptor of the folder below the root. Raises NotFoundError if it is not there."""
        with self._translated(key):
            descriptor = os.open(self._root, _OPEN_FOLDER)
        try:
            for name in folders:
                with self._translated(key):
                    try:
                        descriptor = _step_down(key, descriptor, name)
                    except NotADirectoryError as error:
                        raise NotFoundError(key, "no such object") from error
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _made_folder(self, key: str, folders: list[str]) -> Iterator[int]:
        """Like `_opened_folder`, but makes what is missing, and sees to it that it survives a crash.

        A folder that another process made may not be on the disk yet, so the first use by this store flushes
        its parent in any case.
        """
        with self._translated(key):
            if () not in self._durable_folders:
                _make_durably(self._root)
                self._durable_folders.add(())
            descriptor = os.open(self._root, _OPEN_FOLDER)
        try:
            for depth, name in enumerate(folders, start=1):
                with self._translated(key):
                    made = _make_if_missing(descriptor, name)
                    if made or tuple(folders[:depth]) not in self._durable_folders:
                        os.fsync(descriptor)
                        self._durable_folders.add(tuple(folders[:depth]))
                    descriptor = _step_down(key, descriptor, name)
            yield descriptor
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------------------------------ files

    @contextmanager
    def _temporary_file(self, key: str, folder: int) -> Iterator[tuple[str, int]]:
        """A new file of a random name: (name, descriptor). It is gone at the end, whatever happens."""
        name = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        with self._translated(key):
            descriptor = os.open(name, _OPEN_TEMPORARY, 0o666, dir_fd=folder)
        try:
            yield name, descriptor
        finally:
            # Nothing hangs on either: the data is flushed before the link, and a temporary name is never listed.
            with contextlib.suppress(OSError):
                os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)

    def _link(self, key: str, folder: int, temporary: str, name: str) -> None:
        """Gives the flushed file its name, if nobody has it. Raises AlreadyExistsError, StoreError, OSError."""
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            # On NFS the answer to a link that was made can get lost, and the repeated request then fails.
            # A second name on our temporary file proves that it was made.
            if os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink == 2:
                return
            if error.errno == errno.EEXIST:
                raise AlreadyExistsError(key, "is there already") from error
            if error.errno in _NO_HARD_LINKS:
                problem = f"the file system of {self._root} has no hard links, without which no key can be claimed"
                raise StoreError(key, problem) from error
            raise

    @contextmanager
    def _opened_object(self, key: str) -> Iterator[int]:
        """A descriptor of the object's file. Raises NotFoundError."""
        *folders, name = key_parts(key)
        with self._opened_folder(key, folders) as folder:
            with self._translated(key):
                descriptor = os.open(name, _OPEN_OBJECT, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise NotFoundError(key, "no such object")
                yield descriptor
            finally:
                os.close(descriptor)

    # ------------------------------------------------------------------------------------------ errors

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Turns an OSError into the StoreError that tells the caller what to do about it."""
        try:
            yield
        except OSError as error:
            raise self._store_error(key, error) from error

    def _store_error(self, key: str, error: OSError) -> StoreError:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            word = "the quota is used up" if error.errno == errno.EDQUOT else "no space is left"
            return StoreFullError(key, f"{word} in {self._root} ({_free_bytes(self._root)} bytes free)")
        if error.errno in _DENIED:
            return StoreDeniedError(key, f"the folder {self._root} does not let this user do that: {reason}")
        if error.errno == errno.ENOTDIR and not self._root.is_dir():
            return StoreDeniedError(key, f"there is a file where the folder {self._root} should be")
        if error.errno in (errno.ENOENT, errno.EISDIR):
            return NotFoundError(key, "no such object")
        if error.errno == errno.ENAMETOOLONG:
            return StoreDeniedError(key, f"the name of the folder {self._root}, or of the key in it, is too long")
        if error.errno == errno.ELOOP:
            return _link_error(key, key)
        return StoreError(key, f"the folder {self._root} failed: {reason}")


def _link_error(key: str, name: str) -> StoreError:
    return StoreError(key, f"{name!r} is a symbolic link; the store follows none")


def _step_down(key: str, folder: int, name: str) -> int:
    """Opens `name` in `folder` and closes `folder`. Raises StoreError for a link, OSError."""
    try:
        below = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError as error:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _link_error(key, name) from error
        raise
    os.close(folder)
    return below


def _make_if_missing(folder: int, name: str) -> bool:
    """Makes the folder `name` in `folder`; says whether it was missing."""
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return False
    return True


def _make_durably(path: Path) -> None:
    """Makes `path` and its missing parents, flushing the parent of each one made, and that of `path` in any case."""
    missing = []
    existing = path
    while not existing.exists():
        missing.append(existing)
        existing = existing.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _flush_folder(folder.parent)
    if not missing:
        with contextlib.suppress(PermissionError):  # a root that was given to us, in a folder that we may not read
            _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, _OPEN_FOLDER)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _write(descriptor: int, piece: Piece) -> None:
    """All bytes of `piece`, whatever its shape; `os.write` may take fewer than it is given."""
    rest = bytes_of(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop); fewer only if the file ends earlier."""
    pieces: list[bytes] = []
    while start < stop:
        piece = os.pread(descriptor, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)  # no copy if it is one piece


def _read_into(descriptor: int, start: int, buffers: list[memoryview]) -> int:
    """Fills the buffers from byte `start` on; how many bytes there were."""
    position = start
    for place in range(0, len(buffers), _BUFFERS_MAX):
        group = buffers[place : place + _BUFFERS_MAX]
        while group:
            count = os.preadv(descriptor, group, position)
            if count == 0:
                return position - start
            position += count
            group = _after(group, count)
    return position - start


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers when the first `count` bytes are filled."""
    for place, view in enumerate(buffers):
        if count < len(view):
            return [view[count:], *buffers[place + 1 :]]
        count -= len(view)
    return []


def _collect(folder: int, path: str, beginning: str, found: list[Entry]) -> None:
    """Adds the objects below `folder` whose name there starts with `beginning`; `path` is the folder's key part."""
    for where, child in _files(folder, path, beginning):
        if not child.name.startswith(TEMPORARY_PREFIX):
            with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                found.append(Entry(key=f"{where}{child.name}", size_bytes=child.stat(follow_symlinks=False).st_size))


def _files(folder: int, path: str, beginning: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(key part of its folder, file) of all files below `folder`; each is to be looked at before the next is asked."""
    with os.scandir(folder) as children:
        names = [child for child in children if child.name.startswith(beginning)]
    for child in names:
        try:
            if child.is_dir(follow_symlinks=False):
                below = os.open(child.name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    yield from _files(below, f"{path}{child.name}/", "")
                finally:
                    os.close(below)
            elif child.is_file(follow_symlinks=False):
                yield path, child
        except FileNotFoundError:
            continue  # deleted since the folder was read


def _free_bytes(path: Path) -> int:
    """What an unprivileged writer may still use on the file system of `path` or of its nearest existing parent."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
