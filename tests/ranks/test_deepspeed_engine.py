"""The DeepSpeed door's engine beside plain torch."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import logging
import os
import runpy
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import polyreme
import polyreme.compat.deepspeed as deepspeed
import training
from examples import ALL
from polyreme.compat.deepspeed.checkpoint import ds_to_universal
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError, UnsupportedError
from polyreme.compat.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig
from polyreme.compat.deepspeed.runtime.zero import unwrap_model_for_generation
from polyreme.compat.deepspeed.utils import logging as logs
from polyreme.compat.deepspeed.utils import zero_to_fp32, zero_to_torch
from polyreme.errors import CheckpointError, ModelError
from polyreme.layout.region import MASTER
from polyreme.zero.parameter import state_of
from pool import Ranks

WIDTH, MICRO, STEPS = 12, 3, 4


class Network(nn.Module):
    """Returns the loss, as DeepSpeed's examples do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), nn.Linear(WIDTH, 4)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.blocks(x), y)


def batch(rank: int, step: int, i: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * i)
    return torch.randn(MICRO, WIDTH, generator=draw), torch.randint(4, (MICRO,), generator=draw)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().float().flatten() for t in tensors])


def plain(world: int, accumulation: int, clip: float = 0.0) -> Tensor:
    """Weights that plain torch comes to."""
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 4))
    for step in range(STEPS):
        for rank in range(world):
            for i in range(accumulation):
                (model(*batch(rank, step, i)) / world / accumulation).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
    return flat(model.parameters())


def config(accumulation: int, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def weights(engine: Any) -> Tensor:
    whole = engine.module_state_dict()
    return flat(whole[name] for name, _ in engine.module.named_parameters())


def train(rank: int, world: int, stage: int, how: str, clip: float) -> Tensor:
    model, accumulation = Network(), 2
    given: dict[str, Any] = {}
    section: dict[str, Any] = {"gradient_clipping": clip} if clip else {}
    adamw = {"lr": 0.01, "weight_decay": 0.1}
    ramp = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(  # noqa: E731
        optimizer, lambda step: min(1.0, (1 + step) / 4)
    )
    if how == "config":
        section["optimizer"] = {"type": "AdamW", "params": adamw}
        given["lr_scheduler"] = ramp
    elif how == "object":
        given["optimizer"] = torch.optim.AdamW(model.parameters(), **adamw)
        given["lr_scheduler"] = ramp(given["optimizer"])
    else:
        given["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, **adamw)
        given["model_parameters"] = model.parameters()
        given["lr_scheduler"] = ramp
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, config=config(accumulation, stage, **section), **given
    )
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler
    for step in range(STEPS):
        first = step == 2 and how != "config"  # forwards before backwards, which come in another order
        losses = [engine(*batch(rank, step, i)) for i in range(accumulation)] if first else []
        for i in range(accumulation):
            loss = losses.pop() if first else engine(*batch(rank, step, i))
            if step % 2:  # two backwards of a forward
                one, other = loss * 0.25, loss * 0.75
                if how == "callable":
                    engine.scale(one).backward(retain_graph=True)
                    other.backward()
                else:
                    engine.backward(one, retain_graph=True)
                    engine.backward(other)
            elif how == "callable":
                engine.scale(loss).backward() if i else loss.backward()
            else:
                assert torch.equal(engine.backward(loss), loss / accumulation)
            assert engine.is_gradient_accumulation_boundary() == (i == accumulation - 1)
            engine.step()
            assert engine.was_step_applied() == (i == accumulation - 1)
        assert engine.global_steps == step + 1
        assert engine.get_lr() == [pytest.approx(0.01 * min(1.0, (2 + step) / 4))]
    assert engine.get_global_grad_norm() > 0 and engine.micro_steps == STEPS * accumulation
    return weights(engine)


HOWS = ("config", "object", "callable")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("world", [1, 2])
def test_training_is_that_of_plain_torch(ranks: Ranks, world: int, how: str) -> None:
    for clip in (0.0, 0.3):
        wanted = plain(world, 2, clip)
        for stage in (0, 1, 2, 3):
            if ALL not in os.environ and (HOWS.index(how) + world + stage) % 2 != (clip > 0):
                continue  # with and without clipping each stage and each way is tried
            for found in ranks(world, train, stage, how, clip):
                assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), (stage, clip)


class OwnLoop(Network):
    """Trains itself as it is called, as a LightningModule of manual optimization does."""

    def forward(self, engine: Any, steps: range) -> list[float]:  # type: ignore[override]
        losses = []
        for step in steps:
            for i in range(2):
                loss = super().forward(*batch(engine.global_rank, step, i))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        return losses


def trains_itself(rank: int, world: int) -> list[Tensor]:
    found = []
    for stage in (1, 3):
        model = OwnLoop()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min(1.0, (1 + step) / 4)
            ),
            config=config(2, stage, gradient_clipping=0.0),
        )
        for step in range(0, STEPS, 2):
            assert len(engine(engine, range(step, step + 2))) == 4
        with pytest.raises(polyreme.BatchError, match="without a forward"):
            engine.backward(torch.ones((), requires_grad=True))
        found.append(weights(engine))
    return found


def test_a_model_may_train_itself_in_its_forward(ranks: Ranks) -> None:
    for found in ranks(2, trains_itself):
        for each in found:
            assert torch.allclose(each, plain(2, 2), rtol=1e-5, atol=1e-6)


def resumed(rank: int, world: int, folder: Path, save: bool) -> tuple[Tensor, Any]:
    """Weights after all steps, of which some were done before a checkpoint; and what it holds."""
    model = Network()
    section = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config(1, 2 if save else 3, **section))
    arguments = Namespace(epochs=3, betas=(0.9, 0.95))
    state: Any = {"epoch": 3, "best": (0.5, [1, 2]), 4: None, "args": arguments}
    first, last = (0, 2) if save else (2, STEPS)
    if not save:
        path, state = engine.load_checkpoint(str(folder))
        assert path == str(folder / "global_step2") and engine.loaded_checkpoint_tag == "global_step2"
        assert (engine.global_steps, engine.micro_steps) == (2, 2)
    for step in range(first, STEPS):
        if step == last:
            assert engine.save_checkpoint(str(folder), client_state=state)
        engine.backward(engine(*batch(rank % 2, step, 0)))
        engine.step()
    return weights(engine), state


def test_a_resumed_run_goes_on_with_another_stage(ranks: Ranks, tmp_path: Path) -> None:
    (wanted, state), *_ = ranks(2, resumed, tmp_path, True)
    scripts = {"zero_to_fp32.py", "zero_to_torch.py"}
    assert {path.name for path in tmp_path.iterdir()} == {"global_step2", "latest", *scripts}
    assert all(os.access(tmp_path / script, os.X_OK) for script in scripts)
    for found, told in ranks(2, resumed, tmp_path, False):
        assert told == state and torch.equal(found, wanted)


def in_a_window(rank: int, world: int, folder: Path, stage: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Weights after a step that follows a checkpoint of the middle of a window, and one that is loaded there;
    and of plain windows."""
    section = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}

    def windows(engine: Any, *steps: int) -> None:
        for step in steps:
            for i in range(2):
                engine.backward(engine(*batch(rank, step, i)))
                if engine is not plain:  # as Lightning does before it validates
                    engine.module.zero_grad()
                engine.step()

    plain, *_ = deepspeed.initialize(model=Network(), config=config(2, stage, **section))
    windows(plain, 0, 1, 2)
    made, *_ = deepspeed.initialize(model=Network(), config=config(2, stage, **section))
    windows(made, 0)
    made.backward(made(*batch(rank, 7, 0)))
    made.step()
    made.save_checkpoint(folder)
    found, *_ = deepspeed.initialize(model=Network(), config=config(2, stage, **section))
    found.load_checkpoint(folder)
    counts = (found.micro_steps, found.global_steps)
    windows(found, 1)
    found.save_checkpoint(folder)
    found.backward(found(*batch(rank, 8, 0)))
    found.step()
    found.load_checkpoint(folder)  # a script that found a NaN, say
    windows(found, 2)
    fresh, *_ = deepspeed.initialize(model=Network(), config=config(2, stage, **section))
    fresh.load_checkpoint(folder, load_module_only=True)
    assert (fresh.micro_steps, fresh.global_steps) == (0, 0)
    return weights(plain), weights(found), counts


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_begins_a_window(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    for wanted, found, counts in ranks(2, in_a_window, tmp_path, stage):
        assert counts == (2, 1)
        assert torch.equal(found, wanted)


def told_back(rank: int, world: int, folder: Path) -> Any:
    section = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=Network(), config=config(1, 2, **section))
    engine.save_checkpoint(folder)
    with pytest.raises(ArgumentError, match=r"client_state\['all'\] is a Tensor.* of up to 1048576 bytes"):
        engine.save_checkpoint(folder, client_state={"all": torch.empty(2**18 + 1)})
    engine.save_checkpoint(folder, tag="second", client_state=TENSORS)
    _, state = engine.load_checkpoint(folder)
    engine.polyreme.mesh.dp.barrier()
    if rank == 0:
        (folder / "latest").write_text("third")
    engine.polyreme.mesh.dp.barrier()
    with pytest.raises(
        CheckpointError, match=r"third, which .*latest names, .*: there are global_step0, second"
    ):
        engine.load_checkpoint(folder)
    return state


def told(rank: int, world: int) -> None:
    """What scripts ask an engine for besides training."""
    section = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    arguments = Namespace(local_rank=-1, deepspeed_config=None)
    level = deepspeed.utils.logger.level
    model = Network()
    own = {*vars(model)}
    engine, *_ = deepspeed.initialize(
        arguments, model=model, config=config(1, 2, **section, log_level="ERROR")
    )
    assert deepspeed.utils.logger.level == logging.ERROR and engine.log_level() == "ERROR"
    deepspeed.utils.logger.setLevel(level)
    assert engine.local_rank == arguments.local_rank == deepspeed.comm.get_local_rank()
    assert torch.distributed.get_world_size(engine.data_parallel_group) == engine.dp_world_size == world
    assert engine.get_data_parallel_rank() == engine.global_rank == rank
    assert engine.get_data_types() == (torch.float32, torch.float32) and not engine.zero_use_cpu_optimizer()
    assert engine.communication_data_type is torch.float32 and engine.gradient_predivide_factor() == 1.0
    assert engine.zero_overlap_comm() is (engine.zero_optimization_stage() == 3)
    assert (engine.sequence_parallel_size, engine.seq_dp_world_size) == (1, engine.dp_world_size)
    engine.optimizer.set_lr(0.2)
    assert engine.get_lr() == [0.2] and engine.optimizer.get_lr() == 0.2
    assert (engine.get_data_parallel_world_size(), engine.get_pipeline_parallel_rank()) == (world, 0)
    assert engine.loss_scale() == 0 and engine.client_optimizer is None and not engine.has_moe_layers
    engine.allreduce_gradients()
    assert not hasattr(engine, "another")
    engine.destroy()
    assert {*vars(model)} == own
    with pytest.raises(OrderError, match="make a new Trainer"):
        engine(*batch(rank, 0, 0))


def test_what_an_engine_tells(ranks: Ranks) -> None:
    ranks(2, told)


def formats(rank: int, world: int) -> None:
    """A model computes in the format that it was made in, where the config names none."""
    x, y = batch(rank, 0, 0)
    plain = Network().double()
    updated = torch.optim.SGD(plain.parameters(), 0.1)
    for each in range(world):
        values, labels = batch(each, 0, 0)
        (plain(values.double(), labels) / world).backward()
    updated.step()
    for stage in (0, 2, 3):
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine, *_ = deepspeed.initialize(
            model=Network().double(),
            config=config(1, stage, optimizer=sgd, zero_allow_untested_optimizer=True),
        )
        engine.backward(engine(x.double(), y))
        engine.step()
        for name, found in engine.module_state_dict().items():
            assert found.dtype == torch.float64
            assert torch.allclose(found, plain.get_parameter(name), rtol=0, atol=1e-14), (stage, name)
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    logs.logger.addHandler(handler)
    for made_in, computes in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        engine, *_ = deepspeed.initialize(model=Network().to(made_in), config=config(1, 2))
        assert {parameter.dtype for parameter in engine.module.parameters()} == {computes}
    logs.logger.removeHandler(handler)
    said = [text for text in caught if "neither bf16 nor fp16 is enabled" in text]
    assert len(said) == (rank == 0) and all("parameters are in float16" in text for text in said)


def test_a_model_computes_in_the_format_it_was_made_in(ranks: Ranks) -> None:
    ranks(2, formats)


TENSORS = {
    "rng": torch.arange(5000, dtype=torch.uint8),
    "best": torch.tensor(0.1, dtype=torch.float64),
    "half": [torch.ones(2, 3, dtype=torch.bfloat16).t()],
    "none": torch.empty(0, 3),
    "mask": torch.tensor([True, False]),
}


def test_client_state_may_have_tensors(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2, told_back, tmp_path):
        assert found.keys() == TENSORS.keys()
        for key, value in TENSORS.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)


def consolidated(rank: int, world: int, folder: Path) -> tuple[bool, bool]:
    from polyreme.compat.deepspeed.utils import zero_to_fp32

    model = Network()
    section = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, config=config(1, 3, **section))
    engine.backward(engine(*batch(rank, 0, 0)))
    engine.step()
    engine.save_checkpoint(folder, tag="one", client_state={"epoch": 3, "pair": (1, 2)})
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.save_16bit_model(folder, "weights.bin")
    taken: list[Any] = []
    engine.load_module_state_dict({"module": {}}, custom_load_fn=lambda src, dst: taken.extend([src, dst]))
    assert taken == [{}, engine.module]
    if rank:
        return whole is None, True
    masters = engine.polyreme.state_dict(rank0_only=True, master=True) if world == 1 else {}
    fp32 = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert all(torch.equal(fp32[name], masters[name]) for name in masters)
    if world == 1:
        flat = torch.cat(engine.optimizer.fp32_partitioned_groups_flat).sort().values
        assert torch.equal(flat[flat != 0], torch.cat([m.flatten() for m in masters.values()]).sort().values)
    assert all(torch.equal(fp32[name].bfloat16(), whole[name]) for name in whole)
    loaded = torch.load(folder / "weights.bin")
    [states] = map(torch.load, zero_to_fp32.get_optim_files(folder / "one"))  # as Lightning does
    assert states["optimizer_state_dict"] == {"zero_stage": 3}
    beside = torch.load(zero_to_fp32.get_model_state_file(folder / "one", 3))
    assert beside["epoch"] == 3 and beside["pair"] == (1, 2) and beside["global_steps"] == 1
    fresh = zero_to_fp32.load_state_dict_from_zero_checkpoint(Network(), folder)
    assert torch.equal(next(fresh.parameters()), fp32["blocks.0.0.weight"])
    return {t.dtype for t in whole.values()} == {torch.bfloat16}, loaded.keys() == whole.keys()


@pytest.mark.parametrize("world", [1, 2])
def test_whole_weights(ranks: Ranks, tmp_path: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks(world, consolidated, tmp_path) == [(True, True)] * world
    wanted = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "one", True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "polyreme"]:
        monkeypatch.setitem(sys.modules, name, None)  # as where Polyreme is not installed
    beside = runpy.run_path(str(tmp_path / "zero_to_fp32.py"))
    read = beside["get_fp32_state_dict_from_zero_checkpoint"]
    torch.testing.assert_close(read(tmp_path), wanted, rtol=0, atol=0)
    torch.testing.assert_close(read(tmp_path, "one", True), trained, rtol=0, atol=0)
    beside["convert_zero_checkpoint_to_fp32_state_dict"](tmp_path, tmp_path / "made")
    torch.testing.assert_close(torch.load(tmp_path / "made" / "pytorch_model.bin"), wanted, rtol=0, atol=0)
    with (tmp_path / "one" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        read(tmp_path)
    (tmp_path / "one" / "resume.json").unlink()
    with pytest.raises(ValueError, match="Polyreme to be installed"):
        read(tmp_path)


def held(layer: Any) -> None:
    """Parameters are whole from `all_gather` to `partition`."""
    was, kind = layer.weight.ds_status, type(layer.weight)
    layer.weight.all_gather_coalesced([layer.weight, layer.bias]).wait()
    layer.bias.all_gather()
    assert layer.weight.ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE
    assert layer.weight.sum().item() and layer.bias.shape == (WIDTH,)
    with pytest.raises(UnsupportedError, match="modifier_rank=0"):
        layer.weight.partition(has_been_updated=True)
    layer.weight.partition()
    assert layer.bias.sum().item()  # as they were gathered together
    layer.bias.partition()
    assert (layer.weight.ds_status, type(layer.weight)) == (was, kind)
    if was is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE:
        layer.bias.all_gather([layer.bias])
        with torch.no_grad():
            layer.bias.add_(1)
        with pytest.raises(RuntimeError, match="inside of GatheredParameters would be lost"):
            layer.bias.partition()


def gathered(rank: int, world: int) -> list[float]:
    """What rank 0 writes in GatheredParameters reaches all, before initialize and after it."""
    with deepspeed.zero.Init():
        model = Network()
    layer = model.blocks[0][0]
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
        if rank == 0:
            nn.init.constant_(layer.weight, 0.25)
    with deepspeed.zero.GatheredParameters(layer.weight):
        before = layer.weight.sum().item()
    held(layer)
    section = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    kept = deepspeed.initialize(model=model, config=config(1, 3, **section))
    assert kept[0].zero_gather_16bit_weights_on_model_save() is False
    status = deepspeed.zero.ZeroParamStatus
    assert layer.weight.ds_status is (status.NOT_AVAILABLE if world > 1 else status.AVAILABLE)
    assert layer.weight.ds_numel == WIDTH * WIDTH
    assert layer.weight.partition_numel() == WIDTH * WIDTH // world  # type: ignore[operator]
    with deepspeed.zero.GatheredParameters([layer.weight, layer.bias], modifier_rank=world - 1):
        if rank == world - 1:
            nn.init.constant_(layer.weight, 0.5)
    held(layer)
    with deepspeed.zero.GatheredParameters(layer.weight):
        assert layer.weight.ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE
        return [before, layer.weight.sum().item()]


@pytest.mark.parametrize("world", [1, 2])
def test_gathered_parameters(ranks: Ranks, world: int) -> None:
    assert ranks(world, gathered) == [[0.25 * WIDTH * WIDTH, 0.5 * WIDTH * WIDTH]] * world


def loop(rank: int, world: int) -> float:
    """Windows that end where the caller says, and evaluation between."""
    engine, *_ = deepspeed.initialize(
        model=Network(),
        config=config(
            2, 1, optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_allow_untested_optimizer=True
        ),
    )
    for window in (3, 1, 2):
        for i in range(window):
            engine.set_gradient_accumulation_boundary(i == window - 1)
            engine.backward(engine(*batch(rank, 0, i)), scale_wrt_gas=False)
            engine.eval()
            with torch.no_grad():
                engine(*batch(rank, 9, i))
            engine.train()
            engine.step()
    assert engine.global_steps == 3
    first, norm = weights(engine), engine.get_global_grad_norm()
    with engine.no_sync():
        engine.backward(engine(*batch(rank, 0, 0)))
        with pytest.raises(OrderError, match="no_sync"):
            engine.step()
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    for managed in (True, False):
        engine, *_ = deepspeed.initialize(
            model=Network(),
            config=config(1 if managed else 2, 2, **sgd, managed_gradient_accumulation=managed),
        )
        for window in (3, 1, 2):
            with engine.coalesce_grad_reduction() if managed else contextlib.nullcontext():
                for i in range(window):
                    engine.backward(engine(*batch(rank, 0, i)), scale_wrt_gas=False)
            assert engine.is_gradient_accumulation_boundary() == managed
            engine.step()
        assert torch.allclose(weights(engine), first, rtol=1e-5, atol=1e-6), managed
        assert engine.global_samples == world * MICRO * (3 if managed else 6)
    with pytest.raises(OrderError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)
    cleared(rank)
    return norm


def cleared(rank: int) -> None:
    """Gradients that are cleared within a window: stage 2 keeps them, as with DeepSpeed, others say so."""
    samples = {}
    for stage in (1, 2):
        section = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        engine, optimizer, *_ = deepspeed.initialize(model=Network(), config=config(2, stage, **section))
        for i in range(2):
            warned = i == 1 and stage == 1
            with training.warned(rank, "has not ended") if warned else contextlib.nullcontext():
                optimizer.zero_grad()
            engine.backward(engine(*batch(rank, 0, i)))
            engine.step()
        samples[stage] = engine.last.samples
    assert samples[2] == 2 * samples[1]


def test_the_caller_decides_where_windows_end(ranks: Ranks) -> None:
    norms = ranks(2, loop)
    assert norms[0] == norms[1] > 0


def shown(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What a run leaves of figures."""
    section = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "csv_monitor": {"enabled": True, "output_path": str(folder / "csv"), "job_name": "job"},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(folder / "flops.txt")},
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
    }
    model = Network()
    deepspeed.utils.set_z3_leaf_modules(model, [nn.Tanh])
    engine, *_ = deepspeed.initialize(model=model, config=config(1, 3, **section))
    for step in range(STEPS):
        engine.backward(engine(*batch(rank, step, 0)))
        engine.step()
    assert engine.monitor.enabled and engine.flops_profiler is not None
    return {"keep": engine.polyreme.config.zero.keep, "loss": engine.last.loss}


def test_figures_are_shown(ranks: Ranks, tmp_path: Path) -> None:
    first, other = ranks(2, shown, tmp_path)
    assert first == other and first["keep"] == ["blocks.0.1", "blocks.1.1", "blocks.2.1"]
    rows = (tmp_path / "csv" / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert len(rows) == 1 + STEPS
    assert [row.split(",")[0] for row in rows[1:]] == [str(2 * MICRO * (1 + step)) for step in range(STEPS)]
    assert float(rows[-1].split(",")[1]) == pytest.approx(first["loss"], rel=1e-6)
    assert "Linear" in (tmp_path / "flops.txt").read_text()


def around(rank: int, world: int, folder: Path) -> None:
    """What scripts and libraries do to a module at stage 3 around training."""
    torch.manual_seed(7)
    drawn = torch.get_rng_state()
    model, section = Network(), {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    torch.set_rng_state(drawn)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config(1, 3, **section))
    assert torch.equal(torch.get_rng_state(), drawn) and torch.initial_seed() == 7
    engine.backward(engine(*batch(rank, 0, 0)))
    engine.step()
    assert sum(t.numel() for s in optimizer.state_dict()["state"].values() for t in s.values()) > 0
    whole = engine.module_state_dict()
    assert model.cpu() is model and model.to(torch.float32) is model
    with pytest.raises(UnsupportedError, match="conversion to torch"):
        model.half()
    if rank:
        assert {name: t.numel() for name, t in model.state_dict().items()} == dict.fromkeys(whole, 0)
    else:  # whose names Lightning and PEFT ask for, and whose numbers nobody gets unseen
        listed = model.state_dict()
        assert listed.keys() == whole.keys() and model.blocks.state_dict().keys()
        for use in (
            torch.clone,
            lambda t: torch.save(t, folder / "t"),
            lambda t: save_file({"t": t}, folder / "s"),
        ):
            with pytest.raises(ModelError, match=r"of parameter blocks\.0\.0\.weight"):
                use(listed["blocks.0.0.weight"])
    offload = optimizer.parameter_offload  # as TRL does around what it generates
    assert not [*offload.module.ds_external_parameters(), *offload.forward_hooks, *offload.backward_hooks]
    offload._register_deepspeed_module(offload.module)
    assert not any(parameter.ds_active_sub_modules for parameter in model.parameters())
    with deepspeed.zero.GatheredParameters([*model.parameters(), None]):
        assert all(torch.equal(t, whole[name]) for name, t in model.state_dict().items())
    other, *_ = deepspeed.initialize(model=model, config=config(1, 3))
    other(*batch(rank, 1, 0))
    for name, tensor in other.module_state_dict().items():
        assert torch.equal(tensor, whole[name])


def test_around_training(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, around, tmp_path)


def refusals(rank: int, world: int, folder: Path) -> None:
    model = Network()
    with pytest.raises(OrderError, match="config"):
        deepspeed.initialize(model=model)
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=config(1, 0))
    assert (optimizer, loader, scheduler) == (None, None, None)
    x, y = batch(0, 0, 0)
    loss = engine(x, y)
    with pytest.raises(OrderError, match=r"backward\(\) of an engine that updates nothing"):
        engine.backward(loss)
    assert engine.zero_optimization_stage() == 0 and engine.train_batch_size() == MICRO
    assert engine.fp16_enabled() is False and engine.zero_reduce_bucket_size() > 0
    assert engine.load_checkpoint(folder) == (None, None)
    engine, *_ = deepspeed.initialize(
        model=Network(), config=config(1, 0, optimizer={"type": "Adam", "params": {"lr": 0.1}})
    )
    with pytest.raises(ArgumentError, match=r"client_state\['net'\] is a Network"):
        engine.save_checkpoint(folder, client_state={"net": model})
    with pytest.raises(ArgumentError, match="plain name"):
        engine.save_checkpoint(folder, tag="../elsewhere")
    with pytest.raises(UnsupportedError, match="init_inference"):
        deepspeed.init_inference(model)


def test_what_cannot_be_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, refusals, tmp_path)


def read(rank: int, world: int) -> None:
    """`.grad` between backward and step: None where DeepSpeed has it elsewhere, but for who would change
    it."""
    section = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    for stage in range(4):
        model = Network()
        engine, *_ = deepspeed.initialize(model=model, config=config(1, stage, **section))
        parameters = list(model.parameters())
        engine.backward(engine(*batch(rank, 0, 0)))
        if stage < 2:
            with pytest.raises(ModelError, match="safe_get_full_grad"):
                _ = parameters[0].grad
        else:
            with training.warned(rank, r"safe_get_full_grad.*it is None"):
                assert [p.grad for p in parameters] == [None] * len(parameters)
            with warnings.catch_warnings():  # once
                warnings.simplefilter("error")
                assert parameters[0].grad is None
            parameters[0].grad = None
        with pytest.raises(ModelError, match="gradient_clipping"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        with pytest.raises(ModelError, match="is set"):
            parameters[0].grad = torch.ones(parameters[0].shape)
        assert deepspeed.utils.safe_get_full_grad(parameters[0]).any()
        engine.step()
        assert engine.get_global_grad_norm() > 0 and parameters[0].grad is None
        engine.destroy()


def test_gradients_between_backward_and_step(ranks: Ranks) -> None:
    ranks(2, read)


def scales(rank: int, world: int) -> list[Any]:
    """The loss scale after each of four steps, the second of which overflows."""
    found: list[Any] = []
    source = {"train_batch_size": MICRO, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine, optimizer, _, _ = deepspeed.initialize(model=Network(), config=source | {"fp16": fp16})
    held, scaler = optimizer.loss_scale_config, optimizer.loss_scaler  # these follow
    assert (held.dynamic_loss_scale, held.scale_window, held.cur_iter) == (True, 2, 0)
    for step in range(5):
        x, y = batch(0, step, 0)
        engine.backward(engine(x, y) * (float("inf") if step == 1 else 1.0))
        engine.step()
        found.append((held.cur_scale, held.cur_iter, scaler.loss_scale))
    assert isinstance(scaler, DynamicLossScaler) and isinstance(held, LossScaleConfig)
    _, optimizer, _, _ = deepspeed.initialize(
        model=Network(), config=source | {"fp16": {"enabled": True, "loss_scale": 128}}
    )
    found += [optimizer.dynamic_loss_scale, optimizer.loss_scaler.loss_scale]
    half = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    engine, optimizer, _, _ = deepspeed.initialize(model=Network(), config=source | half)
    x, y = batch(0, 0, 0)
    engine.backward(engine(x, y) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.torch_autocast_dtype()) == (1, torch.float16)
    assert optimizer.needs_scaler() and engine._config.gradient_clipping == 1.0
    with pytest.raises(ModelError, match=r"engine\.scale\(loss\)"):
        engine(x, y).backward()
    found += [optimizer.dynamic_loss_scale, optimizer.cur_scale, optimizer.loss_scaler.scale_window]
    both = {"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}
    engine = deepspeed.initialize(model=Network(), config=source | both)[0]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = Network().bfloat16()(x, y)
    assert torch.equal(engine(x, y), wanted) and wanted.dtype == torch.float32
    return found


def nonfinite(rank: int, world: int) -> list[tuple[int, bool]]:
    """Steps that an infinite gradient had skipped, and whether the weights are finite, under each config."""
    found = []
    source = {"train_batch_size": MICRO, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    bf16 = {"bf16": {"enabled": True}}
    ignoring = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    for stage, more in ((0, {}), (1, {}), (3, {}), (0, bf16), (2, bf16), (2, ignoring), (3, ignoring)):
        settings = (
            source | more | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        )
        engine = deepspeed.initialize(model=Network(), config=settings)[0]
        x, y = batch(0, 0, 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):  # the config decides
                    loss = engine(x, y)
                assert loss.dtype == (torch.bfloat16 if more else torch.float32)
                engine.backward(loss * float("inf"))
                engine.step()
        assert sum("NaN or Inf" in str(each.message) for each in caught) == 1
        found.append((engine.skipped_steps, bool(weights(engine).isfinite().all())))
    return found


def test_gradients_that_are_not_finite(ranks: Ranks) -> None:
    """They are applied or skipped as DeepSpeed does, with one warning."""
    applied, skipped = (0, False), (2, True)
    assert ranks(1, nonfinite) == [[applied, skipped, skipped, skipped, skipped, applied, skipped]]


def test_the_optimizer_tells_of_the_loss_scale(ranks: Ranks) -> None:
    after = [256, 128, 128, 128, 256]  # after an overflow it takes a good step more
    expected = [*((scale, i + 1, scale) for i, scale in enumerate(after)), False, 128, True, 2.0**15, 2000]
    assert ranks(1, scales) == [expected]


def universal(rank: int, world: int, folder: str) -> list[Any]:
    """Weights that were saved on two ranks, and read from a copy that the converter made."""
    adamw = {"type": "AdamW", "params": {"lr": 0.01}}
    source = config(1, 2) | {"checkpoint": {"load_universal": True}, "optimizer": adamw}
    engine, _, _, _ = deepspeed.initialize(model=Network(), config=source)
    engine.backward(engine(*batch(0, 0, 0)))
    engine.step()
    engine.save_checkpoint(folder)
    with engine.polyreme.full_parameters() as module:
        saved = flat(module.parameters())
    if engine.global_rank == 0:
        step = f"{folder}/global_step1"
        args = ["--input_folder", step, "--output_folder", f"{step}_universal"]
        ds_to_universal.main(ds_to_universal.parse_arguments(args))
        with pytest.raises(ArgumentError, match="is there"):
            ds_to_universal.main(ds_to_universal.parse_arguments(args))
    engine.polyreme.mesh.gather_objects(None)
    again, _, _, _ = deepspeed.initialize(
        model=Network(),
        config=source | {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    )
    path, _ = again.load_checkpoint(folder)
    with again.polyreme.full_parameters() as module:
        return [Path(str(path)).name, again.global_steps, torch.equal(saved, flat(module.parameters()))]


def test_a_universal_checkpoint_is_a_copy(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, universal, str(tmp_path)) == [["global_step1_universal", 1, True]] * 2


def grown(rank: int, world: int, stage: int, divided: bool) -> list[float]:
    """Losses of a model to which a script adds a layer and for which it replaces one, both made under
    `zero.Init` or plainly."""
    init = deepspeed.zero.Init if divided else contextlib.nullcontext
    with init():
        model = Network()
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}
    engine, *_ = deepspeed.initialize(model=model, config=config(1, stage, **section))
    losses = []
    for step in range(4):
        loss = engine(*batch(rank, step, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 1:
            torch.manual_seed(3)
            with init():
                model.blocks[1].append(nn.Linear(WIDTH, WIDTH))
                model.blocks[3] = nn.Linear(WIDTH, 4)
            engine.polyreme.refresh()
    numbers = sum(p.numel() for p in engine.module_state_dict().values())
    assert numbers == (4 * WIDTH + 4) * (WIDTH + 1)
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_layers_made_under_zero_init_are_taken_in(ranks: Ranks, world: int) -> None:
    plain = ranks(world, grown, 0, False)
    for stage, divided in (3, False), (3, True), (2, True):
        assert ranks(world, grown, stage, divided) == plain


def forgotten(rank: int, world: int) -> list[Any]:
    """A model whose engine nobody has any more, as Lightning's between validate, fit and test, goes on with
    another one; of the states of an engine that has ended none is seen. One that gathers at its end leaves an
    ordinary model."""
    cpu = {"device": "cpu"}
    offloaded = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": cpu,
            "offload_optimizer": cpu,
        }
    }
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **offloaded}
    found: list[Any] = []
    with deepspeed.zero.Init():
        model = Network()
    own = {*vars(model)}
    for stage in (offloaded, section, section):
        front, optimizer, _, _ = deepspeed.initialize(model=model, config=config(1, 3) | stage)
        with torch.no_grad():
            found.append(front(*batch(0, 0, 0)).item())
        if optimizer is not None:
            front.backward(front(*batch(rank, 0, 0)))
            front.step()
            assert optimizer.state
        front = None
        gc.collect()
    front, *_ = deepspeed.initialize(model=model, config=config(1, 3) | section)
    assert {*vars(model)} > own and all(map(vars, model.parameters()))
    front.polyreme.close(gather=True)
    assert {*vars(model)} == own and not any(map(vars, model.parameters()))
    return [found[0] == found[1], found[1] > found[2], dict(optimizer.state)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_keeps_its_engine(ranks: Ranks, world: int) -> None:
    assert ranks(world, forgotten) == [[True, True, {}]] * world


DATA = Path(__file__).parent.parent / "data" / "deepspeed"


def take_over(rank: int, world: int, case: str) -> None:
    """Go on from what DeepSpeed's own `save_checkpoint` left (tests/data/deepspeed/make.py)."""
    spec = importlib.util.spec_from_file_location("made_by_deepspeed", DATA / "make.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    with deepspeed.zero.Init():
        model = made.Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if len(p.ds_shape) > 1]
    groups = [{"params": matrices}, {"params": [p for p in trained if len(p.ds_shape) <= 1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={"train_batch_size": 4, **made.CASES[case]},
    )
    path, state = engine.load_checkpoint(str(DATA / case))
    assert path == str(DATA / case / "global_step3") and state == {"note": "ours"}
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 12, 0)
    assert engine.micro_steps == 3 and scheduler.last_epoch == 3 and engine.get_lr() == [0.0025, 0.0025]
    engine.backward(engine(torch.arange(10).view(2, 5)))
    engine.step()
    assert engine.polyreme.state.step == 4 and engine.get_lr() == [0.002, 0.002]


@pytest.mark.parametrize("case", ["stage1-bf16", "stage3-fp32"])
def test_client_state_and_schedule_of_deepspeeds_own_checkpoint(ranks: Ranks, case: str) -> None:
    ranks(2, take_over, case)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def around_saving(rank: int, world: int, folder: str) -> None:
    source = config(1, 3, optimizer={"type": "Adam", "params": {"lr": 0.01}})
    strict, *_ = deepspeed.initialize(
        model=Tied(), config={**source, "checkpoint": {"tag_validation": "Fail"}}
    )
    with pytest.raises(AssertionError, match="different tags, tag-0, tag-1"):
        strict.save_checkpoint(folder, tag=f"tag-{rank}")
    logs._log_dist_once.cache_clear()
    logs.set_log_level_from_string("warning")  # an earlier test of this process may have set another
    with contextlib.redirect_stdout(io.StringIO()) as told:
        warned = {**source, "data_types": {"buffer_dtype": "bf16"}}
        engine, *_ = deepspeed.initialize(model=Tied(), config=warned)
        engine.save_checkpoint(folder, tag=f"tag-{rank}")  # as a tag of each rank's clock
    for words in "data_types.buffer_dtype = 'bf16': buffers stay", "not in mp_rank_*_model_states.pt":
        assert (words in told.getvalue()) is (rank == 0)
    assert engine.load_checkpoint(folder, tag="tag-0")[0] == str(Path(folder) / "tag-0")
    engine.save_checkpoint(folder)
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert found["second.weight"] is found["first.weight"]
    Tied().load_state_dict(found)
    half = zero_to_fp32.to_torch_tensor(found, dtype="bf16")
    assert half["second.weight"] is half["first.weight"] and half["first.weight"].dtype == torch.bfloat16
    if rank == 0:
        for name, folder_of in (("fp16", "half"), ("float32", "whole")):
            zero_to_torch.main([folder, f"{folder}/{folder_of}", "--dtype", name])
            saved = torch.load(f"{folder}/{folder_of}/pytorch_model.bin")
            assert saved["second.weight"] is saved["first.weight"]
            assert torch.equal(saved["first.weight"], found["first.weight"].to(saved["first.weight"].dtype))
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/one", max_shard_size=None)
        assert (Path(folder) / "one" / "pytorch_model.bin").exists()
        with pytest.raises(ValueError, match="dtype='int8', as which weights are not"):
            zero_to_fp32.to_torch_tensor(found, dtype="int8")
    weight = engine.module.first.weight
    with unwrap_model_for_generation(engine) as whole:
        assert whole is engine and torch.equal(weight, found["first.weight"])
    with (
        pytest.raises(RuntimeError, match="inside of GatheredParameters would be lost"),
        deepspeed.zero.GatheredParameters([weight]),
        torch.no_grad(),
    ):
        weight.add_(1)


def test_tied_names_tags_and_gathered_weights(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, around_saving, str(tmp_path))


def only_its_bucket(rank: int, world: int) -> None:
    """What is gathered is what was asked for, and the edits of the rank named reach the masters."""
    settings = {
        "batch": {"size": world},
        "zero": {"stage": 3, "min_bucket": 0},
        "precision": {"compute": "bf16"},
        "optimizer": {"name": "sgd"},
    }
    engine = polyreme.initialize(Network(), settings)
    asked, other = (engine.module.blocks[i][0].weight for i in (0, 1))
    with deepspeed.zero.GatheredParameters(asked, modifier_rank=1):
        assert not state_of(other).there and state_of(asked).there
        with torch.no_grad():
            asked.fill_(rank + 2)
    master = engine.numbers(asked).whole(MASTER)
    assert master is not None and master.dtype == torch.float32 and master.eq(3).all()


def test_gathers_no_more_than_was_asked_for(ranks: Ranks) -> None:
    ranks(2, only_its_bucket)
