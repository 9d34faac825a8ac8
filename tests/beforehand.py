"""Does what a process does once and slowly, so that the forks of one that has imported this need not. Starts
no thread, which a fork would not have: it differentiates nothing."""

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from polyreme.models import huggingface

_sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
for _config in (
    transformers.LlamaConfig(vocab_size=8, **_sizes),
    transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0),
):
    with FakeTensorMode():
        _model = transformers.AutoModelForCausalLM.from_config(_config)
        huggingface.file_names(_model, {})  # transformers' table of names in files
        with FlopCounterMode(display=False):
            _model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
