"""What nodes say of the hosts under them: an event, and nothing else. Pure; see `core.states`."""

from __future__ import annotations

from orchestrator.core.messages import HostReported
from orchestrator.core.turn import Turn

HOST_TROUBLE = "host trouble"
HOST_WELL = "host well"


def on_reported(turn: Turn, event: HostReported) -> None:
    """Told once by its node, and once more when it is over."""
    if event.node not in turn.job.nodes:
        return
    well = f"{event.what} is well again"
    turn.note(HOST_WELL if event.problem is None else HOST_TROUBLE, event.problem or well, node=event.node)
