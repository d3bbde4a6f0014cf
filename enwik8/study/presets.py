"""Studies by name, as the text of their files: what `study NAME` runs and copies.

All but `demo` are on the same part of enwik8 as the studies of results/, whose log says how much of
each was run.
"""

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

_SMALL = """\
title = "Does RoPE help linear attention, and where does it go?"
preset = "small"
baseline = "elu-none"
arms = ["elu-none", "elu-rope-before", "elu-rope", "favor-none", "favor-rope-before",
        "favor-rope", "softmax-none", "softmax-rope"]
pairs = [["favor-rope", "favor-rope-before"], ["elu-rope", "elu-rope-before"]]

[settings]
corpus = "enwik8-first-4000000-bytes"
features = 64
evaluate_every = 100
checkpoint_every = 250

[[group]]
name = "three seeds"
seeds = [0, 1, 2]

[[group]]
name = "a learned table of positions"
arms = ["elu-learned"]
seeds = [0]

[[group]]
name = "the same from a small initial scale: before or after the feature map"
arms = ["elu-none", "elu-rope", "favor-rope-before", "favor-rope"]
seeds = [0, 1, 2]
[group.settings]
init_std = 0.02

[[group]]
name = "a larger model in longer windows"
arms = ["elu-none", "elu-rope"]
seeds = [0]
[group.settings]
layers = 6
dim = 256
length = 512
steps = 400
"""

# A study of its own: where rates are swept, each arm is reported at its best one.
_RATES = """\
title = "Learning rates of linear attention at the small size"
preset = "small"
baseline = "elu-none"
arms = ["elu-none", "elu-rope", "favor-rope-before", "favor-rope"]
pairs = [["favor-rope", "favor-rope-before"]]

[settings]
corpus = "enwik8-first-4000000-bytes"
features = 64
evaluate_every = 100
checkpoint_every = 250

[sweep]
learning_rate = [1e-3, 2e-3, 4e-3, 8e-3]
"""

_FINALISTS = """\
preset = "small"
baseline = "softmax-rope"
arms = ["softmax-rope", "softmax-rope-llama", "softmax-rope-gate-llama", "best", "best-no-rope"]
pairs = [["best", "softmax-rope-gate-llama"]]

[evaluation]
factors = [1, 2, 4, 16]
bytes = 65536
"""

# Each arm at the best of the rates tried in `contest-rates`.
_CONTEST = f"""\
title = "Rotary linear attention with decay against softmax, at equal parameters and tokens"
{_FINALISTS}
[settings]
corpus = "enwik8-first-4000000-bytes"
evaluate_every = 125
checkpoint_every = 250

[[group]]
name = "the recipe"
arms = ["best", "best-no-rope"]
seeds = [0, 1, 2]
[group.settings]
learning_rate = 8e-3

[[group]]
name = "softmax attention, and with the recipe's gate"
arms = ["softmax-rope", "softmax-rope-gate-llama"]
seeds = [0, 1, 2]
[group.settings]
learning_rate = 4e-3

[[group]]
name = "softmax attention in LLaMA's block"
arms = ["softmax-rope-llama"]
seeds = [0, 1, 2]
[group.settings]
learning_rate = 2e-3

[[group]]
name = "ablations of the recipe"
arms = ["best-denominator", "best-rope-before", "best-gpt", "best-no-gate"]
seeds = [0]
[group.settings]
learning_rate = 4e-3

[[group]]
name = "the recipe without decay"
arms = ["best-no-decay"]
seeds = [0]
[group.settings]
learning_rate = 8e-3
"""

_CONTEST_RATES = f"""\
title = "Learning rates of the contest's arms"
{_FINALISTS}
[settings]
corpus = "enwik8-first-4000000-bytes"
evaluate_every = 125
checkpoint_every = 250

[[group]]
name = "finalists"
seeds = [0]
[group.sweep]
learning_rate = [1e-3, 2e-3, 4e-3, 8e-3]

[[group]]
name = "one rate more, for the edge"
arms = ["best", "best-no-rope"]
seeds = [0]
[group.settings]
learning_rate = 1.6e-2

[[group]]
name = "ablations"
arms = ["best-denominator", "best-rope-before", "best-gpt", "best-no-gate"]
seeds = [0]
[group.sweep]
learning_rate = [2e-3, 4e-3, 8e-3]

[[group]]
name = "softmax attention with the recipe's gate and norm"
arms = ["softmax-rope-gate", "softmax-rope-gate-norm-llama"]
seeds = [0]
[group.sweep]
learning_rate = [2e-3, 4e-3, 8e-3]

[[group]]
name = "the recipe without decay"
arms = ["best-no-decay"]
seeds = [0]
[group.sweep]
learning_rate = [4e-3, 8e-3, 1.6e-2]
"""

_CONTEST_1024 = f"""\
title = "The contest in windows of 1,024 bytes"
{_FINALISTS}
[settings]
corpus = "enwik8-first-4000000-bytes"
length = 1024
batch_size = 4
evaluate_every = 125
checkpoint_every = 250

[[group]]
name = "learning rates of the recipe"
arms = ["best", "best-no-rope"]
seeds = [0]
[group.sweep]
learning_rate = [2e-3, 4e-3, 8e-3]

[[group]]
name = "learning rates of softmax attention"
arms = ["softmax-rope", "softmax-rope-llama"]
seeds = [0]
[group.sweep]
learning_rate = [1e-3, 2e-3, 4e-3]

[[group]]
name = "learning rates of softmax attention with the recipe's gate"
arms = ["softmax-rope-gate-llama"]
seeds = [0]
[group.sweep]
learning_rate = [2e-3, 4e-3, 8e-3]

[[group]]
name = "seeds of the recipe, and of softmax attention with its gate"
arms = ["best", "softmax-rope-gate-llama"]
seeds = [0, 1, 2]
[group.settings]
learning_rate = 4e-3

[[group]]
name = "seeds of softmax attention"
arms = ["softmax-rope", "softmax-rope-llama"]
seeds = [0, 1, 2]
[group.settings]
learning_rate = 2e-3
"""

_CONTEST_20M = f"""\
title = "The contest at ten times the tokens, 20.5 million"
{_FINALISTS}
[settings]
corpus = "enwik8-first-4000000-bytes"
steps = 5000
evaluate_every = 250
checkpoint_every = 250

[arm.softmax-rope-llama]
learning_rate = 2e-3

[arm.softmax-rope]
learning_rate = 4e-3

[arm.softmax-rope-gate-llama]
learning_rate = 4e-3

[arm.best]
learning_rate = 8e-3

[arm.best-no-rope]
learning_rate = 8e-3

[[group]]
name = "the recipe without rotation"
arms = ["best-no-rope"]
seeds = [0]

[[group]]
name = "finalists"
arms = ["best", "softmax-rope-gate-llama", "softmax-rope", "softmax-rope-llama"]
seeds = [0, 1, 2]
"""

_CONTEST_20M_1024 = f"""\
title = "The contest in windows of 1,024 bytes, at 20.5 million tokens"
{_FINALISTS}
[settings]
corpus = "enwik8-first-4000000-bytes"
length = 1024
batch_size = 4
steps = 5000
evaluate_every = 250
checkpoint_every = 250

[[group]]
name = "the recipe, without rotation too, and softmax attention with its gate"
arms = ["best", "softmax-rope-gate-llama", "best-no-rope"]
seeds = [0]
[group.settings]
learning_rate = 4e-3

[[group]]
name = "softmax attention"
arms = ["softmax-rope", "softmax-rope-llama"]
seeds = [0]
[group.settings]
learning_rate = 2e-3
"""

STUDIES: Mapping[str, str] = MappingProxyType(
    {
        "demo": _DEMO,
        "small": _SMALL,
        "rates": _RATES,
        "contest": _CONTEST,
        "contest-rates": _CONTEST_RATES,
        "contest-1024": _CONTEST_1024,
        "contest-20m": _CONTEST_20M,
        "contest-20m-1024": _CONTEST_20M_1024,
    }
)
