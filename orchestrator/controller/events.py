"""What happens to a job, as Kubernetes Events on its TrainingJob: few, and never waited for."""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import UTC, datetime

from orchestrator.errors import KubernetesError
from orchestrator.schedulers.kubernetes.client import KubernetesClient
from orchestrator.schedulers.kubernetes.names import GROUP, VERSION, Object, path_of
from orchestrator.telemetry import EventRecord, one_line

SHOWN = {
    "generation opened": "Normal",
    "notice received": "Normal",
    "node lost": "Warning",
    "node unfit": "Warning",
    "host trouble": "Warning",
    "loss trouble": "Warning",
    "gang broken": "Warning",
    "commit overdue": "Warning",
    "remapped": "Normal",
    "store failed": "Warning",
    "rolled back": "Normal",
    "not rolled back": "Warning",
}
"""Kinds of events that are posted; all of them stand in the controller's output."""
WAITING_MAX = 20
"""Events that are not posted yet; more than that are dropped."""
MESSAGE_CHARACTERS_MAX = 1000


class EventPoster:
    """Posts about one TrainingJob."""

    def __init__(self, client: KubernetesClient, about: Object) -> None:
        self._client = client
        self._about = about["metadata"]
        self._tasks: set[asyncio.Task[None]] = set()

    def sink(self, record: EventRecord) -> None:
        """Takes the events of the job's supervisor."""
        kind = SHOWN.get(record.kind)
        if kind is not None:
            where = f" ({record.node})" if record.node else ""
            self.post(kind, "".join(word.title() for word in record.kind.split()), f"{record.reason}{where}")

    def post(self, kind: str, reason: str, message: str) -> None:
        """Post one, if not too many wait already."""
        if len(self._tasks) >= WAITING_MAX:
            return
        task = asyncio.get_running_loop().create_task(self._post(self._event(kind, reason, message)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, event: Object) -> None:
        try:
            await asyncio.to_thread(self._client.create, path_of("events", self._about["namespace"]), event)
        except KubernetesError:
            return  # it stands in the controller's output

    def _event(self, kind: str, reason: str, message: str) -> Object:
        now = datetime.fromtimestamp(time.time(), UTC)
        about = self._about
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{about['name']}.{secrets.token_hex(8)}", "namespace": about["namespace"]},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": "TrainingJob",
                "name": about["name"],
                "namespace": about["namespace"],
                "uid": about["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": one_line(message)[:MESSAGE_CHARACTERS_MAX],
            "source": {"component": "orchestrator"},
            "firstTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lastTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "count": 1,
        }
