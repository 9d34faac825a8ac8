"""A PEFT model in a checkpoint: PEFT opens its adapters on a fresh base, and an engine goes on from it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

import models
import polyreme
import threads
import training
from examples import ALL
from polyreme.errors import CheckpointError, ModelError
from polyreme.models import huggingface
from polyreme.models.peft import adapters
from pool import Ranks

Change = Callable[[nn.Module], nn.Module]


def adapted(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(models.build("llama"), config)


def two_adapters() -> nn.Module:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["v_proj"]))
    return model


def optimizer_of(model: nn.Module, before: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """What the config of `training` describes; with the states of `before`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}
    made = torch.optim.AdamW(
        [{"params": [p for p in trained if p.dim() >= 2]}, vectors],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    made.state.update({p: before.state[p] for p in trained if before is not None and p in before.state})
    return made


def last_tokens(output: Any, batch: Any) -> Any:
    """The loss without the positions that PEFT put before the text."""
    return models.causal_loss(SimpleNamespace(logits=output.logits[:, -batch["labels"].shape[1] :]), batch)


def plain(model: nn.Module, changes: Sequence[Change] = ()) -> list[float]:
    """The losses of two steps, and of two more after each of the changes."""
    optimizer, losses = optimizer_of(model), []
    for step in range(2 + 2 * len(changes)):
        if step and step % 2 == 0:
            model = changes[step // 2 - 1](model)
            optimizer = optimizer_of(model, optimizer)
        batch = models.tokens(training.SAMPLES, seed=step)
        total, weight = last_tokens(model(**batch), batch)
        optimizer.zero_grad()
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((total / weight).item())
    return losses


def saved(rank: int, world: int, folder: Path) -> None:
    cases = {"head": lambda: adapted(modules_to_save=["lm_head"]), "two": two_adapters}
    for name, make in cases.items():
        expected = plain(make())
        for stage in (3,) if name == "head" else (2 if world > 1 else 0,):
            config = training.config(world, zero={"stage": stage}, precision={"compute": "fp64"})
            engine = polyreme.initialize(make(), config, loss_fn=models.causal_loss)
            batches = [
                models.share(models.tokens(training.SAMPLES, seed=step), rank, world) for step in range(3)
            ]
            assert [engine.train_step(batch).loss for batch in batches[:2]] == pytest.approx(
                expected, rel=1e-10
            ), (name, stage)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*trains too")
                path = engine.save(folder / f"{name}-{stage}")
            opened = peft.PeftModel.from_pretrained(models.build("llama"), path).double()
            if name == "two":
                opened.load_adapter(path / "other", "other")
            whole = engine.state_dict()
            assert opened.state_dict().keys() == whole.keys()
            assert all(torch.equal(tensor, whole[key]) for key, tensor in opened.state_dict().items()), (
                name,
                stage,
            )
            assert len(load_file(path / "adapter_model.safetensors")) == 12 + (name == "head")
            after = engine.train_step(batches[2]).loss
            again = polyreme.initialize(make(), config, loss_fn=models.causal_loss)
            again.load(path)
            assert again.train_step(batches[2]).loss == after


@pytest.mark.parametrize("world", [1, 2])
def test_peft_opens_what_was_saved(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world, saved, tmp_path)


def normed() -> nn.Module:
    """With a module that is trained as a whole and has buffers."""
    base = models.build("llama")
    base.norm = nn.BatchNorm1d(24, dtype=torch.float64)
    forward = base.lm_head.forward
    base.lm_head.forward = lambda x: forward(base.norm(x.flatten(0, 1)).view(x.shape))
    torch.manual_seed(1)
    return peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    )


def alone(rank: int, world: int, folder: Path) -> None:
    files = {"states": f"{folder}/tier/", "params": "host"}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        (
            "head",
            lambda: adapted(modules_to_save=["lm_head"]),
            {"zero": {"stage": 0}, "precision": {"compute": "fp64"}},
        ),
        (
            "embedding",
            lambda: adapted(trainable_token_indices=[3, 7]),
            {"zero": {"stage": 2}, "precision": {"compute": "fp64"}},
        ),
        ("two", two_adapters, {"zero": {"stage": 3}, "precision": {"compute": "fp64"}, "memory": files}),
        (
            "norm",
            lambda: normed(),
            {"zero": {"stage": 3}, "precision": {"compute": "fp64"}, "checkpoint": {"shared_files": False}},
        ),
        (
            "bf16",
            adapted,
            {"zero": {"stage": 2}, "precision": {"compute": "bf16"}, "memory": {"states": "host"}},
        ),
    ]
    for name, make, sections in cases[:2] if world == 1 else cases[2:]:
        config = training.config(world, **sections)
        engine = polyreme.initialize(make(), config, loss_fn=models.causal_loss)
        batches = [models.share(models.tokens(training.SAMPLES, seed=step), rank, world) for step in range(3)]
        for batch in batches[:2]:
            engine.train_step(batch)
        path = engine.save(folder / name, adapters_only=True, extra={"name": name}, wait=name != "head")
        engine.wait()
        kinds = {"exp_avg", "exp_avg_sq", "step", "model"} | ({"master"} if name == "bf16" else set())
        assert {file.name for file in (path / "optimizer").iterdir()} == {
            f"{kind}.safetensors" for kind in kinds
        }
        assert not list(path.glob("model*"))
        whole, has = engine.state_dict(), adapters(engine.module)
        if name != "norm":
            opened = peft.PeftModel.from_pretrained(models.build("llama"), path).to(
                torch.bfloat16 if name == "bf16" else torch.float64
            )
            if name == "two":
                opened.load_adapter(path / "other", "other")
            assert all(torch.equal(tensor, whole[key]) for key, tensor in opened.state_dict().items()), name
        held = load_file(path / "optimizer" / "model.safetensors")
        assert held.keys() == has
        assert all(torch.equal(tensor, whole[key]) for key, tensor in held.items()), name
        assert len(has) == len(load_file(path / "adapter_model.safetensors")) + (6 if name == "two" else 0)
        after = engine.train_step(batches[2]).loss
        again = polyreme.initialize(make(), config, loss_fn=models.causal_loss)
        loaded = again.load(path)
        assert loaded.extra == {"name": name} and not loaded.notes
        assert again.state.step == 2 and again.train_step(batches[2]).loss == after, name
        assert all(
            torch.equal(tensor, again.state_dict()[key]) for key, tensor in engine.state_dict().items()
        ), name
        engine.close()
        again.close()

    plain = polyreme.initialize(models.build("llama"), training.config(world), loss_fn=models.causal_loss)
    with pytest.raises(
        ModelError, match=r"adapters_only=True\) of a LlamaForCausalLM, which has no adapters.*get_peft_model"
    ):
        plain.save(folder / "none", adapters_only=True)
    with pytest.raises(CheckpointError, match="has adapters alone, and the model has none"):
        plain.load(path)
    model = adapted()
    model.base_model.model.model.norm.requires_grad_(True)
    more = polyreme.initialize(model, training.config(world), loss_fn=models.causal_loss)
    with pytest.raises(ModelError, match=r"model.norm.weight trains too.*modules_to_save"):
        more.save(folder / "none", adapters_only=True)
    with pytest.raises(CheckpointError, match=r"1 not in the checkpoint: base_model.model.model.norm.weight"):
        more.load(path)
    more.train_step(batches[0])
    name, trained = "base_model.model.model.norm.weight", more.state_dict()
    with training.warned(rank, rf"{name} trains too, and PEFT's files have none of it.*modules_to_save"):
        path = more.save(folder / "more")
    opened = peft.PeftModel.from_pretrained(models.build("llama"), path)
    assert not torch.equal(opened.state_dict()[name], trained[name])
    more.train_step(batches[1])
    more.load(path)
    assert torch.equal(more.state_dict()[name], trained[name])
    assert not (folder / "none").exists()


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_alone_are_saved_and_gone_on_from(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world, alone, tmp_path)


def test_labels_are_counted_as_by_the_base() -> None:
    model, batch = adapted(), models.tokens(2)
    count = huggingface.count_labels
    assert (
        count(model, batch)
        == count(models.build("llama"), batch)
        == int((batch["labels"][:, 1:] != -100).sum())
    )
    assert huggingface.training_arguments(model) == {"use_cache": False}


def staged(rank: int, world: int, folder: Path) -> None:
    """Over a pipeline: the adapters of all stages are saved, and an engine of another mesh goes on from
    them."""
    batch = models.tokens(training.SAMPLES)
    for name, options in {"tokens": {"trainable_token_indices": [3, 7]}, "dora": {"use_dora": True}}.items():
        expected = plain(adapted(**options))
        engine = polyreme.initialize(
            adapted(**options),
            training.config(1, mesh={"pp": 2}, precision={"compute": "fp64"}),
            loss_fn=models.causal_loss,
        )
        batches = [models.tokens(training.SAMPLES, seed=step) for step in range(3)]
        assert [engine.train_step(batch).loss for batch in batches[:2]] == pytest.approx(
            expected, rel=1e-10
        ), name
        for only in (False, True) if ALL in os.environ else (name == "dora",):
            path = engine.save(folder / f"{name}-{only}", adapters_only=only)
            opened = peft.PeftModel.from_pretrained(models.build("llama"), path).double()
            whole = engine.state_dict()
            assert all(torch.equal(tensor, whole[key]) for key, tensor in opened.state_dict().items()), name
        after = engine.train_step(batches[2]).loss
        again = polyreme.initialize(
            adapted(**options),
            training.config(2, zero={"stage": 3}, precision={"compute": "fp64"}),
            loss_fn=models.causal_loss,
        )
        again.load(path)
        assert again.train_step(models.share(batches[2], rank, world)).loss == pytest.approx(after, rel=1e-10)
    engine = polyreme.initialize(adapted(modules_to_save=["lm_head"]), training.config(1, mesh={"pp": 2}))
    engine.train_step(batch)
    with pytest.raises(
        ModelError, match=r"PEFT, called by rank 0, cannot save base_model.model.lm_head.*mesh.pp = 1"
    ):
        engine.save(folder / "none", adapters_only=True)
    with training.warned(rank, "no files of PEFT's"):
        path = engine.save(folder / "whole")
    assert not list(path.glob("adapter*"))
    engine.load(path)


def test_adapters_of_all_pipeline_stages_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, staged, tmp_path)


def divided(rank: int, world: int, folder: Path) -> None:
    """Over tensor parallelism: the steps of plain PyTorch; PEFT opens the adapters, and an engine of another
    mesh goes on from them."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "rows": {"trainable_token_indices": [3, 7], "use_rslora": True},
    }
    batches = [models.tokens(training.SAMPLES, seed=step) for step in range(3)]
    for name, options in cases.items():
        expected = plain(adapted(**options))
        for sequence in (False, True):
            config = training.config(
                1, mesh={"tp": 2, "sequence_parallel": sequence}, precision={"compute": "fp64"}
            )
            engine = polyreme.initialize(adapted(**options), config, loss_fn=models.causal_loss)
            assert [engine.train_step(batch).loss for batch in batches[:2]] == pytest.approx(
                expected, rel=1e-10
            ), (name, sequence)
        path = engine.save(folder / f"tp-{name}", adapters_only=True)
        opened = peft.PeftModel.from_pretrained(models.build("llama"), path).double()
        whole = engine.state_dict()
        assert all(torch.equal(tensor, whole[key]) for key, tensor in opened.state_dict().items()), name
        after = engine.train_step(batches[2]).loss
        again = polyreme.initialize(
            adapted(**options),
            training.config(2, zero={"stage": 3}, precision={"compute": "fp64"}),
            loss_fn=models.causal_loss,
        )
        again.load(path)
        assert again.train_step(models.share(batches[2], rank, world)).loss == pytest.approx(after, rel=1e-10)

    ia3 = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (
            adapted(use_dora=True),
            {},
            r"q_proj.base_layer: DoraLinearVariant adapters of a layer that is divided: only plain LoRA",
        ),
        (
            peft.get_peft_model(models.build("llama"), ia3),
            {},
            r"k_proj.base_layer: ia3 Linear adapters of a layer that is divided",
        ),
        (
            adapted(lora_dropout=0.1),
            {"sequence_parallel": True},
            "lora_dropout would drop other inputs on each rank",
        ),
    ]
    refused.append(
        (
            adapted(),
            {"tp_plan": {"model.layers.*.mlp.down_proj": "vocabulary"}},
            r"down_proj.base_layer: LoRA adapters",
        )
    )
    for model, mesh, says in refused:
        with pytest.raises(ModelError, match=says):
            polyreme.initialize(model, training.config(1, mesh={"tp": 2, **mesh}))


def test_adapters_are_divided_with_their_layers(tmp_path: Path) -> None:
    threads.run(2, divided, tmp_path)


def put_in(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    ).double()


def one_more(model: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["v_proj", "q_proj"]))
    model.set_adapter("other")
    return model.double()


def by_transformers(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    return model.double()


def transformers_takes_peft() -> bool:
    """Whether transformers' own methods work with this version of PEFT: some of its versions ask for one that
    is newer than the newest."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return False
    return True


def tied() -> nn.Module:
    """Adapters of the embedding and of the head that is tied to it."""
    torch.manual_seed(0)
    model = models.llama(tie_word_embeddings=True).double().train()
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"], init_lora_weights=False)
    )


def put_in_later(rank: int, world: int, folder: Path) -> None:
    """Adapters put into a model that is trained already."""
    cases: list[tuple[int, list[Any]]] = [(3 if world == 2 else 0, [put_in, one_more])]
    if transformers_takes_peft():
        cases.append((2, [by_transformers]))
    for stage, changes in cases:
        expected = plain(models.build("llama"), changes)
        config = training.config(world, zero={"stage": stage}, precision={"compute": "fp64"})
        engine = polyreme.initialize(models.build("llama"), config, loss_fn=models.causal_loss)
        losses = []
        for step in range(2 + 2 * len(changes)):
            batch = models.share(models.tokens(training.SAMPLES, seed=step), rank, world)
            if step and step % 2 == 0:
                with engine.full_parameters() as model:
                    engine.module = changes[step // 2 - 1](model)
                with pytest.raises(ModelError, match=r"call engine.refresh\(\)"):
                    engine.train_step(batch)
                engine.refresh()
            losses.append(engine.train_step(batch).loss)
        assert losses == pytest.approx(expected, rel=1e-10), stage
        path = engine.save(folder / f"later-{stage}", adapters_only=True)
        opened = peft.PeftModel.from_pretrained(models.build("llama"), path).double()
        whole = engine.state_dict()
        if stage != 2:
            opened.load_adapter(path / "other", "other")
        names = {key: f"base_model.model.{key}" if stage == 2 else key for key in adapters(engine.module)}
        assert len(names) == (12 if stage == 2 else 24)
        assert all(
            torch.equal(opened.state_dict()[there].double(), whole[key]) for key, there in names.items()
        ), stage
        engine.load(path)
        engine.train_step(batch)

    engine = polyreme.initialize(tied(), config, loss_fn=models.causal_loss)
    batches = [models.share(models.tokens(training.SAMPLES, seed=step), rank, world) for step in range(2)]
    assert [engine.train_step(batch).loss for batch in batches] == pytest.approx(plain(tied()), rel=1e-10)

    bare = models.build("llama")
    put_in(bare)
    with pytest.raises(
        ModelError,
        match=r"PEFT has wrapped model.layers.0.self_attn.q_proj "
        r"of this LlamaForCausalLM.*get_peft_model returns",
    ):
        polyreme.initialize(bare, config)
    engine = polyreme.initialize(models.build("llama"), config, loss_fn=models.causal_loss)
    with engine.full_parameters() as model:
        put_in(model)
    with pytest.raises(ModelError, match="PEFT has wrapped"):
        engine.refresh()


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_may_be_put_in_later(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world, put_in_later, tmp_path)


LAYERS = ["q_proj", "down_proj"]
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "dora": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"]),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=LAYERS),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "encoder": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"
    ),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def of_kind(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(models.build("llama"), KINDS[kind]()).double()


def kinds(rank: int, world: int, folder: Path) -> None:
    """What else PEFT learns: as in plain PyTorch, saved alone, opened by PEFT, gone on from."""
    # with a stage; without one, over tensor parallelism
    single = [("dora", 0), ("lokr", 2), ("encoder", 3), ("prefix", 0)]
    for kind, stage in single if world == 1 else [("ia3", 2), ("vera", 3), ("prompt", 3), ("prompt", None)]:
        expected = plain(of_kind(kind))
        config = training.config(
            1 if stage is None else world,
            mesh={"tp": 2 if stage is None else 1},
            zero={"stage": stage or 0},
            precision={"compute": "fp64"},
        )
        engine = polyreme.initialize(of_kind(kind), config, loss_fn=last_tokens)
        dp = engine.mesh.dp
        batches = [
            models.share(models.tokens(training.SAMPLES, seed=step), dp.rank, dp.size) for step in range(3)
        ]
        assert [engine.train_step(batch).loss for batch in batches[:2]] == pytest.approx(
            expected, rel=1e-10
        ), kind
        path = engine.save(folder / kind, adapters_only=True)
        opened = peft.PeftModel.from_pretrained(models.build("llama"), path).double()
        whole = engine.state_dict()
        if kind in ("dora", "ia3", "lokr", "vera"):
            assert all(torch.equal(tensor, whole[key]) for key, tensor in opened.state_dict().items()), kind
        else:
            prompt = load_file(path / "adapter_model.safetensors")["prompt_embeddings"]
            if kind != "encoder":  # which computes it
                assert torch.equal(prompt, whole["prompt_encoder.default.embedding.weight"])
            assert torch.equal(opened.prompt_encoder["default"].embedding.weight, prompt.float().double())
        after = engine.train_step(batches[2]).loss
        again = polyreme.initialize(of_kind(kind), config, loss_fn=last_tokens)
        again.load(path)
        assert again.train_step(batches[2]).loss == after, kind
    if world == 2:
        for mesh, says in (
            ("pp", "which a pipeline does not know: set mesh.pp = 1"),
            ("tp", "keys and values of all heads"),
        ):
            with pytest.raises(ModelError, match=says):
                polyreme.initialize(of_kind("prefix"), training.config(1, mesh={mesh: 2}))


@pytest.mark.parametrize("world", [1, 2])
def test_other_kinds_of_adapters(world: int, tmp_path: Path) -> None:
    threads.run(world, kinds, tmp_path)
