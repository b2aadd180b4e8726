"""Texts a second of engines of embeddings, and the time of a single query, in turns.

    python -m benchmarks encoders [--models minilm bge-base bge-large] [--texts 2000 200] [--queries 40] [--runs 3]
        [--python sentence-transformers=ENVIRONMENT/bin/python --python onnxruntime=ENVIRONMENT/bin/python
        --python ctranslate2=ENVIRONMENT/bin/python]
    python -m benchmarks encoders --device cuda --models bge-large [--python sentence-transformers=...]

Models are random, of the shapes of all-MiniLM-L6-v2, bge-base and bge-large, and pool the mean. On a GPU preheat and
sentence-transformers run in bfloat16 alone, with larger batches. Each engine is a process of its own with the same
weights, texts and threads, in float32. A turn runs each engine once, and all other engines are stopped meanwhile
(SIGSTOP). Texts have 20 to 300 tokens, queries 16; `--texts` has one number for all models, or one for each. Tokenizing
is part of the time. Reported are the best and the median of the turns. Peers live in environments of their own:
`--python` names them, and without one the peer is left out, and the result says so. The vectors of all engines must be
alike.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import parser, save
from benchmarks.cpu_engines import Child

CHILD = Path(__file__).parent / "common" / "encoder_engine.py"

ENGINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "preheat": ("preheat", {"dtype": "float32"}),
    "preheat bf16": ("preheat", {"dtype": "bfloat16"}),
    "sentence-transformers": ("sentence-transformers", {"dtype": "float32"}),
    "sentence-transformers bf16": ("sentence-transformers", {"dtype": "bfloat16"}),
    "ONNX Runtime": ("onnxruntime", {"dtype": "float32"}),
    "CTranslate2": ("ctranslate2", {"dtype": "float32"}),
}
"""Engines by their names: the class in :mod:`benchmarks.common.encoder_engine`, and options."""

SHAPES: Mapping[str, Mapping[str, int]] = {
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "bge-base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "bge-large": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
ON_A_GPU = ("preheat bf16", "sentence-transformers bf16")
RESULT = {"cpu": "encoders", "cuda": "encoders_gpu"}
VOCABULARY, QUERY = 30522, 16


def write_model(shape: Mapping[str, int], folder: Path) -> None:
    """Write a random BERT with a tokenizer of whole words, in the layout of sentence-transformers."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, **shape)  # type: ignore[arg-type]
    transformers.BertModel(config).save_pretrained(folder)
    words = {word: id for id, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
    words |= {f"w{id}": id for id in range(len(words), VOCABULARY)}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    kind: Any = transformers.PreTrainedTokenizerFast
    kind(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
        model_max_length=512, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": shape["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


@contextmanager
def children(
    model: str, names: Sequence[str], pythons: Mapping[str, str], threads: int, device: str
) -> Iterator[list[Child]]:
    """Start the engines one after the other."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(SHAPES[model], root / "model")
        started = []
        for number, name in enumerate(names):
            kind, options = ENGINES[name]
            (room := root / str(number)).mkdir()
            task = {"engine": kind, "folder": str(root / "model"), "room": str(room), "options": options}
            python = pythons.get(kind, sys.executable)
            child = Child(name, task | {"threads": threads, "device": device}, python, room / "log", CHILD)
            stack.callback(child.close)
            started.append(child)
            print(f"{model}: {name} is ready after {child.ready:.1f} s", flush=True)
        yield started


def measured(some: Sequence[Child], texts: int, queries: int, runs: int) -> dict[str, dict[str, float]]:
    """Return each engine's figures: texts and tokens a second, and the milliseconds of a query."""
    draw = random.Random(0)
    lengths = [draw.randint(20, 300) for _ in range(texts)]

    def made(length: int) -> str:
        return " ".join(f"w{draw.randrange(4, VOCABULARY)}" for _ in range(length - 2))

    loads = {
        "texts": {"texts": [made(length) for length in lengths], "single": False},
        "queries": {"texts": [made(QUERY) for _ in range(queries)], "single": True},
    }
    times: dict[str, dict[str, list[float]]] = {child.name: {name: [] for name in loads} for child in some}
    small = {"texts": loads["texts"]["texts"][:64], "single": False}  # type: ignore[index]
    vectors = {child.name: child.ask(small)["first"] for child in some}  # this turn warms up, too
    check_alike(vectors)
    for _ in range(runs):
        for name, load in loads.items():
            for child in some:
                times[child.name][name].append(float(child.ask(load)["seconds"]))
    return {
        name: {
            "texts_per_s": round(texts / min(each["texts"]), 1),
            "tokens_per_s": round(sum(lengths) / min(each["texts"])),
            "median_texts_per_s": round(texts / statistics.median(each["texts"]), 1),
            "query_p50_ms": round(1000 * min(each["queries"]), 3),
            "median_query_p50_ms": round(1000 * statistics.median(each["queries"]), 3),
        }
        for name, each in times.items()
    }


def check_alike(vectors: Mapping[str, Sequence[float]]) -> None:
    """Raise RuntimeError if an engine computed something else."""
    (first, one), *others = vectors.items()
    for name, other in others:
        if max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.01:
            raise RuntimeError(f"{name} has other vectors than {first}: {other[:4]}, {one[:4]}")


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--models", nargs="+", choices=SHAPES, default=["minilm", "bge-base"])
    flags.add_argument("--engines", nargs="+", choices=ENGINES, default=None, metavar="NAME")
    flags.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    flags.add_argument("--texts", type=int, nargs="+", default=[2000], help="of all models, or of each one")
    flags.add_argument("--queries", type=int, default=40)
    flags.add_argument("--runs", type=int, default=3)
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--python", action="append", default=[], metavar="KIND=PATH", help="a peer's environment")
    flags.add_argument("--note", default="", help="remark that is kept with the result")
    args = flags.parse_args(words)
    pythons = dict(each.split("=", 1) for each in args.python)
    asked = args.engines or (list(ENGINES) if args.device == "cpu" else list(ON_A_GPU))
    if wrong := sorted({*asked} - {*ON_A_GPU}) if args.device == "cuda" else []:
        flags.error(f"--engines {wrong[0]} is for a CPU: with --device cuda give {', '.join(ON_A_GPU)}")
    if len(args.texts) not in (1, len(args.models)):
        flags.error(f"--texts has {len(args.texts)} numbers: give one, or one for each of {len(args.models)} models")
    texts = dict(zip(args.models, args.texts * (len(args.models) // len(args.texts)), strict=True))
    without = [name for name in asked if ENGINES[name][0] not in ("preheat", *pythons)]
    names = [name for name in asked if name not in without]
    facts = {
        "device": args.device,
        "threads": args.threads,
        "texts": texts,
        "queries": args.queries,
        "runs": args.runs,
    }
    cases = {}
    for model in args.models:
        with children(model, names, pythons, args.threads, args.device) as some:
            cases[model] = measured(some, texts[model], args.queries, args.runs)
        print(model, *(f"\n  {name:28} {json.dumps(each)}" for name, each in cases[model].items()), flush=True)
    print(save(RESULT[args.device], facts | {"left_out": without, "note": args.note, "cases": cases}))
