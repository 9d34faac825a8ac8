"""Where the repeated blocks of a model are, and how many labels its own loss is the mean of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import models
from polyreme.errors import ConfigError
from polyreme.models import huggingface
from polyreme.models.huggingface import count_labels, file_names, find_blocks


class Lists(nn.Module):
    """A large embedding, and lists of `sizes`."""

    def __init__(self, **sizes: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 10)
        for name, modules in sizes.items():
            self.add_module(name, nn.ModuleList(modules))


def linear(*widths: int) -> list[nn.Module]:
    return [nn.Linear(10, width) for width in widths]


def test_blocks_are_found_however_large_the_vocabulary_is() -> None:
    for vocabulary in (97, 100_000):
        with torch.device("meta"):
            model = models.llama(vocab_size=vocabulary)
        assert list(find_blocks(model)) == [f"model.layers.{i}" for i in range(3)]


def test_lists_that_hold_a_tenth_or_else_the_largest() -> None:
    assert list(find_blocks(Lists(a=linear(300, 300), b=linear(200, 200), c=linear(1, 1)))) == [
        "a.0",
        "a.1",
        "b.0",
        "b.1",
    ]
    assert list(find_blocks(Lists(a=linear(1, 1), b=linear(2, 2), c=[*linear(3), nn.Bilinear(3, 3, 3)]))) == [
        "b.0",
        "b.1",
    ]
    assert list(find_blocks(Lists(a=[nn.ReLU(), nn.ReLU()], b=linear(1)))) == []
    assert list(find_blocks(models.ConvNet())) == []


SMALL = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
WIDTHS = {
    "vocab_size": models.VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
OWN_LOSS: dict[str, Callable[[], nn.Module]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "bart decoder": lambda: transformers.BartForCausalLM(transformers.BartConfig(**WIDTHS)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**WIDTHS)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=models.VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    ),
}


@pytest.mark.parametrize("kind", OWN_LOSS)
def test_a_models_own_loss_is_the_mean_of_as_many_labels_as_are_counted(kind: str) -> None:
    """So the sums over two samples, whose first labels count or not, add up to that over both."""
    torch.manual_seed(0)
    model = OWN_LOSS[kind]().float().eval()
    batch = models.tokens(2)
    batch["labels"][0, :5] = -100

    def total(each: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**each).loss * count_labels(model, each)

    with torch.no_grad():
        torch.testing.assert_close(
            total(batch), total(models.share(batch, 0, 2)) + total(models.share(batch, 1, 2))
        )


def test_names_in_files_that_transformers_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("it needs the numbers")

    model = models.llama()
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", refuse)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM.*it needs the numbers.*own names"):
        assert file_names(model, {name: p.shape for name, p in model.named_parameters()}) == {}


def test_a_folder_that_is_not_there_is_told_of_as_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for name, reason in (("none", "there is no such folder"), ("file", "it is a file")):
        problem = huggingface.no_model(str(tmp_path / name))
        assert problem is not None and problem.reason.startswith(reason), problem
    assert (problem := huggingface.no_model("org/name")) is not None and "not downloaded" in problem.fix


def test_a_directory_of_an_adapter_alone_is_told_of_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    problem = huggingface.no_model(str(tmp_path))
    assert problem is not None and "an adapter alone" in problem.reason
    with pytest.raises(ConfigError, match="an adapter alone"):
        huggingface.read_config(str(tmp_path), None)
