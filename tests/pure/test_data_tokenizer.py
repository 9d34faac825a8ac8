"""Tokenizers: lossless for any text, deterministic, and equal after saving and loading."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.data import Subset, load_tokenizer, open_tokenizer, train_tokenizer
from polyreme.data import tokenizer as tokenizer_module
from polyreme.data.tokenizer import END, LONGEST_WORD, fingerprint
from polyreme.errors import DataError
from warm import WarmPython

transformers = pytest.importorskip("transformers")

TEXTS = [
    "the quick brown fox jumps over the lazy dog. " * 3,
    "def f(x):\n    return x + 1\n" * 3,
    "naïve café ☕ " * 3,
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = train_tokenizer(TEXTS, 300)
    trained.save_pretrained(folder)
    return [trained, load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)]


@examples(300)
@given(
    s=st.one_of(
        st.text(), st.text(" \t\r\n\u00a0\u3000.,'é☕n"), st.sampled_from([END, f"a {END}b", "n't  .", "\0"])
    )
)
def test_every_text_comes_back(tokenizers: list, s: str) -> None:
    ids = [tokenizer.encode(s) for tokenizer in tokenizers]
    assert ids[0] == ids[1] == ids[2]
    for tokenizer in tokenizers:
        assert tokenizer.decode(ids[0]) == s


def test_vocabulary(tokenizers: list) -> None:
    for tokenizer in tokenizers:
        assert len(tokenizer) == 300
        assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == END
        assert tokenizer.eos_token_id == 0
        assert tokenizer.unk_token is None
        assert len(tokenizer.encode("the quick")) < len("the quick")  # it did merge


def test_equal_in_another_process(tokenizers: list, tmp_path: Path) -> None:
    """Whose interpreter hashes texts with another seed."""
    code = (
        f"from polyreme.data import train_tokenizer\nprint(train_tokenizer({TEXTS!r}, "
        "300).backend_tokenizer.to_str().encode().hex(), hash('text'))"
    )
    process = WarmPython(["-c", code], tmp_path, os.environ)
    output, errors = process.communicate(240)
    assert process.returncode == 0, errors
    other, seeded = output.split()
    assert bytes.fromhex(other).decode() == tokenizers[0].backend_tokenizer.to_str()
    assert "PYTHONHASHSEED" in os.environ or int(seeded) != hash("text")


def test_too_small_a_vocabulary() -> None:
    with pytest.raises(DataError, match=r"data.vocab_size = 256.*257"):
        train_tokenizer(TEXTS, 256)


def test_trained_once_for_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(digest: str, size: int) -> str:
        return fingerprint(
            open_tokenizer(Subset(TEXTS, digest), folder=None, vocab_size=size, cache=tmp_path)
        )

    first = opened("d", 300)
    assert opened("d", 290) != first
    monkeypatch.setattr("polyreme.data.tokenizer.train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert opened("d", 300) == first
    with pytest.raises(pytest.fail.Exception):
        opened("other text", 300)


def test_directory_of_ones_own(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 280).save_pretrained(tmp_path / "mine")
    opened = open_tokenizer(
        Subset([], "d"), folder=str(tmp_path / "mine"), vocab_size=2048, cache=tmp_path / "cache"
    )
    assert len(opened) == 280
    assert not (tmp_path / "cache").exists()


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_code_in_a_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(DataError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_end_of_document_is_needed(tmp_path: Path) -> None:
    plain = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(TEXTS, 280).backend_tokenizer
    )
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(DataError, match="neither an eos nor a sep"):
        load_tokenizer(tmp_path / "plain")
    plain.add_special_tokens({"sep_token": END})
    plain.save_pretrained(tmp_path / "sep")
    assert load_tokenizer(tmp_path / "sep").sep_token_id == 0


@pytest.mark.parametrize("letters", ["a", "ACGT"])
def test_text_without_spaces(letters: str, tmp_path: Path) -> None:
    """Whose one word would take the trainer time that grows with the square of its length."""
    text = "".join(random.Random(1).choices(letters, k=1 << 18)) * (4 if letters == "a" else 1)
    trained = train_tokenizer([text], 300)
    trained.save_pretrained(tmp_path)
    for tokenizer in trained, load_tokenizer(tmp_path):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) < len(text)
        assert max(len(tokenizer.decode([token])) for token in set(ids)) <= LONGEST_WORD


def test_words_are_those_of_a_plain_byte_level_bpe() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    ours = train_tokenizer(TEXTS, 280).backend_tokenizer.pre_tokenizer
    plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in (*TEXTS, "n't  .\n\n x=1;" + " " * LONGEST_WORD, "é" * (LONGEST_WORD // 2)):
        assert ours.pre_tokenize_str(text) == plain.pre_tokenize_str(text)
    longer = ours.pre_tokenize_str("é" * LONGEST_WORD)
    assert [len(word) for word, _ in longer] == [LONGEST_WORD, LONGEST_WORD]


def test_longer_texts_are_trained_on_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Subset(["ab cd " * 50, "short"], "d")
    assert "".join(tokenizer_module._sample(part)) == "".join(part)
    monkeypatch.setattr(tokenizer_module, "PIECE", 10)
    monkeypatch.setattr(tokenizer_module, "SAMPLE", 100)
    taken = list(tokenizer_module._sample(part))
    assert taken[0] == "ab cd ab cd" and 0.8 * 100 < sum(map(len, taken)) < 1.2 * 100
