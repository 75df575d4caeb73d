"""Fixtures that the checkpoint tests share."""

from tests.checkpoint.stores import any_store

__all__ = ["any_store"]
