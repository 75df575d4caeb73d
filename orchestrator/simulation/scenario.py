"""What a replay assumes of the job and its machines. Values only.

Made by `cli.simulate`, read by all of `simulation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.simulation.traces import MICROSECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job on nodes that come and go. A step is the same work on any number of nodes and scales perfectly."""

    nodes_min: int
    nodes_max: int
    step_seconds: float
    """One step on `nodes_max` nodes; on n nodes it takes nodes_max / n times as long."""
    save_every_steps: int
    """Steps between periodic saves; 0: only when a node is announced to go."""
    state_bytes: int
    """The whole job's state, of which each node saves its share."""
    bandwidth_bytes_per_second: float
    """From one node to the store."""
    stall_seconds: float
    """How long training stands still for one save."""
    restart_seconds: float
    """From the launch of workers to their first step, the state read back included."""
    notice_seconds: float
    """How long before it goes a node is announced to go; 0: never."""
    replacement_seconds: float
    """From a node's being given to the job to its agent's connecting."""

    @property
    def stall_us(self) -> int:
        """`stall_seconds` in microseconds."""
        return round(self.stall_seconds * MICROSECONDS)

    @property
    def restart_us(self) -> int:
        """`restart_seconds` in microseconds."""
        return round(self.restart_seconds * MICROSECONDS)

    @property
    def notice_us(self) -> int:
        """`notice_seconds` in microseconds."""
        return round(self.notice_seconds * MICROSECONDS)

    @property
    def replacement_us(self) -> int:
        """`replacement_seconds` in microseconds."""
        return round(self.replacement_seconds * MICROSECONDS)

    def step_us(self, nodes: int) -> int:
        """Microseconds that a step takes on so many nodes."""
        return max(1, round(self.step_seconds * MICROSECONDS * self.nodes_max / nodes))

    def shard_bytes(self, nodes: int) -> int:
        """Bytes that each of so many nodes saves."""
        return -(-self.state_bytes // max(nodes, 1))
