"""Selectors and patches of the Kubernetes API, on plain dicts: pure functions of the API server double."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from tests.kubernetes.api_status import ApiError, Object, bad_request, invalid, wrong

Selects = Callable[[Object], bool]
REQUIREMENT = re.compile(
    r"\s*(?:(?P<absent>!)?\s*(?P<key>[\w./-]+)\s*(?:(?P<operator>==|!=|=|\bnotin\b|\bin\b)\s*"
    r"(?P<value>\([^)]*\)|[\w.-]*))?)\s*(?:,|$)"
)
FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "spec.nodeName",
    "status.phase",
    "involvedObject.name",
    "involvedObject.uid",
)

MERGE_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets", "schedulingGates"), "name"),
    **dict.fromkeys(("conditions", "addresses"), "type"),
    **{"taints": "key", "volumeMounts": "mountPath", "ownerReferences": "uid", "hostAliases": "ip"},
}
"""Lists that a strategic merge patch merges by a key; all others are replaced."""


def label_selector(text: str) -> Selects:
    """Such as `a=b,c!=d,e in (f,g),h notin (i),j,!k`."""
    tests: list[Selects] = []
    position = 0
    while position < len(text):
        found = REQUIREMENT.match(text, position)
        if found is None or found.end() == position:
            raise bad_request(f'unable to parse requirement: "{text}"')
        position = found.end()
        values = [value.strip() for value in (found["value"] or "").strip("()").split(",")]
        operator = found["operator"] or ("!" if found["absent"] else "exists")
        tests.append(_requirement(found["key"], operator, values))
    return lambda thing: all(test(thing) for test in tests)


def _requirement(key: str, operator: str, values: list[str]) -> Selects:
    def labels(thing: Object) -> Object:
        return thing["metadata"].get("labels") or {}

    match operator:
        case "=" | "==" | "in":
            return lambda thing: labels(thing).get(key) in values
        case "!=" | "notin":
            return lambda thing: labels(thing).get(key) not in values
        case "!":
            return lambda thing: key not in labels(thing)
        case _:
            return lambda thing: key in labels(thing)


def label_selector_object(selector: Object | None) -> Selects:
    """A LabelSelector as objects hold them: matchLabels and matchExpressions; None selects nothing."""
    if selector is None:
        return lambda thing: False
    words = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "!"}
    tests = [_requirement(key, "=", [value]) for key, value in (selector.get("matchLabels") or {}).items()]
    for one in selector.get("matchExpressions") or []:
        tests.append(_requirement(one["key"], words[one["operator"]], one.get("values") or []))
    return lambda thing: all(test(thing) for test in tests)


def field_selector(text: str) -> Selects:
    """Such as `metadata.name=x,status.phase!=Running`."""
    tests: list[Selects] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"([\w.]+)(==|!=|=)(.*)", part)
        if found is None or found[1] not in FIELDS:
            raise bad_request(f'Unable to find "{part}" that match label selector "", field selector "{text}"')
        tests.append(_field_is(found[1].split("."), found[3], equal=found[2] != "!="))
    return lambda thing: all(test(thing) for test in tests)


def _field_is(path: list[str], value: str, *, equal: bool) -> Selects:
    def test(thing: Object) -> bool:
        found: Any = thing
        for step in path:
            found = (found or {}).get(step)
        return ((found or "") == value) is equal

    return test


# -- patches -------------------------------------------------------------------------------------------------


def merge_patch(thing: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(thing) if isinstance(thing, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_merge_patch(thing: Any, patch: Any) -> Any:
    """A merge patch whose well-known lists are merged by key; `$patch: delete` and `replace` are known."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    patch = dict(patch)
    merged = dict(thing) if isinstance(thing, dict) and patch.pop("$patch", None) != "replace" else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif key == "finalizers" and isinstance(value, list):
            merged[key] = list(dict.fromkeys([*(merged.get(key) or []), *value]))
        elif key in MERGE_KEYS and isinstance(value, list):
            merged[key] = _merge_list(merged.get(key) or [], value, MERGE_KEYS[key])
        elif not key.startswith("$"):
            merged[key] = strategic_merge_patch(merged.get(key), value)
    return merged


def _merge_list(old: list[Object], patch: list[Object], by: str) -> list[Object]:
    items = {item.get(by): item for item in old}
    if any(item.get("$patch") == "replace" for item in patch):
        items = {}
    for item in patch:
        if item.get("$patch") == "delete":
            items.pop(item.get(by), None)
        elif "$patch" not in item:
            items[item.get(by)] = strategic_merge_patch(items.get(item.get(by)), item)
    return list(items.values())


def json_patch(thing: Object, patch: list[Object]) -> Object:
    """RFC 6902: add, replace, remove, test."""
    result: Any = copy.deepcopy(thing)
    for step in patch:
        words = [word.replace("~1", "/").replace("~0", "~") for word in step["path"].split("/")[1:]]
        try:
            _json_step(result, step, words)
        except (KeyError, IndexError, TypeError, ValueError):
            raise invalid("", "", "", [wrong("patch", step["path"], f"{step.get('op')} does not apply")]) from None
    return result


def _json_step(result: Any, step: Object, words: list[str]) -> None:
    parent = result
    for word in words[:-1]:
        parent = parent[int(word)] if isinstance(parent, list) else parent[word]
    last: Any = words[-1]
    if isinstance(parent, list):
        last = len(parent) if last == "-" else int(last)
    match step["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(last, copy.deepcopy(step["value"]))
        case "add":
            parent[last] = copy.deepcopy(step["value"])
        case "replace":
            parent[last]  # there has to be one
            parent[last] = copy.deepcopy(step["value"])
        case "remove":
            del parent[last]
        case "test":
            if parent[last] != step["value"]:
                raise ValueError(step["path"])
        case other:
            raise bad_request(f"json patch operation {other} is not known to this double")


def apply_patch(content_type: str, thing: Object, patch: Any, *, custom: bool) -> Object:
    """The object after a PATCH of that content type."""
    match content_type:
        case "application/merge-patch+json" if isinstance(patch, dict):
            return merge_patch(thing, patch)
        case "application/strategic-merge-patch+json" if isinstance(patch, dict) and not custom:
            return strategic_merge_patch(thing, patch)
        case "application/json-patch+json" if isinstance(patch, list):
            return json_patch(thing, patch)
    known = "application/json-patch+json, application/merge-patch+json" + (
        "" if custom else ", application/strategic-merge-patch+json"
    )
    message = f"the body of the request was in an unknown format - accepted media types include: {known}"
    raise ApiError(415, "UnsupportedMediaType", message)
