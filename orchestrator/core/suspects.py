"""Checkpoints that a node could not read: a second node looks, while the gang trains from another one. Pure.

What both read differently from what was committed is set aside for ever (the second node writes that down). Where there
is no second node, the present run avoids the checkpoint, and nothing is condemned. See `core.states`.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.causes import last_words
from orchestrator.core.messages import ReadAgain, SecondReading, Verdict
from orchestrator.core.states import Phase, Suspect
from orchestrator.core.turn import Turn


def remember(turn: Turn) -> None:
    """Of a gang that is cleared: whether one of its workers could not read the base; the base is then avoided."""
    job = turn.job
    assert job.gang is not None
    unreadable = [
        event for event in job.ranks.known_exits() if event.verdict is Verdict.UNREADABLE and not event.ended_by_us
    ]
    if job.base is None or not unreadable:
        return
    turn.set(avoid=(*job.avoid, job.base))
    if any(suspect.checkpoint == job.base for suspect in job.suspects):
        return
    first = unreadable[0]
    words = f"rank {first.rank} on {first.node}: {last_words(first)}"
    turn.set(suspects=(*job.suspects, Suspect(checkpoint=job.base, node=first.node, words=words)))


def consider(turn: Turn) -> None:
    """In RUNNING: ask for a second reading of each suspect, one node after another."""
    job = turn.job
    if job.phase is not Phase.RUNNING or job.gang is None:
        return
    for suspect in job.suspects:
        if suspect.asked in job.nodes:
            return
        node = next((name for name in turn.gang_nodes() if name != suspect.node and name not in job.going), None)
        if node is not None:
            _put(turn, replace(suspect, asked=node))
            turn.do(
                ReadAgain(node=node, generation=job.gang.generation, checkpoint=suspect.checkpoint, first=suspect.words)
            )
            return


def on_second_reading(turn: Turn, event: SecondReading) -> None:
    """It has looked."""
    suspect = next((one for one in turn.job.suspects if one.checkpoint == event.checkpoint), None)
    if suspect is None or suspect.asked != event.node:
        return
    turn.set(suspects=tuple(one for one in turn.job.suspects if one != suspect))
    if event.mismatch is not None:
        reason = f"{event.checkpoint}: {event.node} reads the same as {suspect.node}: {event.mismatch}"
        turn.note("checkpoint quarantined", reason, node=event.node)
    elif event.problem is not None:
        reason = f"{event.checkpoint} was not read by {event.node}, and stays as it is: {event.problem}"
        turn.note("second reading failed", reason, node=event.node)
    else:
        reason = f"{event.checkpoint} is whole as {event.node} reads it: {suspect.node} reads something else"
        turn.note("checkpoint found whole", reason, node=suspect.node)


def _put(turn: Turn, suspect: Suspect) -> None:
    same = suspect.checkpoint
    turn.set(suspects=tuple(suspect if one.checkpoint == same else one for one in turn.job.suspects))
