"""The rhythm of periodic saves, and what follows from workers' exits. Pure; each answer carries its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.messages import RankExited, Verdict
from orchestrator.errors import ExitCode

GROWTH_SHARE = 0.25  # of the node-seconds that a restart costs, that new nodes wait before all restart for them
ARM_AHEAD_SECONDS = 1.0  # a periodic save is armed this long before its step, so that no rank has to wait for it


def periodic_step(*, last: int, every: int, until: int | None) -> int | None:
    """The next periodic save after step `last`: a multiple of `every`, or the job's last step; None if none is left."""
    step = (last // every + 1) * every if every > 0 else None
    if until is not None and last < until:
        return until if step is None else min(step, until)
    return step if until is None else None


def arm_now(*, step: int, highest: int, step_seconds: float, margin: int) -> bool:
    """Whether it is time to propose a periodic save at `step`; never later than a proposal's margin allows."""
    ahead = max(2 * margin, math.ceil(ARM_AHEAD_SECONDS / max(step_seconds, 1e-4)))
    return step - highest <= ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Whether to let waiting nodes in now, and the arithmetic."""

    worth_it: bool
    reason: str


def worth_growing(
    *,
    waited_node_seconds: float,
    members: int,
    restart_seconds: float,
    trained_seconds: float,
    rest_seconds: float | None,
) -> Growth:
    """Whether new nodes have waited for a share of what a restart of all members costs (rent or buy).

    Never before the gang has trained for that share of a restart's time, so that not all of it goes into growing, and
    never when the rest of the job is not longer than a restart. `rest_seconds` None: there is no last step.
    """
    price = GROWTH_SHARE * members * restart_seconds
    reason = f"they have waited {waited_node_seconds:.0f} node-seconds, {price:.0f} are the price of a restart"
    soon_over = rest_seconds is not None and rest_seconds <= restart_seconds
    worth_it = waited_node_seconds >= price and trained_seconds >= GROWTH_SHARE * restart_seconds and not soon_over
    return Growth(worth_it=worth_it, reason=reason)


_RANK = re.compile(r"\[rank\d+\]: ?")
"""What torch puts before each line of a traceback, once there is a process group."""
LINES_AFTER_TRACEBACK_MAX = 5
"""How a process that has failed falls down (a library's threads, say) takes no more lines than these."""
KILLED = (-9, -15)
"""Exit codes of workers that somebody ended by SIGKILL or SIGTERM: no mistake of the script's, even before attach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterExit:
    """What follows from the workers' exits: restart, or stop with a status."""

    restart: bool
    counts_as_failure: bool
    exit_code: int
    reason: str


def after_exits(exits: Sequence[RankExited], *, ever_attached: bool, fault: str | None) -> AfterExit:
    """Judge a broken generation by the exits that were not our doing, in order of arrival.

    `fault` is what was wrong with it where its workers were ended for that. How often a failure may be followed by
    another start is `core.ladder`'s affair.
    """
    own = [event for event in exits if not event.ended_by_us]
    refused = next((event for event in own if event.verdict == Verdict.REFUSED), None)
    if refused is not None:
        return _stop(ExitCode.NEVER_RESTART, f"rank {refused.rank} refused to go on: {last_words(refused)}")
    if fault is not None:  # how the others fell down then is its consequence
        return AfterExit(restart=True, counts_as_failure=True, exit_code=0, reason=fault)
    failed = next((event for event in own if event.exit_code != 0), None)
    if failed is None:
        return AfterExit(restart=True, counts_as_failure=False, exit_code=0, reason="no worker failed by itself")
    what = f"rank {failed.rank} {describe_exit(failed.exit_code)}"
    if not ever_attached and failed.exit_code not in KILLED:
        code = failed.exit_code if failed.exit_code is not None and failed.exit_code > 0 else int(ExitCode.FAILED)
        return _stop(code, f"{what} before it called orchestrator.attach() and run.steps(): {last_words(failed)}")
    return AfterExit(restart=True, counts_as_failure=True, exit_code=0, reason=f"{what}: {last_words(failed)}")


def describe_exit(exit_code: int | None) -> str:
    """An exit status in words."""
    if exit_code is None:
        return "ended with an unknown status"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"


def _stop(exit_code: int, reason: str) -> AfterExit:
    return AfterExit(restart=False, counts_as_failure=True, exit_code=int(exit_code), reason=reason)


def last_words(event: RankExited) -> str:
    """The last line that it printed; the exception's, if what comes after it is only how the process fell down."""
    lines = [_RANK.sub("", line) for line in event.evidence.splitlines() if _RANK.sub("", line).strip()]
    if not lines:
        return "it printed nothing"
    for start in reversed(range(len(lines))):
        if lines[start].startswith("Traceback (most recent call last)"):
            said = next((place for place in range(start + 1, len(lines)) if not lines[place][0].isspace()), None)
            if said is not None and len(lines) - said <= LINES_AFTER_TRACEBACK_MAX:
                return lines[said].strip()
            break
    return lines[-1].strip()
