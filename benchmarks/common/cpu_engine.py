"""One engine on a CPU, for :mod:`benchmarks.cpu_engines`, in the environment that has it.

The first line of stdin is the task, in JSON. Each further line is a load: prompts, and the number of tokens to continue
each by. The seconds of each load go to stdout. Only the class of preheat imports preheat.
"""

# mypy: ignore-errors

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Ids = list[list[int]]


class Preheat:
    """preheat through ``LLM``."""

    def __init__(self, task: dict[str, Any]) -> None:
        from preheat import LLM

        options = {"enable_prefix_caching": False, "max_num_seqs": 16, "max_model_len": 2048} | task["options"]
        self.llm = LLM(task["model"], num_threads=task["threads"], **options)

    def generate(self, prompts: Ids, outputs: list[int]) -> Ids:
        from preheat import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
        results = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


class PreheatOverHttp:
    """preheat's server, with a client for each sequence."""

    def __init__(self, task: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.model, self.url = task["model"], f"http://127.0.0.1:{port}"
        words = ["--host", "127.0.0.1", "--port", str(port), "--enable-prefix-caching=false"]
        words += ["--max-num-seqs", "16", "--max-model-len", "2048", "--num-threads", str(task["threads"])]
        words += [f"--{name.replace('_', '-')}={value}" for name, value in task["options"].items()]
        command = [sys.executable, "-m", "preheat", "serve", task["model"], *words, "--log-level", "error"]
        self.server = subprocess.Popen(command)
        while not self._ready():
            assert self.server.poll() is None, "the server has exited"
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _ask(self, prompt: list[int], tokens: int) -> list[int]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        found = []
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        found += choice.get("token_ids") or []
        return found

    def generate(self, prompts: Ids, outputs: list[int]) -> Ids:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self._ask, prompts, outputs))


class Transformers:
    """transformers' generate, as it is or with its forward pass compiled."""

    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(task["threads"])
        self.torch, dtype = torch, getattr(torch, task["options"]["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(task["folder"], dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.more = {"cache_implementation": "static"} if task["options"].get("compiled") else {}
        if self.more:
            self.model.forward = torch.compile(self.model.forward)

    def generate(self, prompts: Ids, outputs: list[int]) -> Ids:
        torch = self.torch
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max(outputs), pad_token_id=0,
                **self.more,
            )  # fmt: skip
        return [row[len(prompts[0]) :].tolist() for row in out]


class Vllm:
    """vLLM on a CPU."""

    def __init__(self, task: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(task["threads"])))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        self.llm = LLM(
            task["folder"], skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=16,
            enable_prefix_caching=False, **task["options"],
        )  # fmt: skip

    def generate(self, prompts: Ids, outputs: list[int]) -> Ids:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(result.outputs[0].token_ids) for result in self.llm.generate(asked, params, use_tqdm=False)]


class LlamaCpp:
    """llama.cpp, with room for 16 sequences."""

    def __init__(self, task: dict[str, Any]) -> None:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        import llama_cpp_engine as run

        if not os.path.exists(task["gguf"]):
            run.write(task)
        self.engine = run.Engine(task | {"prompts": [[0] * 640] * 16, "outputs": [64] * 16})

    def generate(self, prompts: Ids, outputs: list[int]) -> Ids:
        return self.engine.generate(prompts, outputs)


class OpenVino:
    """OpenVINO GenAI with continuous batching, on a checkpoint that optimum-intel converts."""

    def __init__(self, task: dict[str, Any]) -> None:
        import openvino
        import openvino_genai as genai

        kind = task["options"]["weight_format"]
        converted = os.path.join(os.path.dirname(task["weights"]), f"openvino-{kind}")
        if not os.path.exists(converted):
            tool = os.path.join(os.path.dirname(sys.executable), "optimum-cli")
            words = ["export", "openvino", "--model", task["folder"], "--task", "text-generation-with-past"]
            subprocess.run([tool, *words, "--weight-format", kind, converted], check=True)
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.cache_size, scheduler.enable_prefix_caching = 16, 1, False
        options = {"INFERENCE_NUM_THREADS": task["threads"]}
        self.engine = genai.ContinuousBatchingPipeline(converted, scheduler, "CPU", options)
        self.tensor, self.config = openvino.Tensor, genai.GenerationConfig

    def generate(self, prompts: Ids, outputs: list[int]) -> Ids:
        import numpy as np

        configs = []
        for tokens in outputs:
            config = self.config()
            config.max_new_tokens, config.do_sample, config.ignore_eos, config.echo = tokens, False, True, False
            configs.append(config)
        asked = [self.tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(result.m_generation_ids[0]) for result in self.engine.generate(asked, configs)]


ENGINES = {
    "openvino": OpenVino,
    "preheat": Preheat,
    "preheat http": PreheatOverHttp,
    "transformers": Transformers,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    from end_with_parent import end_with_parent  # lies beside this file

    end_with_parent()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write to standard output
    task = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    engine = ENGINES[task["engine"]](task)
    print(json.dumps({"ready": time.perf_counter() - started}), file=said, flush=True)
    try:
        for line in sys.stdin:
            load = json.loads(line)
            started = time.perf_counter()
            tokens = engine.generate(load["prompts"], load["outputs"])
            seconds = time.perf_counter() - started
            assert [len(each) for each in tokens] == load["outputs"], [len(each) for each in tokens]
            print(json.dumps({"seconds": seconds, "first": tokens[0][:8]}), file=said, flush=True)
    finally:
        if hasattr(engine, "server"):
            engine.server.send_signal(signal.SIGTERM)
            engine.server.wait()


if __name__ == "__main__":
    main()
