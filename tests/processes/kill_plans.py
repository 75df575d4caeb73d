"""Which process is killed when: drawn from a seed and a number, and what came of it. Values only.

Used by `tests.processes.killed_job` and `tests.processes.kill_times`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from tests.processes.observation import Moment

PAUSE_SECONDS_MAX = 1.5


class Victim(StrEnum):
    """What is killed."""

    WORKER = "worker"
    AGENT = "agent"
    NODE = "node"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One kill."""

    number: int
    victim: Victim
    aim: Moment | None
    """The moment of a save to hit; None: any instant."""
    part: float
    """How far into that moment, 0 to 1; how long after the kill before, in parts of `any_seconds`."""
    any_seconds: float
    settle: bool
    """Wait until the job has committed a checkpoint after the last kill; else it may be hit while it restarts."""
    which: int
    """Which of the victims there are."""
    pause_seconds: float
    """How long nobody starts a killed supervisor again."""


def draw(seed: int, number: int) -> Plan:
    """The kill with that number: each run of 16 holds every victim with every aim."""
    pairs = [(victim, aim) for victim in Victim for aim in (Moment.STAGING, Moment.UPLOADING, Moment.COMMITTING, None)]
    random.Random(f"{seed}-{number // len(pairs)}").shuffle(pairs)
    victim, aim = pairs[number % len(pairs)]
    numbers = random.Random(f"{seed}-kill-{number}")
    settle = aim is not None or numbers.random() < 0.5
    return Plan(
        number=number,
        victim=victim,
        aim=aim,
        part=numbers.random(),
        any_seconds=1.0 if settle else 4.0,
        settle=settle,
        which=numbers.randrange(2),
        pause_seconds=numbers.choice((0.0, numbers.uniform(0, PAUSE_SECONDS_MAX))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What came of a plan."""

    plan: Plan
    landed: Moment
    after: Moment
    """What was seen once the victim was dead: another moment than `landed` if the kill fell on a border."""
    generation: int
    newest: str | None
    seconds: float
    problems: tuple[str, ...]

    def line(self) -> str:
        """One line for people."""
        plan = self.plan
        aim = f"{plan.part:.2f} of {plan.aim}" if plan.aim else f"{plan.part * plan.any_seconds:.2f} s after"
        verdict = "; ".join(self.problems) or (
            f"{self.newest} is bit-identical" if self.newest else "nothing was committed yet"
        )
        border = "" if self.after is self.landed else f" → {self.after}"
        return (
            f"{plan.number:4d}  {plan.victim:<10} aimed {aim:<20} hit {self.landed + border:<24} "
            f"g{self.generation:<3} {self.seconds:5.1f} s  {verdict}"
        )
