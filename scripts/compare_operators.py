#!/usr/bin/env python3
"""Compares our operators with vLLM's, one by one and bit by bit, on the traces of recordings.

    python scripts/compare_operators.py FILE... --model-dir DIR [--device cuda] [--json OUT.json]

FILE: a recording with traces ("traced" in a plan of tilert_ref.golden.record): NAME.main.pt and NAME.whole.pt of
scripts/record_golden.py, or {prompt number: answer}. DIR: the checkpoint that was recorded.

Every operator gets what vLLM's had as input in decode, so that no difference is carried on to the next one. A call is
one operator in one layer for one token; it is equal if all its values are, in every bit. The operators are those of a
sparse model on Hopper (numerics.HOPPER).
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tilert_ref.engine.config import load_config
from tilert_ref.engine.decode import Model
from tilert_ref.engine.numerics import HOPPER
from tilert_ref.engine.ref import load_engine
from tilert_ref.golden.operators import Token, operators
from tilert_ref.golden.recording import Answer


@dataclass
class Count:
    """How an operator did. values_off: values that differ."""

    calls_equal: int = 0
    calls: int = 0
    values_off: int = 0
    values: int = 0

    def add(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Raises ValueError if these can't be the same operator's."""
        if ours.dtype != theirs.dtype or ours.numel() != theirs.numel():
            raise ValueError(f"{list(ours.shape)} {ours.dtype}, vLLM's {list(theirs.shape)} {theirs.dtype}")
        a, b = (x.contiguous().view(torch.uint8).view(x.numel(), -1) for x in (ours, theirs))
        off = int((a != b).any(-1).sum())
        self.calls_equal, self.calls = self.calls_equal + (off == 0), self.calls + 1
        self.values_off, self.values = self.values_off + off, self.values + len(a)


def read_answers(path: Path) -> list[Answer]:
    """Those with a trace. Raises ValueError if there are none."""
    recorded = torch.load(path, weights_only=True)
    if "parts" in recorded:
        answers = [answer for part in recorded["parts"].values() for alone in part.values() for answer in alone]
    else:
        answers = recorded["answers"] if "answers" in recorded else recorded.values()
    traced = [answer for answer in answers if answer.get("trace")]
    if not traced or traced[0].get("index") is None:
        raise ValueError(f'{path}: no traces of a sparse model; legal: recordings of one with "traced" in their plan')
    return traced


def compare(model: Model, answers: list[Answer]) -> dict[str, Count]:
    """All passes of one token: prompts run other kernels."""
    table: dict[str, Count] = {}
    for answer in answers:
        for seen in answer["trace"]:
            if len(seen["model.embed_tokens"][0]) == 1:
                for name, ours, theirs in operators(Token(model, answer, seen)):
                    table.setdefault(name, Count()).add(ours, theirs)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--model-dir", required=True, type=Path, metavar="DIR")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write {file: {operator: counts}} here too")
    args = parser.parse_args()
    room = load_config(args.model_dir).max_position_embeddings
    model = load_engine(args.model_dir, device=args.device, max_seq_len=room, kernels=HOPPER).model
    tables = {}
    for file in args.files:
        table = tables[file.name] = compare(model, read_answers(file))
        print(f"{file.name} on {args.device}:")
        for name, n in table.items():
            print(f"  {name}: {n.calls_equal} of {n.calls} calls equal, {n.values_off:,} of {n.values:,} values differ")
    if args.json:
        plain = {file: {name: asdict(count) for name, count in table.items()} for file, table in tables.items()}
        args.json.write_text(json.dumps(plain, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
