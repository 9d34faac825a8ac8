# examples/huggingface.py: a Hugging Face model in your loop; polyreme launch -n 2 examples/huggingface.py
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyreme

text = "\n".join(topics.values()).encode()  # Python's own manual, byte by byte
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: 64 * 1024].long().view(-1, 64)
dataset = [{"input_ids": window, "labels": window} for window in windows]

sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
engine = polyreme.initialize(model, {"batch": {"size": 32}, "optimizer": {"lr": 4e-3}})

for batch in engine.loader(dataset, epochs=1):
    output = engine(**batch)
    engine.backward(output.loss)  # or output.loss.backward(), after which result.loss is not known
    result = engine.step()
    if engine.mesh.rank == 0 and result.step % 16 == 0:
        print(f"step {result.step}: loss {result.loss:.3f}, {result.tokens / result.seconds:,.0f} tokens/s")
engine.save("run/huggingface")  # AutoModelForCausalLM.from_pretrained opens it
