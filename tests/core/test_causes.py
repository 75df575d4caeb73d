"""Why a worker is gone: what the exit status, the kernel's count and the traceback show, and nothing else."""

from __future__ import annotations

import pytest

from orchestrator.core.causes import Cause, cause_of, root_of
from orchestrator.core.messages import RankExited, Verdict
from orchestrator.core.policy import CONSEQUENCES


def exited(
    code: int | None, last_line: str = "", *, rank: int = 1, kills: int | None = None, by_us: bool = False
) -> RankExited:
    traceback = f"step 3\nTraceback (most recent call last):\n  File …\n{last_line}\n" if last_line else "step 3\n"
    return RankExited(
        node=f"node-{rank}",
        generation=1,
        rank=rank,
        exit_code=code,
        attached=True,
        verdict=Verdict.NONE,
        ended_by_us=by_us,
        evidence=traceback,
        memory_kills=kills,
    )


@pytest.mark.parametrize(
    ("event", "cause", "words"),
    [
        (exited(0), Cause.FINISHED, "exited with status 0"),
        (exited(-9, kills=1), Cause.OUT_OF_MEMORY, "signal 9: out of memory, its cgroup counted 1 kill"),
        (exited(-9, kills=0), Cause.KILLED, "signal 9: by somebody, its cgroup counted no kill for want of memory"),
        (exited(-9), Cause.KILLED, "signal 9: by whom cannot be seen"),
        (exited(-15), Cause.KILLED, "somebody sent SIGTERM"),
        (exited(-11), Cause.CRASHED, "signal 11"),
        (exited(None), Cause.UNKNOWN, "unknown status"),
        (exited(78), Cause.REFUSED, "status 78"),
        (
            exited(1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", kills=2),
            Cause.OUT_OF_MEMORY,
            "a process of its own was killed, its cgroup counted 2 kills",
        ),
        (
            exited(1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", kills=0),
            Cause.CRASHED,
            "status 1",
        ),
        (exited(1, "ValueError: no", kills=1), Cause.CRASHED, "status 1 (its cgroup counted 1 kill"),
        (exited(1, "MemoryError"), Cause.OUT_OF_MEMORY, "out of memory"),
        (exited(1, "OSError: [Errno 12] Cannot allocate memory"), Cause.OUT_OF_MEMORY, "out of memory"),
        (
            exited(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
            Cause.DEVICE_OUT_OF_MEMORY,
            "device out of memory",
        ),
        (
            exited(1, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
            Cause.DEVICE_FAILED,
            "device failed",
        ),
        (
            exited(1, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2395, remote process"),
            Cause.PEERS_LOST,
            "lost its peers",
        ),
        (exited(-6, "RuntimeError: [pair.cc:547] Connection closed by peer"), Cause.PEERS_LOST, "lost its peers"),
        (exited(1, "OSError: [Errno 28] No space left on device"), Cause.DISK_FULL, "disk full"),
        (exited(1, "ValueError: out of memory, said nobody"), Cause.CRASHED, "status 1"),
    ],
)
def test_what_can_be_shown(event: RankExited, cause: Cause, words: str) -> None:
    found = cause_of(event)
    assert found.cause is cause
    assert words in found.words


@pytest.mark.parametrize("code", [-9, -15])
def test_killed_on_a_node_that_was_announced_to_go(code: int) -> None:
    assert cause_of(exited(code, kills=0), going={"node-1"}).cause is Cause.PREEMPTED
    assert cause_of(exited(code, kills=0), going={"node-2"}).cause is Cause.KILLED
    assert cause_of(exited(1, "ValueError: x"), going={"node-1"}).cause is Cause.CRASHED, "a mistake stays one"


def test_the_first_that_failed_of_itself_brought_the_others_down() -> None:
    lost = exited(-6, "RuntimeError: Connection closed by peer", rank=0)
    killed = exited(-9, kills=1, rank=1)
    assert root_of([lost, killed]) is killed
    assert root_of([lost, exited(-9, rank=1, by_us=True)]) is lost
    assert root_of([exited(0), exited(-9, by_us=True)]) is None


def test_every_cause_has_a_consequence() -> None:
    assert CONSEQUENCES.keys() == set(Cause)
