# The Kubernetes controller, without torch. From the repository's root:
#   docker build -f deploy/docker/controller.Dockerfile -t HOST/PATH/orchestrator-controller:0.1.0 .
#
# Works with a read-only root filesystem; only /tmp has to be writable (an emptyDir).

FROM python:3.11-slim-bookworm AS build
WORKDIR /source
RUN python3 -m venv /opt/orchestrator
COPY constraints.txt deploy/docker/controller-requirements.txt ./
RUN /opt/orchestrator/bin/pip install --no-cache-dir --constraint constraints.txt --requirement controller-requirements.txt setuptools
COPY pyproject.toml README.md LICENSE ./
COPY orchestrator ./orchestrator
# --no-deps: pyproject.toml names torch and the stores' SDKs, too.
RUN /opt/orchestrator/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/orchestrator/bin/python -c "import orchestrator.cli, orchestrator.supervisor.loop" \
 && /opt/orchestrator/bin/pip uninstall --yes setuptools pip

FROM python:3.11-slim-bookworm
COPY --from=build /opt/orchestrator /opt/orchestrator
ENV PATH=/opt/orchestrator/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# A number, so that runAsNonRoot can be checked without this image's list of users.
USER 65532:65532
WORKDIR /tmp
EXPOSE 8443
# Exec form: the process is PID 1 and gets SIGTERM itself.
ENTRYPOINT ["python3", "-m", "orchestrator"]
CMD ["controller", "run"]
