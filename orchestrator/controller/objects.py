"""What a job has in the cluster beside pods and its run's Secret. Pure."""

from __future__ import annotations

from orchestrator.schedulers.kubernetes.names import JOB_LABEL, Object
from orchestrator.schedulers.kubernetes.pods import Owner


def _metadata(owner: Owner) -> Object:
    return {
        "name": owner.name,
        "namespace": owner.namespace,
        "labels": {JOB_LABEL: owner.name},
        "ownerReferences": [owner.reference()],
    }


def render_service(owner: Owner) -> Object:
    """Names for the pods: `<pod>.<job>`, as soon as they have an address."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(owner),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: owner.name}},
    }


def render_disruption_budget(owner: Owner, nodes_min: int) -> Object:
    """Evictions take one pod below the fewest at most: each is a notice, and the next one waits for a replacement."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(owner),
        "spec": {"minAvailable": max(nodes_min - 1, 0), "selector": {"matchLabels": {JOB_LABEL: owner.name}}},
    }
