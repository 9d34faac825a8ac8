"""The job that `polyreme train` runs on each rank: text, model, engine, loop, checkpoints. Reads from top to
bottom.

Invariants: every rank runs the same loop over the same global batches; rank 0 alone shows, logs, plots and
decides where the run begins. A run that was ended and resumed has the numbers of one that was not, on the
same mesh to the last bit."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from tempfile import TemporaryFile
from typing import Any

import torch

from polyreme.checkpoint.run_directory import LATEST, RUN_CLAIM
from polyreme.config import Config, Duration
from polyreme.config.schema import SCALED
from polyreme.data import Loader, PackedDataset, TextData, documents, open_text, tokenizer_folder
from polyreme.distributed.environment import LAUNCHED
from polyreme.distributed.process_group import close, world
from polyreme.engine import Engine, StepResult
from polyreme.errors import CheckpointError, ConfigError, DataError, ModelError, Problem, printable
from polyreme.files.folder_lock import holder
from polyreme.initialization import initialize
from polyreme.job import choice
from polyreme.job.comparison import Comparison
from polyreme.job.ended import checkpoint_entries, nothing_to_do
from polyreme.job.ending import command_from, last_words
from polyreme.job.fit import agreed
from polyreme.job.resume import Beginning, find_beginning
from polyreme.job.retention import History, Retention
from polyreme.launch.signals import listening
from polyreme.layout.intervals import round_down
from polyreme.models import huggingface
from polyreme.monitor import LOG_NAME, FanOut, Monitor, Record, Run, open_monitors
from polyreme.placement.opening import Model
from polyreme.planner.choice import Subject
from polyreme.planner.flops import count_flops, mfu, peak_flops
from polyreme.planner.meta_model import divide, expected, meta_model
from polyreme.planner.shortage import advice_on
from polyreme.step.memory.out_of_memory import Advise
from polyreme.step.precision import DTYPES

WRITTEN = (LOG_NAME, "loss.png", LATEST, f"{LATEST}.tmp", RUN_CLAIM, "tensorboard", "wandb", "mlflow.db")
"""Files and folders, other than checkpoints, that a run writes in its folder."""
WINDOW = 20
"""Steps over which tokens per second are averaged."""


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    steps: int
    tokens: int
    seconds: float
    loss: float
    validation_loss: float | None
    bits_per_byte: float | None
    first_bits_per_byte: float | None
    tokens_per_second: float
    checkpoint: str
    log: str | None
    plot: str | None
    stopped: str | None = None
    """The signal that asked the run to stop before its end; it then goes on from `checkpoint`."""
    best: str | None = None
    """The checkpoint with the lowest validation loss, where `checkpoint.keep_best` asks for it."""
    best_validation_loss: float | None = None


@dataclass(frozen=True)
class _Rate:
    """The factors that convert tokens per second to FLOP/s and MFU."""

    flops_per_token: float
    peak: float


def run(config: Config) -> Summary:
    """Train as `config` says and return the result; every rank of the run calls this.

    Raises ConfigError, DataError, CheckpointError where another run has the folder, and what `initialize` and
    `Engine.train_step` raise."""
    with ExitStack() as afterwards:
        return _run(config, afterwards)


def _plot(config: Config) -> Path | None:
    """Draw the plot of the run's losses and return its path, if the config wants one."""
    if not (config.monitor.plot and config.monitor.jsonl):
        return None
    from polyreme.monitor.plot import plot_losses

    plot = Path(config.checkpoint.folder) / "loss.png"
    plot_losses(plot.with_name(LOG_NAME), plot)
    return plot


def _slow_precision(config: Config, device: torch.device, peak: float) -> Iterator[str]:
    """Yield a note if the processor, with `peak` operations per second in the config's precision, is slower
    in it than in fp32."""
    low = DTYPES[config.precision.compute].itemsize < 4
    if low and peak < (single := peak_flops(device, torch.float32).flops):
        yield (
            f"this processor takes {single / peak:.1f} times as long for "
            f"a matrix product in {config.precision.compute} as in fp32: "
            'precision.compute = "fp32" trains faster on it'
        )


def _fewer_tokens(config: Config, vocabulary: int) -> Iterator[str]:
    """Yield a note if the text was too short for the tokenizer that was to be trained on it."""
    data = config.data
    if vocabulary < data.vocab_size and tokenizer_folder(data.tokenizer, config.model.path) is None:
        yield (
            f"the tokenizer has {vocabulary:,} tokens, and not data.vocab_size = {data.vocab_size:,}: "
            "the training text has no more pairs to join"
        )


def _run(config: Config, afterwards: ExitStack) -> Summary:
    world_size, rank = world()
    config = config.settled(world_size)
    check_sources(config)
    huggingface.quiet(rank)
    check_model(config)
    check_division(config)
    folder = Path(config.checkpoint.folder)
    if config.monitor.plot:
        importlib.import_module("polyreme.monitor.plot")  # fails now if matplotlib is missing
    text = open_text(config.data, config.seed, config.model.path)
    vocabulary = len(text.tokenizer)
    check_model(config, vocabulary)
    flops, model = _flops_per_token(config, vocabulary), model_of(config, vocabulary)
    config, fits, advise = _settled(config, model, text)
    engine = initialize(model, config)
    engine.advise = advise
    peak = peak_flops(engine.mesh.device, DTYPES[config.precision.compute]).flops
    rate = None if flops is None else _Rate(flops, peak)
    monitors = open_monitors(config.monitor, folder) if rank == 0 else FanOut([])
    retention = Retention(config, engine, text.tokenizer, monitors.message)
    afterwards.callback(retention.close)
    beginning = retention.begin()
    if beginning.finished:
        close()
        return _finished(config, beginning, rank)
    loader = engine.loader(text.train, workers=config.data.workers)
    history, notes = retention.load(beginning)
    if not beginning.same_data:
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "sample": 0})
    history.bytes_per_token = text.validation.bytes_per_token if text.validation is not None else None
    monitors.start(_run_info(config, engine, world_size))
    job = _TrainingLoop(config, engine, text, loader, monitors, rate, retention, history)
    try:
        fewer, slow = _fewer_tokens(config, vocabulary), _slow_precision(config, engine.mesh.device, peak)
        for note in (*fits, *fewer, *slow, *notes):
            monitors.message(note)
        if not beginning.checkpoints:
            _show_sample(config, engine, text, monitors, "before training")
        alone, before = rank == 0 and LAUNCHED not in os.environ, checkpoint_entries(config.checkpoint.folder)
        with listening(job.ask_to_stop, aloud=alone, last_words=partial(last_words, config, before)):
            job.train()
            if job.stopped is None:
                _show_sample(config, engine, text, monitors, "after training")
            checkpoint = retention.save()
        summary = job.summary(checkpoint, _plot(config) if rank == 0 and job.stopped is None else None)
        monitors.close({k: v for k, v in vars(summary).items() if isinstance(v, int | float)})
    finally:
        monitors.close({})
    if rank == 0 and config.monitor.console:
        _say(printable(_ending(config, summary)))
    close()
    return summary


def _settled(config: Config, model: Model, text: TextData) -> tuple[Config, list[str], Advise]:
    """Return the config with all that it leaves open, messages about that, and what to ask where memory runs
    out. All ranks must call."""
    subject = Subject.of(model, config)
    config, chosen = choice.agreed(config, subject)
    check_division(config)
    check_lengths(config, text, config.data_parallel)
    config, fits = agreed(config, len(text.tokenizer))
    return config, [*chosen, *fits], advice_on(subject)


def finished(config: Config, alone: bool = True) -> Summary | None:
    """Return the result of the run that the resolved `config` describes, and print it, if the run has ended
    already. Raises ConfigError where its checkpoints are of another model, or cannot be gone on from, and
    CheckpointError where another run has its folder. The latter is not checked if this launcher is not
    `alone`: that run may be the same one on another host, and its ranks will see."""
    beginning = find_beginning(config)
    if beginning.finished:
        return _finished(config, beginning, 0)
    if alone and (user := holder(Path(config.checkpoint.folder), RUN_CLAIM)):
        raise CheckpointError(
            f"{config.checkpoint.folder} is the folder of another "
            f"run, {user}: let it end, or choose another folder"
        )
    return None


def _finished(config: Config, beginning: Beginning, rank: int) -> Summary:
    summary = _summary(
        config, beginning.steps, beginning.tokens, History.of(beginning.extra), Path(beginning.checkpoints[0])
    )
    if rank == 0 and config.monitor.console:
        _say(nothing_to_do(config, summary.checkpoint, summary.steps, summary.tokens, beginning.changes))
    return summary


class _TrainingLoop:
    """The training loop: steps, validations and checkpoints, each when it is due."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        text: TextData,
        loader: Loader,
        monitors: Monitor,
        rate: _Rate | None,
        retention: Retention,
        history: History,
    ) -> None:
        self._config, self._engine, self._text, self._loader = config, engine, text, loader
        self._monitors, self._rate, self._retention, self._history = monitors, rate, retention, history
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._comparison = Comparison(engine)
        self._began = time.perf_counter()
        self._memory: dict[str, int] = {}
        self._asked: str | None = None
        self.stopped: str | None = None
        """The signal that ended the run before `train.length`."""

    def ask_to_stop(self, number: Signals) -> None:
        """Make all ranks stop after the current step, or the next."""
        self._asked = self._asked or number.name
        self._engine.ask_to_stop()

    def train(self) -> None:
        config, engine = self._config, self._engine
        validation = self._validate() if engine.state.step == 0 else None
        began = time.perf_counter()
        for batch in self._loader:
            before = engine.state.progress
            result = self._step(batch)
            seconds = time.perf_counter() - began
            after = engine.state.progress
            done = config.train.length.reached(after)
            every = config.train.validate_every
            if done or (every is not None and every.due(before, after)):
                validation = self._validate()
            if result.spike:
                self._monitors.message(f"step {result.step}: {result.spike}")
            self._record(result, validation, seconds)
            if (unlike := self._comparison.after(seconds)) is not None:
                self._monitors.message(unlike)
            validation = None
            if done:
                return
            if result.stop:
                self.stopped = next(
                    name for name in engine.mesh.gather_objects(self._asked) if name is not None
                )
                return
            every, best = config.checkpoint.every, self._history.best
            if (every is not None and every.due(before, after)) or (best and best[0] == after.steps):
                self._save()
            self._retention.settle()
            began = time.perf_counter()

    def _step(self, batch: Any) -> StepResult:
        try:
            return self._comparison.train_step(batch)
        except CheckpointError as error:  # the one that is being written failed; the step has not begun
            self._retention.failed(error)
            return self._comparison.train_step(batch)

    def _save(self) -> None:
        try:
            self._retention.save(wait=not self._config.checkpoint.background)
        except CheckpointError as error:  # on every rank
            self._retention.failed(error)

    def _validate(self) -> float | None:
        data = self._text.validation
        if data is None:
            return None
        loss, history = validate(self._engine, data, self._config), self._history
        history.measured(self._engine.state.step, loss, self._config.checkpoint.keep_best)
        return loss

    def _record(self, result: StepResult, validation: float | None, seconds: float) -> None:
        self._recent.append((result.tokens, seconds))
        self._history.seconds += seconds
        self._history.loss = result.loss
        engine, state = self._engine, self._engine.state
        if not self._memory or (result.step - 1) % self._config.monitor.every == 0:
            self._memory = engine.memory() | peak_memory(engine.mesh.device)
        speed = sum(tokens for tokens, _ in self._recent) / sum(spent for _, spent in self._recent)
        own = speed / engine.mesh.world_size
        self._monitors.log(
            Record(
                step=result.step,
                samples=state.samples,
                tokens=state.tokens,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens_per_second=speed,
                seconds=seconds,
                elapsed=time.perf_counter() - self._began,
                skipped=result.skipped,
                loss_scale=result.loss_scale if self._config.precision.compute in SCALED else None,
                validation_loss=validation,
                bits_per_byte=_bits(validation, self._history),
                flops_per_second=self._rate.flops_per_token * own if self._rate else None,
                mfu=mfu(self._rate.flops_per_token, own, self._rate.peak) if self._rate else None,
                context=asdict(result.context) if result.context else None,
                memory_bytes=self._memory,
                traffic=engine.traffic(),
            )
        )

    def summary(self, checkpoint: Path, plot: Path | None) -> Summary:
        state = self._engine.state
        return _summary(self._config, state.step, state.tokens, self._history, checkpoint, plot, self.stopped)


def _summary(
    config: Config,
    steps: int,
    tokens: int,
    history: History,
    checkpoint: Path,
    plot: Path | None = None,
    stopped: str | None = None,
) -> Summary:
    named = checkpoint.with_name(f"step-{int(history.best[0])}") if history.best else None
    best = str(named) if named and named.is_dir() else None  # unless somebody has deleted it
    return Summary(
        steps=steps,
        tokens=tokens,
        seconds=history.seconds,
        loss=history.loss,
        validation_loss=history.last_validation,
        bits_per_byte=_bits(history.last_validation, history),
        first_bits_per_byte=_bits(history.first_validation, history),
        tokens_per_second=tokens / history.seconds if history.seconds else 0.0,
        checkpoint=str(checkpoint),
        log=str(Path(config.checkpoint.folder) / LOG_NAME) if config.monitor.jsonl else None,
        plot=None if plot is None else str(plot),
        stopped=stopped,
        best=best,
        best_validation_loss=history.best[1] if best and history.best else None,
    )


def _bits(loss: float | None, history: History) -> float | None:
    """Return the bits per byte of the validation text."""
    return (
        None
        if loss is None or history.bytes_per_token is None
        else loss / math.log(2) / history.bytes_per_token
    )


def validate(engine: Engine, data: PackedDataset, config: Config) -> float:
    """Return the mean loss, in nats per token, over the first `train.validate_batches` global batches of
    `data`."""
    ranks = engine.mesh.data.size
    size = min(config.batch.size, round_down(len(data), ranks))
    loader = engine.loader(data, batch_size=size, shuffle=False, epochs=1, workers=0)
    total = weight = 0.0
    for at, batch in enumerate(loader):
        result = engine.eval_step(batch)
        total, weight = total + result.loss * result.weight, weight + result.weight
        if at + 1 == config.train.validate_batches:
            break
    return total / weight


def sample(engine: Engine, tokenizer: Any, prompt: str, length: int, seed: int) -> str:
    """Return `prompt` continued by `length` tokens, drawn at temperature 0.8 from the 50 likeliest. All ranks
    must call: they gather sharded parameters together, and draw the same tokens."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(engine.mesh.device)
    modes = {module: module.training for module in engine.module.modules()}
    engine.module.eval()
    device = engine.mesh.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = engine.module
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.eos_token_id,
        )
    for module, mode in modes.items():
        module.training = mode
    return tokenizer.decode(out[0], skip_special_tokens=True)


def _say(text: str) -> None:
    """Print `text`. A closed or full output (`| head`) does not end the run: later output is discarded."""
    try:
        print(text, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"standard output: {error.strerror}; no more is printed to it", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process ever used: on the accelerator, or resident in memory."""
    if device.type == "cuda":
        return {"peak_device": torch.cuda.max_memory_allocated(device)}
    return {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def check_sources(config: Config) -> None:
    """Check the model, the text and the folder as far as possible before any rank starts. Raises ConfigError
    and DataError."""
    model, data, problems = config.model, config.data, []
    if model.path is None and model.config is None:
        fix = 'set model.path, or model.config = {model_type = "llama", ...}'
        problems.append(Problem("model", None, "says nothing of the model", fix))
    if model.path is not None and (problem := huggingface.no_model(model.path)):
        problems.append(problem)
    if data.path is None:
        problems.append(
            Problem(
                "data.path",
                None,
                "says nothing of the text",
                'set a file, a folder, a datasets name, or "python-stdlib"',
            )
        )
    if data.tokenizer is not None and not Path(data.tokenizer).expanduser().is_dir():
        fix = "give a directory that save_pretrained wrote, or remove it to train a tokenizer on the text"
        problems.append(Problem("data.tokenizer", data.tokenizer, "there is no such directory", fix))
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not (resume and Path(resume).expanduser().is_dir()):
        fix = "give the folder of a checkpoint or of a run, auto, or never"
        problems.append(Problem("checkpoint.resume", resume, "there is no such directory", fix))
    folder = Path(config.checkpoint.folder)
    if links := [name for name in WRITTEN if (folder / name).is_symlink()]:
        link = (
            f"{links[0]} in it is a symbolic link, to "
            f"{(folder / links[0]).readlink()}, and nothing is written through one"
        )
        problems.append(
            Problem(
                "checkpoint.folder", config.checkpoint.folder, link, "remove the link, or give another folder"
            )
        )
    if reason := _not_writable(folder):
        problems.append(
            Problem(
                "checkpoint.folder", config.checkpoint.folder, reason, "give a folder that can be written"
            )
        )
    if problems:
        raise ConfigError(problems)
    tokenizer_folder(data.tokenizer, model.path)
    for key, path in ("data.path", data.path), ("data.validation", data.validation):
        if isinstance(path, str):
            documents(path, pattern=data.pattern, field=data.field, key=key)


def _not_writable(folder: Path) -> str | None:
    """Return why nothing can be written to `folder`, or to its nearest existing parent; None if it can. Does
    not make the folder, as all ranks check at once."""
    nearest = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), Path())
    try:
        with TemporaryFile(dir=nearest):
            longest = os.pathconf(nearest, "PC_NAME_MAX")
    except OSError as error:
        return f"it cannot be written: {error.strerror or error}"
    if any(len(os.fsencode(name)) > longest for name in folder.parts):
        return f"it cannot be written: {os.strerror(errno.ENAMETOOLONG)}"
    return None


def check_model(config: Config, vocabulary: int | None = None) -> None:
    """Check that the model can be built, and takes such texts; without `vocabulary`, only as far as is known
    before there is a tokenizer."""
    model = config.model
    loaded = huggingface.read_config(model.path, model.config, model.trust_remote_code, vocabulary)
    if problems := huggingface.text_problems(model.path, loaded, config.data.sequence, vocabulary):
        raise ConfigError(problems)


def check_division(config: Config) -> None:
    """Check that the mesh can divide the model. Raises ConfigError for a model that cannot be built, and
    ModelError."""
    if config.mesh.tp * config.mesh.pp > 1 and (model := expected(config.model, config.data)) is not None:
        divide(model, config.mesh, config.pipeline, config.schedule)


def check_lengths(config: Config, text: TextData, dp: int) -> None:
    """Check that the packed text to train on, and that to evaluate on, are enough for one batch each."""
    sequence, size = config.data.sequence, config.batch.size
    if len(text.train) < size:
        raise DataError(
            f"the training text has {len(text.train)} sequences of "
            f"data.sequence = {sequence} tokens, fewer than batch.size = {size}: "
            "use more text, shorten data.sequence, or lower batch.size"
        )
    if text.validation is not None and len(text.validation) < dp:
        raise DataError(
            f"the validation text has {len(text.validation)} sequences "
            f"of data.sequence = {sequence} tokens, fewer than {dp} "
            "data-parallel ranks: raise data.validation, or shorten data.sequence"
        )


def model_of(config: Config, vocabulary: int) -> Model:
    """Return the model as `initialize` takes it: the directory, or a function that builds the model (which is
    then never built whole)."""
    if config.model.path is not None:
        return config.model.path
    return lambda: huggingface.build(None, config.model.config, vocab_size=vocabulary)


def _flops_per_token(config: Config, vocabulary: int) -> float | None:
    """Return the flops per token, counted on a model without memory; None where they cannot be counted."""
    dtype = DTYPES[config.precision.compute]
    ids = torch.zeros(1, config.data.sequence, dtype=torch.long, device="meta")
    model = meta_model(config.model, vocabulary)
    try:
        flops = count_flops(
            model, {"input_ids": ids, "labels": ids, **huggingface.training_arguments(model)}, dtype=dtype
        )
    except ModelError:
        return None
    return flops.model / config.data.sequence


def _run_info(config: Config, engine: Engine, world_size: int) -> Run:
    name = config.model.path or f"{(config.model.config or {}).get('model_type')} (new)"
    return Run(
        model=str(name),
        parameters=engine.parameter_count,
        ranks=world_size,
        stage=int(config.zero.stage),
        dtype=config.precision.compute,
        steps=_last_step(config, engine),
        step=engine.state.step,
        config=config.model_dump(mode="json"),
    )


def _last_step(config: Config, engine: Engine) -> int:
    """Return the step at which the run ends, if all samples to come are full."""
    length, state = config.train.length, engine.state
    rest = max(0.0, length.amount - length.count(state.progress))
    return state.step + config.steps(Duration(amount=rest, unit=length.unit))


def _show_sample(config: Config, engine: Engine, text: TextData, monitors: Monitor, when: str) -> None:
    parts = engine.mesh.pp.size > 1 or config.mesh.sequence_parallel
    if config.train.sample is not None and (parts or config.computes_attention):
        monitors.message(
            f"no sample {when}: a model cut into pipeline stages, or along the sequence, or whose attention "
            "the engine computes (mesh.cp, context.method, data.pack), does not generate text yet"
        )
    elif config.train.sample is not None:
        continued = sample(
            engine, text.tokenizer, config.train.sample, config.train.sample_tokens, config.seed
        )
        monitors.message(f"{when}: {continued!r}")


def _ending(config: Config, summary: Summary) -> str:
    if summary.stopped is not None:
        how = f"--resume {summary.checkpoint} goes on from it"
        if config.checkpoint.resume != "never":
            how = f"the same command goes on from {summary.checkpoint}"
        command = command_from(Path(summary.checkpoint), config)
        said = f"stopped by {summary.stopped} after step {summary.steps}; {how}"
        return f"{said}\n  {command}" if command else said
    lines = [f"trained {summary.steps:,} steps, {summary.tokens:,} tokens in {summary.seconds:.0f} s"]
    if summary.bits_per_byte is not None and summary.first_bits_per_byte is not None:
        lines.append(
            f"validation: {summary.first_bits_per_byte:.2f} -> {summary.bits_per_byte:.2f} bits per byte"
        )
    if summary.plot:
        lines.append(f"loss plot: {summary.plot}")
    lines += [
        f"checkpoint: {summary.checkpoint}",
        *(
            [f"best: {summary.best}, validation loss {summary.best_validation_loss:.4f}"]
            if summary.best
            else []
        ),
        "load it with:",
        "  from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'  model = AutoModelForCausalLM.from_pretrained("{summary.checkpoint}")',
        f'  tokenizer = AutoTokenizer.from_pretrained("{summary.checkpoint}")',
    ]
    return "\n".join(lines)
