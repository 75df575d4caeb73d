"""Clouds' metadata services on loopback, for rehearsals and tests: they announce, withdraw and hint when told to.

    async with SimulatedAWS() as aws:
        …                                      # agents of a job with notices=f"aws@{aws.url}" watch it
        aws.interrupt(seconds=120)             # a spot interruption, as the instance's metadata say it
        aws.forget()                           # whoever asks from now on is another machine

Faults (`metadata_server`) are set in place: `aws.misbehave(Unauthorized(), times=3)`. Every answer is counted in
`requests`. `orchestrator drill metadata` serves them by hand. Not here: anything but what the watchers read, and the
clouds' own delays.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web

from orchestrator.testing.metadata_server import AnnouncingServer, MetadataServer, http_date, rfc3339, wall_time

# --------------------------------------------------------------------------------------------------------- AWS


class SimulatedAWS(AnnouncingServer):
    """IMDSv2 of a spot instance in an Auto Scaling group with a lifecycle hook, and the API that completes the hook."""

    lead_seconds: float = 120.0
    token_header = "X-aws-ec2-metadata-token"

    def __init__(self, *, instance_id: str = "i-0123456789abcdef0", token_seconds: float = 3600.0) -> None:
        super().__init__()
        self.instance_id = instance_id
        self.token_seconds = token_seconds
        self._quiet = {
            "instance-id": instance_id,
            "placement/region": "us-east-1",
            "events/maintenance/scheduled": "[]",
            "autoscaling/target-lifecycle-state": "InService",
        }
        self.keys: dict[str, str] = dict(self._quiet)
        """What is answered, by key; may be changed at will. A key that is not here is a 404."""
        self.completed: list[str] = []
        """Instances whose lifecycle action was completed: the group has terminated them by now."""
        self._tokens: dict[str, float] = {}
        self._numbers = itertools.count(1)

    def interrupt(self, seconds: float | None = None, action: str = "terminate", **more: str) -> None:
        """Announce a spot interruption; `more` are fields that no client knows."""
        record = {"action": action, "time": rfc3339(self.lead_seconds if seconds is None else seconds), **more}
        self.keys["spot/instance-action"] = json.dumps(record)

    def forget(self) -> None:
        """Nothing is announced any more."""
        self.keys = dict(self._quiet)

    def scale_in(self) -> None:
        """The group is to have one instance less: this one. It waits until its lifecycle action is completed."""
        self.keys["autoscaling/target-lifecycle-state"] = "Terminated"

    def recommend_rebalance(self) -> None:
        """The hint that an interruption has become likely."""
        self.keys["events/recommendations/rebalance"] = json.dumps({"noticeTime": rfc3339(0)})

    def schedule(self, *, event_id: str, seconds: float, code: str = "system-reboot", state: str = "active") -> None:
        """Add or change a scheduled event; `state` "canceled" or "completed" takes it back."""
        events = [event for event in json.loads(self._scheduled()) if event["EventId"] != event_id]
        event = {
            "NotBefore": http_date(seconds, weekday=False),
            "Code": code,
            "Description": f"scheduled {code}",
            "EventId": event_id,
            "NotAfter": http_date(seconds + 3600, weekday=False),
            "State": state,
        }
        self.keys["events/maintenance/scheduled"] = json.dumps([*events, event])

    def _scheduled(self) -> str:
        return self.keys["events/maintenance/scheduled"]

    def forget_tokens(self) -> None:
        """All tokens that were given out are void from now on."""
        self._tokens.clear()

    def routes(self) -> list[web.RouteDef]:
        """The token, the keys, and three actions of Auto Scaling's API."""
        return [
            web.put("/latest/api/token", self._token),
            web.get("/latest/meta-data/{key:.+}", self._key),
            web.post("/", self._auto_scaling),
        ]

    async def _auto_scaling(self, request: web.Request) -> web.Response:
        asked = await request.post()
        action = str(asked.get("Action"))
        if action == "DescribeAutoScalingInstances" and asked.get("InstanceIds.member.1") == self.instance_id:
            member = "<member><AutoScalingGroupName>group</AutoScalingGroupName></member>"
            content = f"<AutoScalingInstances>{member}</AutoScalingInstances>"
        elif action == "DescribeLifecycleHooks":
            content = "".join(
                f"<member><LifecycleHookName>{name}</LifecycleHookName>"
                f"<LifecycleTransition>autoscaling:EC2_INSTANCE_{when}</LifecycleTransition></member>"
                for name, when in (("drain", "TERMINATING"), ("warm", "LAUNCHING"))
            )
            content = f"<LifecycleHooks>{content}</LifecycleHooks>"
        elif action == "CompleteLifecycleAction" and asked.get("LifecycleHookName") == "drain":
            self.completed.append(str(asked.get("InstanceId")))
            content = ""
        else:
            error = "<ErrorResponse><Error><Code>ValidationError</Code></Error></ErrorResponse>"
            return web.Response(status=400, text=error)
        text = f"<{action}Response><{action}Result>{content}</{action}Result></{action}Response>"
        return web.Response(text=text, content_type="text/xml")

    async def _token(self, request: web.Request) -> web.Response:
        asked = request.headers.get(f"{self.token_header}-ttl-seconds", "")
        if not asked.isdigit() or not 1 <= int(asked) <= 21600:
            return web.Response(status=400)
        token = f"token-{next(self._numbers)}=="
        seconds = min(float(asked), self.token_seconds)
        self._tokens[token] = time.monotonic() + seconds
        headers = {f"{self.token_header}-ttl-seconds": str(int(seconds))}
        return web.Response(text=token, headers=headers)

    async def _key(self, request: web.Request) -> web.Response:
        token = request.headers.get(self.token_header, "")
        if self._tokens.get(token, 0.0) <= time.monotonic():
            return web.Response(status=401)
        value = self.keys.get(request.match_info["key"])
        return web.Response(status=404) if value is None else web.Response(text=value)


# --------------------------------------------------------------------------------------------------------- GCP


class SimulatedGCP(AnnouncingServer):
    """Google's metadata server, with long polls. It does not say when the machine goes."""

    _quiet: Mapping[str, str] = MappingProxyType({"preempted": "FALSE", "maintenance-event": "NONE"})

    def __init__(self) -> None:
        super().__init__()
        self.keys = dict(self._quiet)
        """What is answered, by key; change it with `set`. Graceful shutdown is off until its key is set."""
        self.waiting = 0
        """Requests that wait for a change now."""

    def interrupt(self, seconds: float | None = None) -> None:
        """`instance/preempted` becomes TRUE; the seconds are said nowhere."""
        self.set("preempted", "TRUE")

    def forget(self) -> None:
        """Nothing is announced any more."""
        self.keys = dict(self._quiet)
        self.changed()

    def maintain(self, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> None:
        """Host maintenance; "NONE" takes it back, "MIGRATE_ON_HOST_MAINTENANCE" is a move."""
        self.set("maintenance-event", event)

    def shut_down(self) -> None:
        """A graceful shutdown begins."""
        self.set("shutdown-details/stop-state", "PENDING_STOP")

    def set(self, key: str, value: str) -> None:
        """Change a key; whoever waits for that gets it at once."""
        self.keys[key] = value
        self.changed()

    def own_headers(self) -> dict[str, str]:
        """What says that it is Google's."""
        return {"Metadata-Flavor": "Google"}

    def routes(self) -> list[web.RouteDef]:
        """The instance's keys."""
        return [web.get("/computeMetadata/v1/instance/{key:.*}", self._key)]

    async def _key(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        key, query = request.match_info["key"], request.query
        if query.get("wait_for_change") == "true":
            await self._wait(key, query.get("last_etag", ""), float(query.get("timeout_sec", "3600")))
        value = self.keys.get(key)
        headers = self.own_headers()
        if value is None:
            return web.Response(status=200 if key == "" else 404, headers=headers)
        return web.Response(text=value, headers=headers | {"ETag": self._etag(key)})

    async def _wait(self, key: str, last_etag: str, seconds: float) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while self._etag(key) == last_etag and self._fault is None:
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1

    def _etag(self, key: str) -> str:
        return f"{zlib.crc32(self.keys.get(key, '').encode()):016x}"


# ------------------------------------------------------------------------------------------------------- Azure


class SimulatedAzure(AnnouncingServer):
    """Scheduled events of a scale set, as one of its machines sees them."""

    lead_seconds: float = 30.0

    def __init__(self, *, name: str = "vmss_0") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []
        """What the document lists; may be changed at will."""
        self.acknowledged: list[str] = []
        self._incarnations = itertools.count(1)

    def interrupt(self, seconds: float | None = None) -> None:
        """Announce a Preempt event of this machine alone."""
        self.announce("preempt", seconds=self.lead_seconds if seconds is None else seconds)

    def forget(self) -> None:
        """Nothing is announced any more."""
        self.events = []

    def announce(
        self,
        event_id: str,
        kind: str = "Preempt",
        *,
        seconds: float = 30.0,
        machines: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        """List an event, for this machine if no others are named."""
        event = {
            "EventId": event_id,
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(machines or (self.name,)),
            "EventStatus": "Scheduled",
            "NotBefore": http_date(seconds),
            "Description": "a rehearsal",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
            **more,
        }
        self.events = [*self.events, event]

    def begin(self, event_id: str) -> None:
        """The event has begun: it has no time any more."""
        for event in self.events:
            if event["EventId"] == event_id:
                event |= {"EventStatus": "Started", "NotBefore": ""}

    def withdraw(self, event_id: str) -> None:
        """The event disappears: it is over, or will not happen."""
        self.events = [event for event in self.events if event["EventId"] != event_id]

    def routes(self) -> list[web.RouteDef]:
        """Name and events."""
        return [
            web.get("/metadata/instance/compute/name", self._name),
            web.get("/metadata/scheduledevents", self._document),
            web.post("/metadata/scheduledevents", self._start),
        ]

    async def _name(self, request: web.Request) -> web.Response:
        return web.Response(text=self.name) if self._allowed(request) else web.Response(status=400)

    async def _document(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return web.Response(status=400)
        return web.json_response({"DocumentIncarnation": next(self._incarnations), "Events": self.events})

    async def _start(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return web.Response(status=400)
        try:
            ids = [str(one["EventId"]) for one in json.loads(await request.read())["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return web.Response(status=400)
        self.acknowledged += ids
        for event_id in ids:
            self.begin(event_id)
        return web.Response()

    @staticmethod
    def _allowed(request: web.Request) -> bool:
        return request.headers.get("Metadata") == "true" and "api-version" in request.query


# ---------------------------------------------------------------------------------- Alibaba, Tencent, Volcengine


class SimulatedAlibaba(SimulatedAWS):
    """Metadata with Alibaba's token and its one key."""

    lead_seconds: float = 300.0
    token_header = "X-aliyun-ecs-metadata-token"

    def interrupt(self, seconds: float | None = None, action: str = "", **more: str) -> None:
        """Announce the release."""
        self.keys["instance/spot/termination-time"] = rfc3339(self.lead_seconds if seconds is None else seconds)


class SimulatedTencent(AnnouncingServer):
    """Metadata with Tencent's one key, which says China's time and does not say so."""

    lead_seconds: float = 120.0
    instance_id = "ins-rehearsal"

    def __init__(self) -> None:
        super().__init__()
        self.time: str | None = None
        """What is answered; None: a 404."""

    def interrupt(self, seconds: float | None = None) -> None:
        """Announce the release."""
        left = self.lead_seconds if seconds is None else seconds
        self.time = wall_time(left + 8 * 3600).strftime("%Y-%m-%d %H:%M:%S")

    def forget(self) -> None:
        """Nothing is announced any more."""
        self.time = None

    def routes(self) -> list[web.RouteDef]:
        """The key, and what says whose machine this is."""
        return [
            web.get("/latest/meta-data/spot/termination-time", self._key),
            web.get("/latest/meta-data/instance-id", self._id),
        ]

    async def _key(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.time is None else web.Response(text=self.time)

    async def _id(self, _: web.Request) -> web.Response:
        return web.Response(text=self.instance_id)


class SimulatedVolcengine(SimulatedTencent):
    """Metadata of Volcengine or BytePlus; its time is UTC."""

    lead_seconds: float = 300.0
    instance_id = "i-rehearsal"

    def interrupt(self, seconds: float | None = None) -> None:
        """Announce the release."""
        self.time = rfc3339(self.lead_seconds if seconds is None else seconds)

    def routes(self) -> list[web.RouteDef]:
        """The key, and what says whose machine this is."""
        return [
            web.get("/latest/spot_instance_termination_time", self._key),
            web.get("/latest/instance_id", self._id),
        ]


SERVICES: Mapping[str, type[AnnouncingServer]] = MappingProxyType(
    {
        "aws": SimulatedAWS,
        "gcp": SimulatedGCP,
        "azure": SimulatedAzure,
        "alibaba": SimulatedAlibaba,
        "tencent": SimulatedTencent,
        "volcengine": SimulatedVolcengine,
    }
)
"""Of the clouds whose metadata announce something, by the words of `notices`."""


# --------------------------------------------------------------------------------------- Oracle, and pushed events


class SimulatedOCI(MetadataServer):
    """Metadata of Oracle's cloud: an instance's own id. What is announced there is pushed (`preemption_event`)."""

    def __init__(self, *, instance_id: str = "ocid1.instance.oc1.phx.example") -> None:
        super().__init__()
        self.instance_id = instance_id

    def routes(self) -> list[web.RouteDef]:
        """The instance."""
        return [web.get("/opc/v2/instance/", self._instance)]

    async def _instance(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer Oracle":
            return web.Response(status=403)
        return web.json_response({"id": self.instance_id, "displayName": "a-rehearsal"})

    def preemption_event(self, instance_id: str | None = None) -> dict[str, Any]:
        """The event that Oracle's Events service emits; `instance_id`: about another machine."""
        return {
            "eventType": "com.oraclecloud.computeapi.instancepreemptionaction",
            "cloudEventsVersion": "0.1",
            "eventTypeVersion": "2.0",
            "source": "ComputeApi",
            "eventID": "7b6c6c0e-0000-0000-0000-000000000001",
            "eventTime": rfc3339(0),
            "contentType": "application/json",
            "data": {
                "resourceId": instance_id or self.instance_id,
                "resourceName": "a-rehearsal",
                "additionalDetails": {"preemptionAction": "TERMINATE"},
            },
        }


def eventbridge_event(instance_id: str, kind: str = "EC2 Spot Instance Interruption Warning") -> dict[str, Any]:
    """What EventBridge sends of a spot interruption or (`kind`) of a rebalance recommendation."""
    detail = {"instance-id": instance_id}
    if "Interruption" in kind:
        detail["instance-action"] = "terminate"
    return {
        "version": "0",
        "id": "12345678-1234-1234-1234-123456789012",
        "detail-type": kind,
        "source": "aws.ec2",
        "account": "123456789012",
        "time": rfc3339(0),
        "region": "us-east-2",
        "resources": [f"arn:aws:ec2:us-east-2:123456789012:instance/{instance_id}"],
        "detail": detail,
    }
