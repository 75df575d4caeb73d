"""Fixtures that the checkpoint tests share."""

from tests.checkpoint.stores import any_store
from tests.cli.conftest import command

__all__ = ["any_store", "command"]
