"""The objects of the API server double and the rules by which they change; its only state, without any network.

One rising counter gives every change its resourceVersion; the changes are kept for watches until `compact()`. Objects
in the store are never changed in place, so that changes may share them. `api_server.py` brings it to the network.
"""

from __future__ import annotations

import copy
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.kubernetes import api_schema, api_validation
from tests.kubernetes.api_objects import label_selector_object
from tests.kubernetes.api_status import (
    ApiError,
    Cause,
    Object,
    bad_request,
    forbidden_field,
    invalid,
    required,
    success,
    wrong,
)

Place = tuple[str, str]
"""Namespace ("" for cluster-wide objects) and name."""
NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A kind of objects, as one of its versions."""

    group: str = ""
    version: str = "v1"
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    """Whether it has the subresource."""
    generations: bool = False
    unconditional: bool = True
    """Whether a PUT may come without a resourceVersion."""
    custom: bool = False
    schema: Object = field(default_factory=dict)
    scale: Object | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What its versions have in common."""
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        """As objects say it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages say it: `trainingjobs.orchestrator.dev`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


BUILT_IN = [
    Resource(plural="namespaces", kind="Namespace", namespaced=False, status=True),
    Resource(plural="nodes", kind="Node", namespaced=False, status=True),
    Resource(plural="pods", kind="Pod", status=True, generations=True),
    Resource(plural="services", kind="Service", status=True),
    Resource(plural="secrets", kind="Secret"),
    Resource(plural="configmaps", kind="ConfigMap"),
    Resource(plural="events", kind="Event"),
    Resource(plural="serviceaccounts", kind="ServiceAccount"),
    Resource(plural="resourcequotas", kind="ResourceQuota", status=True),
    Resource(group="coordination.k8s.io", plural="leases", kind="Lease", unconditional=False),
    Resource(
        group="policy",
        plural="poddisruptionbudgets",
        kind="PodDisruptionBudget",
        status=True,
        generations=True,
        unconditional=False,
    ),
    Resource(group="scheduling.k8s.io", plural="priorityclasses", kind="PriorityClass", namespaced=False),
    Resource(
        group="apiextensions.k8s.io",
        plural="customresourcedefinitions",
        kind="CustomResourceDefinition",
        namespaced=False,
        status=True,
        unconditional=False,
    ),
]
NAMESPACES, NODES, PODS = BUILT_IN[:3]
SERVICE_ACCOUNTS = BUILT_IN[7]
QUOTAS, BUDGETS, PRIORITIES, DEFINITIONS = BUILT_IN[8], BUILT_IN[10], BUILT_IN[11], BUILT_IN[12]
NOT_READY = "node.kubernetes.io/not-ready"
QUOTA_PARTS = ("requests.", "limits.")
SYSTEM_PRIORITIES = {"system-cluster-critical": 2000000000, "system-node-critical": 2000001000}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step of the store's history; `new` is what the object was last where it is gone."""

    version: int
    key: tuple[str, str]
    old: Object | None
    new: Object
    gone: bool


def timestamp(seconds: float | None = None) -> str:
    """A time as objects hold it, in whole seconds."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float:
    """The other way."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()


class Store:
    """All objects; every method raises ApiError where the real server refuses."""

    def __init__(self) -> None:
        self.version = 1
        self.compacted = 0
        self.resources = {(one.group, one.version, one.plural): one for one in BUILT_IN}
        self.objects: dict[tuple[str, str], dict[Place, Object]] = {one.key: {} for one in BUILT_IN}
        self.changes: list[Change] = []
        self.on_change: Callable[[], None] = lambda: None
        self._addresses = 0
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.create(NAMESPACES, "", {"metadata": {"name": name}})

    # -- reading -------------------------------------------------------------------------------------------

    def read(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object."""
        found = self.objects[resource.key].get((namespace, name))
        if found is None:
            details = {"name": name, **({"group": resource.group} if resource.group else {}), "kind": resource.plural}
            raise ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found', details)
        return found

    def select(self, resource: Resource, namespace: str | None) -> list[Object]:
        """All objects of a namespace, or of all of them; ordered as etcd orders them."""
        places = sorted(self.objects[resource.key].items())
        return [thing for (where, _), thing in places if namespace is None or where == namespace]

    def since(self, version: int) -> list[Change]:
        """The changes after that version."""
        first = len(self.changes)
        while first > 0 and self.changes[first - 1].version > version:
            first -= 1
        return self.changes[first:]

    def compact(self) -> None:
        """Forget the past: watches that would start before now get 410."""
        self.version += 1
        self.compacted = self.version
        self.changes.clear()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Nothing that happens in the block is kept."""
        kept = self.version, self.resources, self.objects, self.changes, self.on_change
        self.resources, self.changes, self.on_change = dict(self.resources), list(self.changes), lambda: None
        self.objects = {key: dict(things) for key, things in self.objects.items()}
        try:
            yield
        finally:
            self.version, self.resources, self.objects, self.changes, self.on_change = kept

    # -- writing -------------------------------------------------------------------------------------------

    def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """POST."""
        thing = self._decoded(resource, namespace, body)
        metadata = thing["metadata"]
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + "".join(secrets.choice(NAME_LETTERS) for _ in range(5))
        self._check_namespace(resource, namespace, metadata.get("name", ""))
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
        for word in ("deletionTimestamp", "deletionGracePeriodSeconds", "generation"):
            metadata.pop(word, None)
        if resource.generations:
            metadata["generation"] = 1
        if resource.status and resource is not NODES:
            thing.pop("status", None)
        self._admit(resource, namespace, thing)
        thing = self._checked(resource, thing, None)
        if (namespace, metadata["name"]) in self.objects[resource.key]:
            details = {"name": metadata["name"], "kind": resource.plural}
            raise ApiError(409, "AlreadyExists", f'{resource.qualified} "{metadata["name"]}" already exists', details)
        if resource is BUDGETS:
            thing["status"] = {
                key: 0 for key in ("currentHealthy", "desiredHealthy", "disruptionsAllowed", "expectedPods")
            }
        if resource is PODS:
            self._check_quota(namespace, thing)
            thing["status"] = api_validation.first_status(thing)
        made = self._write(resource, None, thing)
        if resource is NAMESPACES:  # the real one comes a moment later, from a controller
            self.create(SERVICE_ACCOUNTS, metadata["name"], {"metadata": {"name": "default"}})
        return made

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Callable[[Object], Object],
        *,
        part: str = "",
        put: bool = False,
    ) -> Object:
        """PUT and PATCH, also of /status: `change` makes the new object of a copy of the old one."""
        if put:
            self._check_name(change({}), name)
        old = self.versioned(resource, self.read(resource, namespace, name))
        new = self._decoded(resource, namespace, change(copy.deepcopy(old)))
        self._check_precondition(resource, old, new, put=put)
        keep = (
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "generateName",
        )
        metadata = {key: value for key, value in new["metadata"].items() if key not in keep}
        metadata |= {key: old["metadata"][key] for key in keep if key in old["metadata"]}
        metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        new["metadata"] = {key: value for key, value in metadata.items() if value not in (None, {}, [])}
        if part == "status":  # of a custom object nothing else can be changed this way, of others the metadata
            metadata = old["metadata"] if resource.custom else new["metadata"]
            new = {**old, "metadata": metadata, "status": new.get("status") or {}}
        elif resource.status:
            new.pop("status", None)
            new |= {"status": old["status"]} if "status" in old else {}
        new = self._checked(resource, new, old)
        if new == old:
            return old
        if resource.generations and _meaning(new) != _meaning(old):
            new["metadata"] = {**new["metadata"], "generation": old["metadata"].get("generation", 0) + 1}
        return self._write(resource, old, new)

    def delete(self, resource: Resource, namespace: str, name: str, options: Object) -> Object:
        """DELETE: at once, or the object with its deletionTimestamp while a kubelet or finalizers hold it."""
        old = self.read(resource, namespace, name)
        metadata = old["metadata"]
        for word, value in (options.get("preconditions") or {}).items():
            if metadata[word] != value:
                what = {"uid": "UID"}.get(word, "ResourceVersion")
                why = f"Precondition failed: {what} in precondition: {value}, {what} in object meta: {metadata[word]}"
                raise self._conflict(resource, name, why)
        grace = self._grace_seconds(resource, old, options.get("gracePeriodSeconds"))
        if grace is None:
            return old
        held = metadata.get("finalizers") or (resource is NAMESPACES and old["spec"].get("finalizers"))
        if grace == 0 and not held:
            gone = self._write(resource, old, old, gone=True)
            return gone if resource is PODS else success(name, resource.group, resource.plural, metadata["uid"])
        start = time.time()
        if "deletionTimestamp" in metadata:
            start = seconds_of(metadata["deletionTimestamp"]) - metadata.get("deletionGracePeriodSeconds", 0)
        marked = {**metadata, "deletionTimestamp": timestamp(start + grace), "deletionGracePeriodSeconds": grace}
        if "deletionTimestamp" not in metadata and "generation" in metadata:
            marked["generation"] += 1
        new = {**old, "metadata": marked}
        if resource is NAMESPACES:
            new["status"] = {"phase": "Terminating"}
        return self._write(resource, old, new)

    def _grace_seconds(self, resource: Resource, old: Object, asked: int | None) -> int | None:
        """None: it is being deleted already, and not sooner for this request."""
        metadata = old["metadata"]
        if resource is not PODS:
            return None if "deletionTimestamp" in metadata and metadata.get("finalizers") else 0
        if "deletionTimestamp" in metadata:
            present = metadata["deletionGracePeriodSeconds"]
            return (
                asked if asked is not None and asked < present else None if present or metadata.get("finalizers") else 0
            )
        grace = old["spec"]["terminationGracePeriodSeconds"] if asked is None else max(asked, 0)
        return 0 if not old["spec"].get("nodeName") or old["status"]["phase"] in ("Succeeded", "Failed") else int(grace)

    def _write(self, resource: Resource, old: Object | None, new: Object, *, gone: bool = False) -> Object:
        metadata = new["metadata"]
        if old is not None and "deletionTimestamp" in metadata and not gone and self._may_go(resource, new):
            gone = True
        self.version += 1
        new = copy.deepcopy({**new, "metadata": {**metadata, "resourceVersion": str(self.version)}})
        place = (metadata.get("namespace", ""), metadata["name"])
        if gone:
            del self.objects[resource.key][place]
        else:
            self.objects[resource.key][place] = new
        self.changes.append(Change(version=self.version, key=resource.key, old=old, new=new, gone=gone))
        if resource is DEFINITIONS:
            self._serve(new, gone=gone)
        self.on_change()
        return new

    def _may_go(self, resource: Resource, thing: Object) -> bool:
        """Whether nothing holds an object any longer that is to be deleted."""
        if thing["metadata"].get("finalizers") or (resource is NAMESPACES and thing["spec"].get("finalizers")):
            return False
        return resource is not PODS or thing["metadata"]["deletionGracePeriodSeconds"] == 0

    # -- checks --------------------------------------------------------------------------------------------

    def _decoded(self, resource: Resource, namespace: str, body: object) -> Object:
        if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
            raise bad_request(f"the body is no {resource.kind}")
        thing = copy.deepcopy(body)
        for word, value in (("kind", resource.kind), ("apiVersion", resource.api_version)):
            if thing.setdefault(word, "" if resource.custom else value) != value:
                raise bad_request(f"{word} in the data ({thing[word]}) does not match the expected one ({value})")
        metadata = thing.setdefault("metadata", {})
        metadata.pop("managedFields", None)
        if resource.namespaced and metadata.setdefault("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if not resource.namespaced:
            metadata.pop("namespace", None)
        api_validation.decode(resource.plural if not resource.custom else "", resource.kind, thing)
        return thing

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        if resource.namespaced and self.read(NAMESPACES, "", namespace)["status"]["phase"] == "Terminating":
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise self._forbidden(resource, name, why)

    def _check_name(self, thing: Object, name: str) -> None:
        given = (thing.get("metadata") or {}).get("name")
        if given != name:
            raise bad_request(f"the name of the object ({given}) does not match the name on the URL ({name})")

    def _check_precondition(self, resource: Resource, old: Object, new: Object, *, put: bool) -> None:
        name, given = old["metadata"]["name"], new["metadata"]
        self._check_name(new, name)
        if given.get("uid") and given["uid"] != old["metadata"]["uid"]:
            if not put:
                causes = [wrong("metadata.uid", given["uid"], "field is immutable")]
                raise invalid(resource.kind, resource.group, name, causes)
            uid = old["metadata"]["uid"]
            message = f"Precondition failed: UID in precondition: {given['uid']}, UID in object meta: {uid}"
            raise self._conflict(resource, name, message)
        version = given.get("resourceVersion")
        if put and not version and not resource.unconditional:
            causes = [wrong("metadata.resourceVersion", 0, "must be specified for an update")]
            raise invalid(resource.kind, resource.group, name, causes)
        if version and version != old["metadata"]["resourceVersion"]:
            message = "the object has been modified; please apply your changes to the latest version and try again"
            raise self._conflict(resource, name, message)

    def _checked(self, resource: Resource, thing: Object, old: Object | None) -> Object:
        """The object with its defaults and without what nobody knows; or 422."""
        if resource.custom:
            thing = api_schema.pruned(resource.schema, thing)
        else:
            api_validation.fill_in(resource.plural, thing)
        causes = api_validation.metadata_causes(resource.plural, thing["metadata"])
        if resource.custom:
            content = {key: value for key, value in thing.items() if key != "metadata"}
            causes += api_schema.value_causes({**resource.schema, "required": _required(resource)}, content, "")
        elif resource is DEFINITIONS:
            causes += _definition_causes(thing)
            thing["status"] = {**(thing.get("status") or {}), **_established(thing)} if not causes else {}
        else:
            causes += api_validation.causes_of(resource.plural, thing)
            if resource is PODS and old is not None and not causes and old["spec"] != thing["spec"]:
                causes += api_validation.pod_update_causes(old["spec"], thing["spec"])
            if (
                old is not None
                and old.get("immutable")
                and (old.get("data"), True) != (thing.get("data"), thing.get("immutable"))
            ):
                causes.append(forbidden_field("data", "field is immutable when `immutable` is set"))
        if old is not None and "deletionTimestamp" in old["metadata"]:
            had = old["metadata"].get("finalizers") or []
            if any(one not in had for one in thing["metadata"].get("finalizers") or []):
                why = "no new finalizers can be added if the object is being deleted"
                causes.append(forbidden_field("metadata.finalizers", why))
        if causes:
            raise invalid(resource.kind, resource.group, thing["metadata"].get("name", ""), causes)
        return thing

    def _admit(self, resource: Resource, namespace: str, thing: Object) -> None:
        """What the real server's admission plug-ins and allocators fill in, or refuse."""
        spec = thing.get("spec") or {}
        account = spec.get("serviceAccountName") or "default"
        if resource is PODS and (namespace, account) not in self.objects[SERVICE_ACCOUNTS.key]:
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise self._forbidden(resource, thing["metadata"].get("name", ""), why)
        if resource is PODS and spec.get("priorityClassName"):
            name = spec["priorityClassName"]
            found = self.objects[PRIORITIES.key].get(("", name), {"value": SYSTEM_PRIORITIES.get(name)})
            if found["value"] is None:
                raise self._forbidden(
                    resource, thing["metadata"].get("name", ""), f"no PriorityClass with name {name} was found"
                )
            spec |= {
                "priority": found["value"],
                "preemptionPolicy": found.get("preemptionPolicy", "PreemptLowerPriority"),
            }
        if resource is NODES and not any(one["key"] == NOT_READY for one in spec.get("taints") or []):
            taint = {"key": NOT_READY, "effect": "NoSchedule"}
            thing["spec"] = {**spec, "taints": [*(spec.get("taints") or []), taint]}
        if resource.plural == "services" and not spec.get("clusterIP"):
            self._addresses += 1
            thing["spec"] = {**spec, "clusterIP": f"10.96.{self._addresses // 250}.{self._addresses % 250 + 1}"}
        if resource.plural == "events" and (thing.get("involvedObject") or {}).get("namespace", "default") != namespace:
            causes = [
                wrong(
                    "involvedObject.namespace",
                    thing["involvedObject"].get("namespace"),
                    "does not match event.namespace",
                )
            ]
            raise invalid("Event", "", thing["metadata"].get("name", ""), causes)

    def _check_quota(self, namespace: str, pod: Object) -> None:
        """Pods, their requests and their limits; a pod has to say those of cpu and memory that are limited."""
        pods = self.select(PODS, namespace)
        alive = [one for one in pods if one["status"]["phase"] not in ("Succeeded", "Failed")]
        for quota in self.select(QUOTAS, namespace):
            hard = quota["spec"].get("hard") or {}
            known = sorted(word for word in hard if word in ("pods", "count/pods") or word.startswith(QUOTA_PARTS))
            name = quota["metadata"]["name"]
            silent = [word for word in known if word.endswith((".cpu", ".memory")) and _asked(pod, word) is None]
            if silent:
                main = pod["spec"]["containers"][0]["name"]
                why = f"failed quota: {name}: must specify {'; '.join(f'{word} for: {main}' for word in silent)}"
                raise self._forbidden(PODS, pod["metadata"]["name"], why)
            asked = {word: _asked(pod, word) or 0 for word in known}
            used = {
                word: sum(_asked(one, word) or 0 for one in (pods if word == "count/pods" else alive)) for word in known
            }
            over = [word for word in known if used[word] + asked[word] > api_validation.quantity(hard[word])]
            if over:
                texts = [",".join(f"{word}={_amount(of[word])}" for word in over) for of in (asked, used)]
                limited = ",".join(f"{word}={hard[word]}" for word in over)
                why = f"exceeded quota: {name}, requested: {texts[0]}, used: {texts[1]}, limited: {limited}"
                raise self._forbidden(PODS, pod["metadata"]["name"], why)

    def _forbidden(self, resource: Resource, name: str, why: str) -> ApiError:
        details = {"name": name, **({"group": resource.group} if resource.group else {}), "kind": resource.plural}
        return ApiError(403, "Forbidden", f'{resource.qualified} "{name}" is forbidden: {why}', details)

    def _conflict(self, resource: Resource, name: str, why: str) -> ApiError:
        details = {"name": name, **({"group": resource.group} if resource.group else {}), "kind": resource.plural}
        return ApiError(
            409, "Conflict", f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}', details
        )

    # -- pods: binding and eviction ------------------------------------------------------------------------

    def bind(self, namespace: str, name: str, node: str) -> None:
        """POST …/binding."""
        pod = self.read(PODS, namespace, name)
        if pod["spec"].get("nodeName"):
            raise self._conflict(PODS, name, f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"')
        if "deletionTimestamp" in pod["metadata"] or pod["spec"].get("schedulingGates"):
            raise self._conflict(
                PODS, name, f"pod {name} is being deleted or has scheduling gates, cannot be assigned to a host"
            )
        condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp()}
        status = {**pod["status"], "conditions": with_condition(pod["status"].get("conditions"), condition)}
        self._write(PODS, pod, {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": status})

    def evict(self, namespace: str, name: str, options: Object) -> None:
        """POST …/eviction: 429 where a PodDisruptionBudget would be broken."""
        pod = self.read(PODS, namespace, name)
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
            for budget in self.select(BUDGETS, namespace):
                if label_selector_object(budget["spec"].get("selector"))(pod):
                    self._check_budget(budget, pod)
        condition = {
            **{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
            "message": "Eviction API: evicting",
        }
        if "deletionTimestamp" not in pod["metadata"]:
            self.update(PODS, namespace, name, lambda old: _disrupted(old, condition), part="status")
        self.delete(PODS, namespace, name, options)

    def _check_budget(self, budget: Object, pod: Object) -> None:
        status = self.budget_status(budget)
        healthy, desired = status["currentHealthy"], status["desiredHealthy"]
        enough = not is_ready(pod) and healthy >= desired > 0
        if status["disruptionsAllowed"] == 0 and not enough:
            name = budget["metadata"]["name"]
            message = (
                f"The disruption budget {name} needs {desired} healthy pods and has {healthy} currently"
                if healthy <= desired
                else f"The disruption budget {name} does not allow evicting pods currently"
            )
            details = {"causes": [{"reason": "DisruptionBudget", "message": message}]}
            raise ApiError(
                429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget.", details
            )

    def budget_status(self, budget: Object) -> Object:
        """What the disruption controller would write down.

        `minAvailable` as a number counts the pods there are. A percentage and `maxUnavailable` are of what the pods'
        controllers want by their scale subresource; a pod without such a controller counts nothing, and where all are
        such pods no eviction is ever allowed.
        """
        namespace, spec = budget["metadata"]["namespace"], budget["spec"]
        selects = label_selector_object(spec.get("selector"))
        pods = [one for one in self.select(PODS, namespace) if selects(one)]
        alive = [one for one in pods if "deletionTimestamp" not in one["metadata"]]
        healthy = sum(is_ready(one) for one in alive)
        least, most = spec.get("minAvailable"), spec.get("maxUnavailable")
        if isinstance(least, int):
            expected, desired = len(pods), least
        else:
            expected = self._wanted(namespace, pods)
            part = _part(least if least is not None else most if most is not None else 1, expected)
            desired = part if least is not None else max(0, expected - part)
        allowed = max(0, healthy - desired) if expected > 0 else 0
        reason = "SufficientPods" if allowed else "InsufficientPods"
        condition = {
            **{"type": "DisruptionAllowed", "status": "True" if allowed else "False", "reason": reason},
            **{"message": "", "observedGeneration": budget["metadata"]["generation"]},
        }
        return {
            **{"currentHealthy": healthy, "desiredHealthy": desired, "disruptionsAllowed": allowed},
            **{"expectedPods": expected, "observedGeneration": budget["metadata"]["generation"]},
            "conditions": [condition],
        }

    def _wanted(self, namespace: str, pods: list[Object]) -> int:
        """How many pods their controllers want, by each one's scale."""
        wanted: dict[str, int] = {}
        kinds = {(one.api_version, one.kind): one for one in self.resources.values() if one.scale is not None}
        for pod in pods:
            for owner in pod["metadata"].get("ownerReferences") or []:
                resource = kinds.get((owner["apiVersion"], owner["kind"]))
                if owner.get("controller") and resource is not None:
                    scale = self.scale(resource, namespace, owner["name"])
                    wanted[owner["uid"]] = scale["spec"].get("replicas", 0)
        return sum(wanted.values())

    # -- custom resources ----------------------------------------------------------------------------------

    def _serve(self, definition: Object, *, gone: bool) -> None:
        """Serve a CustomResourceDefinition's resources; with it they go, finalizers or not."""
        spec = definition["spec"]
        group, names = spec["group"], spec["names"]
        for key in [key for key in self.resources if (key[0], key[2]) == (group, names["plural"])]:
            old = self.resources[key]
            if gone:
                for thing in self.select(old, None):
                    self._write(old, thing, thing, gone=True)
            del self.resources[key]
        for version in spec["versions"] if not gone else ():
            parts = version.get("subresources") or {}
            resource = Resource(
                group=group,
                version=version["name"],
                plural=names["plural"],
                kind=names["kind"],
                namespaced=spec["scope"] == "Namespaced",
                status="status" in parts,
                generations=True,
                unconditional=False,
                custom=True,
                schema=version["schema"]["openAPIV3Schema"],
                scale=parts.get("scale"),
            )
            self.objects.setdefault(resource.key, {})
            if version.get("served", True):
                self.resources[group, version["name"], names["plural"]] = resource

    def scale(self, resource: Resource, namespace: str, name: str) -> Object:
        """GET …/scale."""
        thing = self.read(resource, namespace, name)
        assert resource.scale is not None
        metadata = {
            key: thing["metadata"].get(key)
            for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        }
        status: Object = {"replicas": _at(thing, resource.scale["statusReplicasPath"]) or 0}
        if resource.scale.get("labelSelectorPath"):
            status["selector"] = _at(thing, resource.scale["labelSelectorPath"]) or ""
        replicas = _at(thing, resource.scale["specReplicasPath"])
        spec = {} if replicas is None else {"replicas": replicas}
        return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}

    def set_scale(self, resource: Resource, namespace: str, name: str, change: Callable[[Object], Object]) -> Object:
        """PUT and PATCH of …/scale."""
        assert resource.scale is not None
        replicas = change(self.scale(resource, namespace, name))["spec"]["replicas"]
        *steps, last = resource.scale["specReplicasPath"].strip(".").split(".")

        def put(thing: Object) -> Object:
            below = thing
            for step in steps:
                below = below.setdefault(step, {})
            below[last] = replicas
            return thing

        self.update(resource, namespace, name, put)
        return self.scale(resource, namespace, name)

    def versioned(self, resource: Resource, thing: Object) -> Object:
        """A stored object as that version of its resource shows it."""
        return thing if thing["apiVersion"] == resource.api_version else {**thing, "apiVersion": resource.api_version}


def _asked(pod: Object, word: str) -> float | None:
    """What a pod takes of a quota's `requests.cpu` and so on; None: it does not say."""
    if word in ("pods", "count/pods"):
        return 1
    part, _, name = word.partition(".")
    amounts = [(one.get("resources") or {}).get(part, {}).get(name) for one in pod["spec"]["containers"]]
    if None in amounts and name in ("cpu", "memory"):
        return None
    return sum(api_validation.quantity(one) for one in amounts if one is not None)


def _amount(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{round(number * 1000)}m"


def _part(amount: object, whole: int) -> int:
    """A number, or a percentage of the whole, rounded up."""
    return -(-whole * int(amount.rstrip("%")) // 100) if isinstance(amount, str) else int(str(amount))


def with_condition(conditions: list[Object] | None, condition: Object) -> list[Object]:
    """The conditions with that one instead of its predecessor."""
    return [one for one in conditions or [] if one["type"] != condition["type"]] + [condition]


def is_ready(pod: Object) -> bool:
    """Whether the pod's Ready condition is true."""
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions") or [])


def _disrupted(pod: Object, condition: Object) -> Object:
    status = pod["status"]
    status["conditions"] = with_condition(status.get("conditions"), {**condition, "lastTransitionTime": timestamp()})
    return pod


def _meaning(thing: Object) -> Object:
    return {key: value for key, value in thing.items() if key not in ("metadata", "status")}


def _required(resource: Resource) -> list[str]:
    return [name for name in resource.schema.get("required") or [] if name != "metadata"]


def _at(thing: Object, path: str) -> object:
    found: object = thing
    for step in path.strip(".").split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _definition_causes(definition: Object) -> list[Cause]:
    spec = definition.get("spec") or {}
    names = spec.get("names") or {}
    causes = [required(f"spec.names.{word}") for word in ("plural", "kind") if not names.get(word)]
    causes += [required(f"spec.{word}") for word in ("group", "scope", "versions") if not spec.get(word)]
    if causes:
        return causes
    if definition["metadata"].get("name") != f"{names['plural']}.{spec['group']}":
        why = f'must be spec.names.plural+"."+spec.group: {names["plural"]}.{spec["group"]}'
        causes.append(wrong("metadata.name", definition["metadata"].get("name"), why))
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        causes.append(wrong("spec.versions", "", "must have exactly one version marked as storage version"))
    for place, version in enumerate(spec["versions"]):
        field = f"spec.versions[{place}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            causes.append(required(field, "schemas are required"))
        elif schema.get("type") != "object":
            causes.append(wrong(f"{field}.type", schema.get("type"), "must be object at the root"))
        else:
            causes += api_schema.schema_causes(schema, field)
    return causes


def _established(definition: Object) -> Object:
    spec = definition["spec"]
    names = {"listKind": f"{spec['names']['kind']}List", "singular": spec["names"]["kind"].lower(), **spec["names"]}
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": reason,
            "lastTransitionTime": definition["metadata"]["creationTimestamp"],
        }
        for kind, reason in (("NamesAccepted", "NoConflicts"), ("Established", "InitialNamesAccepted"))
    ]
    stored = [version["name"] for version in spec["versions"] if version.get("storage")]
    return {"acceptedNames": names, "conditions": conditions, "storedVersions": stored}


def finalized(namespace: Object, body: Object) -> Object:
    """PUT …/finalize: only the finalizers in the spec change."""
    return {**namespace, "spec": {**namespace["spec"], "finalizers": (body.get("spec") or {}).get("finalizers") or []}}
