"""Models, optimizers and schedules go on after a restore exactly as if nothing had happened.

Every case trains a few steps, saves through a real slot, upload and commit, restores into objects that were built
anew with other numbers, and trains on beside the first ones: parameters, optimizer state, learning rates and losses
must be the same bits.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel

from orchestrator.checkpoint.layout import Scope, holder_sets, plan_shard
from orchestrator.checkpoint.opened import open_in
from orchestrator.checkpoint.reader import read_committed
from orchestrator.errors import ConfigError, FormatError, RefusedError, StateError
from orchestrator.storage.filesystem import FolderStore
from orchestrator.storage.memory import MemoryStore
from orchestrator.training.parts import Captured, ModelPart, OptimizerPart, make_part, name_parameters
from tests.checkpoint.shards import bits
from tests.training import states
from tests.training.states import restore_one, save_one, state_of

STEPS_BEFORE, STEPS_AFTER = 4, 4


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own, the last layer without weight decay."""
    parameters = list(model.parameters())
    return [{"params": parameters[:-2]}, {"params": parameters[-2:], "weight_decay": 0.0, "lr": 0.005}]


def train_step(model: nn.Module, optimizer: optim.Optimizer, schedule: Any = None) -> float:
    """One step on random data, from the global generators; the loss."""
    inputs = torch.randn(5, 6) + np.random.random() + random.random()
    inputs = inputs.to(next(model.parameters()).dtype)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        torch.autograd.backward(loss)
        return float(loss.detach())

    loss = float(optimizer.step(closure))
    if isinstance(schedule, schedules.ReduceLROnPlateau):
        schedule.step(loss)
    elif schedule is not None:
        schedule.step()
    return loss


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Everything in a nested state, tensors and floats as bytes."""
    if isinstance(value, torch.Tensor):
        return {path: (str(value.dtype), tuple(value.shape), bits(value))}
    if isinstance(value, float):
        return {path: struct.pack("<d", value)}
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()} or {path: {}}
    if isinstance(value, list | tuple):
        found = {k: v for place, item in enumerate(value) for k, v in flat(item, f"{path}.{place}").items()}
        return {f"{path}:": type(value).__name__} | found
    return {path: (type(value).__name__, value)}


def everything(model: nn.Module, optimizer: optim.Optimizer, schedule: Any = None) -> dict[str, Any]:
    """The whole state as torch itself tells it."""
    found = flat(model.state_dict(), "model") | flat(optimizer.state_dict(), "optimizer")
    return found | (flat(schedule.state_dict(), "schedule") if schedule is not None else {})


Built = tuple[nn.Module, optim.Optimizer, Any]


def assert_goes_on_exactly(build: Callable[[], Built], store: MemoryStore, folder: Path) -> None:
    """Interrupted and resumed, against uninterrupted."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model, optimizer, schedule = build()
    for _ in range(STEPS_BEFORE):
        train_step(model, optimizer, schedule)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    checkpoint = save_one(store, folder, STEPS_BEFORE, **given)
    losses = [train_step(model, optimizer, schedule) for _ in range(STEPS_AFTER)]
    expected = everything(model, optimizer, schedule)

    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    model, optimizer, schedule = build()
    given = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    restore_one(store, folder, checkpoint, **given)
    assert [train_step(model, optimizer, schedule) for _ in range(STEPS_AFTER)] == losses
    found = everything(model, optimizer, schedule)
    assert list(found) == list(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


# -------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "SGD": lambda model: optim.SGD(groups(model), lr=0.05),
    "SGD momentum": lambda model: optim.SGD(groups(model), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD one by one": lambda model: optim.SGD(groups(model), lr=0.05, momentum=0.9, foreach=False),
    "Adam": lambda model: optim.Adam(groups(model), lr=0.01, weight_decay=0.01),
    "Adam amsgrad": lambda model: optim.Adam(groups(model), lr=0.01, amsgrad=True),
    "Adam maximize": lambda model: optim.Adam(groups(model), lr=0.001, maximize=True, foreach=True),
    "Adam fused": lambda model: optim.Adam(groups(model), lr=0.01, fused=True),
    "Adam with a tensor as rate": lambda model: optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda model: optim.AdamW(groups(model), lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "AdamW amsgrad": lambda model: optim.AdamW(groups(model), lr=0.01, amsgrad=True, foreach=True),
    "AdamW fused": lambda model: optim.AdamW(groups(model), lr=0.01, fused=True),
    "NAdam": lambda model: optim.NAdam(groups(model), lr=0.01, decoupled_weight_decay=True),
    "RAdam": lambda model: optim.RAdam(groups(model), lr=0.01),
    "Adamax": lambda model: optim.Adamax(groups(model), lr=0.01),
    "Adagrad": lambda model: optim.Adagrad(groups(model), lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda model: optim.Adadelta(groups(model), lr=0.5),
    "RMSprop": lambda model: optim.RMSprop(groups(model), lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda model: optim.Rprop(groups(model), lr=0.01),
    "ASGD": lambda model: optim.ASGD(groups(model), lr=0.01, t0=2.0),
    "Adafactor": lambda model: optim.Adafactor(groups(model), lr=0.01),
    "LBFGS": lambda model: optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4),
    "LBFGS line search": lambda model: optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_f37_optimizers_go_on_to_the_bit(
    make: Callable[[nn.Module], optim.Optimizer], store: MemoryStore, tmp_path: Path
) -> None:
    """F37, F48: optimizer state, options, batch-norm statistics and the generators behind dropout and data."""

    def build() -> Built:
        model = make_model()
        return model, make(model), None

    assert_goes_on_exactly(build, store, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nothing_is_cast(dtype: torch.dtype, store: MemoryStore, tmp_path: Path) -> None:
    """torch's own `load_state_dict` casts optimizer state to the parameter's dtype; ours must not need to."""

    def build() -> Built:
        model = make_model().to(dtype)
        return model, optim.AdamW(groups(model), lr=0.01), None

    assert_goes_on_exactly(build, store, tmp_path)


def test_master_state_of_another_dtype_than_the_parameter_stays(store: MemoryStore, tmp_path: Path) -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    master = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    optimizer.state[model.weight] = {"master": master, "flag": True, "pair": (1, [2.5, None])}
    checkpoint = save_one(store, tmp_path, 1, model=model, optimizer=optimizer)
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    restore_one(store, tmp_path, checkpoint, model=model, optimizer=optimizer)
    entry = optimizer.state[model.weight]
    assert torch.equal(entry["master"], master)
    assert entry["master"].dtype == torch.float64
    assert (entry["flag"], entry["pair"]) == (True, (1, [2.5, None]))
    assert model.bias not in optimizer.state


def test_state_gets_its_parameters_memory_layout(store: MemoryStore, tmp_path: Path) -> None:
    """As the optimizer makes it: kernels choose their path, and so the order of their sums, by strides."""

    def build() -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = build()
    torch.autograd.backward(model(torch.randn(2, 3, 8, 8)).sum())
    optimizer.step()
    checkpoint = save_one(store, tmp_path, 1, model=model, optimizer=optimizer)
    again, restored = build()
    restore_one(store, tmp_path, checkpoint, model=again, optimizer=restored)
    for before, after in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(before, after)
        for name in ("exp_avg", "exp_avg_sq"):
            one, other = optimizer.state[before][name], restored.state[after][name]
            assert torch.equal(one, other)
            assert one.stride() == other.stride() == before.stride()
            assert not other.requires_grad


def test_a_rate_that_is_a_tensor_stays_the_same_object(store: MemoryStore, tmp_path: Path) -> None:
    """A captured graph, or a schedule, may hold it."""
    model = nn.Linear(2, 2)
    checkpoint = save_one(
        store, tmp_path, 1, model=model, optimizer=optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    )
    rate = torch.tensor(0.5)
    optimizer = optim.Adam(model.parameters(), lr=rate, foreach=False)
    restore_one(store, tmp_path, checkpoint, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_an_optimizer_that_has_not_stepped_yet_is_restored_without_state(store: MemoryStore, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.Adam(model.parameters(), lr=0.5)
    checkpoint = save_one(store, tmp_path, 0, model=model, optimizer=optimizer)
    stepped = optim.Adam(model.parameters(), lr=0.1)
    torch.autograd.backward(model(torch.ones(2)).sum())
    stepped.step()
    restore_one(store, tmp_path, checkpoint, model=model, optimizer=stepped)
    assert len(stepped.state) == 0
    assert stepped.param_groups[0]["lr"] == 0.5


def test_state_is_by_parameter_name_not_by_place(store: MemoryStore, tmp_path: Path) -> None:
    """The same parameters of a model that declares its layers in another order."""

    class Net(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(2, 2))

    def build(*names: str) -> tuple[Net, optim.Optimizer]:
        net = Net(*names)
        by_name = dict(net.named_parameters())
        return net, optim.SGD([by_name[name] for name in sorted(by_name)], lr=0.1, momentum=0.9)

    net, optimizer = build("a", "b")
    for number, parameter in enumerate(net.parameters()):
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, float(number))}
    checkpoint = save_one(store, tmp_path, 1, model=net, optimizer=optimizer)
    other, restored = build("b", "a")
    restore_one(store, tmp_path, checkpoint, model=other, optimizer=restored)
    for name, parameter in other.named_parameters():
        expected = optimizer.state[net.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(restored.state[parameter]["momentum_buffer"], expected)


def test_two_models_whose_parameters_have_the_same_names_are_kept_apart(store: MemoryStore, tmp_path: Path) -> None:
    """One optimizer over an actor and a critic: both have a `weight`, and neither's state takes the other's place."""

    def build() -> dict[str, Any]:
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
        both = optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1, momentum=0.9)
        return {"model": actor, "critic": critic, "optimizer": both}

    given = build()
    parameters = [*given["model"].parameters(), *given["critic"].parameters()]
    for number, parameter in enumerate(parameters):
        given["optimizer"].state[parameter] = {"momentum_buffer": torch.full_like(parameter, float(number))}
    checkpoint = save_one(store, tmp_path, 1, **given)
    again = build()
    restore_one(store, tmp_path, checkpoint, **again)
    restored = [*again["model"].parameters(), *again["critic"].parameters()]
    for before, after in zip(parameters, restored, strict=True):
        one = given["optimizer"].state[before]["momentum_buffer"]
        assert torch.equal(again["optimizer"].state[after]["momentum_buffer"], one)


def test_parameters_of_no_model_are_refused() -> None:
    """Their values would not be saved: after a restart they would begin anew, with the old moments."""
    model, loose = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([{"params": list(model.parameters())}, {"params": [loose]}], lr=0.1)
    part = OptimizerPart("optimizer", optimizer, lambda: name_parameters([ModelPart("model", model)]))
    with pytest.raises(StateError, match="of no model that attach was given") as caught:
        part.capture(Captured())
    assert caught.value.path == "optimizer.1.0"


def test_an_optimizer_of_another_kind_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    def build(kind: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}

    checkpoint = save_one(store, tmp_path, 1, **build(optim.Adam))
    with pytest.raises(StateError, match="the state of Adam, the script"):
        restore_one(store, tmp_path, checkpoint, **build(optim.SGD))


def test_a_schedule_of_another_kind_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    def build(cosine: bool) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        schedules = optim.lr_scheduler
        made = schedules.CosineAnnealingLR(optimizer, 10) if cosine else schedules.ExponentialLR(optimizer, 0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": made}

    checkpoint = save_one(store, tmp_path, 1, **build(cosine=False))
    with pytest.raises(StateError, match="of another kind than CosineAnnealingLR"):
        restore_one(store, tmp_path, checkpoint, **build(cosine=True))


@pytest.mark.parametrize("key", ["global step", nn.Parameter(torch.zeros(1))], ids=["text", "stray parameter"])
def test_optimizer_state_of_something_else_is_refused(key: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[key] = {"x": 1}
    part = OptimizerPart("optimizer", optimizer, lambda: name_parameters([ModelPart("model", model)]))
    with pytest.raises(StateError, match="none of the optimizer's parameters") as caught:
        part.capture(Captured())
    assert caught.value.path == "optimizer.state"


def build_groups(*sizes: int, order: Callable[[list[Any]], list[Any]] = list) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    parameters = order(list(model.parameters()))
    edges = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    cut = [{"params": parameters[first:last]} for first, last in itertools.pairwise(edges)]
    return {"model": model, "optimizer": optim.SGD(cut, lr=0.1)}


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (lambda: build_groups(2, 2), "2 groups now, 1 then"),
        (lambda: build_groups(3), "group 0 has nothing where it had 3.weight"),
        (lambda: build_groups(4, order=lambda all_: all_[::-1]), "group 0 has 3.weight where it had 0.weight"),
    ],
)
def test_parameter_groups_that_differ_are_named(
    now: Callable[[], dict[str, Any]], message: str, store: MemoryStore, tmp_path: Path
) -> None:
    checkpoint = save_one(store, tmp_path, 1, **build_groups(4))
    with pytest.raises(StateError, match=message) as caught:
        restore_one(store, tmp_path, checkpoint, **now())
    assert caught.value.path == "optimizer"


# --------------------------------------------------------------------------------------------------- schedules


class Warmup:
    """A schedule's function that is an object: its attributes are part of the schedule's state."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / self.steps)


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedules.StepLR(o, step_size=7, gamma=0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, milestones=[3, 30, 30, 60], gamma=0.3),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, gamma=0.97),
    "ConstantLR": lambda o: schedules.ConstantLR(o, factor=0.5, total_iters=20),
    "LinearLR": lambda o: schedules.LinearLR(o, start_factor=0.1, total_iters=50),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, total_iters=90, power=2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, T_max=60, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=7, T_mult=2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=[0.5, 0.1], total_steps=120),
    "CyclicLR": lambda o: schedules.CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=9, mode="exp_range", gamma=0.99),
    "LambdaLR function": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LambdaLR object": lambda o: schedules.LambdaLR(o, [Warmup(20), Warmup(50)]),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.98),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=3, cooldown=2),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=10), schedules.CosineAnnealingLR(o, 80)], milestones=[10]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=10), schedules.ExponentialLR(o, 0.95)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=30),
}


def rates_of(make: Callable[[optim.Optimizer], Any]) -> tuple[nn.Module, optim.Optimizer, Any]:
    model = make_model()
    optimizer = optim.SGD(groups(model), lr=0.1, momentum=0.9)
    return model, optimizer, make(optimizer)


def curve(optimizer: optim.Optimizer, schedule: Any, steps: range) -> list[Any]:
    """Rates and momenta of all groups after each step."""
    found = []
    for step in steps:
        optimizer.step()
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(2.0 + math.sin(step / 3.0))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # SequentialLR gives an epoch to its own schedules
                schedule.step()
        found.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_f52_a_hundred_steps_of_a_schedule_with_and_without_interruption(
    make: Callable[[optim.Optimizer], Any], store: MemoryStore, tmp_path: Path, seed: int
) -> None:
    """F51, F52, F54: restored by state only, the curve of the rates has no step where the job was interrupted."""
    _, optimizer, schedule = rates_of(make)
    whole = curve(optimizer, schedule, range(100))
    interruptions = sorted({3, 10, *random.Random(seed).sample(range(1, 99), 2)})
    model, optimizer, schedule = rates_of(make)
    found, place = [], 0
    for step in interruptions:
        found += curve(optimizer, schedule, range(place, step))
        checkpoint = save_one(store, tmp_path, step, model=model, optimizer=optimizer, scheduler=schedule)
        model, optimizer, schedule = rates_of(make)
        restore_one(store, tmp_path, checkpoint, model=model, optimizer=optimizer, scheduler=schedule)
        place = step
    found += curve(optimizer, schedule, range(place, 100))
    assert found == whole, interruptions


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_f51_training_with_a_schedule_goes_on_to_the_bit(
    make: Callable[[optim.Optimizer], Any], store: MemoryStore, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_goes_on_exactly(lambda: rates_of(make), store, tmp_path)


def test_w10_the_functions_of_a_schedule_keep_their_empty_state(store: MemoryStore, tmp_path: Path) -> None:
    """W10: objects without attributes have the state {}."""

    class Constant:
        def __call__(self, step: int) -> float:
            return 0.5

    model, optimizer, schedule = rates_of(lambda o: schedules.LambdaLR(o, [Constant(), Constant()]))
    assert schedule.state_dict()["lr_lambdas"] == [{}, {}]
    checkpoint = save_one(store, tmp_path, 1, model=model, optimizer=optimizer, scheduler=schedule)
    tree = read_committed(store, checkpoint).values["objects"]["scheduler"]
    assert dict(tree["items"])["lr_lambdas"] == [{}, {}]
    restore_one(store, tmp_path, checkpoint, model=model, optimizer=optimizer, scheduler=schedule)


# ------------------------------------------------------------------------------------------------------ models


class WithExtra(nn.Module):
    """A module whose extra state is whatever it is given."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [
        {"calls": 7, "scale": 0.5, "names": ("a", "b")},
        {"history": torch.arange(4.0), "deep": [{"x": torch.ones(2, dtype=torch.int8)}]},
        torch.arange(5, dtype=torch.uint8),
        [],
        None,
        "text",
    ],
    ids=lambda extra: type(extra).__name__,
)
def test_extra_state_of_all_kinds_comes_back(extra: Any, store: MemoryStore, tmp_path: Path) -> None:
    def build(value: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), WithExtra(value))

    checkpoint = save_one(store, tmp_path, 1, model=build(extra))
    blank = torch.zeros(5, dtype=torch.uint8) if isinstance(extra, torch.Tensor) else None
    model = build(blank)
    restore_one(store, tmp_path, checkpoint, model=model)
    restored = model[1].extra  # type: ignore[index]
    assert flat(restored) == flat(extra)


def test_state_that_is_made_for_the_occasion_is_loaded_not_filled(store: MemoryStore, tmp_path: Path) -> None:
    """A module that gives copies in `state_dict`: filling those would restore nothing, without a word."""

    class Copies(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.hidden = torch.full((3,), value)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}hidden"] = self.hidden.clone()

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.hidden = state_dict[f"{prefix}hidden"].clone()

    model = nn.Sequential(nn.Linear(2, 2), Copies(4.0))
    checkpoint = save_one(store, tmp_path, 1, model=model)
    other = nn.Sequential(nn.Linear(2, 2), Copies(0.0))
    restore_one(store, tmp_path, checkpoint, model=other)
    assert torch.equal(other[1].hidden, torch.full((3,), 4.0))  # type: ignore[arg-type]
    assert torch.equal(other[0].weight, model[0].weight)  # type: ignore[arg-type]


def test_f113_tied_weights_stay_tied(store: MemoryStore, tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return {"model": model, "optimizer": optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    given = build()
    torch.autograd.backward(given["model"](torch.tensor([1, 2])).sum())
    given["optimizer"].step()
    checkpoint = save_one(store, tmp_path, 1, **given)
    assert {name for name in read_committed(store, checkpoint).tensors if "model" in name} == {"model.0.weight"}
    again = build()
    restore_one(store, tmp_path, checkpoint, **again)
    assert again["model"][0].weight is again["model"][1].weight
    assert torch.equal(again["model"][0].weight, given["model"][0].weight)
    assert len(again["optimizer"].state) == 1


def test_tied_weights_can_be_read_under_each_of_their_names(tmp_path: Path) -> None:
    """`state_dict()` has both names; whoever exports a checkpoint finds both, the bytes are there once."""
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "lm_head": nn.Linear(3, 5, bias=False), "out": nn.Linear(3, 1)})
    model["lm_head"].weight = model["embed"].weight
    folder = FolderStore(tmp_path / "job")
    checkpoint = save_one(folder, tmp_path, 1, model=model, optimizer=optim.SGD(model.parameters()))
    opened = open_in(folder)
    stored = [name for name in read_committed(folder, checkpoint).tensors if name.startswith("model.")]
    assert sorted(stored) == ["model.embed.weight", "model.out.bias", "model.out.weight"]
    assert opened.second_names == {"model.lm_head.weight": "model.embed.weight"}
    named = {name.removeprefix("model.") for name in opened.names if name.startswith("model.")}
    assert named == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.tensor(f"model.{name}"), tensor)
        assert (opened.shapes[f"model.{name}"], opened.dtypes[f"model.{name}"]) == (tensor.shape, tensor.dtype)
    assert torch.equal(opened.tensor("model.lm_head.weight", slice(1, 3)), model.state_dict()["embed.weight"][1:3])
    with pytest.raises(ConfigError, match=r"^model\.lm_head\.weight: rows"):
        opened.tensor("model.lm_head.weight", slice(1, 30))


def test_the_buffers_of_a_tied_module_are_all_of_one_kind() -> None:
    """A module used twice has its buffers under two names: stored once."""
    from orchestrator.checkpoint.layout import Scope

    norm = nn.BatchNorm1d(2)
    captured = Captured()
    ModelPart("model", nn.ModuleDict({"a": norm, "b": norm})).capture(captured)
    scopes = {name: scope for name, scope in captured.scopes.items() if "running" in name}
    assert len(scopes) == 2
    assert set(scopes.values()) == {Scope.STATISTICS}


@pytest.mark.parametrize(
    ("module", "scopes"),
    [
        (nn.BatchNorm2d(2), {Scope.SHARED, Scope.STATISTICS}),
        (nn.InstanceNorm1d(2, track_running_stats=True), {Scope.STATISTICS}),
        (nn.SyncBatchNorm(2), {Scope.SHARED, Scope.FIRST}),  # alike on all ranks
        (nn.BatchNorm1d(2, track_running_stats=False), {Scope.SHARED}),
        (nn.LayerNorm(2), {Scope.SHARED}),
    ],
)
def test_running_statistics_are_rank_0s(module: nn.Module, scopes: set[Scope]) -> None:
    """Between two of DDP's broadcasts every rank has its own: a save without rank 0 would store another rank's."""
    captured = Captured()
    ModelPart("model", nn.ModuleDict({"inner": module})).capture(captured)
    assert set(captured.scopes.values()) == scopes
    specs = captured.specs()
    alone = Scope.STATISTICS in scopes
    assert holder_sets(specs, 0, 4) == (((0,),) if alone else ())
    assert holder_sets(specs, 1, 4) == ()
    shard = plan_shard(specs, rank=0, world_size=4, absent=(), metadata_bytes=100)
    assert (shard.unique_bytes(0) > shard.header_bytes) is alone


def test_batch_norm_statistics_come_back(store: MemoryStore, tmp_path: Path) -> None:
    model = make_model()
    for _ in range(3):
        model(torch.randn(4, 6) * 3 + 1)
    checkpoint = save_one(store, tmp_path, 1, model=model)
    other = make_model()
    restore_one(store, tmp_path, checkpoint, model=other)
    assert flat(other.state_dict()) == flat(model.state_dict())
    assert int(other[1].num_batches_tracked) == 3  # type: ignore[index]


def test_restoring_keeps_the_parameters_where_they_are(store: MemoryStore, tmp_path: Path) -> None:
    """DDP, the optimizer and captured graphs hold on to them."""
    model = make_model()
    checkpoint = save_one(store, tmp_path, 1, model=model)
    other = make_model()
    places = [(id(one), one.data_ptr()) for one in (*other.parameters(), *other.buffers())]
    restore_one(store, tmp_path, checkpoint, model=other)
    assert [(id(one), one.data_ptr()) for one in (*other.parameters(), *other.buffers())] == places


def test_averaged_models_come_back(store: MemoryStore, tmp_path: Path) -> None:
    model = make_model()
    average = AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    checkpoint = save_one(store, tmp_path, 1, model=model, average=average)
    other = make_model()
    blank = AveragedModel(other)
    restore_one(store, tmp_path, checkpoint, model=other, average=blank)
    assert flat(blank.state_dict()) == flat(average.state_dict())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), r"lacks \['1.bias', '1.weight'\]"),
        (lambda: nn.Sequential(nn.Linear(2, 2, bias=False)), r"has \['0.bias'\] that this model does not have"),
        (lambda: nn.ModuleDict({"head": nn.Linear(2, 2)}), r"lacks \['head.bias', 'head.weight'\] and has \['0.bias'"),
    ],
)
def test_missing_and_unexpected_names_are_told(
    build: Callable[[], nn.Module], words: str, store: MemoryStore, tmp_path: Path
) -> None:
    """F57, F58, F117: names are compared with the model, both ways."""
    checkpoint = save_one(store, tmp_path, 1, model=nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(StateError, match=words) as caught:
        restore_one(store, tmp_path, checkpoint, model=build())
    assert caught.value.path == "model"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(3, 2), r"model.weight: the checkpoint has F32 \[2, 2\], the script F32 \[2, 3\]"),
        (lambda: nn.Linear(2, 2).double(), r"model.(weight|bias): the checkpoint has F32 .* the script F64"),
    ],
)
def test_another_shape_or_dtype_is_named(
    build: Callable[[], nn.Module], message: str, store: MemoryStore, tmp_path: Path
) -> None:
    checkpoint = save_one(store, tmp_path, 1, model=nn.Linear(2, 2))
    with pytest.raises(StateError, match=message):
        restore_one(store, tmp_path, checkpoint, model=build())


def test_a_value_where_the_model_has_a_tensor_is_named(store: MemoryStore, tmp_path: Path) -> None:
    class Either(nn.Module):
        def __init__(self, key: str) -> None:
            super().__init__()
            if key == "tensor":
                self.register_buffer("x", torch.zeros(2))

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}x"] = dict(self.named_buffers()).get("x", 5)

    checkpoint = save_one(store, tmp_path, 1, model=Either("number"))
    with pytest.raises(StateError, match="something else in the checkpoint") as caught:
        restore_one(store, tmp_path, checkpoint, model=Either("tensor"))
    assert caught.value.path == "model.x"


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A real group of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_in_ddp_is_saved_as_itself(store: MemoryStore, tmp_path: Path) -> None:
    """F57: names do not depend on the wrapper; what was trained in DDP goes on without it, and the other way."""

    def build(wrapped: bool) -> dict[str, Any]:
        model: nn.Module = make_model()
        model = DistributedDataParallel(model) if wrapped else model
        return {"model": model, "optimizer": optim.Adam(groups(model), lr=0.01)}

    given = build(True)
    train_step(given["model"], given["optimizer"])
    checkpoint = save_one(store, tmp_path, 1, **given)
    names = set(read_committed(store, checkpoint).tensors)
    assert "model.0.weight" in names
    assert "optimizer.state.0.weight.exp_avg" in names
    for wrapped in (False, True):
        again = build(wrapped)
        restore_one(store, tmp_path, checkpoint, **again)
        for one, other in zip(given["model"].parameters(), again["model"].parameters(), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(given["optimizer"].state[one]["exp_avg"], again["optimizer"].state[other]["exp_avg"])


def test_a_lazy_model_is_refused_by_name() -> None:
    captured = Captured()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ModelPart("model", nn.LazyLinear(2)).capture(captured)
    with pytest.raises(StateError, match="UninitializedParameter"):
        captured.specs()


# ----------------------------------------------------------------------------------------------- other objects


class Counting:
    """Any object of the user's."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        None,
        5,
        (1, 2.5, "x"),
        torch.arange(3),
        {"ema": {"w": torch.ones(2)}, "t": (torch.zeros(()), {"b": 1, "a": 2}), 3: math.inf},
    ],
    ids=lambda state: f"{state!r:.20}",
)
def test_objects_of_the_users_come_back(state: Any, store: MemoryStore, tmp_path: Path) -> None:
    checkpoint = save_one(store, tmp_path, 1, thing=Counting(state))
    thing = Counting("unset")
    restore_one(store, tmp_path, checkpoint, thing=thing)
    assert flat(thing.state) == flat(state)
    assert type(thing.state) is type(state)


def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path) -> None:
    place = states.launch(tmp_path)
    state = state_of(place, model=nn.Linear(2, 2), odd=Counting({"0": {"fn": lambda: None}}))
    with pytest.raises(StateError, match="function") as caught:
        state.stager.plan()
    assert caught.value.path == "odd.0.fn"
    assert isinstance(caught.value, RefusedError)


def test_an_object_without_state_is_refused() -> None:
    with pytest.raises(StateError, match="no state_dict") as caught:
        make_part("thing", object(), dict)
    assert caught.value.path == "thing"


def test_objects_that_come_or_go_are_named(store: MemoryStore, tmp_path: Path) -> None:
    checkpoint = save_one(store, tmp_path, 1, a=Counting(1), b=Counting(2))
    with pytest.raises(StateError, match="was not given it") as caught:
        restore_one(store, tmp_path, checkpoint, a=Counting(0))
    assert caught.value.path == "b"
    with pytest.raises(StateError, match="does not have it") as caught:
        restore_one(store, tmp_path, checkpoint, a=Counting(0), b=Counting(0), c=Counting(0))
    assert caught.value.path == "c"


def test_two_objects_never_share_a_tensors_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {"a": Counting({"b.c": torch.ones(1)}), "a.b": Counting({"c": torch.zeros(1)})}
    with pytest.raises(StateError, match="two tensors"):
        state_of(states.launch(tmp_path), **given).stager.plan()


def test_a_tree_that_names_a_missing_tensor_is_a_format_error(store: MemoryStore, tmp_path: Path) -> None:
    """F113: an index is built from what is there; one that is not must be found out, not filled with anything."""
    model = nn.Linear(2, 2)
    checkpoint = save_one(store, tmp_path, 1, thing=Counting({"x": torch.ones(1)}))
    index = read_committed(store, checkpoint)
    without = index.model_copy(update={"tensors": {}})
    part = make_part("thing", Counting(None), lambda: name_parameters([ModelPart("model", model)]))
    with pytest.raises(FormatError, match=r"has no tensor thing\.x"):
        part.targets(json.loads(json.dumps(index.values["objects"]["thing"])), without)
