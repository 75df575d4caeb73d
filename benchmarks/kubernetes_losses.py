"""`python -m benchmarks.kubernetes_losses`: seconds from a taint to the commit and to the next new step, loss by loss.

Four pods of one rank each, in a cluster of processes on this machine (tests/kubernetes; `--real`: under a real control
plane, where its binaries are); one after another loses its node by a NoExecute taint. That the fourth loss takes no
longer than the first is the point: pods are replaced without any back-off. Workers are small, and their start is most
of what is measured; the cores are shared by all of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.kubernetes.cluster import Cluster, Kind, running_cluster
from tests.processes.kubernetes_jobs import Jobs, prepared

LOSSES = 4
PODS = 4
CAPACITY = {"pods": "10", "cpu": "8", "memory": "8Gi", "nvidia.com/gpu": "1"}


def until_all_train(jobs: Jobs) -> None:
    """Wait until all pods' ranks have come on by a few steps together."""
    begun = jobs.status.get("step", 0)

    def train() -> bool:
        now = jobs.status
        return now.get("state") == "Running" and now.get("worldSize") == PODS and now.get("step", 0) > begun + 5

    jobs.until(train, "all pods train")


def one_loss(cluster: Cluster, jobs: Jobs) -> tuple[float, float, float]:
    """Seconds from the taint to the notice, the commit and the first new step."""
    name = sorted(jobs.pods())[0]
    host = jobs.pods()[name]["spec"]["nodeName"]
    generation = jobs.status["generation"]
    began = time.time()
    cluster.taint(host, "maintenance", effect="NoExecute")

    def since(kind: str, **facts: object) -> float:
        def found() -> list[float]:
            return [
                record["wall_seconds"] - began
                for record in jobs.events(kind)
                if record["wall_seconds"] > began and all(record.get(key) == value for key, value in facts.items())
            ]

        jobs.until(found, f"{kind} after the taint")
        return found()[0]

    notice, commit = since("notice received", node=name), since("committed")
    step = since("first good step", generation=generation + 1)
    cluster.untaint(host, "maintenance")
    until_all_train(jobs)
    return notice, commit, step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="under a real control plane")
    real = parser.parse_args().real
    with tempfile.TemporaryDirectory() as folder:
        kind: Kind = "real" if real else "double"
        with running_cluster(Path(folder), nodes=PODS + 1, capacity=CAPACITY, kind=kind) as cluster:
            prepared(cluster)
            jobs = Jobs(cluster=cluster, folder=Path(folder))
            jobs.start_controller()
            try:
                jobs.create(nodesMin=1, nodesMax=PODS, saveEvery=0, reformSeconds=10, env={"STEPS": 100_000})
                until_all_train(jobs)
                print("| loss | notice s | commit s | first new step s |\n|---|---|---|---|")
                for number in range(LOSSES):
                    notice, commit, step = one_loss(cluster, jobs)
                    print(f"| {number + 1} | {notice:.2f} | {commit:.2f} | {step:.1f} |", flush=True)
            finally:
                jobs.stop()


if __name__ == "__main__":
    main()
