"""What a script that was written for DistributedDataParallel calls of an engine, and sets on it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
import threads
from pool import Ranks

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "zero 0": ({"dp": 2}, 0),
    "zero 2": ({"dp": 2}, 2),
    "zero 3": ({"dp": 2}, 3),
    "tp": ({"tp": 2, "tp_plan": {"layers.*.0": "colwise", "layers.*.2": "rowwise"}}, 0),
    "pp": ({"pp": 2}, 2),
}


class Model(nn.Module):
    """Blocks, a tied parameter and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )
        self.register_buffer("shift", torch.randn(4))
        self.kept = 3

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states

    def own(self) -> int:
        """A method of the model's."""
        return self.kept


def make(
    mesh: dict[str, Any] | None = None, stage: int = 0, model: nn.Module | None = None
) -> polyreme.Engine:
    config = {
        "mesh": mesh or {}, "zero": {"stage": stage}, "batch": {"size": 4}, "precision": {"compute": "fp64"},
        "optimizer": {"lr": 0.1, "weight_decay": 0.0, "clip": "none"},
    }  # fmt: skip
    model = Model().double() if model is None else model
    return polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss, optimizer=torch.optim.SGD)


def batch(seed: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, 4, dtype=torch.float64, generator=draw) for _ in range(2))
    rows = slice(4 * rank // size, 4 * (rank + 1) // size)
    return x[rows], y[rows]


def loaded(rank: int, size: int, layout: str) -> tuple[dict[str, Any], float]:
    mesh, stage = LAYOUTS[layout]
    engine = make(mesh, stage)
    dp = engine.mesh.dp
    engine.train_step(batch(1, dp.rank, dp.size))
    given = Model(seed=9).double().state_dict()
    missing, others = engine.load_state_dict(given)
    assert (missing, others) == ([], [])
    assert engine.load_state_dict({"extra": torch.ones(1)}, strict=False)[1] == ["extra"]
    before = engine.state_dict()
    for wrong, said in (
        ({**given, "extra": torch.ones(1)}, "extra not of this model"),
        ({name: t for name, t in given.items() if name != "shift"}, "shift missing"),
        ({**given, "layers.0.0.bias": torch.ones(3)}, "layers.0.0.bias is of shape"),
    ):
        with pytest.raises(polyreme.ModelError, match=said):
            engine.load_state_dict(wrong)
    assert all(torch.equal(t, before[name]) and torch.equal(t, given[name]) for name, t in before.items())
    engine.train_step(batch(2, dp.rank, dp.size))
    return {name: t.tolist() for name, t in engine.state_dict().items()}, 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors_are_loaded_at_every_layout(layout: str) -> None:
    model = Model(seed=9).double()
    x, y = batch(2)
    nn.functional.mse_loss(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found, _ in threads.run(2, loaded, layout):
        assert found.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(
                torch.tensor(found[name], dtype=torch.float64), tensor, rtol=0, atol=1e-10
            )


def test_what_has_one_meaning_works() -> None:
    engine = make()
    assert engine.eval() is engine and not engine.module.training and not engine.training
    engine.eval_step(batch(0))
    assert not engine.training
    with pytest.warns(UserWarning, match=r"evaluation mode.*engine\.train\(\)"):
        engine.train_step(batch(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.train_step(batch(0))
        assert engine.train().module.layers[0].training
        engine.train_step(batch(0))
    assert dict(engine.named_parameters()).keys() == dict(engine.module.named_parameters()).keys()
    assert [*engine.parameters()] == [*engine.module.parameters()]
    assert sum(p.numel() for p in engine.parameters()) == engine.parameter_count
    assert next(iter(engine.modules())) is engine.module and len([*engine.named_buffers()]) == 1


@pytest.mark.parametrize(
    ("name", "way"),
    {
        "no_sync": "reduces gradients once a step", "to": r"engine\.mesh\.device", "cuda": "leave it out",
        "half": r"precision\.compute", "apply": "full_parameters", "requires_grad_": r"engine\.refresh",
        "own": r"the Model's: write engine\.module\.own", "kept": r"engine\.module\.kept",
        "register_forward_hook": r"module\.register_forward_hook", "nothing": "no attribute 'nothing'",
        "device": r"engine\.mesh\.device", "dtype": r"precision\.compute", "unshard": "full_parameters",
    }.items(),
)  # fmt: skip
def test_what_an_engine_has_not_names_the_way(name: str, way: str) -> None:
    engine = make()
    with pytest.raises(polyreme.ModelError, match=way) as raised:
        getattr(engine, name)
    assert isinstance(raised.value, AttributeError) and not hasattr(engine, name)


@pytest.mark.parametrize(
    ("name", "way"),
    {
        "lr": "engine.optimizer.param_groups", "loss_fn": r"initialize\(loss_fn=", "epoch": "in a variable",
        "optimizer": r"initialize\(optimizer=", "config": "another config", "training": r"engine\.eval\(\)",
        "state": "no effect", "mesh": "no effect",
    }.items(),
)  # fmt: skip
def test_what_would_have_no_effect_cannot_be_set(name: str, way: str) -> None:
    engine = make()
    with pytest.raises(polyreme.ModelError, match=way):
        setattr(engine, name, 1.0)
    engine.on_gradients = lambda gradients: None
    engine.train_step(batch(0))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_clipping_and_an_optimizer_of_ones_own_are_refused(stage: int) -> None:
    engine = make(stage=stage)
    x, y = batch(0)
    nn.functional.mse_loss(engine(x), y).backward()
    with pytest.raises(polyreme.ModelError, match=r"engine\.gradients\(\)\.clip_"):
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    engine.step()
    with pytest.raises(polyreme.ModelError, match=r"initialize\(optimizer="):
        torch.optim.AdamW(engine.parameters())
    own = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    nn.functional.mse_loss(engine(x), y).backward()
    with pytest.raises(polyreme.ModelError, match=r"engine\.step\(\) after backward"):
        own.step()
    engine.step()


def test_a_second_engine_of_a_model_names_the_end_of_the_first() -> None:
    model = Model().double()
    engine = make(model=model)
    with pytest.raises(polyreme.ModelError, match=r"engine\.close\(gather=True\)"):
        make(model=model)
    engine.close()
    make(model=model).train_step(batch(0))


@pytest.mark.parametrize("make_it", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 4))])
def test_a_model_of_torch_jit_is_refused(make_it: Any) -> None:
    with pytest.raises(polyreme.ModelError, match=r"torch\.jit.*the module that it was made from"):
        make(model=make_it(nn.Linear(4, 4)))


def test_generation_settings_that_cannot_be_saved_are_refused_at_once() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    model.generation_config.temperature = 0.5  # without sampling, which transformers does not save
    with pytest.raises(polyreme.ModelError, match=r"generation_config of .* cannot be saved.*temperature"):
        polyreme.initialize(model, {"batch": {"size": 2}})
    model.generation_config.do_sample, model.config.temperature = True, 0.5
    with pytest.raises(polyreme.ModelError, match=r"cannot be saved.*set in the model config.*temperature"):
        polyreme.initialize(model, {"batch": {"size": 2}})
    del model.config.temperature
    polyreme.initialize(model, {"batch": {"size": 2}, "precision": {"compute": "fp32"}})


def test_a_loader_left_at_the_end_of_a_script_says_nothing() -> None:
    code = """import torch
from polyreme.data import Loader
batches = iter(Loader([torch.ones(1)] * 64, batch_size=2, rank=0, world=1, seed=0))
next(batches)"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""


def noisy(rank: int, size: int) -> None:
    parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).double()
    own = torch.optim.SGD(parts[0].parameters(), lr=0.1)
    config = {"batch": {"size": 4}, "precision": {"compute": "fp64", "on_nonfinite": "skip"}}
    model = torch.compile(nn.Sequential(*parts))
    engine = polyreme.initialize(
        model,
        config,
        loss_fn=lambda x, y: (x - y).square().sum(1).mul(y[:, 0]).sum() / y[:, 0].sum(),
        optimizer=own,
    )
    batch = torch.ones(2, 4, dtype=torch.float64), torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    engine.eval()
    engine.train_step(batch)
    engine.train_step((batch[0] * float("nan"), batch[1]))


def test_one_rank_warns_for_all_at_the_scripts_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads.run(2, noisy)
    for text in (
        "leaves out",
        "taken out of",
        "evaluation mode",
        "same batch",
        "mean over its halves",
        "NaN",
    ):
        assert [each.filename for each in caught if text in str(each.message)] == [__file__], text


def wrapped(rank: int, world: int) -> str:
    with pytest.raises(polyreme.ModelError) as caught:
        nn.parallel.DistributedDataParallel(make())  # type: ignore[arg-type]
    return str(caught.value)


def test_an_engine_is_not_wrapped_again(ranks: Ranks) -> None:
    assert all("leave the wrapper out" in said for said in ranks(2, wrapped))


def test_a_batch_in_several_arguments_is_told_how_to_be_one() -> None:
    engine, (x, y) = make(), batch(0)
    for call in ("train_step", "eval_step"):
        method = getattr(engine, call)
        for said in (lambda: method(x, y), lambda: method(x, labels=y), lambda: method(input=x)):
            with pytest.raises(polyreme.BatchError, match=rf"engine\.{call}\(\(x, y\)\)") as caught:
                said()
            assert isinstance(caught.value, TypeError)
    engine.close()


def test_arguments_that_initialize_does_not_have_are_named_by_ours() -> None:
    meant = {"criterion": "loss_fn", "loss": "loss_fn", "scheduler": "lr_scheduler", "optim": "optimizer"}
    for name, ours in meant.items():
        with pytest.raises(polyreme.PolyremeError, match=rf"{name}.*{ours}=") as caught:
            polyreme.initialize(Model(), {}, **{name: None})  # type: ignore[arg-type]
        assert isinstance(caught.value, TypeError)
    with pytest.raises(TypeError, match="nonsense"):
        polyreme.initialize(Model(), {}, nonsense=1)  # type: ignore[call-arg]
