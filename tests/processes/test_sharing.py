"""Ranks that restore together over gloo: read once, to the bit, and no rank waits for one that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.sharing_jobs import JOBS, STATE_BYTES

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
JOBS_SECONDS_MAX = 140

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank of each job found; one interpreter runs them all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.sharing_jobs", str(tmp_path_factory.mktemp("jobs"))],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout=JOBS_SECONDS_MAX,
        text=True,
        check=False,
    )
    return {name: json.loads(found) for name, found in (line.split(": ", 1) for line in done.stdout.splitlines())}


def test_all_jobs_end(answers: dict[str, Any]) -> None:
    """Each within its limit, which is far shorter than the group's time-out."""
    assert {name: type(found) for name, found in answers.items()} == dict.fromkeys(JOBS, list), answers


def test_every_kind_of_tensor_comes_to_the_bit(answers: dict[str, Any]) -> None:
    """All dtypes, 0-dim, empty, expanded, transposed, conjugate; in many buckets; no generator is touched."""
    assert answers["exact"] == [[], [], []]


def test_what_all_need_is_read_once(answers: dict[str, Any]) -> None:
    """And by each rank from the shard that it saved itself, which may be in its node's memory."""
    ranks = answers["once"]
    assert [rank["wrong"] for rank in ranks] == [[]] * 3
    assert sum(rank["bytes"] for rank in ranks) <= 1.05 * STATE_BYTES
    assert [rank["shards"] for rank in ranks] == [[f"shard-0000{rank}-of-00003.safetensors"] for rank in range(3)]


def test_at_another_world_size_too(answers: dict[str, Any]) -> None:
    """But for the blocks in which one portion ends and the next one begins."""
    ranks = answers["once-at-another-size"]
    assert [rank["wrong"] for rank in ranks] == [[]] * 3
    assert sum(rank["bytes"] for rank in ranks) <= STATE_BYTES + 3 * MIB
    assert max(rank["bytes"] for rank in ranks) <= STATE_BYTES / 3 + 2 * MIB


@pytest.mark.parametrize("job", ["other-plans", "other-numbering"])
def test_ranks_that_do_not_need_the_same_read_for_themselves(answers: dict[str, Any], job: str) -> None:
    for rank in answers[job]:
        assert rank["wrong"] == []
        assert rank["needed"] <= rank["bytes"] <= rank["needed"] + 2 * MIB


def test_a_group_of_other_ranks_is_not_used(answers: dict[str, Any]) -> None:
    assert answers["no-gang"] == [True] * 3


def test_of_sharded_tensors_each_rank_reads_its_part(answers: dict[str, Any]) -> None:
    """Columns of five rows of 4 MiB, cut in three; what is plain or replicated is read once by all together."""
    ranks = answers["sharded"]
    assert [rank["wrong"] for rank in ranks] == [[]] * 3
    pieces_bytes = 2 * MIB * 5  # each of five rows' parts begins and ends in a block of its own
    assert sum(rank["bytes"] for rank in ranks) <= STATE_BYTES + 3 * (pieces_bytes + 3 * MIB)
    assert sum(rank["bytes"] for rank in ranks) < 2 * STATE_BYTES, "as much as if all read everything"


@pytest.mark.parametrize(
    ("job", "failing", "error", "text"),
    [
        ("one-cannot-read", 1, "DigestError", "shard-00001-of-00003.safetensors: ends at byte"),
        ("one-has-no-index", 2, "FormatError", "index.json"),
        ("one-refuses", 0, "StateError", "model.small: the checkpoint has F32 [17]"),
        ("one-fails-at-length", 2, "ValueError", "ü" * 200),
    ],
)
def test_if_one_rank_fails_all_fail(answers: dict[str, Any], job: str, failing: int, error: str, text: str) -> None:
    """With its own error that one, with that rank's number and reason the others."""
    for rank, found in enumerate(answers[job]):
        assert text in found["text"]
        if rank == failing:
            assert found["error"] == error
        else:
            assert (found["error"], found["rank"]) == ("PeerError", failing)
            assert found["text"].startswith(f"rank {failing} could not restore: {error}: ")


def test_if_one_rank_cannot_read_the_nearest_all_read_the_store(answers: dict[str, Any]) -> None:
    """Together, as before: each its portion, and the header of its shard."""
    ranks = answers["one-cannot-read-the-nearest"]
    assert [rank["wrong"] for rank in ranks] == [[]] * 3
    assert sum(rank["bytes"] for rank in ranks) <= STATE_BYTES + 3 * 2 * MIB


@pytest.mark.parametrize("job", ["one-dies", "one-dies-while-it-sends"])
def test_a_rank_that_dies_is_no_unreadable_checkpoint(answers: dict[str, Any], job: str) -> None:
    """The others learn it at once, and do not try the next store without it."""
    first, dead, last = answers[job]
    assert dead is None
    assert first["error"] == last["error"] == "PeerLostError"
