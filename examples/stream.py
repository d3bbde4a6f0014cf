"""Token by token, with a state of constant size, equal to one pass over the whole sequence."""

from __future__ import annotations

import torch

from linear_rope import Config, LanguageModel, ModelState

torch.manual_seed(0)
model = LanguageModel(Config(vocab_size=256, dim=64, layers=2, heads=4)).double().eval()
tokens = torch.randint(256, (2, 300))  # 2 rows of 300 tokens


def size(state: ModelState) -> int:
    """Bytes in the state of all layers."""
    return sum(x.numel() * x.element_size() for layer in state.layers for x in layer)


with torch.no_grad():
    whole = model(tokens)  # (2, 300, 256)

    # The state is a value: a call takes one and returns the next. None is the empty past.
    state, steps, sizes = None, [], []
    for t in range(tokens.shape[1]):
        logits, state = model(tokens[:, t : t + 1], state=state, return_state=True)
        steps.append(logits)
        sizes.append(size(state))

    # Pieces of any length do as well: 200 tokens in one call, then the rest.
    first, state = model(tokens[:, :200], return_state=True)
    second = model(tokens[:, 200:], state=state)

for name, parts in (("300 single steps", steps), ("200 + 100 tokens", [first, second])):
    difference = (torch.cat(parts, dim=1) - whole).abs().max().item()
    print(f"{name}: largest difference from the whole pass {difference:.1e}")
    assert difference < 1e-10

print(f"state: {sizes[0]:,} bytes after 1 token, {sizes[-1]:,} bytes after 300")
assert len(set(sizes)) == 1

# To continue a prompt, `stream` does the loop above and draws the next token from the logits.
new = model.stream(tokens[:, :5], temperature=0.8, generator=torch.Generator().manual_seed(0))
print("continuation of row 0:", [next(new)[0].item() for _ in range(8)])
