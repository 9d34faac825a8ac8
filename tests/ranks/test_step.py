"""The step as a user sees it: three styles of loop, losses weighted by labels, evaluation, whole parameters,
saving, and errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import models
import polyreme
import threads
import training
from examples import whole as whole_product
from polyreme.errors import BatchError, ModelError, NumericsError, OrderError
from polyreme.step import passes
from polyreme.step.loss import objective as objective_module
from pool import Ranks

FP64 = {"precision": {"compute": "fp64"}}


def uneven(step: int) -> dict[str, Tensor]:
    """A global batch whose samples have 11, 10, ... labels; the third and fourth have none."""
    batch = models.tokens(training.SAMPLES, seed=step)
    for i, labels in enumerate(batch["labels"]):
        labels[: i + 1 if i not in (2, 3) else len(labels)] = -100
    return batch


def mean_loss(output: Any, batch: Any) -> Tensor:
    total, weight = models.causal_loss(output, batch)
    return total / weight


def global_mean(steps: int = 2) -> training.Run:
    """Plain PyTorch over the whole batch's labels."""
    return training_of(models.build("llama"), [uneven(step) for step in range(steps)])


def training_of(model: nn.Module, batches: list[Any]) -> training.Run:
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    return models.plain_training(model, models.causal_loss, batches, optimizer, 1.0)


def in_style(
    engine: polyreme.Engine, style: str, batch: dict[str, Tensor], accumulation: int
) -> polyreme.StepResult:
    if style == "train_step":
        return engine.train_step(batch)
    for micro in range(accumulation):
        part = models.share(batch, micro, accumulation)
        output = engine(**part)
        if style == "own loss":
            engine.backward(output.loss)
        else:
            weight = int((part["labels"][:, 1:] != -100).sum())
            engine.backward(mean_loss(output, part), weight)
    return engine.step()


def styles(rank: int, world: int, accumulation: int) -> list[training.Run]:
    """With a loss_fn, through the model's own loss, and by hand; the micro-batch of rank and accumulation may
    have no label."""
    runs = []
    for style, loss_fn in (
        ("train_step", models.causal_loss),
        ("train_step", None),
        ("own loss", None),
        ("by hand", None),
    ):
        for stage in (1, 3):
            config = training.config(world, accumulation, zero={"stage": stage}, **FP64)
            engine = polyreme.initialize(models.build("llama"), config, loss_fn=loss_fn)
            records = []
            for step in range(2):
                result = in_style(engine, style, models.share(uneven(step), rank, world), accumulation)
                records.append((result.loss, result.grad_norm))
                assert (
                    result.step == step + 1
                    and result.samples == training.SAMPLES
                    and result.tokens == training.SAMPLES * 12
                )
                assert engine.state.step == step + 1 and engine.state.samples == result.samples * (step + 1)
                assert engine.state.tokens == result.tokens * (step + 1)
            runs.append((records, engine.state_dict(rank0_only=True)))
    return runs


@pytest.mark.parametrize(
    ("world", "accumulation"),
    [
        (1, 4),
        (2, 4),
        (4, 1),
        *(pytest.param(*each, marks=whole_product) for each in ((1, 1), (2, 1), (4, 2))),
    ],
)
def test_mean_over_all_labels_in_every_style(ranks: Ranks, world: int, accumulation: int) -> None:
    by_rank = (threads.run if world == 4 else ranks)(world, styles, accumulation)
    records, weights = global_mean()
    for rank, runs in enumerate(by_rank):
        for i, (got, _) in enumerate(runs):
            # transformers computes its loss in float32 whatever the model's dtype
            tolerance = 1e-10 if i in (0, 1, 6, 7) else 1e-5
            torch.testing.assert_close(
                got, records, rtol=tolerance, atol=0, msg=lambda m, at=(rank, i): f"rank, run {at}: {m}"
            )
    for i, (_, got) in enumerate(by_rank[0]):
        for name, tensor in weights.items():
            tolerance = 1e-10 if i in (0, 1, 6, 7) else 1e-3
            torch.testing.assert_close(
                got[name], tensor, rtol=0, atol=tolerance, msg=lambda m, i=i: f"run {i}: {m}"
            )


def counted(rank: int, world: int) -> list[bool]:
    """Of every count of labels in steps of two styles: whether it read the caller's own tensor. Nothing else
    is on the host where training is on a device, and to read from there would wait for it."""
    counts, own = [], uneven(0)
    cast, count = passes.cast_floating, objective_module.count_labels

    def move(value: object, *to: Any, **how: Any) -> Any:
        return pytree.tree_map_only(Tensor, Tensor.clone, cast(value, *to, **how))

    def note(model: nn.Module, batch: dict[str, Tensor]) -> int | None:
        counts.append(batch["labels"].untyped_storage()._cdata == own["labels"].untyped_storage()._cdata)
        return count(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "cast_floating", move)
        patch.setattr(objective_module, "count_labels", note)
        for style in ("train_step", "own loss"):
            in_style(
                polyreme.initialize(models.build("llama"), training.config(world, 2, **FP64)), style, own, 2
            )
    return counts


def test_labels_are_counted_before_they_are_on_the_device(ranks: Ranks) -> None:
    assert ranks(1, counted)[0] == [True] * 4


def vectors(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def vectors_sum(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.mse_loss(output, target, reduction="sum"), target.numel()


class WithLoss(nn.Module):
    """Returns its loss in the way that `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(9, 9).double(), kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(self.layer(x), y)
        return {"alone": loss, "tuple": (loss, x), "dict": {"loss": loss, "x": x}}[self.kind]


def loss_forms(rank: int, world: int) -> list[list[float]]:
    batches = [models.share(models.vectors(8, seed), rank, world) for seed in range(2)]
    batches = [tuple(t.double() for t in b) for b in batches]
    found = []
    for form in ("alone", "tuple", "dict", "mean", "sum"):
        torch.manual_seed(1)
        model = WithLoss(form)
        loss_fn = {"mean": vectors, "sum": vectors_sum}.get(form)
        engine = polyreme.initialize(
            model if loss_fn is None else model.layer, training.config(world, **FP64), loss_fn=loss_fn
        )
        found.append(
            [value for b in batches for r in [engine.train_step(b)] for value in (r.loss, r.grad_norm)]
        )
    return found


def test_every_form_of_a_loss(ranks: Ranks) -> None:
    for found in ranks(2, loss_forms):
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-12, atol=0)


def evaluation(rank: int, world: int) -> list[tuple[float, float]]:
    found = []
    for stage in (2, 3):
        model = models.build("gpt2")
        model.transformer.drop.p = 0.9
        engine = polyreme.initialize(
            model, training.config(world, zero={"stage": stage}, **FP64), loss_fn=models.causal_loss
        )
        results = [engine.eval_step(models.share(uneven(7), rank, world)) for _ in range(2)]
        assert results[0] == results[1] and engine.module.training and engine.state.step == 0
        engine.train_step(models.share(uneven(0), rank, world))
        found.append((results[0].loss, results[0].weight))
    return found


def test_eval_step(ranks: Ranks) -> None:
    """Over the global batch's labels, without dropout, and training goes on."""
    model = models.build("gpt2").eval()
    total, weight = models.causal_loss(model(input_ids=uneven(7)["input_ids"]), uneven(7))
    for found in ranks(2, evaluation):
        for loss, by in found:
            assert by == int(weight)
            assert loss == pytest.approx((total / weight).item(), rel=1e-12)


def whole(rank: int, world: int, folder: Path) -> None:
    for case in ("gpt2", "dag"):
        for stage in (0, 3):
            model = models.build(case, torch.float32)
            names, before = list(model.state_dict()), copy.deepcopy(model.state_dict())
            engine = polyreme.initialize(
                model, training.config(world, zero={"stage": stage}), loss_fn=models.CASES[case][2]
            )
            for name, tensor in engine.state_dict().items():
                assert torch.equal(tensor, before[name]), name
            engine.train_step(
                models.share(models.batch_of(case, training.SAMPLES, dtype=torch.float32), rank, world)
            )
            after = engine.state_dict()
            assert sorted(after) == sorted(names)
            assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
            with engine.full_parameters() as module:
                for name, parameter in module.named_parameters(remove_duplicate=False):
                    assert torch.equal(parameter, after[name]), (case, stage, name)
            assert engine.state_dict(rank0_only=True).keys() == (after.keys() if rank == 0 else {}.keys())
            for first, second in (
                ("transformer.wte.weight", "lm_head.weight"),
                ("nodes.0.1.weight", "nodes.0.3.weight"),
            ):
                assert first not in after or torch.equal(after[first], after[second])
    saved = engine.save(folder / "dag")  # no transformers model: weights alone
    if rank == 0:
        assert sorted(file.name for file in saved.iterdir()) == [
            "model.safetensors",
            "optimizer",
            "resume.json",
        ]
        stored = load_file(saved / "model.safetensors")
        assert all(torch.equal(tensor, after[name]) for name, tensor in stored.items())
        assert {"nodes.0.1.weight", "unused", "offset"} <= stored.keys() and "nodes.0.3.weight" not in stored


def test_whole_parameters(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, whole, tmp_path)


def save_language_model(rank: int, world: int, folder: Path, case: str, stage: int, compute: str) -> Tensor:
    model = models.CASES[case][0]()
    engine = polyreme.initialize(
        model, training.config(world, zero={"stage": stage}, precision={"compute": compute})
    )
    engine.train_step(models.share(models.tokens(training.SAMPLES), rank, world))
    for _ in range(2):  # the second replaces the first
        engine.save(folder)
    with engine.full_parameters() as module, torch.no_grad():
        return module.eval()(input_ids=models.tokens(2)["input_ids"]).logits


@pytest.mark.parametrize(
    ("case", "stage", "compute"), [("gpt2", 3, "fp32"), ("llama", 2, "bf16"), ("llama", 3, "fp32")]
)
def test_transformers_opens_what_was_saved(
    ranks: Ranks, tmp_path: Path, case: str, stage: int, compute: str
) -> None:
    logits = ranks(2, save_language_model, tmp_path / "model", case, stage, compute)
    files = ["config.json", "generation_config.json", "model.safetensors", "optimizer", "resume.json"]
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == files
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    with_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[compute]
    opened, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=with_dtype, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        again = opened.eval()(input_ids=models.tokens(2)["input_ids"]).logits
    assert torch.equal(logits[0], logits[1])
    if case == "gpt2":  # of the same modules as the one that was trained
        assert torch.equal(again, logits[0])
    else:  # the tests' llama has torch's RMSNorm in place of transformers'
        torch.testing.assert_close(again, logits[0], rtol=0.05, atol=0.05 if compute == "bf16" else 1e-5)


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(polyreme.PolyremeError) as caught:
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


def bad_use(rank: int, world: int) -> dict[str, str]:
    engine = polyreme.initialize(
        models.build("dag", torch.float32), training.config(world, 2), loss_fn=F.mse_loss
    )
    x, y = models.share(models.vectors(training.SAMPLES), rank, world)
    half = len(x) // 2
    found = {
        "too small": error_of(lambda: engine.train_step((x[:1], y[:1]))),
        "ragged": error_of(lambda: engine.train_step((x, y[:1]))),
        "no tensor": error_of(lambda: engine.train_step({"x": "text"})),
        "early": error_of(engine.step),
        "early, last": error_of(lambda: engine.step(last=True)),
        "no forward": error_of(lambda: engine.backward(x.sum())),
    }
    other = polyreme.initialize(nn.Linear(9, 9), training.config(world, 2), loss_fn=F.mse_loss)
    loss = F.mse_loss(other(x[:half]), y[:half])
    found["of another"] = error_of(lambda: engine.backward(loss))
    found["of none, beside another"] = error_of(lambda: engine.backward(x.sum()))
    other.close()
    found["of one that has closed"] = error_of(lambda: engine.backward(loss))
    out = engine(x[:half])
    found["vector"] = error_of(lambda: engine.backward((out - y[:half]).square().mean(0)))
    engine.backward(loss := F.mse_loss(out, y[:half]))
    found["twice"] = error_of(lambda: engine.backward(loss))
    found["half"] = error_of(engine.step)
    found["middle"] = error_of(lambda: engine.train_step((x, y)))
    engine.backward(F.mse_loss(engine(x[half:]), y[half:]))
    engine(x)
    found["late"] = error_of(lambda: engine.backward(F.mse_loss(engine(x[:half]), y[:half])))
    assert engine.step().step == 1
    whole = polyreme.initialize(nn.Linear(9, 9), {"batch": {"size": 4 * world}}, loss_fn=F.mse_loss)
    assert repr(whole) == f"Engine(Linear, 90 parameters, mesh.dp={world}, zero.stage=2, step=0)"
    assert repr(whole.module.bias) == repr(nn.Parameter(whole.module.bias.detach().clone()))
    whole.backward(whole(x[:1]).mean())
    found["one"] = error_of(lambda: whole.backward(whole(x[1:2]).mean()))
    found["workers"] = error_of(lambda: whole.loader([1] * 8, num_workers=2))
    unreduced = polyreme.initialize(
        models.build("dag", torch.float32), training.config(world), loss_fn=unreduced_loss
    )
    found["unreduced"] = error_of(lambda: unreduced.train_step((x, y)))
    no_loss = polyreme.initialize(models.build("llama", torch.float32), training.config(world))
    ids = models.share(models.tokens(training.SAMPLES), rank, world)["input_ids"]
    found["no loss"] = error_of(lambda: no_loss.train_step({"input_ids": ids}))
    found["empty"] = error_of(lambda: polyreme.initialize(nn.ReLU(), training.config(world)))
    frozen = polyreme.initialize(
        nn.Linear(9, 9).requires_grad_(False), training.config(world), loss_fn=F.mse_loss
    )
    found["frozen"] = error_of(lambda: frozen.train_step((x, y)))
    whole_numbers = nn.Linear(2, 2)
    whole_numbers.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    found["complex"] = error_of(lambda: polyreme.initialize(whole_numbers, training.config(world)))
    return found


def interrupted(rank: int, world: int, changes: dict[str, Any], where: str) -> None:
    """A step that ended in an error leaves nothing behind: the next ones are those of an engine that never
    saw it."""
    dp = world // changes.get("mesh", {}).get("pp", 1)
    runs = []
    armed = False

    def loss_fn(output: Any, batch: Any) -> tuple[Tensor, Tensor | int]:
        loss, weight = models.causal_loss(output, batch)
        if armed and where == "loss" and batch["input_ids"][0, 0] == 1:
            raise ValueError("a loss that fails")
        return loss * math.nan if armed and where == "update" else loss, weight

    for fails in (True, False):
        engine = polyreme.initialize(
            models.build("llama"), training.config(dp, 2, **FP64, **changes), loss_fn=loss_fn
        )
        records = []
        for step in range(2):
            batch = models.share(models.tokens(training.SAMPLES, seed=step), engine.mesh.dp.rank, dp)
            batch["input_ids"][len(batch["input_ids"]) // 2, 0] = 1  # the second micro-batch
            armed = fails and step == 1
            if armed:
                with pytest.raises((ValueError, NumericsError)):
                    engine.train_step(batch)
                armed = False
            result = engine.train_step(batch)
            records.append((result.loss, result.grad_norm))
        runs.append((records, engine.state_dict(master=True)))
    assert not training.differences(*runs)


@pytest.mark.parametrize("where", ["loss", "update"])
@pytest.mark.parametrize(
    "zero", [{"stage": 1}, {"stage": 3}, {"stage": 2, "reduce_every": "microbatch"}], ids=str
)
def test_a_step_that_failed_leaves_nothing_behind(ranks: Ranks, zero: dict[str, Any], where: str) -> None:
    ranks(2, interrupted, {"zero": zero}, where)


def test_a_pipelined_step_that_failed_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks(2, interrupted, {"mesh": {"pp": 2}}, "update")


def unreduced_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def test_bad_use_is_explained(ranks: Ranks) -> None:
    for found in ranks(2, bad_use):
        for case, (kind, words) in {
            "too small": (BatchError, "has 1 samples, but batch.size = 8 over 2 data-parallel ranks makes 4"),
            "ragged": (BatchError, "Give train_step a list of micro-batches"),
            "no tensor": (BatchError, "no tensor"),
            "early": (OrderError, "makes 2 a step: call engine.backward(loss) of each first"),
            "no forward": (OrderError, "without a forward of the engine"),
            "of another": (OrderError, "accelerator.free_memory"),
            "of none, beside another": (OrderError, "without a forward of the engine"),
            "of one that has closed": (OrderError, "without a forward of the engine"),
            "vector": (BatchError, "must be a scalar"),
            "twice": (OrderError, "that still waits for it (each has one backward"),
            "half": (
                OrderError,
                "after 1 backward() calls, but batch.size = 8 over 2 "
                "ranks with batch.micro = 2 makes 2 a step: call step(last=",
            ),
            "early, last": (OrderError, "after 0 backward() calls"),
            "middle": (OrderError, "in the middle of a step"),
            "late": (OrderError, "call step() before the next backward()"),
            "one": (
                OrderError,
                "a step has 1 micro-batch (batch.micro = 4): for more backwards a step write batch.micro = 1"
                ", by which it has 4. Otherwise call step()",
            ),
            "workers": (BatchError, "no option num_workers, but batch_size, collate, drop_last"),
            "unreduced": (BatchError, "must be a scalar tensor, but is a tensor of shape (4, 9): give"),
            "no loss": (BatchError, "loss_fn"),
            "empty": (ModelError, "no parameters"),
            "frozen": (ModelError, "requires_grad"),
            "complex": (ModelError, "only real floating-point"),
        }.items():
            assert found[case].startswith(kind.__name__ + ": ") and words in found[case], (case, found[case])


def torch_loader(rank: int, world: int) -> list[Tensor]:
    """Losses of an epoch by torch's own loader, as the error about `num_workers` has it."""
    config = {**training.config(world), "batch": {"size": 8}}
    engine = polyreme.initialize(models.build("dag", torch.float32), config, loss_fn=F.mse_loss)
    samples = TensorDataset(*models.vectors(16))
    share = DistributedSampler(samples, engine.mesh.dp.size, engine.mesh.dp.rank)
    batches = DataLoader(samples, 8 // engine.mesh.dp.size, sampler=share, drop_last=True)
    return [engine.train_step(tuple(batch)).loss for batch in batches]


def test_torchs_own_loader_feeds_an_engine(ranks: Ranks) -> None:
    first, second = ranks(2, torch_loader)
    assert first == second and len(first) == 2


def scheduled(rank: int, world: int) -> tuple[list[float], dict[str, Tensor]]:
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(dummy, step_size=2, gamma=0.1)
    config = training.config(
        world, **FP64, optimizer={"name": "sgd", "lr": 0.5, "weight_decay": 0.0, "clip": "none"}
    )
    engine = polyreme.initialize(models.build("dag"), config, lr_scheduler=scheduler, loss_fn=F.mse_loss)
    rates = [
        engine.train_step(models.share(models.batch_of("dag", training.SAMPLES, step), rank, world)).lr
        for step in range(5)
    ]
    return rates, engine.state_dict(rank0_only=True)


def test_a_torch_scheduler_is_followed(ranks: Ranks) -> None:
    model = models.build("dag")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for step in range(5):
        x, y = models.batch_of("dag", training.SAMPLES, step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    results = ranks(2, scheduled)
    for rates, _ in results:
        assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-10, atol=1e-10, check_dtype=False)
    assert not math.isnan(results[0][0][0])


def modes(rank: int, world: int) -> list[bool]:
    engine = polyreme.initialize(models.build("llama"), training.config(world, 2, **FP64))
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    told = []
    for batch, message in (({"input_ids": nested}, "layout=torch.jagged"), ([], "an empty list")):
        with pytest.raises(BatchError, match=message):
            engine.eval_step(batch)
        told.append(engine.module.training)
    return told


def test_a_batch_that_is_refused_leaves_the_mode_alone(ranks: Ranks) -> None:
    assert ranks(1, modes) == [[True, True]]
