"""The store in a bucket on a real server (SeaweedFS) behind a proxy that refuses, stalls, corrupts and loses.

What a fault costs, what the error says, and that nothing torn is ever visible.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy
import pytest

from orchestrator.checkpoint import format as fmt
from orchestrator.checkpoint.opened import open_checkpoint
from orchestrator.checkpoint.reader import read_committed, verify, verify_shard
from orchestrator.checkpoint.save import ShardPlace, commit, read_index, upload_shard
from orchestrator.core.messages import CheckpointId
from orchestrator.errors import (
    AlreadyExistsError,
    DigestError,
    FormatError,
    NotFoundError,
    OrchestratorError,
    StoreDeniedError,
    StoreError,
    StoreUnavailableError,
)
from orchestrator.storage.retrying import Patience, RetryingStore
from orchestrator.storage.s3 import parts as parts_module
from orchestrator.storage.s3.bucket import Bucket
from orchestrator.storage.s3.store import S3Store
from orchestrator.testing.faulty_http import (
    CLOCK_SKEW,
    EXPIRED_TOKEN,
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    UNKNOWN_ACCESS_KEY,
    CorruptAnswer,
    CorruptRequest,
    Delay,
    Fault,
    FaultyProxy,
    LoseAnswer,
    Refuse,
    Rule,
    Stall,
    StallAnswer,
    Truncate,
)
from tests.cli.small_job import JOB, TENSOR, claim, save, shard, upload
from tests.s3_servers import BUCKET, S3Server, S3Servers

PART_BYTES = 5 << 20
"""The least that S3 takes."""
PIECE_BYTES = 1_000_000
SILENCE_SECONDS = 2.0
"""Where a server shall be silent: long enough for one that is only busy, as a rule."""
CONTENT = numpy.random.default_rng(7).bytes(2 * PART_BYTES + 1234)


@dataclass
class Scene:
    """A store whose every request goes through the proxy, and the same objects seen behind its back."""

    proxy: FaultyProxy
    server: S3Server
    bucket: Bucket
    slept: list[float] = field(default_factory=list)

    def store(self, deadline_seconds: float = 20.0, silence_seconds: float = 20.0) -> RetryingStore:
        """It has probed its server already."""
        settings = {**self.server.settings(), "endpoint_url": self.proxy.url}
        bucket = Bucket(BUCKET, self.prefix, silence_seconds=silence_seconds, connect_seconds=2.0, settings=settings)
        patience = Patience(
            deadline_seconds=deadline_seconds, first_wait_seconds=0.01, wait_seconds_max=0.05, sleep=self._sleep
        )
        inner = S3Store(bucket, patience.call)
        inner.probe()
        inner._probed = True
        self.stores.append(inner)
        return RetryingStore(inner, patience)

    def __post_init__(self) -> None:
        self.stores: list[S3Store] = []
        self.behind = S3Store(self.bucket)
        self._seen = 0

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.proxy.wait(seconds)

    def meets(self, *rules: Rule) -> None:
        """From now on."""
        self.slept.clear()
        self._seen = len(self.proxy.exchanges)
        self.proxy.set_rules(*rules)

    def asked(self, operation: str) -> list[int | None]:
        """Part numbers of the requests of that kind since the rules were set."""
        exchanges = self.proxy.exchanges[self._seen :]
        return [one.request.part for one in exchanges if one.request.operation == operation]

    @property
    def prefix(self) -> str:
        return self.bucket.full_key("").rstrip("/")

    def keys(self) -> list[str]:
        return [entry.key for entry in self.behind.entries("")]

    def unfinished(self) -> int:
        client = self.bucket._made_client()
        return len(client.list_multipart_uploads(Bucket=BUCKET, Prefix=self.prefix).get("Uploads", []))


@pytest.fixture
def scene(s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(parts_module, "SMALLER", ((1 << 30, PART_BYTES),))
    server = s3_servers.shared("seaweedfs")
    with FaultyProxy(server.url) as proxy:
        scene = Scene(proxy, server, server.bucket())
        yield scene
        for store in scene.stores:
            store.close()


class Pieces:
    """The content as a shard comes: piece by piece, its size being known."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self._content = content
        self.size_bytes_max = len(content)

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._content), PIECE_BYTES):
            yield memoryview(self._content)[start : start + PIECE_BYTES]


# ---------------------------------------------------------------------------------------------- asked to slow down


@pytest.mark.parametrize(
    ("operation", "refusal"),
    [
        ("HeadObject", SLOW_DOWN),
        ("CreateMultipartUpload", SLOW_DOWN),
        ("UploadPart", SLOW_DOWN),
        ("UploadPart", TOO_MANY_REQUESTS),
        ("CompleteMultipartUpload", SLOW_DOWN),
        ("CompleteMultipartUpload", INTERNAL_ERROR),
    ],
)
def test_an_upload_goes_on_after_refusals(operation: str, refusal: Refuse, scene: Scene) -> None:
    """F26: one refusal costs a wait, and not what has arrived."""
    store = scene.store()
    scene.meets(Rule(fault=refusal, operation=operation, times=3))
    store.create("shard", Pieces())
    assert scene.behind.read("shard") == CONTENT
    assert len(scene.slept) == 3
    assert set(scene.asked("UploadPart")) == {1, 2, 3}
    assert len(scene.asked("UploadPart")) == (6 if operation == "UploadPart" else 3)
    assert scene.unfinished() == 0


def test_a_server_that_takes_one_part_at_a_time_gets_them_so(scene: Scene) -> None:
    content = CONTENT * 5
    store = scene.store(deadline_seconds=30.0)
    scene.meets(Rule(fault=SLOW_DOWN, operation="UploadPart", above=1), Rule(fault=Delay(seconds=0.05)))
    store.create("shard", Pieces(content))
    assert scene.behind.read("shard") == content
    parts = [one for one in scene.proxy.exchanges if one.request.operation == "UploadPart"]
    refused = [place for place, one in enumerate(parts) if one.fault == SLOW_DOWN]
    assert refused
    assert max(one.under_way for one in parts[8:]) <= 2, "one at a time, and now and then one more is tried"


def test_patience_that_is_used_up_says_what_the_server_said_and_of_which_part(scene: Scene) -> None:
    store = scene.store(deadline_seconds=0.3)
    scene.meets(Rule(fault=SLOW_DOWN, operation="UploadPart", part=2))
    with pytest.raises(
        StoreUnavailableError,
        match=rf"^shard: part 2 of at most 3, {PART_BYTES} bytes: {scene.proxy.url} could not .* now: SlowDown \(503\)",
    ):
        store.create("shard", Pieces())
    assert scene.keys() == []
    assert scene.unfinished() == 0


def test_retry_after_is_followed_as_far_as_patience_allows(scene: Scene) -> None:
    store = scene.store()
    refusal = Refuse(code="SlowDown", status=503, retry_after_seconds=3600)
    scene.meets(Rule(fault=refusal, operation="PutObject", times=2))
    store.create("record", [b"1"])
    assert scene.slept == [0.05, 0.05]


# ---------------------------------------------------------------------------------------------- standing still


@pytest.mark.parametrize("fault", [Stall(body_bytes=1000), Stall(), StallAnswer(after_bytes=None)])
def test_only_the_part_that_stands_still_is_sent_again(fault: Fault, scene: Scene) -> None:
    """F27."""
    store = scene.store(silence_seconds=SILENCE_SECONDS)
    scene.meets(Rule(fault=fault, operation="UploadPart", part=2, times=1))
    store.create("shard", Pieces())
    assert scene.behind.read("shard") == CONTENT
    assert scene.asked("UploadPart").count(2) > 1
    assert len(scene.asked("CreateMultipartUpload")) == 1, "nothing begins anew"


def test_a_part_that_stands_still_for_ever_is_named(scene: Scene) -> None:
    """F27: number, how many, bytes, key and endpoint."""
    store = scene.store(deadline_seconds=2 * SILENCE_SECONDS, silence_seconds=SILENCE_SECONDS)
    scene.meets(Rule(fault=Stall(), operation="UploadPart", part=3))
    with pytest.raises(
        StoreUnavailableError,
        match=rf"^shard: part 3 of at most 3, 1234 bytes: {scene.proxy.url} broke off, or was silent for too long",
    ):
        store.create("shard", Pieces())
    assert len(scene.asked("UploadPart")) > 3, "it was sent again"
    assert scene.keys() == []
    assert scene.unfinished() == 0


# ---------------------------------------------------------------------------------------------- answers cut short


@pytest.mark.parametrize("fault", [Truncate(after_bytes=1000), StallAnswer(after_bytes=1000), Truncate()])
def test_an_answer_that_is_cut_short_is_asked_for_again(fault: Fault, scene: Scene) -> None:
    store = scene.store(silence_seconds=SILENCE_SECONDS)
    store.create("shard", Pieces())
    found = memoryview(bytearray(len(CONTENT)))
    scene.meets(Rule(fault=fault, operation="GetObject", times=1))
    assert store.read_into("shard", 0, [found[:10], found[10:]]) == len(CONTENT)
    assert found == CONTENT
    scene.meets(Rule(fault=fault, operation="GetObject", times=1))
    assert store.read("shard", 5, 5000) == CONTENT[5:5000]
    scene.meets(Rule(fault=fault, operation="GetObject", times=1))
    assert store.read("shard") == CONTENT


def test_answers_that_are_always_cut_short_are_no_data(scene: Scene) -> None:
    store = scene.store(deadline_seconds=0.3)
    store.create("shard", Pieces())
    scene.meets(Rule(fault=Truncate(after_bytes=1000), operation="GetObject"))
    for read in (
        lambda: store.read("shard"),
        lambda: store.read("shard", 3, 4000),
        lambda: store.read_into("shard", 3, [memoryview(bytearray(4000))]),
    ):
        with pytest.raises(StoreUnavailableError, match="ended after 1000 of"):
            read()


def test_a_listing_that_is_cut_short_is_no_listing(scene: Scene) -> None:
    store = scene.store()
    store.create("a", [b"1"])
    store.create("b", [b"1"])
    scene.meets(Rule(fault=Truncate(after_bytes=300), operation="ListObjectsV2", times=1))
    assert [entry.key for entry in store.entries("")] == ["a", "b"]


# ---------------------------------------------------------------------------------------------- wrong bits


def test_a_wrong_bit_on_the_way_here_is_found_by_the_checkpoints_digests(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store cannot see it in a part of an object; the reader names the shard and the block."""
    store = scene.store()
    claim(store, 1)
    checkpoint = save(store, 1, 20, elements=600_000)
    index = read_committed(store, checkpoint)
    key = fmt.shard_key(checkpoint, 0, 2)
    size_bytes = store.size(key)
    scene.meets(Rule(fault=CorruptAnswer(position=(1 << 20) + 7), operation="GetObject", key=".safetensors"))
    assert store.read_into(key, 0, [memoryview(bytearray(size_bytes))]) == size_bytes
    problem = verify_shard(store, index, index.shards[0])
    assert problem is not None
    assert "block 1" in problem
    for variable, value in scene.server.variables().items():
        monkeypatch.setenv(variable, value)
    opened = open_checkpoint(f"s3://{BUCKET}/{scene.prefix}?endpoint={scene.proxy.url}&region=us-east-1")
    with pytest.raises(DigestError, match=r"shard-0000.-of-00002.safetensors: block"):
        opened.tensor(TENSOR)
    scene.meets()
    assert [problem for _, problem in verify(store, index)] == [None, None]


def test_a_wrong_bit_in_a_record_is_seen_by_the_store_itself(scene: Scene) -> None:
    """Else a commit that read a receipt with a wrong bit would write an index that vouches for it."""
    store, hasty = scene.store(), scene.store(deadline_seconds=0.3)
    claim(store, 1)
    for number in range(1, 9):
        checkpoint = upload(store, 1, number)
        scene.meets(Rule(fault=CorruptAnswer(position=number * 91), operation="GetObject", key=".json", times=1))
        assert commit(store, checkpoint)
        assert len(scene.slept) == 1
        index = read_committed(scene.behind, checkpoint)
        assert [problem for _, problem in verify(scene.behind, index)] == [None, None]
    scene.meets(Rule(fault=CorruptAnswer(), operation="GetObject"))
    with pytest.raises(StoreUnavailableError, match="bytes came with another checksum than they were sent"):
        hasty.read(fmt.index_key(checkpoint))


@pytest.mark.parametrize("operation", ["UploadPart", "PutObject"])
def test_a_wrong_bit_on_the_way_there_is_refused_and_sent_again(operation: str, scene: Scene) -> None:
    store = scene.store()
    scene.meets(Rule(fault=CorruptRequest(position=77), operation=operation, times=1))
    store.create("shard", Pieces() if operation == "UploadPart" else [CONTENT])
    assert scene.behind.read("shard") == CONTENT
    assert len(scene.asked(operation)) == (4 if operation == "UploadPart" else 2)


def test_a_part_that_always_arrives_wrong_is_named(scene: Scene) -> None:
    store = scene.store(deadline_seconds=0.3)
    scene.meets(Rule(fault=CorruptRequest(position=77), operation="UploadPart", part=1))
    with pytest.raises(
        StoreUnavailableError, match=r"^shard: part 1 of at most 3, .* found another checksum than was sent"
    ):
        store.create("shard", Pieces())
    assert scene.keys() == []


# ---------------------------------------------------------------------------------------------- credentials, clock


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (EXPIRED_TOKEN, "the session token has expired; renew the credentials"),
        (UNKNOWN_ACCESS_KEY, "does not know the access key that was given"),
        (CLOCK_SKEW, "this machine's clock and that of .* differ too much; set the clock right"),
    ],
)
def test_credentials_that_end_in_the_middle_of_an_upload(refusal: Refuse, words: str, scene: Scene) -> None:
    """Nothing gets better by waiting; the parts stay invisible, and go when somebody may remove them."""
    store = scene.store()
    scene.meets(Rule(fault=refusal, after=3))
    with pytest.raises(StoreDeniedError, match=rf"^shard: part \d of at most 3, \d+ bytes: .*{words}"):
        store.create("shard", Pieces())
    assert scene.slept == []
    assert scene.keys() == []
    with pytest.raises(NotFoundError):
        scene.behind.size("shard")


@pytest.mark.parametrize(
    ("refusal", "words"), [(EXPIRED_TOKEN, "renew the credentials"), (CLOCK_SKEW, "set the clock right")]
)
def test_the_reason_is_said_where_an_answer_has_no_room_for_it(refusal: Refuse, words: str, scene: Scene) -> None:
    """A HEAD is answered with a bare 400 or 403."""
    store = scene.store()
    store.create("record", [b"1"])
    scene.meets(Rule(fault=refusal))
    with pytest.raises(StoreDeniedError, match=words):
        store.size("record")
    scene.meets(Rule(fault=refusal, operation="HeadObject"))
    with pytest.raises(StoreError, match=r"HeadObject .*\((400|403)\)"):
        store.size("record")


# ---------------------------------------------------------------------------------------------- lost answers


@pytest.mark.parametrize("times", [1, 3])
def test_a_record_whose_answer_was_lost_is_ours(times: int, scene: Scene) -> None:
    store = scene.store()
    scene.meets(Rule(fault=LoseAnswer(), operation="PutObject", times=times))
    store.create("record", [b"mi", b"ne"])
    assert scene.behind.read("record") == b"mine"
    scene.meets(Rule(fault=LoseAnswer(), operation="PutObject", times=times))
    with pytest.raises(AlreadyExistsError):
        store.create("record", [b"other"])
    assert scene.behind.read("record") == b"mine"


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("fault", [LoseAnswer(), StallAnswer(after_bytes=None), Truncate(after_bytes=20)])
def test_a_completion_whose_answer_was_lost_is_looked_for(fault: Fault, times: int, scene: Scene) -> None:
    store = scene.store(silence_seconds=SILENCE_SECONDS)
    scene.meets(Rule(fault=fault, operation="CompleteMultipartUpload", times=times))
    store.create("shard", Pieces())
    assert scene.behind.read("shard") == CONTENT
    assert len(scene.asked("CreateMultipartUpload")) == 1, "no part was sent in vain"
    assert scene.unfinished() == 0


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "HeadObject", "GetObject"])
def test_other_answers_that_were_lost_are_asked_for_again(operation: str, scene: Scene) -> None:
    store = scene.store()
    scene.meets(Rule(fault=LoseAnswer(), operation=operation, times=2))
    store.create("shard", Pieces())
    assert store.read("shard") == CONTENT
    assert scene.keys() == ["shard"]


# ---------------------------------------------------------------------------------------------- a whole save

ROUNDS = 36
ELEMENTS = 2 * (PART_BYTES + 700_000) // 4
"""Of both ranks: each has one part of the size planned, and a bit."""
OPERATIONS = (
    *("HeadObject", "GetObject", "ListObjectsV2", "PutObject", "PutObject"),
    *("CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload"),
)


def drawn_fault(draw: random.Random) -> Fault:
    place = draw.choice((0, 100, draw.randrange(PART_BYTES)))
    return draw.choice(
        (
            *(SLOW_DOWN, TOO_MANY_REQUESTS, INTERNAL_ERROR, EXPIRED_TOKEN),
            *(Truncate(after_bytes=place), LoseAnswer(), StallAnswer(after_bytes=draw.choice((None, place)))),
            *(CorruptAnswer(position=place), CorruptAnswer(position=place), CorruptRequest(position=place)),
            *(Stall(body_bytes=draw.choice((None, place))), Delay(seconds=0.02)),
        )
    )


def drawn_rules(draw: random.Random) -> list[Rule]:
    return [
        Rule(
            fault=drawn_fault(draw),
            operation=draw.choice(OPERATIONS),
            after=draw.choice((0, 0, 1, 2)),
            times=draw.choice((1, 1, 1, 2, 2, 60)),
        )
        for _ in range(draw.randrange(1, 5))
    ]


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_save_under_any_mix_of_faults_is_whole_or_an_error(scene: Scene, seed: int) -> None:
    """What is committed reads back to the bit; everything else raises, and nothing torn is visible."""
    store = scene.store(deadline_seconds=1.0, silence_seconds=0.5)
    committed = 0
    for number in range(1, ROUNDS + 1):
        rules = drawn_rules(random.Random(f"{seed} {number}"))
        said = f"seed {seed}, round {number}: {rules}"
        checkpoint = CheckpointId(generation=1, step=number)
        shards = [shard(rank, 2, ELEMENTS, number) for rank in range(2)]
        scene.meets(*rules)
        error: OrchestratorError | None = None
        try:
            for rank, data in enumerate(shards):
                place = ShardPlace(job=JOB, checkpoint=checkpoint, rank=rank, world_size=2, absent=())
                upload_shard(store, place, memoryview(data))
            assert commit(store, checkpoint), said
            committed += 1
        except (StoreError, FormatError) as caught:
            error = caught
        scene.meets()
        check_what_is_there(scene, checkpoint, shards, error, said)
    print(f"seed {seed}: {committed} of {ROUNDS} were committed")


def check_what_is_there(
    scene: Scene, checkpoint: CheckpointId, shards: list[bytes], error: OrchestratorError | None, said: str
) -> None:
    """Every shard is whole; an index, which may also be there after an error, is that of these shards."""
    there = [entry.key for entry in scene.behind.entries(fmt.folder_key(checkpoint))]
    for rank, data in enumerate(shards):
        key = fmt.shard_key(checkpoint, rank, 2)
        assert key not in there or scene.behind.read(key) == data, said
    index = read_index(scene.behind, checkpoint)
    assert index is not None or error is not None, said
    if index is not None:
        assert isinstance(index, fmt.Index), said
        problems = [problem for _, problem in verify(scene.behind, index)]
        assert problems == [None, None], f"{problems}; {error}; {said}"
