"""One engine of embeddings, for :mod:`benchmarks.encoders`, in the environment that has it.

The first line of stdin is the task, in JSON. Each further line is a load of texts. The seconds of each load go to
stdout: of all texts together, or the median of the texts one by one. Only the class of preheat imports preheat.
"""

# mypy: ignore-errors

import json
import os
import shutil
import statistics
import sys
import time
from typing import Any

BATCH = {"cpu": 32, "cuda": 256}
"""Texts of a padded batch; on a CPU as sentence-transformers has it."""


class Preheat:
    """preheat through ``LLM``."""

    def __init__(self, task: dict[str, Any]) -> None:
        from preheat import LLM

        device = task["device"]
        own = {"max_num_batched_tokens": 16384} if device == "cuda" else {"num_threads": task["threads"]}
        self.llm = LLM(task["folder"], device=device, max_num_seqs=BATCH[device], **own, **task["options"])

    def embed(self, texts: list[str]) -> Any:
        return [each.outputs.embedding for each in self.llm.embed(texts, use_tqdm=False)]


class SentenceTransformers:
    """sentence-transformers, which sorts texts by length and pads batches."""

    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(task["threads"])
        self.batch = BATCH[task["device"]]
        self.model = SentenceTransformer(
            task["folder"], device=task["device"], model_kwargs={"dtype": getattr(torch, task["options"]["dtype"])}
        )

    def embed(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=self.batch, show_progress_bar=False)


class OnnxRuntime:
    """ONNX Runtime with transformers' graph, texts sorted by length in padded batches."""

    def __init__(self, task: dict[str, Any]) -> None:
        import onnxruntime
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(task["folder"])

        class States(torch.nn.Module):
            def __init__(self, model: Any) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: Any, seen: Any, types: Any) -> Any:
                return self.model(input_ids=ids, attention_mask=seen, token_type_ids=types).last_hidden_state

        model = AutoModel.from_pretrained(task["folder"], dtype=torch.float32, attn_implementation="eager").eval()
        path, names = os.path.join(task["room"], "model.onnx"), ["input_ids", "attention_mask", "token_type_ids"]
        given = dict(self.tokenizer(["w1 w2 w3", "w4 w5"], padding=True, return_tensors="pt"))
        texts, tokens = torch.export.Dim("texts", min=1, max=4096), torch.export.Dim("tokens", min=2, max=512)
        torch.onnx.export(
            States(model), tuple(given[name] for name in names), path, input_names=names, output_names=["states"],
            dynamic_shapes=[{0: texts, 1: tokens}] * 3, dynamo=True,
        )  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = task["threads"]
        self.session, self.names = onnxruntime.InferenceSession(path, options), names

    def embed(self, texts: list[str]) -> Any:
        import numpy as np

        order, found = sorted(range(len(texts)), key=lambda place: -len(texts[place])), {}
        for first in range(0, len(order), BATCH["cpu"]):
            some = order[first : first + BATCH["cpu"]]
            given = self.tokenizer([texts[place] for place in some], padding=True, return_tensors="np")
            (states, *_) = self.session.run(None, {name: given[name].astype(np.int64) for name in self.names})
            seen = given["attention_mask"][:, :, None].astype(np.float32)
            vectors = (states * seen).sum(1) / seen.sum(1)
            found |= zip(some, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), strict=True)
        return [found[place] for place in range(len(texts))]


class CTranslate2:
    """CTranslate2, which sorts texts by length and computes none of the padding."""

    def __init__(self, task: dict[str, Any]) -> None:
        import ctranslate2
        from ctranslate2.converters import TransformersConverter
        from transformers import AutoTokenizer

        self.tokenizer, copy = AutoTokenizer.from_pretrained(task["folder"]), os.path.join(task["room"], "model")
        shutil.copytree(task["folder"], copy)
        path = os.path.join(copy, "config.json")
        with open(path) as file:
            config = json.load(file)
        with open(path, "w") as file:  # the converter reads a field that transformers 5 no longer writes
            json.dump(config | {"position_embedding_type": "absolute"}, file)
        made = TransformersConverter(copy).convert(os.path.join(task["room"], "converted"))
        self.encoder = ctranslate2.Encoder(
            made, device="cpu", compute_type="float32", inter_threads=1, intra_threads=task["threads"]
        )

    def embed(self, texts: list[str]) -> Any:
        import numpy as np

        order, found = sorted(range(len(texts)), key=lambda place: -len(texts[place])), {}
        for first in range(0, len(order), BATCH["cpu"]):
            some = order[first : first + BATCH["cpu"]]
            ids = self.tokenizer([texts[place] for place in some])["input_ids"]
            output = self.encoder.forward_batch(ids, token_type_ids=[[0] * len(each) for each in ids])
            states = np.array(output.last_hidden_state)
            vectors = [one[: len(own)].mean(0) for one, own in zip(states, ids, strict=True)]
            found |= {place: vector / np.linalg.norm(vector) for place, vector in zip(some, vectors, strict=True)}
        return [found[place] for place in range(len(texts))]


ENGINES = {
    "preheat": Preheat, "sentence-transformers": SentenceTransformers, "onnxruntime": OnnxRuntime,
    "ctranslate2": CTranslate2,
}  # fmt: skip


def main() -> None:
    from end_with_parent import end_with_parent  # lies beside this file

    end_with_parent()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write to standard output
    task, started = json.loads(sys.stdin.readline()), time.perf_counter()
    engine = ENGINES[task["engine"]](task)
    print(json.dumps({"ready": time.perf_counter() - started}), file=said, flush=True)
    for line in sys.stdin:
        load, seconds = json.loads(line), []
        for texts in [[text] for text in load["texts"]] if load["single"] else [load["texts"]]:
            started = time.perf_counter()
            vectors = engine.embed(texts)
            seconds.append(time.perf_counter() - started)
        answer = {"seconds": statistics.median(seconds), "first": [float(x) for x in vectors[0][:64]]}
        print(json.dumps(answer), file=said, flush=True)


if __name__ == "__main__":
    main()
