"""What `verify` takes and says: modes, models, optimizers and batches of each kind, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import polyreme
import threads
from examples import whole
from polyreme.cli import verify as command
from polyreme.errors import BatchError, ModelError, PolyremeError
from polyreme.models.smaller import shrunk
from polyreme.verify import Verdict
from polyreme.verify.reference import cut, joined

CONFIG: dict[str, Any] = {
    "batch": {"size": 8, "micro": 2},
    "zero": {"min_bucket": 0},
    "optimizer": {"name": "adamw", "lr": 1e-2, "clip": 0.1},
}
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


def verified(rank: int, size: int, model: Any, batch: Any, config: dict[str, Any], **given: Any) -> Verdict:
    return polyreme.verify(model, {**CONFIG, **config}, batch, **given)


def of_threads(size: int, model: Any, batch: Any, config: dict[str, Any], **given: Any) -> Verdict:
    found = threads.run(size, lambda rank, size: verified(rank, size, model(), batch, config, **given))
    assert all(each == found[0] for each in found)
    return found[0]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 9))


def vectors(step: int = 0) -> Any:
    return models.share(models.vectors(8, seed=step), 0, 2)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "class": lambda model: torch.optim.NAdam,
    "function": lambda model: lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "optimizer": lambda model: torch.optim.Adam(
        [{"params": [model[0].weight], "lr": 1e-3}, {"params": [*model[2].parameters()]}]  # type: ignore[index]
    ),
}


@quiet
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_optimizers_that_initialize_takes(kind: str) -> None:
    def run(rank: int, size: int) -> Verdict:
        model = layers()
        before = [parameter.clone() for parameter in model.parameters()]
        given = {"optimizer": OPTIMIZERS[kind](model), "loss_fn": F.mse_loss}
        found = verified(rank, size, model, vectors, {}, **given)
        assert all(map(torch.equal, before, model.parameters()))
        return found

    for found in threads.run(2, run):
        assert found.first is None, str(found)


@quiet
@pytest.mark.parametrize(
    "name",
    ["adam", "muon", *(pytest.param(n, marks=whole) for n in ("sgd", "lion", "lamb", "adagrad", "NAdam"))],
)
def test_the_optimizers_of_the_config(name: str) -> None:
    section: dict[str, Any] = {"name": name, "lr": 1e-3, "weight_decay": 0.1, "groups": {"2.*": {"lr": 1e-4}}}
    if name == "muon":
        section["matrices"] = ["*.weight"]
    found = of_threads(2, layers, vectors, {"optimizer": section}, loss_fn=F.mse_loss)
    assert found.first is None, str(found)


NUMERICS = [
    ("bf16", {"tp": 2}), ("fp16", {"tp": 2}),
    *(
        pytest.param(compute, mesh, marks=whole)
        for compute, mesh in (
            ("fp16", {"dp": 2}), ("fp32", {"tp": 2}), ("bf16", {"dp": 2}), ("autocast-bf16", {"dp": 2}),
            ("autocast-fp16", {"dp": 2}),
        )
    ),
]  # fmt: skip


@quiet
@pytest.mark.parametrize(("compute", "mesh"), NUMERICS)
def test_numerics(compute: str, mesh: dict[str, int]) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return models.llama()

    def run(rank: int, size: int) -> Verdict:
        dp = mesh.get("dp", 1)
        batch = models.share(models.tokens(8), rank % dp, dp)
        config = {"precision": {"compute": compute}, "mesh": mesh, "zero": {"stage": 3, "min_bucket": 0}}
        return verified(rank, size, seeded(), batch, config, mode="numerics")

    found = threads.run(2, run)[0]
    assert found.first is None and "as its dtype rounds" in found.line, str(found)
    error = next(row.error for row in found.rows if row.what == "weights after the update")
    assert error < 1e-6, "weights are updated in float32, whatever the gradients' dtype rounds"


@quiet
def test_a_step_is_taken_again_until_its_loss_scale_fits() -> None:
    def run(rank: int, size: int) -> Verdict:
        torch.manual_seed(0)
        precision = {"compute": "fp16", "initial_scale": 2.0**22, "hysteresis": 2}
        batch = models.share(models.tokens(8), 0, 2)
        config = {"precision": precision, "batch": {"size": 4, "micro": 2}}
        return verified(
            rank, size, models.llama(num_hidden_layers=1), batch, config, mode="numerics", steps=2
        )

    found = run(0, 1)
    assert found.first is None and found.steps == 2, str(found)
    assert any("step 1 was taken again until no gradient overflowed" in note for note in found.notes), str(
        found
    )
    assert next(row for row in found.rows if row.what == "loss").compared == 2


@quiet
def test_models_that_are_functions_layers_or_lists_of_microbatches() -> None:
    made = lambda: models.llama(num_hidden_layers=2)  # noqa: E731
    share = models.share(models.tokens(8), 0, 2)
    listed = [{key: value[i : i + 2] for key, value in share.items()} for i in (0, 2)]
    assert of_threads(2, lambda: made, listed, {}).first is None
    parts = lambda: [nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 9)]  # noqa: E731

    def seeded() -> Any:
        torch.manual_seed(0)
        return parts()

    pipeline = {"mesh": {"pp": 2}, "batch": {"size": 4, "micro": 2}}
    assert of_threads(2, seeded, vectors, pipeline, loss_fn=F.mse_loss).first is None
    each = {"batch": {"size": 8, "micro": 2, "mean": "ranks"}}
    assert of_threads(2, layers, vectors, each, loss_fn=F.mse_loss).first is None


@quiet
def test_documents_that_one_device_does_not_separate_are_refused() -> None:
    batch = {**models.tokens(8), "document_ids": torch.arange(12).div(5, rounding_mode="floor").expand(8, -1)}
    config = {"context": {"method": "ring"}}
    with pytest.raises(BatchError, match=r"document_ids tells documents apart .* give verify position_ids"):
        verified(0, 1, models.llama(num_hidden_layers=1), batch, config)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x))


def test_a_model_that_draws_by_itself_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Noisy draws random numbers beside dropout .* turn that off"):
        verified(0, 1, Noisy(), models.vectors(8), {}, loss_fn=F.mse_loss)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "fast"}, 'give "structure" or "numerics"'),
        ({"mode": ["structure"]}, "there is no such mode"),
        ({"steps": 0}, "give 1 or more"),
        ({"steps": "3"}, "steps = '3': nothing would be compared"),
        ({"steps": 1.5}, "steps = 1.5: nothing would be compared"),
        ({"model": 3}, "the model is a int: give"),
        ({"model": "no/model"}, "model.path = 'no/model': there is no such folder"),
        ({"config": [1]}, "it is a list"),
        ({"config": None}, "it is a NoneType"),
        ({"optimizer": "adamw"}, "it is no torch optimizer"),
        ({"loss_fn": "mse"}, "loss_fn is 'mse': give a function"),
        ({"loss_fn": nn.MSELoss}, "or an object like"),
        ({"loss_fn": lambda output, target: None}, "the loss must be a tensor, but is NoneType"),
        ({"batch": None}, "this one has no tensor"),
        ({"batch": []}, "this one has no tensor"),
        ({"batch": lambda step: None}, "this one has no tensor"),
    ],
)
def test_arguments_that_cannot_be_are_named(given: dict[str, Any], words: str) -> None:
    usual = {"model": layers(), "config": {}, "batch": models.vectors(8), "loss_fn": F.mse_loss}
    with pytest.raises(PolyremeError) as refused:
        polyreme.verify(**usual | given)
    assert words in str(refused.value)


@quiet
def test_what_is_changed_is_said() -> None:
    config = {
        "batch": {"size": 8},
        "optimizer": {"states": "8bit"},
        "compile": True,
        "zero": {"stage": 3, "quantized_weights": True},
    }
    found = verified(0, 1, layers(), models.vectors(8), config, loss_fn=F.mse_loss)
    said = "\n".join(found.notes)
    for key in (
        "optimizer.states = 8bit",
        "compile = true",
        "zero.quantized_weights = true",
        "batch.micro = auto",
    ):
        assert f"{key} was verified as" in said


def test_batches_are_cut_and_joined() -> None:
    batch = {"x": torch.arange(10), "name": "text", "scale": torch.tensor(2.0)}
    parts = cut(batch, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert all(part["scale"] == 2 and part["name"] == "text" for part in parts)
    assert joined([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(1, 3)}])["x"].shape == (3, 3)
    assert joined([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}]) is None
    assert joined([{"x": torch.zeros(2, 3)}, {"y": torch.zeros(2, 3)}]) is None


def test_a_model_is_shrunk_as_the_layout_needs_it() -> None:
    large = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    for tp, stages in ((1, 1), (2, 4), (8, 2)):
        small, said = shrunk(None, large, False, tp, stages)
        assert small["num_hidden_layers"] == max(stages, 2) and "num_hidden_layers 32 -> " in said
        assert small["num_attention_heads"] % tp == small["num_key_value_heads"] % tp == 0
        assert small["hidden_size"] % small["num_attention_heads"] == 0
        assert small["intermediate_size"] % tp == 0
    gpt, said = shrunk(None, {"model_type": "gpt2"}, False, 2, 2)
    assert (gpt["n_layer"], gpt["n_head"] % 2, gpt["n_embd"] % gpt["n_head"]) == (2, 0, 0)


def test_a_verdict_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verified(0, 1, layers(), models.vectors(8), {}, loss_fn=F.mse_loss, steps=1)
    command.show(found, as_json=False, result=tmp_path / "verdict.json")
    assert Verdict.of_dict(json.loads((tmp_path / "verdict.json").read_text())) == found
    command.show(found, as_json=True, result=None)
    assert json.loads(capsys.readouterr().out)["verdict"] == found.line
    command.show(found, as_json=False, result=None)
    assert capsys.readouterr().out.startswith("equal: 1 rank (zero.stage 2) computes")


def test_a_model_that_needs_a_loss_fn_is_refused() -> None:
    batch = torch.zeros(4, 8), torch.zeros(4, 2)
    with pytest.raises(BatchError, match=r"Linear cannot be called with the batch: .* give loss_fn=\.\.\."):
        polyreme.verify(nn.Linear(8, 2), {"batch": {"size": 4}}, batch)
