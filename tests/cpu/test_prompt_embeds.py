"""Prompts that are embeddings: rows of the table give the bits of their tokens on all paths.

The data of a request is only ever read.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest, NotInvariant, SettingsError
from preheat.frontend.prompt_embeds import PromptEmbeds
from preheat.schedule import prefix
from preheat.schedule.images import EncoderCache
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.utils.torch_file import read_tensor
from preheat.verify import image_check
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import Size
from preheat.verify.verification import tight
from preheat.warmup.record import Record
from tests.adapters import write_adapter

OPTIONS = {
    "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 96, "max_model_len": 256, "block_size": 16,
    "num_gpu_blocks_override": 80, "enable_prompt_embeds": True,
}  # fmt: skip
LENGTHS = (1, 5, 64, 65, 130, 200)
PARAMS = [
    SamplingParams(temperature=0.9 * (place % 2), seed=place, max_tokens=6, ignore_eos=True, logprobs=5)
    for place in range(len(LENGTHS))
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OPTIONS)


def prompts(llm: LLM) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    size = llm.frontend.tokenizer.vocab_size
    return [torch.randint(size, (length,), generator=draw).tolist() for length in LENGTHS]


def rows(llm: LLM, ids: list[int]) -> Tensor:
    """Return the table's rows of the tokens ``ids``."""
    return llm.loop.executor.decoder.weights.embedding[ids]


def seen(outputs: list[Any]) -> list[Any]:
    return [(choice.token_ids, choice.logprobs, choice.text) for output in outputs for choice in output.outputs]


@pytest.fixture(scope="module")
def by_tokens(llm) -> list[Any]:
    return seen(llm.generate(prompts(llm), PARAMS, use_tqdm=False))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"max_num_batched_tokens": 256, "enable_chunked_prefill": False, "enable_prefix_caching": False},
        {"block_size": 128, "num_gpu_blocks_override": 20},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 3, "ngram_prompt_lookup_max": 3},
    ],
    ids=str,
)
def test_rows_of_the_table_are_tokens(by_tokens, options):
    """Rows of the table give their tokens' results: together, in chunks, beside tokens, cached and recomputed."""
    llm = LLM(**OPTIONS | options)
    ids = prompts(llm)
    embeds = [{"prompt_embeds": rows(llm, each)} for each in ids]
    for _ in range(2):
        assert seen(llm.generate(embeds, PARAMS, use_tqdm=False)) == by_tokens
    assert seen(llm.generate([*embeds[:3], *ids[3:]], PARAMS, use_tqdm=False)) == by_tokens
    stats = llm.loop.scheduler.stats()
    if options.get("enable_prefix_caching", True):
        assert stats.prefix_hits > 0
    llm.loop.scheduler.check()


def test_other_rows_give_other_tokens(llm, by_tokens):
    """Control: other rows give other tokens."""
    ids = prompts(llm)[3]
    (output,) = llm.generate({"prompt_embeds": rows(llm, ids).roll(1, 0)}, PARAMS[3], use_tqdm=False)
    assert seen([output])[0][1] != by_tokens[3][1]
    assert output.prompt_token_ids == []


def test_blocks_are_known_by_type_and_bytes(llm):
    """Blocks are known by dtype and bytes.

    A changed bit in the last row of the first piece changes all blocks of that piece and of the next. A changed bit in
    the second piece keeps the blocks of the first.
    """
    table = rows(llm, prompts(llm)[4])
    llm.reset_prefix_cache()

    def cached(tensor: Tensor) -> int:
        (output,) = llm.generate({"prompt_embeds": tensor}, PARAMS[0], use_tqdm=False)
        return int(output.num_cached_tokens)

    def flipped(row: int) -> Tensor:
        changed = table.clone()
        changed.view(torch.int16)[row, 0] ^= 1
        return changed

    assert [cached(table), cached(table), cached(table.clone().requires_grad_())] == [0, 128, 128]
    assert [cached(flipped(63)), cached(flipped(100))] == [0, 64]
    reads = llm.frontend.prompt_embeds
    half = torch.ones(3, table.shape[1], dtype=torch.float16)
    hashes = {reads.decode(saved(each)).segments[0].image.hash for each in (half, half.bfloat16(), half.float())}
    assert len(hashes) == 3  # the hash of each dtype
    assert reads.decode(saved(half)).segments[0].image.hash in hashes


def saved(tensor: object, **how: Any) -> str:
    file = io.BytesIO()
    torch.save(tensor, file, **how)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_are_read_as_torch_reads_them(dtype):
    base = torch.randn(7, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    for tensor in (base, base[2:4], base[:1], base.clone().requires_grad_(), base[None]):
        found = read_tensor(base64.b64decode(saved(tensor)))
        assert (found.dtype, found.shape) == (str(dtype).removeprefix("torch."), tuple(tensor.shape))
        assert found.data == tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/preheat-was-called",)


def zipped(pickled: bytes, how: int = zipfile.ZIP_STORED) -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(4 * 96))
    return base64.b64encode(file.getvalue()).decode()


def with_nan() -> Tensor:
    found = torch.ones(2, 96)
    found[1, 3] = torch.nan
    return found


HIDDEN = 96
REFUSED = {
    "no base64": ("ä", "not base64"),
    "no file": (base64.b64encode(b"hello" * 9).decode(), "not a file of torch.save"),
    "an old file": (saved(torch.ones(2, HIDDEN), _use_new_zipfile_serialization=False), "not a file of torch.save"),
    "a pickle": (base64.b64encode(pickle.dumps(Evil())).decode(), "not a file of torch.save"),
    "a call": (zipped(pickle.dumps(Evil(), 2)), "nothing of a file is called"),
    "a newer pickle": (zipped(pickle.dumps(Evil(), 4)), "something other than one plain tensor"),
    "compressed": (zipped(pickle.dumps(1, 2), zipfile.ZIP_DEFLATED), "none are compressed"),
    "several": (saved([torch.ones(2, HIDDEN)] * 2), "something other than one plain tensor"),
    "a parameter": (saved(torch.nn.Parameter(torch.ones(2, HIDDEN))), "would call torch._utils _rebuild_parameter"),
    "whole numbers": (saved(torch.ones(2, HIDDEN, dtype=torch.int64)), "numbers are of torch.long"),
    "doubles": (saved(torch.ones(2, HIDDEN, dtype=torch.float64)), "numbers are of torch.double"),
    "turned": (saved(torch.ones(HIDDEN, 2).T), "not in order: call contiguous"),
    "one row": (saved(torch.ones(HIDDEN)), r"shape \[96\]; the model takes \[tokens, 96\]"),
    "another model": (saved(torch.ones(2, HIDDEN + 1)), r"shape \[2, 97\]"),
    "nothing": (saved(torch.ones(0, HIDDEN)), r"shape \[0, 96\] must be numbers above 0"),
    "not a number": (saved(with_nan()), "not finite"),
    "infinite": (saved(torch.full((2, HIDDEN), torch.inf).half()), "not finite"),
    "infinite when rounded": (saved(torch.full((2, HIDDEN), 3.4e38)), "not finite"),
    "infinite in bfloat16": (saved(torch.full((2, HIDDEN), -torch.inf).bfloat16()), "not finite"),
    "too long": ("A" * 400_000, "more than the 163,840 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_tensors_are_refused(name):
    text, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message) as refused:
        PromptEmbeds(HIDDEN, lambda: 256).decode(text)
    assert refused.value.param == "prompt_embeds"
    assert not Path("/tmp/preheat-was-called").exists()


def test_broken_files_are_refused():
    """A broken file is read as a tensor or refused.

    Any byte of its description is changed, or it is cut at any length.
    """
    whole = bytearray(base64.b64decode(saved(torch.ones(2, 3))))
    for place in range(len(whole)):
        for other in (0, 0xFF, whole[place] ^ 1):
            changed = bytes(whole[:place]) + bytes([other]) + bytes(whole[place + 1 :])
            try:
                read_tensor(changed)
            except ValueError:
                continue
    for end in range(0, len(whole), 7):
        with pytest.raises(ValueError, match=r"."):
            read_tensor(bytes(whole[:end]))


ASKED = {
    "prompt_logprobs": (SamplingParams(prompt_logprobs=1), "prompt_embeds have no token ids"),
    "repetition_penalty": (SamplingParams(repetition_penalty=1.1), "set it to 1"),
    "truncate_prompt_tokens": (SamplingParams(truncate_prompt_tokens=3, max_tokens=1), "cannot cut"),
}


@pytest.mark.parametrize("name", ASKED)
def test_parameters_that_need_tokens_are_refused(llm, name):
    params, message = ASKED[name]
    with pytest.raises(InvalidRequest, match=message) as refused:
        llm.generate({"prompt_embeds": rows(llm, [1, 2, 3, 4])}, params, use_tqdm=False)
    assert refused.value.param == name
    with pytest.raises(InvalidRequest, match="or prompt: leave one out"):
        llm.generate({"prompt_embeds": rows(llm, [1]), "prompt": "x"}, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="maximum context length is 256"):
        llm.generate({"prompt_embeds": rows(llm, [1] * 256)}, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="of list; a tensor of"):
        llm.generate({"prompt_embeds": [[1.0]]}, use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"model": "draft", "num_speculative_tokens": 2}},
        {"runner": "pooling"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_exclude_prompt_embeds_are_refused(options):
    with pytest.raises(SettingsError, match="enable_prompt_embeds"):
        LLM(**OPTIONS | options)


def test_off_by_default():
    llm = LLM(**{name: value for name, value in OPTIONS.items() if name != "enable_prompt_embeds"})
    assert llm.loop.executor.encoder is None
    with pytest.raises(InvalidRequest, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": rows(llm, [1])}, use_tqdm=False)


def test_searches_begin_with_embeddings(llm):
    from preheat import BeamSearchParams

    ids, params = prompts(llm)[3], BeamSearchParams(beam_width=3, max_tokens=4)
    tokens, embeds = (
        llm.beam_search([prompt], params)[0].sequences for prompt in (ids, {"prompt_embeds": rows(llm, ids)})
    )
    assert [(each.tokens[len(ids) :], each.cum_logprob) for each in tokens] == [
        (each.tokens[len(ids) :], each.cum_logprob) for each in embeds
    ]


def test_adapters_grammars_and_blocks_from_the_host(tmp_path):
    """Adapters, grammars and blocks that come back from the host work as for the prompt's tokens."""
    write_adapter(tmp_path / "one", 1)
    llm = LLM(**OPTIONS | {"num_gpu_blocks_override": 18}, enable_lora=True, kv_offloading_size=1)
    adapter, ids = LoRARequest("one", 1, str(tmp_path / "one")), prompts(llm)[5][:150]
    grammar = StructuredOutputsParams(regex="[ab]{5,9}")
    held = SamplingParams(temperature=0.8, seed=3, max_tokens=30, structured_outputs=grammar)
    embeds = {"prompt_embeds": rows(llm, ids)}
    for params, lora in ((PARAMS[5], None), (PARAMS[5], adapter), (held, adapter)):
        by_ids, given = (
            seen(llm.generate([prompt], params, use_tqdm=False, lora_request=lora)) for prompt in (ids, embeds)
        )
        assert by_ids == given
    llm.generate([{"prompt_embeds": rows(llm, ids[::-1])}, ids[5:]], PARAMS[:2], use_tqdm=False)
    (again,) = llm.generate([embeds], held, use_tqdm=False, lora_request=adapter)
    assert seen([again]) == given
    assert llm.loop.scheduler.stats().external_hits > 0


# --- the proofs and their planted faults ---


@pytest.fixture(scope="module")
def loop():
    return boot_engine(Settings.load(OPTIONS), InlineTransport())


def check(loop) -> BootCheck:
    plan, backend = loop.packer.plan, loop.executor.backend
    record = Record.of(plan, model="bundled", platform="cpu", dtype="bfloat16", mode="eager")
    return BootCheck(CheckRunner(loop.scheduler.pool, loop.packer, loop.executor), record, backend.facts)


def begun_again(patch) -> None:
    """Plant a chunk that begins within a piece with the piece's first rows."""
    right = EncoderCache.attach

    def attach(self, schedule, slots):
        right(self, schedule, slots)
        if schedule.images:
            spans = [span._replace(source=span.source // self._tokens * self._tokens) for span in schedule.images.spans]
            schedule.images.spans = spans

    patch.setattr(EncoderCache, "attach", attach)


def rounded(patch) -> None:
    """Plant rows that lose a bit on the way."""
    right = PromptEmbeds.of_tensor
    patch.setattr(PromptEmbeds, "of_tensor", lambda self, tensor: right(self, tensor.float() * (1 + 2**-7)))


def no_bytes(patch) -> None:
    """Plant block hashes without the rows."""
    patch.setattr(prefix, "_images", lambda *_: b"")


def test_the_check_at_boot_passes(loop):
    done = check(loop)
    assert "embeds" in loop.packer.plan.checks
    assert "images" not in loop.packer.plan.checks
    done.run("embeds")
    assert done._record.proof.compared >= 8
    loop.scheduler.check()


@pytest.mark.parametrize(("plant", "message"), [(begun_again, "in chunks"), (rounded, "rows of the table")])
def test_the_check_at_boot_finds(loop, plant, message, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(NotInvariant, match=f"embeds: .*{message}"):
        check(loop).run("embeds")
    assert image_check.PromptEmbeds is PromptEmbeds


def paths() -> dict[str, bool]:
    settings = Settings.load({**OPTIONS, "boot_check": "off", "max_num_batched_tokens": 256, "max_model_len": 512})
    engine = Engine(boot_engine, settings)
    taken = PathRunner(Size(0, 1, 5, 0), lambda engine: [])
    found = list(taken.on(engine, "asked", ["images"]))
    assert len(taken.for_few_blocks) == 7
    small = tight(replace(settings, max_num_batched_tokens=48), taken.for_few_blocks)
    found += taken.on(Engine(boot_engine, small), "tight", ["images"])
    return {result.path: result.identical == result.prompts for result in found}


PLANTED = {
    "embeds, together": None,
    "embeds, prefix cache": no_bytes,
    "embeds, as tokens": rounded,
    "embeds, continued": None,
    "embeds, chunks, few blocks": begun_again,
}


def test_all_paths_of_verify_agree():
    assert paths() == dict.fromkeys(PLANTED, True)


@pytest.mark.parametrize("path", [path for path, plant in PLANTED.items() if plant])
def test_each_planted_fault_is_found_by_its_path(path, monkeypatch):
    PLANTED[path](monkeypatch)
    assert not paths()[path]
