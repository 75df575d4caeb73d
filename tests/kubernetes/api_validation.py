"""What the double refuses of built-in objects, and the defaults it fills in: where it matters, as the real one."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from tests.kubernetes.api_status import Cause, Object, bad_request, forbidden_field, required, unsupported, wrong

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
LABEL_KEY = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
BINARY = {f"{unit}i": 1024.0 ** (place + 1) for place, unit in enumerate("KMGTPE")}

NATIVE = ("cpu", "memory", "ephemeral-storage")
EFFECTS = ["NoSchedule", "PreferNoSchedule", "NoExecute"]
DEFAULT_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for key in ("not-ready", "unreachable")
]


def quantity(text: object) -> float:
    """A quantity as a number: "500m", "2Gi", 3."""
    found = re.fullmatch(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)([a-zA-Z]*)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * {**UNITS, **BINARY, "": 1.0}[found[2]]


# -- metadata ------------------------------------------------------------------------------------------------


def metadata_causes(plural: str, metadata: Object) -> list[Cause]:
    """Names, labels, annotations."""
    causes = name_causes(plural, metadata.get("name", ""))
    causes += labels_causes("metadata.labels", metadata.get("labels") or {})
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not _label_key(key.lower()):
            causes.append(
                wrong("metadata.annotations", key, "name part must consist of alphanumeric characters, '-', '_' or '.'")
            )
    if sum(len(key) + len(value) for key, value in annotations.items()) > 256 * 1024:
        causes.append(("FieldValueTooLong", "metadata.annotations", "Too long: may not be more than 262144 bytes"))
    for place, owner in enumerate(metadata.get("ownerReferences") or []):
        for word in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(word):
                causes.append(wrong(f"metadata.ownerReferences[{place}].{word}", "", "must not be empty"))
    for finalizer in metadata.get("finalizers") or []:
        if not _label_key(finalizer):
            causes.append(wrong("metadata.finalizers", finalizer, "name part must consist of alphanumeric characters"))
    return causes


def name_causes(plural: str, name: str) -> list[Cause]:
    """Names of services (since 1.36) and of namespaces are RFC 1123 labels, others are subdomains."""
    if not name:
        return [required("metadata.name", "name or generateName is required")]
    if plural in ("services", "namespaces"):
        return label_causes("metadata.name", name)
    why = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
    return dns_causes("metadata.name", name, SUBDOMAIN, 253, why)


def label_causes(field: str, text: str) -> list[Cause]:
    """An RFC 1123 label."""
    why = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
    return dns_causes(field, text, LABEL, 63, why)


def dns_causes(field: str, text: str, pattern: re.Pattern[str], length_max: int, why: str) -> list[Cause]:
    """A name of DNS."""
    causes = [wrong(field, text, f"must be no more than {length_max} bytes")] if len(text) > length_max else []
    if pattern.fullmatch(text) is None:
        more = "and must start and end with an alphanumeric character"
        causes.append(wrong(field, text, f"{why}, {more} (regex used for validation is '{pattern.pattern}')"))
    return causes


def labels_causes(field: str, labels: Object) -> list[Cause]:
    """Keys and values of labels and node selectors."""
    causes = []
    for key, value in labels.items():
        if not _label_key(key):
            causes.append(wrong(field, key, "name part must consist of alphanumeric characters, '-', '_' or '.'"))
        if len(value) > 63:
            causes.append(wrong(field, value, "must be no more than 63 bytes"))
        if LABEL_VALUE.fullmatch(value) is None:
            why = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
            causes.append(wrong(field, value, why))
    return causes


def _label_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (SUBDOMAIN.fullmatch(prefix) is None or len(prefix) > 253):
        return False
    return LABEL_KEY.fullmatch(name) is not None and len(name) <= 63


def decode(plural: str, kind: str, thing: Object) -> None:
    """What Go's decoder refuses with 400: texts that are none, whole numbers that are none."""

    def texts(value: Any, what: str) -> None:
        for one in value.values() if isinstance(value, dict) else value or ():
            if not isinstance(one, str):
                found = {bool: "bool", dict: "object", list: "array"}.get(type(one), "number")
                why = f"json: cannot unmarshal {found} into Go struct field {what} of type string"
                raise bad_request(f'{kind} in version "v1" cannot be handled as a {kind}: {why}')

    metadata = thing.get("metadata") or {}
    texts(metadata.get("labels"), "ObjectMeta.metadata.labels")
    texts(metadata.get("annotations"), "ObjectMeta.metadata.annotations")
    if plural in ("secrets", "configmaps"):
        texts(thing.get("data"), f"{kind}.data")
    if plural == "secrets":
        for key, value in (thing.get("data") or {}).items():
            try:
                base64.b64decode(value, validate=True)
            except binascii.Error:
                raise bad_request(
                    f'{kind} in version "v1" cannot be handled as a {kind}: illegal base64 data in data.{key}'
                ) from None
    if plural == "pods":
        spec = thing.get("spec") or {}
        texts(spec.get("nodeSelector"), "PodSpec.spec.nodeSelector")
        for word in ("terminationGracePeriodSeconds", "activeDeadlineSeconds", "priority"):
            if not isinstance(spec.get(word) or 0, int):
                raise bad_request(
                    f'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal string into Go struct '
                    f"field PodSpec.spec.{word} of type int64"
                )
        for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
            texts(container.get("command"), "Container.spec.containers.command")
            texts(container.get("args"), "Container.spec.containers.args")
            texts([one.get("value", "") for one in container.get("env") or []], "EnvVar.spec.containers.env.value")
    if plural == "leases":
        for word in ("acquireTime", "renewTime"):
            when = (thing.get("spec") or {}).get(word)
            if when is not None and MICRO_TIME.fullmatch(when) is None:
                raise bad_request(
                    f'Lease in version "v1" cannot be handled as a Lease: parsing time "{when}" as "{MICRO_FORMAT}"'
                )


MICRO_FORMAT = "2006-01-02T15:04:05.000000Z07:00"


# -- built-in kinds ------------------------------------------------------------------------------------------


def fill_in(plural: str, thing: Object) -> None:
    """Defaults of built-in objects, in place."""
    if plural == "pods":
        _fill_in_pod(thing)
    elif plural == "secrets":
        thing.setdefault("type", "Opaque")
        for key, value in (thing.pop("stringData", None) or {}).items():
            thing.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
    elif plural == "services":
        spec = thing.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        for port in spec.get("ports") or []:
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port.get("port"))
    elif plural == "nodes":
        thing.setdefault("spec", {})
        thing.setdefault("status", {})
    elif plural == "namespaces":
        thing["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = thing["metadata"].get("name", "")
        thing.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
        thing.setdefault("status", {}).setdefault("phase", "Active")


def _fill_in_pod(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    defaults = {
        **{"restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst"},
        **{"schedulerName": "default-scheduler", "securityContext": {}, "enableServiceLinks": True},
        **{"serviceAccountName": "default", "preemptionPolicy": "PreemptLowerPriority", "priority": 0},
    }
    for key, value in defaults.items():
        spec.setdefault(key, value)
    if spec["terminationGracePeriodSeconds"] < 0:
        spec["terminationGracePeriodSeconds"] = 1
    spec["tolerations"] = list(spec.get("tolerations") or [])
    for default in DEFAULT_TOLERATIONS:
        if not any(_covers(one, default) for one in spec["tolerations"]):
            spec["tolerations"].append(dict(default))
    for volume in spec.get("volumes") or []:
        for word in ("secret", "configMap", "projected", "downwardAPI"):
            if isinstance(volume.get(word), dict):
                volume[word].setdefault("defaultMode", 0o644)
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("imagePullPolicy", "IfNotPresent" if ":" in container.get("image", "") else "Always")
        resources = container.setdefault("resources", {})
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


def _covers(toleration: Object, default: Object) -> bool:
    """Whether the admission plugin leaves out its default because of that toleration."""
    return toleration.get("key") in (None, "", default["key"]) and toleration.get("effect") in (None, "", "NoExecute")


def first_status(pod: Object) -> Object:
    """The status of a pod that has just been made."""
    status: Object = {"phase": "Pending", "qosClass": _quality(pod["spec"])}
    if pod["spec"].get("schedulingGates"):
        message = "Scheduling is blocked due to non-empty scheduling gates"
        condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": message}
        status["conditions"] = [condition]
    return status


def _quality(spec: Object) -> str:
    asked = [container["resources"] for container in spec["containers"]]
    if not any(one.get("requests") or one.get("limits") for one in asked):
        return "BestEffort"
    for one in asked:
        limits, requests = one.get("limits") or {}, one.get("requests") or {}
        if not {"cpu", "memory"} <= limits.keys() or any(requests.get(key) != limits[key] for key in ("cpu", "memory")):
            return "Burstable"
    return "Guaranteed"


def causes_of(plural: str, thing: Object) -> list[Cause]:
    """Why the real server would refuse that built-in object, after its defaults; the metadata are not looked at."""
    spec = thing.get("spec") or {}
    match plural:
        case "pods":
            return pod_causes(spec)
        case "secrets" | "configmaps":
            data = {**(thing.get("data") or {}), **(thing.get("binaryData") or {})}
            causes = [
                wrong(
                    f"data[{key}]", key, "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
                )
                for key in data
                if re.fullmatch(r"[-._a-zA-Z0-9]+", key) is None
            ]
            if sum(len(value) for value in data.values()) > 1024 * 1024 * (4 / 3 if plural == "secrets" else 1):
                causes.append(("FieldValueTooLong", "data", "Too long: may not be more than 1048576 bytes"))
            return causes
        case "leases":
            seconds = spec.get("leaseDurationSeconds")
            return (
                [wrong("spec.leaseDurationSeconds", seconds, "must be greater than 0")]
                if seconds is not None and seconds <= 0
                else []
            )
        case "poddisruptionbudgets" if "minAvailable" in spec and "maxUnavailable" in spec:
            return [wrong("spec", "", "minAvailable and maxUnavailable cannot be both set")]
        case "services":
            ports = spec.get("ports") or []
            if not ports and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
                return [required("spec.ports")]
            if len(ports) > 1 and not all(port.get("name") for port in ports):
                return [
                    required(f"spec.ports[{place}].name") for place, port in enumerate(ports) if not port.get("name")
                ]
            return []
        case _:
            return []


def pod_causes(spec: Object) -> list[Cause]:
    """A pod's spec."""
    causes: list[Cause] = []
    if not spec.get("containers"):
        causes.append(required("spec.containers"))
    volumes = [volume.get("name", "") for volume in spec.get("volumes") or []]
    for place, volume in enumerate(spec.get("volumes") or []):
        field = f"spec.volumes[{place}]"
        causes += label_causes(f"{field}.name", volume["name"]) if volume.get("name") else [required(f"{field}.name")]
        if volumes.index(volumes[place]) != place:
            causes.append(("FieldValueDuplicate", f"{field}.name", f'Duplicate value: "{volumes[place]}"'))
        if len(volume) < 2:
            causes.append(required(field, "must specify a volume type"))
        if len(volume) > 2:
            causes.append(forbidden_field(field, "may not specify more than 1 volume type"))
    names: list[str] = []
    for word in ("containers", "initContainers"):
        for place, container in enumerate(spec.get(word) or []):
            causes += _container_causes(f"spec.{word}[{place}]", container, volumes, names)
            names.append(container.get("name", ""))
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        causes.append(unsupported("spec.restartPolicy", spec["restartPolicy"], ["Always", "OnFailure", "Never"]))
    if spec["dnsPolicy"] not in ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"):
        causes.append(
            unsupported(
                "spec.dnsPolicy", spec["dnsPolicy"], ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]
            )
        )
    for word in ("hostname", "subdomain"):
        causes += label_causes(f"spec.{word}", spec[word]) if spec.get(word) else []
    causes += labels_causes("spec.nodeSelector", spec.get("nodeSelector") or {})
    if spec.get("nodeName") and spec.get("schedulingGates"):
        causes.append(forbidden_field("spec.nodeName", "cannot be set until all schedulingGates have been cleared"))
    for place, toleration in enumerate(spec["tolerations"]):
        causes += _toleration_causes(f"spec.tolerations[{place}]", toleration)
    return causes


def _container_causes(field: str, container: Object, volumes: list[str], names: list[str]) -> list[Cause]:
    name = container.get("name", "")
    causes = label_causes(f"{field}.name", name) if name else [required(f"{field}.name")]
    if name in names:
        causes.append(("FieldValueDuplicate", f"{field}.name", f'Duplicate value: "{name}"'))
    if not container.get("image"):
        causes.append(required(f"{field}.image"))
    paths: list[str] = []
    for place, mount in enumerate(container.get("volumeMounts") or []):
        where, path = f"{field}.volumeMounts[{place}]", mount.get("mountPath", "")
        if mount.get("name", "") not in volumes:
            causes.append(("FieldValueNotFound", f"{where}.name", f'Not found: "{mount.get("name", "")}"'))
        if not path:
            causes.append(required(f"{where}.mountPath"))
        if path in paths:
            causes.append(wrong(f"{where}.mountPath", path, "must be unique"))
        paths.append(path)
    for place, variable in enumerate(container.get("env") or []):
        if not variable.get("name"):
            causes.append(required(f"{field}.env[{place}].name"))
        if variable.get("value") and variable.get("valueFrom"):
            causes.append(
                wrong(f"{field}.env[{place}].valueFrom", "", "may not be specified when `value` is not empty")
            )
    return causes + _resource_causes(f"{field}.resources", container.get("resources") or {})


def _resource_causes(field: str, resources: Object) -> list[Cause]:
    causes = []
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for word, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            if QUANTITY.fullmatch(str(amount)) is None:
                raise bad_request(
                    f"quantities must match the regular expression '{QUANTITY.pattern}': {field}.{word}[{name}]"
                )
            if name not in NATIVE and "/" not in name and not name.startswith("hugepages-"):
                causes.append(wrong(f"{field}.{word}[{name}]", name, "must be a standard resource for containers"))
    for name, amount in requests.items():
        if "/" in name and quantity(amount) != quantity(limits.get(name, "nan") if name in limits else -1):
            causes.append(wrong(f"{field}.requests", amount, f"must be equal to {name} limit"))
        elif name in limits and quantity(amount) > quantity(limits[name]):
            causes.append(
                wrong(f"{field}.requests", amount, f"must be less than or equal to {name} limit of {limits[name]}")
            )
    return causes


def _toleration_causes(field: str, toleration: Object) -> list[Cause]:
    causes = []
    operator, effect = toleration.get("operator", "Equal"), toleration.get("effect", "")
    if operator not in ("Equal", "Exists"):
        causes.append(unsupported(f"{field}.operator", operator, ["Equal", "Exists"]))
    if not toleration.get("key") and operator != "Exists":
        causes.append(wrong(f"{field}.operator", operator, "operator must be Exists when `key` is empty"))
    if operator == "Exists" and toleration.get("value"):
        causes.append(
            wrong(f"{field}.operator", toleration["value"], "value must be empty when `operator` is 'Exists'")
        )
    if effect and effect not in EFFECTS:
        causes.append(unsupported(f"{field}.effect", effect, EFFECTS))
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        causes.append(wrong(f"{field}.effect", effect, "effect must be 'NoExecute' when `tolerationSeconds` is set"))
    return causes


POD_FIELDS_THAT_MAY_CHANGE = ("activeDeadlineSeconds", "tolerations", "schedulingGates")


def pod_update_causes(old: Object, new: Object) -> list[Cause]:
    """What may change of a pod's spec: images, added tolerations, removed gates, and where a gated pod may go."""
    gated = bool(old.get("schedulingGates"))

    def fixed(spec: Object) -> Object:
        free = [*POD_FIELDS_THAT_MAY_CHANGE, *(("nodeSelector", "affinity") if gated else ())]
        rest = {key: value for key, value in spec.items() if key not in free}
        for word in ("containers", "initContainers"):
            rest[word] = [{**one, "image": ""} for one in spec.get(word) or []]
        return rest

    causes = []
    if fixed(old) != fixed(new):
        may = (
            "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations`"
        )
        causes.append(forbidden_field("spec", f"pod updates may not change fields other than {may} (only additions)"))
    if any(one not in new["tolerations"] for one in old["tolerations"]):
        causes.append(
            forbidden_field("spec.tolerations", "existing toleration can not be modified except its tolerationSeconds")
        )
    if any(gate not in (old.get("schedulingGates") or []) for gate in new.get("schedulingGates") or []):
        causes.append(
            forbidden_field("spec.schedulingGates", "only deletion is allowed, but found new scheduling gate")
        )
    return causes
