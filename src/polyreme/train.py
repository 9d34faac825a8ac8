"""The job that `polyreme train` runs on each rank: text, model, engine, loop, checkpoint. Reads from top to bottom.

Invariant: every rank runs the same loop over the same global batches; rank 0 alone shows, logs and plots.
"""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from polyreme import model_map
from polyreme.config import Config
from polyreme.data import Loader, PackedDataset, TextData, documents, open_text
from polyreme.engine import Engine, StepResult, initialize
from polyreme.errors import ConfigError, DataError, ModelError, Problem
from polyreme.mesh import close, world
from polyreme.monitor import LOG_NAME, FanOut, Monitor, Record, Run, open_monitors
from polyreme.planner.cost import count_flops, mfu, peak_flops
from polyreme.precision import DTYPES
from polyreme.twin import divide, expected, twin

WINDOW = 20
"""Steps over which the rate of tokens is taken."""


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

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


@dataclass(frozen=True)
class _Rate:
    """What turns tokens per second into FLOP/s and MFU."""

    flops_per_token: float
    peak: float


def run(config: Config) -> Summary:
    """Train as `config` says and return how it ended; every rank of the run calls this.

    Raises ConfigError, DataError and what `initialize` and `Engine.train_step` raise.
    """
    world_size, rank = world()
    config = config.resolve(world_size)
    check_sources(config)
    model_map.quiet(rank)
    _check_model(config)
    check_division(config)
    folder = Path(config.checkpoint.folder)
    if config.monitor.plot:
        from polyreme.plot import plot_losses
    text = open_text(config.data, config.seed)
    vocabulary = len(text.tokenizer)
    _check_model(config, vocabulary)
    flops = _flops_per_token(config, vocabulary)
    _check_lengths(config, text, int(config.mesh.dp))
    engine = initialize(_model(config, vocabulary), config)
    dtype = DTYPES[config.precision.compute]
    peak, single = (peak_flops(engine.mesh.device, each).flops for each in (dtype, torch.float32))
    rate = None if flops is None else _Rate(flops, peak)
    checkpoints = _Checkpoints(config)
    loader = engine.loader(text.train, workers=config.data.workers)
    monitors = open_monitors(config.monitor, folder) if rank == 0 else FanOut([])
    monitors.start(_run_info(config, engine, world_size))
    try:
        if peak < single and dtype.itemsize < 4:
            monitors.message(
                f"this processor takes {single / peak:.1f} times as long for a matrix product in {config.precision.compute} as in fp32: "
                'precision.compute = "fp32" trains faster on it'
            )
        _show_sample(config, engine, text, monitors, "before training")
        if checkpoints.earlier:
            names = ", ".join(path.name for path in checkpoints.earlier)
            monitors.message(f"{names} in {folder}, of an earlier run, will go when the first checkpoint is there (checkpoint.replace)")
        job = _Loop(config, engine, text, loader, monitors, rate, checkpoints)
        job.train()
        _show_sample(config, engine, text, monitors, "after training")
        checkpoint = checkpoints.save(engine, text)
        plot = None
        if config.monitor.plot and config.monitor.jsonl and rank == 0:
            plot = folder / "loss.png"
            plot_losses(folder / LOG_NAME, plot)
        summary = job.summary(checkpoint, plot)
        monitors.close({k: v for k, v in vars(summary).items() if isinstance(v, int | float)})
    finally:
        monitors.close({})
    if rank == 0 and config.monitor.console:
        print(_ending(summary, text.validation), flush=True)
    close()
    return summary


class _Loop:
    """Steps, validations and checkpoints, each when it is due."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        text: TextData,
        loader: Loader,
        monitors: Monitor,
        rate: _Rate | None,
        checkpoints: _Checkpoints,
    ) -> None:
        self._config, self._engine, self._text, self._loader = config, engine, text, loader
        self._monitors, self._rate, self._checkpoints = monitors, rate, checkpoints
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._began = time.perf_counter()
        self._memory: dict[str, int] = {}
        self._training_seconds = 0.0
        self._losses: list[float] = []
        self._validations: list[float] = []

    def train(self) -> None:
        config, engine = self._config, self._engine
        validation = self._validate()
        for batch in self._loader:
            before = engine.state.progress
            result = engine.train_step(batch)
            after = engine.state.progress
            done = config.train.length.reached(after)
            every = config.train.validate_every
            if done or (every is not None and every.due(before, after)):
                validation = self._validate()
            self._record(result, validation)
            validation = None
            if not done and config.checkpoint.every is not None and config.checkpoint.every.due(before, after):
                self._monitors.message(f"saved {self._checkpoints.save(engine, self._text)}")
            if done:
                return

    def _validate(self) -> float | None:
        data = self._text.validation
        if data is None:
            return None
        loss = validate(self._engine, data, self._config)
        self._validations.append(loss)
        return loss

    def _record(self, result: StepResult, validation: float | None) -> None:
        self._recent.append((result.tokens, result.seconds))
        self._training_seconds += result.seconds
        self._losses.append(result.loss)
        engine, state = self._engine, self._engine.state
        if (len(self._losses) - 1) % self._config.monitor.every == 0:
            self._memory = engine.memory() | peak_memory(engine.mesh.device)
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        speed = tokens / seconds
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
                seconds=time.perf_counter() - self._began,
                skipped=result.skipped,
                loss_scale=result.loss_scale if self._config.precision.compute == "fp16" else None,
                validation_loss=validation,
                bits_per_byte=self._bits(validation),
                flops_per_second=self._rate.flops_per_token * own if self._rate else None,
                mfu=mfu(self._rate.flops_per_token, own, self._rate.peak) if self._rate else None,
                memory_bytes=self._memory,
                traffic=engine.traffic(),
            )
        )

    def _bits(self, loss: float | None) -> float | None:
        data = self._text.validation
        return None if loss is None or data is None else loss / math.log(2) / data.bytes_per_token

    def summary(self, checkpoint: Path, plot: Path | None) -> Summary:
        state, last = self._engine.state, self._validations[-1] if self._validations else None
        return Summary(
            steps=state.step,
            tokens=state.tokens,
            seconds=self._training_seconds,
            loss=self._losses[-1],
            validation_loss=last,
            bits_per_byte=self._bits(last),
            first_bits_per_byte=self._bits(self._validations[0]) if self._validations else None,
            tokens_per_second=state.tokens / self._training_seconds,
            checkpoint=str(checkpoint),
            log=str(Path(self._config.checkpoint.folder) / LOG_NAME) if self._config.monitor.jsonl else None,
            plot=None if plot is None else str(plot),
        )


def validate(engine: Engine, data: PackedDataset, config: Config) -> float:
    """Mean loss, in nats per token, over the first `train.validate_batches` global batches of `data`."""
    ranks = engine.mesh.dp.size
    size = min(config.batch.size, len(data) // ranks * ranks)
    loader = engine.loader(data, batch_size=size, shuffle=False, epochs=1, workers=0)
    total = weight = 0.0
    for at, batch in enumerate(loader):
        result = engine.eval_step(batch)
        total, weight = total + result.loss * result.weight, weight + result.weight
        if at + 1 == config.train.validate_batches:
            break
    return total / weight


def sample(engine: Engine, tokenizer: Any, prompt: str, length: int, seed: int) -> str:
    """`prompt` continued by `length` tokens, drawn at temperature 0.8 from the 50 likeliest. All ranks must call: where parameters
    are sharded they gather them together, and draw the same tokens."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(engine.mesh.device)
    modes = {module: module.training for module in engine.module.modules()}
    engine.module.eval()
    device = engine.mesh.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = engine.module
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=True, temperature=0.8, top_k=50,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    for module, mode in modes.items():
        module.training = mode
    return tokenizer.decode(out[0], skip_special_tokens=True)


def peak_memory(device: torch.device) -> dict[str, int]:
    """The most bytes that this process ever used: on the accelerator, or resident in memory."""
    if device.type == "cuda":
        return {"peak_device": torch.cuda.max_memory_allocated(device)}
    return {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def check_sources(config: Config) -> None:
    """What can be said of the model, the text and the folder before any rank starts. Raises ConfigError and DataError."""
    model, data, problems = config.model, config.data, []
    if model.path is None and model.config is None:
        fix = 'set model.path, or model.config = {model_type = "llama", ...}'
        problems.append(Problem("model", None, "says nothing of the model", fix))
    if model.path is not None and not (Path(model.path) / "config.json").is_file():
        problems.append(Problem("model.path", model.path, "is not a Hugging Face model directory (no config.json in it)",
                                "give a directory that save_pretrained wrote, or model.config"))  # fmt: skip
    if data.path is None:
        problems.append(Problem("data.path", None, "says nothing of the text", 'set a file, a folder, a datasets name, or "python-stdlib"'))
    if data.tokenizer is not None and not Path(data.tokenizer).expanduser().is_dir():
        fix = "give a directory that save_pretrained wrote, or remove it to train a tokenizer on the text"
        problems.append(Problem("data.tokenizer", data.tokenizer, "there is no such directory", fix))
    folder = Path(config.checkpoint.folder)
    if reason := _not_writable(folder):
        problems.append(Problem("checkpoint.folder", config.checkpoint.folder, reason, "give a folder that can be written"))
    elif (earlier := _saved(folder)) and not config.checkpoint.replace:
        reason = f"it has checkpoints of an earlier run ({', '.join(path.name for path in earlier)}), which would be mixed with this one's"
        fix = "give another folder, or write checkpoint.replace = true to have them removed once there is a new one"
        problems.append(Problem("checkpoint.folder", config.checkpoint.folder, reason, fix))
    if problems:
        raise ConfigError(problems)
    for path in (data.path, data.validation):
        if isinstance(path, str):
            documents(path, pattern=data.pattern, field=data.field)


def _not_writable(folder: Path) -> str | None:
    """Why nothing can be written to `folder`, found by making it and a file in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"it cannot be written: {error}"


def _check_model(config: Config, vocabulary: int | None = None) -> None:
    """Whether the model can be built, and takes such texts; without `vocabulary`, what is known before there is a tokenizer."""
    model = config.model
    loaded = model_map.read_config(model.path, model.config, model.trust_remote_code, vocabulary)
    if problems := model_map.text_problems(model.path, loaded, config.data.sequence, vocabulary):
        raise ConfigError(problems)


def check_division(config: Config) -> None:
    """Whether the mesh can divide the model. Raises ConfigError for a model that cannot be built, and ModelError."""
    if config.mesh.tp * config.mesh.pp > 1 and (model := expected(config)) is not None:
        divide(model, config)


def _check_lengths(config: Config, text: TextData, dp: int) -> None:
    """Whether each part of the text, now packed, is enough for one batch."""
    sequence, size = config.data.sequence, config.batch.size
    if len(text.train) < size:
        raise DataError(
            f"the training text has {len(text.train)} sequences of data.sequence = {sequence} tokens, fewer than batch.size = {size}: "
            "use more text, shorten data.sequence, or lower batch.size"
        )
    if text.validation is not None and len(text.validation) < dp:
        raise DataError(
            f"the validation text has {len(text.validation)} sequences of data.sequence = {sequence} tokens, fewer than {dp} "
            "data-parallel ranks: raise data.validation, or shorten data.sequence"
        )


def _model(config: Config, vocabulary: int) -> Any:
    """What `initialize` takes: the directory, or a function that builds the model (which is then never built whole)."""
    if config.model.path is not None:
        return config.model.path
    return lambda: model_map.build(None, config.model.config, vocab_size=vocabulary)


def _flops_per_token(config: Config, vocabulary: int) -> float | None:
    """Counted on a model without memory; None where they cannot be counted."""
    dtype = DTYPES[config.precision.compute]
    ids = torch.zeros(1, config.data.sequence, dtype=torch.long, device="meta")
    model = twin(config, vocabulary)
    try:
        flops = count_flops(model, {"input_ids": ids, "labels": ids, **model_map.training_arguments(model)}, dtype=dtype)
    except ModelError:
        return None
    return flops.model / config.data.sequence


def _run_info(config: Config, engine: Engine, world_size: int) -> Run:
    name = config.model.path or f"{(config.model.config or {}).get('model_type')} (new)"
    return Run(
        model=str(name), parameters=engine.parameters, ranks=world_size, stage=int(config.zero.stage), dtype=config.precision.compute,
        steps=config.steps(config.train.length), config=config.model_dump(mode="json"),
    )  # fmt: skip


def _show_sample(config: Config, engine: Engine, text: TextData, monitors: Monitor, when: str) -> None:
    if config.train.sample is not None and (engine.mesh.pp.size > 1 or config.mesh.sequence_parallel):
        monitors.message(f"no sample {when}: a model cut into pipeline stages, or along the sequence, does not generate text yet")
    elif config.train.sample is not None:
        continued = sample(engine, text.tokenizer, config.train.sample, config.train.sample_tokens, config.seed)
        monitors.message(f"{when}: {continued!r}")


class _Checkpoints:
    """The run's checkpoints in its folder. Those of an earlier run, which the config then allows to go, stay until there is a new one."""

    def __init__(self, config: Config) -> None:
        self._folder, self._keep = Path(config.checkpoint.folder), config.checkpoint.keep
        self.earlier = _saved(self._folder)

    def save(self, engine: Engine, text: TextData) -> Path:
        """Write the model under its step's name, and remove the oldest beyond `checkpoint.keep`."""
        path = engine.save(self._folder / f"step-{engine.state.step}", text.tokenizer)
        if engine.mesh.rank == 0:
            for old in self.earlier:
                if old != path:
                    shutil.rmtree(old)
            self.earlier = []
            for old in [] if self._keep is None else _saved(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        return path


def _saved(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    found = {int(p.name.removeprefix("step-")): p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal()}
    return [found[step] for step in sorted(found)]


def _ending(summary: Summary, validation: PackedDataset | None) -> str:
    lines = [f"trained {summary.steps:,} steps, {summary.tokens:,} tokens in {summary.seconds:.0f} s"]
    if validation is not None and summary.bits_per_byte is not None and summary.first_bits_per_byte is not None:
        lines.append(f"validation: {summary.first_bits_per_byte:.2f} -> {summary.bits_per_byte:.2f} bits per byte")
    if summary.plot:
        lines.append(f"loss plot: {summary.plot}")
    lines += [
        f"checkpoint: {summary.checkpoint}",
        "load it with:",
        "  from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'  model = AutoModelForCausalLM.from_pretrained("{summary.checkpoint}")',
        f'  tokenizer = AutoTokenizer.from_pretrained("{summary.checkpoint}")',
    ]
    return "\n".join(lines)
