"""Put rotary linear attention into a model that exists, here one built of PyTorch's own layers.

The task is to repeat: the second half of each sequence is the first half again, so each symbol of
it has to be fetched from eight places back. Guessing costs ln 16 = 2.77.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope import RotaryLinearAttention

SYMBOLS, HALF, WIDTH, HEADS = 16, 8, 64, 4


class Attention(nn.Module):
    """Answers the call that nn.TransformerEncoderLayer makes to its self_attn."""

    # That layer reads these; None keeps it from its fused softmax kernel in evaluation.
    batch_first, in_proj_bias = True, None

    def __init__(self) -> None:
        super().__init__()
        self.attention = RotaryLinearAttention(WIDTH, HEADS, output_norm=True)  # causal by itself

    def forward(self, query: Tensor, *_: Tensor, **options: object) -> tuple[Tensor, None]:
        padding = options["key_padding_mask"]  # PyTorch: 0 or False at real tokens
        mask = padding == 0 if isinstance(padding, Tensor) else None  # linear_rope: True there
        return self.attention(query, key_mask=mask), None


class YourModel(nn.Module):
    """A model as it was before: nothing in it knows of linear attention or positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


torch.manual_seed(0)
model = YourModel()
for layer in model.encoder.layers:
    layer.self_attn = Attention()  # all that changes

optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(121):
    half = torch.randint(SYMBOLS, (64, HALF))
    logits = model(torch.cat([half, half], dim=1)[:, :-1])[:, HALF - 1 :]
    loss = F.cross_entropy(logits.flatten(0, 1), half.flatten())
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
half = torch.randint(SYMBOLS, (500, HALF))
guess = model(torch.cat([half, half], dim=1)[:, :-1])[:, HALF - 1 :].argmax(-1)
right = (guess == half).float().mean().item()
print(f"symbols repeated rightly in evaluation: {right:.1%}")
assert right > 0.9
