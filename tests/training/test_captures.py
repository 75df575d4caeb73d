"""Taking the state again and again: always what a full capture gives, cheaply where nothing but contents changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from orchestrator.checkpoint.layout import Shares
from orchestrator.checkpoint.staging import Fixed
from orchestrator.training.captures import Captures
from orchestrator.training.parts import Captured, Part
from tests.training.states import launch, parts_of

Given = dict[str, Any]


class Net(nn.Module):
    """Buffers of both kinds, a parameter under two names, a module under two names, an absent bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(5)
        self.twice = nn.ModuleList([nn.Linear(5, 5)] * 2)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("shown", torch.ones(2))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.twice[1](self.norm(self.embedding(numbers))))
        return found


def made(kind: Callable[..., optim.Optimizer] = optim.AdamW) -> Given:
    torch.manual_seed(1)
    model = Net()
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}


def train(given: Given) -> None:
    model, optimizer = given["model"], given["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(6)).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    optimizer.step(closure)


def in_full(parts: list[Part]) -> tuple[Captured, Given]:
    captured = Captured()
    return captured, {part.name: part.capture(captured) for part in parts}


def plain(tree: Any) -> Any:
    return json.loads(json.dumps(tree, default=lambda fixed: fixed.tree))


def check(captures: Captures, parts: list[Part]) -> None:
    """The next take is what a full capture gives now."""
    found, trees = captures.take()
    expected, expected_trees = in_full(parts)
    assert plain(trees) == plain(expected_trees)
    assert found.specs() == [spec for name in found.tensors for spec in expected.specs() if spec.name == name]
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].data_ptr() == tensor.data_ptr(), name


@pytest.mark.parametrize(
    "kind",
    [
        optim.AdamW,
        lambda parameters, lr: optim.Adam(parameters, lr=torch.tensor(lr), amsgrad=True),
        lambda parameters, lr: optim.SGD(parameters, lr=lr, momentum=0.9),
        optim.SGD,
        optim.Adagrad,
        lambda parameters, lr: optim.LBFGS(list(parameters), lr=lr, max_iter=2),
    ],
)
def test_every_take_is_a_full_capture(kind: Any, tmp_path: Path) -> None:
    given = made(kind)
    given["scheduler"] = optim.lr_scheduler.StepLR(given["optimizer"], 2)
    parts = parts_of(launch(tmp_path), given)
    captures = Captures(parts, Shares(0, 1))
    for _ in range(5):
        check(captures, parts)
        train(given)
        given["scheduler"].step()


def test_unchanged_parts_are_not_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else thousands of small tensors cost more to name than to copy."""
    given = made()
    train(given)
    parts = parts_of(launch(tmp_path), given)
    captures = Captures(parts, Shares(0, 1))
    _, before = captures.take()
    for part in parts:
        monkeypatch.setattr(part, "capture", None)
    train(given)
    given["optimizer"].param_groups[0]["lr"] = 0.5
    _, after = captures.take()
    assert isinstance(after["model"], Fixed)
    assert '["lr", 0.5]' in json.dumps(plain(after["optimizer"]))
    assert captures.version == 1
    assert captures.take()[1]["model"] is after["model"]
    assert before["model"] == after["model"].tree


def more_state(given: Given) -> None:
    train(given)


def other_shape(given: Given) -> None:
    given["model"].shown = torch.ones(3)


def other_type(given: Given) -> None:
    given["model"].norm.running_mean = given["model"].norm.running_mean.double()


def frozen(given: Given) -> None:
    given["model"].norm.weight.requires_grad_(False)


def another_layer(given: Given) -> None:
    given["model"].late = nn.Linear(2, 2)


def renamed_layer(given: Given) -> None:
    modules = given["model"]._modules
    modules["other"] = modules.pop("norm")


def hook(given: Given) -> None:
    given["model"].register_state_dict_post_hook(lambda module, state, prefix, _: state.update(shown=None))


def other_group(given: Given) -> None:
    optimizer = given["optimizer"]
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.3})


def buffer_not_saved(given: Given) -> None:
    given["model"]._non_persistent_buffers_set.add("shown")


def forgotten_state(given: Given) -> None:
    given["optimizer"].state.clear()


@pytest.mark.parametrize(
    "change",
    [
        more_state,
        other_shape,
        other_type,
        frozen,
        another_layer,
        renamed_layer,
        hook,
        other_group,
        buffer_not_saved,
        forgotten_state,
    ],
)
def test_whatever_changes_is_noticed(change: Callable[[Given], None], tmp_path: Path) -> None:
    given = made()
    if change is not more_state:
        train(given)
    parts = parts_of(launch(tmp_path), given)
    captures = Captures(parts, Shares(0, 1))
    check(captures, parts)
    check(captures, parts)
    version = captures.version
    change(given)
    check(captures, parts)
    assert captures.version == version + (change not in {frozen, other_group})
    check(captures, parts)


@contextmanager
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_parts_are_not_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job under `fully_shard` plans anew in every save, and never proves that it may overlap."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(1)
    with one_process():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        for layer in (*model, model):
            fully_shard(layer)
        given: Given = {"model": model, "optimizer": optim.AdamW(model.parameters())}
        step_sharded(given)
        parts = parts_of(launch(tmp_path), given)
        captures = Captures(parts, Shares(0, 1))
        captures.take()
        with monkeypatch.context() as patch:
            for part in parts:
                patch.setattr(part, "capture", None)
            step_sharded(given)
            found, _ = captures.take()
        expected, _ = in_full(parts)
        assert captures.version == 1
        assert found.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert type(found.tensors[name]) is type(tensor) is torch.Tensor, name
            assert torch.equal(found.tensors[name], tensor), name
            assert found.tensors[name].data_ptr() == tensor.data_ptr(), name
        with torch.no_grad():
            model(torch.ones(3, 4))  # an evaluation leaves the parameters of the root in full
        captures.take()
        assert captures.version == 1
        with monkeypatch.context() as patch:
            for part in parts:
                patch.setattr(part, "capture", None)
            step_sharded(given)
            captures.take()
        entry = given["optimizer"].state[model[0].weight]
        entry["exp_avg"] = entry["exp_avg"].redistribute(placements=[Replicate()])
        captures.take()
        assert captures.version == 2


def step_sharded(given: Given) -> None:
    torch.autograd.backward(given["model"](torch.ones(3, 4)).square().sum())
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def test_parts_that_are_taken_in_full_each_time_are_planned_once(tmp_path: Path) -> None:
    """A hook of somebody else's, say: its tensors are the same ones in every save."""
    given = made()
    hook(given)
    parts = parts_of(launch(tmp_path), given)
    captures = Captures(parts, Shares(0, 1))
    for _ in range(3):
        check(captures, parts)
    assert captures.version == 1


def test_new_memory_for_a_parameter_is_used(tmp_path: Path) -> None:
    """`p.data = x` changes neither the parameter nor its version."""
    given = made()
    parts = parts_of(launch(tmp_path), given)
    captures = Captures(parts, Shares(0, 1))
    check(captures, parts)
    weight = given["model"].twice[0].weight
    weight.data = weight.detach().clone()
    check(captures, parts)


class Holder:
    """Any object with tensors."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_tensors_of_other_objects_may_come_and_go(tmp_path: Path) -> None:
    holder = Holder(a=torch.arange(3))
    given = {**made(), "thing": holder}
    parts = parts_of(launch(tmp_path), given)
    captures = Captures(parts, Shares(0, 1))
    for state in ({"a": torch.arange(3)}, {"a": torch.arange(4)}, {}, {"b": torch.arange(4)}):
        holder.state = state
        check(captures, parts)


# ------------------------------------------------------------------------------------------------- who owns what


def owners_of(folder: Path, **given: Any) -> Captures:
    captures = Captures(parts_of(launch(folder), given), Shares(0, 1))
    captures.take()
    return captures


def test_parameters_and_optimizer_state_are_copied_later(tmp_path: Path) -> None:
    given = made(lambda parameters, lr: optim.Adam(parameters, lr=torch.tensor(lr)))
    train(given)
    captures = owners_of(tmp_path, **given)
    expected, _ = in_full(parts_of(launch(tmp_path), given))
    at_once = set(expected.tensors) - captures.later
    assert at_once == {
        *(f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "model.shown",
        "optimizer.groups.0.lr",
    }
    assert (captures.owners.untrained, captures.owners.holders, captures.owners.unhooked) == ((), (), ())


def test_parameters_that_no_optimizer_trains_are_named(tmp_path: Path) -> None:
    """They require a gradient, so somebody trains them; when, we cannot know."""
    model = Net()
    optimizer = optim.SGD(model.twice.parameters(), lr=0.1)
    found = owners_of(tmp_path, model=model, optimizer=optimizer).owners.untrained
    assert found == ("model.embedding.weight", "model.head.weight", "model.norm.weight", "model.norm.bias")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert owners_of(tmp_path, model=model, optimizer=optimizer).owners.untrained == ()


def test_objects_that_hold_weights_are_named(tmp_path: Path) -> None:
    given = made()
    things = {"ema": Holder(shadow=torch.ones(3)), "counts": Holder(n=torch.arange(3)), "one": Holder(x=torch.ones(1))}
    assert owners_of(tmp_path, **given, **things).owners.holders == ("ema",)


def test_an_optimizer_that_calls_no_hooks_is_named(tmp_path: Path) -> None:
    class Own(optim.Optimizer):
        """Takes the step that torch has wrapped away again."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            type(self).step = lambda self, closure=None: None  # type: ignore[method-assign, assignment]

    model = nn.Linear(2, 2)
    assert owners_of(tmp_path, model=model, optimizer=Own(model.parameters())).owners.unhooked == ("optimizer",)
