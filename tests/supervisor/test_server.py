"""The supervisor's port: the token, the verbs, the metrics, and agents that are not wanted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from orchestrator.clock import SystemClock
from orchestrator.core.commit import Save
from orchestrator.core.job import new_job, step
from orchestrator.core.messages import CheckpointId, HostReported, Mode, NodeJoined, Prepare, WatcherReported
from orchestrator.core.ranks import NOBODY, Ranks, RankSet
from orchestrator.core.states import JobSpec, LossTrouble
from orchestrator.errors import ConfigError
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.supervisor.loop import Supervisor, describe
from orchestrator.supervisor.server import SupervisorServer
from orchestrator.telemetry import EventLog, EventRecord

TOKEN = "a-token-for-this-test"


class NoNodes:
    """A scheduler that has one node in its list and starts nothing."""

    def __init__(self) -> None:
        self.requested = 0
        self.losing: list[tuple[str, float]] = []
        self.on_lost: OnLost = lambda node, reason: None

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        self.on_lost = on_lost
        return ()

    def request(self, count: int) -> None:
        self.requested += count

    def release(self, node: str) -> None:
        raise AssertionError(node)

    def lose(self, node: str, after_seconds: float) -> None:
        if after_seconds == 13:
            raise ConfigError("this one cannot be taken away")
        self.losing.append((node, after_seconds))

    def nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node="node-0", pid=1)]

    async def stop(self) -> None:
        return


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    """A supervisor whose port is open; its loop does not run."""
    spec = JobSpec(name="small", nodes_min=1, nodes_max=1, workers_per_node=1, save_every_steps=10)
    instance = Supervisor(spec, NoNodes(), SystemClock(), EventLog(), TOKEN)
    await instance.server.start()
    yield instance
    await instance.server.stop()


def url_of(supervisor: Supervisor) -> str:
    assert isinstance(supervisor.server, SupervisorServer)
    return supervisor.server.url


@pytest.fixture
async def client(supervisor: Supervisor) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that has the token."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(url_of(supervisor), headers=headers) as session:
        yield session


@pytest.mark.parametrize("path", ["/status", "/metrics", "/agent"])
@pytest.mark.parametrize("header", [None, "Bearer wrong", TOKEN, "Bearer "])
async def test_nothing_without_the_token(supervisor: Supervisor, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with aiohttp.ClientSession(url_of(supervisor), headers=headers) as session:
        async with session.get(path) as answer:
            assert answer.status == 401
            assert TOKEN not in await answer.text()


async def test_the_port_is_on_loopback(supervisor: Supervisor) -> None:
    assert url_of(supervisor).startswith("http://127.0.0.1:")


async def test_status(client: aiohttp.ClientSession) -> None:
    async with client.get("/status") as answer:
        body = await answer.json()
    assert (body["job"], body["phase"], body["newest_committed"]) == ("small", "gathering", None)


def test_status_says_how_far_each_rank_of_a_save_is() -> None:
    spec = JobSpec(name="small", nodes_min=1, nodes_max=1, workers_per_node=3, save_every_steps=10)
    older, newer = (
        Save(
            id=CheckpointId(generation=1, step=step),
            mode=Mode.STAY,
            world_size=3,
            absent=NOBODY,
            decided_at_seconds=90.0 + step,
            deadline_seconds=None,
            staged=RankSet.of(staged),
            durable=RankSet.of(durable),
            size_bytes=4096,
        )
        for step, staged, durable in ((1, (0, 1, 2), (0, 1, 2)), (2, (0, 1), (1,)))
    )
    saves = {newer.id: newer, older.id: older}
    job = replace(new_job(spec, 0.0), saves=saves, ranks=Ranks.starting(3, 0))
    said = describe(job, 100.0, {})
    assert [(save["checkpoint"], save["staged"], save["durable"]) for save in said["saves"]] == [
        ("g00000001-s0000000001", 3, 3),
        ("g00000001-s0000000002", 2, 1),
    ]
    assert said["saves"][1]["since_seconds"] == 8.0
    assert [rank["save"] for rank in said["ranks"]] == ["staged", "durable", "not yet"]
    nothing = describe(replace(job, saves={}), 100.0, {})
    assert (nothing["saves"], [rank["save"] for rank in nothing["ranks"]]) == ([], [None] * 3)


@pytest.mark.parametrize(
    "body",
    [
        {"request": "explode"},
        {"request": "resize"},
        {"request": "resize", "nodes": 0},
        {"request": "resize", "nodes": 5000},
        {"request": "drain", "nodes": 2},
        {"request": "rollback"},
        {"request": "rollback", "step": -1},
        {"request": "rollback", "step": True},
        {"request": "resize", "nodes": True},
        {"request": "rollback", "step": "10"},
        {"request": "drain", "step": 10},
        {},
        [],
        "drain",
    ],
)
async def test_bad_requests_change_nothing(client: aiohttp.ClientSession, supervisor: Supervisor, body: object) -> None:
    async with client.post("/requests", json=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]
    assert supervisor.pending_events == 0


async def test_requests_are_taken(client: aiohttp.ClientSession, supervisor: Supervisor) -> None:
    async with client.post("/requests", json={"request": "resize", "nodes": 2, "by": "me"}) as answer:
        assert answer.status == 200
    assert supervisor.pending_events == 1


@pytest.mark.parametrize(
    "body", [{"node": "nobody", "seconds": 3}, {"node": "node-0", "seconds": -1}, {"node": "node-0", "seconds": 13}, {}]
)
async def test_bad_notices(client: aiohttp.ClientSession, supervisor: Supervisor, body: object) -> None:
    async with client.post("/notices", json=body) as answer:
        assert answer.status == 400
    assert supervisor.pending_events == 0


async def test_a_save_that_failed_is_a_metric(client: aiohttp.ClientSession, supervisor: Supervisor) -> None:
    """F76: the failure is counted where an alarm can see it."""
    record = EventRecord(wall_seconds=0, monotonic_seconds=0, job="small", kind="save failed", reason="no space")
    supervisor.server.count(record)
    async with client.get("/metrics") as answer:
        text = await answer.text()
    assert 'orchestrator_events_total{job="small",kind="save failed"} 1.0' in text


async def test_a_node_that_cannot_see_its_notices_is_counted(
    supervisor: Supervisor, client: aiohttp.ClientSession
) -> None:
    """And is told of in the status."""
    events = (
        NodeJoined(node="node-0", workers=1),
        WatcherReported(node="node-0", source="aws", problem="status 401"),
    )
    for event in events:
        supervisor.job, _ = step(supervisor.job, event, 1.0)
    async with client.get("/status") as answer:
        assert [node["blind"] for node in (await answer.json())["nodes"]] == [["aws"]]
    async with client.get("/metrics") as answer:
        assert 'orchestrator_blind_watchers{job="small"} 1.0' in await answer.text()


async def test_a_loss_that_goes_wrong_is_told_in_the_status_and_counted(
    supervisor: Supervisor, client: aiohttp.ClientSession
) -> None:
    async with client.get("/metrics") as answer:
        assert 'orchestrator_troubled_losses{job="small"} 0.0' in await answer.text()
    async with client.get("/status") as answer:
        assert (await answer.json())["loss_trouble"] is None
    trouble = LossTrouble(rank=3, step=7, value="nan", usual=2.5, words="rank 3: …", ranks=RankSet.of((1, 3)))
    supervisor.job = replace(supervisor.job, loss_trouble=trouble)
    async with client.get("/status") as answer:
        told = (await answer.json())["loss_trouble"]
    assert told == {"rank": 3, "step": 7, "value": "nan", "usual": 2.5, "reason": "rank 3: …", "ranks": 2}
    async with client.get("/metrics") as answer:
        assert 'orchestrator_troubled_losses{job="small"} 2.0' in await answer.text()


async def test_a_node_whose_device_is_done_for_is_counted(
    supervisor: Supervisor, client: aiohttp.ClientSession
) -> None:
    events = (
        NodeJoined(node="node-0", workers=1),
        NodeJoined(node="node-1", workers=1),
        HostReported(node="node-1", what="GPU-aa", problem="it is lost", condemns=True),
    )
    for event in events:
        supervisor.job, _ = step(supervisor.job, event, 1.0)
    async with client.get("/status") as answer:
        assert [node["condemned"] for node in (await answer.json())["nodes"]] == [[], ["it is lost"]]
    async with client.get("/metrics") as answer:
        assert 'orchestrator_condemned_nodes{job="small"} 1.0' in await answer.text()


async def test_an_agent_of_an_earlier_supervisor_begins_anew(client: aiohttp.ClientSession) -> None:
    """Its messages to the process that died mean nothing here: both sides count from the beginning."""
    async with client.ws_connect("/agent") as socket:
        await socket.send_json({"node": "node-7", "received": 12, "life": "an earlier one"})
        welcome = await socket.receive_json()
        assert welcome["received"] == 0
    async with client.ws_connect("/agent") as socket:
        await socket.send_json({"node": "node-7", "received": 0, "life": welcome["life"]})
        assert await socket.receive_json() == welcome


async def test_an_agent_that_this_supervisor_never_met_cannot_claim_to_know_it(client: aiohttp.ClientSession) -> None:
    async with client.ws_connect("/agent") as socket:
        await socket.send_json({"node": "node-7", "received": 0, "life": ""})
        life = (await socket.receive_json())["life"]
    async with client.ws_connect("/agent") as socket:
        await socket.send_json({"node": "node-8", "received": 12, "life": life})
        assert "refused" in await socket.receive_json()


async def test_a_lost_node_is_not_let_in_again(client: aiohttp.ClientSession, supervisor: Supervisor) -> None:
    supervisor.links.send("node-0", Prepare(node="node-0", generation=1, ballot=1, step=1))
    supervisor.links.forget("node-0")
    async with client.ws_connect("/agent") as socket:
        await socket.send_json({"node": "node-0", "received": 0, "life": ""})
        assert "refused" in await socket.receive_json()


async def test_a_node_that_was_given_back_unheard_is_not_let_in(
    client: aiohttp.ClientSession, supervisor: Supervisor
) -> None:
    """Its agent hung while an earlier supervisor's nodes were awaited; its scheduler ends it."""
    supervisor.links.dismiss("node-0")
    async with client.ws_connect("/agent") as socket:
        await socket.send_json({"node": "node-0", "received": 0, "life": "an earlier one"})
        assert "refused" in await socket.receive_json()


def test_no_estimate_is_made_before_a_step_was_measured() -> None:
    """After a restart the step is known, and how long one takes is not."""
    spec = JobSpec(name="small", nodes_min=1, nodes_max=1, workers_per_node=1, save_every_steps=10)
    job = replace(new_job(spec, 0.0), until=100, ranks=Ranks.starting(1, 40))
    said = describe(job, 1.0, {})
    assert (said["step"], said["step_seconds"], said["eta_seconds"]) == (40, None, None)
    known = describe(replace(job, measured=replace(job.measured, step_seconds=0.5)), 1.0, {})
    assert (known["step_seconds"], known["eta_seconds"]) == (0.5, 30.0)
