"""llama.cpp in an environment without preheat, for :mod:`benchmarks.common.cpu_engine`."""

# mypy: ignore-errors

from typing import Any

import gguf
import llama_cpp as llama
import numpy as np

BATCH = 2048
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return ``weight`` with rotary pairs next to each other, as in llama.cpp."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def name_of(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.weight"


def write(task: dict[str, Any]) -> None:
    """Write the GGUF file of the weights, without a vocabulary.

    Only token ids go in and out.
    """
    config, weights = task["config"], np.load(task["weights"])
    out = gguf.GGUFWriter(task["gguf"], "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_key_length(config["head_dim"])  # else the hidden size divided by the heads
    out.add_value_length(config["head_dim"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    for name in weights.files:
        tensor = weights[name]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, heads if "q_proj" in name else kv_heads)
        kind = TYPES["f32"] if tensor.ndim == 1 else TYPES[task["type"]]
        out.add_tensor(name_of(name), gguf.quantize(tensor, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Engine:
    """llama.cpp with room for all sequences of a load at once."""

    def __init__(self, task: dict[str, Any]) -> None:
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(task["gguf"].encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        sequences = len(task["prompts"])
        longest = max(len(p) + n for p, n in zip(task["prompts"], task["outputs"], strict=True))
        params.n_ctx, params.n_batch, params.n_seq_max = sequences * (longest + 8), BATCH, sequences
        params.n_threads = params.n_threads_batch = task["threads"]
        self.context = llama.llama_init_from_model(self.model, params)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.vocab = task["config"]["vocab_size"]

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Return the most likely next tokens by sequence.

        ``entries`` are token, position, sequence, and whether its logits are wanted.
        """
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        assert llama.llama_decode(self.context, batch) == 0
        found = {}
        for i, (_, _, sequence, wanted) in enumerate(entries):
            if wanted:
                logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, i), (self.vocab,))
                found[sequence] = int(logits.argmax())
        return found

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        entries = [
            (token, at, seq, at == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        last = {}
        for start in range(0, len(entries), BATCH):
            last |= self.decode(entries[start : start + BATCH])
        answers = [[last[seq]] for seq in range(len(prompts))]
        while running := [seq for seq, answer in enumerate(answers) if len(answer) < outputs[seq]]:
            step = [(answers[seq][-1], len(prompts[seq]) + len(answers[seq]) - 1, seq, True) for seq in running]
            for seq, token in self.decode(step).items():
                answers[seq].append(token)
        return answers
