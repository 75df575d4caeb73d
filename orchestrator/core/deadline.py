"""What to do with the time that a notice leaves: train on, save anew, finish or upload what is staged, or leave. Pure.

The newest state that can be safe in time is chosen. Only what the nodes that go hold alone is bound by their deadline;
all others finish later. Every answer carries its arithmetic. `core.courses` asks, and acts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

MARGIN_SECONDS = 1.0  # safety margin of every course, beside a share of what it takes
MARGIN_SHARE = 0.1
LEAVE_TIMES = 2  # all leave while this many times what the last save takes is left, and
LEAVE_RESERVE_SECONDS = 10.0  # so much beside it, and
LEAVE_SHARE = 1 / 3  # never less than this share of the notice
LONG_NOTICE_SECONDS = 30.0  # nobody trains on where the notice was not longer than this
IDLE_STEPS_MAX = 3  # without a boundary for longer than this many steps' time, something else than a step is running


class Course(StrEnum):
    """What the gang does with the time until the deadline."""

    TRAIN = "train"
    """Save at once and train on: there is ample time to leave later."""
    SAVE = "save"
    """Save at the next agreed step, and leave there."""
    WAIT = "wait"
    """Leave as soon as the step that is being staged is complete."""
    UPLOAD = "upload"
    """Leave at once: the newest complete step, which is not durable yet, is uploaded."""
    STAND = "stand"
    """Leave at once: the newest committed checkpoint stands."""
    END = "end"
    """No step is left before the job's last one: it ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What earlier saves and steps took; None before the first. Kept from one generation to the next."""

    step_seconds: float | None = None
    stage_seconds: float | None = None
    commit_seconds: float | None = None
    store_bytes_per_second: float | None = None
    """One rank's upload, all ranks uploading."""
    peer_bytes_per_second: float | None = None
    """One shard from one node's memory to another's."""
    restart_seconds: float | None = None
    """From the end of a gang to the next one's first step, where nothing else held it up."""


NOTHING_MEASURED = Measured()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A decided step that is not durable yet, and what nodes that go still hold of it."""

    step: int
    complete: bool
    steps_away: int
    """How many steps some rank has still to go to it."""
    size_bytes: int
    """The largest shard of a rank that goes which must still become durable; 0: nothing of theirs is needed."""
    uploading_seconds: float = 0.0
    """For how long it has been uploaded already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the choice depends on."""

    remaining_seconds: float | None
    """Until the first node is gone; None: nobody said."""
    trained: bool
    """Whether any rank has completed a step in this generation."""
    next_step: int | None
    """The nearest step that can still be agreed on; None: none is left."""
    steps_away: int
    idle_seconds: float
    """Since the last published boundary."""
    unique_bytes: int
    """The largest part of a rank that goes which no rank that stays holds as well."""
    pending: Sequence[Pending]
    """Newest first."""
    can_hand_over: bool
    """Whether a node that stays can read the memory of those that go."""
    standing: str
    """The newest committed checkpoint, in words."""
    measured: Measured
    notice_seconds: float | None = None
    """How long before its end that node was announced, if the gang may train on meanwhile; None: it may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The course, why, and the numbers. `step` is the one that will be saved or uploaded."""

    course: Course
    step: int | None
    hand_over: bool
    needed_seconds: float | None
    """What the course takes, with its margin; None where nothing has to be done in time."""
    reason: str

    @property
    def makes_it(self) -> bool:
        """Whether the newest state is saved, not an older one."""
        return self.course in (Course.TRAIN, Course.SAVE, Course.END)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to make a step durable, and what it takes in time."""

    course: Course
    step: int
    hand_over: bool
    parts: tuple[tuple[str, float], ...]
    all_measured: bool

    @property
    def seconds(self) -> float:
        """The time it takes, with the safety margin."""
        return sum(seconds for _, seconds in self.parts) * (1 + MARGIN_SHARE) + MARGIN_SECONDS

    @property
    def arithmetic(self) -> str:
        """The sum, written out."""
        parts = [*self.parts, ("margin", self.seconds - sum(seconds for _, seconds in self.parts))]
        terms = " + ".join(f"{seconds:.1f} s {name}" for name, seconds in parts)
        return f"{terms} = {self.seconds:.1f} s" + ("" if self.all_measured else " (not all of it measured yet)")

    @property
    def title(self) -> str:
        """What it does, in words."""
        what = {
            Course.SAVE: f"saving at step {self.step}",
            Course.WAIT: f"finishing step {self.step}",
            Course.UPLOAD: f"uploading step {self.step}",
        }[self.course]
        return what + (" with hand-over to a peer" if self.hand_over else "")


def choose(situation: Situation) -> Choice:
    """The first of the options, newest state first, that ends before the deadline with a margin."""
    remaining = situation.remaining_seconds
    later = _train_on(situation)
    if later is not None:
        return later
    if not situation.trained:
        reason = f"no step is done yet: {situation.standing} stands, nothing is lost"
        return Choice(course=Course.STAND, step=None, hand_over=False, needed_seconds=None, reason=reason)
    if situation.next_step is None:
        reason = "no step is left before the job's last one"
        return Choice(course=Course.END, step=None, hand_over=False, needed_seconds=None, reason=reason)
    left = "no deadline" if remaining is None else f"{max(remaining, 0.0):.1f} s are left"
    rejected: list[str] = []
    for option in _options(situation):
        told = f"{option.title}: {option.arithmetic}"
        if remaining is None or option.seconds <= remaining:
            too_long = f"; too long: {'; '.join(rejected)}" if rejected else ""
            return Choice(
                course=option.course,
                step=option.step,
                hand_over=option.hand_over,
                needed_seconds=option.seconds,
                reason=f"{told}; {left}{too_long}",
            )
        rejected.append(told)
    reason = f"{situation.standing} stands; {left}; too long: {'; '.join(rejected)}"
    return Choice(course=Course.STAND, step=None, hand_over=False, needed_seconds=None, reason=reason)


def _train_on(situation: Situation) -> Choice | None:
    """Leaving later, where the time that is left allows a save several times over; None if it does not."""
    remaining, notice = situation.remaining_seconds, situation.notice_seconds
    if remaining is None or notice is None or situation.next_step is None or notice <= LONG_NOTICE_SECONDS:
        return None
    save = to_store(Course.SAVE, _anew(situation, situation.next_step), situation.measured, situation.idle_seconds)
    if not save.all_measured:
        return None
    leave_seconds = max(LEAVE_TIMES * save.seconds + LEAVE_RESERVE_SECONDS, LEAVE_SHARE * notice)
    if remaining <= leave_seconds or notice <= leave_seconds + save.seconds:
        return None  # the first save must not be in the way of the last one
    reason = (
        f"{save.title} would take {save.arithmetic}; {remaining:.1f} s of {notice:.1f} s are left: "
        f"all train on, and leave when it is {leave_seconds:.1f} s"
    )
    return Choice(course=Course.TRAIN, step=None, hand_over=False, needed_seconds=save.seconds, reason=reason)


def _anew(situation: Situation, step: int) -> Pending:
    return Pending(step=step, complete=False, steps_away=situation.steps_away, size_bytes=situation.unique_bytes)


def _options(situation: Situation) -> Iterator[Option]:
    """All ways out, the newest state first."""
    assert situation.next_step is not None
    measured, idle_seconds = situation.measured, situation.idle_seconds
    anew = _anew(situation, situation.next_step)
    for pending in (anew, *situation.pending):
        late = Course.UPLOAD if pending.complete else Course.WAIT
        course = Course.SAVE if pending is anew else late
        yield to_store(course, pending, measured, idle_seconds)
        if situation.can_hand_over and pending.size_bytes and measured.store_bytes_per_second is not None:
            yield to_peer(course, pending, measured, idle_seconds)


def to_store(course: Course, pending: Pending, measured: Measured, idle_seconds: float = 0.0) -> Option:
    """The nodes that go upload their shards themselves, and the index is written."""
    way = _way(pending, measured, idle_seconds)
    upload = transfer_seconds(pending.size_bytes, measured.store_bytes_per_second) - pending.uploading_seconds
    return Option(
        course=course,
        step=pending.step,
        hand_over=False,
        parts=(*way, ("upload", max(upload, 0.0)), ("commit", measured.commit_seconds or 0.0)),
        all_measured=_is_known(way, measured.store_bytes_per_second, measured),
    )


def to_peer(course: Course, pending: Pending, measured: Measured, idle_seconds: float = 0.0) -> Option:
    """A node that stays copies the shards in time, and uploads them when it can."""
    way = _way(pending, measured, idle_seconds)
    return Option(
        course=course,
        step=pending.step,
        hand_over=True,
        parts=(*way, ("to a peer", transfer_seconds(pending.size_bytes, measured.peer_bytes_per_second))),
        all_measured=_is_known(way, measured.peer_bytes_per_second, measured),
    )


def _way(pending: Pending, measured: Measured, idle_seconds: float) -> tuple[tuple[str, float], ...]:
    """Until the step is complete."""
    if pending.complete:
        return ()
    reach = reach_seconds(pending.steps_away, measured.step_seconds or 1.0, idle_seconds)
    return (("to the step", reach), ("staging", measured.stage_seconds or 0.0))


def _is_known(way: tuple[tuple[str, float], ...], bytes_per_second: float | None, measured: Measured) -> bool:
    return bytes_per_second is not None and (not way or None not in (measured.step_seconds, measured.stage_seconds))


def reach_seconds(steps_away: int, step_seconds: float, idle_seconds: float) -> float:
    """Time until every rank is at a step.

    Where no boundary has come for much longer than a step takes, the script does something else (it evaluates, it
    compiles): nobody knows for how long, so as long again is expected as it has taken so far.
    """
    seconds = steps_away * step_seconds
    if steps_away and idle_seconds > IDLE_STEPS_MAX * step_seconds + MARGIN_SECONDS:
        seconds += idle_seconds
    return seconds


def transfer_seconds(size_bytes: int, bytes_per_second: float | None) -> float:
    """Time for a transfer; 0 where the link is not measured yet, so that the first save is tried."""
    return size_bytes / bytes_per_second if bytes_per_second else 0.0


def needs_hand_over(
    *, size_bytes: int, uploading_seconds: float, remaining_seconds: float | None, measured: Measured
) -> bool:
    """Whether a staged shard would not get to the store before its node is gone, but would get to a peer."""
    if remaining_seconds is None or remaining_seconds <= 0 or measured.store_bytes_per_second is None:
        return False
    upload = transfer_seconds(size_bytes, measured.store_bytes_per_second) - uploading_seconds
    if upload * (1 + MARGIN_SHARE) + MARGIN_SECONDS <= remaining_seconds:
        return False
    return transfer_seconds(size_bytes, measured.peer_bytes_per_second) <= remaining_seconds
