"""Rotary linear attention: kernel feature maps, RoPE after them, causal linear attention.

The equation lives in `linear_rope.functional`; start there.
"""

import importlib.util
import warnings

if importlib.util.find_spec("numpy") is None:
    # Nothing here needs NumPy; torch warns, when it is imported, that it is not there.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from linear_rope.attention import RotaryLinearAttention, SoftmaxAttention
from linear_rope.causal import BACKENDS, causal_product
from linear_rope.feature_maps import (
    FEATURE_MAPS,
    FeatureMap,
    advance_random_features,
    make_feature_map,
)
from linear_rope.functional import linear_attention
from linear_rope.model import Block, Config, Encoder, LanguageModel
from linear_rope.rotary import Rotary, rotate
from linear_rope.states import AttentionState, KeyValueCache, ModelState

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "FEATURE_MAPS",
    "AttentionState",
    "Block",
    "Config",
    "Encoder",
    "FeatureMap",
    "KeyValueCache",
    "LanguageModel",
    "ModelState",
    "Rotary",
    "RotaryLinearAttention",
    "SoftmaxAttention",
    "__version__",
    "advance_random_features",
    "causal_product",
    "linear_attention",
    "make_feature_map",
    "rotate",
]
