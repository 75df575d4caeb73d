"""What every object store guarantees, run on every back end: memory, a folder, real S3 servers, a GCS server, wrappers,
a peer.

A back end joins by adding a pair of stores to `STORES`: one to write with, one to read with. They are the same
store where the back end does both. What only one back end does is tested in tests/storage.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
from aiohttp import web

from orchestrator.agent.objects import object_routes, token_middleware
from orchestrator.errors import AlreadyExistsError, NotFoundError, StoreError
from orchestrator.storage.base import Entry, ObjectStore, Piece, SweepableStore, Unfinished
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.gcs.store import GCSStore
from orchestrator.storage.memory import MemoryStore
from orchestrator.storage.peers import PeerStore
from orchestrator.storage.retrying import Patience, RetryingStore
from orchestrator.storage.s3.parts import PART_BYTES
from orchestrator.storage.s3.store import S3Store
from tests.gcs_server import GCSServers
from tests.s3_servers import S3Servers

REPOSITORY = Path(__file__).parents[2]
TOKEN = "a token of the test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The same objects, seen by a writer and by a reader."""

    write: ObjectStore
    read: ObjectStore
    leaves_unfinished: bool = False
    """Killed writers leave something behind, and the store can tell what."""


@dataclass(frozen=True, slots=True)
class Servers:
    """What back ends behind a network are asked at."""

    s3: S3Servers
    gcs: GCSServers


@contextmanager
def memory(folder: Path, servers: Servers) -> Iterator[Stores]:
    store = MemoryStore()
    yield Stores(write=store, read=store)


@contextmanager
def folder_store(folder: Path, servers: Servers) -> Iterator[Stores]:
    store = FolderStore(folder / "store")
    yield Stores(write=store, read=store, leaves_unfinished=True)


@contextmanager
def peer(folder: Path, servers: Servers) -> Iterator[Stores]:
    store = FolderStore(folder / "store")
    with served(store) as base_url, PeerStore(base_url, TOKEN) as reader:
        yield Stores(write=store, read=reader, leaves_unfinished=True)


@contextmanager
def retrying(folder: Path, servers: Servers) -> Iterator[Stores]:
    store = RetryingStore(MemoryStore(), Patience())
    yield Stores(write=store, read=store)


@contextmanager
def seaweedfs(folder: Path, servers: Servers) -> Iterator[Stores]:
    with s3_store("seaweedfs", servers) as stores:
        yield stores


@contextmanager
def localbucket(folder: Path, servers: Servers) -> Iterator[Stores]:
    with s3_store("localbucket", servers) as stores:
        yield stores


@contextmanager
def s3_store(name: str, servers: Servers) -> Iterator[Stores]:
    store = S3Store(servers.s3.shared(name).bucket())
    yield Stores(write=store, read=store, leaves_unfinished=name != "localbucket")  # that one cannot list uploads
    store.close()


@contextmanager
def gcs(folder: Path, servers: Servers) -> Iterator[Stores]:
    store = GCSStore(servers.gcs.shared().bucket())
    yield Stores(write=store, read=store)
    store.close()


@contextmanager
def served(store: ObjectStore) -> Iterator[str]:
    """A real server of `store` on loopback, in a thread of its own; gives its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    application = web.Application(middlewares=[token_middleware(TOKEN)])
    application.add_routes(object_routes(store))
    runner = web.AppRunner(application, shutdown_timeout=1.0)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop() -> None:
        await runner.cleanup()
        await loop.shutdown_default_executor()

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


STORES: dict[str, Callable[[Path, Servers], AbstractContextManager[Stores]]] = {
    "memory": memory,
    "folder": folder_store,
    "retrying": retrying,
    "seaweedfs": seaweedfs,
    "localbucket": localbucket,
    "gcs": gcs,
    "peer": peer,
}


@pytest.fixture
def servers(s3_servers: S3Servers, gcs_servers: GCSServers) -> Servers:
    return Servers(s3_servers, gcs_servers)


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[Stores]:
    with STORES[request.param](tmp_path, servers) as pair:
        yield pair


@pytest.fixture(params=[name for name in STORES if name != "peer"])
def store(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[ObjectStore]:
    """Stores that one can write to."""
    with STORES[request.param](tmp_path, servers) as pair:
        yield pair.write


# ---------------------------------------------------------------------------------------------- create and read


def test_reads_back_the_concatenated_pieces(stores: Stores) -> None:
    matrix = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    pieces: list[Piece] = [b"bytes", bytearray(b" array "), memoryview(b"view")[1:], b"", matrix.data]
    stores.write.create("a/b/c.bin", pieces)
    assert stores.read.read("a/b/c.bin") == b"bytes array iew" + matrix.tobytes()


def test_pieces_may_come_one_by_one(stores: Stores) -> None:
    stores.write.create("key", (bytes([number]) * 1000 for number in range(50)))
    assert stores.read.read("key") == b"".join(bytes([number]) * 1000 for number in range(50))


def test_what_was_created_stays_when_the_writer_changes_its_buffer(stores: Stores) -> None:
    buffer = bytearray(b"before")
    stores.write.create("key", [buffer])
    buffer[:] = b"after."
    assert stores.read.read("key") == b"before"


@pytest.mark.parametrize("pieces", [[], [b""], [numpy.zeros((0, 3)).data]])
def test_an_empty_object_is_an_object(stores: Stores, pieces: list[Piece]) -> None:
    stores.write.create("empty", pieces)
    assert stores.read.read("empty") == b""
    assert stores.read.read("empty", 0, 10) == b""
    assert stores.read.size("empty") == 0
    assert list(stores.read.entries("")) == [Entry(key="empty", size_bytes=0)]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (0, 0), (0, 1), (3, 7), (9, 10), (7, 100), (4, 4), (9, None), (10, None), (50, 60)]
)
def test_ranges(stores: Stores, start: int, stop: int | None) -> None:
    stores.write.create("digits", [b"0123456789"])
    assert stores.read.read("digits", start, stop) == b"0123456789"[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (-3, -1), (5, 4)])
def test_ranges_that_mean_nothing(stores: Stores, start: int, stop: int | None) -> None:
    stores.write.create("digits", [b"0123456789"])
    with pytest.raises(StoreError):
        stores.read.read("digits", start, stop)


def test_a_large_object(stores: Stores, seed: int) -> None:
    content = numpy.random.default_rng(seed).bytes(9_000_001)
    stores.write.create("large", [content])
    assert stores.read.size("large") == len(content)
    assert stores.read.read("large") == content
    assert stores.read.read("large", 4_000_000, 8_500_000) == content[4_000_000:8_500_000]


@pytest.mark.parametrize(
    "key", ["with space", "per%41cent", "a+b&c=d?e#f", "ünï/cödé", "dots...", "-dash", "a/.hidden"]
)
def test_unusual_keys(stores: Stores, key: str) -> None:
    stores.write.create(key, [b"content"])
    assert stores.read.read(key) == b"content"
    assert stores.read.size(key) == 7
    assert list(stores.read.entries(key[:3])) == [Entry(key=key, size_bytes=7)]


def test_many_readers_at_once(stores: Stores) -> None:
    for number in range(8):
        stores.write.create(f"objects/{number}", [bytes([number]) * 50_000])

    def read(turn: int) -> bool:
        return stores.read.read(f"objects/{turn % 8}") == bytes([turn % 8]) * 50_000

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(64)))


# ---------------------------------------------------------------------------------------------- read into memory


def filled(store: ObjectStore, key: str, start: int, sizes: list[int]) -> tuple[int, bytes]:
    """What `read_into` returns, and what is then in buffers of those sizes; untouched bytes are dots."""
    buffers = [memoryview(bytearray(b"." * size)) for size in sizes]
    count = store.read_into(key, start, buffers)
    return count, b"".join(buffers)


@pytest.mark.parametrize(
    ("start", "sizes"),
    [
        (0, [10]),
        (0, [1, 2, 3]),
        (3, [4]),
        (2, [0, 3, 0, 1, 0]),
        (8, [1, 1, 5, 2]),
        (0, [6, 100]),
        (10, [3]),
        (50, [2, 2]),
        (0, []),
        (4, [0]),
    ],
)
def test_reads_into_buffers(stores: Stores, start: int, sizes: list[int]) -> None:
    stores.write.create("digits", [b"0123456789"])
    expected = b"0123456789"[start : start + sum(sizes)]
    count, content = filled(stores.read, "digits", start, sizes)
    assert count == len(expected)
    assert content == expected.ljust(sum(sizes), b".")


def test_reads_into_memory_of_any_format(stores: Stores) -> None:
    numbers = numpy.arange(10_000, dtype=numpy.float64)
    stores.write.create("numbers", [numbers.data])
    matrix, rest = numpy.zeros((50, 100)), numpy.zeros(20_000, dtype=numpy.uint32)
    empty = numpy.zeros((0, 3))
    count = stores.read.read_into("numbers", 0, [matrix.data, empty.data, rest[:10_000].data, rest[10_000:].data])
    assert count == numbers.nbytes
    assert matrix.tobytes() + rest.tobytes()[: 5_000 * 8] == numbers.tobytes()


def test_reads_into_very_many_buffers(stores: Stores, seed: int) -> None:
    """More than one system call takes, of more bytes than one answer brings at once."""
    draw = numpy.random.default_rng(seed)
    content = draw.bytes(9_000_001)
    stores.write.create("large", [content])
    sizes = [int(size) for size in draw.integers(0, 4_000, size=5_000)]
    count, found = filled(stores.read, "large", 12_345, sizes)
    assert 9_000_001 - 12_345 > sum(sizes) == count or count == 9_000_001 - 12_345
    assert found[:count] == content[12_345 : 12_345 + count]


def test_reads_a_large_object_into_one_buffer(stores: Stores, seed: int) -> None:
    content = numpy.random.default_rng(seed).bytes(9_000_001)
    stores.write.create("large", [content])
    assert filled(stores.read, "large", 0, [9_000_001]) == (9_000_001, content)
    assert filled(stores.read, "large", 5_000_000, [1, 8_000_000])[0] == 4_000_001


def test_many_readers_fill_their_buffers_at_once(stores: Stores) -> None:
    content = bytes(range(256)) * 10_000
    stores.write.create("key", [content])

    def read(turn: int) -> bool:
        start = turn * 37_000
        return filled(stores.read, "key", start, [1000] * 40) == (40_000, content[start : start + 40_000])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(64)))


def test_what_cannot_be_read_into_buffers(stores: Stores) -> None:
    stores.write.create("folder/there", [b"x"])
    for key in ("missing", "folder", "folder/there/below"):
        for sizes in ([1], [], [0]):
            with pytest.raises(NotFoundError) as caught:
                filled(stores.read, key, 0, sizes)
            assert caught.value.key == key
    with pytest.raises(StoreError):
        filled(stores.read, "folder/there", -1, [1])


# ---------------------------------------------------------------------------------------------- what is not there


def test_a_missing_object(stores: Stores) -> None:
    stores.write.create("folder/there", [b"x"])
    for key in ("missing", "folder", "folder/missing", "missing/too", "folder/there/below"):
        for action in (stores.read.read, stores.read.size, lambda key: stores.read.read(key, 5, 5)):
            with pytest.raises(NotFoundError) as caught:
                action(key)
            assert caught.value.key == key


def test_reads_and_lists_nothing_before_the_first_create(stores: Stores) -> None:
    assert list(stores.read.entries("")) == []
    assert list(stores.read.entries("any/prefix")) == []
    with pytest.raises(NotFoundError):
        stores.read.size("key")


def test_delete(store: ObjectStore) -> None:
    store.create("a/key", [b"1"])
    store.create("a/other", [b"2"])
    store.delete("a/key")
    assert [entry.key for entry in store.entries("")] == ["a/other"]
    with pytest.raises(NotFoundError):
        store.read("a/key")
    store.create("a/key", [b"again"])
    assert store.read("a/key") == b"again"


def test_deleting_what_is_not_there_is_no_error(store: ObjectStore) -> None:
    store.delete("nothing")
    store.create("a/key", [b"1"])
    for key in ("nothing", "a", "a/nothing", "b/nothing", "a/key/below"):
        store.delete(key)
    assert store.read("a/key") == b"1"


BAD_KEYS = ["", "/", "/absolute", "a//b", "a/", ".", "..", "../up", "a/../b", "a/./b", "nul\0", "a/.tmp-1", ".tmp-x/a"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused(stores: Stores, key: str) -> None:
    for action in (
        lambda: stores.write.create(key, [b"x"]),
        lambda: stores.write.delete(key),
        lambda: stores.read.read(key),
        lambda: stores.read.read_into(key, 0, [memoryview(bytearray(1))]),
        lambda: stores.read.size(key),
    ):
        with pytest.raises(StoreError) as caught:
            action()
        assert type(caught.value) is StoreError
    assert list(stores.write.entries("")) == []


# ---------------------------------------------------------------------------------------------- listings


def test_listing(stores: Stores) -> None:
    keys = ["b", "a/2", "a/10", "a-b/1", "a/1/x", "ab", "a.json", "z/y/x/w"]
    for size_bytes, key in enumerate(keys):
        stores.write.create(key, [b"x" * size_bytes])
    for prefix in ("", "a", "a/", "a/1", "a/1/", "a-", "ab", "z/y", "z/y/x/w", "c", "a/3", "b/"):
        expected = [Entry(key=key, size_bytes=keys.index(key)) for key in sorted(keys) if key.startswith(prefix)]
        assert list(stores.read.entries(prefix)) == expected, prefix


@pytest.mark.parametrize("prefix", ["/", "../", "a//b", "a/../", "nul\0", ".tmp-1/"])
def test_bad_prefixes_are_refused(stores: Stores, prefix: str) -> None:
    with pytest.raises(StoreError):
        list(stores.read.entries(prefix))


def test_an_unfinished_write_is_invisible(stores: Stores) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"first half"
        assert list(stores.read.entries("")) == []
        assert list(stores.read.entries("a/")) == []
        with pytest.raises(NotFoundError):
            stores.read.read("a/key")
        yield b", second half"

    stores.write.create("a/key", pieces())
    assert stores.read.read("a/key") == b"first half, second half"


def test_a_write_whose_pieces_fail_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"first half"
        raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"):
        store.create("a/key", pieces())
    assert list(store.entries("")) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


LARGE = bytes(PART_BYTES + 1)
"""More than every store sends in one request."""


def unfinished(store: ObjectStore, prefix: str = "") -> list[Unfinished]:
    return list(store.unfinished(prefix)) if isinstance(store, SweepableStore) else []


def test_an_unfinished_write_is_listed_as_one_until_its_end(stores: Stores) -> None:
    """Killed writers leave them for ever, and somebody pays for them (F69)."""
    store, seen = stores.write, list[Unfinished]()

    def pieces() -> Iterator[bytes]:
        yield LARGE
        yield b"more"
        seen.extend(unfinished(store, "a/"))
        assert unfinished(store, "b/") == []

    store.create("a/key", pieces())
    assert unfinished(store) == []
    assert all(write.key in ("a", "a/key") for write in seen)
    assert len(seen) == (1 if stores.leaves_unfinished else 0)


def test_a_write_that_is_discarded_fails_and_leaves_nothing(stores: Stores) -> None:
    store = stores.write

    def pieces() -> Iterator[bytes]:
        yield LARGE
        yield b"more"
        assert isinstance(store, SweepableStore)
        for write in unfinished(store):
            store.discard(write)
            store.discard(write)
        yield b"and more"

    if not stores.leaves_unfinished:
        pytest.skip("nothing to discard: it leaves nothing, or cannot list it")
    with pytest.raises(StoreError):
        store.create("a/key", pieces())
    assert unfinished(store) == []
    assert list(store.entries("")) == []
    store.create("a/key", [b"again"])
    assert store.read("a/key") == b"again"


# ---------------------------------------------------------------------------------------------- create-if-absent


def test_the_second_create_loses(store: ObjectStore) -> None:
    store.create("key", [b"first"])
    with pytest.raises(AlreadyExistsError) as caught:
        store.create("key", [b"second"])
    assert caught.value.key == "key"
    assert store.read("key") == b"first"


def test_a_create_that_is_overtaken_loses(store: ObjectStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"slow"
        store.create("key", [b"fast"])

    with pytest.raises(AlreadyExistsError):
        store.create("key", pieces())
    assert store.read("key") == b"fast"


def test_of_16_threads_exactly_one_wins(store: ObjectStore) -> None:
    for turn in range(2 if isinstance(store, S3Store) else 10):  # SeaweedFS lets a loser wait for whole seconds
        barrier = threading.Barrier(16)

        def create(number: int, key: str = f"turn/{turn}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(10)
            try:
                store.create(key, [f"thread {number}".encode()])
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(16) as threads:
            won = list(threads.map(create, range(16)))
        assert won.count(True) == 1
        assert store.read(f"turn/{turn}") == f"thread {won.index(True)}".encode()


RACE = """
import sys
from pathlib import Path
from orchestrator.errors import AlreadyExistsError
from orchestrator.storage.filesystem import FolderStore

store, name = FolderStore(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = []
for turn in range(50):
    try:
        store.create(f"turn/{turn}/key", [name.encode()])
        won.append(str(turn))
    except AlreadyExistsError:
        pass
print(" ".join(won), flush=True)
"""


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process with pipes for stdin and stdout."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.processes
def test_of_8_processes_exactly_one_wins(tmp_path: Path) -> None:
    root = tmp_path / "store"
    racers = [python(RACE, str(root), f"process {number}") for number in range(8)]
    assert [line_from(racer) for racer in racers] == ["ready"] * 8
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    winners: dict[int, str] = {}
    for number, racer in enumerate(racers):
        for word in racer.communicate(timeout=30)[0].split():
            assert int(word) not in winners
            winners[int(word)] = f"process {number}"
        assert racer.returncode == 0
    assert sorted(winners) == list(range(50))
    store = FolderStore(root)
    for turn, name in winners.items():
        assert store.read(f"turn/{turn}/key") == name.encode()
    assert [path for path in root.rglob(".tmp-*")] == []


KILLED = """
import sys, time
from pathlib import Path
from orchestrator.storage.filesystem import FolderStore

def pieces():
    yield b"x" * 1_000_000
    print("halfway", flush=True)
    time.sleep(60)

FolderStore(Path(sys.argv[1])).create("a/key", pieces())
"""


@pytest.mark.processes
def test_a_writer_killed_halfway_leaves_nothing_visible(tmp_path: Path) -> None:
    root = tmp_path / "store"
    writer = python(KILLED, str(root))
    assert line_from(writer) == "halfway"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=10)
    assert len(list(root.rglob(".tmp-*"))) == 1
    store = FolderStore(root)
    assert list(store.entries("")) == []
    assert list(store.entries("a/.tmp-")) == []
    with pytest.raises(NotFoundError):
        store.read("a/key")
    store.create("a/key", [b"whole"])
    assert list(store.entries("")) == [Entry(key="a/key", size_bytes=5)]
