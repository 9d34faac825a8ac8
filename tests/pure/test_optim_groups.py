"""Recipes, options of a step, and the update of one bucket against plain torch, without ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook

import models
from polyreme.config import Config, Progress
from polyreme.config.schema import OptimizerSection
from polyreme.distributed.mesh import Axis
from polyreme.errors import ConfigError
from polyreme.layout.bucket_layout import ALIGN, Boundary, BucketLayout, TensorSpec
from polyreme.optim.groups import Recipe, recipe
from polyreme.optim.lr_schedule import LRSchedule
from polyreme.optim.options import Options
from polyreme.zero import pieces as update_module
from polyreme.zero.bucket import Bucket, BucketMemory
from polyreme.zero.bucket_optimizer import BucketOptimizer
from polyreme.zero.bucket_spec import BucketSpec, Formats
from polyreme.zero.buffer_pool import Pool
from polyreme.zero.gradient_sums import Accumulation
from polyreme.zero.residency import Residency

ELEMENTWISE = [
    "adam",
    "adamw",
    "sgd",
    "lion",
    "adagrad",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]

NAMES = ("embed.weight", "blocks.0.weight", "blocks.0.bias", "scale")


class Small(nn.Module):
    """Two blocks with a matrix and a vector each, an embedding, a scalar and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.fixed = nn.Parameter(torch.ones(3, 3), requires_grad=False)


def section(**keys: Any) -> OptimizerSection:
    return OptimizerSection(**keys)


def options_of(made: Recipe, name: str) -> dict[str, Any]:
    """The torch options that the parameter `name` is updated with."""
    return made.groups[made.group_of[name]].optimizer([torch.zeros(4, 4)]).param_groups[0]


# ---- which optimizer


def test_every_optimizer_of_torch_is_known_to_be_elementwise_or_not() -> None:
    names = {
        n
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    names -= {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
    found = {name: recipe(Small(), section(name=name)).groups[0].boundary for name in names}
    assert found == {**dict.fromkeys(names, "element"), "Adafactor": "tensor"}


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad", "AdamW", "SGD"])
def test_fused_kernels_are_used_where_they_exist(name: str) -> None:
    assert options_of(recipe(Small(), section(name=name)), "embed.weight")["fused"] is True
    assert (
        options_of(recipe(Small(), section(name=name, options={"foreach": True})), "embed.weight")["fused"]
        is None
    )
    assert (
        options_of(recipe(Small(), section(name=name, options={"fused": False})), "embed.weight")["fused"]
        is False
    )


def test_a_class_has_the_sections_groups_and_its_own_defaults() -> None:
    made = recipe(
        Small(), section(lr=0.5, weight_decay=0.25, no_decay=("*.bias", "scale")), torch.optim.NAdam
    )
    assert options_of(made, "embed.weight")["betas"] == (0.9, 0.999)
    assert [options_of(made, n)["weight_decay"] for n in NAMES] == [0.25, 0.25, 0, 0]
    assert options_of(made, "scale")["lr"] == 0.5
    assert options_of(recipe(Small(), section(betas=(0.5, 0.6)), torch.optim.NAdam), "scale")["betas"] == (
        0.5,
        0.6,
    )
    assert options_of(recipe(Small(), section(name="NAdam", betas=(0.5, 0.6))), "scale")["betas"] == (
        0.5,
        0.6,
    )
    assert options_of(recipe(Small(), section()), "scale")["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("no_decay", "expected"),
    [("vectors", [0.1, 0.1, 0, 0]), ("none", [0.1] * 4), (("blocks.1.*",), [0.1] * 4)],
)
def test_weight_decay_groups(no_decay: Any, expected: list[float]) -> None:
    made = recipe(Small(), section(weight_decay=0.1, no_decay=no_decay))
    assert [options_of(made, n)["weight_decay"] for n in NAMES] == expected
    assert (options_of(made, "blocks.1.weight")["weight_decay"] == 0) == (no_decay == ("blocks.1.*",))


def test_a_factory_decides_everything() -> None:
    def factory(parameters: list[Tensor]) -> torch.optim.Optimizer:
        assert all(p.requires_grad for p in parameters)
        flat = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.5}
        return torch.optim.AdamW(
            [{"params": [p for p in parameters if p.dim() >= 2]}, flat],
            lr=0.25,
            betas=(0.7, 0.8),
            weight_decay=0.125,
        )

    made = recipe(Small(), section(lr=9.0, weight_decay=9.0), factory)
    matrix, vector = options_of(made, "blocks.0.weight"), options_of(made, "blocks.0.bias")
    assert (matrix["lr"], matrix["weight_decay"], matrix["betas"], matrix["fused"]) == (
        0.25,
        0.125,
        (0.7, 0.8),
        True,
    )
    assert (vector["lr"], vector["weight_decay"], vector["betas"]) == (0.5, 0.0, (0.7, 0.8))


def test_a_factory_with_a_scheduler_on_it_keeps_its_own_learning_rate() -> None:
    def factory(parameters: list[Tensor]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.5)
        schedulers.LambdaLR(made, lambda step: step / 10)
        return made

    assert options_of(recipe(Small(), section(), factory), "scale")["lr"] == 0.5


def test_muon_has_the_matrices_of_blocks() -> None:
    made = recipe(
        Small(),
        section(
            name="muon",
            weight_decay=0.1,
            no_decay=("blocks.1.*",),
            matrix_lr=0.5,
            options={"nesterov": False},
        ),
    )
    kinds = {
        n: type(made.groups[g].optimizer([torch.zeros(2, 2)])).__name__ for n, g in made.group_of.items()
    }
    assert kinds == {n: "Muon" if n in ("blocks.0.weight", "blocks.1.weight") else "AdamW" for n in kinds}
    assert all((made.boundary(made.group_of[n]) == "tensor") == (kind == "Muon") for n, kind in kinds.items())
    assert (
        options_of(made, "blocks.0.weight")["weight_decay"],
        options_of(made, "blocks.1.weight")["weight_decay"],
    ) == (0.1, 0.0)
    assert (options_of(made, "blocks.0.weight")["lr"], options_of(made, "blocks.0.weight")["nesterov"]) == (
        0.5,
        False,
    )


class Together(torch.optim.SGD):
    """Takes the norm over all parameters into every update, as no rank can see it."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.data.sub_(p.grad / norm)


class Counting(torch.optim.SGD):
    """Counts its steps in its group, as optimizers without a schedule do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.1 / group["k"])


class ByTensor(torch.optim.SGD):
    """Takes the norm of each tensor into its update, as LARS and LAMB do."""

    def step(self, closure: Any = None) -> None:
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.data.sub_(p.grad / p.grad.norm(), alpha=0.1)


def test_an_optimizer_that_looks_at_whole_tensors_gets_them_whole() -> None:
    assert {group.boundary for group in recipe(Small(), section(), ByTensor).groups} == {"tensor"}
    assert recipe(Small(), section(), lambda params: ByTensor(params, lr=0.0)).boundary(0) == "tensor"
    assert recipe(Small(), section(), lambda params: torch.optim.SGD(params, lr=0.0)).boundary(0) == "element"


@pytest.mark.parametrize(
    ("keys", "given", "says"),
    [
        ({}, Together, "depends on the others"),
        ({}, Counting, "changes its groups' k"),
        ({}, lambda params: Counting(params), "changes its groups' k"),
        ({}, torch.optim.LBFGS, "closure"),
        ({}, torch.optim.SparseAdam, "dense"),
        ({}, torch.optim.Muon, "2D"),
        ({}, lambda params: torch.optim.LBFGS(params), "closure"),
        ({}, lambda params: None, "did not return"),
        ({}, lambda: None, "list of the trainable parameters"),
        ({}, lambda params: torch.optim.SGD(params, lr=-1.0), "Invalid learning rate"),
        ({}, torch.optim.AdamW(Small().parameters()), "none of the model's parameters"),
        ({}, 3, "pass one, its class, or a factory"),
        ({"options": {"rho": 1}}, None, r"options.rho.*AdamW does not take it"),
        ({"name": "Adadelta", "options": {"rho": "big"}}, None, "Adadelta"),
        ({"name": "RMSprop", "options": {"alpha": -1}}, None, "Invalid alpha"),
        ({"options": {"foreach": True, "fused": True}}, None, "fused"),
        ({"name": "muon", "options": {"adjust_lr_fn": "up"}}, None, "Muon"),
        ({"name": "muon", "matrices": ["*.bias"]}, None, "optimizer.matrices.*no matrix of the model"),
    ],
)
def test_what_cannot_run_is_refused(keys: dict[str, Any], given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        recipe(Small(), section(**keys), given)


def test_the_config_refuses_by_name_what_cannot_run() -> None:
    def keys(**optimizer: Any) -> list[str]:
        return [p.key for p in Config.load({"optimizer": optimizer}).problems(1)]

    assert keys(name="LBFGS") == keys(name="SparseAdam") == ["optimizer.name"]
    assert keys(name="Adafactor") == keys(name="Adafactor", options={"eps": [1e-30, 1e-3], "d": 2.0}) == []
    assert keys(name="Adafactor", eps=1e-3) == ["optimizer.eps"]
    assert keys(name="NAdam", options={"eps": 1e-3}) == keys(options={"rho": 1}) == ["optimizer.options"]
    assert keys(name="muon", options={"nesterov": False}) == []


# ---- the learning rate of a step


def torch_options(
    make: Callable[[Any], Any], optimizer: torch.optim.Optimizer, steps: int
) -> list[list[tuple[float, Any]]]:
    scheduler, found = make(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            found.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
            scheduler.step()
    return found


def stepped(options: Options, steps: int) -> list[list[tuple[float, Any]]]:
    found = []
    for step in range(steps):
        found.append([(group["lr"], group["betas"]) for group in options.groups])
        options.advance(Progress(step + 1, 0, 0))
    return found


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 7, eta_min=1e-4),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "cycle with betas": lambda o: schedulers.OneCycleLR(o, max_lr=[0.5, 0.25], total_steps=12),
    "by group": lambda o: schedulers.LambdaLR(o, [lambda s: 1 / (s + 1), lambda s: 0.5**s]),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda s: 0.9),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.8)], [3]
    ),
    "chain": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)]
    ),
}


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Two groups with learning rates of their own."""
    return torch.optim.AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.3}])


def constant() -> LRSchedule:
    return LRSchedule(Config.load({}).resolve(1).lr_schedule)


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize("built", ["factory", "object"])
def test_a_torch_scheduler_is_followed(name: str, built: str) -> None:
    expected = torch_options(SCHEDULERS[name], adamw(list(Small().parameters())[:-1]), 12)
    assert len({group[0] for step in expected for group in step}) > 2
    own = adamw(list(Small().parameters())[:-1])
    given = SCHEDULERS[name] if built == "factory" else SCHEDULERS[name](own)
    if built == "object" and "betas" in name:  # those would be the caller's own optimizer's
        with pytest.raises(ConfigError, match="changes the momentum of the optimizer that it was made with"):
            Options(recipe(Small(), section(), adamw), constant(), given)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = stepped(Options(recipe(Small(), section(), adamw), constant(), given), 11)
    if built == "factory":
        assert found == expected[:11]
    else:  # a scheduler on the caller's own optimizer leads the learning rates only
        assert [[lr for lr, _ in step] for step in found] == [
            [lr for lr, _ in step] for step in expected[:11]
        ]


def test_a_scheduler_of_one_group_leads_all() -> None:
    own = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    expected = torch_options(
        lambda o: schedulers.StepLR(o, 2, 0.5), torch.optim.AdamW([torch.zeros(1)], lr=0.2), 6
    )
    options = Options(recipe(Small(), section(), adamw), constant(), schedulers.StepLR(own, 2, 0.5))
    found = stepped(options, 6)
    assert [step[0][0] for step in found] == [step[0][0] for step in expected]
    assert [step[1][0] for step in found] == pytest.approx([3 * step[0][0] for step in expected])


def test_without_a_scheduler_the_configs_schedule_scales_each_groups_own_rate() -> None:
    schedule = LRSchedule(
        Config.load({"lr_schedule": {"name": "linear", "total": "10 steps", "final": 0.0}})
        .resolve(1)
        .lr_schedule
    )
    options = Options(recipe(Small(), section(lr=7.0), adamw), schedule)
    assert options.lr == 0.1
    options.advance(Progress(5, 0, 0))
    assert [group["lr"] for group in options.groups] == [0.05, 0.15]
    assert options.lr == 0.05


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (
            schedulers.StepLR(torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(3)], lr=0.1), 1),
            "3 groups, but the optimizer 2",
        ),
        (lambda o: schedulers.LambdaLR(o, [lambda s: 1.0]), "2 groups"),
        (lambda o: None, "no torch scheduler"),
        ("cosine", "no torch scheduler"),
    ],
)
def test_schedulers_that_cannot_be_followed(scheduler: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options(recipe(Small(), section(), adamw), constant(), scheduler)


# ---- the update of one bucket

SHAPES = {"a": (9, 9), "b": (70,), "c": (0, 3), "d": (3, 50), "e": (), "f": (8, 40)}


def bucket_of(
    values: dict[str, Tensor], boundary: Boundary, dtype: torch.dtype, reduce: torch.dtype | None = None
) -> Bucket:
    layout = BucketLayout.build(
        [TensorSpec(n, tuple(t.shape), int(t.dim() < 2)) for n, t in values.items()], 1, boundary
    )
    axis, formats, sums = Axis("dp"), Formats(dtype, dtype), Accumulation("whole", dtype, reduce or dtype)
    names = [(slot.name,) for slot in layout.slots]
    spec = BucketSpec(layout, names, axis, Residency("full", "full", "shard"), formats, sums)
    parameters = [nn.Parameter(values[slot.name].clone()) for slot in layout.slots]
    bucket = Bucket(spec, parameters, BucketMemory(Pool(axis, torch.device("cpu"), "cpu")))
    for slot in layout.slots:
        bucket.write(slot, values[slot.name])
    return bucket


def run_bucket(
    made: Recipe,
    steps: list[dict[str, Tensor]],
    boundary: Boundary,
    factor: float = 0.5,
    together: bool = False,
    **formats: Any,
) -> tuple[dict[str, Tensor], BucketOptimizer]:
    """Weights after updates from gradients by name, of which some are missing in some steps. `together` as on
    a GPU: a group's pieces are updated at once."""
    values = initial(steps[0])
    bucket = bucket_of(values, boundary, values["f"].dtype, **formats)
    optimizer = BucketOptimizer(bucket, made.groups)
    assert optimizer.one_by_one
    optimizer.one_by_one = not together
    for gradients in steps:
        for index, slot in enumerate(bucket.layout.slots):
            if slot.name in gradients:
                bucket.parameters[index].grad = gradients[slot.name].clone()
                bucket.gradients.take(index)
        bucket.gradients.reduce()
        bucket.gradients.finish_reduce()
        missing = {i for i, slot in enumerate(bucket.layout.slots) if slot.name not in gradients}
        optimizer.step(factor, [{} for _ in made.groups], missing)
        bucket.publish().wait()
        bucket.gradients.clear()
    return {
        slot.name: p.detach().clone() for slot, p in zip(bucket.layout.slots, bucket.parameters, strict=True)
    }, optimizer


def initial(like: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    dtype = next(iter(like.values())).dtype
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def gradients_of(steps: int, dtype: torch.dtype, missing: list[str] | None = None) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    full = [
        {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}
        for _ in range(steps)
    ]
    return [
        {n: g for n, g in each.items() if n not in absent}
        for each, absent in zip(full, missing or [""] * steps, strict=True)
    ]


def plain(made: Recipe, steps: list[dict[str, Tensor]], factor: float = 0.5) -> dict[str, Tensor]:
    """What torch itself does, with None for a missing gradient."""
    values = initial(steps[0])
    by_group = [[t for t in values.values() if t.dim() >= 2], [t for t in values.values() if t.dim() < 2]]
    optimizers = [made.groups[g].optimizer(tensors) for g, tensors in enumerate(by_group)]
    for gradients in steps:
        for name, tensor in values.items():
            tensor.grad = gradients[name] * factor if name in gradients and tensor.numel() else None
        for optimizer in optimizers:
            optimizer.step()
    return values


@pytest.mark.parametrize("name", [*ELEMENTWISE, "Adafactor"])
def test_a_parameter_without_gradient_is_left_alone(name: str) -> None:
    steps = gradients_of(6, torch.float64, missing=["b", "", "ac", "bd", "", "abcef"])
    made = recipe(Small(), section(name=name, lr=0.1, weight_decay=0.1))
    expected = plain(made, steps)
    for boundary in ("tensor",) if name == "Adafactor" else ("element", "tensor"):
        found, optimizer = run_bucket(made, steps, boundary)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        counts = {
            interval.start: float(state["step"])
            for interval, state in optimizer.state.by_interval()
            if "step" in state
        }
        slots = {slot.name: slot for slot in optimizer.bucket.layout.slots}
        if counts:
            assert [counts[slots[n].start] for n in "abd"] == [4, 3, 5]


def test_the_first_update_of_a_group_may_be_its_second_step() -> None:
    """A state that is made late must not share its step count with neighbours."""
    steps = gradients_of(3, torch.float64, missing=["abdef", "adf", "be"])
    made = recipe(Small(), section(lr=0.1))
    torch.testing.assert_close(
        run_bucket(made, steps, "element")[0], plain(made, steps), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_pieces_of_any_size_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = gradients_of(4, torch.float32, missing=["", "", "a", ""])
    made = recipe(Small(), section(name=name, lr=0.1, weight_decay=0.1))
    whole, optimizer = run_bucket(made, steps, "element")
    pieces = len(list(optimizer.state.by_interval()))
    for chunk in (ALIGN, 3 * ALIGN):
        monkeypatch.setattr(update_module, "CHUNK", chunk)
        monkeypatch.setattr(update_module, "IN_CACHE", chunk)
        cut, optimizer = run_bucket(made, steps, "element")
        assert len(list(optimizer.state.by_interval())) > pieces
        assert all(torch.equal(cut[n], whole[n]) for n in SHAPES)
        sizes = [interval.size * 4 for interval, _ in optimizer.state.by_interval()]
        # two states and a step count
        assert name != "adamw" or optimizer.nbytes() == sum(2 * size + 4 for size in sizes)


@pytest.mark.parametrize("name", [*ELEMENTWISE, "Adafactor"])
def test_pieces_that_are_updated_at_once_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = gradients_of(4, torch.float32, missing=["", "", "a", "bcef"])
    made = recipe(Small(), section(name=name, lr=0.1, weight_decay=0.1))
    boundary: Boundary = "tensor" if name == "Adafactor" else "element"
    monkeypatch.setattr(update_module, "CHUNK", ALIGN)
    calls = []
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: calls.append(len(optimizer.param_groups[0]["params"]))
    )
    try:
        apart, _ = run_bucket(made, steps, boundary)
        assert set(calls) <= {1}, "one piece at a time, if not by a kernel of ours"
        calls.clear()
        together, optimizer = run_bucket(made, steps, boundary, together=True)
    finally:
        hook.remove()
    assert all(torch.equal(together[n], apart[n]) for n in SHAPES)
    assert len(calls) == 2 * len(steps) - 1, "one for each group and step, but for the vectors in the last"
    assert optimizer.nbytes() > 0 or name == "sgd"


def test_gradients_of_a_narrower_dtype_are_widened_before_they_are_scaled() -> None:
    steps = gradients_of(3, torch.float32)
    narrow = [{n: g.bfloat16().float() for n, g in each.items()} for each in steps]
    made = recipe(Small(), section(lr=0.1))
    factor = 1 / 3
    found, _ = run_bucket(made, narrow, "element", factor, reduce=torch.bfloat16)
    torch.testing.assert_close(found, plain(made, narrow, factor), rtol=1e-5, atol=1e-5)


def test_deferred_models_too() -> None:
    with torch.device("meta"):
        model = models.CASES["gpt2"][0]()
    made = recipe(model, section(name="adagrad"), lambda params: torch.optim.Adagrad(params, lr=0.5))
    assert set(made.group_of) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_that_autograd_adds_up_are_the_sum_wherever_it_has_put_it(
    last: bool, elsewhere: bool
) -> None:
    """Of several micro-batches; in the `last` one the parameter has a gradient or not. Autograd adds in place
    unless it cannot."""
    first, *others = gradients_of(3, torch.float64)
    bucket = bucket_of(first, "element", torch.float64)
    index = next(i for i, slot in enumerate(bucket.layout.slots) if slot.name == "f")
    parameter = bucket.parameters[index]
    parameter.grad = first["f"].clone()
    assert bucket.gradients.take(index, more=True)
    for gradients in others:
        assert parameter.grad is not None
        parameter.grad = parameter.grad + gradients["f"] if elsewhere else parameter.grad.add_(gradients["f"])
    if last:
        assert not bucket.gradients.take(index)
    bucket.gradients.reduce()
    bucket.gradients.finish_reduce()
    slot = bucket.layout.slots[index]
    expected = sum(gradients["f"] for gradients in (first, *others))
    assert parameter.grad is None and torch.equal(
        bucket.gradients.own_shard[slot.start : slot.stop].view(slot.shape), expected
    )
