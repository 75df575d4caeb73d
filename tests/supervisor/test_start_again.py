"""F88: a supervisor that is started again: whose nodes it takes back, and what it knows before any of them reports."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from orchestrator.clock import SystemClock
from orchestrator.config import JobConfig
from orchestrator.core.messages import GangReturned, NodeJoined
from orchestrator.core.states import JobSpec, Phase
from orchestrator.errors import ConfigError, FencedError
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.schedulers.leftovers import StartedNode, start_ticks, write_leftovers
from orchestrator.supervisor.local_job import LocalJob, LocalJobOptions, terms_of
from orchestrator.supervisor.loop import TICK_SECONDS, Supervisor
from orchestrator.supervisor.state_folder import place_of
from orchestrator.telemetry import EventLog, EventRecord


class SlowScheduler:
    """Looks for leftovers for a while, and finds two nodes."""

    def __init__(self) -> None:
        self.started = False
        self.requested = 0

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        await asyncio.sleep(3 * TICK_SECONDS)
        self.started = True
        return ("node-0", "node-1")

    def request(self, count: int) -> None:
        self.requested += count

    def release(self, node: str) -> None:
        return

    def lose(self, node: str, after_seconds: float) -> None:
        return

    def nodes(self) -> list[NodeInfo]:
        return []

    async def stop(self) -> None:
        return


def returned(node: str, first_rank: int) -> NodeJoined:
    gang = GangReturned(
        node=node,
        generation=1,
        world_size=2,
        first_rank=first_rank,
        count=1,
        base=None,
        progress=(),
        ballot=0,
        proposed_step=None,
        decided=(),
        ended=False,
        committed_step=None,
    )
    return NodeJoined(node=node, workers=1, returned=gang)


async def test_the_nodes_that_were_left_are_known_before_any_of_them_reports() -> None:
    """Else the first one's gang would be ended for want of the others, and new nodes asked for beside the old ones."""
    records: list[EventRecord] = []
    scheduler = SlowScheduler()
    spec = JobSpec(name="small", nodes_min=1, nodes_max=2, workers_per_node=1, save_every_steps=10)
    supervisor = Supervisor(spec, scheduler, SystemClock(), EventLog(records.append), "token")
    listening = asyncio.Event()

    def on_listening(url: str) -> None:
        assert scheduler.started, "agents find the address here and would report too soon"
        listening.set()

    supervisor.on_listening = on_listening
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(listening.wait(), 10)
    supervisor.submit(returned("node-0", 0))
    while not any(record.kind == "node joined" for record in records):
        await asyncio.sleep(0.01)
    assert records[0].kind == "nodes found"
    assert supervisor.job.phase is Phase.GATHERING
    supervisor.submit(returned("node-1", 1))
    while supervisor.job.phase is Phase.GATHERING:
        await asyncio.sleep(0.01)
    assert supervisor.job.phase is Phase.STARTING
    assert scheduler.requested == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --------------------------------------------------------------------------------------------------- the terms


def config(folder: Path, **others: object) -> JobConfig:
    values: dict[str, object] = {
        "job": "small",
        "store": str(folder / "store"),
        "nodes": "1:2",
        "command": ("python", "train.py"),
        **others,
    }
    return JobConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"command": ("python", "train.py", "--lr", "1")}, {"workers_per_node": 2}, {"grace_seconds": 5.0}],
    ids=str,
)
def test_what_a_node_was_started_with_belongs_to_the_terms(tmp_path: Path, change: dict[str, object]) -> None:
    assert terms_of(config(tmp_path), "url") != terms_of(config(tmp_path, **change), "url")


@pytest.mark.parametrize("change", [{"nodes": "1:4"}, {"save_every": 7}, {"max_failures": 9}], ids=str)
def test_what_the_supervisor_alone_decides_by_may_change(tmp_path: Path, change: dict[str, object]) -> None:
    assert terms_of(config(tmp_path), "url") == terms_of(config(tmp_path, **change), "url")


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("CUDA_VISIBLE_DEVICES", True),
        ("LEARNING_RATE", True),
        ("SSH_CONNECTION", False),
        ("TERM", False),
        ("XDG_SESSION_ID", False),
        ("INVOCATION_ID", False),
        ("JOURNAL_STREAM", False),
    ],
)
def test_the_environment_belongs_to_the_terms_but_for_what_every_login_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, matters: bool
) -> None:
    monkeypatch.setenv(name, "one")
    before = terms_of(config(tmp_path), "url")
    monkeypatch.setenv(name, "another")
    assert (terms_of(config(tmp_path), "url") != before) is matters


# ------------------------------------------------------------------------------------------------ in whose name


def left_running(tmp_path: Path, started_ticks: int | None) -> None:
    """A node of an earlier supervisor of this job; this very process stands for its agent."""
    first = LocalJob(config(tmp_path), LocalJobOptions(job_url="url"))
    first.acquire()
    node = StartedNode(number=0, pid=os.getpid(), started_ticks=started_ticks, staging=str(tmp_path / "none"))
    path = first.state.path / "nodes.json"
    write_leftovers(path, claimant="the first", terms=terms_of(config(tmp_path), "url"), nodes=[node])
    first.state.release()


@pytest.mark.parametrize(
    ("case", "same"),
    [
        ("same terms", True),
        ("other periodic saves", True),
        ("other terms", False),
        ("taken over", False),
        ("no node lives", False),
    ],
)
def test_it_goes_on_in_the_name_of_the_one_whose_nodes_it_takes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, same: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    left_running(tmp_path, 1 if case == "no node lives" else start_ticks(os.getpid()))
    others = {"other periodic saves": {"save_every": 3}, "other terms": {"workers_per_node": 2}}.get(case, {})
    job = LocalJob(config(tmp_path, **others), LocalJobOptions(job_url="url", take_over=case == "taken over"))
    job.acquire()
    try:
        assert (job._claimant == "the first") is same
    finally:
        job.state.release()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"somebody else"])
def test_an_owner_that_is_not_whole_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = LocalJob(config(tmp_path), LocalJobOptions(job_url="url"))
    job.state.path.mkdir(parents=True)
    (job.state.path / "owner").write_bytes(content)
    with pytest.raises(ConfigError, match="owner holds no owner id; remove it"):
        job.acquire()
    job.state.release()


@pytest.mark.parametrize("name", ["owner", "supervisor.json"])
def test_a_state_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = LocalJob(config(tmp_path), LocalJobOptions(job_url="url"))
    (job.state.path / f"{name}.draft").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{name} cannot be written: Is a directory"):
        start(job)
    job.state.release()


def start(job: LocalJob) -> None:
    """What writes into the state folder before the first node is asked for."""
    job.acquire()
    job.state.publish("http://127.0.0.1:1", "token")


def test_beside_a_living_supervisor_nothing_is_taken_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = LocalJob(config(tmp_path), LocalJobOptions(job_url="url"))
    first.acquire()
    first.state.publish("http://127.0.0.1:1", "token")
    before = {path: path.read_bytes() for path in first.state.path.iterdir()}
    with pytest.raises(FencedError, match="already running"):
        LocalJob(config(tmp_path), LocalJobOptions(job_url="url")).acquire()
    assert {path: path.read_bytes() for path in first.state.path.iterdir()} == before
    first.state.release()


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("/data/what?profile=x/job", "/data/what?profile=x/job"),
        ("s3://bucket/job", "s3://bucket/job"),
        ("s3://bucket/job?region=eu-1&profile=x", "s3://bucket/job"),
        ("s3://bucket/job?region=eu-1&endpoint=http://host:1", "s3://bucket/job?endpoint=http://host:1"),
    ],
)
def test_a_job_is_the_same_one_whichever_way_its_store_is_reached(url: str, place: str) -> None:
    assert place_of(url) == place


def test_who_has_not_become_the_supervisor_leaves_the_last_ones_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that ends before it listens: what is left running is taken back by the next one all the same."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = LocalJob(config(tmp_path), LocalJobOptions(job_url="url"))
    first.state.path.mkdir(parents=True)
    first.state.address_path.write_text("an address")
    first.acquire()
    first.state.release()
    assert first.state.address_path.read_text() == "an address"
    start(first)
    first.state.release()
    assert not first.state.address_path.exists()
