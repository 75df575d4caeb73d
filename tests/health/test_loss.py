"""What is said of a rank's losses: nothing of noise, or of what slowly rises; at once what is no number, and spikes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

import pytest

from orchestrator.health.loss import VALUES, VALUES_MIN, WELL_VALUES, Finding, History, LossState, judge

LENGTH = 10_000
SEEDS = range(5)
Noise = Callable[[random.Random, float], float]


def found(values: Iterable[float], history: History | None = None) -> list[Finding]:
    """One value a step; everything that is told."""
    history = history or History()
    told = []
    for step, value in enumerate(values):
        history, finding = judge(history, step=step, value=value)
        told += [] if finding is None else [finding]
    return told


def trained(values: Iterable[float]) -> History:
    """What is remembered after so many values."""
    history = History()
    for step, value in enumerate(values):
        history, _ = judge(history, step=step, value=value)
    return history


def falling(draw: random.Random, noise: Noise, length: int = LENGTH) -> Iterator[float]:
    """A loss that falls from 10 to 2, with noise and a random walk on top."""
    walk = 0.0
    for step in range(length):
        walk = 0.99 * walk + draw.gauss(0, 0.01)
        yield noise(draw, level_at(step) + walk)


def level_at(step: int) -> float:
    """Without noise."""
    return 2 + 8 * math.exp(-step / 1500)


NOISES: dict[str, Noise] = {
    "little": lambda draw, level: draw.gauss(level, 0.01 * level),
    "some": lambda draw, level: draw.gauss(level, 0.1 * level),
    "much": lambda draw, level: draw.gauss(level, 0.4 * level),
    "skewed": lambda draw, level: level * draw.lognormvariate(0, 0.15),
    "rounded": lambda draw, level: round(draw.gauss(level, 0.02 * level), 1),
}


# ------------------------------------------------------------------------------------------------ false alarms


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_spike(noise: str, seed: int) -> None:
    assert found(falling(random.Random(seed), NOISES[noise])) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_walk_is_no_spike(seed: int) -> None:
    draw, level = random.Random(seed), 5.0
    values = []
    for _ in range(LENGTH):
        level = abs(level + draw.gauss(0, 0.05)) + 0.001
        values.append(draw.gauss(level, 0.1))
    assert found(value + 5 for value in values) == []


def test_the_first_values_are_no_measure() -> None:
    draw = random.Random(1)
    assert found(draw.lognormvariate(0, 3) for _ in range(VALUES_MIN)) == []


@pytest.mark.parametrize("noise", ["little", "some"])
def test_a_slow_rise_is_no_spike(noise: str) -> None:
    """A hundredfold in ten thousand values, straight or by a thousandth of itself each time."""
    draw = random.Random(2)
    assert found(NOISES[noise](draw, 1 + step / 100) for step in range(LENGTH)) == []
    assert found(NOISES[noise](draw, 1.0005**step) for step in range(LENGTH)) == []


@pytest.mark.parametrize("level", [2.5, 0.0, -3.0, 1e-30, 1e300])
def test_a_constant_loss_gives_no_alarm_for_a_trifle(level: float) -> None:
    values = [level] * 300
    values[200] = math.nextafter(level, math.inf)
    values[250] = level + 0.1 * abs(level)
    assert found(values) == []


def test_where_zero_is_usual_nothing_says_how_much_is_much() -> None:
    assert found(float(step % 7 == 0) for step in range(1000)) == []


# ------------------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", ["little", "some", "skewed", "rounded"])
def test_a_threefold_loss_is_a_spike(noise: str, seed: int) -> None:
    draw = random.Random(seed)
    values = list(falling(draw, NOISES[noise], 4000))
    at = draw.randrange(VALUES_MIN + 500, 3900)
    values[at] = 3 * level_at(at)
    begun, over = found(values)
    assert (begun.state, begun.step, begun.value, begun.good_step) == (LossState.SPIKE, at, values[at], at - 1)
    assert begun.usual is not None
    assert begun.usual == pytest.approx(level_at(at), rel=0.15)
    assert (over.state, over.step) == (LossState.WELL, at + WELL_VALUES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("before", [0, 1, 500])
def test_what_is_no_finite_number_is_told_at_once_and_once(value: float, before: int) -> None:
    draw = random.Random(3)
    (finding,) = found([*(draw.gauss(2, 0.1) for _ in range(before)), *[value] * 1000])
    assert (finding.state, finding.step) == (LossState.NOT_FINITE, before)
    assert finding.good_step == (before - 1 if before else None)
    assert (finding.usual is None) is (before == 0)
    assert finding.reason.startswith(f"the loss is {value} at step {before}")


def test_a_constant_loss_that_jumps_is_told() -> None:
    begun, over = found([2.0] * 100 + [6.0] + [2.0] * 100)
    assert (begun.step, over.step) == (100, 100 + WELL_VALUES)
    assert begun.reason == "the loss is 6 at step 100; 2 is usual, and more than 3 is a spike"
    assert over.reason == "the loss is 2 at step 105; 2 is usual"


def test_losses_below_zero_are_judged_as_well() -> None:
    draw = random.Random(4)
    values = [draw.gauss(-50, 1) for _ in range(3000)]
    assert found(values) == []
    values[1000] = -20.0
    assert [(finding.state, finding.step) for finding in found(values)] == [
        (LossState.SPIKE, 1000),
        (LossState.WELL, 1000 + WELL_VALUES),
    ]
    values[1000] = -80.0  # better than ever
    assert found(values) == []


def test_a_spike_that_ends_in_nan_is_told_again_and_one_after_nan_is_not() -> None:
    usual = [2.0, 2.1, 1.9] * 50
    told = found([*usual, 9.0, 8.0, math.nan, math.nan, 9.0, math.inf, *usual])
    at = len(usual)
    assert [(finding.state, finding.step, finding.good_step) for finding in told] == [
        (LossState.SPIKE, at, at - 1),
        (LossState.NOT_FINITE, at + 2, at - 1),
        (LossState.WELL, at + 5 + WELL_VALUES, at - 1),
    ]


def test_one_good_value_between_bad_ones_ends_nothing() -> None:
    usual = [2.0, 2.1, 1.9] * 50
    assert len(found([*usual, *[math.nan, 2.0, 2.0, 2.0, 2.0] * 20])) == 1


def test_what_was_good_last_moves_on_only_while_all_is_well() -> None:
    values = [2.0] * 100 + [math.nan] + [2.0] * 20 + [math.nan]
    assert [finding.good_step for finding in found(values)] == [99, 99, 120]


def test_a_loss_that_jumps_and_stays_is_usual_in_the_end() -> None:
    draw = random.Random(5)
    values = [draw.gauss(2, 0.1) for _ in range(500)] + [draw.gauss(8, 0.1) for _ in range(500)]
    begun, over = found(values)
    assert (begun.state, begun.step) == (LossState.SPIKE, 500)
    assert over.state is LossState.WELL
    assert VALUES // 2 <= over.step - begun.step <= VALUES
    assert over.usual == pytest.approx(8, rel=0.1)


# ------------------------------------------------------------------------------------------------ the judgement


def test_it_is_pure() -> None:
    history = trained([2.0, 2.5, 3.0] * 60)
    copy = History(values=history.values, ordered=history.ordered, good_step=history.good_step)
    assert judge(history, step=500, value=99.0) == judge(history, step=500, value=99.0)
    assert history == copy


def test_it_remembers_the_last_values_and_no_more(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.choice([draw.random(), 0.5, -0.0, 0.0, math.nan]) for _ in range(1000)]
    history = trained(values)
    finite = [value for value in values if math.isfinite(value)]
    assert list(history.values) == finite[-VALUES:]
    assert list(history.ordered) == sorted(history.values)
