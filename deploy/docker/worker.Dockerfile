# The base for training images: an image with PyTorch, and this package. From the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile --build-arg BASE=pytorch/pytorch:TAG -t HOST/PATH/orchestrator-worker:0.1.0 .
# Then, in your own Dockerfile:
#   FROM HOST/PATH/orchestrator-worker:0.1.0
#   COPY train.py /work/
#
# BASE is a Debian or Ubuntu with torch 2.6 or newer in the python3 that is first on its PATH, Python 3.11 or newer.
# Works with a read-only root filesystem. What has to be writable: /tmp, /dev/shm (staged shards: as large as two copies of what a node's ranks
# save, the controller makes it a volume in memory) and /var/log/orchestrator (the workers' output); besides, what your script writes.

ARG BASE
FROM ${BASE}
# Newer images keep torch in the system's Python, which pip does not touch unless it is told to.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
USER 0:0
WORKDIR /tmp/source
# tini as PID 1 collects what workers leave behind (a data loader's processes, when its worker was killed) and passes SIGTERM on.
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE deploy/docker/worker-requirements.txt ./
COPY orchestrator ./orchestrator
# The base's torch stays: --no-deps, and a check that it is there and new enough. It is not imported: a build has no device.
RUN python3 -m pip install --no-cache-dir --requirement worker-requirements.txt \
 && python3 -m pip install --no-cache-dir --no-deps . \
 && python3 -c "from importlib.metadata import version as v; n = tuple(map(int, v('torch').split('.')[:2])); assert n >= (2, 6), n" \
 && python3 -c "import orchestrator.agent.node, orchestrator.storage.s3.store, orchestrator.storage.gcs.store" \
 && rm -rf /tmp/source \
 && mkdir -p /var/log/orchestrator /work \
 && chown 65532:65532 /var/log/orchestrator
# To try the cluster with, before there is a script of yours.
COPY examples /opt/orchestrator/examples
# USER: the uid has no entry in /etc/passwd, and torch asks for its name when it compiles.
ENV HOME=/tmp \
    USER=orchestrator \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /work
# In a job the controller gives the command, after the one of the TrainingJob's first container: `command: [tini, --, python3]`. Exec form: no
# shell in between, so SIGTERM reaches the agent, which ends its workers.
ENTRYPOINT ["tini", "--"]
CMD ["python3", "-m", "orchestrator", "--help"]
