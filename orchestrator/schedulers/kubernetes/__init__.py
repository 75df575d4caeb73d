"""Kubernetes: pods as nodes. `client` speaks to the API server, `pods` is pure, `allocation` is the scheduler."""
