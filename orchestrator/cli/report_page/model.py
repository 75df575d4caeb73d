"""What a report holds: plain values, gathered elsewhere.

What it is not: it computes nothing and knows nothing of HTML.
Who uses it: the verbs that fill it in, and every other module of the page.

Times are seconds since the job started. Steps count completed optimizer steps. A value that cannot be drawn
(not finite, or absurdly large) appears in the tables and is left out of the drawings.
"""

from __future__ import annotations

from dataclasses import dataclass

SAMPLES_FACT = "samples lost or repeated"
"""Label of the fact that `headline` quotes; without that fact the headline says nothing about samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """One thing that happened, with the reason that was recorded for it; `node` is None for the whole job."""

    time_seconds: float
    kind: str
    reason: str
    node: str | None
    generation: int | None
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpan:
    """The life of one generation; without `first_step_seconds` it never completed a step."""

    generation: int
    world_size: int
    nodes: tuple[str, ...]
    start_seconds: float
    first_step_seconds: float | None
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The loss of one step as one generation computed it; a step done twice gives two points."""

    step: int
    loss: float
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """What one notice or failure cost. `steps_lost` were computed and had to be computed again."""

    cause: str
    node: str | None
    at_seconds: float
    notice_to_commit_seconds: float | None
    failure_to_first_step_seconds: float | None
    steps_lost: int
    seconds_lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that had to hold, whether it did, and the evidence in words."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the page shows. `reference_losses` are those of an uninterrupted run; none if there was none."""

    title: str
    subtitle: str
    events: tuple[TimelineEvent, ...]
    generations: tuple[GenerationSpan, ...]
    losses: tuple[LossPoint, ...]
    reference_losses: tuple[LossPoint, ...]
    interruptions: tuple[Interruption, ...]
    checks: tuple[Check, ...]
    facts: tuple[tuple[str, str], ...]
