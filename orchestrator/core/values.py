"""Cheap copies of large frozen values. Pure; used by the values that every event changes."""

from __future__ import annotations

from typing import Any, Self


class Changeable:
    """A frozen dataclass without slots: `changed` copies the dictionary of its fields, not field by field.

    A job's values have dozens of fields and every event changes several of them; `dataclasses.replace` alone would take
    most of an event's time.
    """

    def changed(self, **changes: Any) -> Self:
        """The same value with other values in some fields."""
        assert changes.keys() <= vars(self).keys(), changes.keys()
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        vars(new).update(changes)
        return new
