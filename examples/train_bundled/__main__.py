"""Command line of the steps that make the bundled model."""

from __future__ import annotations

import argparse
import dataclasses
import sysconfig
from pathlib import Path

from .layout import WorkFolder

DEFAULT_WORK = Path(".corpus")
DEFAULT_OUT = Path("src/preheat/bundled")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_bundled", description=__doc__)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="intermediate files")
    steps = parser.add_subparsers(dest="step", required=True)

    corpus = steps.add_parser("corpus", help="collect the text")
    corpus.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    corpus.add_argument("--docs", type=Path, required=True, help="folder with the documentation's *.rst.txt")

    steps.add_parser("tokenizer", help="train the tokenizer and encode the text")

    train = steps.add_parser("train", help="train the model, on a GPU")
    train.add_argument("--out", type=Path, required=True, help="for the weights and the metrics")
    train.add_argument("--steps", type=int, default=3200)
    train.add_argument("--minutes", type=float, default=10.0, help="shorten the run to fit this")
    train.add_argument("--batch", type=int, default=32, help="sequences in a step")
    train.add_argument("--context", type=int, default=2048)
    train.add_argument("--peak-lr", type=float, default=2e-3)
    train.add_argument("--dropout", type=float, default=0.1)
    train.add_argument("--weight-decay", type=float, default=0.1)
    train.add_argument("--eval-every", type=int, default=400)
    train.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)

    export = steps.add_parser("export", help="write the checkpoint folder")
    export.add_argument("--run", type=Path, required=True, help="what train wrote")
    export.add_argument("--weights", choices=["best", "last"], default="last")
    export.add_argument("--licence", type=Path, required=True, help="Python's LICENSE.txt")
    export.add_argument("--out", type=Path, default=DEFAULT_OUT)
    return parser.parse_args()


def main() -> None:
    """Run one step; each imports only what it needs, so training needs no tokenizer."""
    arguments = parse_arguments()
    work = WorkFolder(arguments.work)
    if arguments.step == "corpus":
        from . import corpus

        corpus.build(work, arguments.stdlib, arguments.docs)
    elif arguments.step == "tokenizer":
        from . import tokenizer

        tokenizer.build(work)
    elif arguments.step == "train":
        from . import train

        names = {field.name for field in dataclasses.fields(train.TrainOptions)}
        chosen = {name: value for name, value in vars(arguments).items() if name in names}
        train.train(work, arguments.out, train.TrainOptions(**chosen))
    else:
        from . import export

        export.export(work, arguments.run, arguments.weights, arguments.licence, arguments.out)


if __name__ == "__main__":
    main()
