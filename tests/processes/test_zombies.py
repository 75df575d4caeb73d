"""Fencing: what a run that another one has replaced can still do to the store, and how it ends.

A machine is frozen as a whole, another one takes its job over, trains on and commits; then the first one is thawed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.checkpoint import save
from orchestrator.checkpoint.catalog import Standing, survey
from orchestrator.checkpoint.format import GenerationRecord, generation_key, load, retired_key
from orchestrator.checkpoint.generations import read_base
from orchestrator.checkpoint.reader import read_committed
from orchestrator.core.messages import CheckpointId
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.opening import job_url, open_store
from orchestrator.supervisor.loop import Supervisor
from tests.processes import harness
from tests.processes.machines import JOB, STEPS, Machine, contents, generation_of, until
from tests.processes.reference import Reference, StoreCheck, read_entries
from tests.s3_servers import S3Servers


@dataclass(kw_only=True)
class Place:
    """Where the machines of one test are."""

    folder: Path
    staging: Path
    url: str
    variables: dict[str, str]
    ends: ExitStack = field(default_factory=ExitStack)

    @property
    def store(self) -> ObjectStore:
        """The job's folder on the store."""
        return open_store(job_url(self.url, JOB))

    def machine(self, name: str) -> Machine:
        """Another machine."""
        made = Machine(self.folder, self.staging, name, self.url, self.variables)
        self.ends.callback(made.remove)
        return made


@pytest.fixture
def place(
    tmp_path: Path, staging: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """An empty store of the kind that the test names; every process is ended in the end."""
    url, variables = str(tmp_path / "store"), dict[str, str]()
    if request.param != "folder":
        servers: S3Servers = request.getfixturevalue("s3_servers")
        server = servers.shared(request.param)
        url, variables = server.bucket().url, server.variables()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    made = Place(folder=tmp_path, staging=Path(staging), url=url, variables=variables)
    with made.ends:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What an uninterrupted training comes to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    machine = Machine(folder, folder / "staging", "alone", str(folder / "store"), {})
    machine.pace.unlink()
    try:
        machine.start("--save-every", "0")
        assert machine.await_end() == 0, machine.words()
        return Reference(machine.ledger)
    finally:
        machine.remove()


def committed(store: ObjectStore, generation: int) -> int:
    """The highest committed step of a generation, 0 if there is none."""
    ids = [entry.id for entry in survey(store).entries if entry.standing is Standing.COMMITTED]
    return max((one.step for one in ids if one.generation == generation), default=0)


def newest(store: ObjectStore) -> CheckpointId:
    found = survey(store).newest()
    assert found is not None
    return found.id


def check_all(store: ObjectStore, reference: Reference, ledgers: list[Path]) -> None:
    """Every committed checkpoint and every restored state is the uninterrupted run's."""
    first, *others = ledgers
    assert StoreCheck(reference=reference, store=store, ledger=first).problems() == []
    for ledger in others:
        assert not any(reference.problem_of_entry(entry) for entry in read_entries(ledger, set()))


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Where the zombie stands still, and who takes its job over."""

    at: str | None
    """A named point that one of its agents has reached; None: in the middle of training."""
    store: str = "folder"
    flags: tuple[str, ...] = ()
    same_owner: bool = False
    """As after a requeue; otherwise it is told to take the job over."""
    heir_is_done: bool = False
    """The newer run comes to its end before the zombie wakes up."""
    base_step: int | None = None
    """What the newer run must start from, where that is certain."""

    def __str__(self) -> str:
        owner = "same owner" if self.same_owner else "another owner"
        return f"{self.store}, {self.at or 'training'}, {owner}"


FREEZES = (
    Freeze(at=None, heir_is_done=True),
    Freeze(at="before-index step=20", base_step=20),
    Freeze(at="after-retired step=10", flags=("--keep-last", "1")),
    Freeze(at="after-shard-upload step=20", same_owner=True, store="seaweedfs"),
)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("place", "freeze"), [(one.store, one) for one in FREEZES], indirect=["place"], ids=map(str, FREEZES)
)
def test_a_zombie_ends_and_harms_nothing(place: Place, freeze: Freeze, undisturbed: Reference) -> None:
    store, zombie, heir = place.store, place.machine("zombie"), place.machine("heir")
    zombie.start(*freeze.flags, stop_at=freeze.at)
    until(lambda: zombie.marker.exists() if freeze.at else committed(store, 1) >= 20, zombie.words)
    zombie.freeze()
    if freeze.same_owner:
        heir.owner_from(zombie)
    heir.start(*(() if freeze.same_owner else ("--take-over",)))
    if freeze.heir_is_done:
        heir.pace.unlink()
        assert heir.await_end() == 0, heir.words()
    until(lambda: committed(store, 2) >= 40, heir.words)
    base = read_base(store, 2)
    assert base is not None
    assert freeze.base_step in (None, base.checkpoint_step)
    before, was_newest = contents(store), newest(store)

    zombie.thaw()
    thawed = time.monotonic()
    assert zombie.await_end() == 3, zombie.words()
    print(f"{freeze}: ended {time.monotonic() - thawed:.1f} s after it was thawed")
    assert "another run has taken over the job 'job': generation 2 was claimed by" in zombie.last_words()
    after = contents(store)
    assert {key: after.get(key) for key in before} == before, "nothing is changed, nothing is deleted"
    added = {key for key in after.keys() - before.keys() if generation_of(key) == 1}
    assert not any(key.endswith((".end.json", "retired.json")) for key in added)
    assert newest(store).generation == 2
    assert newest(store) >= was_newest
    if freeze.heir_is_done:
        assert newest(store) == was_newest

    heir.pace.unlink(missing_ok=True)
    assert heir.await_end() == 0, heir.words()
    assert {generation_of(key) for key in contents(store)} == {1, 2}, "the newer run was never restarted"
    assert newest(store) == CheckpointId(generation=2, step=STEPS)
    assert store.size(retired_key(CheckpointId(generation=1, step=10))) if "--keep-last" in freeze.flags else True
    check_all(store, undisturbed, [zombie.ledger, heir.ledger])


@pytest.mark.parametrize("place", ["seaweedfs"], indirect=True)
def test_of_two_copies_of_one_run_one_goes_on(place: Place, undisturbed: Reference) -> None:
    """Requeued, and the first one is still there: the same owner id, the same instant, on two machines."""
    store, copies = place.store, [place.machine("one"), place.machine("two")]
    for copy in copies:
        copy.owned_by("local-0123456789abcdef")
    for copy in copies:
        copy.start()
    until(lambda: any(copy.status is not None for copy in copies), copies[0].words)
    (fenced,) = [copy for copy in copies if copy.status is not None]
    (other,) = [copy for copy in copies if copy is not fenced]
    assert fenced.status == 3, fenced.words()
    assert "another run has taken over the job 'job'" in fenced.last_words()
    other.pace.unlink()
    assert other.await_end() == 0, other.words()

    trained = [{int(path.name.split("-")[1]) for path in copy.ledger.iterdir()} for copy in copies]
    assert not trained[0] & trained[1], "no generation is trained by both"
    claimants = {number: record.claimant for number, record in survey(store).generations.items()}
    assert len(set(claimants.values())) <= 2
    assert newest(store).step == STEPS
    assert (
        claimants[newest(store).generation]
        == load(GenerationRecord, "claim", store.read(generation_key(max(claimants)))).claimant
    )
    for entry in survey(store).entries:
        if entry.standing is Standing.COMMITTED:
            assert read_committed(store, entry.id).world_size == 2
    check_all(store, undisturbed, [copy.ledger for copy in copies])


async def test_a_late_committer_believes_what_is_there(tmp_path: Path, staging: str, reference: dict[str, str]) -> None:
    """An agent stands still right before it writes the index; meanwhile a sweep abandons the step."""
    marker, step = tmp_path / "stopped", CheckpointId(generation=1, step=20)

    async def scenario(supervisor: Supervisor) -> None:
        await harness.until(marker.exists)
        assert not save.abandon(open_store(str(tmp_path / "store" / "small")), step, "swept")
        for node in supervisor.scheduler.nodes():
            os.kill(node.pid or 0, signal.SIGCONT)

    agent = (sys.executable, "-m", "tests.processes.stopping_agent", str(marker), "before-index step=20")
    result = await harness.run_job(tmp_path, nodes="2", staging=staging, agent_command=agent, scenario=scenario)
    assert marker.exists()
    assert result.finish.exit_code == 0, result.output()
    assert [record.reason for record in result.kinds("abandoned") if record.step == 20] == ["its index says so"]
    assert not [record for record in result.kinds("committed") if record.step == 20]
    standing = {entry.id: entry.standing for entry in survey(result.store).entries}
    assert standing[step] is Standing.ABANDONED
    assert harness.final_digests(result.store) == reference
    harness.check_store(result.store)
