"""The structure of a model: its repeated blocks, and the inputs of its forward and its loss; and building
models with transformers. The only file that knows Hugging Face names.

Modules that are given are read, and not changed.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.config.loading import working_folder
from polyreme.config.schema import LARGEST
from polyreme.errors import ConfigError, ModelError, Problem, named, warn
from polyreme.models.peft import has_adapters, is_peft_model, learns_prompts, plain_model

NUM_ITEMS = "num_items_in_batch"
"""The argument by which a Hugging Face model divides its sum of losses, instead of its own number of
labels."""
IGNORED_LABEL = -100
"""The label that a loss ignores, in torch and in transformers."""

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Keys of transformers configs whose values must be at least 1."""
BLOCKS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)
"""Config keys that count blocks. Each block takes about a millisecond to build, even without memory."""
MOST_BLOCKS = 10_000


def tensors_in(value: object) -> list[Tensor]:
    """Return every tensor in a module's arguments or output: in nested tuples, lists, mappings and
    dataclasses, including transformers' outputs."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
    return found


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `change` applied to each leaf of nested tuples, lists and dicts, and of
    dataclasses, which are copied."""

    def at(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return change(leaf)
        made = copy.copy(leaf)
        for field in fields(leaf):
            object.__setattr__(made, field.name, map_leaves(change, getattr(leaf, field.name)))
        return made

    return at(value) if isinstance(value, Tensor) else pytree.tree_map(at, value)


def returned(value: object) -> list[Tensor]:
    """Return the tensors in a module's output: `tensors_in` it, or else the attributes of a plain object."""
    return tensors_in(value) or (tensors_in(list(vars(value).values())) if hasattr(value, "__dict__") else [])


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks, by name in registration order: the elements of every outermost ModuleList
    that has a tenth of the model's parameters (an encoder beside a decoder); or else of every such
    nn.Sequential; or else of the largest ModuleList whose modules are of one class."""
    return {
        f"{name}.{child}": block
        for name in _block_lists(model)
        for child, block in model.get_submodule(name).named_children()
        if any(True for _ in block.parameters())
    }


def _block_lists(model: nn.Module) -> list[str]:
    """The names of the lists whose elements are the repeated blocks."""
    total = sum(p.numel() for p in model.parameters())
    for kind in (nn.ModuleList, nn.Sequential):
        lists: list[str] = []
        for name, module in model.named_modules():
            nested = any(name.startswith(outer + ".") for outer in lists)
            if nested or not isinstance(module, kind) or len(module) < 2 or module is model:
                continue
            if sum(p.numel() for p in module.parameters()) * 10 >= total > 0:
                lists.append(name)
        if lists:
            return lists
    alike = {  # in a small model with a large vocabulary
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 1
        and len({type(block) for block in module}) == 1
    }
    largest = max(alike, key=lambda name: alike[name], default="")
    return [largest] if alike.get(largest) else []


def pipeline_list(model: nn.Module) -> str:
    """Return the name of the list of blocks that a pipeline cuts: "" for a model that is an nn.Sequential
    itself, or else the model's only list of repeated blocks. Raises ModelError where there is none, or
    several."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return ""
    sizes = {  # lists of one block, so that the error is that stages are too many
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == 1
    }
    lists = _block_lists(model) or sorted(sizes, key=lambda name: -sizes[name])[:1]
    if not lists:
        raise ModelError(
            "the model has no repeated blocks to cut into pipeline "
            "stages: put them into an nn.ModuleList, make the model an "
            "nn.Sequential, or set mesh.pp = 1"
        )
    if len(lists) > 1:
        raise ModelError(
            f"the model has several lists of blocks, {', '.join(lists)}, "
            "and a pipeline cuts only one: set mesh.pp = 1; zero.stage = 3 shards "
            "the parameters of them all"
        )
    return lists[0]


def pipeline_length(model: nn.Module) -> int:
    """Return how many blocks the stages of a pipeline share; 0 for a model that a pipeline cannot cut."""
    try:
        return len([*model.get_submodule(pipeline_list(model)).children()])
    except ModelError:
        return 0


def sample_inputs(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the smallest inputs that a Hugging Face model of texts or images accepts, on the CPU; None for
    any other model."""
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if name == "input_ids":
        return {"input_ids": torch.full((1, 2), 3)}  # 0, 1 and 2 often mean padding
    if name == "pixel_values" and hasattr(config, "num_channels") and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width)}
    return None


def sample_batch(model: nn.Module, samples: int, sequence: int) -> dict[str, Tensor] | None:
    """Return a random micro-batch on the CPU for a Hugging Face model of texts or images; None for any other
    model.

    Texts are `sequence` tokens long, or the most that the model takes; a language model also gets labels."""
    smallest = sample_inputs(model)
    if smallest is None:
        return None
    generator = torch.Generator().manual_seed(0)
    if (images := smallest.get("pixel_values")) is not None:
        return {"pixel_values": torch.rand(samples, *images.shape[1:], generator=generator)}
    config: Any = model.config
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    length = min(sequence, longest) if isinstance(longest, int) and longest > 0 else sequence
    # 0, 1 and 2 often mean padding
    ids = torch.randint(3, text.vocab_size, (samples, length), generator=generator)
    predicts_tokens = (
        "labels" in ForwardSignature.of(model).names and model.get_output_embeddings() is not None  # type: ignore[operator]
    )
    return {"input_ids": ids, "labels": ids} if predicts_tokens else {"input_ids": ids}


def takes_from_all_blocks(model: nn.Module) -> str | None:
    """Return the setting by which a Hugging Face model's loss or output needs values of every block, not only
    of the last; None without one."""
    settings = ("output_router_logits", "output_hidden_states", "output_attentions")
    return next((name for name in settings if getattr(getattr(model, "config", None), name, False)), None)


def skips_blocks(model: nn.Module) -> str | None:
    """Return the setting by which a Hugging Face model skips whole blocks at random, such as "layerdrop =
    0.1"; None without one."""
    values = getattr(getattr(model, "config", None), "__dict__", {})
    found = (
        f"{key} = {value}"
        for key, value in values.items()
        if "layerdrop" in key and isinstance(value, int | float) and value > 0
    )
    return next(found, None)


@dataclass(frozen=True)
class ForwardSignature:
    """The arguments of a model's forward: the names of its parameters, and whether it takes any other
    names."""

    names: frozenset[str]
    any_name: bool

    @classmethod
    def of(cls, model: nn.Module) -> ForwardSignature:
        parameters = inspect.signature(model.forward).parameters.values()
        return cls(
            frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)),
            any(p.kind == p.VAR_KEYWORD for p in parameters),
        )


def training_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that a Hugging Face model needs in training with every batch: no key-value cache,
    which only generation reads (and which a recomputed block would fill twice)."""
    model = plain_model(model)
    config = getattr(model, "config", None)
    return (
        {"use_cache": False}
        if hasattr(config, "use_cache") and "use_cache" in ForwardSignature.of(model).names
        else {}
    )


def count_labels(model: nn.Module, batch: object) -> int | None:
    """Return the number of labels in `batch` over which the model's own loss is a mean; None where the batch
    has no `labels` tensor.

    A causal language model predicts the next token, so the first label of each sequence is not counted; a
    decoder whose loss does not shift labels itself gets them shifted, and all are counted."""
    if not isinstance(batch, Mapping):
        return None
    labels, start, ids = (batch.get(name) for name in ("labels", "start_positions", "input_ids"))
    # question answering: an answer that begins after the text's end has no loss
    if isinstance(start, Tensor) and isinstance(ids, Tensor):
        return int((start < ids.shape[1]).sum())
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if isinstance(shifted := batch.get("shift_labels"), Tensor) and shifts_labels(model):
        return int((shifted != IGNORED_LABEL).sum())
    if labels.dim() >= 2 and shifts_labels(model):
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's forward calls transformers' loss for causal language models, the default
    where a model names no loss."""
    model = plain_model(model)
    if getattr(model, "loss_type", "") not in ("ForCausalLM", "ForConditionalGeneration", None):
        return False
    forwards = [
        inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind)
    ]
    return any(
        "loss_function" in code.co_names
        for forward in forwards
        if (code := getattr(forward, "__code__", None))
    )


def count_tokens(batch: object) -> int:
    """Count the positions of the batch's `input_ids`, without padding by an `attention_mask` of their shape;
    0 for a batch without `input_ids`."""
    ids, mask = (
        batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "attention_mask")
    )
    if not isinstance(ids, Tensor):
        return 0
    return int(mask.count_nonzero()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()


def save_config(model: nn.Module, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the files that transformers saves of a model (config, generation settings, code of its own),
    without its weights, and PEFT's files of adapters, whose whole tensors (or `prompts`) are in `weights`.
    The model's own config, which transformers changes when it saves, is restored."""
    from transformers.utils import logging

    shown, config = logging.is_progress_bar_enabled(), vars(model.config)
    before = {**config}
    logging.disable_progress_bar()
    try:
        options = {"save_embedding_layers": False} if is_peft_model(model) else {}
        if learns_prompts(model):
            model.get_prompt_embedding_to_save = weights.__getitem__  # type: ignore[assignment]
        with torch._C.DisableTorchFunctionSubclass():  # see `peft.adapters`
            model.save_pretrained(folder, state_dict=dict(weights), **options)  # type: ignore[operator]
    finally:
        config.update(before)
        vars(model).pop("get_prompt_embedding_to_save", None)
        if shown:
            logging.enable_progress_bar()


def saved_name(model: nn.Module, names: Sequence[str]) -> str:
    """Return the name, of all names of a tensor, under which transformers saves it: the first that it does
    not tie to another name when it loads the model."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in names if name not in tied), names[0])


def file_names(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the names that transformers gives tensors in files, by their names in the model, where these
    differ. Tensors that it would also divide or join keep their names, which it reads as well."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {}
    if not hasattr(model, "base_model_prefix"):
        return {}
    given = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    try:
        saved = revert_weight_conversion(model, given)  # type: ignore[arg-type]
    except Exception as error:  # a conversion that needs the numbers raises it
        warn(
            f"transformers does not tell what it calls the tensors of {type(model).__name__} in files "
            f"({error}): they are written, and looked for, under the model's own names. from_pretrained may "
            "not find those of a checkpoint, and a directory with other names is read whole by every rank"
        )
        return {}
    names = {id(tensor): name for name, tensor in given.items()}
    return {names[id(tensor)]: name for name, tensor in saved.items() if names.get(id(tensor), name) != name}


def base_prefix(model: nn.Module) -> str:
    """Return the prefix, with its dot, that names in a model with a head have before those of the model
    without one; "" for other modules."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


def no_decay(model: nn.Module) -> set[str]:
    """Return the names of the parameters without weight decay by default: vectors and scalars, as all norms
    and biases are."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.dim() < 2}


def matrices(model: nn.Module) -> set[str]:
    """Return the names of the blocks' weight matrices, which Muon updates, without embeddings."""
    inside = tuple(name + "." for name in find_blocks(model))
    embeddings = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)
    }
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and name.startswith(inside) and id(p) not in embeddings
    }


def build(
    path: str | None,
    config: Mapping[str, Any] | None,
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
    allow_missing: bool | Sequence[str] = False,
    allow_unused: bool | Sequence[str] = False,
) -> nn.Module:
    """Build a Hugging Face model: from the safetensors of the directory `path` in float32, or newly
    initialised from `config`, a transformers config as a mapping with `model_type`. vocab_size: used where
    that config has none.

    allow_missing: whether the directory may lack tensors of the model, or patterns of names that it may lack;
    allow_unused: the same for tensors that the model does not have. Raises ConfigError where the model cannot
    be built, or tensors are missing or unused."""
    if path is None:
        return new_model(None, config, trust_remote_code, vocab_size)
    loaded = read_config(path, None, trust_remote_code)
    auto = _architecture(loaded)
    fix = "give a directory that save_pretrained wrote, or model.config to start anew"
    if other := getattr(loaded, "transformers_weights", None):
        raise ConfigError(
            [Problem("model.path", path, f"its config.json names another file of weights, {other!r}", fix)]
        )
    try:
        model, report = auto.from_pretrained(
            path,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # each format of weights raises errors of its own
        message = str(error) or type(error).__name__
        if error.args == ("metadata",):
            message = (
                'model.safetensors.index.json has no "metadata", which transformers needs to convert tensors'
            )
            fix = 'add "metadata": {} to that file, or save it anew with save_pretrained'
        raise ConfigError(
            [Problem("model.path", path, f"its weights cannot be loaded: {message}", fix)]
        ) from error
    refuse_unused(path, model, sorted(report["unexpected_keys"]), allow_unused)
    if missing := _not_allowed(sorted(report["missing_keys"]), allow_missing):
        reason = (
            f"{path} lacks tensors of the model that its config.json "
            f"describes, which would be new random numbers: {named(missing)}"
        )
        fix = (
            "correct config.json; or, if that is meant, write "
            f'model.allow_missing = true, or patterns such as ["{missing[0]}"]'
        )
        raise ConfigError([Problem("model.allow_missing", allow_missing, reason, fix)])
    return model


def refuse_unused(
    path: str, model: nn.Module, names: Iterable[str], allowed: bool | Sequence[str] = False
) -> None:
    """Raise ConfigError for tensors in the directory that the model does not have, unless they are `allowed`
    (all, or by patterns), or transformers ignores them as well. names: those of the tensors."""
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    # buffers that older models had elsewhere, and saved
    held = [
        name for name, _ in model.named_buffers() if name.endswith(("rotary_emb.inv_freq", "position_ids"))
    ]
    ignored += [rf"(^|\.){name.rpartition('.')[2]}$" for name in held]
    unused = [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]
    if unused := _not_allowed(unused, allowed):
        reason = (
            f"{path} has {len(unused)} tensors that the model does not, which its config.json describes, and "
            f"which would not be trained: {named(unused)}"
        )
        fix = (
            "correct config.json (its number of layers, its architectures); or, to train without them, write "
            f'model.allow_unused = true, or patterns such as ["{unused[0]}"]'
        )
        raise ConfigError([Problem("model.allow_unused", allowed, reason, fix)])


def _not_allowed(names: Iterable[str], allowed: bool | Sequence[str]) -> list[str]:
    """The names that are not allowed. allowed: all, none, or patterns."""
    patterns = ("*",) if allowed is True else allowed or ()
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]


def with_new_weights(path: str, trust_remote_code: bool = False) -> nn.Module:
    """Build the model of a directory in training mode, with new weights in place of the directory's. Raises
    ModelError where those are quantized."""
    loaded = read_config(path, None, trust_remote_code)
    if getattr(loaded, "quantization_config", None) is not None:
        raise ModelError(f"{path} has quantized weights")
    model = _architecture(loaded).from_config(loaded)
    if model.can_generate() and (generation := _generation_config(path)) is not None:
        model.generation_config = generation
    return model.train()


def refuse_unsavable(model: nn.Module) -> None:
    """Raise ModelError for settings that transformers refuses to save, as each checkpoint would fail."""
    if not (hasattr(model, "base_model_prefix") and hasattr(model, "save_pretrained")) or has_adapters(model):
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_config(model, Path(folder), {})
    except OSError:  # of that folder
        return
    except Exception as error:  # transformers raises any, by setting
        message = " ".join(str(error).split())
        raise ModelError(
            f"config or generation_config of {type(model).__name__} cannot be saved, and so no checkpoint: "
            f"{message:.500} Correct it before initialize(), as model.generation_config.do_sample = True for "
            "settings of sampling, or remove the setting"
        ) from error


def _generation_config(path: str) -> Any:
    """Read the directory's generation_config.json; None without one. Raises ConfigError for one that cannot
    be read."""
    import transformers

    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return None
    try:
        loaded = transformers.GenerationConfig.from_pretrained(path)
        for ids in (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id):
            if wrong := [
                each
                for each in (ids if isinstance(ids, list) else [ids])
                if type(each) not in (int, NoneType)
            ]:
                raise ValueError(f"{wrong[0]!r} is not the number of a token")
    except Exception as error:  # a damaged file raises anything
        message = (
            f"its {file.name} cannot be read: {' '.join(str(error).split()) or type(error).__name__:.300}"
        )
        raise ConfigError(
            [Problem("model.path", path, message, "correct that file, or delete it")]
        ) from error
    return loaded


def new_model(
    path: str | None,
    config: Mapping[str, Any] | None,
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
) -> nn.Module:
    """Build the same model as `build`, but always newly initialised; under `torch.device("meta")` without
    memory."""
    loaded = read_config(path, config, trust_remote_code, vocab_size)
    try:
        return _architecture(loaded).from_config(loaded)
    except (
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError
    ) as error:  # fmt: skip
        raise _unfit(path, config, error) from error


def no_model(path: str) -> Problem | None:
    """Return the problem why a directory is no Hugging Face model; None where it is one."""
    if (Path(path) / "config.json").is_file():
        return None
    reason = "is not a Hugging Face model directory (no config.json in it)"
    fix = "give a directory that save_pretrained wrote, or model.config"
    if (Path(path) / "adapter_config.json").is_file():
        reason = "has an adapter alone (adapter_config.json), not the model that it is for"
        fix = "give that model's directory; a script trains the adapter on it (docs/recipes.md)"
    elif not Path(path).exists():
        reason = f"there is no such folder; the path is taken from {working_folder()}"
        fix += "; a model of the Hugging Face hub is not downloaded"
    elif not Path(path).is_dir():
        reason = "it is a file, not a Hugging Face model directory"
    return Problem("model.path", path, reason, fix)


def read_config(
    path: str | None,
    config: Mapping[str, Any] | None,
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
) -> Any:
    """Read the transformers config of the directory `path`, or make it of the mapping `config`, as for
    `build`. Raises ConfigError where it is wrong."""
    import transformers

    if path is not None:
        if problem := no_model(path):
            raise ConfigError([problem])
        try:
            loaded = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # a damaged directory raises anything
            raise _unfit(path, None, error) from error
        _refuse_kernels(loaded, "model.path", path, trust_remote_code)
        _generation_config(path)
        return loaded
    values = dict(config or {})
    kind = values.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(transformers.CONFIG_MAPPING), n=1, cutoff=0.0)[0]
        raise ConfigError([Problem("model.config.model_type", kind, "transformers has no such architecture",
                                   f'write model_type = "{near}", or another of transformers')])  # fmt: skip
    if vocab_size is not None:
        values.setdefault("vocab_size", vocab_size)
    try:
        made = transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:  # config classes raise errors of their own
        raise _unfit(None, config, error) from error
    if problems := [*_misspelt(kind, values, type(made)()), *_nonsense(values)]:
        raise ConfigError(problems)
    _refuse_kernels(made, "model.config", dict(config or {}), trust_remote_code)
    return made


def _refuse_kernels(config: Any, key: str, value: object, trusted: bool) -> None:
    """Raise ConfigError where transformers would fetch a kernel from its hub and run it: one that the config
    names, or the replacement of one that is not installed. trusted: allow it."""
    from transformers import utils

    configs = [
        config,
        *(
            each
            for name in getattr(config, "sub_configs", {})
            if (each := getattr(config, name, None)) is not None
        ),
    ]
    for each in () if trusted else configs:
        for name in ("attn_implementation", "experts_implementation"):
            chosen = str(getattr(each, f"_{name}", None) or "").rpartition("|")[2]
            installed = getattr(utils, f"is_{chosen.replace('attention', 'attn')}_available", None)
            if "/" in chosen or (chosen.startswith("flash_attention") and not (installed and installed())):
                reason = f"{name} = {chosen!r} is code that transformers would fetch from its hub and run"
                fix = f'write {name} = "sdpa" there, or set model.trust_remote_code = true if you trust it'
                raise ConfigError([Problem(key, value, reason, fix)])


def _nonsense(values: Mapping[str, Any]) -> list[Problem]:
    """Report sizes and fractions that transformers accepts silently, but no model can have."""
    found = []
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if key in SIZES and value < 1:
            found.append(
                Problem(f"model.config.{key}", value, "a model has at least 1", f"write {key} = 1 or more")
            )
        elif key in SIZES and value > LARGEST:
            reason, fix = "no model can be so large", f"write a {key} of at most {LARGEST}"
            found.append(Problem(f"model.config.{key}", value, reason, fix))
        elif key in BLOCKS and value > MOST_BLOCKS:
            found.append(Problem(f"model.config.{key}", value, "no model of more than "
                                                               f"{MOST_BLOCKS:,} blocks can be built",
                                 f"write {key} = {MOST_BLOCKS} or fewer"))  # fmt: skip
        elif "dropout" in key and not 0 <= value <= 1:
            found.append(
                Problem(
                    f"model.config.{key}", value, "it is a probability", f"write {key} = 0.0, or up to 1.0"
                )
            )
    return found


def _misspelt(kind: str, values: Mapping[str, Any], default: Any) -> list[Problem]:
    """Report keys that are close to one that transformers knows. It accepts unknown keys silently."""
    known = {*vars(default), *default.attribute_map}
    found = []
    for key in values:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near and key not in known and not hasattr(default, key):
            reason = f"{kind} has no such key"
            found.append(
                Problem(f"model.config.{key}", values[key], reason, f'did you mean "model.config.{near[0]}"?')
            )
    return found


def text_problems(
    path: str | None, config: Any, sequence: int, vocabulary: int | None = None
) -> list[Problem]:
    """Report why the model of a transformers config cannot learn texts of `sequence` tokens with a vocabulary
    of this size (None: not known yet)."""
    text, found = config.get_text_config(), []
    owner = "model.path" if path is not None else "model.config"
    longest, tokens = getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None)
    heads, shared = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if isinstance(longest, int) and 0 < longest < sequence:
        longer = "" if path is not None else f", or model.config.max_position_embeddings = {sequence}"
        reason = f"the model takes at most {longest} tokens (max_position_embeddings)"
        found.append(
            Problem("data.sequence", sequence, reason, f"write data.sequence = {longest} or less{longer}")
        )
    if vocabulary is not None and isinstance(tokens, int) and tokens < vocabulary:
        if path is None:
            fix = (
                "remove model.config.vocab_size (it then follows "
                f"the tokenizer), or write {vocabulary} or more"
            )
        else:
            fix = (
                "set data.tokenizer to the tokenizer that the model was made with, often the same directory; "
                f"or give the model rows for it, once: m = AutoModelForCausalLM.from_pretrained({path!r}); "
                f"m.resize_token_embeddings({vocabulary}); m.save_pretrained(DIRECTORY), and set model.path "
                "to that"
            )
        reason = f"the tokenizer has {vocabulary} tokens, so some ids would be out of range"
        found.append(Problem(f"{owner}.vocab_size", tokens, reason, fix))
    pad = getattr(text, "pad_token_id", None)
    if vocabulary is not None and isinstance(tokens, int) and isinstance(pad, int) and not pad < tokens:
        fix = f"write one below {tokens}, or remove pad_token_id"
        found.append(Problem(f"{owner}.pad_token_id", pad, f"the model has {tokens} tokens", fix))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        fix = f"write {' or '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        found.append(
            Problem(
                f"{owner}.num_key_value_heads", shared, f"does not divide num_attention_heads = {heads}", fix
            )
        )
    return found


def _unfit(path: str | None, config: Mapping[str, Any] | None, error: Exception) -> ConfigError:
    key, value = ("model.config", dict(config or {})) if path is None else ("model.path", path)
    # the message ends with a list of all model types
    message = str(error).partition("Model type should be one of")[0].strip() or type(error).__name__
    if not isinstance(error, ValueError | RuntimeError) and type(error).__module__ == "builtins":
        message = f"{type(error).__name__}: {message}"  # KeyError: 'swish' says more than 'swish'
    return ConfigError([Problem(key, value, f"transformers cannot build it: {' '.join(message.split())}",
                                "write the keys of that model's transformers config")])  # fmt: skip


def _architecture(config: Any) -> Any:
    """The Auto class that builds the class in the config's `architectures`; by default for causal language
    models. Raises ModelError where none does."""
    import transformers

    names = getattr(config, "architectures", None) or []
    for name in names:
        for auto in (
            transformers.AutoModelForCausalLM,
            transformers.AutoModelForMaskedLM,
            transformers.AutoModelForSeq2SeqLM,
            transformers.AutoModelForSequenceClassification,
            transformers.AutoModelForImageClassification,
        ):
            if any(
                name in (cls if isinstance(cls, tuple) else (cls,))
                for cls in auto._model_mapping._model_mapping.values()
            ):
                return auto
    if names:
        raise ModelError(
            f"no Auto class of transformers builds {names[0]}: "
            "build the model in Python and pass it to initialize()"
        )
    return transformers.AutoModelForCausalLM


def register_attention(configs: Sequence[Any], name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Make `function` an attention of transformers under this name, and the one of these configs of a model.
    Returns what gives the configs their own back."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
    before = [(each, each._attn_implementation) for each in configs if hasattr(each, "_attn_implementation")]
    for each, _ in before:
        each._attn_implementation_internal = name

    def undo() -> None:
        for each, was in before:
            if each._attn_implementation == name:
                each._attn_implementation_internal = was

    return undo


def register_masks(name: str, wanted: Callable[[Any], bool]) -> None:
    """Have models make bool masks, (samples, 1, queries, keys), for attentions of this name where
    `wanted(config)`, and none elsewhere."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def masks(*args: Any, config: Any, **options: Any) -> Any:
        return sdpa_mask(*args, config=config, **options) if wanted(config) else None

    AttentionMaskInterface.register(name, masks)


def quiet(rank: int) -> None:
    """Turn off transformers' progress bars, which would disturb ours, and its warnings on all ranks but 0."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if rank != 0:
        logging.set_verbosity_error()
