"""The reference for trainers: the engine's log-probabilities bit for bit, and transformers' gradients."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat import LLM, ModelError, SamplingParams, SettingsError, reference
from preheat.frontend.outputs import RequestOutput
from preheat.reference.attention import WholeSequences
from preheat.reference.operations import DifferentiableOperations
from tests.cpu.checkpoints import MODELS, save_checkpoint

VOCAB = 199
SMALL = {
    "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 48, "block_size": 16, "num_gpu_blocks_override": 60,
}  # fmt: skip
FAMILIES = (
    "llama tied", "qwen3", "qwen3 moe", "qwen2 moe", "phi4 mini", "gpt bigcode", "gemma 3", "mpt with six heads",
    "gpt-oss",
)  # fmt: skip


def ids(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vocab) for _ in range(length)]


def served(llm: LLM, prompts: list[list[int]], answers: list[int]) -> list[tuple[list[int], list[float]]]:
    """Return each request's tokens, and the engine's logprobs of them.

    The first token has no logprob. Greedy and drawn requests take turns.
    """
    params = [
        SamplingParams(
            max_tokens=answer, temperature=place % 2, seed=place, logprobs=0, prompt_logprobs=0, ignore_eos=True
        )
        for place, answer in enumerate(answers)
    ]
    return [said(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def said(output: RequestOutput) -> tuple[list[int], list[float]]:
    choice = output.outputs[0]
    assert output.prompt_token_ids is not None and output.prompt_logprobs is not None and choice.logprobs is not None
    tokens = [*output.prompt_token_ids, *choice.token_ids]
    entries = [*output.prompt_logprobs[1:], *choice.logprobs]
    return tokens, [entry[token].logprob for token, entry in zip(tokens[1:], entries, strict=True) if entry]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_the_engines(dtype: str) -> None:
    """Logprobs equal the engine's for prompts and answers in mixed batches, over one and several KV splits."""
    prompts = [ids(300, 1, 1000), ids(3, 2, 1000), ids(60, 3, 1000), ids(300, 1, 1000)[:280]]
    found = served(
        LLM(device="cpu", dtype=dtype, max_num_batched_tokens=128, execution_mode="eager"), prompts, [4, 9, 2, 6]
    )
    model = reference.load(dtype=dtype)
    ours = model.batch_logprobs([tokens for tokens, _ in found])
    assert [each.tolist() for each in ours] == [logprobs for _, logprobs in found]
    tokens, logprobs = found[1]
    assert model.logprobs(tokens, 3).tolist() == logprobs[2:]
    hot = model.logprobs(tokens, 3, temperature=0.5)
    right = (model(tokens).float() / 0.5).log_softmax(-1)[2:-1].gather(1, torch.tensor(tokens[3:])[:, None])[:, 0]
    assert torch.equal(hot, right)
    assert hot.tolist() != logprobs[2:]


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Each family has the engine's bits in float32, and the gradients of autograd in transformers."""
    save_checkpoint(MODELS[name], tmp_path)
    prompts = [ids(90, 1), ids(37, 2), ids(9, 3)]
    found = served(LLM(str(tmp_path), dtype="float32", execution_mode="eager", **SMALL), prompts, [6, 3, 8])
    model = reference.load(tmp_path, dtype="float32", max_model_len=SMALL["max_model_len"])
    ours = model.batch_logprobs([tokens for tokens, _ in found])
    assert [each.tolist() for each in ours] == [logprobs for _, logprobs in found]
    torch.cat(ours).sum().backward()
    right = gradients(tmp_path, [tokens for tokens, _ in found])
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        error = (parameter.grad - right[key]).norm() / right[key].norm()
        assert error <= 1e-5, f"{key}: {error:.1e}"


def gradients(folder: Path, sequences: list[list[int]]) -> dict[str, Tensor]:
    """Return gradients of the sum of all log-probabilities, by the names in the checkpoint."""
    import transformers

    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    theirs.get_input_embeddings().padding_idx = None  # its token would have no gradient
    for tokens in sequences:
        logits = theirs(torch.tensor([tokens])).logits[0, :-1]
        logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).sum().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder / "gradients")  # names the gradients as in the checkpoint
    from safetensors.torch import load_file

    return load_file(folder / "gradients" / "model.safetensors")


def test_a_step_of_training_is_served(tmp_path: Path) -> None:
    """A step of training changes the log-probabilities, and the saved model is served with the trained ones.

    The master weights are fp32.
    """
    model = reference.load(dtype="bfloat16").float()
    tokens = ids(50, 4, 1000)
    before = model.logprobs(tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    (-before.mean()).backward()
    optimizer.step()
    after = model.logprobs(tokens)
    assert not torch.equal(before, after)
    assert after.mean() > before.mean()
    model.save(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    ((_, logprobs),) = served(LLM(str(tmp_path), device="cpu", dtype="bfloat16", execution_mode="eager"), [tokens], [1])
    assert logprobs[:-1] == after.tolist()


def plain_layer(self, value, weights, context):
    made = original(self, value, weights, context)
    return made if value.finish.activation else lambda x, out=None: F.linear(x, weights.weight, weights.bias)


def plain_attend(self, backend, decoder):
    from preheat.execution.kv_cache import KVCache
    from preheat.execution.layer_parts import attention_layers

    layers = attention_layers(decoder, KVCache(decoder.spec, 1, 256, decoder.dtype, backend.device))
    return lambda index, qkv: self._plain(layers[index], qkv, None)


original = DifferentiableOperations.layer


@pytest.mark.parametrize(
    ("where", "name", "plain"),
    [(DifferentiableOperations, "layer", plain_layer), (WholeSequences, "attend", plain_attend)],
)
def test_other_orders_of_addition_are_seen(where, name, plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: torch's own linear layers and attention, a trainer's usual calls, have other bits."""
    tokens = ids(300, 5, 1000)
    model = {dtype: reference.load(dtype=dtype) for dtype in ("float32", "bfloat16")}
    right = {dtype: each.logprobs(tokens) for dtype, each in model.items()}
    monkeypatch.setattr(where, name, plain)
    other = {dtype: each.logprobs(tokens) for dtype, each in model.items()}
    assert any(not torch.equal(other[dtype], right[dtype]) for dtype in model)
    torch.testing.assert_close(other["float32"], right["float32"], rtol=1e-4, atol=1e-4)


def test_unsupported_options_of_the_reference_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="runs on a CPU, not on cuda"):
        reference.load(device="cuda")
    with pytest.raises(SettingsError, match="max_model_len 10000000 is not within"):
        reference.load(max_model_len=10_000_000)
    with pytest.raises(SettingsError, match="dtype: 'float64' is not one of"):
        reference.load(dtype="float64")
    save_checkpoint(MODELS["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="for plain weights only"):
        reference.load(tmp_path)
    model = reference.load(dtype="float32", max_model_len=64)
    for sequence, start in (([], 1), ([1, 2], 0), ([1, 2], 3), ([1] * 65, 1)):
        with pytest.raises(ValueError, match=r"start \d is not|1 to 64 tokens"):
            model.logprobs(sequence, start)
    assert model.logprobs([1, 2], 2).shape == (0,)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="checkpoint of several files"):
        model.save(tmp_path)
    with pytest.raises(ValueError, match="temperature must be greater"):
        model.logprobs([1, 2], temperature=0)
