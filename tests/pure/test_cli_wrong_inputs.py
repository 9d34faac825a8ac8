"""More than 300 wrong configs, files and command lines: each is one error, of status 1 or 2, and leaves
nothing behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from typer import testing

from command import RANK_VARIABLES, TINY, write_text
from polyreme.cli import main
from polyreme.config.describe import expects
from polyreme.config.schema import LEAVES
from polyreme.data import load_tokenizer, tokenizer_folder, train_tokenizer
from polyreme.errors import ConfigError, DataError
from polyreme.launch import torchrun
from polyreme.launch.signals import ENDINGS, hearing
from polyreme.models import huggingface

DEEP = 5000
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def wrong_values(key: str) -> Iterator[object]:
    """Values that a key cannot have, each of a kind of its own; JSON, so that none is read as another
    type."""
    words = expects(LEAVES[key])
    if words == "true or false":
        yield from ("yes", 1, [], {"a": 1})
    elif "integer" in words:
        yield from (-1, 10**30, {"a": 1})
        yield from () if "list" in words else ([2],)
    elif "number" in words and "list" not in words:
        yield from ([1.0], True, *(() if "text" in words else ("quick", -1, {"a": 1})))
    elif "steps" in words:
        yield from ("10 epochs", -1, 1e300, [10], "ten steps")
    elif "bytes" in words:
        yield from (-1, "10 stones", [1], 1e400)
    elif words == "a table" or words.startswith("a table"):
        yield from (3, "text", [1])
    elif "text" in words:
        yield from (3.5, {"a": {"b": []}}, "half a pair \ud800", "a NUL \0")
    else:
        yield from (3.5, {"a": {"b": []}}, *(() if "true" in words else (True,)))


KEYS = [(key, value) for key in LEAVES for value in wrong_values(key)]


made_once = functools.cache(testing._get_command)


def run(*words: str) -> tuple[int, str, str, BaseException | None]:
    variables = {**dict.fromkeys(RANK_VARIABLES), "COLUMNS": "80"}
    with patch.object(testing, "_get_command", made_once):  # else each run would make the command anew
        result = testing.CliRunner().invoke(main.app, words, env=variables)
    return result.exit_code, result.stdout, result.stderr, result.exception


def refusal(*words: str, says: str = "") -> str | None:
    """What is wrong with how the command refuses, or None."""
    status, output, errors, raised = run(*words)
    if raised is not None and not isinstance(raised, SystemExit):
        return f"{type(raised).__name__}: {raised!s:.300}"
    if status not in (1, 2) or output:
        return f"status {status}, output {output:.200}"
    if errors.startswith("training as tiny.toml says, on "):
        errors = errors.partition("\n")[2]
    heads = errors.count("error: ") if errors.startswith("error: ") else errors.count("─ Error ─")
    if (
        heads != 1
        or "Traceback" in errors
        or len(errors) > 4000
        or (not errors.isascii() and any(0xD800 <= ord(c) < 0xE000 for c in errors))
    ):
        return f"{heads} errors in {len(errors)} characters: {errors:.500}"
    return None if says in errors else f"{says!r} is not in {errors:.500}"


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_text(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "nothing").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchrun, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    return tmp_path


def test_wrong_values_of_every_key(folder: Path) -> None:
    found = {}
    (folder / "wrong.json").touch()
    before = contents(folder).keys()
    for key, value in KEYS:
        section, _, name = key.rpartition(".")
        (folder / "wrong.json").write_text(json.dumps({section: {name: value}} if section else {name: value}))
        if problem := refusal("inspect", "wrong.json", says=key):
            found[key, str(value)[:40]] = problem
    assert not found and contents(folder).keys() == before


FILES: dict[str, bytes] = {
    "empty.json": b"",
    "list.json": b"[1]",
    "number.json": b"3",
    "text.json": b'"a"',
    "cut.json": b'{"seed": ',
    "twice.json": b'{"seed": 1, "seed": 2}',
    "twice-below.json": b'{"batch": {"size": 1, "size": 2}}',
    "deep.json": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "comment.json": b"{} // none",
    "levels.json": b'{"model": {"config": ' + b'{"a":' * 80 + b"1" + b"}" * 82,
    "wide.json": b'{"tp_plan": [' + b"1," * 120_000 + b"1]}",
    "latin.json": '{"model": {"path": "\u00fc"}}'.encode("latin-1"),
    "utf16.json": "{}".encode("utf-16"),
    "long.json": b"{" + b" " * (5 << 20) + b"}",
    "digits.json": b'{"seed": ' + b"9" * 5000 + b"}",
    "null.json": b'{"seed": null}',
    "words.json": b"{seed: 1}",
    "nan.json": b'{"optimizer": {"lr": NaN}}',
    "list.yaml": b"- 1",
    "word.yaml": b"seed",
    "tabs.yaml": b"a:\n\t- b: [",
    "open.yaml": b"seed: [1",
    "twice.yaml": b"seed: 1\nseed: 2",
    "twice-below.yaml": b"batch: {size: 1, size: 2}",
    "laughs.yaml": LAUGHS.encode(),
    "merges.yaml": MERGES.encode(),
    "itself.yaml": b"a: &a [*a]",
    "deep.yaml": b"a: " + b"[" * DEEP + b"]" * DEEP,
    "python.yaml": b"a: !!python/object/apply:os.getcwd []",
    "alias.yaml": b"seed: *none",
    "two.yaml": b"seed: 1\n---\nseed: 2",
    "number-key.yaml": b"1: 2",
    "list-key.yaml": b"[1, 2]: 3",
    "dict-key.yaml": b"{a: 1}: 3",
    "date.yaml": b"data: {path: 2020-01-01}",
    "binary.yaml": b"data: {path: !!binary aGk=}",
    "set.yaml": b"data: {pattern: !!set {a, b}}",
    "nul.yaml": b"data: {path: a\0b}",
    "bell.yml": b"seed: \x07",
    "surrogate.yaml": b'data: {path: "\\ud800"}',
    "omap.yaml": b"mesh: !!omap [dp: 1]",
    "nothing.toml": b"= 3",
    "twice.toml": b"seed = 1\nseed = 2",
    "cut.toml": b"[model",
    "deep.toml": b"a = " + b"[" * DEEP + b"]" * DEEP,
    "hex.toml": b"seed = 0x" + b"f" * 20_000,
    "digits.toml": b"seed = " + b"9" * 5000,
    "date.toml": b"data.path = 2020-01-01",
    "time.toml": b"train.sample = 10:00:00",
    "date-below.toml": b"model.config = {model_type = 'llama', x = 2020-01-01}",
    "bytes.toml": bytes(range(256)),
    "gone.ini": b"",
    "none": b"seed = 1",
    "elf.toml": b"\x7fELF\x02\x01\x01",
    "section.toml": b"model = 3",
    "array.toml": b"[[model]]\npath = 'a'",
    "unknown.toml": b"[modle]\npath = 'a'",
}


def special_files(folder: Path) -> list[str]:
    """Paths of configs that are no regular files, or cannot be reached."""
    os.mkfifo(folder / "fifo.toml")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket.toml")
    (folder / "null.toml").symlink_to("/dev/null")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "terminal.yaml").symlink_to("/dev/tty")
    (folder / "round.toml").symlink_to("round.toml")
    (folder / "dangling.toml").symlink_to("nowhere")
    (folder / "process.toml").symlink_to("/proc/self/environ")
    named = [
        "fifo.toml",
        "socket.toml",
        "null.toml",
        "zero.json",
        "terminal.yaml",
        "round.toml",
        "dangling.toml",
        "process.toml",
    ]
    return [
        *named,
        "~nosuchuser/run.toml",
        "a" * 300 + ".toml",
        "a/" * 3000 + "run.toml",
        "tiny.toml/run.toml",
        "run\udcff.toml",
        "\x1b[31m.toml",
        "",
    ]


SETS = {
    "no equals": "seed",
    "no key": "=3",
    "no name": "optimizer.=3",
    "empty": "",
    "only dots": "...=1",
    "deep": "a." * 200 + "b=1",
    "nested": "model.config=" + "[" * DEEP,
    "below a number": "seed.x=1",
    "home of nobody": "checkpoint.folder=~nosuchuser/run",
    "home of nobody, text": "data.path=~nosuchuser/text",
    "home of nobody, tier": "memory.states=~nosuchuser/tier",
    "home of nobody, cache": "data.cache=~nosuchuser/cache",
    "home of nobody, model": "model.path=~nosuchuser/model",
    "home of nobody, tokenizer": "data.tokenizer=~nosuchuser/tokenizer",
    "home of nobody, resume": "checkpoint.resume=~nosuchuser/run",
    "hex": "seed=0x" + "f" * 9000,
    "two models": "model.path=nothing",
    "above 2^64": "seed=18446744073709551616",
    "ranks": "launch.ranks=0",
    "prime": "batch.micro=2147483647",
    "no prompt": "train.sample=",
}


def test_wrong_files_and_settings(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    names = [*FILES, *special_files(folder)]
    before = contents(folder)
    found = {name: problem for name in names if (problem := refusal("inspect", "--", name))}
    found |= {
        name: problem
        for name, change in SETS.items()
        if (problem := refusal("inspect", "tiny.toml", "--set", change))
    }
    assert not found and contents(folder) == before


LINES = (
    "nosuch",
    "help",
    "--nope",
    "-n 3",
    "train",
    "train gone.toml",
    "train tiny.toml more",
    "train tiny.toml --nope",
    "train --set",
    "train tiny.toml --set",
    "train tiny.toml --resume",
    "train tiny.toml -n",
    "train tiny.toml -n 0",
    "train tiny.toml -n -1",
    "train tiny.toml -n x",
    "train tiny.toml -n 1.5",
    "train tiny.toml -n 1000000000000",
    "train tiny.toml --no-resume --resume=x",
    "train tiny.toml --resume=gone",
    "train tiny.toml --resume=",
    "train nothing",
    "launch",
    "launch -n 0 a.py",
    "launch -n -2 a.py",
    "launch -n x a.py",
    "launch --threads 0 a.py",
    "launch --nope a.py",
    "inspect",
    "inspect gone.toml",
    "inspect nothing",
    "inspect nothing --set seed=1",
    "inspect nothing --all",
    "inspect tiny.toml more",
    "inspect tiny.toml --nope",
    "inspect tiny.toml -n 0",
    "inspect tiny.toml -n -1",
    "inspect tiny.toml --svg",
    "inspect tiny.toml --svg a.svg",
    "inspect tiny.toml --schedule --all",
    "inspect tiny.toml --schedule --describe",
    "inspect tiny.toml --schedule --svg gone/a.svg",
    "inspect tiny.toml --schedule --svg nothing",
    "inspect tiny.toml --schedule --svg link.svg",
    "inspect tiny.toml --schedule --svg pipe.svg",
    "inspect tiny.toml --schedule --set mesh.pp=64 --set "
    "model.config.num_hidden_layers=64 --set batch.size=4096 --set batch.micro=1",
    "doctor more",
    "doctor --nope",
)


def test_wrong_command_lines(folder: Path) -> None:
    (folder / "mine").touch()
    (folder / "link.svg").symlink_to("mine")
    os.mkfifo(folder / "pipe.svg")
    before = contents(folder)
    found = {line: problem for line in LINES if (problem := refusal(*line.split()))}
    assert not found and contents(folder) == before


def test_what_is_no_file_among_the_data(folder: Path) -> None:
    (folder / "corpus").mkdir()
    place = folder / "corpus" / "a.txt"
    with socket.socket(socket.AF_UNIX) as made:
        for make in (
            os.mkfifo,
            lambda _: made.bind("corpus/a.txt"),
            lambda path: path.symlink_to("/dev/zero"),
        ):
            make(place)
            assert (
                refusal("train", "tiny.toml", "--set", "data.path=corpus", says="is no regular file") is None
            )
            assert (
                refusal("train", "tiny.toml", "--set", "data.path=corpus/a.txt", says="is no regular file")
                is None
            )
            place.unlink()


def test_nonsense_in_the_model_is_named() -> None:
    found = {}
    changes = {
        "hidden_size": -32,
        "num_hidden_layers": 0,
        "num_attention_heads": -2,
        "vocab_size": -5,
        "attention_dropout": 5.0,
    }
    changes["n_layer"] = 10**9  # which would be built for as long as the user waits
    for key, value in changes.items():
        with pytest.raises(ConfigError) as caught:
            huggingface.new_model(None, {"model_type": "llama", key: value})
        found[key] = [problem.key for problem in caught.value.problems]
    assert found == {key: [f"model.config.{key}"] for key in changes}


def test_damaged_files_beside_the_weights(tmp_path: Path) -> None:
    """What transformers reads beside the weights, and raises errors of any kind for: the path is named, and
    what to do."""
    huggingface.new_model(
        None, {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    ).config.save_pretrained(tmp_path)
    train_tokenizer(["some text"], 300).save_pretrained(tmp_path)
    contents = (
        "",
        "[1, 2]",
        '"x"',
        "3",
        "null",
        '{"a":' * DEEP + "1" + "}" * DEEP,
        "\xff\xfe",
        '{"eos_token_id": "no", "eos_token": 5}',
    )
    found = {}
    for name, read in {
        **dict.fromkeys(
            ("config.json", "generation_config.json"), lambda: huggingface.read_config(str(tmp_path), None)
        ),
        **dict.fromkeys(
            ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
            lambda: load_tokenizer(tmp_path),
        ),
    }.items():
        file = tmp_path / name
        before = file.read_bytes() if file.exists() else None
        for content in contents[
            : None if name in ("generation_config.json", "tokenizer_config.json") else -1
        ]:
            file.write_text(content, encoding="latin-1")
            try:
                read()
                found[name, content[:20]] = "nothing raised"
            except (ConfigError, DataError) as error:
                if str(tmp_path) not in str(error) or not (
                    "fix: " in str(error) or "Set data.tokenizer" in str(error)
                ):
                    found[name, content[:20]] = str(error)
        file.unlink()
        if before is not None:
            file.write_bytes(before)
    assert not found
    assert tokenizer_folder(None, str(tmp_path)) == str(tmp_path) and tokenizer_folder(None, None) is None
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(DataError, match=r"has no tokenizer in it.*set data\.tokenizer"):
        tokenizer_folder(None, str(tmp_path))


def test_the_launcher_leaves_ignored_signals_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with hearing(ENDINGS):
            now = {number: signal.getsignal(number) for number in ENDINGS}
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [number for number, action in now.items() if action == signal.SIG_IGN] == [signal.SIGHUP]
    assert all(callable(action) for number, action in now.items() if number != signal.SIGHUP)
