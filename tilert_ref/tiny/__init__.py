"""Tiny models that are really trained: what they learn (skills, texts), how they speak (chat), how they are scored.

The checkpoints are in models/, each with a model card. `scripts/train_tiny.py` makes them.
"""

from pathlib import Path

from tilert_ref.model_files import InputError

MODELS = Path(__file__).parent / "models"
NAMES = ("tiny-glm5", "tiny-glm5-dense", "tiny-dsv32", "tiny-dsv32-dense")
"""The committed checkpoints. "-dense": the same weights without the indexer, for engines without sparse attention."""


def model_dir(name: str) -> Path:
    """Checkpoint directory of a committed model. Raises ValueError on an unknown name."""
    if name not in NAMES:
        raise InputError(f"no trained model {name!r}; legal: {', '.join(NAMES)}")
    return MODELS / name
