# A small base for worker.Dockerfile: PyTorch for CPUs only, as CI's kind cluster uses it. INDEX: where wheels of that build are.
#   docker build -f deploy/docker/torch-cpu.Dockerfile --build-arg INDEX=https://download.pytorch.org/whl/cpu -t torch-cpu:ci .

FROM python:3.11-slim-bookworm
ARG INDEX
COPY constraints.txt /tmp/constraints.txt
RUN python3 -m pip install --no-cache-dir --index-url "${INDEX:?is required: --build-arg INDEX=…}" "$(grep '^torch==' /tmp/constraints.txt)" \
 && rm /tmp/constraints.txt
USER 65532:65532
