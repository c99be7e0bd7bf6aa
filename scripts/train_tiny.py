#!/usr/bin/env python3
"""Trains one of the tiny models that are committed in tilert_ref/tiny/models, on one GPU.

    python scripts/train_tiny.py tiny-glm5 OUT

OUT becomes a Hugging Face checkpoint directory with training_log.json in it, OUT-dense the same model without its
indexer. About 6 minutes on an H200.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tilert_ref.engine.config import parse_config
from tilert_ref.tiny.families import FAMILIES, published_weights, recipe, write_checkpoint, write_dense_twin
from tilert_ref.tiny.train import Log, Training
from tilert_ref.tiny.train_model import TrainModel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES, help="which model")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all step counts, for a try (default: 1)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s; a CPU would take days")
    parser.add_argument("--workers", type=int, default=14, help="processes that make data (default: %(default)s)")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this torch sees no GPU (a CUDA build of torch is needed); --device cpu trains for days")
    if args.workers < 1 or not args.scale > 0:
        parser.error(f"--workers {args.workers} and --scale {args.scale}: both must be above 0")
    out: Path = args.out.resolve()
    twin = out.with_name(f"{out.name}-dense")
    out.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[args.family]
    tokenizer = family.tokenizer()
    plan = recipe(args.scale, seed=args.seed, workers=args.workers)
    config = parse_config(family.config())

    def keep(model: TrainModel, log: Log) -> None:
        write_checkpoint(family, published_weights(model), tokenizer, out)
        log.save(out / "training_log.json")

    say = functools.partial(print, flush=True)
    Training(config, family.dialect, tokenizer, plan, args.device, say).run(keep)
    write_dense_twin(family, out, twin)
    print(f"wrote {out} and its dense twin {twin}; score them: tilert-ref scorecard {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
