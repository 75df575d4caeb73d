"""What an agent answers when it is asked why no step comes, and what it says of announced pauses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from orchestrator.core.messages import HostReported, Look, Looked, Paused
from orchestrator.health.host import HostReading, Room
from orchestrator.health.progress import ProcessReading
from tests.agent.simulated_agent import GENERATION, NODE, Scene
from tests.agent.test_away import running


def test_each_worker_is_looked_at_twice(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ranks=2, world_size=2)
    readings = {0: [("S", 1.0), ("S", 1.5)], 1: [("T", 2.0), ("T", 2.0)]}
    scene.runtime.readings = {
        rank: [ProcessReading(state=state, traced=False, processor_seconds=seconds) for state, seconds in both]
        for rank, both in readings.items()
    }

    async def story() -> None:
        await running(scene)
        scene.runtime.launched[0].control.publish(4, 0)
        await asyncio.sleep(20)
        scene.supervisor.say(Look(node=NODE, generation=GENERATION, step=4))
        await asyncio.sleep(3)
        (answer,) = scene.supervisor.kinds(Looked)
        assert answer.step == 4
        assert answer.awake_seconds >= 20
        assert [(one.rank, one.step, one.state, one.busy_seconds) for one in answer.ranks] == [
            (0, 4, "S", 0.5),
            (1, 0, "T", 0.0),
        ]
        assert all(one.waits is None and one.where == "" for one in answer.ranks)

    scene.play(story)


def test_a_question_about_another_generation_is_not_answered(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.supervisor.say(Look(node=NODE, generation=GENERATION + 1, step=0))
        await asyncio.sleep(3)
        assert scene.supervisor.kinds(Looked) == []

    scene.play(story)


def test_pauses_are_told_once_for_the_longest_of_the_node(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ranks=2, world_size=2)

    async def story() -> None:
        await running(scene)
        first, second = (worker.control for worker in scene.runtime.launched)
        until = scene.loop.now + 100
        first.pause(int(until * 1e9))
        await asyncio.sleep(1)
        second.pause(int((until - 50) * 1e9))
        await asyncio.sleep(1)
        first.pause(0)
        await asyncio.sleep(1)
        second.pause(0)
        await asyncio.sleep(1)
        told = [event.remaining_seconds for event in scene.supervisor.kinds(Paused)]
        assert [None if left is None else round(left, -1) for left in told] == [100, 50, None]

    scene.play(story)


def test_the_host_is_told_of_when_something_changes(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    free = iter([50, 1, 1, 50, 50, 50, 50])

    def read() -> HostReading:
        return HostReading(rooms={"/logs": Room(free_bytes=next(free), total_bytes=100)}, stalled_percent=None)

    scene.agent._ports = replace(scene.agent._ports, read_host=read)

    async def story() -> None:
        await asyncio.sleep(45)
        told = [(event.what, event.problem is None) for event in scene.supervisor.kinds(HostReported)]
        assert told == [("/logs", False), ("/logs", True)]

    scene.play(story)
