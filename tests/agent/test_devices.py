"""What an agent sees of its devices: nvidia-smi is played, the kernel's log is a file; and a node that is unfit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.agent.hostwatch import DeviceWatch
from orchestrator.agent.ports import AgentPorts
from orchestrator.core.messages import HostReported, NodeJoined, NodeUnfit, RankExited
from orchestrator.health.gpu import Answer, Device, NoAnswer, read_devices
from orchestrator.health.kernel_log import KernelLog
from tests.agent.simulated_agent import NODE, Scene
from tests.agent.test_away import running

AA = Device(uuid="GPU-aa", celsius=35, uncorrected_errors=0, too_hot=False, address="0000:3b:00")
BB = replace(AA, uuid="GPU-bb", address="0000:5e:00")
OFF_THE_BUS = "3,7,7,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus.\n"

NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *remapped*) echo "GPU-aa, No, No"; echo "GPU-bb, $(cat {folder}/pending), No" ;;
  *recovery*) echo 'Field "gpu_recovery_action" is not a valid field to query.'; exit 2 ;;
  *) echo "GPU-aa, 00000000:3B:00.0, 35, 0, Not Active"; cat {folder}/second ;;
esac
"""
SECOND = "GPU-bb, 00000000:5E:00.0, 40, 0, Not Active\n"


def with_ports(scene: Scene, **ports: object) -> None:
    """The agent as it would be with these ports."""
    given: AgentPorts = replace(scene.agent._ports, **ports)  # type: ignore[arg-type]
    scene.agent._ports = given
    scene.agent._devices = scene.agent._device_watch(given)


def told(scene: Scene) -> list[tuple[str, str | None, bool]]:
    return [(event.what, event.problem, event.condemns) for event in scene.supervisor.kinds(HostReported)]


class Log:
    """A kernel log that the test writes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        self.path.write_text(OFF_THE_BUS)  # of an earlier time
        self._log = KernelLog(self.path)

    @property
    def new_lines(self) -> Callable[[], list[str]]:
        return self._log.new_lines

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)


def test_a_device_that_is_gone_is_told_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    seen = iter([(AA,), (AA,), (), (), (AA,), (AA,)])
    with_ports(scene, read_devices=lambda: next(seen))

    async def story() -> None:
        await asyncio.sleep(270)
        assert told(scene) == [("GPU-aa", "device GPU-aa is not there any more", True), ("GPU-aa", None, False)]

    scene.play(story)


def test_trouble_that_gets_worse_is_told_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    worse = replace(AA, rows_pending=True)
    answers: list[Answer] = [(AA,), (worse,), (replace(worse, rows_failed=True),), NoAnswer(words="it hangs")]
    with_ports(scene, read_devices=lambda: answers.pop(0) if len(answers) > 1 else answers[0])

    async def story() -> None:
        await asyncio.sleep(270)
        assert [(what, condemns) for what, _, condemns in told(scene)] == [
            ("GPU-aa", False),
            ("GPU-aa", True),
            ("nvidia-smi", False),
        ]

    scene.play(story)


def test_errors_in_the_kernels_log(tmp_path: Path) -> None:
    """Of this node's devices alone, each once; the application's own are not told."""
    log = Log(tmp_path)
    scene = Scene(tmp_path)
    with_ports(scene, read_devices=lambda: (AA,), new_kernel_log_lines=log.new_lines)

    async def story() -> None:
        await asyncio.sleep(3)
        log.write("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=12, name=python, MMU Fault\n")
        log.write("4,2,2,-;NVRM: Xid (PCI:0000:5e:00): 79, pid=12, GPU has fallen off the bus.\n")
        log.write("4,3,3,-;NVRM: Xid (PCI:0000:3b:00): 63, pid=12, Row Remapper: New row marked\n")
        await asyncio.sleep(3)
        log.write(OFF_THE_BUS)
        await asyncio.sleep(3)
        log.write("4,8,8,-;NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.\n")
        await asyncio.sleep(3)
        assert [(what, condemns) for what, _, condemns in told(scene)] == [
            ("0000:3b:00 Xid 63", False),
            ("0000:3b:00 Xid 79", True),
        ]

    scene.play(story)


def test_what_the_driver_asks_for_may_change(tmp_path: Path) -> None:
    log = Log(tmp_path)
    scene = Scene(tmp_path)
    with_ports(scene, read_devices=lambda: (AA,), new_kernel_log_lines=log.new_lines)
    changed = "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to {}\n"

    async def story() -> None:
        for action in ("0x3 (Drain P2P)", "0x1 (GPU Reset Required)", "0x0 (None)"):
            await asyncio.sleep(3)
            log.write(changed.format(action))
        await asyncio.sleep(3)
        assert [(problem is not None, condemns) for _, problem, condemns in told(scene)] == [
            (True, False),
            (True, True),
            (False, False),
        ]

    scene.play(story)


def test_the_log_is_looked_at_when_a_worker_has_ended(tmp_path: Path) -> None:
    """What condemns the node comes before the exit: the next gang may be formed right after it."""
    log = Log(tmp_path)
    scene = Scene(tmp_path)
    with_ports(scene, read_devices=lambda: (AA,), new_kernel_log_lines=log.new_lines)

    async def story() -> None:
        await running(scene)
        await asyncio.sleep(3)
        log.write(OFF_THE_BUS)
        scene.runtime.exit(scene.runtime.launched[0], 1)
        await asyncio.sleep(0.05)
        kinds = [type(event) for event in scene.supervisor.heard]
        assert HostReported in kinds
        assert kinds.index(HostReported) < kinds.index(RankExited)

    scene.play(story)


def test_a_new_supervisor_is_told_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    seen = iter([(AA, BB), (AA,)])
    with_ports(scene, read_devices=lambda: next(seen, (AA,)))

    async def story() -> None:
        await asyncio.sleep(70)
        assert told(scene) == [("GPU-bb", "device GPU-bb is not there any more", True)]
        scene.kill_supervisor()
        scene.next_supervisor()
        await asyncio.sleep(3)
        kinds = [type(event) for event in scene.supervisor.heard]
        assert kinds == [NodeJoined, HostReported]
        assert told(scene) == [("GPU-bb", "device GPU-bb is not there any more", True)]

    scene.play(story)


def test_a_node_that_is_unfit_does_not_join(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with_ports(scene, reason_not_to_join=lambda: "device cuda:0: 3 of 9 results are wrong")

    async def story() -> None:
        await asyncio.sleep(3)
        reason = "device cuda:0: 3 of 9 results are wrong"
        assert scene.supervisor.heard == [NodeUnfit(node=NODE, reason=reason)]
        scene.kill_supervisor()
        scene.next_supervisor()
        await asyncio.sleep(3)
        assert scene.supervisor.heard == [NodeUnfit(node=NODE, reason=reason)]
        scene.supervisor.links.dismiss(NODE)
        await asyncio.sleep(3)
        assert scene.reason == "dismissed by the supervisor"

    scene.play(story)


def test_a_node_that_is_fit_joins_once_it_knows(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    asked: list[float] = []

    def nothing_speaks_against_it() -> None:
        asked.append(scene.loop.now)

    with_ports(scene, reason_not_to_join=nothing_speaks_against_it)

    async def story() -> None:
        await running(scene)
        assert isinstance(scene.supervisor.heard[0], NodeJoined)
        scene.kill_supervisor()
        scene.next_supervisor()
        await asyncio.sleep(3)
        assert len(asked) == 1

    scene.play(story)


def test_the_devices_of_an_attached_script_are_not_tested(tmp_path: Path) -> None:
    """Its worker runs on them already, and nobody could take its place."""

    def never() -> str:
        raise AssertionError

    scene = Scene(tmp_path, attach_folder=tmp_path)
    with_ports(scene, reason_not_to_join=never)

    async def story() -> None:
        await asyncio.sleep(1)
        assert scene.supervisor.kinds(NodeJoined)

    scene.play(story)


async def test_a_driver_that_answers_only_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """That no device is watched is told once; when it answers, they are."""
    monkeypatch.setattr("orchestrator.agent.hostwatch.DEVICE_LOOK_SECONDS", 0.01)
    silent: Answer = NoAnswer(words="nvidia-smi does not answer within 30 s")
    coming = [silent, silent, (AA,)]
    heard: asyncio.Queue[HostReported] = asyncio.Queue()
    watch = DeviceWatch(NODE, lambda: coming.pop(0) if coming else (), None, heard.put_nowait)
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(30):
            told = [await heard.get() for _ in range(3)]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [(event.what, event.problem) for event in told] == [
        ("nvidia-smi", "nvidia-smi does not answer within 30 s; until it answers no device is watched"),
        ("nvidia-smi", None),
        ("GPU-aa", "device GPU-aa is not there any more"),
    ]


async def test_a_command_named_nvidia_smi_that_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processes, and in real time: a device's row of memory fails, then the device is not listed any more."""
    monkeypatch.setattr("orchestrator.agent.hostwatch.DEVICE_LOOK_SECONDS", 0.05)
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(NVIDIA_SMI.format(folder=tmp_path))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    (tmp_path / "second").write_text(SECOND)
    (tmp_path / "pending").write_text("No")
    heard: asyncio.Queue[HostReported] = asyncio.Queue()
    watch = DeviceWatch(NODE, read_devices, None, heard.put_nowait)
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(30):
            while not watch._addresses:
                await asyncio.sleep(0.01)
            assert watch._addresses == {"0000:3b:00", "0000:5e:00"}
            (tmp_path / "pending").write_text("Yes")
            pending = await heard.get()
            assert (pending.what, pending.condemns) == ("GPU-bb", False)
            (tmp_path / "second").write_text("")
            gone = await heard.get()
            assert (gone.what, gone.condemns) == ("GPU-bb", True)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
