"""Small made-up traces and a scenario, for the tests of the simulation."""

from __future__ import annotations

import random
from typing import Any

from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.traces import Trace, parse_trace


def trace_of(*lines: str) -> Trace:
    """A trace from lines `seconds,add|remove,node`."""
    fields = [line.split(",") for line in lines]
    return parse_trace(
        "\n".join(f"{round(float(at) * 1000)},{kind},{node}" for at, kind, node in fields), name="made up"
    )


def scenario(**changes: Any) -> Scenario:
    """One step per second on all nodes, a save every 100 steps that stalls 0.5 s, 10 s to restart, no notice."""
    values: dict[str, Any] = {
        "nodes_min": 1,
        "nodes_max": 2,
        "step_seconds": 1.0,
        "save_every_steps": 100,
        "state_bytes": 1_000_000_000,
        "bandwidth_bytes_per_second": 1e9,
        "stall_seconds": 0.5,
        "restart_seconds": 10.0,
        "notice_seconds": 0.0,
        "replacement_seconds": 0.0,
    }
    return Scenario(**(values | changes))


def random_trace(seed: int, *, nodes: int = 6, seconds: int = 3600) -> Trace:
    """Nodes that come and go at random, several at a time now and then."""
    draw = random.Random(seed)
    live: list[str] = []
    lines: list[str] = []
    at, named = 0.0, 0
    while at < seconds:
        for _ in range(draw.choice([1, 1, 2, 3])):
            if live and (len(live) >= nodes or draw.random() < 0.5):
                lines.append(f"{at},remove,{live.pop(draw.randrange(len(live)))}")
            else:
                named += 1
                live.append(f"n{named}")
                lines.append(f"{at},add,n{named}")
        at += draw.choice([0.0, 0.1, 3.0, 15.0, 60.0, 240.0])
    return trace_of(*lines, f"{max(at, seconds)},add,last")
