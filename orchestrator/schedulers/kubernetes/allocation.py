"""Pods as nodes: made when nodes are asked for, deleted when they are given back, lost when the cluster says so.

Pods of one mass loss are asked for at once. A pod that the API server refuses is tried again, ever later; what it said
is kept for the job's conditions. One that finds no place for too long is made again on other terms, if there are such.
A pod whose host does not answer stays in deletion for ever; once its grace is over it counts as lost, whatever still
runs there: its generation is over, and no supervisor lets it in again.

The supervisor's controller feeds `observe` from its watch of pods; nothing is asked here that it already tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import string
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.clock import Clock
from orchestrator.errors import KubernetesError
from orchestrator.schedulers.base import NodeInfo, OnLost
from orchestrator.schedulers.kubernetes.client import KubernetesClient
from orchestrator.schedulers.kubernetes.names import Object, path_of
from orchestrator.schedulers.kubernetes.pods import Pod, PodPlan, read_pod, render_pod

LOOK_SECONDS = 1.0
STOP_SECONDS = 10.0
"""For agents that were dismissed to end by themselves."""
GONE_SECONDS = 5.0
"""For pods that were deleted in the end to be gone; one whose host does not answer is not waited for any longer."""
LAST_GRACE_SECONDS = 1
"""For an agent that was told to end, and has not."""
OVERDUE_SECONDS = 10.0
"""A pod that is still there so long after its grace has a host that does not answer."""
LAST_SECONDS = 10.0
"""For the API server to take the last deletions."""
DELETE_AGAIN_SECONDS_FIRST = 0.5
REFUSED_SECONDS_FIRST = 1.0
REFUSED_SECONDS_MAX = 60.0
"""Between two attempts to create a pod that was refused."""
QUICK_END_SECONDS = 60.0
QUICK_ENDS_MAX = 3
"""Pods that end by themselves so soon, so many in a row: the next ones are made ever later (an image that lacks us)."""
ENDED_KEPT = 8
"""Pods that have ended and are kept for their output."""
_LETTERS = string.ascii_lowercase + string.digits


@dataclass(kw_only=True)
class _Node:
    pod: Pod
    released: bool = False
    deleting_since_seconds: float | None = None
    """When its deletion was first seen, on our own monotonic clock."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A pod to be made. It has its name from the beginning."""

    name: str
    falls_back: bool


class KubernetesAllocation:
    """A run's pods. See `schedulers.base.Scheduler`."""

    def __init__(
        self,
        *,
        client: KubernetesClient,
        plan: PodPlan,
        clock: Clock,
        patience_seconds: float,
        grace_seconds: Callable[[], float] = lambda: 0.0,
        staging_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`grace_seconds` and `staging_bytes` say what was measured when a pod is made."""
        self._client = client
        self._plan = plan
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._grace_seconds = grace_seconds
        self._staging_bytes = staging_bytes
        self._nodes: dict[str, _Node] = {}
        self._spares: list[str] = []
        """Pods of this run that an earlier supervisor asked for and that have not started yet."""
        self._ended: dict[str, None] = {}
        self._quick_ends = 0
        self._wishes: list[_Wish] = []
        self._creating: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_lost: OnLost = lambda node, reason: None
        self._stopping = False
        self.refusal: KubernetesError | None = None
        """Why the last pod could not be made; None: it could."""
        self.abandoned = False
        """Another controller goes on with these pods: `stop` leaves them as they are."""

    # ------------------------------------------------------------------------------------------- the port

    async def start(self, supervisor_url: str, token: str, on_lost: OnLost) -> tuple[str, ...]:
        """Those of this run's pods that run report to this supervisor; those that wait are used when nodes are wanted.

        One that is being deleted still runs until its grace is over: what its ranks hold is saved.

        URL and token are in the run's Secret already. `observe` has to have told of all pods that there are.
        """
        self._on_lost = on_lost
        self._spawn(self._look_for_ever())
        running = [name for name, node in self._nodes.items() if node.pod.phase == "Running"]
        self._spares = [name for name, node in self._nodes.items() if name not in running and not node.pod.deleting]
        return tuple(running)

    def request(self, count: int) -> None:
        """That many pods more, at once."""
        taken, self._spares = self._spares[:count], self._spares[count:]
        self._wish(count - len(taken), falls_back=False)

    def _wish(self, count: int, *, falls_back: bool) -> None:
        self._wishes += [_Wish(pod_name(self._plan.owner.name), falls_back) for _ in range(count)]
        if self._wishes and (self._creating is None or self._creating.done()):
            self._creating = self._spawn(self._create_wanted())

    def release(self, node: str) -> None:
        """The agent was dismissed and ends by itself; its pod is deleted, so one that does not is ended."""
        if node in self._nodes:
            self._release(node)

    def lose(self, node: str, after_seconds: float) -> None:
        """Delete the pod without any grace, after that time."""
        if node in self._nodes:
            self._spawn(self._lose_later(node, after_seconds))

    def nodes(self) -> list[NodeInfo]:
        """Pods that there are. Their processes are not this host's."""
        return [NodeInfo(node=name, pid=None) for name, node in self._nodes.items() if not node.released]

    async def stop(self) -> None:
        """Let dismissed agents end, then delete what is left; nothing, if another controller goes on with it."""
        self._stopping = True
        self._wishes = []
        if not self.abandoned:
            for node in self._nodes.values():
                node.released = True
                if node.pod.phase == "Pending":  # nothing runs there that could end by itself
                    self._spawn(self._delete(node.pod.name, LAST_GRACE_SECONDS))
            await self._until_gone(STOP_SECONDS)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.abandoned:
            with contextlib.suppress(TimeoutError):  # whoever looks after the job deletes what is left of it
                async with asyncio.timeout(LAST_SECONDS):
                    await asyncio.gather(*(self._delete(name, LAST_GRACE_SECONDS) for name in list(self._nodes)))
            await self._until_gone(GONE_SECONDS)

    async def _until_gone(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while self._nodes and self._clock.monotonic() < until:
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------------------------------------ what is seen

    def observe(self, found: Object, gone: bool) -> None:
        """A pod of this job as it is, or was, and whether it is gone."""
        pod = read_pod(found)
        if pod.run != self._plan.run:
            return
        node = self._nodes.get(pod.name)
        if node is None:
            if gone or pod.name in self._ended or not pod.lives:
                return
            node = self._nodes[pod.name] = _Node(pod=pod)
        node.pod = pod
        if pod.deleting and node.deleting_since_seconds is None:
            node.deleting_since_seconds = self._clock.monotonic()
        if gone:
            self._end(pod.name, pod.ended or "its pod was deleted")
        elif pod.ended:
            self._end(pod.name, pod.ended)

    def waiting(self) -> Iterable[Pod]:
        """Pods that do not run yet."""
        return [node.pod for node in self._nodes.values() if node.pod.phase == "Pending" and not node.released]

    def runs(self) -> bool:
        """Whether any pod has come to run, or an agent of it may still work."""
        return any(node.pod.phase != "Pending" for node in self._nodes.values())

    def _end(self, name: str, reason: str) -> None:
        node = self._nodes.pop(name)
        self._spares = [spare for spare in self._spares if spare != name]
        self._ended[name] = None
        if node.pod.ended:
            quick = ended_quickly(node.pod, self._clock.wall()) and not node.released
            self._quick_ends = self._quick_ends + 1 if quick else 0
            self._spawn_unless_stopped(self._forget_old())
        if not node.released:
            self._on_lost(name, reason)

    async def _forget_old(self) -> None:
        """Of pods that have ended, the newest few are kept for their output."""
        while len(self._ended) > ENDED_KEPT:
            name = next(iter(self._ended))
            del self._ended[name]
            await self._delete(name, None)

    # ------------------------------------------------------------------------------------------- what is done

    async def _create_wanted(self) -> None:
        pause = REFUSED_SECONDS_FIRST
        while self._wishes:
            await asyncio.sleep(pause_seconds(self._quick_ends))
            wishes, self._wishes = self._wishes, []
            made = await asyncio.gather(*(self._create(wish) for wish in wishes))
            self._wishes += [wish for wish, is_made in zip(wishes, made, strict=True) if not is_made]
            if all(made):
                self.refusal = None
                pause = REFUSED_SECONDS_FIRST
                continue
            asked = self.refusal.retry_after_seconds if self.refusal is not None else None
            await asyncio.sleep(max(pause, min(asked or 0.0, REFUSED_SECONDS_MAX)))
            pause = min(2 * pause, REFUSED_SECONDS_MAX)

    async def _create(self, wish: _Wish) -> bool:
        """Whether it was made. If not, it is tried again by that name: an answer that was lost makes no second pod."""
        name = wish.name
        if name in self._nodes or name in self._ended:
            return True
        pod = render_pod(
            self._plan,
            name,
            grace_seconds=self._grace_seconds(),
            staging_bytes=self._staging_bytes(),
            falls_back=wish.falls_back,
        )
        try:
            made = await asyncio.to_thread(self._client.create, path_of("pods", self._plan.owner.namespace), pod)
        except KubernetesError as error:
            if error.status == 409 and error.reason == "AlreadyExists":  # by an earlier try; the watch tells of it
                return True
            self.refusal = error
            return name in self._nodes
        if name not in self._nodes and name not in self._ended:
            self._nodes[name] = _Node(pod=read_pod(made))
        return True

    def _release(self, name: str) -> None:
        node = self._nodes[name]
        if not node.released:
            node.released = True
            self._spawn_unless_stopped(self._delete_later(node.pod))

    async def _delete_later(self, pod: Pod) -> None:
        """An agent that was dismissed is given a moment; one that waits for a place has nothing to end."""
        until = self._clock.monotonic() + (STOP_SECONDS if pod.phase == "Running" else 0.0)
        while pod.name in self._nodes and self._clock.monotonic() < until:
            await asyncio.sleep(0.1)
        if pod.name in self._nodes:
            await self._delete(pod.name, LAST_GRACE_SECONDS)

    async def _lose_later(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._delete(name, 0)

    async def _delete(self, name: str, grace_seconds: int | None) -> None:
        """Until the API server has taken it: a pod that nobody deletes may wait for a place, or hold one, for ever."""
        path, pause = path_of("pods", self._plan.owner.namespace, name), DELETE_AGAIN_SECONDS_FIRST
        while True:
            try:
                await asyncio.to_thread(self._client.delete, path, grace_seconds=grace_seconds)
                return
            except KubernetesError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, REFUSED_SECONDS_MAX)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for name, node in list(self._nodes.items()):
                if is_overdue(node.pod, node.deleting_since_seconds, self._clock.monotonic()):
                    self._end(
                        name, f"its pod is being deleted, and its host {node.pod.host} does not say that it ended"
                    )
                elif self._has_waited(node, self._clock.wall()):
                    self._replace(name, node)

    def _has_waited(self, node: _Node, now_wall_seconds: float) -> bool:
        pod = node.pod
        placeless = pod.phase == "Pending" and pod.unschedulable and not pod.gated
        waits = placeless and not node.released and not pod.falls_back
        since = pod.created_wall_seconds
        return bool(
            waits
            and self._plan.fallback is not None
            and since is not None
            and now_wall_seconds - since > self._patience_seconds
        )

    def _replace(self, name: str, node: _Node) -> None:
        """By a pod on other terms. For the job it is the same wish, so nothing is lost by it."""
        node.released = True
        self._spawn(self._delete(name, 0))
        self._wish(1, falls_back=True)

    def _spawn_unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        if self._stopping:
            work.close()
        else:
            self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def pod_name(job: str) -> str:
    """A name that no pod of the job has had."""
    return f"{job}-{''.join(secrets.choice(_LETTERS) for _ in range(5))}"


def is_overdue(pod: Pod, deleting_since_seconds: float | None, now_seconds: float) -> bool:
    """Whether a pod should be gone by now: its grace, from when its deletion was first seen, is over. Pure."""
    if deleting_since_seconds is None:
        return False
    return now_seconds > deleting_since_seconds + pod.deletion_grace_seconds + OVERDUE_SECONDS


def ended_quickly(pod: Pod, now_wall_seconds: float) -> bool:
    """Whether a pod has ended by itself soon after it was made. Pure."""
    since = pod.created_wall_seconds
    return bool(pod.ended) and not pod.deleting and since is not None and now_wall_seconds - since < QUICK_END_SECONDS


def pause_seconds(quick_ends: int) -> float:
    """Before the next pod is made, after so many in a row that ended quickly. Pure."""
    more = quick_ends - QUICK_ENDS_MAX
    return 0.0 if more < 0 else min(REFUSED_SECONDS_FIRST * 2.0 ** min(more, 10), REFUSED_SECONDS_MAX)
