"""F88: what an agent does while its supervisor is away, and what it tells the next one. Simulated time, one thread."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest

from orchestrator.agent.node import ALONE_AFTER_SECONDS, ALONE_RETRY_SECONDS
from orchestrator.checkpoint.format import Index
from orchestrator.checkpoint.save import read_index
from orchestrator.checkpoint.slots import WorkerPhase
from orchestrator.core.messages import (
    Decide,
    EndWorkers,
    IndexDecided,
    Mode,
    NodeJoined,
    NoticeKind,
    NoticeReceived,
    Prepare,
    Progress,
    RankAttached,
    RankExited,
    Settled,
    Staged,
    StepDecided,
    TakeBack,
    Upload,
    Uploaded,
    UploadFailed,
    WatcherReported,
)
from tests.agent.simulated_agent import GENERATION, NODE, Scene
from tests.checkpoint.shards import checkpoint_id

LOST_AFTER_SECONDS = 60.0


def notice(notice_id: str = "n", kind: NoticeKind = NoticeKind.PREEMPT, seconds: float | None = 30.0) -> NoticeReceived:
    return NoticeReceived(node=NODE, source="a test", kind=kind, remaining_seconds=seconds, notice_id=notice_id)


def ordered(scene: Scene, step: int) -> Upload:
    return Upload(node=NODE, generation=GENERATION, step=step, world_size=scene.world_size, absent=())


async def running(scene: Scene) -> None:
    """Launched and attached."""
    scene.launch()
    await asyncio.sleep(1)
    scene.attach()
    await asyncio.sleep(0.5)


async def next_one(scene: Scene) -> NodeJoined:
    """A supervisor is started again; how the node introduces itself."""
    supervisor = scene.next_supervisor()
    await asyncio.sleep(3)
    assert isinstance(supervisor.heard[0], NodeJoined), "nothing that was meant for the old one comes before"
    return supervisor.heard[0]


# ------------------------------------------------------------------------------------------------------- alone


def test_a_decided_step_waits_for_the_supervisor_for_a_while(tmp_path: Path) -> None:
    scene = Scene(tmp_path, world_size=2)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        scene.stage(0, 10)
        await asyncio.sleep(ALONE_AFTER_SECONDS - 0.5)
        assert scene.receipts() == []
        await asyncio.sleep(0.5 + 2 * ALONE_RETRY_SECONDS)
        assert len(scene.receipts()) == 1
        assert read_index(scene.store, checkpoint_id(GENERATION, 10)) is None, "rank 1 has no receipt"

    scene.play(story)


def test_after_a_notice_there_is_no_time_to_wait(tmp_path: Path) -> None:
    """F19: what is decided and staged on a node that will go is durable soon, whoever else is gone."""
    scene = Scene(tmp_path, world_size=2)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        scene.stage(0, 10)
        scene.agent.reports.notice(notice())
        await asyncio.sleep(ALONE_RETRY_SECONDS + 0.5)
        assert len(scene.receipts()) == 1

    scene.play(story)


def test_a_hint_is_no_reason_for_haste(tmp_path: Path) -> None:
    scene = Scene(tmp_path, world_size=2)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        scene.stage(0, 10)
        scene.agent.reports.notice(notice(kind=NoticeKind.HINT, seconds=None))
        await asyncio.sleep(ALONE_RETRY_SECONDS + 0.5)
        assert scene.receipts() == []
        await asyncio.sleep(ALONE_AFTER_SECONDS)
        assert len(scene.receipts()) == 1

    scene.play(story)


def test_a_step_that_was_never_decided_is_not_uploaded(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.supervisor.say(Prepare(node=NODE, generation=GENERATION, ballot=1, step=10))
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        scene.stage(0, 10)
        await asyncio.sleep(20)
        assert scene.receipts() == []

    scene.play(story)


@pytest.mark.parametrize("asked", [True, False], ids=["ordered before", "alone"])
def test_an_upload_that_fails_is_tried_again_after_a_pause(tmp_path: Path, asked: bool) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        if asked:
            scene.supervisor.say(ordered(scene, 10))
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        await asyncio.sleep(ALONE_AFTER_SECONDS + 1)
        scene.store.failures = 3
        scene.stage(0, 10)
        await asyncio.sleep(10)
        assert isinstance(read_index(scene.store, checkpoint_id(GENERATION, 10)), Index)
        tried = scene.store.tried_seconds
        pauses = [after - before for before, after in itertools.pairwise(tried[:4])]
        assert all(seconds >= 0.9 * ALONE_RETRY_SECONDS for seconds in pauses), pauses
        assert len(tried) <= 3 + 3, "three failures, then shard, receipt and index"
        await next_one(scene)
        assert scene.supervisor.kinds(UploadFailed) == [], "it has become durable since"

    scene.play(story)


def test_the_last_receipt_of_all_ranks_commits(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ranks=2, world_size=2)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        scene.stage(0, 10)
        await asyncio.sleep(10)
        assert read_index(scene.store, checkpoint_id(GENERATION, 10)) is None
        scene.stage(1, 10)
        await asyncio.sleep(3)
        assert isinstance(read_index(scene.store, checkpoint_id(GENERATION, 10)), Index)

    scene.play(story)


def test_absent_ranks_are_not_presumed_to_have_nothing(tmp_path: Path) -> None:
    """Their node may still be uploading what they alone hold: only the supervisor, or the next opener, does without."""
    scene = Scene(tmp_path, ranks=1, world_size=2)

    async def story() -> None:
        await running(scene)
        scene.agree(10, mode=Mode.LEAVE, absent=(1,))
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        scene.stage(0, 10, absent=(1,))
        await asyncio.sleep(20)
        assert len(scene.receipts()) == 1
        assert read_index(scene.store, checkpoint_id(GENERATION, 10)) is None

    scene.play(story)


@pytest.mark.parametrize(("phase", "ends"), [(WorkerPhase.LEFT, True), (WorkerPhase.RUNNING, False)])
def test_workers_that_only_wait_to_be_ended_do_not_keep_a_lost_agent(
    tmp_path: Path, phase: WorkerPhase, ends: bool
) -> None:
    """After a leave nobody trains any more: without a supervisor the node would be kept for ever, and paid for."""
    scene = Scene(tmp_path, lost_after_seconds=LOST_AFTER_SECONDS)

    async def story() -> None:
        await running(scene)
        scene.kill_supervisor()
        scene.runtime.launched[0].control.set_phase(phase)
        await asyncio.sleep(LOST_AFTER_SECONDS - 10)
        assert scene.reason is None
        await asyncio.sleep(20)
        assert (scene.reason is not None) is ends
        assert scene.runtime.launched[0].exited is ends

    scene.play(story)


# ------------------------------------------------------------------------------------------ the next supervisor


def test_the_next_supervisor_hears_what_runs_and_then_everything_once_more(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ranks=2, world_size=2)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        await asyncio.sleep(0.5)
        scene.stage(0, 10)
        scene.runtime.launched[1].control.publish(9, 0)
        scene.kill_supervisor()
        await asyncio.sleep(10)
        joined = await next_one(scene)
        returned = joined.returned
        assert returned is not None
        assert (returned.generation, returned.first_rank, returned.count) == (GENERATION, 0, 2)
        assert (returned.ballot, returned.proposed_step, returned.ended) == (1, None, False)
        assert returned.decided == (StepDecided(step=10, mode=Mode.STAY, absent=(), staged=(0,)),)
        assert [(known.rank, known.step) for known in returned.progress] == [(0, 10), (1, 9)]
        supervisor = scene.supervisor
        before = len(supervisor.heard)
        supervisor.say(TakeBack(node=NODE, generation=GENERATION))
        await asyncio.sleep(1)
        again = supervisor.heard[before:]
        assert [event.rank for event in again if isinstance(event, RankAttached)] == [0, 1]
        assert [(event.rank, event.step) for event in again if isinstance(event, Staged)] == [(0, 10)]
        assert [(event.rank, event.step) for event in again if isinstance(event, Uploaded)] == [(0, 10)]
        progress = [known for event in again if isinstance(event, Progress) for known in event.ranks]
        assert [(known.rank, known.step) for known in progress] == [(0, 10), (1, 9)]
        assert len(scene.receipts()) == 1

    scene.play(story)


def test_exits_are_told_again_after_everything_else(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.kill_supervisor()
        scene.runtime.launched[0].control.publish(17, 0)
        scene.runtime.exit(scene.runtime.launched[0], 1)
        await asyncio.sleep(1)
        joined = await next_one(scene)
        assert joined.returned is not None
        assert not joined.returned.ended
        assert scene.supervisor.kinds(RankExited) == []
        scene.supervisor.say(TakeBack(node=NODE, generation=GENERATION))
        await asyncio.sleep(1)
        assert isinstance(scene.supervisor.heard[-1], RankExited)
        assert scene.supervisor.kinds(Progress)[-1].ranks[0].step == 17

    scene.play(story)


def test_workers_that_an_earlier_supervisor_has_ended_are_told_as_such(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.supervisor.say(EndWorkers(node=NODE, generation=GENERATION, reason="a test"))
        await asyncio.sleep(1)
        scene.kill_supervisor()
        joined = await next_one(scene)
        assert joined.returned is not None
        assert joined.returned.ended

    scene.play(story)


def test_a_settled_step_is_told_as_committed_and_its_slot_goes_by_the_rules(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        scene.supervisor.say(ordered(scene, 10))
        await asyncio.sleep(0.5)
        scene.stage(0, 10)
        await asyncio.sleep(1)
        scene.supervisor.say(Settled(node=NODE, generation=GENERATION, step=10, committed=True))
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        joined = await next_one(scene)
        assert joined.returned is not None
        assert (joined.returned.committed_step, joined.returned.decided) == (10, ())
        control = scene.runtime.launched[0].control
        assert control.holds_any, "the newest complete step stays in memory"
        scene.supervisor.say(TakeBack(node=NODE, generation=GENERATION))
        scene.agree(20, ballot=2)
        scene.supervisor.say(ordered(scene, 20))
        await asyncio.sleep(0.5)
        assert not control.holds_any

    scene.play(story)


def test_a_notice_is_told_again_with_what_is_left_of_its_time(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await asyncio.sleep(1)
        scene.agent.reports.notice(notice("one", seconds=30.0))
        scene.agent.reports.notice(notice("without a deadline", seconds=None))
        scene.agent.reports.notice(notice("withdrawn"))
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        scene.agent.reports.notice(notice("withdrawn", NoticeKind.CANCEL))
        await asyncio.sleep(10)
        joined = await next_one(scene)
        assert joined.returned is None
        told = {event.notice_id: event.remaining_seconds for event in scene.supervisor.kinds(NoticeReceived)}
        assert set(told) == {"one", "without a deadline"}
        assert told["without a deadline"] is None
        assert 16.5 < (told["one"] or 0.0) < 20.0

    scene.play(story)


def test_what_cannot_be_seen_is_told_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await asyncio.sleep(1)
        for source, problem in (("aws", "status 401"), ("file", "no file"), ("file", None)):
            scene.agent.reports.watcher(WatcherReported(node=NODE, source=source, problem=problem))
        await asyncio.sleep(0.5)
        assert len(scene.supervisor.kinds(WatcherReported)) == 3
        scene.kill_supervisor()
        await next_one(scene)
        assert [report.source for report in scene.supervisor.kinds(WatcherReported)] == ["aws"]

    scene.play(story)


def test_what_the_old_supervisor_still_had_in_the_queue_is_forgotten(tmp_path: Path) -> None:
    """It died while this node waited for its old workers' end: the next one goes by the gang that it was told of."""
    scene = Scene(tmp_path)
    scene.runtime.dies_after_seconds = 4.0

    async def story() -> None:
        await running(scene)
        scene.launch(GENERATION + 1)  # first the old worker has to end, which takes its time
        scene.supervisor.say(Prepare(node=NODE, generation=GENERATION + 1, ballot=1, step=10))
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        joined = await next_one(scene)
        assert joined.returned is not None
        assert joined.returned.generation == GENERATION
        assert joined.returned.ended
        await asyncio.sleep(10)
        assert len(scene.runtime.launched) == 1
        scene.supervisor.say(TakeBack(node=NODE, generation=GENERATION))
        await asyncio.sleep(1)
        assert [event.generation for event in scene.supervisor.kinds(RankExited)] == [GENERATION, GENERATION]

    scene.play(story)


def test_a_decision_that_is_repeated_reaches_a_rank_that_waits(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.supervisor.say(Prepare(node=NODE, generation=GENERATION, ballot=3, step=10))
        await asyncio.sleep(0.5)
        scene.kill_supervisor()
        joined = await next_one(scene)
        assert joined.returned is not None
        assert (joined.returned.ballot, joined.returned.proposed_step, joined.returned.decided) == (3, 10, ())
        scene.supervisor.say(TakeBack(node=NODE, generation=GENERATION))
        repeated = Decide(
            node=NODE, generation=GENERATION, ballot=3, step=10, mode=Mode.STAY, absent=(), remaining_seconds=None
        )
        scene.supervisor.say(repeated)
        await asyncio.sleep(0.5)
        assert scene.runtime.launched[0].control.read_record().decided_step == 10

    scene.play(story)


def test_the_same_supervisor_hears_everything_once_after_a_broken_connection(tmp_path: Path) -> None:
    """A partition is no new supervisor: nothing is introduced again, nothing is lost, nothing comes twice."""
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        scene.agree(10)
        await asyncio.sleep(0.5)
        scene.network.cut(NODE, 8.0)
        scene.stage(0, 10)
        await asyncio.sleep(20)
        heard = scene.supervisor
        assert len(heard.kinds(NodeJoined)) == 1
        assert [(event.rank, event.step) for event in heard.kinds(Staged)] == [(0, 10)]
        assert [(event.rank, event.step) for event in heard.kinds(Uploaded)] == [(0, 10)]
        assert heard.kinds(IndexDecided) == []
        assert heard.lost == []

    scene.play(story)


def test_workers_start_in_a_staging_folder_that_was_tidied_away(tmp_path: Path) -> None:
    """Whatever cleans /dev/shm (the end of a login session does) costs what was staged, and not the job."""
    scene = Scene(tmp_path)

    async def story() -> None:
        await running(scene)
        shutil.rmtree(scene.folder / "staging")
        scene.launch(GENERATION + 1)
        await asyncio.sleep(2)
        assert len(scene.runtime.launched) == 2
        assert [event.evidence for event in scene.supervisor.kinds(RankExited) if not event.ended_by_us] == []

    scene.play(story)
