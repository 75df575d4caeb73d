"""The local scheduler with agents that only sleep: nodes come, go, are given back, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from orchestrator.schedulers.leftovers import StartedNode, read_leftovers, start_ticks, write_leftovers
from orchestrator.schedulers.local import START_FAILURES_MAX, LocalScheduler

SLEEPER = (sys.executable, "-S", "-c", "import sys, time; sys.stdin.read(); time.sleep(60)")


class Scene:
    """A scheduler, and what it said."""

    def __init__(
        self,
        folder: Path,
        command: tuple[str, ...] = SLEEPER,
        replacement_seconds: float = 0.0,
        terms: str = "these terms",
    ) -> None:
        self.lost: list[tuple[str, str]] = []
        self.state_file = folder / "nodes.json"
        self.staging = folder / "staging"
        self.scheduler = LocalScheduler(
            settings_of=lambda node, url, token, staging: json.dumps({"node": node, "token": token}),
            staging=self.staging,
            state_file=self.state_file,
            claimant="claimant",
            terms=terms,
            replacement_seconds=replacement_seconds,
            agent_command=command,
        )

    async def start(self) -> tuple[str, ...]:
        return await self.scheduler.start(
            "http://127.0.0.1:1", "secret", lambda node, reason: self.lost.append((node, reason))
        )

    def pids(self) -> list[int]:
        return [info.pid or 0 for info in self.scheduler.nodes()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Two sleeping nodes."""
    scene = Scene(tmp_path)
    await scene.start()
    scene.scheduler.request(2)
    await until(lambda: len(scene.pids()) == 2)
    yield scene
    for pid in scene.pids():
        os.kill(pid, signal.SIGKILL)
    await scene.scheduler.stop()


async def test_a_killed_agent_is_a_lost_node(scene: Scene) -> None:
    (scene.staging / "node-0").mkdir(parents=True)
    os.kill(scene.pids()[0], signal.SIGKILL)
    await until(lambda: bool(scene.lost))
    assert scene.lost == [("node-0", "its agent was killed by signal 9")]
    assert not (scene.staging / "node-0").exists(), "its memory is gone with it"
    assert [info.node for info in scene.scheduler.nodes()] == ["node-1"]


async def test_a_node_that_was_given_back_is_not_lost(scene: Scene) -> None:
    first = scene.pids()[0]
    scene.scheduler.release("node-0")
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(scene.pids()) == 1)
    assert scene.lost == []


async def test_nodes_that_are_given_back_at_once_come_slower_and_slower(scene: Scene) -> None:
    """A notice stands for this machine: whatever starts here is given back as soon as it has reported."""
    given_back = 0
    while given_back < START_FAILURES_MAX:
        await until(lambda: bool(scene.pids()))
        for info, pid in zip(scene.scheduler.nodes(), scene.pids(), strict=True):
            scene.scheduler.release(info.node)
            os.kill(pid, signal.SIGKILL)
            given_back += 1
        await until(lambda: not scene.pids())
        scene.scheduler.request(1)
    for _ in range(20):
        await asyncio.sleep(0.005)
        assert scene.pids() == []
    assert scene.lost == []


async def test_losing_a_node_takes_its_processes(scene: Scene) -> None:
    pid = scene.pids()[1]
    scene.scheduler.lose("node-1", 0)
    await until(lambda: bool(scene.lost))
    assert start_ticks(pid) is None


async def test_names_are_never_used_twice(scene: Scene) -> None:
    scene.scheduler.lose("node-1", 0)
    await until(lambda: bool(scene.lost))
    scene.scheduler.request(1)
    await until(lambda: len(scene.pids()) == 2)
    assert [info.node for info in scene.scheduler.nodes()] == ["node-0", "node-2"]


async def test_what_a_dead_supervisor_left_on_the_same_terms_is_taken_back(scene: Scene, tmp_path: Path) -> None:
    """F88: a supervisor that died takes no node along; the next one watches and ends them like its own."""
    old = scene.pids()
    successor = Scene(tmp_path)
    assert await successor.start() == ("node-0", "node-1")
    assert successor.pids() == old
    os.kill(old[0], signal.SIGKILL)
    await until(lambda: len(successor.lost) == 1)
    assert successor.lost[0][0] == "node-0"
    successor.scheduler.request(1)
    await until(lambda: len(successor.pids()) == 2)
    assert [info.node for info in successor.scheduler.nodes()] == ["node-1", "node-2"]
    await successor.scheduler.stop()
    assert [start_ticks(pid) for pid in old] == [None, None]


async def test_what_a_dead_supervisor_left_on_other_terms_is_ended(scene: Scene, tmp_path: Path) -> None:
    """The next start ends the old nodes, by pid and start time, and goes on with new names."""
    old = scene.pids()
    (scene.staging / "node-1").mkdir(parents=True)
    successor = Scene(tmp_path, terms="another command")
    assert await successor.start() == ()
    await until(lambda: len(scene.lost) == 2)
    assert [start_ticks(pid) for pid in old] == [None, None]
    assert not scene.staging.exists()
    successor.scheduler.request(1)
    await until(lambda: len(successor.pids()) == 1)
    assert [info.node for info in successor.scheduler.nodes()] == ["node-2"]
    os.kill(successor.pids()[0], signal.SIGKILL)
    await successor.scheduler.stop()


async def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    """Another program has the pid of a node of long ago: its start time differs."""
    scene = Scene(tmp_path)
    me = StartedNode(number=4, pid=os.getpid(), started_ticks=1, staging=str(tmp_path / "none"))
    write_leftovers(scene.state_file, claimant="claimant", terms="these terms", nodes=[me])
    assert await scene.start() == ()
    assert scene.lost == []


@pytest.mark.parametrize("change", [{"number": "0"}, {"pid": -1}, {"pid": 1}, {"staging": 5}, {"staging": ""}])
async def test_a_file_of_nodes_that_is_not_ours_is_no_list_of_nodes(tmp_path: Path, change: dict[str, object]) -> None:
    """Processes are killed and folders removed by what it says: nothing is, unless all of it is as it was written."""
    scene = Scene(tmp_path)
    staging = tmp_path / "staging"
    staging.mkdir()
    node = {"number": 0, "pid": os.getpid(), "started_ticks": 1, "staging": str(staging)}
    body = {"claimant": "claimant", "terms": "these terms", "nodes": [node, {**node, **change}]}
    scene.state_file.write_text(json.dumps(body))
    assert await scene.start() == ()
    assert staging.is_dir()


@pytest.mark.parametrize("content", ["", "null", '{"nodes"', "[" * 100_000, "\udcff"])
async def test_a_file_of_nodes_that_is_not_whole(tmp_path: Path, content: str) -> None:
    scene = Scene(tmp_path)
    scene.state_file.write_text(content, errors="surrogateescape")
    assert await scene.start() == ()
    await scene.scheduler.stop()


async def test_a_folder_where_the_file_of_nodes_should_be(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.state_file.mkdir()
    assert await scene.start() == ()
    await scene.scheduler.stop()


async def test_a_node_is_written_down_before_it_learns_what_to_do(tmp_path: Path) -> None:
    """A supervisor that is killed in between leaves no node that works and that the next one does not find."""
    told = "import sys, pathlib; sys.stdin.read(); folder = pathlib.Path(sys.argv[1])"
    copies = "(folder / 'seen').write_bytes((folder / 'nodes.json').read_bytes()); import time; time.sleep(60)"
    scene = Scene(tmp_path, command=(sys.executable, "-S", "-c", f"{told}; {copies}", str(tmp_path)))
    await scene.start()
    scene.scheduler.request(1)
    await until(lambda: read_leftovers(tmp_path / "seen").nodes != ())
    assert [node.pid for node in read_leftovers(tmp_path / "seen").nodes] == scene.pids()
    os.kill(scene.pids()[0], signal.SIGKILL)
    await scene.scheduler.stop()


async def test_the_token_is_not_on_the_command_line(scene: Scene) -> None:
    for pid in scene.pids():
        assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
