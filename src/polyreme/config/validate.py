"""Checks keys together: finds conflicts between them, and derives values from others.

A conflict is (key, reason, fix). Torch is imported only to look up the arguments of an optimizer's class.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import get_args

from polyreme.config.describe import default, toml
from polyreme.config.duration import Duration
from polyreme.config.schema import (
    LEAVES,
    OPTIMIZERS,
    OPTIONS,
    SCALED,
    Autocast,
    BatchSection,
    Keys,
    OptimizerSection,
    ZeroSection,
    is_files,
    tiers_of,
)
from polyreme.layout.intervals import round_down

Conflict = tuple[str, str, str]

COMPACT = ("adam", "adamw", "adagrad", "lion", "sgd")
"""Optimizers whose moments can be kept in fewer bits."""

MOST_RANKS = 1 << 20
"""The largest world size: facts about each rank can still be computed and shown in seconds."""

ACTIVATIONS = ("keep", "recompute", "host")
DTYPE_BYTES = {**dict.fromkeys(get_args(Autocast), 4), "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def samples(keys: Keys, length: Duration) -> float:
    """Return `length` in samples of `data.sequence` tokens."""
    rate = {"steps": keys.batch.size, "samples": 1, "tokens": 1 / keys.data.sequence}
    return length.amount * rate[length.unit]


def _total(keys: Keys) -> Duration:
    return keys.train.length if isinstance(keys.lr_schedule.total, str) else keys.lr_schedule.total


def derive(keys: Keys, world_size: int, fits: int | None = None) -> dict[str, object]:
    """Return the value of every key that is "auto" or derived, for keys without conflicts. fits: the most
    samples of a micro-batch that fit in memory, where that is known."""
    derived: dict[str, object] = {}
    stage = 2 if keys.zero.stage == "auto" else keys.zero.stage
    schedule, total = keys.lr_schedule, _total(keys)
    dp = data_parallel(keys, world_size) or 1
    if keys.mesh.dp == "auto":
        derived["mesh.dp"] = dp
    if keys.zero.stage == "auto":
        derived["zero.stage"] = stage
    reduce_every, states = keys.zero.reduce_every, tiers_of(keys.memory.states)[0]
    if reduce_every == "auto":
        in_files = is_files(tiers_of(keys.memory.gradients)[0])
        reduce_every = derived["zero.reduce_every"] = "step" if stage < 2 and not in_files else "microbatch"
    if keys.memory.gradients == "auto":
        files = (
            is_files(states)
            and is_files(tiers_of(keys.memory.params)[0])
            and (reduce_every == "microbatch" or dp * keys.mesh.cp == 1)
        )
        derived["memory.gradients"] = states if files else "device" if states == ["device"] else "host"
    if keys.precision.reduce == "auto":
        derived["precision.reduce"] = "fp64" if keys.precision.compute == "fp64" else "fp32"
    if keys.batch.micro == "auto":
        share = keys.batch.size // dp
        micro = derived["batch.micro"] = _micro(share, keys.mesh.pp)
        if fits is not None:
            derived["batch.micro"] = max(n for n in divisors(share) if n <= min(fits, micro) or n == 1)
    if keys.pipeline.schedule == "auto":
        derived["pipeline.schedule"] = keys.schedule
    if schedule.total == "auto":
        derived["lr_schedule.total"] = total
    if schedule.name == "wsd" and schedule.decay is None:
        derived["lr_schedule.decay"] = total.scaled(0.1)
    if schedule.name == "one-cycle" and schedule.warmup.amount == 0:
        derived["lr_schedule.warmup"] = total.scaled(0.3)
    return derived


def _micro(share: int, pp: int) -> int:
    """Choose the samples of a micro-batch: all of a rank's share; in a pipeline, so few that the bubble stays
    below a fifth, if possible."""
    return max(n for n in divisors(share) if n == 1 or share // n >= (4 * pp if pp > 1 else 1))


def divisors(number: int) -> list[int]:
    """Return the numbers that divide `number`, in rising order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def conflicts(keys: Keys, world_size: int) -> Iterator[Conflict]:
    """Yield every conflict between the keys, and with `world_size` ranks."""
    yield from _model(keys)
    yield from _mesh(keys, world_size)
    yield from _memory(keys)
    yield from _precision(keys)
    yield from _pipeline(keys)
    if dp := data_parallel(keys, world_size):
        yield from _batch(keys.batch, dp)
        yield from _sharing(keys.zero, dp * keys.mesh.cp)
        yield from _sums(keys, dp)
    yield from _optimizer(keys.optimizer)
    yield from _lr_schedule(keys)
    if keys.checkpoint.keep_every is not None and keys.checkpoint.keep is None:
        yield (
            "checkpoint.keep_every",
            "checkpoint.keep keeps all of them",
            "write checkpoint.keep = 3, or remove it",
        )
    if keys.checkpoint.keep_best and keys.data.validation == 0:
        reason = "the best checkpoint is that of the lowest validation loss, and data.validation is 0"
        yield "checkpoint.keep_best", reason, "write data.validation = 0.05, or remove it"


def _model(keys: Keys) -> Iterator[Conflict]:
    path, config = keys.model.path, keys.model.config
    if path is not None and config is not None:
        yield (
            "model.path",
            "model.config is given too, and only one can be the model",
            "remove model.path to start from new weights, or model.config to start from the directory",
        )
    if config is not None and not isinstance(config.get("model_type"), str):
        fix = 'write model.config.model_type = "llama" (or another architecture of transformers)'
        yield "model.config", "a transformers config needs a model_type", fix


def _mesh(keys: Keys, world_size: int) -> Iterator[Conflict]:
    mesh = keys.mesh
    if mesh.ep > 1:
        yield "mesh.ep", "this version has no expert parallelism", "write mesh.ep = 1"
    yield from _context(keys)
    if mesh.sequence_parallel and mesh.tp == 1:
        yield (
            "mesh.sequence_parallel",
            "it needs tensor parallelism",
            "write mesh.tp = 2 or more, or mesh.sequence_parallel = false",
        )
    length, tp = keys.data.sequence, mesh.tp
    if mesh.sequence_parallel and keys.data.path is not None and length % tp:  # else the samples are not ours
        near = " or ".join(str(n) for n in (round_down(length, tp), round_down(length, tp) + tp) if n > 1)
        reason = f"mesh.tp = {tp} ranks cannot share it evenly, as mesh.sequence_parallel asks"
        yield "data.sequence", reason, f"write data.sequence = {near}, or mesh.sequence_parallel = false"
    others = mesh.tp * mesh.pp * mesh.cp * mesh.ep
    dp = data_parallel(keys, world_size)
    if dp is None:
        fit = [
            f"mesh.{axis} = {n}"
            for axis in ("tp", "pp")
            if (n := _nearest_divisor(world_size, others, getattr(mesh, axis)))
        ]
        reason = f"tp x pp x cp x ep is {others}, which does not divide the world size, {world_size}"
        key = (
            "mesh.tp"
            if mesh.tp > 1
            else "mesh.pp"
            if mesh.pp > 1
            else "mesh.cp"
            if mesh.cp > 1
            else "mesh.ep"
        )
        replicas = max(1, world_size // others) if mesh.dp == "auto" else mesh.dp
        yield (
            key,
            reason,
            f"write {' or '.join(fit) or 'mesh.tp = 1 and mesh.pp = 1'}, or start {others * replicas} ranks",
        )
    elif mesh.dp != "auto" and mesh.dp != dp:
        reason = f"dp x tp x pp x cp x ep is {mesh.dp * others}, but the world size is {world_size}"
        yield (
            "mesh.dp",
            reason,
            f'write mesh.dp = {dp} or mesh.dp = "auto", or start {mesh.dp * others} ranks',
        )
    if mesh.tp > 1 and keys.optimizer.name == "muon":
        reason = "it needs whole matrices, of which tensor parallelism gives each rank a part"
        yield "optimizer.name", reason, 'write optimizer.name = "adamw", or mesh.tp = 1'


def _context(keys: Keys) -> Iterator[Conflict]:
    cp, context = keys.mesh.cp, keys.context
    if keys.data.pack and keys.compile:
        reason = "the engine's attention keeps documents apart, which is not compiled"
        yield "compile", reason, "write compile = false, or data.pack = false"
    for name in ("loss_chunk", "mlp_tile"):
        if getattr(context, name) == "none":
            continue
        if keys.compile and name == "mlp_tile":
            reason = "each tile is computed again in backward, which compiled blocks leave to torch"
            yield "compile", reason, 'write compile = false, or context.mlp_tile = "none"'
        if keys.pipeline.schedule in ("1f1b-w", "zb-h1", "zb-v") and keys.mesh.pp > 1:
            reason = "gradients of weights are put off, and what is computed again would be kept for them"
            yield f"context.{name}", reason, f'write context.{name} = "none", or pipeline.schedule = "1f1b"'
    if isinstance(context.method, Mapping) and (product := math.prod(context.method.values())) != cp:
        reason = f"its numbers make {product} ranks, and mesh.cp is {cp}"
        yield "context.method", reason, f"write mesh.cp = {product}, or numbers whose product is {cp}"
    if cp == 1:
        return
    if keys.compile:
        reason = "attention exchanges keys and values between ranks, which compiled blocks cannot"
        yield "compile", reason, "write compile = false, or mesh.cp = 1"
    if keys.batch.mean == "ranks":
        reason = f"each of mesh.cp = {cp} ranks has a part of the same samples, and no mean of its own"
        yield "batch.mean", reason, 'write batch.mean = "labels", or mesh.cp = 1'
    if context.method == "ulysses" and context.balance not in ("auto", "contiguous"):
        reason = "ulysses gives each rank all tokens of some heads, and has nothing to balance"
        yield "context.balance", reason, 'write context.balance = "auto", or context.method = "ring"'


def _pipeline(keys: Keys) -> Iterator[Conflict]:
    pipeline, pp = keys.pipeline, keys.mesh.pp
    if pipeline.schedule in ("1f1b-w", "zb-h1", "zb-v") and pp > 1 and keys.compile:
        reason = (
            "it computes gradients of weights apart from those "
            "of inputs, which compiled blocks compute together"
        )
        yield (
            "pipeline.schedule",
            reason,
            'write pipeline.schedule = "1f1b" or "interleaved", or compile = false',
        )
    if pipeline.virtual != default(LEAVES["pipeline.virtual"]) and pipeline.schedule != "interleaved":
        fix = 'write pipeline.schedule = "interleaved", or remove pipeline.virtual'
        yield "pipeline.virtual", f"{pipeline.schedule} does not use it", fix
    stages = pp * {"interleaved": pipeline.virtual, "zb-v": 2}.get(pipeline.schedule, 1)
    if not isinstance(pipeline.blocks, str) and pp > 1 and len(pipeline.blocks) != stages:
        yield (
            "pipeline.blocks",
            f"{len(pipeline.blocks)} numbers for {stages} stages",
            f"give {stages} numbers, or remove it",
        )


def data_parallel(keys: Keys, world_size: int) -> int | None:
    """Return the number of data-parallel ranks in a world of this size; None where the other axes do not
    divide it."""
    others = keys.mesh.tp * keys.mesh.pp * keys.mesh.cp * keys.mesh.ep
    return None if world_size % others else world_size // others


def _nearest_divisor(world_size: int, others: int, size: int) -> int | None:
    """The largest size of an axis below `size` for which the axes' product divides the world size."""
    rest = others // size
    return next((n for n in range(min(size - 1, world_size), 0, -1) if world_size % (rest * n) == 0), None)


def _memory(keys: Keys) -> Iterator[Conflict]:
    zero, memory = keys.zero, keys.memory
    if zero.min_bucket > zero.bucket_size:
        limit = toml(zero.bucket_size)
        yield (
            "zero.min_bucket",
            f"larger than zero.bucket_size, {limit}",
            f"write zero.min_bucket = {limit} or less",
        )
    if memory.params != "device" and zero.stage not in (3, "auto"):
        reason = "only ZeRO stage 3 brings each block's parameters to the device when they are needed"
        yield "memory.params", reason, 'write zero.stage = 3, or memory.params = "device"'
    if isinstance(memory.params, dict):
        yield (
            "memory.params",
            "all parameters have one home, or are striped over folders",
            'write "device", "host", a folder or several',
        )
    if isinstance(memory.states, dict) and (
        len({*memory.states} - {"device"}) != 1 or not math.isclose(sum(memory.states.values()), 1)
    ):
        fix = 'write {host = 0.7, device = 0.3}, or another home than "host" in its place'
        yield "memory.states", "shares are of the device and of one other home, and add up to 1", fix
    for key in ("states", "params", "gradients"):
        tiers = tiers_of(getattr(memory, key))[0]
        wrong = [name for name in tiers if "/" not in name] if is_files(tiers) else []
        if wrong or not tiers or (tiers == ["auto"] and key != "gradients"):
            reason = "an empty list is no home" if not tiers else f"{(wrong or tiers)[0]!r} is no folder"
            yield (
                f"memory.{key}",
                reason,
                'write "device", "host", a folder such as "./offload", or a list of folders',
            )
    if memory.gradients != "auto" and (memory.gradients == "device") != (memory.states == "device"):
        reason = "gradients leave the device for the CPU to update what is off it, then and only then"
        yield "memory.gradients", reason, 'remove it, or write memory.states = "host" or a folder'
    # a folder that is made by mistake would fill up unnoticed
    if memory.activations not in ACTIVATIONS and "/" not in memory.activations:
        near = difflib.get_close_matches(memory.activations, ACTIVATIONS, n=1, cutoff=0.5)
        choices = f'"{near[0]}"' if near else " or ".join(f'"{name}"' for name in ACTIVATIONS)
        fix = (
            f"write memory.activations = {choices}, or a folder "
            'with a slash in it, such as "/nvme/run" or "./here"'
        )
        yield "memory.activations", "it is none of the words, and a folder is told by a slash", fix
    elif memory.activations == "keep":
        for key in ("memory.recompute_every", "memory.recompute_save"):
            if keys.value(key) != default(LEAVES[key]):
                fix = f'write memory.activations = "recompute", or remove {key}'
                yield key, "nothing is recomputed while activations are kept", fix


def _precision(keys: Keys) -> Iterator[Conflict]:
    precision = keys.precision
    compute, reduce = precision.compute, precision.reduce
    autocast = compute in get_args(Autocast)
    made = "fp32" if autocast else compute
    if reduce not in ("auto", made) and DTYPE_BYTES[reduce] <= DTYPE_BYTES[made]:
        reason = f"sums would lose digits or range that {made} gradients have"
        yield "precision.reduce", reason, f'write precision.reduce = "auto" or "{made}"'
    if autocast and keys.mesh.tp * keys.mesh.pp > 1:
        reason = "torch.autocast does not reach into layers that mesh.tp divides, or messages of mesh.pp"
        yield (
            "precision.compute",
            reason,
            'write precision.compute = "bf16" (whose optimizer '
            "has fp32 weights, too), or mesh.tp = mesh.pp = 1",
        )
    if compute in SCALED and precision.loss_scale is None:
        fix = 'write precision.loss_scale = "dynamic" (or 1.0 to do without it all the same)'
        yield "precision.loss_scale", "small fp16 gradients become zero without a loss scale", fix
    if compute == "fp64" and keys.optimizer.states != "fp32":
        yield "optimizer.states", "computing in fp64 keeps them in fp64", 'write optimizer.states = "fp32"'
    if precision.initial_scale < precision.min_scale:
        reason = f"below precision.min_scale, {precision.min_scale}"
        yield (
            "precision.initial_scale",
            reason,
            f"write precision.initial_scale = {precision.min_scale} or more",
        )


def _batch(batch: BatchSection, dp: int) -> Iterator[Conflict]:
    unit = dp if batch.micro == "auto" else dp * batch.micro
    if batch.size % unit == 0:
        return
    below = round_down(batch.size, unit)
    sizes = " or ".join(str(size) for size in (below, below + unit) if size)
    if batch.micro == "auto" or batch.size % dp:
        among = (
            f"{dp} data-parallel ranks"
            if unit == dp
            else f"{dp} data-parallel ranks of micro-batch {batch.micro}"
        )
        yield "batch.size", f"cannot be divided among {among}", f"write batch.size = {sizes}"
        return
    share, wanted = batch.size // dp, batch.micro
    nearest = sorted(sorted(divisors(share), key=lambda n: (abs(n - wanted), n))[:6])
    fix = f"write batch.micro = {' or '.join(map(str, nearest))}, or batch.size = {sizes}"
    yield "batch.micro", f"a rank's {share} samples of a step are no multiple of it", fix


def _sharing(zero: ZeroSection, dp: int) -> Iterator[Conflict]:
    over = zero.shard_over
    if isinstance(over, int) and dp % over:
        near = " or ".join(str(n) for n in divisors(dp)[1:]) or '"all"'
        reason = f"it does not divide the {dp} data-parallel ranks"
        yield "zero.shard_over", reason, f"write zero.shard_over = {near}"
    if zero.quantized_gradients and over in ("all", dp):
        reason = f"it is for sums between copies, and zero.shard_over = {toml(over)} makes one copy"
        yield "zero.quantized_gradients", reason, 'write zero.shard_over = "host", or remove it'
    if zero.quantized_weights and zero.stage in (0, 1, 2, "auto"):
        reason = "parameters are gathered for forwards and backwards at stage 3 alone"
        yield "zero.quantized_weights", reason, "write zero.stage = 3, or remove it"


def _sums(keys: Keys, dp: int) -> Iterator[Conflict]:
    share, micro = keys.batch.size // dp, keys.batch.micro
    several = share > (micro if micro != "auto" else _micro(share, keys.mesh.pp)) if share else False
    if (
        several
        and dp * keys.mesh.cp > 1
        and keys.zero.reduce_every == "step"
        and is_files(tiers_of(keys.memory.gradients)[0])
    ):
        reason = (
            "sums of several micro-batches that are not reduced "
            "yet take memory, and memory.gradients is to take none"
        )
        yield "zero.reduce_every", reason, 'write zero.reduce_every = "microbatch", or remove it'


SPECIFIC_KEYS = ("betas", "eps", "momentum", "nesterov", "matrix_lr", "matrix_momentum")
UNSUITED = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it takes sparse gradients only",
}


def _optimizer(optimizer: OptimizerSection) -> Iterator[Conflict]:
    name = optimizer.name
    if name in UNSUITED:
        yield "optimizer.name", UNSUITED[name], 'write optimizer.name = "adamw"'
        return
    if name in OPTIMIZERS:
        class_name, reads = OPTIMIZERS[name]
        arguments = _arguments(class_name) if class_name and optimizer.options else OPTIONS.get(name, set())
    else:
        arguments = _arguments(name)
        reads = frozenset(arguments - {"eps"} if name == "Adafactor" else arguments)  # whose eps is a pair
        if not arguments:
            yield _unknown_optimizer(name)
            return
    for key in (f"optimizer.{key}" for key in SPECIFIC_KEYS if key not in reads):
        if getattr(optimizer, key.removeprefix("optimizer.")) != default(LEAVES[key]):
            yield key, f"{name} does not use it", f"remove {key}"
    if name == "sgd" and optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov", "it needs a momentum", "write optimizer.momentum = 0.9"
    if optimizer.states != "fp32" and (name not in COMPACT or (name == "sgd" and not optimizer.momentum)):
        yield (
            "optimizer.states",
            f"of {name} in {optimizer.states} none are kept",
            'write optimizer.states = "fp32", or use adamw',
        )
    for option, value in optimizer.options.items():
        if option in OptimizerSection.model_fields and not (
            option in SPECIFIC_KEYS and option in arguments - reads
        ):
            yield (
                "optimizer.options",
                f"{option} has a key of its own",
                f"write optimizer.{option} = {toml(value)}",
            )
        elif option not in arguments:
            near = difflib.get_close_matches(option, arguments, n=1)
            fix = f"write optimizer.options.{near[0]} = {toml(value)}" if near else f"remove {option}"
            yield "optimizer.options", f"{name} takes no argument {option}", fix


def _unknown_optimizer(name: str) -> Conflict:
    known = {n.lower(): n for n in [*_torch_optimizers(), *OPTIMIZERS] if n not in UNSUITED}
    nearest = known[difflib.get_close_matches(name.lower(), known, n=1, cutoff=0)[0]]
    reason = "neither one of ours nor a class of torch.optim"
    return (
        "optimizer.name",
        reason,
        f"write optimizer.name = {toml(nearest)}; ours are {', '.join(OPTIMIZERS)}",
    )


def _torch_optimizers() -> dict[str, type]:
    import torch  # only here: the command's --help must not wait for it

    base = torch.optim.Optimizer
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }


def _arguments(class_name: str) -> set[str]:
    found = _torch_optimizers().get(class_name)
    return set(inspect.signature(found).parameters) - {"params"} if found else set()


def _comparable(keys: Keys, *durations: Duration | None) -> bool:
    """Whether durations can be compared: tokens convert to other units only for our own samples, all of
    `data.sequence` tokens."""
    units = {duration.unit for duration in durations if duration is not None and duration.amount}
    return "tokens" not in units or len(units) == 1 or keys.data.path is not None


def _fraction(length: Duration, factor: float) -> Duration:
    """A fraction of `length`, in whole steps, samples or tokens."""
    return Duration(amount=int(length.amount * factor), unit=length.unit)


def _lr_schedule(keys: Keys) -> Iterator[Conflict]:
    schedule, total = keys.lr_schedule, _total(keys)
    if schedule.decay is not None and schedule.name != "wsd":
        reason = f"{schedule.name} has no phase of its own for decay"
        yield "lr_schedule.decay", reason, 'write lr_schedule.name = "wsd", or remove lr_schedule.decay'
    if schedule.name == "constant":
        return
    whole, warmup = samples(keys, total), samples(keys, schedule.warmup)
    if not _comparable(keys, total, schedule.warmup, schedule.decay):
        return
    if warmup >= whole:
        longer = "train.length" if isinstance(schedule.total, str) else "lr_schedule.total"
        fix = f"write lr_schedule.warmup = {toml(_fraction(total, 0.1))}, or a longer {longer}"
        yield "lr_schedule.warmup", f"no shorter than the whole schedule, {total}", fix
    elif schedule.name == "wsd":
        decay = schedule.decay or total.scaled(0.1)
        if warmup + samples(keys, decay) > whole:
            shorter = _fraction(total, (1 - warmup / whole) / 2)
            reason = f"longer than {total} together with the warm-up, {schedule.warmup}"
            yield (
                "lr_schedule.decay",
                reason,
                f"write lr_schedule.decay = {toml(shorter)}, or a shorter warm-up",
            )
