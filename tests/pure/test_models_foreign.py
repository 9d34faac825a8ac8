"""A directory of somebody else as `model.path`: what our reader refuses is not read in another way, and what
it lacks is not made up."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import polyreme
from polyreme.engine import Engine
from polyreme.errors import ConfigError, ModelError
from polyreme.models import huggingface

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "several", max_shard_size="4KB")
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    ).save_pretrained(folder / "tied")
    return folder


def engine_of(path: Path, **model: Any) -> Engine:
    return polyreme.initialize(path, {"batch": {"size": 1}, "model": model})


def change_json(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def upwards(path: Path) -> None:
    places = json.loads((path / INDEX).read_text())["weight_map"]
    part = places["lm_head.weight"]
    shutil.copy(path / part, path.parent / part)
    change_json(path / INDEX, weight_map=places | {"lm_head.weight": f"../{part}"})


def linked_out(path: Path) -> None:
    part = json.loads((path / INDEX).read_text())["weight_map"]["lm_head.weight"]
    (path / part).rename(path.parent / "elsewhere.safetensors")
    (path / part).symlink_to(path.parent / "elsewhere.safetensors")


def key_twice(path: Path) -> None:
    data = (path / WHOLE).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + size].decode().rstrip()
    name = next(each for each in json.loads(header) if each != "__metadata__")
    header = header[:-1] + f", {json.dumps(name)}: {json.dumps(json.loads(header)[name])}}}"
    (path / WHOLE).write_bytes(struct.pack("<Q", len(header)) + header.encode() + data[8 + size :])


def pickled(path: Path) -> None:
    torch.save(load_file(path / WHOLE), path / "pytorch_model.bin")
    (path / WHOLE).unlink()


def other_file(path: Path) -> None:
    change_json(path / "config.json", transformers_weights="other.safetensors", num_hidden_layers=3)
    shutil.copy(path / WHOLE, path / "other.safetensors")


REFUSED: dict[Callable[[Path], None], tuple[str, str]] = {
    upwards: ("several", r"'lm_head.weight' would be in '\.\./"),
    linked_out: ("several", "is a link that leads out of the checkpoint"),
    key_twice: ("one", "comes twice"),
    pickled: ("one", r"in a pickle \(pytorch_model.bin\)"),
    other_file: ("one", "names another file of weights, 'other.safetensors'"),
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_is_refused_stays_refused(saved: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    kind, said = REFUSED[change]
    shutil.copytree(saved / kind, tmp_path / "model")
    engine_of(tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"model\.path = (?s:.*){said}"):
        engine_of(tmp_path / "model", allow_missing=True)


def test_missing_tensors_are_new_only_where_that_is_said(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "one", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / WHOLE)
    left = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(left, tmp_path / "model" / WHOLE, {"format": "pt"})
    for allowed in (False, ["model.*"]):
        with pytest.raises(
            ConfigError,
            match=r"lacks tensors of the model.*: lm_head\.weight\n.*model.allow_missing = true, or patterns",
        ):
            engine_of(tmp_path / "model", allow_missing=allowed)
    state = torch.random.get_rng_state()
    with pytest.warns(UserWarning, match=r"read whole by every rank.* do not have lm_head\.weight"):
        found = [
            engine_of(tmp_path / "model", allow_missing=allowed).state_dict()
            for allowed in (True, "lm_head.*")
        ]
    torch.random.set_rng_state(state)
    assert all(torch.equal(each[name], tensor) for each in found for name, tensor in left.items())
    assert (
        torch.equal(found[0]["lm_head.weight"], found[1]["lm_head.weight"])
        and found[0]["lm_head.weight"].std() > 0
    )


def test_a_layer_more_than_there_are_weights(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "one", tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"lacks tensors of the model.*: model\.layers\.2\..* and 4 more"):
        engine_of(tmp_path / "model")
    with pytest.warns(UserWarning, match="read whole by every rank"):
        assert engine_of(tmp_path / "model", allow_missing="model.layers.2.*").parameters


UNUSED = r"model\.allow_unused = False: .* has 9 tensors that the model .*: model\.layers\.1\..* and 4 more\n"


@pytest.mark.parametrize("kind", ["one", "several"])
def test_weights_that_the_model_does_not_have_are_refused(saved: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(saved / kind, tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=UNUSED + r".*allow_unused = true, or patterns such as"):
        engine_of(tmp_path / "model")
    with pytest.raises(ConfigError, match="has 9 tensors"):  # the other way to read it
        huggingface.build(str(tmp_path / "model"), None)
    for allowed in (True, ["model.layers.1.*"]):
        assert engine_of(tmp_path / "model", allow_unused=allowed).parameters


def test_an_index_without_what_transformers_needs(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "several", tmp_path / "model")
    index = tmp_path / "model" / INDEX
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ConfigError, match="it has no weight_map, or an empty one"):
        engine_of(tmp_path / "model")
    index.write_text(json.dumps({"weight_map": places}))
    assert engine_of(tmp_path / "model").parameters
    with pytest.raises(ConfigError, match=r'index\.json has no "metadata".*\n.*add "metadata": {}'):
        huggingface.build(str(tmp_path / "model"), None)


def test_what_no_model_has_any_more_is_let_be(saved: Path, tmp_path: Path) -> None:
    for kind in ("one", "tied"):
        shutil.copytree(saved / kind, tmp_path / kind)
        tensors = load_file(tmp_path / kind / WHOLE)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        save_file(tensors, tmp_path / kind / WHOLE, {"format": "pt"})
        engine_of(tmp_path / kind)
        huggingface.build(str(tmp_path / kind), None)


def test_a_head_that_was_trained_before_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES, architectures=["BertForMaskedLM"])
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    with pytest.raises(ConfigError, match=r"4 tensors.*: bert\.pooler\.dense\.bias, bert\.pooler.*cls\.seq_"):
        engine_of(tmp_path)
    engine_of(tmp_path, allow_unused=["bert.pooler.*", "cls.seq_relationship.*"])


def test_an_adapter_beside_the_weights_is_refused_and_the_way_works(saved: Path, tmp_path: Path) -> None:
    folder, alone = tmp_path / "model", tmp_path / "alone"
    shutil.copytree(saved / "one", folder)
    base = transformers.LlamaForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    batch = {"input_ids": torch.arange(6).view(1, 6), "labels": torch.arange(6).view(1, 6)}
    expected = adapted(**batch).loss.item()
    adapted.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"an adapter beside its weights.*folder of their own.*PeftModel"):
        engine_of(folder)
    alone.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(alone / name)
    assert engine_of(folder).train_step(batch).loss != pytest.approx(expected)
    with pytest.raises(ModelError, match=r"an adapter alone.*PeftModel\.from_pretrained"):
        engine_of(alone)
    base = transformers.LlamaForCausalLM.from_pretrained(folder)
    engine = polyreme.initialize(
        peft.PeftModel.from_pretrained(base, alone, is_trainable=True), {"batch": {"size": 1}}
    )
    assert engine.train_step(batch).loss == pytest.approx(expected)


def test_tied_weights_are_not_missing(saved: Path) -> None:
    assert "lm_head.weight" not in load_file(saved / "tied" / WHOLE)
    engine_of(saved / "tied")
    huggingface.build(str(saved / "tied"), None)


@pytest.mark.parametrize(
    "kernel", ["kernels-community/flash-attn", "paged|somebody/else@main:f", "flash_attention_2"]
)
def test_a_kernel_is_not_fetched_unless_trusted(
    saved: Path, tmp_path: Path, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved / "one", tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", attn_implementation=kernel)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    said = (
        rf"attn_implementation = '{kernel.rpartition('|')[2]}' is code "
        r"that transformers would fetch.*\n.*trust_remote_code = true"
    )
    with pytest.raises(ConfigError, match=said):
        engine_of(tmp_path / "model")
    with pytest.raises(ConfigError, match=said):
        huggingface.new_model(None, {"model_type": "llama", **SIZES, "attn_implementation": kernel})
    assert (
        huggingface.read_config(str(tmp_path / "model"), None, trust_remote_code=True)._attn_implementation
        == kernel
    )
    change_json(tmp_path / "model" / "config.json", attn_implementation="eager")
    engine_of(tmp_path / "model")
