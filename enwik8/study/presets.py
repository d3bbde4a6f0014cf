"""Studies by name, as the text of their files: what `study NAME` runs and copies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["STUDIES"]

_DEMO = """\
title = "RoPE in linear attention, on the Wikipedia sample"
baseline = "elu-none"
arms = ["elu-none", "elu-rope", "elu-rope-before"]
seeds = [0, 1, 2]

[settings]
layers = 2
dim = 64
length = 128
batch_size = 8
steps = 200
warmup = 20
evaluate_every = 20
validation_bytes = 16384

[evaluation]
bytes = 16384
"""

_RATES = """\
title = "Learning rates of the arms at the small size"
preset = "small"
arms = ["elu-none", "elu-rope", "favor-rope-before", "favor-rope", "softmax-rope"]
seeds = [0]

[sweep]
learning_rate = [1e-3, 2e-3, 4e-3]
"""

_SMALL = """\
title = "Does RoPE help linear attention, and where does it go?"
preset = "small"
baseline = "elu-none"
arms = ["elu-none", "elu-learned", "elu-rope-before", "elu-rope", "favor-none",
        "favor-rope-before", "favor-rope", "softmax-none", "softmax-rope"]
seeds = [0, 1, 2]

[settings]
features = 64
"""

_CONTEST = """\
title = "Rotary linear attention with decay against softmax, at equal parameters and tokens"
preset = "small"
baseline = "softmax-rope"
arms = ["softmax-rope", "softmax-rope-llama", "best", "best-no-rope"]

[settings]
evaluate_every = 125
checkpoint_every = 250

[[group]]
name = "learning rates of the finalists"
seeds = [0]
[group.sweep]
learning_rate = [2e-3, 4e-3, 8e-3]

[[group]]
name = "seeds of the finalists"
seeds = [0, 1, 2]
[group.settings]
learning_rate = 4e-3

[[group]]
name = "ablations"
arms = ["best-no-decay", "best-no-denominator", "best-rope-before", "best-gpt"]
seeds = [0]
[group.sweep]
learning_rate = [2e-3, 4e-3, 8e-3]

[evaluation]
factors = [1, 2, 4, 16]
bytes = 65536
"""

STUDIES: Mapping[str, str] = MappingProxyType(
    {"demo": _DEMO, "rates": _RATES, "small": _SMALL, "contest": _CONTEST}
)
