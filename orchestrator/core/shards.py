"""What becomes of each rank's shard: staged, uploaded, failed. Pure; see `core.states`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import breaking, handovers, preflight, settling
from orchestrator.core.commit import Save, SaveState
from orchestrator.core.messages import Staged, Upload, Uploaded, UploadFailed
from orchestrator.core.turn import Turn
from orchestrator.core.wording import counted


def on_staged(turn: Turn, event: Staged) -> None:
    """A rank's shard is in its slot; when the step is complete, uploads start everywhere."""
    save = settling.save_of(turn, event.generation, event.step)
    if save is None or save.state is SaveState.ABANDONING or event.rank in save.staged:
        return
    _measure(turn, stage_seconds=event.seconds if not save.staged else max(event.seconds, _stage_seconds(turn)))
    save = save.changed(
        staged=save.staged.plus(event.rank),
        size_bytes=save.size_bytes + event.size_bytes,
        largest_bytes=max(save.largest_bytes, event.size_bytes),
    )
    turn.set_save(save)
    if save.complete and not save.absent:
        turn.set(shard_bytes=save.largest_bytes)
    if save.complete and save.state is SaveState.STAGING:
        save = save.changed(state=SaveState.UPLOADING, complete_at_seconds=turn.now)
        turn.set_save(save)
        size = f"{save.size_bytes / 2**20:.1f} MiB"
        turn.note(
            "staged", f"{counted(len(save.staged), 'rank holds', 'ranks hold')} {size} in memory", step=event.step
        )
        upload(turn, save)
        handovers.ask(turn)
    move_saves(turn)


def upload(turn: Turn, save: Save) -> None:
    """The step is complete: every node makes its shards durable."""
    absent = tuple(save.absent)
    for node in turn.gang_nodes():
        turn.do(
            Upload(
                node=node,
                generation=save.id.generation,
                step=save.id.step,
                world_size=save.world_size,
                absent=absent,
            )
        )


def _measure(turn: Turn, **values: float) -> None:
    turn.set(measured=replace(turn.job.measured, **values))


def _stage_seconds(turn: Turn) -> float:
    return turn.job.measured.stage_seconds or 0.0


def on_uploaded(turn: Turn, event: Uploaded) -> None:
    """A receipt is on the store."""
    save = settling.save_of(turn, event.generation, event.step)
    if event.seconds > 0 and event.size_bytes > 0:
        rate, known = event.size_bytes / event.seconds, turn.job.measured.store_bytes_per_second
        slowest = rate if known is None or save is None or not save.durable else min(rate, known)
        _measure(turn, store_bytes_per_second=slowest)
        if known is None:
            preflight.report(turn)
    if save is not None:
        turn.set_save(save.changed(durable=save.durable.plus(event.rank)))
        move_saves(turn)


def on_upload_failed(turn: Turn, event: UploadFailed) -> None:
    """A shard cannot be made durable: the step is abandoned, training goes on, the old checkpoint stays."""
    save = settling.save_of(turn, event.generation, event.step)
    if save is None:
        return
    turn.note("save failed", event.reason, node=event.node, step=event.step, rank=event.rank)
    if handovers.outlives_failure(turn, save, event):
        return
    save = turn.job.saves[save.id]
    if event.rank in save.absent:
        turn.set_save(save.changed(given_up=save.given_up.plus(event.rank)))
    elif save.state is not SaveState.ABANDONING:
        settling.store_failed(turn, event.reason)
        settling.abandon(turn, save, f"rank {event.rank} could not upload: {event.reason}")
    move_saves(turn)


def move_saves(turn: Turn) -> None:
    """Move every decided step on: leave when staging is over, commit when the receipts are there."""
    breaking.leave_if_over(turn)
    for key in list(turn.job.saves):
        save = turn.job.saves.get(key)
        if save is not None:
            settling.move_save(turn, save)
    breaking.leave_if_over(turn)
