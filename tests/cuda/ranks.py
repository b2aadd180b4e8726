"""Programs for several GPUs; each process joins one group of ranks.

``python -m tests.cuda.ranks collective`` (or ``engine``, see the end) prints each stage that it reaches, and the stack
of every process if it takes too long.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 80))]
OPTIONS: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 128, "block_size": 64,
    "num_gpu_blocks_override": 200, "boot_check": "quick", "skip_warmup": False,
}  # fmt: skip


def stage(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')} {os.getpid()}] {text}", file=sys.stderr, flush=True)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def watch(seconds: float) -> None:
    """After ``seconds``, print the stacks of this process and its children, and end them."""
    faulthandler.enable()

    def late() -> None:
        time.sleep(seconds)
        stage(f"no end after {seconds:g} s")
        for pid in children():
            os.kill(pid, signal.SIGABRT)  # with PYTHONFAULTHANDLER the child prints its stack
        time.sleep(2)
        faulthandler.dump_traceback()
        os._exit(3)

    os.environ["PYTHONFAULTHANDLER"] = "1"
    threading.Thread(target=late, daemon=True).start()


def thrice(layer: Callable[[Tensor], Tensor], x: Tensor, into: list[Tensor]) -> None:
    into.extend(layer(x) for _ in range(3))


def exchange(rank: int, world: int, folder: str) -> None:
    """Check one rank: gather, K splits and their sum, eager and captured.

    Raises AssertionError on a difference.
    """
    import torch

    from preheat.backends.base.layers import LayerContext
    from preheat.backends.cuda.backend import CudaBackend
    from preheat.backends.cuda.device.graph import capture
    from preheat.backends.cuda.pointwise.norm import CudaNorm
    from preheat.backends.cuda.ranks.collective import add_ranks
    from preheat.backends.rendezvous import OneNode
    from preheat.settings import Settings
    from tests import layers

    backend = CudaBackend(rank)
    backend.prepare(Settings(device="cuda"), "eager", None)
    assert backend.sharing is not None
    stage(f"rank {rank} on {backend.device}")
    ranks: Any = backend.sharing.join(OneNode(Path(folder), rank, world), lambda: None)
    stage(f"rank {rank} joined: {type(ranks).__name__}")
    mine = torch.full((3, 5), rank + 1, device=backend.device)
    assert ranks.gather(mine)[:, 0, 0].tolist() == list(range(1, world + 1))
    alone = backend.sharing.join(OneNode(Path(folder), 0, 1), lambda: None)
    random = torch.Generator(backend.device).manual_seed(1)  # the same on all GPUs
    for rows, outputs, inputs in [
        (1, 512, 1024), (64, 4096, 4096), (700, 4096, 4096), (1536, 4096, 4096), (2048, 4096, 4096), (6000, 8192, 2048),
    ]:  # fmt: skip
        x, weight = (
            torch.randn(size, inputs, generator=random, device=backend.device).bfloat16() for size in (rows, outputs)
        )
        bias = torch.randn(outputs, generator=random, device=backend.device).bfloat16()
        whole = layers.linear(backend, weight, bias, order=layers.splits(4), context=LayerContext(alone))(x)
        part = slice(rank * inputs // world, (rank + 1) * inputs // world)
        layer: Any = layers.linear(
            backend, weight[:, part].contiguous(), bias, order=layers.splits(4 // world, rank),
            context=LayerContext(ranks),
        )  # fmt: skip
        own = x[:, part].contiguous()
        assert bool(ranks.carrier.landings(rows, outputs, 512)) == (rows >= 1024)
        for _ in range(5):
            assert torch.equal(layer(own), whole), f"{rows} rows of {outputs} x {inputs}"
        narrow = layer.partial(own, torch.empty(rows, outputs, device=backend.device)).bfloat16().float()
        assert not torch.equal(add_ranks(ranks.gather(narrow), bias, whole.dtype), whole), "control: bf16 on the wire"
        stage(f"rank {rank}: {rows} rows of {outputs} x {inputs}, eager")
        norm, residual = CudaNorm(weight[0, :1].expand(outputs).contiguous(), 1e-5), whole.flip(0)
        right, stream = residual.clone(), residual.clone()
        normed, joined = norm.add(whole, right), layer.join(own, norm, stream, None)
        assert joined is None or (torch.equal(joined, normed) and torch.equal(stream, right)), f"joined, {rows} rows"
        assert joined is not None or 64 < rows < 1024
        again = list[torch.Tensor]()
        graph = capture(partial(thrice, layer, own, again))
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(each, whole) for each in again), f"captured, {rows} rows of {outputs} x {inputs}"
        stage(f"rank {rank}: captured")
        assert (whole.float() - (x.float() @ weight.float().T + bias.float())).abs().max() < 2
    stage(f"rank {rank}: all equal")
    os._exit(0)  # without the destructors of NCCL, because each waits for the others


def collective(world: int) -> None:
    """Run :func:`exchange` on ``world`` GPUs."""
    from torch.multiprocessing.spawn import spawn

    from preheat.backends.cuda.device.early import NO_MULTICAST

    os.environ.update(NO_MULTICAST)
    with tempfile.TemporaryDirectory() as folder:
        spawn(exchange, (world, folder), nprocs=world)
    stage("collective: done")


def adapters_of(model: str, folder: Path) -> list[Path]:
    """Write two adapters of ``model``, of all modules."""
    from benchmarks.common.adapter import write_adapter
    from preheat.lora.adapter import adapted_modules, expert_modules
    from preheat.model.families import read_spec
    from preheat.model.files import find_model, read_config
    from preheat.settings import Settings

    spec = read_spec(read_config(find_model(Settings(model=model))))
    modules = adapted_modules(spec) | expert_modules(spec)
    return [write_adapter(folder / str(rank), modules, rank=rank, seed=rank) for rank in (8, 40)]


def with_pictures() -> list[Any]:
    """Return prompts with images of several sizes."""
    from tests.llava import picture
    from tests.qwen_vl import IMAGE

    texts = (f"USER: {IMAGE}What is it?", f"{IMAGE} and {IMAGE} hello world")
    return [
        {"prompt": texts[0], "multi_modal_data": {"image": [picture(1)]}},
        {"prompt": texts[1], "multi_modal_data": {"image": [picture(2, 64, 20), picture(1)]}},
        {"prompt": texts[0], "multi_modal_data": {"image": [picture(3, 9, 40)]}},
    ]


def with_vectors(llm: Any) -> list[Any]:
    """Return prompts given as embeddings."""
    import torch

    random, size = torch.Generator().manual_seed(3), llm.loop.executor.decoder.spec.hidden_size
    return [{"prompt_embeds": torch.randn(len(each), size, generator=random)} for each in PROMPTS]


def engine(model: str, world: int, adapters: str | None = None, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the digest of an engine on ``world`` GPUs, its answers, and its decoding speed.

    ``adapters``: two of the requests have adapters; ``divided``: first matrices are divided in all layers. ``more``
    are options of the engine; one with sleep mode, of the bundled model, sleeps and gets its weights again.
    """
    from preheat import LLM, LoRARequest, SamplingParams
    from preheat.model.files import BUNDLED_PATH
    from preheat.parallel.executor import SharedExecutor
    from preheat.warmup.cold_monitor import ColdMonitor

    options = {**OPTIONS, "tensor_parallel_size": world, "tp_invariant": True, **(more or {})}
    pictures = (Path(model) / "preprocessor_config.json").exists()
    if model != "bundled" and not pictures:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    requests: list[LoRARequest | None] | None = None
    if adapters is not None:
        paths = adapters_of(model, Path(tempfile.mkdtemp()))
        requests = [LoRARequest(f"a{at}", at + 1, str(path)) for at, path in enumerate(paths)] + [None]
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 40}
        options["fully_sharded_loras"] = adapters == "divided" and world > 1
    began = time.monotonic()
    llm = LLM(model, **options)
    executor = llm.loop.executor
    kind = type(executor._draws).__name__ if isinstance(executor, SharedExecutor) else "none"
    stage(f"ready after {time.monotonic() - began:.1f} s")
    assert isinstance(llm.loop.listener, ColdMonitor)
    record = llm.loop.listener.record
    listed = None if options.get("enable_prompt_embeds") else 1
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, logprobs=3, prompt_logprobs=listed, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, top_p=0.8, max_tokens=40, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=5, top_k=20, max_tokens=40, logprobs=1, ignore_eos=True),
    ]
    asked = with_pictures() if pictures else with_vectors(llm) if options.get("enable_prompt_embeds") else PROMPTS
    if options.get("runner") == "pooling":
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        return facts_of(record, kind) | {"answers": [each.outputs.embedding for each in outputs]}
    results = llm.generate(asked, params, use_tqdm=False, lora_request=requests)
    answers = [(r.outputs[0].token_ids, repr(r.outputs[0].logprobs), repr(r.prompt_logprobs)) for r in results]
    stage("answered")
    if options.get("enable_sleep_mode"):
        llm.sleep(1)
        llm.wake_up()
        llm.update_weights(BUNDLED_PATH)
        again = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [a.outputs[0].token_ids for a in again] == [r.outputs[0].token_ids for r in results]
        assert llm.state.digest == record.proof.digest
        stage("slept and updated")
    began = time.monotonic()
    own = requests and requests[0]
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False, lora_request=own)
    each = (time.monotonic() - began) / 200
    stage(f"{each * 1e3:.3f} ms a token, digest {record.proof.digest}, cold {record.cold}")
    return facts_of(record, kind) | {"answers": answers, "ms": each * 1e3}


def facts_of(record: Any, exchange: str) -> dict[str, Any]:
    """Return what the ``record`` of a boot proves, and the kind of ``exchange``."""
    return {
        "digest": record.proof.digest, "parts": record.proof.parts, "unproved": record.unproved(), "cold": record.cold,
        "exchange": exchange,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["collective", "engine"])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--adapters", choices=["whole", "divided"])
    parser.add_argument("--options", type=json.loads, help="options of the engine, a JSON object")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    watch(args.seconds)
    if args.what == "collective":
        collective(args.world)
        return
    found = engine(args.model, args.world, args.adapters, args.options)
    if args.out:
        Path(args.out).write_text(json.dumps(found, default=str))
    stage("engine: done")
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
