"""The name of every benchmark and its measurement. Nothing here imports torch."""

from __future__ import annotations

SUITE = {
    "startup": "from the start of the process to ready: cold, then again",
    "first": "first requests against later ones",
    "latency": "time between tokens and to the first one; reading prompts",
    "throughput": "a mix of 256 requests",
    "serve": "load over HTTP",
    "long": "time between tokens with long contexts",
}
"""Benchmarks of a whole engine; ``suite/command.py`` runs one or several in a call."""

ALL = "all"
"""Every benchmark of the suite."""

SINGLE = {
    "answer_cache": "kept answers over HTTP: hits a second, and answers that differ from the first ones",
    "attention": "paged attention on a GPU, beside the bytes and the operations that it needs",
    "audit": "reading an engine's memory against its digests: a pass, a slice, the share of a step",
    "cards": "answers of one card, given again on another from their receipts, and the cost of receipts on a GPU",
    "chaos": "engines that are killed while they answer: answers that differ from the uninterrupted ones, and pauses",
    "collective": "adding up over several GPUs in a stated order, beside NCCL and torch, by size",
    "compile_mode": "execution mode `compile` against `eager` on a CPU",
    "cpu_engines": "tokens a second of several engines on a CPU, in turns, each stopped while others run",
    "defrag": "decoding from a scattered KV cache, with and without compaction",
    "elastic": "new weights in place, blocks back from the host, sleep and wake",
    "encoders": "texts a second and single queries of engines of embeddings on a CPU, in turns",
    "first_request": "the first request after ready, each in a boot of its own, offline and over HTTP",
    "gemm": "linear layers on a GPU: the kernels in use against cuBLAS",
    "grammars": "what structured outputs cost: between tokens, and to the first one",
    "host_step": "the host's work in a step of decoding rows, and how long a GPU waits for it",
    "idle_server": "the memory of a served model, and the processor time of a server without requests",
    "invariance_cost": "what batch invariance costs on a GPU",
    "kernels": "each kernel of a decoding step, beside the time that its bytes need",
    "left_to_cublas": "`preheat verify` on an engine whose linear layers may differ: it must find differences",
    "lora": "adapters: time between tokens, prompts, long contexts, and loading meanwhile, also over HTTP",
    "lora_layers": "what adapters add to the time of single layers on a GPU",
    "loss": "the loss on held-out text, plain and with other numerics, such as an FP8 KV cache",
    "mix": "where the time of `throughput` goes, by size of step",
    "overload": "/health while clients send what is large or hostile",
    "plan_fit": "making a plan, and choosing the bucket of a step",
    "quantization": "what a format of weights costs: held-out loss and bytes of the bundled model",
    "power": "speed, clock and power of a GPU at its power limit",
    "ranks": "what two ranks on CPUs exchange: through memory, by TCP, by gloo",
    "receipts": "answers given again from their receipts on other boots and ranks, and the cost of receipts",
    "recurrence": "layers with states on a GPU, in each configuration of the kernel, beside bytes and operations",
    "roles": "a server that reads prompts and one that decodes: answers that differ from one server's",
    "sampler": "sampling, by rows, vocabulary and sampling parameters",
    "scheduler": "a step of the scheduler, and a long queue",
    "server_cpu": "the CPU time that the HTTP process spends on a streamed token",
    "speculation": "what each proposer gets right, and what it gains or costs; that it changes no token",
    "sum_chains": "one sum for an output or four interleaved ones, in a product of one row on a CPU",
    "start": "from the command to the open port and to ready, and what is imported on the way",
    "traffic": "bucket sizes solved from recorded traffic against exponential ones",
    "turns": "a benchmark on two commits in turns: each figure, and how much slower the new commit is",
    "vs_transformers": "tokens a second against transformers' generate",
}
"""One module each, ``benchmarks/NAME.py``, with a ``main`` that takes its arguments."""


def listing() -> str:
    """Return all names with their measurements, as text."""
    lines = [f"  {name:<16} {what}" for name, what in {**SUITE, ALL: "all of the above"}.items()]
    lines += ["", *(f"  {name:<16} {what}" for name, what in SINGLE.items())]
    return "\n".join(["benchmarks (NAME --help shows the arguments):", "", *lines])
