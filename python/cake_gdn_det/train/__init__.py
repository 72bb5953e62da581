"""A small, complete training run on the operator: a byte-level language model on real text.

`python -m cake_gdn_det train` is the command; from Python:

    from cake_gdn_det.train import TrainConfig, train
    result = train(TrainConfig(steps=100))
"""

from .data import UserError, read_corpus
from .loop import Result, TrainConfig, train
from .model import LanguageModel, ModelConfig

__all__ = ["LanguageModel", "ModelConfig", "Result", "TrainConfig", "UserError", "read_corpus", "train"]
