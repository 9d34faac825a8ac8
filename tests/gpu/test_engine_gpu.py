"""The engine on a GPU computes what it computes on a CPU and what plain torch does there; every test has its
twin on the CPU.

One rank: `bench/gpu.sh` runs this where a GPU is. What two ranks do to each other's memory and streams is
played by `Mirror`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import models
import polyreme
import training
from polyreme.config import Config
from polyreme.distributed.mesh import AXES, Axis, Mesh
from polyreme.distributed.work import DONE, Work
from polyreme.engine import Engine
from polyreme.errors import NumericsError
from polyreme.job.run import sample
from polyreme.optim import cpu_kernels

STEPS = 3
RECOMPUTE = {"activations": "recompute"}


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the engine of this test lives: it takes the GPU where it sees one."""
    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        yield torch.device("cpu")
        return
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    yield torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()


def on(device: torch.device, value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def run(
    engine: Engine, case: str, dtype: torch.dtype, steps: int = STEPS, samples: int = training.SAMPLES
) -> training.Run:
    """Records and final weights (on the CPU) of an engine; its batches come from the CPU."""
    records = []
    for step in range(steps):
        result = engine.train_step(models.batch_of(case, samples, step, dtype))
        records.append((result.loss, result.grad_norm))
    return records, on(torch.device("cpu"), engine.state_dict(master=True))


def assert_close(one: training.Run, other: training.Run, tolerance: float) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=tolerance)
    for name, expected in other[1].items():
        torch.testing.assert_close(
            one[1][name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---- the same numbers


@pytest.mark.parametrize("case", list(models.CASES))
@pytest.mark.parametrize(("stage", "accumulation", "recompute"), [(2, 1, False), (3, 2, True)])
@pytest.mark.parametrize(("compute", "tolerance"), [("fp64", 1e-9), ("fp32", 2e-4)])
def test_equals_plain_torch_on_the_same_device(
    device: torch.device,
    case: str,
    stage: int,
    accumulation: int,
    recompute: bool,
    compute: str,
    tolerance: float,
) -> None:
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[compute]
    memory = RECOMPUTE if recompute and case != "convnet" else {}
    config = training.config(
        1, accumulation, zero={"stage": stage}, memory=memory, precision={"compute": compute}
    )
    engine = polyreme.initialize(models.build(case, dtype), config, loss_fn=models.CASES[case][2])
    assert engine.mesh.device == device
    assert {t.device for t in (*engine.module.parameters(), *engine.module.buffers())} == {device}
    batches = [on(device, models.batch_of(case, training.SAMPLES, step, dtype)) for step in range(STEPS)]
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    records, weights = models.plain_training(
        models.build(case, dtype).to(device), models.CASES[case][2], batches, optimizer, 1.0
    )
    found = run(engine, case, dtype)
    # where a gradient is rounding alone, Adam makes a whole step of it: weights are for fp64 to compare
    if compute == "fp32":
        torch.testing.assert_close(found[0], records, rtol=tolerance, atol=tolerance)
        return
    assert_close(found, (records, on(torch.device("cpu"), weights)), tolerance)


def test_bf16_with_fp32_masters(device: torch.device) -> None:
    """Against the same casts by hand."""
    engine = polyreme.initialize(
        models.build("llama", torch.float32),
        training.config(1, precision={"compute": "bf16"}),
        loss_fn=models.causal_loss,
    )
    model = models.build("llama", torch.float32).to(device)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data.bfloat16()
    groups = [{"params": [m for m in masters.values() if m.dim() >= 2]},
              {"params": [m for m in masters.values() if m.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    expected = []
    for step in range(STEPS):
        batch = on(device, models.batch_of("llama", training.SAMPLES, step))
        loss, weight = models.causal_loss(model(input_ids=batch["input_ids"]), batch)
        model.zero_grad()
        (loss.float() / weight).backward()
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.float()
        norm = nn.utils.clip_grad_norm_(list(masters.values()), 1.0)
        optimizer.step()
        for name, p in model.named_parameters():
            p.data.copy_(masters[name])
        expected.append((loss.item() / weight.item(), norm.item()))
    records, weights = run(engine, "llama", torch.float32)
    assert {t.dtype for t in weights.values()} == {torch.float32} and {
        p.dtype for p in engine.module.parameters()
    } == {torch.bfloat16}
    torch.testing.assert_close(records, expected, rtol=1e-2, atol=1e-2)
    # a step moves a weight by at most 1e-2, so this is a fifth of the way
    for name, master in masters.items():
        assert (weights[name] - master.cpu()).abs().mean() < 0.2 * 1e-2 * STEPS, name


def test_fp16_overflow_skips_and_recovers(device: torch.device) -> None:
    precision = {"compute": "fp16", "initial_scale": 2.0**40, "growth_interval": 1000}
    engine = polyreme.initialize(
        models.build("llama", torch.float32),
        training.config(1, precision=precision),
        loss_fn=models.causal_loss,
    )
    before = engine.state_dict(master=True)
    results = [engine.train_step(models.batch_of("llama", training.SAMPLES))]
    assert results[0].skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict(master=True).items())
    while results[-1].skipped and len(results) < 45:
        results.append(engine.train_step(models.batch_of("llama", training.SAMPLES)))
    assert not results[-1].skipped and results[-1].loss_scale < 2.0**40
    assert engine.train_step(models.batch_of("llama", training.SAMPLES)).loss < results[-1].loss


class Dropping(nn.Module):
    """Blocks with dropout, which take their input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"inner": nn.Linear(9, 9)}) for _ in range(3))
        for block in self.blocks:
            block.forward = lambda *, x, block=block: x + nn.functional.dropout(block["inner"](x), 0.5)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x


def test_recomputation_drops_out_the_same_numbers(device: torch.device, tmp_path: Path) -> None:
    """The random state that a block's forward began with is restored on the device that it drew from."""
    runs = []
    for memory in ({}, RECOMPUTE, {"activations": "host"}, {"activations": str(tmp_path)}):
        torch.manual_seed(0)
        engine = polyreme.initialize(
            Dropping().double(),
            training.config(1, memory=memory, precision={"compute": "fp64"}),
            loss_fn=nn.functional.mse_loss,
        )
        runs.append(run(engine, "dag", torch.float64))
    for each in runs[1:]:
        assert_close(each, runs[0], 1e-9)


@pytest.mark.parametrize(
    ("name", "cls", "options"),
    [
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.95), "eps": 1e-8}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("adagrad", torch.optim.Adagrad, {"eps": 1e-8}),
        ("NAdam", torch.optim.NAdam, {"betas": (0.8, 0.9)}),
    ],
)
def test_optimizers_run_on_the_device(
    device: torch.device, name: str, cls: Any, options: dict[str, Any]
) -> None:
    optimizer = {"name": name, "weight_decay": 0.0, "clip": "none", **options}
    engine = polyreme.initialize(
        models.build("llama"),
        training.config(1, precision={"compute": "fp64"}, optimizer=optimizer),
        loss_fn=models.causal_loss,
    )
    batches = [on(device, models.batch_of("llama", training.SAMPLES, step)) for step in range(STEPS)]
    make = lambda groups: cls([p for group in groups for p in group["params"]], lr=1e-2, **options)  # noqa: E731
    records, weights = models.plain_training(
        models.build("llama").to(device), models.causal_loss, batches, make, None
    )
    assert_close(run(engine, "llama", torch.float64), (records, on(torch.device("cpu"), weights)), 1e-9)


# ---- gathers beside the computation


MIRRORED = 1e-7
"""Tolerance between devices where a model is far from one that is initialised well, so that the order of sums
shows; garbage is far off."""


class Mirror(Axis):
    """An axis of two ranks, of which the other always holds what this one holds. On a GPU its collectives run
    late on a stream of their own, as those of NCCL do: whoever reads a result before `wait`, or frees memory
    that a stream still uses, gets garbage."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("dp", 2, 0)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _late(self, operation: Callable[[], Any]) -> Work:
        if self._stream is None:
            operation()
            return DONE
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # cycles, about half a millisecond: the host and the computation run ahead
            torch.cuda._sleep(1_000_000)
            operation()
            done = stream.record_event()
        return Work(finish=lambda: torch.cuda.current_stream().wait_event(done))

    def all_gather(self, full: Tensor, shard: Tensor, of: str = "") -> Work:
        return self._late(lambda: [part.copy_(shard) for part in full.chunk(2)])

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False, of: str = "") -> Work:
        part = full.chunk(2)[0]
        return self._late(lambda: out.add_(part, alpha=2) if accumulate else out.copy_(part).mul_(2))

    def all_reduce(self, tensor: Tensor) -> Work:
        tensor.mul_(2)
        return DONE

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        pass

    def gather_objects(self, value: object) -> list[object]:
        return [value, value]


def mirrored(device: torch.device, **sections: Any) -> training.Run:
    """A run of rank 0 of two under `Mirror`."""
    config = Config.load(training.config(2, 2, precision={"compute": "fp64"}, **sections)).resolve(2)
    axes = {name: Axis(name) for name in AXES} | {"dp": Mirror(device)}
    mesh = Mesh(0, 2, device, {"dp": 2}, axes=axes)
    model = models.build("llama")
    # a mirrored model is no longer one that was initialised well, but each of its numbers matters
    for p in model.parameters():
        nn.init.uniform_(p, 0.1, 0.5)
        p.data *= torch.where(torch.rand_like(p) < 0.5, -1.0, 1.0)
    engine = Engine(model, config, mesh, loss_fn=models.causal_loss)
    return run(engine, "llama", torch.float64, samples=training.SAMPLES // 2)


@pytest.mark.parametrize(
    "memory", [{}, RECOMPUTE, {"activations": "host"}], ids=["keep", "recompute", "host"]
)
def test_gathers_and_reductions_on_a_stream_of_their_own(
    device: torch.device, memory: dict[str, str]
) -> None:
    """Stage 3, where memory is freed and taken again all the time: the CPU, where nothing runs beside
    anything, is right."""
    expected = mirrored(torch.device("cpu"), zero={"stage": 3, "prefetch": 0})
    assert len({loss for loss, _ in expected[0]}) == STEPS and all(norm > 0.1 for _, norm in expected[0])
    for zero in (
        {"prefetch": 0},
        {"prefetch": 1},
        {"prefetch": 3},
        {"prefetch": 2, "release": "always"},
        {"reduce_every": "step"},
    ):
        assert_close(mirrored(device, zero={"stage": 3, **zero}, memory=memory), expected, MIRRORED)


# ---- memory, loading, waiting


def test_batches_are_pinned_for_a_gpu_only(device: torch.device) -> None:
    engine = polyreme.initialize(
        models.build("llama", torch.float32), training.config(1), loss_fn=models.causal_loss
    )
    batch = models.batch_of("llama", training.SAMPLES * 2)
    dataset = [{key: value[i] for key, value in batch.items()} for i in range(training.SAMPLES * 2)]
    losses = []
    for loaded in engine.loader(dataset, epochs=2):
        assert {value.is_pinned() for value in loaded.values()} == {device.type == "cuda"}
        losses.append(engine.train_step(loaded).loss)
    assert len(losses) == 4 and losses[-1] < losses[0]


def live_bytes(device: torch.device) -> int:
    """Bytes of all tensors on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), Tensor) and o.layout == torch.strided and o.device == device
    ]
    return sum({(s := t.untyped_storage())._cdata: s.nbytes() for t in tensors}.values())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_memory_accounts_for_what_is_alive_on_the_device(device: torch.device, compute: str) -> None:
    def trained() -> Engine:
        model = models.llama(hidden_size=128, intermediate_size=256)
        engine = polyreme.initialize(
            model, training.config(1, precision={"compute": compute}), loss_fn=models.causal_loss
        )
        run(engine, "llama", torch.float32, steps=2)
        return engine

    trained()  # libraries allocate working memory at their first use
    before = live_bytes(device)
    engine = trained()
    found = engine.memory()
    size = engine.parameter_count
    assert found["parameters"] == pytest.approx(size * (4 if compute == "fp32" else 2), rel=0.01)
    # in fp32 the parameters are the masters
    assert found["states"] == pytest.approx(size * (8 if compute == "fp32" else 12), rel=0.01)
    expected = sum(found.values()) - found["activations"]
    assert live_bytes(device) - before == pytest.approx(expected, rel=0.02)
    assert found["activations"] > 0


class Reads(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def waits(device: torch.device, step: Callable[[], object]) -> int:
    """How often the host waits for the device in `step`; on a CPU, how often it would wait to read a
    number."""
    if device.type == "cpu":
        with Reads() as reads:
            step()
        return reads.count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def test_the_host_waits_a_few_times_a_step_whatever_the_model(
    device: torch.device, record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # of a CPU's update, which reads from its own memory
    monkeypatch.setattr(cpu_kernels, "compiler", lambda: None)
    counts = []
    for blocks in (2, 6):
        model = models.llama(num_hidden_layers=blocks)
        engine = polyreme.initialize(
            model, training.config(1, precision={"compute": "bf16"}), loss_fn=models.causal_loss
        )
        run(engine, "llama", torch.float32, steps=2)
        counts.append(
            waits(device, lambda engine=engine: engine.train_step(models.batch_of("llama", training.SAMPLES)))
        )
    record_property("waits", counts)
    assert 0 < counts[0] == counts[1] < 16


# ---- memory tiers


FILES = "files"  # in a config here: the test's own folder
HOMES: list[tuple[int, dict[str, Any]]] = [
    (2, {"states": "host"}),
    (2, {"states": FILES}),
    (1, {"states": {"host": 0.5, "device": 0.5}}),
    (3, {"states": "host", "params": "host"}),
    (3, {"states": FILES, "params": FILES, "activations": FILES}),
    (3, {"params": "host"}),
]


def placed(memory: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {what: str(folder / what) if home == FILES else home for what, home in memory.items()}


@pytest.mark.parametrize(("stage", "memory"), HOMES, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
def test_homes_train_the_same(
    device: torch.device, stage: int, memory: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    """What is updated in host memory is what is updated on the device, but for the order in which each
    adds."""
    sections: dict[str, Any] = {
        "zero": {"stage": stage},
        "precision": {"compute": "fp64"},
        "optimizer": {"name": optimizer, "lr": 1e-3},
    }
    runs = []
    for each in ({}, placed(memory, tmp_path)):
        engine = polyreme.initialize(
            models.build("llama"), training.config(1, 2, memory=each, **sections), loss_fn=models.causal_loss
        )
        runs.append(run(engine, "llama", torch.float64))
        engine.close()
    assert_close(runs[1], runs[0], 1e-9)


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_host_and_files_are_bitwise_equal(device: torch.device, compute: str, tmp_path: Path) -> None:
    """Both are updated by the same kernel from the same gradients, of which overflows are skipped. Where
    parameters are away, too, gradients are added up on the CPU, and their norm is taken there."""
    precision = {"compute": compute} | ({"initial_scale": 2.0**20} if compute == "fp16" else {})
    runs = []
    for memory in (
        {"states": "host"},
        {"states": FILES},
        {"states": "host", "params": "host"},
        {"states": FILES, "params": FILES},
    ):
        config = training.config(
            1, 2, zero={"stage": 3}, memory=placed(memory, tmp_path), precision=precision
        )
        engine = polyreme.initialize(models.build("llama", torch.float32), config, loss_fn=models.causal_loss)
        runs.append(run(engine, "llama", torch.float32))
        if device.type == "cuda":  # the twin without is test_ferry's
            assert engine.memory()["gradients"] == 0, (
                "they have left, and so has the memory in which they were added up"
            )
        engine.close()
    for one, other in ((0, 1), (2, 3), *(((0, 2),) if device.type == "cpu" else ())):
        assert not training.differences(runs[one], runs[other])


@pytest.mark.parametrize(
    "memory", [{}, {"states": "host"}, {"states": "host", "params": "host"}], ids=["device", "host", "params"]
)
def test_threads_update_what_one_updates(
    device: torch.device, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes pieces of its own, of a model that is large enough for that."""
    runs = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)  # for the update alone
        torch.manual_seed(0)
        model = models.llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=3)
        config = training.config(
            1, zero={"stage": 3, "min_bucket": 1 << 26}, memory=memory, precision={"compute": "bf16"}
        )
        engine = polyreme.initialize(model, config, loss_fn=models.causal_loss)
        assert engine.parameter_count > 1 << 21
        runs.append(run(engine, "llama", torch.float32))
        engine.close()
    assert not training.differences(*runs)


@pytest.mark.parametrize(
    "memory",
    [{"states": "host"}, {"states": "host", "params": "host"}, {"states": FILES, "params": FILES}],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_tiers_beside_collectives_on_a_stream_of_their_own(
    device: torch.device, memory: dict[str, Any], tmp_path: Path
) -> None:
    expected = mirrored(torch.device("cpu"), zero={"stage": 3, "prefetch": 0})
    for i, zero in enumerate(({"prefetch": 0}, {"prefetch": 2}, {"reduce_every": "step"})):
        assert_close(
            mirrored(device, zero={"stage": 3, **zero}, memory=placed(memory, tmp_path / str(i))),
            expected,
            MIRRORED,
        )


@pytest.mark.parametrize("memory", [{}, {"states": "host", "params": "host"}], ids=["device", "host"])
def test_a_loaded_run_goes_on_to_the_bit(
    device: torch.device, memory: dict[str, Any], tmp_path: Path
) -> None:
    """Dropout's random numbers included."""

    def engine() -> Engine:
        torch.manual_seed(0)
        config = training.config(1, zero={"stage": 3}, memory=memory, precision={"compute": "fp64"})
        return polyreme.initialize(Dropping().double(), config, loss_fn=nn.functional.mse_loss)

    def steps(engine: Engine, which: range) -> training.Run:
        records = [engine.train_step(models.batch_of("dag", training.SAMPLES, step)) for step in which]
        return [(r.loss, r.grad_norm) for r in records], on(
            torch.device("cpu"), engine.state_dict(master=True)
        )

    first = engine()
    steps(first, range(2))
    path = first.save(tmp_path / "checkpoint")
    expected = steps(first, range(2, 4))
    second = engine()
    second.load(path)
    assert not training.differences(expected, steps(second, range(2, 4)))


@pytest.mark.parametrize("memory", [{}, {"states": "host", "params": "host"}], ids=["device", "host"])
def test_generate_from_a_tier(device: torch.device, memory: dict[str, Any]) -> None:
    engine = polyreme.initialize(
        models.build("llama", torch.float32),
        training.config(1, zero={"stage": 3}, memory=memory),
        loss_fn=models.causal_loss,
    )
    ids = torch.tensor([[3, 1, 4, 1, 5]], device=device)
    expected = (
        models.build("llama", torch.float32).to(device).generate(ids, max_new_tokens=6, do_sample=False)
    )
    with torch.no_grad():
        assert torch.equal(engine.module.generate(ids, max_new_tokens=6, do_sample=False), expected)


# ---- around training


def test_save_writes_what_is_on_the_device(device: torch.device, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    engine = polyreme.initialize(
        models.build("llama", torch.float32), training.config(1), loss_fn=models.causal_loss
    )
    _, weights = run(engine, "llama", torch.float32, steps=1)
    saved = load_file(engine.save(tmp_path / "model") / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())


def test_eval_step_is_the_loss_of_plain_torch(device: torch.device) -> None:
    engine = polyreme.initialize(
        models.build("llama"), training.config(1, precision={"compute": "fp64"}), loss_fn=models.causal_loss
    )
    batch = models.batch_of("llama", 5)
    loss, weight = models.causal_loss(models.build("llama")(input_ids=batch["input_ids"]), batch)
    result = engine.eval_step(batch)
    assert (result.loss, result.weight) == (
        pytest.approx(loss.item() / weight.item(), rel=1e-9),
        weight.item(),
    )


class Digits:
    """A tokenizer of one prompt."""

    eos_token_id = 0

    def __call__(self, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([[3, 1, 4]]))

    def decode(self, ids: Tensor, **_: Any) -> list[int]:
        return ids.tolist()


def test_sampling_leaves_the_random_numbers_alone(device: torch.device) -> None:
    engine = polyreme.initialize(
        models.build("llama", torch.float32), training.config(1), loss_fn=models.causal_loss
    )
    random = lambda: torch.rand(4, device=device).tolist()  # noqa: E731
    torch.manual_seed(7)
    expected = random()
    torch.manual_seed(7)
    first = sample(engine, Digits(), "", length=6, seed=1)
    assert random() == expected
    assert sample(engine, Digits(), "", length=6, seed=1) == first and first[:3] == [3, 1, 4]
    assert engine.module.training


def test_a_nan_is_traced_to_its_module(device: torch.device) -> None:
    engine = polyreme.initialize(
        models.build("llama", torch.float32), training.config(1), loss_fn=models.causal_loss
    )
    with torch.no_grad():
        engine.module.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = float("nan")
    with pytest.raises(
        NumericsError,
        match=r"forward of model\.layers\.1\.mlp\.up_proj \(Linear\) .*parameters are not finite",
    ):
        engine.train_step(models.batch_of("llama", training.SAMPLES))
