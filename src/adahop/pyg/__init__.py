"""At home in PyTorch Geometric: a drop-in loader, feedback from unmodified models, inference, logging."""

from adahop.pyg.adapter import AdaptiveSampler
from adahop.pyg.inference import inference
from adahop.pyg.lightning import callback
from adahop.pyg.loader import AdaptiveNeighborLoader
from adahop.pyg.logging import CSVLog, TensorBoardLog, stats
from adahop.pyg.root import unscale_messages
from adahop.pyg.wrap import scale_messages, scaled

__all__ = [
    "AdaptiveNeighborLoader", "AdaptiveSampler", "CSVLog", "TensorBoardLog", "callback", "inference", "scale_messages",
    "scaled", "stats", "unscale_messages",
]  # fmt: skip
