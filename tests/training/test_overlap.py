"""When staging may overlap with training: a decision with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.training.overlap import PROOFS, Choice, Owners, Way, choose


def chosen(owners: Owners | None = None, **changed: Any) -> Choice:
    given = {"proofs": PROOFS, "damage": None, "goes_on": True, "copied_later": True} | changed
    return choose(owners or Owners(), **given)


def test_it_overlaps_once_it_has_proved_itself() -> None:
    assert [chosen(proofs=proofs).way for proofs in range(4)] == [Way.PROVE, Way.PROVE, Way.OVERLAP, Way.OVERLAP]


@pytest.mark.parametrize("changed", [{"goes_on": False}, {"copied_later": False}])
@pytest.mark.parametrize("proofs", [0, PROOFS])
def test_where_it_gains_nothing_it_is_not_done_this_time(changed: dict[str, Any], proofs: int) -> None:
    choice = chosen(proofs=proofs, **changed)
    assert choice.way is Way.BLOCKING
    assert not choice.lasts


@pytest.mark.parametrize(
    ("owners", "reason"),
    [
        (
            Owners(untrained=("model.a", "model.b", "model.c", "model.d")),
            "model.a, model.b, model.c and 1 more: trained",
        ),
        (Owners(holders=("ema",)), "ema: holds tensors"),
        (Owners(unhooked=("optimizer",)), "optimizer: its step does not call"),
        (Owners(devices=("cuda:0", "cuda:1")), "are on cuda:0, cuda:1"),
        (Owners(devices=("mps:0",)), "are on mps:0"),
    ],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_other_owners_of_the_state_mean_blocking_for_good(owners: Owners, reason: str, *, goes_on: bool) -> None:
    choice = chosen(owners, proofs=0, goes_on=goes_on)
    assert choice.way is Way.BLOCKING
    assert choice.lasts
    assert reason in choice.reason


def test_one_cuda_device_may_overlap() -> None:
    assert chosen(Owners(devices=("cuda:3",))).way is Way.OVERLAP


def test_damage_means_blocking_for_good_whatever_was_proved() -> None:
    choice = chosen(proofs=50, damage="model.weight was written")
    assert (choice.way, choice.lasts, choice.reason) == (Way.BLOCKING, True, "model.weight was written")
