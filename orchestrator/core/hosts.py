"""What nodes say of the hosts under them: told, and what condemns a node is remembered. Pure; see `core.states`.

A condemned node trains on. Its tensors are not wanted in a save where others hold them (`proposing`), and `forming`
gives it back before the next generation, if the job can do without it.
"""

from __future__ import annotations

from orchestrator.core.messages import HostReported
from orchestrator.core.turn import Turn

HOST_TROUBLE = "host trouble"
HOST_WELL = "host well"


def on_reported(turn: Turn, event: HostReported) -> None:
    """Told once by its node, and once more when it is over."""
    node = turn.job.nodes.get(event.node)
    if node is None:
        return
    if event.problem is None:
        _condemn(turn, event, None)
        turn.note(HOST_WELL, f"{event.what} is well again", node=event.node)
        return
    condemns = event.condemns and not turn.job.spec.attached  # nobody else could run an attached script's ranks
    _condemn(turn, event, event.problem if condemns else None)
    then = "; the node is not used for another generation if there are enough others" if condemns else ""
    facts = turn.facts(condemns=True) if condemns else {}
    turn.note(HOST_TROUBLE, event.problem + then, node=event.node, facts=facts)


def _condemn(turn: Turn, event: HostReported, why: str | None) -> None:
    before = turn.job.nodes[event.node].condemned
    condemned = {what: words for what, words in before.items() if what != event.what}
    if why is not None:
        condemned[event.what] = why
    if condemned != before:
        turn.set_node(event.node, condemned=condemned)
