"""`attach` and `Run`: the training script's side. Restores on entry; heartbeats, saves and leaves at step boundaries.

Not here: decisions (the supervisor's) and uploads (the agent's). A script that is started without a supervisor gets
one on its own machine (`training.attached`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from orchestrator.certificates import client_context
from orchestrator.checkpoint.launch import LAUNCH_VARIABLE, Launch
from orchestrator.checkpoint.layout import Scope
from orchestrator.checkpoint.near import NearStore
from orchestrator.checkpoint.slots import ControlBlock, LeaveOutcome, WorkerPhase
from orchestrator.errors import (
    ConfigError,
    FencedError,
    FormatError,
    NotFoundError,
    PeerError,
    Preempted,
    RefusedError,
    StateError,
    SupervisorError,
)
from orchestrator.health import loss as losses
from orchestrator.health import stacks
from orchestrator.preemption.process import record_signals
from orchestrator.storage.base import ObjectStore
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.peers import PeerStore
from orchestrator.training import attached, loaders
from orchestrator.training.boundary import Boundary, Passing
from orchestrator.training.parts import ModelPart, ObjectPart, Part, make_part, name_parameters
from orchestrator.training.sampler import ResumableSampler
from orchestrator.training.saved_state import SavedState

LEAVE_SECONDS_MAX = 3600.0
REFORM_WAIT_SECONDS = 60.0
PAUSE_SECONDS = 3600.0
_attached_pid = 0


def attach(
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    data: Any = None,
    store: str | None = None,
    job: str | None = None,
    save_every: int = 1000,
    keep_last: int = 0,
    keep_every: int = 0,
    notices: str = "none",
    accept: tuple[str, ...] = (),
    **others: Any,
) -> Run:
    """Make this training script survive: restore the newest committed checkpoint, if there is one.

    Call it once, when everything is built (the model sharded or in DDP, the process group initialised). `model` may be
    plain, in DDP, in `fully_shard`, or of DTensors, and need not be what it was when it was saved. All ranks call it at
    the same place: what all of them need may be read once, and broadcast over their process group. `data` is best an
    `orchestrator.ResumableSampler`; `others` are further objects with `state_dict` and `load_state_dict`, saved under
    their keyword. `accept` names parts of the resume gate that may differ from the checkpoint: "lr", "data", "rng".

    The others matter only when nobody has started the script under `orchestrator run`: `store`, a folder or URL
    (default ./checkpoints); `job`, a name (default: the script's); `save_every` steps; `keep_last` newest checkpoints
    are kept, and the first one of every `keep_every` steps (0: all are kept); `notices`, what is watched beside
    signals: "auto", or a list like "aws,file:/run/leave".

    Raises ConfigError, StateError (naming the path of what cannot be saved or restored), GateError, StoreError;
    PeerError if it was another rank that could not restore.
    """
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, **others}
    _only_once()
    asked = attached.Supervision(
        store=store or "checkpoints",
        job=job or Path(sys.argv[0]).stem or "script",
        save_every=save_every,
        keep_last=keep_last,
        keep_every=keep_every,
        notices=notices,
    )
    problems = tuple(asked.problems())
    if problems:
        raise ConfigError(*problems)
    launch_path = os.environ.get(LAUNCH_VARIABLE)
    launch = attached.start(asked) if launch_path is None else Launch.read(Path(launch_path))
    return Run(launch, {name: value for name, value in given.items() if value is not None}, accept)


def _only_once() -> None:
    """Two readers of one control block would both stage. Raises ConfigError."""
    global _attached_pid  # noqa: PLW0603 (once for each process is the point)
    if _attached_pid == os.getpid():
        raise ConfigError("orchestrator.attach() was called before in this process: call it once, with everything")
    _attached_pid = os.getpid()


class Run:
    """One worker's share of a job, from attach to the script's end."""

    def __init__(self, launch: Launch, given: dict[str, Any], accept: tuple[str, ...]) -> None:
        self._launch = launch
        self._control = ControlBlock.open(launch.control_path)
        self._control.set_phase(WorkerPhase.RESTORING)
        record_signals(self._control.note_signal)
        self._main_thread = stacks.offer(self._control.stacks_path)
        loaders.shield_workers()
        self._sampler = _sampler(given)
        self._begun = False
        self._losses = losses.History()
        self.step = 0
        self._refuse_world_size()
        agent = PeerStore(launch.objects_url, launch.token, tls=client_context(launch.certificate))
        try:
            self._state = SavedState(launch, self._parts(given), self._sampler, _optimizers(given), accept)
            self.step = self._restore(agent)
            if self._state.restored:
                self._plan()
        except RefusedError:
            self._control.set_phase(WorkerPhase.REFUSED)
            raise
        except (FormatError, NotFoundError):
            self._control.set_phase(WorkerPhase.UNREADABLE)
            raise
        except PeerError:
            if not launch.attached:
                time.sleep(REFORM_WAIT_SECONDS)  # how the other rank ends is what counts; it ends this one, too
            raise
        finally:
            agent.close()
        self._boundary = Boundary(self._control, launch, self._state.stager, self._alone)
        _warn_about_buckets(given.get("model"), launch)
        if self._state.restored:
            self._say(f"resumed from step {self.step} (checkpoint {launch.base})")

    def _restore(self, agent: ObjectStore) -> int:
        """Load the base from the nearest memory; if anything is wrong with what is there, from the store."""
        launch = self._launch
        store = agent if launch.store_folder is None else FolderStore(launch.store_folder)
        near = NearStore(store, agent, launch.held, held_elsewhere=launch.held_elsewhere)
        return self._state.restore(near, store)

    def _plan(self) -> None:
        """Reserve the slots, and publish what saving needs."""
        slot_bytes = self._state.stager.plan(self.step)
        self._control.set_unique_bytes(self._state.stager.unique_bytes)
        self._control.set_twins(self._state.stager.twins)
        self._control.set_slot_bytes(slot_bytes)

    def _refuse_world_size(self) -> None:
        """If the global batch cannot be shared by this many ranks: say so, and wait to be formed anew with fewer."""
        sampler = self._sampler
        if sampler is None or self.world_size in sampler.allowed_world_sizes():
            return
        self._tell(None)
        if not self._launch.attached:
            time.sleep(REFORM_WAIT_SECONDS)
        sampler.set_world(self.rank, self.world_size)

    def _parts(self, given: dict[str, Any]) -> list[Part]:
        models = [ModelPart(name, value) for name, value in given.items() if isinstance(value, torch.nn.Module)]

        def part(name: str, value: Any) -> Part:
            if name == "data" and not isinstance(value, ResumableSampler):
                return ObjectPart(name, value, Scope.RANK, prefix=f"rank.{self._launch.rank:05d}.")
            return make_part(name, value, lambda: name_parameters(models))

        return [part(name, value) for name, value in given.items()]

    # -- what the script may ask -------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks in this generation."""
        return self._launch.world_size

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._launch.rank

    @property
    def generation(self) -> int:
        """The generation's number: rises with every re-forming of the gang."""
        return self._launch.generation

    @property
    def resumed(self) -> bool:
        """Whether a checkpoint was restored."""
        return self._state.restored

    def save(self) -> None:
        """Ask for a checkpoint at the next step that all ranks can agree on; returns at once.

        What is being staged beside the training is complete when this returns: from then until the next boundary the
        script may write its parameters as it likes.
        """
        self._state.stager.join()
        self._control.ask_save()

    @contextmanager
    def pause(self, seconds: float = PAUSE_SECONDS) -> Iterator[None]:
        """Around what is no training step (an evaluation, loading): for so long it is not taken for a hang.

        Without it a pause that is much longer than all before may be; see docs/protocol.md, Hangs. Where pauses are
        nested, the one that ends last counts.
        """
        if not 0 < seconds < 1e9:
            raise ConfigError(f"run.pause(seconds={seconds!r}): a positive number of seconds")
        outer_ns = self._control.pause_until_ns
        self._control.pause(max(outer_ns, time.monotonic_ns() + int(seconds * 1e9)))
        try:
            yield
        finally:
            self._control.pause(outer_ns)

    def observe(self, *, loss: float | torch.Tensor) -> None:
        """Tell this step's loss, so that the job notices when it is not finite, or far above what it was before.

        `loss` is a number or a tensor of one element, read with float(): one on a device is waited for, so call this
        where the script wants the number anyway, every 10 steps for instance, and in the turn of the loop that computed
        it. Costs a few microseconds. Nothing follows but an event (`loss trouble`, `loss well`), a line of `status` and
        a metric: training is never changed, stopped or taken back. Each rank may tell its own loss; what counts as a
        spike is in docs/protocol.md, The loss. Raises ConfigError if it is no number.
        """
        self._losses, finding = losses.judge(self._losses, step=self.step, value=_number(loss))
        if finding is not None:
            self._control.tell_loss(finding)
            self._say(finding.reason)

    # -- the loop ----------------------------------------------------------------------------------------

    def steps(self, until: int) -> Iterator[int]:
        """Yield the number of completed steps, from where the job is, until `until` steps are completed.

        One turn of the loop is one optimizer step. The state after step `until` is saved before the loop ends.
        """
        if type(until) is not int:
            raise ConfigError(f"run.steps(until={until!r}): the number of steps is a whole number")
        if self.step > until:
            self._control.set_phase(WorkerPhase.REFUSED)
            raise StateError("until", f"the checkpoint is of step {self.step}, beyond the last step {until}")
        self._begin(until)
        try:
            while self.step < until:
                yield self.step
                self._complete(self.step + 1, final=self.step + 1 == until)
        finally:  # the script may have left the loop: then it takes no step any more
            self._control.pause(time.monotonic_ns() + int(PAUSE_SECONDS * 1e9))
            self._state.stager.join()
        self._control.set_phase(WorkerPhase.FINISHED)

    def after_step(self, step: int, until: int | None = None) -> None:
        """For loops that are not ours: call it after each optimizer step with the number of completed steps.

        `until` is the loop's last step, if it is known: the state after it is saved before this returns. Without it,
        what was trained since the newest checkpoint is not saved when the script ends.
        Raises ConfigError if `step` does not follow the last one: start the loop at `run.step`.
        """
        if not self._begun:
            self._begin(until)
        if step != self.step + 1:
            raise ConfigError(f"after_step({step}) follows step {self.step}: begin the loop at run.step")
        self._complete(step, final=step == until)
        if step == until:
            self._control.set_phase(WorkerPhase.FINISHED)

    def _begin(self, until: int | None) -> None:
        if self._begun:
            raise ConfigError("run.steps() may be called once; run.steps() and run.after_step() cannot be mixed")
        self._begun = True
        self._state.restore_rng()
        self._tell(until)
        self._boundary.start()

    def _tell(self, until: int | None) -> None:
        """Publish what the supervisor has to know of this worker; from then on it counts as attached."""
        sampler = self._sampler
        allowed = None if sampler is None else list(sampler.allowed_world_sizes())
        told = {"step": self.step, "until": until, "allowed_world_sizes": allowed, "main_thread": self._main_thread}
        self._control.set_info(told)
        self._control.set_phase(WorkerPhase.RUNNING)

    def _complete(self, step: int, *, final: bool) -> None:
        """Everything that belongs to a boundary; the position of the data counts completed steps."""
        if self._sampler is not None:
            self._sampler.advance()
        self.step = step
        try:
            if not self._state.stager.planned:
                self._plan()
            passing = self._boundary.at(step, final=final)
        except RefusedError:
            self._control.set_phase(WorkerPhase.REFUSED)
            raise
        if passing is Passing.LEAVE:
            self._leave()
        elif final and self._launch.attached:
            self._await_last_commit(passing)
        elif self._launch.attached and self._superseded():
            self._state.stager.join()
            raise FencedError(f"another run has taken over the job: this one stops after step {step}")
        elif self._launch.attached and self._control.signal and self._alone():
            self._state.stager.join()
            raise Preempted(f"left on a signal at step {step}, without a new checkpoint: the supervisor has ended")

    def _await_last_commit(self, passing: Passing) -> None:
        """Attached mode: the script's exit status shall tell the truth about its last step, so wait for its index."""
        until = time.monotonic() + LEAVE_SECONDS_MAX
        self._control.set_phase(WorkerPhase.WAITING)  # no step is in the way of the upload any more
        while passing is Passing.STAGED and time.monotonic() < until:
            alone = self._alone()  # asked first: what the agent said before it ended still counts
            outcome, of_step = self._control.outcome()
            if of_step == self.step and outcome is LeaveOutcome.COMMITTED:
                return
            if alone or (of_step == self.step and outcome is LeaveOutcome.ABANDONED):
                break
            time.sleep(0.01)
        if self._superseded():
            raise FencedError(f"another run has taken over the job: this one's last step {self.step} is not saved")
        raise SupervisorError(
            f"the state after the last step {self.step} was not saved; the checkpoint before it stays"
        )

    def _say(self, text: str) -> None:
        """One line for the person at an unsupervised script; under `orchestrator run` the events say it."""
        if self._launch.attached and self.rank == 0:
            sys.stderr.write(f"orchestrator: {text}\n")

    def _alone(self) -> bool:
        """Attached mode: whether nobody is there any more to save and to say when to leave."""
        if not self._launch.attached:
            return False
        released = self._control.outcome()[0] in (LeaveOutcome.RELEASED, LeaveOutcome.SUPERSEDED)
        return released or not Path(f"/proc/{self._launch.agent_pid}").exists()

    def _superseded(self) -> bool:
        """Attached mode: whether the job is another run's by now, so that nothing trained here is saved any more."""
        return self._control.outcome()[0] is LeaveOutcome.SUPERSEDED

    def _leave(self) -> None:
        """The step is staged. Under `orchestrator run` the agent ends this process; attached, wait for the commit."""
        self._control.set_phase(WorkerPhase.LEFT)
        until = time.monotonic() + LEAVE_SECONDS_MAX
        while time.monotonic() < until:
            alone = self._alone()
            outcome, of_step = self._control.outcome()
            if outcome is LeaveOutcome.SUPERSEDED:
                raise FencedError(f"another run has taken over the job: left at step {self.step}")
            settled = outcome is not LeaveOutcome.NONE and of_step == self.step  # not an earlier step's
            if self._launch.attached and (settled or alone):
                words = {LeaveOutcome.COMMITTED: "committed", LeaveOutcome.ABANDONED: "not committed"}
                word = words.get(outcome, "left to the agent") if settled else "left to the agent"
                self._say(f"left at step {self.step}: its checkpoint is {word}; the same command goes on from there")
                raise Preempted(f"left at step {self.step}: its checkpoint is {word}")
            time.sleep(0.01)
        raise Preempted(f"left at step {self.step}: nobody ended this process within {LEAVE_SECONDS_MAX:.0f} s")


def _sampler(given: dict[str, Any]) -> ResumableSampler | None:
    """The sampler whose position counts the steps. Raises ConfigError unless it is the only one, given as `data`."""
    names = [name for name, value in given.items() if isinstance(value, ResumableSampler)]
    if names not in ([], ["data"]):
        raise ConfigError(f"give the one ResumableSampler as data=…, not as {', '.join(names)}: it follows the steps")
    return given["data"] if names else None


def _optimizers(given: dict[str, Any]) -> list[torch.optim.Optimizer]:
    return [value for value in given.values() if isinstance(value, torch.optim.Optimizer)]


def _number(loss: Any) -> float:
    """Raises ConfigError; what a device says of its own failure goes through."""
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1 and not loss.is_complex():
            return float(loss.item())
        given = f"a tensor of shape {tuple(loss.shape)} and type {loss.dtype}"
    else:
        with suppress(TypeError, ValueError, OverflowError):
            if not isinstance(loss, (str, bytes, bytearray)):
                return float(loss)
        given = f"{loss!r:.100}"
    raise ConfigError(f"run.observe(loss=…) takes a number or a tensor of one element, not {given}")


def _warn_about_buckets(model: Any, launch: Launch) -> None:
    """DDP rebuilds its buckets after the first backward pass, so sums are added in another order after a resume."""
    if not isinstance(model, DistributedDataParallel) or launch.world_size <= 2 or launch.rank != 0:
        return
    if not model.find_unused_parameters:
        sys.stderr.write(
            "orchestrator: above 2 ranks DDP resumes bit-identically only with find_unused_parameters=True; "
            "without it a resumed run agrees to rounding\n"
        )
