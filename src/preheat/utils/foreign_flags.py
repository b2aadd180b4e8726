"""Flags of vLLM that preheat does not have, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from preheat.utils.text import did_you_mean

_TOOLS = "tool calls come in a later version"
_ONE_HOST = "the replicas of --data-parallel-size are processes of one host, behind one server: leave it out"
_DATA_PARALLEL = (
    "size-local", "rank", "start-rank", "address", "rpc-port", "backend", "external-lb", "hybrid-lb",
)  # fmt: skip

FOREIGN_FLAGS: Mapping[str, str] = {
    "-tp": "write --tensor-parallel-size",
    "--tp": "write --tensor-parallel-size",
    "-pp": "write --pipeline-parallel-size",
    "--pp": "write --pipeline-parallel-size",
    "-dp": "write --data-parallel-size",
    "--dp": "write --data-parallel-size",
    **{f"--data-parallel-{name}": _ONE_HOST for name in _DATA_PARALLEL},
    "-q": "write --quantization",
    "-O": "how programs run is --execution-mode",
    "--compilation-config": "how programs run is --execution-mode",
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--reasoning-parser": "reasoning is not split from the text in this version",
    "--trust-remote-code": "leave it out, no code of a checkpoint is ever run",
    "--swap-space": "leave it out, preempted sequences are recomputed",
    "--cpu-offload-gb": "leave it out, weights stay on the device",
    "--max-seq-len-to-capture": "leave it out, every bucket size is captured",
    "--disable-log-requests": "leave it out, requests are not logged without --enable-log-requests",
    "--no-enable-log-requests": "leave it out, requests are not logged",
    "--disable-log-stats": "leave it out, figures are in /metrics and not in the log",
    "--guided-decoding-backend": 'write --structured-outputs-config \'{"backend": "guidance"}\'',
    "--use-padding-aware-scheduling": (
        "steps are always scheduled by their padded tokens, up to --max-num-batched-tokens"
    ),
    "--num-scheduler-seqs": "vLLM's flag is --num-scheduler-steps; --async-scheduling prepares a step while one runs",
    "--tensor-paralel-size": "it is spelled --tensor-parallel-size",
    "--use-v2-block-manager": "there is one block manager; --enable-prefix-caching is what it was for",
    "--max-parallel-loading-workers": "leave it out, weights are read by several threads already",
}
"""What to do instead of a flag, by the flag."""


def instead_of(name: str, known: Iterable[str]) -> str:
    """What to say of the unknown option ``name``, written as a flag or not: what there is instead, or the closest of
    the ``known`` ones.
    """
    word = name.partition("=")[0]
    flag = "--" + word.lstrip("-").replace("_", "-") if not word.startswith("-") or word.startswith("--") else word
    return f": {FOREIGN_FLAGS[flag]}" if flag in FOREIGN_FLAGS else did_you_mean(word, known)
