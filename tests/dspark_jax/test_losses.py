import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax import anchors, losses
from dspark_jax.anchors import Slots
from dspark_jax.config import DrafterConfig, InputError, TargetConfig
from dspark_jax.drafters import dspark
from dspark_jax.io import hf, layouts
from dspark_jax.layers import rope_angles
from dspark_jax.losses import LossConfig, Outputs
from dspark_jax.targets import dense

GOLDEN = ("qwen3_vanilla", "qwen3_rnn", "qwen3_gated", "qwen3_dflash", "gemma4_vanilla")
TARGET = TargetConfig(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8,
)  # fmt: skip


def random_params(specs, seed: int):
    """Weights larger than initial ones, so that every path matters."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        small, middle = (0.15, 0.0) if len(spec.shape) > 1 else (0.3, 1.0)
        return jnp.asarray(rng.normal(middle, small, spec.shape), jnp.float32)

    return jax.tree.map(draw, specs)


def drafter_config(**settings) -> DrafterConfig:
    return DrafterConfig.for_target(
        TARGET,
        **{
            "num_layers": 2,
            "block_size": 4,
            "mask_token_id": 60,
            "target_layer_ids": (0, 1),
            "markov_rank": 5,
            **settings,
        },
    )


@dataclasses.dataclass
class Case:
    """A random drafter on random hidden states."""

    cfg: DrafterConfig
    inputs: dict

    def run(self, *, loss=LossConfig(), chunk=3, **changes):
        """((loss, metrics), gradient), with these inputs in place of the case's."""
        inputs = {**self.inputs, **changes}
        return compiled(self.cfg, loss, chunk)(inputs.pop("params"), inputs)


@functools.cache
def compiled(cfg, loss, chunk):
    """Shared by the tests: most of their time is compilation."""

    def of_params(params, rest):
        return losses.drafter_loss(params, **rest, cfg=cfg, loss=loss, chunk=chunk)

    return jax.jit(jax.value_and_grad(of_params, has_aux=True))


@pytest.fixture
def case() -> Case:
    cfg, rng, (b, s) = drafter_config(), np.random.default_rng(0), (2, 24)
    loss_mask = np.ones((b, s), bool)
    loss_mask[0, 15] = False
    positions = np.array([[3, 14, 9, 20, 0, 0], [5, 2, 11, 1, 7, 0]], np.int32)
    valid = np.array([[1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]], bool)
    inputs = {
        "params": random_params(dspark.specs(cfg), 1),
        "target": random_params(dense.specs(TARGET), 2),
        "features": rng.normal(size=(b, s, 32)).astype(np.float32),
        "final_hidden": rng.normal(size=(b, s, 16)).astype(np.float32),
        "tokens": rng.integers(0, 60, (b, s)).astype(np.int32),
        "loss_mask": loss_mask,
        "positions": positions,
        "valid": valid,
    }
    return Case(cfg, inputs)


def assert_same(a, b, *, rtol=2e-5, atol=1e-6):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


# --- Against the reference --------------------------------------------------------------------


@pytest.fixture(scope="module", params=GOLDEN)
def reference(request, golden):
    folder = golden / f"dspark_{request.param}"
    _, target = hf.load_target(golden / f"{request.param.split('_')[0]}_target")
    cfg, params = hf.load_drafter(folder)
    tensors = load_file(folder / "expected_train.safetensors")
    expected = json.loads((folder / "expected_train.json").read_text())
    if "loss" in expected:  # of one decay
        expected = {"decay_4": expected}
    return cfg, params, target, tensors, expected


def test_masks_logits_and_confidences_of_the_reference(reference):
    cfg, params, target, t, _ = reference
    keep = t["block_keep_mask"].astype(bool)
    slots = anchors.slot_labels(
        t["input_ids"], t["loss_mask"], t["anchor_positions"], keep, cfg.block_size
    )
    counted = t["eval_mask"].astype(bool)
    np.testing.assert_array_equal(slots.counted, counted)
    np.testing.assert_array_equal(np.asarray(slots.labels)[counted], t["target_ids"][counted])

    angles = rope_angles(jnp.arange(t["input_ids"].shape[1])[None], cfg.rope, cfg.head_dim)
    context = dspark.context_key_values(
        params, dspark.context_weights(params), t["target_hidden_states"], angles, cfg
    )
    found = jax.jit(losses.block_outputs, static_argnums=7)(
        params, target, t["target_last_hidden_states"], slots, t["anchor_positions"], None,
        context, cfg,
    )  # fmt: skip
    for ours, theirs in (
        (found.draft, t["draft_logits"]),
        (found.teacher, t["aligned_target_logits"]),
        (found.confidence, t.get("confidence_logits")),
    ):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            error = np.abs(np.asarray(ours) - theirs)[counted].max()
            assert error < 5e-4 * (1 + np.abs(theirs[counted]).max())


@pytest.mark.parametrize(
    ("decay", "chunk"), [("decay_4", 8), pytest.param("decay_7", 3, marks=pytest.mark.slow)]
)
def test_losses_and_gradients_of_the_reference(reference, decay, chunk):
    cfg, params, target, t, expected = reference
    expected = expected.get(decay, expected["decay_4"])
    loss = LossConfig(*expected["alphas_ce_l1_conf"], expected["loss_decay_gamma"])
    fn = functools.partial(losses.drafter_loss, cfg=cfg, loss=loss, chunk=chunk)
    (value, found), grads = jax.jit(jax.value_and_grad(fn, has_aux=True))(
        params, target, t["target_hidden_states"], t["target_last_hidden_states"], t["input_ids"],
        t["loss_mask"], t["anchor_positions"], t["block_keep_mask"].astype(bool),
    )  # fmt: skip
    terms = {"loss": value, "ce_loss": found["ce_loss"], "l1_loss": found["tv_loss"]}
    if cfg.confidence_head:
        terms["confidence_loss"] = found["confidence_loss"]
    for name, ours in terms.items():
        np.testing.assert_allclose(ours, expected[name], rtol=1e-4, err_msg=name)
    tensors = layouts.export(layouts.drafter_layout(cfg), grads)
    norms = expected["grad_l2_norm"]
    frozen = [name for name in tensors if name.endswith("layer_scalar")]
    assert len(frozen) == (cfg.num_layers if cfg.gemma else 0)
    assert [tensors.pop(name) for name in frozen] == [0] * len(frozen)
    assert tensors.keys() == norms.keys()
    for name, theirs in norms.items():
        np.testing.assert_allclose(np.linalg.norm(tensors[name]), theirs, rtol=1e-3, err_msg=name)


# --- By hand and by loop ----------------------------------------------------------------------


def test_sums_against_a_loop():
    rng, (b, a, k, v) = np.random.default_rng(1), (2, 3, 4, 11)
    draft, teacher = rng.normal(size=(2, b, a, k, v)).astype(np.float32) * 2
    z = rng.normal(size=(b, a, k)).astype(np.float32) * 3
    labels = rng.integers(0, v, (b, a, k))
    counted = np.cumprod(rng.random((b, a, k)) < 0.85, axis=-1).astype(bool)
    counted[0, 0] = True
    slots = Slots(jnp.array(labels), jnp.array(labels), jnp.array(counted))
    loss = LossConfig(0.3, 0.5, 0.7, 2.5)
    sums = losses.slot_sums(Outputs(*map(jnp.array, (draft, teacher, z))), slots, loss)

    def softmax(x):
        e = np.exp(x.astype(np.float64) - x.max())
        return e / e.sum()

    want = dict.fromkeys(("weight", "ce", "tv", "bce", "blocks"), 0.0)
    by_slot = {n: np.zeros(k) for n in ("slots", "acceptance", "error")}
    survived, gaps = np.zeros(k), np.zeros((k, losses.BINS))
    for i, j in np.ndindex(b, a):
        survival = np.ones(k)
        for n in range(k):
            if not counted[i, j, n]:
                break
            p, q = softmax(draft[i, j, n]), softmax(teacher[i, j, n])
            w, tv, c = np.exp(-n / 2.5), np.abs(p - q).sum(), 1 / (1 + np.exp(-z[i, j, n]))
            accept = 1 - tv / 2
            want["weight"] += w
            want["ce"] += -w * np.log(p[labels[i, j, n]])
            want["tv"] += w * tv
            want["bce"] += -w * (accept * np.log(c) + (1 - accept) * np.log(1 - c))
            for name, x in zip(by_slot, (1, accept, abs(c - accept)), strict=True):
                by_slot[name][n] += x
            gaps[n, int(c * losses.BINS)] += c - accept
            survival[n:] *= accept
        else:
            want["blocks"] += 1
            survived += survival
    for name, value in {**want, **by_slot, "gaps": gaps, "survival": survived}.items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=1e-5, atol=1e-6, err_msg=name)
    total = 0.3 * want["ce"] + 0.5 * want["tv"] + 0.7 * want["bce"]
    cfg = drafter_config()
    found = losses.metrics(sums, cfg, loss)
    np.testing.assert_allclose(found["loss"], total / want["weight"], rtol=1e-5)
    length = 1 + survived.sum() / want["blocks"]
    np.testing.assert_allclose(found["expected_accepted_length"], length, rtol=1e-5)
    np.testing.assert_allclose(found["survival_3"], survived[2] / want["blocks"], rtol=1e-5)
    ece = abs(gaps.sum(0)).sum() / by_slot["slots"].sum()
    np.testing.assert_allclose(found["confidence_ece"], ece, rtol=1e-5)


def test_equal_distributions_are_always_accepted():
    logits = jnp.array(np.random.default_rng(0).normal(size=(1, 1, 2, 5)), jnp.float32)
    slots = Slots(*[jnp.zeros((1, 1, 2), int)] * 2, jnp.ones((1, 1, 2), bool))
    sums = losses.slot_sums(Outputs(logits, logits, None), slots, LossConfig(1, 0, 0))
    np.testing.assert_allclose(sums.acceptance, [1, 1], rtol=1e-6)
    np.testing.assert_allclose(sums.survival, [1, 1], rtol=1e-6)


def test_confidence_loss_is_finite_for_extreme_logits():
    slots = Slots(*[jnp.zeros((1, 1, 1), int)] * 2, jnp.ones((1, 1, 1), bool))
    logits = jnp.zeros((1, 1, 1, 4))
    for z in (-1e4, 1e4):
        sums = losses.slot_sums(
            Outputs(logits, logits, jnp.full((1, 1, 1), z)), slots, LossConfig()
        )
        np.testing.assert_allclose(sums.bce, max(-z, 0.0))


# --- Properties -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        pytest.param("none", marks=pytest.mark.slow),
        "vanilla",
        pytest.param("gated", marks=pytest.mark.slow),
        pytest.param("rnn", marks=pytest.mark.slow),
    ],
)
def test_chunks_do_not_change_anything(head):
    rank = {} if head != "none" else {"markov_rank": 0, "confidence_with_markov": False}
    cfg = drafter_config(head=head, **rank)
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 60, (2, 16)).astype(np.int32)
    positions, valid = anchors.sample_anchors(jax.random.key(0), jnp.ones((2, 16)), 6)
    case = Case(
        cfg,
        {
            "params": random_params(dspark.specs(cfg), 1),
            "target": random_params(dense.specs(TARGET), 2),
            "features": rng.normal(size=(2, 16, 32)).astype(np.float32),
            "final_hidden": rng.normal(size=(2, 16, 16)).astype(np.float32),
            "tokens": tokens,
            "loss_mask": np.ones((2, 16), bool),
            "positions": positions,
            "valid": valid,
        },
    )
    # 4 does not divide the 6 anchors.
    assert_same(case.run(chunk=4), case.run(chunk=6))


def test_dummy_anchors_add_exactly_nothing(case):
    """Whatever a dummy holds, and however many there are."""
    plain = case.run()
    positions = np.where(case.inputs["valid"], case.inputs["positions"], 17)
    moved = case.run(positions=positions)
    jax.tree.map(np.testing.assert_array_equal, plain, moved)
    more = {
        "positions": np.pad(case.inputs["positions"], ((0, 0), (0, 6))),
        "valid": np.pad(case.inputs["valid"], ((0, 0), (0, 6))),
    }
    assert_same(case.run(**more), plain)


def test_a_block_does_not_see_states_at_or_after_its_anchor(case):
    one = np.zeros_like(case.inputs["valid"])
    one[1, 0] = True  # anchored at 5
    length = np.arange(24)

    def loss(features):
        return losses.drafter_loss(
            **{**case.inputs, "features": features, "valid": one},
            cfg=case.cfg, loss=LossConfig(), chunk=6,
        )[0]  # fmt: skip

    grad = np.abs(jax.jit(jax.grad(loss))(case.inputs["features"])).max(-1)
    assert (grad[1, :5] > 0).all()
    assert not grad[1, 5:].any()
    assert not grad[0].any()
    rng = np.random.default_rng(5)
    other = np.where(length[:, None] < 5, case.inputs["features"], rng.normal(size=(2, 24, 32)))
    other[0] = 7.0
    value = jax.jit(loss)
    np.testing.assert_array_equal(value(case.inputs["features"]), value(other.astype(np.float32)))


def test_unused_rows_may_hold_nan(case):
    """Features at or after the last anchor, final states that no counted slot predicts from."""
    features, final = (case.inputs[n].copy() for n in ("features", "final_hidden"))
    slots = anchors.slot_labels(
        *(jnp.array(case.inputs[n]) for n in ("tokens", "loss_mask", "positions", "valid")), 4
    )
    needed = np.zeros((2, 24), bool)
    for b, i, k in zip(*np.nonzero(np.asarray(slots.counted)), strict=True):
        needed[b, case.inputs["positions"][b, i] + k] = True
    assert not needed.all()
    clean = case.run()
    final[~needed] = np.nan
    features[0, 20:] = np.nan
    features[1, 11:] = np.nan
    dirty = case.run(features=features, final_hidden=final)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(dirty))


def test_nan_logits_of_uncounted_slots_change_nothing():
    rng = np.random.default_rng(2)
    draft, teacher = rng.normal(size=(2, 1, 2, 3, 5)).astype(np.float32)
    z = rng.normal(size=(1, 2, 3)).astype(np.float32)
    counted = np.array([[[1, 1, 0], [0, 0, 0]]], bool)
    slots = Slots(*[jnp.zeros((1, 2, 3), int)] * 2, jnp.array(counted))

    def loss(draft, teacher, z):
        return losses.objective(
            losses.slot_sums(Outputs(draft, teacher, z), slots, LossConfig()), LossConfig()
        )

    clean = jax.value_and_grad(loss, argnums=(0, 2))(draft, teacher, z)
    for x in (draft, teacher, z):
        x[~counted] = np.nan
    dirty = jax.value_and_grad(loss, argnums=(0, 2))(draft, teacher, z)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_a_batch_without_anchors_has_zero_loss(case):
    (value, found), grads = case.run(valid=np.zeros_like(case.inputs["valid"]))
    assert value == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((found, grads)))
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_no_gradient_into_the_confidence_label(case):
    """The confidence loss alone moves the confidence head and what feeds it, by c alone."""
    (_, _), grads = case.run(loss=LossConfig(0, 0, 1, 4))
    assert np.abs(grads.confidence.weight).max() > 0
    assert not np.asarray(grads.head.w2).any()  # only the label depends on W2


def test_teacher_is_the_final_state_one_place_before_the_label(case):
    """Perturbing the state at a + k - 1 changes the losses of slot k alone."""
    one = np.zeros_like(case.inputs["valid"])
    one[1, 0] = True  # anchored at 5
    (_, before), _ = case.run(valid=one)
    final = case.inputs["final_hidden"].copy()
    final[1, 5 + 2] += 1.0
    (_, after), _ = case.run(valid=one, final_hidden=final)
    changed = [before[f"acceptance_{k}"] != after[f"acceptance_{k}"] for k in (1, 2, 3, 4)]
    assert changed == [False, False, True, False]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_anchors(case):
    def temporaries(num_anchors: int) -> int:
        def loss(params, rest):
            mask = rest["loss_mask"]
            drawn = anchors.sample_anchors(jax.random.key(0), mask, num_anchors)
            return losses.drafter_loss(
                params, **rest, positions=drawn[0], valid=drawn[1],
                cfg=case.cfg, loss=LossConfig(), chunk=8,
            )[0]  # fmt: skip

        rest = {k: v for k, v in case.inputs.items() if k not in ("params", "positions", "valid")}
        rest = {k: np.repeat(v, 8, 0) if isinstance(v, np.ndarray) else v for k, v in rest.items()}
        lowered = jax.jit(jax.grad(loss)).lower(case.inputs["params"], rest)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(16), temporaries(128)
    blocks = 16 * (128 - 16)
    assert many - few < 32 * blocks  # a few numbers an anchor; a block's logits alone are 976 bytes


@pytest.mark.slow
def test_reduced_precision_keeps_losses_in_float32(case):
    (value, _), _ = case.run()
    (low, _), grads = case.run(
        **{n: case.inputs[n].astype(jnp.bfloat16) for n in ("features", "final_hidden")},
        target=jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.inputs["target"]),
    )
    assert low.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype("float32")}
    np.testing.assert_allclose(low, value, rtol=0.05)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss_decay": 0.0}, "loss_decay"),
        ({"loss_decay": -1.0}, "loss_decay"),
        ({"loss_decay": float("nan")}, "loss_decay"),
        ({"ce_weight": -0.1}, "ce_weight"),
        ({"ce_weight": 0, "tv_weight": 0, "confidence_weight": 0}, "tv_weight"),
    ],
)
def test_impossible_settings(settings, named):
    with pytest.raises(InputError, match=named):
        LossConfig(**settings)


def test_soft_targets_by_hand():
    """The cross-entropy with the target's distribution, of slots that count alone."""
    rng = np.random.default_rng(0)
    draft, teacher = rng.normal(size=(2, 2, 3, 2, 7)).astype(np.float32)
    counted = np.array([[[1, 1], [1, 0], [0, 0]], [[1, 0], [1, 1], [1, 1]]], bool)
    slots = anchors.Slots(np.zeros((2, 3, 2), int), np.zeros((2, 3, 2), int), counted)
    cfg = LossConfig(1, 0, 0, loss_decay=2.0, soft_targets=True)
    found = losses.slot_sums(losses.Outputs(draft, teacher, None), slots, cfg)
    expected = 0.0
    for b, a, k in zip(*np.nonzero(counted), strict=True):
        p = np.exp(teacher[b, a, k]) / np.exp(teacher[b, a, k]).sum()
        log_q = draft[b, a, k] - np.log(np.exp(draft[b, a, k]).sum())
        expected -= np.exp(-k / 2) * p @ log_q
    np.testing.assert_allclose(found.ce, expected, rtol=1e-5)
    np.testing.assert_allclose(found.weight, 5 + 3 * np.exp(-0.5), rtol=1e-6)
