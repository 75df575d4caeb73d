"""The per-node process: launches or adopts workers, reads their control blocks, uploads shards, obeys the supervisor.

It decides nothing about the job and loads no torch. It alone holds the store's credentials. Started by a scheduler
as `python -m orchestrator.agent` with `AgentSettings` on standard input, or by attached mode in one process with
the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Awaitable, Coroutine
from itertools import chain
from pathlib import Path
from typing import Any

from orchestrator.agent import workers as processes
from orchestrator.agent.actions import StoreActions
from orchestrator.agent.client import SupervisorClient
from orchestrator.agent.gang import LocalGang
from orchestrator.agent.handovers import HandOvers
from orchestrator.agent.hostwatch import DeviceWatch, watch_host
from orchestrator.agent.inheritance import Inheritance
from orchestrator.agent.inspection import inspect
from orchestrator.agent.notices import NoticeWatch
from orchestrator.agent.ports import AgentPorts, real_ports
from orchestrator.agent.reports import Reports
from orchestrator.agent.saves import LocalSaves
from orchestrator.agent.settings import AgentSettings
from orchestrator.agent.staged import Nearby, NodeObjects
from orchestrator.agent.uploads import DurableShard, Uploads
from orchestrator.agent.wire import Channel, decode_action
from orchestrator.agent.workers import Worker
from orchestrator.checkpoint.launch import Launch
from orchestrator.checkpoint.save import ShardPlace
from orchestrator.checkpoint.slots import SlotState
from orchestrator.checkpoint.staging_folder import make_locked, make_private, remove_dead
from orchestrator.core.messages import (
    Abandon,
    CheckpointId,
    CheckRollback,
    Commit,
    Decide,
    EndWorkers,
    Event,
    HandOver,
    LaunchWorkers,
    Look,
    Mode,
    NodeJoined,
    NodeUnfit,
    NoticeKind,
    NoticeReceived,
    OpenGeneration,
    Prepare,
    Progress,
    RankExited,
    ReadAgain,
    RecordEnd,
    Settled,
    Staged,
    Sweep,
    TakeBack,
    Upload,
    Uploaded,
    UploadFailed,
    Verdict,
)
from orchestrator.errors import FormatError, ProtocolError, StoreError
from orchestrator.preemption.process import NOTICE_SIGNALS
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.filesystem import FolderStore

EXIT_WAIT_SECONDS = 5.0
ADOPT_WAIT_SECONDS = 60.0
ALONE_RETRY_SECONDS = 1.0
ALONE_AFTER_SECONDS = 3.0
"""Without a supervisor for that long, decided steps are uploaded without its order."""
STOOD_STILL_SECONDS = 2.0
"""Between two looks: then this agent stood still, and did not see what its workers did."""
PROGRESS_BACKLOG_MAX = 200
"""Messages that may wait for the supervisor before progress is held back (everything else is kept)."""
DISMISSED = "dismissed by the supervisor"


GangAction = LaunchWorkers | TakeBack | Prepare | Decide | Look | EndWorkers | Upload | Settled


class Agent:
    """One node of the job."""

    def __init__(self, settings: AgentSettings, ports: AgentPorts) -> None:
        self._settings = settings
        self._ports = ports
        self._clock = ports.clock
        self._channel = Channel()
        self._client = SupervisorClient(
            settings.node,
            self._channel,
            ports.clock,
            ports.connect,
            on_supervisor=self._introduce,
            on_frame=self._on_frame,
            say=lambda text: _say(settings.node, text),
        )
        self._actions = StoreActions(settings, ports.store, ports.clock)
        self._uploads = Uploads(ports.store, ports.clock, settings.workers, self._hurried, ports.sleep)
        self._hand_overs = HandOvers(settings, ports, self._uploads, self._post)
        self._gang: LocalGang | None = None
        self._objects_token = secrets.token_urlsafe(32)
        self._objects_url = ""
        self._store_folder = Path(ports.store.url) if isinstance(ports.store, FolderStore) else None
        self._nearby = Nearby(settings.token, ports.open_peer, self._holder_url)
        self._saves = LocalSaves()
        self._supervisors_met = 0
        self._awake_since = self._looked_at = ports.clock.monotonic()
        self.reports = Reports(ports.clock, self._post)
        self._watch = NoticeWatch(settings, ports.clock, self.reports.notice, self.reports.watcher)
        self._devices = self._device_watch(ports)
        self._unfit: str | None = None
        """Why this node does not join."""
        self._dismissed = False
        self._gang_actions: asyncio.Queue[GangAction] = asyncio.Queue()
        self._echo = settings.echo_output
        self._over = asyncio.Event()
        self._failed = False
        self._superseded = False
        """Another run of the job has taken its place."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, handle_signals: bool = True) -> str:
        """Serve until dismissed; returns why it ended."""
        await asyncio.to_thread(self._make_staging)
        objects = NodeObjects(self._ports.store, self._staged_slot, self._nearby)
        tokens = (self._objects_token, self._settings.token)  # of this node's workers, and of peers
        self._objects_url = await self._ports.object_server.start(
            objects, tokens, self._settings.address, self._watch.routes()
        )
        if handle_signals:
            for number in NOTICE_SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        if self._ports.reason_not_to_join is not None and self._settings.attach_folder is None:
            self._unfit = await asyncio.to_thread(self._ports.reason_not_to_join)
        if self._ports.read_host is not None:
            self._spawn(watch_host(self._settings.node, self._ports.read_host, self.reports.host))
        if self._devices is not None:
            self._spawn(self._devices.run())
        client = asyncio.create_task(self._client.run())
        looking = asyncio.create_task(self._look_for_ever())
        obeying = asyncio.create_task(self._obey_for_ever())
        over = asyncio.create_task(self._over.wait())
        watching = asyncio.create_task(self._watch.run())
        try:
            done, _ = await asyncio.wait({client, looking, obeying, over}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {over}:
                task.result()  # a failure of ours is raised here, never swallowed
            if self._failed:
                raise ProtocolError(f"the agent of {self._settings.node} failed; the line before says how")
            return client.result() if client in done else DISMISSED
        finally:
            await self._end(client, looking, obeying, over)
            await self._let_go()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _make_staging(self) -> None:
        folder, runs = self._settings.staging, self._settings.sweep_staging
        if runs is None:
            make_private(folder)
            return
        make_locked(folder)  # held until this process ends, however it ends
        for removed in remove_dead(folder.parent.parent, runs):
            _say(self._settings.node, f"removed {removed}, which a dead agent has left")

    async def _let_go(self) -> None:
        """The very last: once this is said, the machine may be gone at any moment."""
        if not (self._dismissed and self._settings.acknowledge_notices):
            return
        for problem in await self._watch.acknowledge():
            _say(self._settings.node, problem)

    async def _end(self, *tasks: asyncio.Task[Any]) -> None:
        if self._gang is not None:
            if self._settings.attach_folder is None:
                await self._end_gang(self._gang)
            else:
                self._gang.release_workers(superseded=self._superseded)
        for task in (*tasks, *self._tasks):
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._uploads.close)
        await self._ports.object_server.stop()
        self._nearby.close()
        shutil.rmtree(self._settings.staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # the run's folder, if this was the last of its nodes here
            self._settings.staging.parent.rmdir()

    def _device_watch(self, ports: AgentPorts) -> DeviceWatch | None:
        if ports.read_devices is None:
            return None
        return DeviceWatch(self._settings.node, ports.read_devices, ports.new_kernel_log_lines, self.reports.host)

    def _post(self, event: Event) -> None:
        self._channel.post(event)

    def _introduce(self) -> None:
        """A supervisor that knows nothing of this node: what it is, what it was told, what it runs."""
        self._supervisors_met += 1
        while not self._gang_actions.empty():  # of the supervisor before: the new one goes by what is done, not asked
            self._gang_actions.get_nowait()
        if self._unfit is not None:
            self._post(NodeUnfit(node=self._settings.node, reason=self._unfit))
            return  # the supervisor gives this node back
        adopts = self._settings.attach_folder is not None
        running = None if self._gang is None or adopts else self._gang.returned(self._saves)
        settings = self._settings
        url = self._objects_url
        self._post(NodeJoined(node=settings.node, workers=settings.workers, objects_url=url, returned=running))
        for report in self.reports.standing():
            self._post(report)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _say(self._settings.node, repr(task.exception()))
            self._failed = True
            self._over.set()  # a bug in the agent: the node is given up rather than left half alive

    def _on_signal(self, number: int) -> None:
        self.reports.notice(
            NoticeReceived(
                node=self._settings.node,
                source=f"{signal.Signals(number).name} to the agent",
                kind=NoticeKind.PREEMPT,
                remaining_seconds=self._settings.grace_seconds,
                notice_id=f"signal-{number}",
            )
        )

    # -- looking -----------------------------------------------------------------------------------------

    async def _look_for_ever(self) -> None:
        next_output = next_alone = 0.0
        while True:
            now = self._clock.monotonic()
            if now - self._looked_at > STOOD_STILL_SECONDS:
                self._awake_since = now
            self._looked_at = now
            self._look()
            if now >= next_output:
                self._copy_output()
                next_output = now + 0.1
            if self._abandoned_by_all(now):
                self._over.set()
            if self._gang is not None and now >= next_alone and self._alone(now):
                self._upload_alone(self._gang)
                next_alone = now + ALONE_RETRY_SECONDS
            busy = self._gang is not None and self._gang.waiting_for_echo
            await asyncio.sleep(self._ports.look_seconds_busy if busy else self._ports.look_seconds_idle)

    def _alone(self, now: float) -> bool:
        """The supervisor is away. Where this node will go there is no time to wait and see."""
        silent_seconds = now - self._client.connected_seconds
        return not self._client.connected and (self.reports.node_goes or silent_seconds > ALONE_AFTER_SECONDS)

    def _upload_alone(self, gang: LocalGang) -> None:
        """Nobody may be there to order it: what was decided and is staged here becomes durable; receipts decide."""
        for order in self._saves.orders_alone(self._settings.node):
            self._start_uploads(gang, order.step)

    def _abandoned_by_all(self, now: float) -> bool:
        """Nobody trains here, and nobody is there who could change that."""
        trains = self._gang is not None and self._gang.trains
        return not trains and now - self._client.connected_seconds > self._settings.lost_after_seconds

    def _look(self) -> None:
        gang = self._gang
        if gang is None:
            return
        for event in chain(gang.observe(), gang.observe_pause(self._clock.monotonic())):
            if isinstance(event, Progress) and self._channel.backlog > PROGRESS_BACKLOG_MAX:
                gang.forget_progress()  # the supervisor is away: it gets the newest steps when it is back
                continue
            if isinstance(event, NoticeReceived):
                self.reports.notice(event)
                continue
            self._post(event)
            if isinstance(event, Staged):
                self._start_uploads(gang, event.step)
        self._follow_staging(gang)
        gang.free(self._saves.may_free, self._uploads.reading)

    def _copy_output(self) -> None:
        if not self._echo or self._gang is None:
            return
        try:
            for worker in self._gang.workers:
                for line in processes.new_output(worker, everything=worker.exited).splitlines():
                    sys.stdout.write(f"[{worker.rank}] {line}\n")
            sys.stdout.flush()
        except OSError:  # nobody reads it any more; the log files keep everything
            self._echo = False

    # -- the supervisor's actions ------------------------------------------------------------------------

    def _on_frame(self, frame: dict[str, Any]) -> None:
        if frame.get("type") == "dismiss":
            self._dismissed = True
            self._over.set()
            return
        self._on_action(decode_action(frame))

    def _on_action(self, action: Any) -> None:
        match action:
            case OpenGeneration():
                self._spawn(self._report(self._actions.open_generation(action)))
            case Commit():
                self._spawn(self._report_and_look(self._actions.commit(action), action.generation))
            case Abandon():
                self._spawn(self._report_and_look(self._actions.abandon(action), action.generation))
            case HandOver():
                self._spawn(self._hand_overs.take(action))
            case Sweep():
                self._spawn(self._report_and_look(self._actions.sweep(action), action.generation))
            case CheckRollback():
                self._spawn(self._report(self._actions.check_rollback(action)))
            case ReadAgain():
                self._spawn(self._report(self._actions.second_reading(action)))
            case RecordEnd():
                self._spawn(self._report(self._actions.record_end(action)))
            case LaunchWorkers() | TakeBack() | Prepare() | Decide() | Look() | EndWorkers() | Upload() | Settled():
                self._gang_actions.put_nowait(action)
            case _:
                _say(self._settings.node, f"ignored {type(action).__name__}")

    async def _obey_for_ever(self) -> None:
        """Actions that concern the gang, strictly one after another: a launch waits for the old workers' exits."""
        while True:
            action = await self._gang_actions.get()
            if isinstance(action, LaunchWorkers):
                await self._launch(action)
            else:
                self._on_gang_action(action)

    def _on_gang_action(self, action: TakeBack | Prepare | Decide | Look | EndWorkers | Upload | Settled) -> None:
        """Actions of any other generation than the present one are ignored."""
        gang = self._gang
        if gang is None or gang.generation != action.generation:
            return
        match action:
            case TakeBack():
                self._report_again(gang)
            case Prepare():
                gang.prepare(action)
            case Decide():
                remaining = action.remaining_seconds
                self._saves.decide(action)
                gang.decide(action, None if remaining is None else self._clock.monotonic() + remaining)
            case Look():
                self._spawn(self._inspect(gang, action))
            case EndWorkers():
                gang.end()
            case Upload():
                self._saves.order(action)
                self._start_uploads(gang, action.step)
            case Settled():
                self._saves.settle(action)
                gang.settled(action)
        self._look()

    def _report_again(self, gang: LocalGang) -> None:
        """A new supervisor has taken the gang back: it has to hear everything once more, exits after the rest."""
        gang.forget_reports()
        self._look()
        for worker in gang.workers:
            if worker.exited:
                self._post(gang.exit_event(worker))

    async def _inspect(self, gang: LocalGang, action: Look) -> None:
        found = await inspect(gang, self._ports.runtime, action, self._clock.monotonic() - self._awake_since)
        if found is not None:
            self._look()  # what has been published until now comes first
            self._post(found)

    async def _report(self, work: Coroutine[Any, Any, Event]) -> None:
        self._post(await work)

    async def _report_and_look(self, work: Coroutine[Any, Any, Event], generation: int) -> None:
        """Whoever has written to the store looks whether it is still this run's: a zombie must learn it some time."""
        await self._report(work)
        superseded = await self._actions.superseded(generation)
        if superseded is not None:
            self._superseded = True
            self._post(superseded)

    async def _launch(self, action: LaunchWorkers) -> None:
        inheritance = Inheritance()
        if self._gang is not None:
            if self._gang.generation >= action.generation:
                return
            asked_by = self._supervisors_met
            await self._end_gang(self._gang)
            if asked_by != self._supervisors_met:
                return  # the new supervisor was told of the gang before this one
            inheritance = self._gang.hand_down(action.base if action.holders else None, self._uploads.reading)
        self._saves = LocalSaves(action.generation, action.world_size)
        try:
            self._settings.staging.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have tidied it away
            gang = LocalGang(
                self._settings,
                self._ports.runtime,
                action,
                self._objects_url,
                self._objects_token,
                inheritance=inheritance,
                store_folder=self._store_folder,
            )
        except OSError as error:
            self._refuse_launch(action, error)
            return
        self._gang = gang
        if self._settings.attach_folder is None:
            gang.launch(os.environ, self._on_worker_exit)
        else:
            await self._adopt(gang, self._settings.attach_folder)

    def _refuse_launch(self, action: LaunchWorkers, error: OSError) -> None:
        """No worker can be started here, and trying again would not help."""
        self._gang = None
        evidence = (
            f"the staging folder {self._settings.staging} cannot be used: {error.strerror}; "
            "make room in it, or name another staging folder"
        )
        for rank in range(action.first_rank, action.first_rank + action.count):
            self._post(
                RankExited(
                    node=self._settings.node,
                    generation=action.generation,
                    rank=rank,
                    exit_code=1,
                    attached=False,
                    verdict=Verdict.REFUSED,
                    ended_by_us=False,
                    evidence=evidence,
                )
            )

    async def _adopt(self, gang: LocalGang, folder: Path) -> None:
        """Wait until each worker has written its pid, then give it its launch file."""
        until = self._clock.monotonic() + ADOPT_WAIT_SECONDS
        for worker in gang.workers:
            pid_path = folder / f"worker-{worker.rank:05d}.pid"
            while not pid_path.exists() and self._clock.monotonic() < until:
                await asyncio.sleep(0.02)
            if not pid_path.exists():
                self._post(self._never_came(gang, worker))
                return
            self._ports.runtime.adopt(worker, int(pid_path.read_text()), self._on_worker_exit)
            Launch.read(worker.launch_path).write(folder / f"launch-{worker.rank:05d}.json")

    def _never_came(self, gang: LocalGang, worker: Worker) -> RankExited:
        return RankExited(
            node=self._settings.node,
            generation=gang.generation,
            rank=worker.rank,
            exit_code=None,
            attached=False,
            verdict=Verdict.NONE,
            ended_by_us=False,
            evidence=f"it did not call orchestrator.attach() within {ADOPT_WAIT_SECONDS:.0f} s",
        )

    async def _end_gang(self, gang: LocalGang) -> None:
        gang.end()
        until = self._clock.monotonic() + EXIT_WAIT_SECONDS
        while gang.alive and self._clock.monotonic() < until:
            await asyncio.sleep(0.01)

    def _on_worker_exit(self, worker: Worker) -> None:
        gang = self._gang
        if gang is None or worker not in gang.workers:
            return
        self._look()  # what it staged and published before it went comes first
        self._copy_output()
        if self._devices is not None:
            self._devices.look_at_log()  # what condemns the node is known before its exit has any consequence
        for slot in worker.control.slots():
            if slot.state is SlotState.WRITING:
                worker.control.free_slot(slot.index)
        self._post(gang.exit_event(worker))

    # -- uploads -----------------------------------------------------------------------------------------

    def _start_uploads(self, gang: LocalGang, step: int) -> None:
        """What is ordered and staged."""
        action = self._saves.order_of(step)
        if action is None:
            return
        for worker, index, _ in gang.staged_slots(step):
            done = self._saves.upload_of(step, worker.rank)
            if done is not None and worker.news(f"uploaded-{step}", 1):
                self._post(done)
            elif done is None and worker.news(f"upload-{step}", 1):
                self._start_upload(gang, worker, index, self._place(worker, step, action.absent))

    def _follow_staging(self, gang: LocalGang) -> None:
        """All leave at the decided step, so there is no time to lose: what is staged goes out while it is staged."""
        step, leaves = gang.record.decided_step, gang.record.mode is Mode.LEAVE
        if step is None or not leaves:
            return
        for worker, index in gang.slots_being_staged(step):
            # Once: if that fails, it begins again when it is ordered.
            if worker.news(f"followed-{step}", 1) and worker.news(f"upload-{step}", 1):
                self._start_upload(gang, worker, index, self._place(worker, step, gang.record.absent))

    def _place(self, worker: Worker, step: int, absent: tuple[int, ...]) -> ShardPlace:
        return ShardPlace(
            job=self._settings.job,
            checkpoint=CheckpointId(generation=worker.control.generation, step=step),
            rank=worker.rank,
            world_size=worker.control.world_size,
            absent=absent,
        )

    def _start_upload(self, gang: LocalGang, worker: Worker, index: int, place: ShardPlace) -> None:
        saves, step = self._saves, place.checkpoint.step
        was_ordered = saves.order_of(step) is not None

        def ordered() -> bool:
            if was_ordered or saves.order_of(step) is not None:
                return True
            if saves.is_settled(step):
                raise StoreError(place.shard_key, "its step was settled without it: no receipt is written")
            return False

        there = gang.follow(worker, index, step)
        upload = self._uploads.start(place, worker.slot_paths[index], there, ordered)
        self._spawn(self._report_upload(place, upload))

    async def _report_upload(self, place: ShardPlace, upload: Awaitable[DurableShard]) -> None:
        node = self._settings.node
        generation, step = place.checkpoint.generation, place.checkpoint.step
        try:
            made = await upload
        except (StoreError, FormatError, OSError) as error:
            await self._upload_failed(place, error)
            return
        done = Uploaded(
            node=node,
            generation=generation,
            step=step,
            rank=place.rank,
            size_bytes=made.size_bytes,
            seconds=made.seconds,
        )
        self._post(done)
        gang = self._gang
        if gang is None or gang.generation != generation or place.rank not in gang.ranks:
            return
        self._saves.uploaded(done)
        gang.worker_of(place.rank).news(f"uploaded-{step}", 1)
        if self._alone(self._clock.monotonic()):
            await self._actions.commit_alone(place.checkpoint)

    async def _upload_failed(self, place: ShardPlace, error: Exception) -> None:
        """The supervisor hears of it, and gives the step up unless a peer has the shard; alone, it is tried again."""
        generation, step = place.checkpoint.generation, place.checkpoint.step
        if self._alone(self._clock.monotonic()):  # nobody hears of it who could give the step up
            await asyncio.sleep(ALONE_RETRY_SECONDS)
            self._forget_upload(place)
            if self._gang is not None and self._gang.generation == generation:
                self._start_uploads(self._gang, step)
            return
        self._forget_upload(place)
        if self._saves.order_of(step) is None and self._gang is not None and self._gang.generation == generation:
            return  # it followed the staging; it is tried again when it is ordered
        node = self._settings.node
        self._post(UploadFailed(node=node, generation=generation, step=step, rank=place.rank, reason=str(error)))

    def _hurried(self) -> bool:
        """Whether uploads may be in the way of the training here: nobody trains, or there is no time to lose."""
        gang = self._gang
        return self.reports.node_goes or gang is None or not gang.in_training

    def _forget_upload(self, place: ShardPlace) -> None:
        """It failed: whoever orders it again gets it."""
        gang = self._gang
        if gang is not None and gang.generation == place.checkpoint.generation and place.rank in gang.ranks:
            gang.worker_of(place.rank).reported.pop(f"upload-{place.checkpoint.step}", None)

    # -- hand-over ---------------------------------------------------------------------------------------

    def _staged_slot(self, checkpoint: CheckpointId, rank: int) -> tuple[Path, int] | None:
        """Where one of this node's shards is staged, if it is."""
        return None if self._gang is None else self._gang.staged_shard(checkpoint, rank)

    def _holder_url(self, rank: int) -> str | None:
        """Where else a shard of the base may be in memory."""
        url = None if self._gang is None else self._gang.holder_url(rank)
        return None if url == self._objects_url else url


def _say(node: str, text: str) -> None:
    sys.stderr.write(f"agent {node}: {text}\n")
    sys.stderr.flush()


async def run_agent(settings: AgentSettings, store: ObjectStore) -> int:
    """Run one agent to its end; its exit status."""
    reason = await Agent(settings, real_ports(settings, store)).run()
    if reason != DISMISSED:
        _say(settings.node, reason)
    return 0
