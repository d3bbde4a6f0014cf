"""The arms of the comparison: each trains, is as large as the others, and is what its row says."""

from __future__ import annotations

import csv
import importlib
import io
import os
import random
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from enwik8 import train as training
from enwik8.corpus import load_corpus
from enwik8.errors import UserError
from enwik8.evaluate import evaluate, load_model
from enwik8.interrupt import Interrupted
from enwik8.methods import METHODS, PERFORMER, find
from enwik8.objectives import CAUSAL, MLM
from enwik8.optimizer import make_optimizer
from enwik8.performer import PerformerConfig, PerformerModel
from enwik8.presets import Settings, model_fields
from enwik8.run import make_sampler
from enwik8.tasks import make_config, make_model, training_batch
from enwik8.train import train
from enwik8.windows import evaluate_windows
from linear_rope import Permute, SoftmaxAttention

PERFORMERS = [name for name, m in METHODS.items() if m.overrides.get("attention") == PERFORMER]
needs_performer = pytest.mark.skipif(
    importlib.util.find_spec("performer_pytorch") is None, reason="performer-pytorch is absent"
)
ARMS = [pytest.param(n, marks=needs_performer) if n in PERFORMERS else n for n in METHODS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as"]
    path.write_text(" ".join(random.Random(0).choices(words, k=4000)))
    return Settings(
        corpus=str(path),
        layers=1,
        dim=16,
        heads=2,
        length=16,
        batch_size=8,
        steps=6,
        warmup=2,
        learning_rate=1e-2,
        evaluate_every=3,
        validation_bytes=100,
        checkpoint_every=3,
        threads=1,
        cpu=True,
    )


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_learns_in_twenty_steps(name: str, tiny: Settings) -> None:
    model = make_model(make_config(model_fields(tiny, find(name))), CAUSAL)
    model.initialize(0)
    optimizer = make_optimizer(model, tiny)
    sampler = make_sampler(tiny, load_corpus(tiny.corpus))
    losses = []
    for step in range(1, 21):
        batch = training_batch(sampler, step, CAUSAL)
        logits = model(batch.x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.y.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    # From 8 bits a byte to what a few letters of a dozen words say.
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.5, losses


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_has_the_parameters_of_the_others(name: str) -> None:
    """Within 1 % of softmax-rope at the default size; a table of positions is the one exception."""

    def count(arm: str) -> int:
        with torch.device("meta"):
            model = make_model(make_config(model_fields(Settings(), find(arm))), CAUSAL)
        return sum(p.numel() for p in model.parameters())

    table = Settings().length * Settings().dim if find(name).has_table else 0
    want = count("softmax-rope")
    assert abs((count(name) - table) / want - 1) <= 0.01
    assert bool(table) == (name.endswith("learned") or "learned-decay" in name)


def test_rows_say_what_their_names_say() -> None:
    assert len({method.description for method in METHODS.values()}) == len(METHODS)
    eq19 = METHODS["elu-rope"].overrides
    rows: dict[str, dict[str, object]] = {
        "elu-rope-norm": {"output_norm": True},
        "elu-rope-rotated": {"denominator": "rotated"},
        "elu-rope-rotated-norm": {"denominator": "rotated", "output_norm": True},
        "elu-rope-undivided": {"denominator": "none"},
        "elu-rope-undivided-norm": {"denominator": "none", "output_norm": True},
        "elu-rope-expand": {"feature_map": "elu+1-expand"},
    }
    for name, fields in rows.items():
        assert METHODS[name].overrides == {**eq19, **fields}, name
    length = Settings(length=40, dim=32, heads=4)
    cosformer = make_config(model_fields(length, find("cosformer")))
    assert cosformer.max_length == 40
    for name in ("relu-permute", "elu-permute"):
        model = make_model(make_config(model_fields(length, find(name))), CAUSAL)
        layer: Any = model.blocks[0].attention  # type: ignore[union-attr,index]
        assert layer.rotary == Permute(8, 4) and layer.denominator == "rotated"
    alibi: Any = make_model(make_config(model_fields(length, find("softmax-alibi"))), CAUSAL)
    attention = alibi.blocks[0].attention
    assert isinstance(attention, SoftmaxAttention) and attention.alibi and not attention.rotary


def test_an_output_norm_makes_one_function_of_two_denominators() -> None:
    tokens = torch.randint(256, (2, 30))
    logits = []
    for name in ("elu-rope-norm", "elu-rope-undivided-norm", "elu-rope", "elu-rope-undivided"):
        model = make_model(make_config(model_fields(Settings(dim=32), find(name))), CAUSAL)
        model.initialize(0)
        logits.append(model.double()(tokens).detach())
    assert float((logits[0] - logits[1]).abs().max()) < 1e-4
    assert float((logits[2] - logits[3]).abs().max()) > 1e-2


def test_an_end_of_positions_is_told_in_longer_windows(tiny: Settings, tmp_path: Path) -> None:
    train(tiny, "cosformer", tmp_path)
    once, twice = evaluate_windows(tmp_path, (1, 2), limit=64)
    assert once["bytes"] == 64 and once["bits_per_byte"] < 8
    assert "beyond max_length=16" in twice["reason"] and "bits_per_byte" not in twice


# ---- performer-pytorch's model


@pytest.fixture(scope="module")
def performer_lm() -> Any:
    with redirect_stdout(io.StringIO()):
        return pytest.importorskip("performer_pytorch").PerformerLM


def performer(**fields: Any) -> PerformerModel:
    sizes: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "max_length": 12}
    return PerformerModel(PerformerConfig(**{**sizes, **fields}))


def test_it_is_their_model(performer_lm: Any) -> None:
    tokens = torch.randint(256, (2, 9))
    for rotary in (True, False):
        model = performer(rotary=rotary).eval()
        model.initialize(3)
        with redirect_stdout(io.StringIO()):
            theirs = performer_lm(
                num_tokens=256, max_seq_len=12, dim=16, depth=2, heads=2, dim_head=8, causal=True,
                tie_embed=True, rotary_position_emb=rotary,
            ).eval()  # fmt: skip
        theirs.load_state_dict(model.inner.state_dict())
        assert torch.equal(model(tokens), theirs(tokens))
        tables = [name for name, _ in model.named_parameters() if "pos_emb" in name]
        assert tables == ([] if rotary else ["inner.pos_emb.emb.weight"])


@needs_performer
def test_initial_values_follow_their_seeds() -> None:
    def values(*seeds: int) -> dict[str, torch.Tensor]:
        model = performer()
        before = torch.get_rng_state()
        model.initialize(*seeds)
        assert torch.equal(torch.get_rng_state(), before)
        return model.state_dict()

    first, again, features = values(1), values(1, 1), values(1, 2)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, features[name]) == ("projection" not in name), name
    assert not torch.equal(values(2)["inner.token_emb.weight"], first["inner.token_emb.weight"])
    assert float(first["inner.token_emb.weight"].std()) == pytest.approx(0.02, rel=0.05)


@needs_performer
def test_runs_stop_resume_and_are_measured(
    tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Bit by bit on one thread; its random features are drawn anew on the way, in both runs."""
    inner = PerformerModel.__init__

    def soon(self: PerformerModel, config: PerformerConfig) -> None:
        inner(self, config)
        self.inner.performer.proj_updater.feature_redraw_interval = 2

    monkeypatch.setattr(PerformerModel, "__init__", soon)
    whole = train(tiny, "performer-lm", tmp_path / "whole")
    plain = training.Run.train_step
    done: list[int] = []

    def interrupted(run: Any) -> dict[str, str]:
        row = plain(run)
        done.append(run.step)
        if len(done) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return row

    monkeypatch.setattr(training.Run, "train_step", interrupted)
    with pytest.raises(Interrupted):
        train(tiny, "performer-lm", tmp_path / "parts")
    parts = train(tiny, "performer-lm", tmp_path / "parts", resume=True)
    assert done == [1, 2, 3, 4, 5, 6] and parts.batch_hash == whole.batch_hash
    models = [load_model(tmp_path / name).model.state_dict() for name in ("whole", "parts")]
    initial = performer(dim=16, layers=1, max_length=16).state_dict()
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name
    redrawn = [name for name in initial if "projection_matrix" in name]
    assert redrawn and models[0]["inner.performer.proj_updater.calls_since_last_redraw"] < 2
    losses = []
    for name in ("whole", "parts"):
        with open(tmp_path / name / "metrics.csv", newline="") as file:
            losses.append([row["train_bits_per_byte"] for row in csv.DictReader(file)])
    assert losses[0] == losses[1] and len(losses[0]) == 6
    value = evaluate(tmp_path / "whole", limit=100)
    assert 0 < value < 8 and "performer-lm at step 6" in capsys.readouterr().out
    for row in evaluate_windows(tmp_path / "whole", (1, 2), limit=64):
        assert row["reason"] == "this model keeps no state to read a window in pieces by"


@needs_performer
def test_it_is_described_without_memory_and_refuses_what_it_cannot() -> None:
    with torch.device("meta"):
        model = performer()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with pytest.raises(UserError, match="reads at most max_length=12 tokens, got 13; it has no"):
        performer()(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match="attention='performer-pytorch' has a causal model only"):
        make_model(PerformerConfig(), MLM)


def test_an_absent_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("enwik8.performer.importlib.import_module", absent)
    with pytest.raises(UserError, match=r"this arm needs performer-pytorch \(No module .*\[perf"):
        performer()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "heads=3 does not divide dim=16"),
        ({"heads": 16}, "dim=16 and its heads of width 1 must be even"),
        ({"layers": 0}, "layers=0 must be an integer of at least 1"),
        ({"max_length": None}, "max_length=None must be an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        performer(**fields)


def test_configs_are_told_apart_and_saved(tiny: Settings) -> None:
    fields = model_fields(tiny, find("performer-lm-learned"))
    config = make_config(fields)
    assert config == PerformerConfig(
        dim=16, layers=1, heads=2, max_length=16, rotary=False, vocab_size=256
    )
    assert make_config(vars(config)) == config
    with pytest.raises(ValueError, match="unknown config keys: depth, feature_map"):
        make_config({**fields, "feature_map": "elu+1", "depth": 2})
    with pytest.raises(ValueError, match="cannot be trained with --objective mlm"):
        model_fields(replace(tiny, objective="mlm"), find("performer-lm"))
