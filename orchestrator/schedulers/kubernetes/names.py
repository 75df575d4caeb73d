"""What objects in Kubernetes are called, and where it keeps them. Pure, and without the SDK: quickly imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON."""
Key = tuple[str, str]
"""(namespace, name)."""
GROUP = "orchestrator.dev"
VERSION = "v1alpha1"
JOB_LABEL = f"{GROUP}/job"
RUN_LABEL = f"{GROUP}/run"
_CORE = ("pods", "secrets", "services", "events", "nodes")
_GROUPS = {
    "leases": "coordination.k8s.io/v1",
    "poddisruptionbudgets": "policy/v1",
    "trainingjobs": f"{GROUP}/{VERSION}",
}


def path_of(plural: str, namespace: str | None = None, name: str | None = None, part: str | None = None) -> str:
    """The path of a collection, an object, or a part of one (status, scale): `part`."""
    root = "/api/v1" if plural in _CORE else f"/apis/{_GROUPS[plural]}"
    words = [root, *(("namespaces", namespace) if namespace else ()), plural, *(w for w in (name, part) if w)]
    return "/".join(words)


def key_of(found: Mapping[str, Any]) -> Key:
    """Namespace and name of an object."""
    metadata = found.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")
