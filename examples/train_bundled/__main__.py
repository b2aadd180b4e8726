"""Command line of the steps that make the bundled model.

Each step imports only the modules that it needs: training needs no tokenizer.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from .common import WorkFolder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_bundled", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".corpus"), help="intermediate files")
    steps = parser.add_subparsers(dest="step", required=True)
    corpus = steps.add_parser("corpus", help="collect the text")
    corpus.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    corpus.add_argument("--docs", type=Path, required=True, help="folder with the documentation's *.rst.txt")
    steps.add_parser("tokenizer", help="train the tokenizer and encode the text")
    train = steps.add_parser("train", help="train the model, on a GPU")
    train.add_argument("--out", type=Path, required=True, help="for the weights and the metrics")
    train.add_argument("--steps", type=int, default=3419)
    export = steps.add_parser("export", help="write the checkpoint folder")
    export.add_argument("--run", type=Path, required=True, help="what train wrote")
    export.add_argument("--licence", type=Path, required=True, help="Python's LICENSE.txt")
    export.add_argument("--out", type=Path, default=Path("src/preheat/bundled"))
    draft = steps.add_parser("draft", help="train a draft model for the bundled one, on a CPU, and write its folder")
    draft.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    draft.add_argument("--out", type=Path, required=True)
    draft.add_argument("--steps", type=int, default=1000)
    eagle = steps.add_parser("eagle", help="train a head of EAGLE-3 for the bundled model, on a CPU")
    eagle.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    eagle.add_argument("--out", type=Path, required=True)
    eagle.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    work = WorkFolder(args.work)
    if args.step == "train":
        from .train import TrainOptions, train

        train(work, args.out, TrainOptions(steps=args.steps))
    elif args.step == "draft":
        from .draft import make

        make(work, args.stdlib, args.out, args.steps)
    elif args.step == "eagle":
        from .eagle import make as make_head

        make_head(work, args.stdlib, args.out, args.steps)
    elif args.step == "export":
        from .export import export

        export(work, args.run, args.licence, args.out)
    else:
        from . import corpus

        corpus.build(work, args.stdlib, args.docs) if args.step == "corpus" else corpus.encode(work)


if __name__ == "__main__":
    main()
