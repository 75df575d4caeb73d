"""A rank that always comes last to the boundary: said once, and nothing is done about it. Pure; see `core.states`.

With collectives in every step all ranks have the same step time, whoever is slow, so a step's time says nothing about a
rank. What shows without a hook in the script is only what a rank does *after* the step's last collective: logging, an
evaluation, an optimizer that shares its processor. One step at a time is watched, from the first rank that publishes
it to the last one; times are the supervisor's, so what is shorter than an agent's look is not seen.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.messages import Progress
from orchestrator.core.ranks import NO_RACE, Race
from orchestrator.core.states import Phase
from orchestrator.core.turn import Turn

STRAGGLER = "straggler"
STEPS_LAST = 20
LATE_SHARE = 0.2  # of a step
LATE_SECONDS_MIN = 0.25  # an agent looks twenty times a second, and its word takes time


def on_progress(turn: Turn, event: Progress, *, first: bool) -> None:
    """Some ranks of one node have published steps, the first to get there or not; the job knows of it already."""
    job = turn.job
    race = job.race
    if job.phase is not Phase.RUNNING or job.ranks.world_size == 1:
        return
    if not race.running:
        if not first or job.awaiting_first_step:
            return
        race = replace(race, step=job.highest_step, since_seconds=turn.now, running=job.ranks.everyone)
    arrived = [known.rank for known in event.ranks if known.step >= race.step and known.rank in race.running]
    running = race.running
    for rank in arrived:
        running = running.minus(rank)
    race = replace(race, running=running)
    if arrived and not running:
        race = _over(turn, race, arrived)
    if race is not job.race:
        turn.set(race=race)


def _over(turn: Turn, race: Race, last: list[int]) -> Race:
    """The last ranks have come. If they are several at once, nobody stands out."""
    job = turn.job
    late_seconds = turn.now - race.since_seconds
    step_seconds = job.step_seconds
    if late_seconds < max(LATE_SECONDS_MIN, LATE_SHARE * step_seconds) or len(last) > 1:
        return replace(race, last=None, times=0, late_seconds=0.0)
    rank = last[0]
    again = rank == race.last
    times, total = (race.times + 1, race.late_seconds + late_seconds) if again else (1, late_seconds)
    race = replace(race, last=rank, times=times, late_seconds=total)
    if times != STEPS_LAST or rank in race.told:
        return race
    assert job.gang is not None
    mean_seconds = total / times
    turn.note(
        STRAGGLER,
        f"it came last to {times} steps in a row, {mean_seconds:.1f} s after the first "
        f"({100 * mean_seconds / step_seconds:.0f} % of a step): what it does after the last collective holds all up",
        node=job.gang.node_of(rank),
        rank=rank,
        step=race.step,
        facts=turn.facts(late_seconds=mean_seconds, step_seconds=step_seconds),
    )
    return replace(race, told=race.told.plus(rank))


def begin(turn: Turn) -> None:
    """Another gang: other ranks."""
    turn.set(race=NO_RACE)
