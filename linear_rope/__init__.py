"""Rotary linear attention: kernel feature maps, RoPE after them, causal linear attention.

The equation lives in `linear_rope.functional`; start there.
"""

import importlib.util
import warnings

if importlib.util.find_spec("numpy") is None:
    # Nothing here needs NumPy; torch warns, when it is imported, that it is not there.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from linear_rope import recipes
from linear_rope.attention import RotaryLinearAttention, SoftmaxAttention
from linear_rope.causal import BACKENDS, backends, build_native, causal_product
from linear_rope.cosformer import CosFormer
from linear_rope.feature_maps import (
    FEATURE_MAPS,
    Expand,
    FeatureMap,
    advance_random_features,
    make_feature_map,
)
from linear_rope.functional import linear_attention
from linear_rope.local_attention import WindowCache
from linear_rope.losses import linear_cross_entropy
from linear_rope.model import Block, Config, Encoder, LanguageModel
from linear_rope.permute import Permute
from linear_rope.rotary import Rotary, rotate
from linear_rope.rotary_variants import AxialRotary, LearnedRotary, grid_positions, make_rotary
from linear_rope.scaling import SCALINGS, make_scaling
from linear_rope.selective import SelectiveState
from linear_rope.states import AttentionState, KeyValueCache, MixedState, ModelState
from linear_rope.streaming import attend_in_pieces
from linear_rope.xpos import XPos

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "FEATURE_MAPS",
    "SCALINGS",
    "AttentionState",
    "AxialRotary",
    "Block",
    "Config",
    "CosFormer",
    "Encoder",
    "Expand",
    "FeatureMap",
    "KeyValueCache",
    "LanguageModel",
    "LearnedRotary",
    "MixedState",
    "ModelState",
    "Permute",
    "Rotary",
    "RotaryLinearAttention",
    "SelectiveState",
    "SoftmaxAttention",
    "WindowCache",
    "XPos",
    "__version__",
    "advance_random_features",
    "attend_in_pieces",
    "backends",
    "build_native",
    "causal_product",
    "grid_positions",
    "linear_attention",
    "linear_cross_entropy",
    "make_feature_map",
    "make_rotary",
    "make_scaling",
    "recipes",
    "rotate",
]
