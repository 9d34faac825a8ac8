"""The DeepSpeed door's pipelines beside plain torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
import polyreme.compat.deepspeed as deepspeed
from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError, UnsupportedError
from polyreme.compat.deepspeed.runtime.pipe import module as pipe_module
from polyreme.compat.deepspeed.runtime.pipe.engine import PipelineEngine
from polyreme.compat.deepspeed.runtime.pipe.module import PipelineError
from polyreme.compat.deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology
from polyreme.errors import ConfigError, ModelError
from pool import Ranks

VOCABULARY, WIDTH, MICRO, ACCUMULATION, STEPS = 11, 6, 2, 3, 3
OPTIONS = {"lr": 0.02, "eps": 1e-3}  # so that gradients near 0 do not count by their sign alone
ADAM = {"type": "Adam", "params": OPTIONS}


class Block(nn.Module):
    """Takes and returns hidden states, and a number for each sample that all layers use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, scale = given
        return x + torch.tanh(self.linear(x)) * scale[:, None, None], scale


class Table(nn.Embedding):
    """The first use of the tied layer."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(given[0]), given[1]


def head(table: Table, given: tuple[Tensor, Tensor]) -> Tensor:
    return given[0] @ table.weight.T


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers() -> list[Any]:
    return [
        TiedLayerSpec("table", Table, VOCABULARY, WIDTH),
        *[LayerSpec(Block, WIDTH) for _ in range(3)],
        lambda given: (given[0] * 1.5, given[1]),
        TiedLayerSpec("table", Table, VOCABULARY, WIDTH, forward_fn=head),
    ]


class Plain(nn.Module):
    """The same in one process."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        specs = [spec for spec in layers() if isinstance(spec, LayerSpec)]
        for spec in specs if counted else ():
            spec.build()
        self.table, *blocks = (spec.build() for spec in specs[:-1])
        self.blocks = nn.ModuleList(blocks)

    def forward(self, given: Any) -> Tensor:
        x: Any = self.table(given)
        for block in self.blocks:
            x = block(x)
        return head(self.table, (x[0] * 1.5, x[1]))  # type: ignore[arg-type]


def batches(rank: int, seed: int = 0) -> Iterator[Any]:
    draw = torch.Generator().manual_seed(10 + rank + 100 * seed)
    while True:
        ids = torch.randint(VOCABULARY, (MICRO, 4), generator=draw)
        yield (ids, torch.rand(MICRO, generator=draw)), ids.roll(1, 1)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().float().flatten() for t in tensors])


def plain(dp: int, counted: bool, steps: int = STEPS) -> tuple[list[float], Tensor, float]:
    """Losses, weights and a validation loss that plain torch comes to."""
    model = Plain(counted)
    optimizer = torch.optim.Adam(model.parameters(), **OPTIONS)
    streams, losses = [batches(rank) for rank in range(dp)], []
    for _ in range(steps):
        total = 0.0
        for stream in streams:
            for inputs, labels in (next(stream) for _ in range(ACCUMULATION)):
                loss = loss_of(model(inputs), labels) / ACCUMULATION / dp
                loss.backward()
                total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # DeepSpeed's default
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    streams = [batches(rank, seed=1) for rank in range(dp)]
    with torch.no_grad():
        found = [loss_of(model(x), y) for stream in streams for x, y in (next(stream) for _ in range(2))]
    return losses, flat(model.parameters()), float(sum(found)) / len(found)


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": ADAM,
        **more,
    }


def weights(engine: PipelineEngine) -> Tensor:
    """In the order of the plain model's."""
    found = engine.module_state_dict()
    assert torch.equal(found["0.module.weight"], found["5.module.weight"])
    names = [f"{layer}.linear.{name}" for layer in (1, 2, 3) for name in ("weight", "bias")]
    return flat(found[name] for name in ("0.module.weight", *names))


def data_for(engine: PipelineEngine, seed: int = 0) -> Iterator[Any] | None:
    """Data where DeepSpeed's scripts have it: on the first and the last stage."""
    return (
        batches(engine.grid.data_parallel_id, seed)
        if engine.is_first_stage() or engine.is_last_stage()
        else None
    )


def train(rank: int, world: int, stages: int, method: str, how: str) -> Any:
    torch.manual_seed(3)
    model = PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, partition_method=method,
                           activation_checkpoint_interval=int(how == "recompute"))  # fmt: skip
    assert (rank // (world // stages)) == model.stage_id == model.mpu().get_stage_id()
    own = sum(p.numel() for p in model.parameters())
    section, given = config(zero_optimization={"stage": int(how == "recompute")}), dict[str, Any]()
    if how == "object":
        del section["optimizer"]
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
        given["optimizer"] = torch.optim.Adam([{"params": others}, {"params": biases, "lr": 0.02}], **OPTIONS)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=section, **given)
    assert isinstance(engine, PipelineEngine) and engine.module is model and optimizer is engine.optimizer
    stream = data_for(engine)
    losses = [float(engine.train_batch(data_iter=stream)) for _ in range(STEPS)]
    tested = engine.eval_batch(data_for(engine, seed=1), num_micro_batches=2)
    assert engine.global_steps == STEPS and engine.get_global_grad_norm() > 0
    return losses, weights(engine), float(tested), model.parts, own


def same(found: Any, wanted: Any) -> None:
    losses, whole, tested = found[:3]
    assert losses == pytest.approx(wanted[0], rel=1e-5)
    assert torch.allclose(whole, wanted[1], rtol=1e-4, atol=1e-5)
    assert tested == pytest.approx(wanted[2], rel=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_training_is_that_of_one_process(ranks: Ranks, world: int) -> None:
    block, table = WIDTH * WIDTH + WIDTH, VOCABULARY * WIDTH
    for method, how in (("parameters", "config"), ("uniform", "object"), ("type:^table$", "recompute")):
        wanted = plain(1, counted=method == "parameters")
        told = ranks(world, train, world, method, how)
        for found in told:
            same(found, wanted)
        if world == 2:
            parts = {"parameters": [0, 3, 6], "uniform": [0, 3, 6], "type:^table$": [0, 5, 6]}[method]
            assert all(found[3] == parts for found in told)
            blocks = [min(parts[1] - 1, 3), max(4 - parts[1], 0)]
            assert [found[4] for found in told] == [table + count * block for count in blocks]


def test_beside_data_parallelism_and_with_stages_in_the_middle(ranks: Ranks) -> None:
    for stages in (2, 4):
        wanted = plain(4 // stages, counted=True)
        for found in ranks(4, train, stages, "parameters", "config"):
            same(found, wanted)


def resized(rank: int, world: int) -> int:
    """Micro-batches of a step, after sizes of a batch were set."""
    model = PipelineModule(layers(), num_stages=world, loss_fn=loss_of)
    engine, *_ = deepspeed.initialize(model=model, config=config())
    engine.set_train_batch_size(MICRO * ACCUMULATION)
    for count in (1, 5):
        with pytest.raises(UnsupportedError, match="is made for the 3 micro-batches"):
            engine.set_train_batch_size(MICRO * count)
    assert engine.train_batch_size() == MICRO * ACCUMULATION
    engine.train_batch(batches(0))
    return int(engine.micro_steps)


def test_a_batch_of_another_size_is_refused(ranks: Ranks) -> None:
    assert ranks(2, resized) == [ACCUMULATION] * 2


def resumed(rank: int, world: int, stages: int, folder: Path, steps: int, goes_on: bool) -> Tensor:
    torch.manual_seed(3)
    model = PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    engine = deepspeed.initialize(model=model, config=config())[0]
    if goes_on:
        path, told = engine.load_checkpoint(str(folder))
        assert path is not None and told == {"note": 5} and engine.global_steps == 2
    stream = batches(0)
    for _ in range(engine.global_steps * ACCUMULATION):
        next(stream)
    for _ in range(steps):
        engine.train_batch(stream)
    if not goes_on:
        engine.save_checkpoint(str(folder), client_state={"note": 5})
    return weights(engine)


def test_a_checkpoint_goes_on_with_other_stages(ranks: Ranks, tmp_path: Path) -> None:
    wanted = plain(1, counted=False)[1]
    for before, after in ((2, 1), (1, 2)):
        folder = tmp_path / f"{before}"
        ranks(before, resumed, before, folder, 2, False)
        for found in ranks(after, resumed, after, folder, 1, True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def seeded(rank: int, world: int) -> Any:
    """Weights and a loss with dropout, whose random numbers follow from the layers alone."""
    specs = [LayerSpec(nn.Linear, 4, 4), nn.Dropout(0.5), LayerSpec(nn.Linear, 4, 4), nn.Dropout(0.5)]
    model = PipelineModule(specs, num_stages=world, loss_fn=nn.MSELoss(), seed_layers=True,
                           partition_method="uniform", activation_checkpoint_interval=1)  # fmt: skip
    engine = deepspeed.initialize(model=model, config=config())[0]
    draw = torch.Generator().manual_seed(0)
    data = [torch.randn(2, MICRO, 4, generator=draw).unbind() for _ in range(2 * ACCUMULATION)]
    losses = [float(engine.train_batch(iter(data[i:]))) for i in (0, ACCUMULATION)]
    return losses, flat(found for _, found in sorted(engine.module_state_dict().items()))


def test_seeded_layers_are_alike_with_any_stages(ranks: Ranks) -> None:
    (alone,) = ranks(1, seeded)
    for losses, whole in ranks(2, seeded):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert torch.allclose(whole, alone[1], rtol=1e-4, atol=1e-5)


def evaluated(rank: int, world: int) -> None:
    """What eval_batch returns, of a module without loss_fn and of one with; and DeepSpeed's own checks."""
    torch.manual_seed(rank)  # rank 1's numbers count for its stage, but not for what is tied to the first's
    shared = nn.Linear(4, 4)
    stack = nn.Sequential(shared, nn.ReLU(), nn.Linear(4, 4), shared)
    model = PipelineModule(copy.deepcopy(stack), num_stages=2, partition_method="uniform")
    held = torch.tensor([sum(p.numel() for p in model.parameters())])
    dist.all_reduce(held)
    assert held.item() == 3 * 20  # the shared layer on both
    engine = deepspeed.initialize(model=model, config=config(), model_parameters=list(model.parameters()))[0]
    reference = copy.deepcopy(stack)
    whole = engine.module_state_dict()
    reference[0].load_state_dict({"weight": whole["0.module.weight"], "bias": whole["0.module.bias"]})
    reference[2].load_state_dict({"weight": whole["2.weight"], "bias": whole["2.bias"]})
    assert torch.equal(whole["2.weight"], stack[2].weight) == (rank == 1)
    assert torch.equal(whole["0.module.weight"], stack[0].weight) == (rank == 0)
    x = torch.arange(2 * MICRO * 4.0).view(2, MICRO, 4)
    outputs = reference(x).detach()
    data = [(part, 0) for part in x]
    assert torch.allclose(engine.eval_batch(iter(data), num_micro_batches=2), outputs.mean(0))
    listed, last = engine.eval_batch(
        iter(data), compute_loss=False, reduce_output=None, return_logits=True, num_micro_batches=2
    )
    if rank == 1:
        assert torch.allclose(torch.stack(listed), outputs) and torch.allclose(last, outputs[1])
    else:
        assert listed is None and last is None
    assert engine.is_pipe_parallel and engine.num_stages == 2 and engine.stage_id == rank
    assert (engine.is_first_stage(), engine.is_last_stage()) == (rank == 0, rank == 1)
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="call train_batch"):
            call()


def test_evaluation_without_a_loss(ranks: Ranks) -> None:
    ranks(2, evaluated)


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.zeros(4)


def refusals(rank: int, world: int) -> None:
    def linears(**how: Any) -> PipelineModule:
        return PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(3)], loss_fn=nn.MSELoss(), **how)

    model = linears(topology=PipeDataParallelTopology(1, 2))
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config(), training_data=Data())
    assert loader is engine.training_dataloader and float(engine.train_batch()) > 0
    turned = linears(topology=ProcessTopology(["data", "pipe"], [1, 2]))
    assert deepspeed.initialize(model=turned, config=config())[0].stage_id == rank
    with pytest.raises(OrderError, match="a pipeline's stages add up"):
        deepspeed.initialize(model=linears(num_stages=2), config=config(zero_optimization={"stage": 2}))
    with pytest.raises(ConfigError, match="takes whole windows"):
        deepspeed.initialize(model=linears(num_stages=2), config=config(managed_gradient_accumulation=False))
    with pytest.raises(RuntimeError, match="cannot share 2 ranks"):
        linears(num_stages=3)
    with pytest.raises(RuntimeError, match="is not said"):
        linears()
    with pytest.raises(RuntimeError, match="names no layer"):
        linears(num_stages=2, partition_method="type:attention")
    with pytest.raises(UnsupportedError, match="partition_method"):
        linears(num_stages=2, partition_method="profile")
    with pytest.raises(UnsupportedError, match="along 'model'"):
        linears(topology=ProcessTopology(["pipe", "data", "model"], [1, 1, 2]))
    with pytest.raises(ArgumentError, match="each must have one"):
        PipelineModule([nn.Linear(4, 4)], num_stages=2)
    idle = PipelineModule([nn.Linear(4, 4), nn.ReLU()], num_stages=2, partition_method="uniform")
    with pytest.raises(ArgumentError, match="stage 1 has no parameters"):
        deepspeed.initialize(model=idle, config=config())
    with pytest.raises(RuntimeError, match=r"torch\.nn\.Module"):
        LayerSpec(len)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused(ranks: Ranks) -> None:
    ranks(2, refusals)


def without_numbers(rank: int, world: int) -> None:
    """Of a model that Polyreme is given in parts, rank 1 lacks its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    config = {"mesh": {"pp": 2}, "batch": {"size": 2}, "pipeline": {"blocks": [1, 1]}}
    with pytest.raises(ModelError, match=r"1\.weight is on the meta device on rank 1"):
        polyreme.initialize(model, config, loss_fn=nn.MSELoss())


def test_a_stage_without_numbers_is_refused(ranks: Ranks) -> None:
    ranks(2, without_numbers)


def test_names_are_one_object() -> None:
    assert deepspeed.PipelineModule is deepspeed.pipe.PipelineModule is pipe_module.PipelineModule
    assert deepspeed.runtime.pipe.PipelineModule is PipelineModule
