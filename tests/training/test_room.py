"""What a rank stages where more nodes are absent at once than room was reserved for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from torch import nn

from orchestrator.errors import RefusedError
from tests.checkpoint.sharded import process_group
from tests.training import states
from tests.training.test_sharded_parts import sharded_state, trained


def no_more_than(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def limited(handle: int, offset: int, size: int) -> None:
        if size > size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)


def test_the_loss_of_any_one_node_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        state = states.state_of(states.launch(tmp_path, rank=rank, world_size=4), model=nn.Linear(300, 300))
        with monkeypatch.context() as patch:
            no_more_than(state.stager.plan(), patch)
            assert all(states.stage(state, 0, step, absent=(step,)) for step in range(4) if step != rank)


@pytest.mark.parametrize(("shape", "local"), [((4, 2), 2), ((2, 4), 2), ((6, 2), 3), ((6, 4), 6)])
def test_the_loss_of_any_one_node_fits_where_the_state_is_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], local: int
) -> None:
    """Also where some nodes have more of a part's holders than the first and the last one."""
    world = shape[0] * shape[1]
    for rank in range(world):
        with process_group(rank, world) as mesh_of, monkeypatch.context() as patch:
            place = states.launch(tmp_path, rank=rank, world_size=world, local_world_size=local)
            state = states.state_of(place, **trained(sharded_state(mesh_of(shape), rank), 3.0))
            no_more_than(state.stager.plan(), patch)
            nodes = [tuple(range(first, first + local)) for first in range(0, world, local)]
            assert all(states.stage(state, 0, step, absent=absent) for step, absent in enumerate(nodes))


def test_a_step_without_room_for_two_lost_nodes_is_given_up_and_the_next_one_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the job for ever: a worker that is refused says that starting again is of no use."""
    state = states.state_of(states.launch(tmp_path, world_size=4), model=nn.Linear(300, 300))
    no_more_than(state.stager.plan(), monkeypatch)
    before = states.stage(state, 0, 1)
    assert states.stage(state, 0, 2, absent=(1, 2)) == 0
    assert "step 2 is not saved" in capsys.readouterr().err
    assert states.stage(state, 0, 3) == before
    assert states.stage(state, 0, 4, absent=(1,)) > before


def test_where_room_is_short_for_everybodys_part_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = states.state_of(states.launch(tmp_path, world_size=4), model=nn.Linear(300, 300))
    no_more_than(1000, monkeypatch)
    with pytest.raises(RefusedError, match="staging slot"):
        states.stage(state, 0, 1)
