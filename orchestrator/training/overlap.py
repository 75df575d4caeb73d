"""Whether staging may overlap with training: a pure decision with its reason. No torch here.

Overlap rests on one belief: nobody writes parameters and optimizer state between a step boundary and the next step of
a torch optimizer. Where the state has other owners it is not tried; elsewhere a generation's first saves prove it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PROOFS = 2
"""Saves of each generation that compare what was staged with what was there at the boundary."""
NAMES_TOLD_MAX = 3


class Way(StrEnum):
    """How a step is staged."""

    BLOCKING = "blocking"
    """All is copied at the boundary."""
    PROVE = "prove"
    """Overlapping; used only if the digests are those of the boundary."""
    OVERLAP = "overlap"
    """Overlapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Who writes the state, as far as it can be told beforehand."""

    untrained: tuple[str, ...] = ()
    """Parameters that require a gradient and belong to no torch optimizer that attach was given."""
    holders: tuple[str, ...] = ()
    """Other objects that hold floating-point tensors."""
    unhooked: tuple[str, ...] = ()
    """Optimizers whose steps do not call torch's hooks."""
    devices: tuple[str, ...] = ()
    """Where parameters and optimizer state live, but for the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How to stage, and why."""

    way: Way
    reason: str
    lasts: bool = False
    """Whether it holds for the rest of the run."""


def choose(owners: Owners, *, proofs: int, damage: str | None, goes_on: bool, copied_later: bool) -> Choice:
    """How to stage a step. `damage`: what an earlier overlap came to; `goes_on`: training continues at once."""
    if damage is not None:
        return Choice(way=Way.BLOCKING, reason=damage, lasts=True)
    problem = _problem(owners)
    if problem is not None:
        return Choice(way=Way.BLOCKING, reason=problem, lasts=True)
    if not goes_on:
        return Choice(way=Way.BLOCKING, reason="there is nothing to overlap with")
    if not copied_later:
        return Choice(way=Way.BLOCKING, reason="this rank writes nothing that could be copied later")
    if proofs < PROOFS:
        return Choice(way=Way.PROVE, reason=f"{proofs} of {PROOFS} proofs were given")
    return Choice(way=Way.OVERLAP, reason=f"it has proved itself in {proofs} saves")


def _problem(owners: Owners) -> str | None:
    if owners.untrained:
        return f"{_listed(owners.untrained)}: trained by nothing that attach was given as a torch optimizer"
    if owners.holders:
        return f"{_listed(owners.holders)}: holds tensors and may write others outside of an optimizer's step"
    if owners.unhooked:
        return f"{_listed(owners.unhooked)}: its step does not call torch's optimizer hooks"
    if len(owners.devices) > 1 or any(device.partition(":")[0] != "cuda" for device in owners.devices):
        return (
            f"parameters and optimizer state are on {_listed(owners.devices)}: one CUDA device or the host can overlap"
        )
    return None


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMES_TOLD_MAX} more" if len(names) > NAMES_TOLD_MAX else ""
    return ", ".join(names[:NAMES_TOLD_MAX]) + more
