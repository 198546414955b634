"""Sequential heads: the logits B_k that make slot k depend on the tokens drafted before it.

    p_k(. | x_0, x_<k) = softmax(U_k + B_k)                            (paper, section 3.2)

`vanilla`  B_k = W1[x_{k-1}] W2
`gated`    g = sigmoid([h_k ; W1[x_{k-1}]] W_g + b);  B_k = (g * W1[x_{k-1}]) W2
`rnn`      [gate, cand, out] = [s ; W1[x_{k-1}] ; h_k] W + b;
           s' = sig(gate) s + (1 - sig(gate)) tanh(cand);  B_k = tanh(out) W2;  s_0 = 0 a block

Everything that depends on h alone is computed for all slots at once (`prepare`); `step` is what is
left to do from one token to the next, and `teacher_forced` does all slots of known tokens.
Letters: K slots, D width, r rank, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import DrafterConfig
from dspark_jax.params import spec

zeros = jax.nn.initializers.zeros


@struct.dataclass
class Markov:
    """The vanilla head, and the token embedding and output that all heads have."""

    w1: jax.Array  # [V, r] embedding of the token before
    w2: jax.Array  # [r, V], or [r, Vd] of a pruned draft vocabulary

    def prepare(self, hidden: jax.Array) -> jax.Array:
        """Per-slot part of `hidden` [..., K, D]; the vanilla head has none."""
        return jnp.zeros((*hidden.shape[:-1], 0), hidden.dtype)

    def step(self, state: jax.Array, previous: jax.Array, slot: jax.Array):
        """(state [..., r], token before [...], prepared slot) -> (state, low-rank code)."""
        return state, self.w1[previous]


@struct.dataclass
class Gated(Markov):
    """The vanilla head, gated by the slot's hidden state."""

    gate: jax.Array  # [D + r, r] rows: h, token
    gate_bias: jax.Array  # [r]

    def prepare(self, hidden):
        return hidden @ self.gate[: hidden.shape[-1]] + self.gate_bias

    def step(self, state, previous, slot):
        token = self.w1[previous]
        return state, jax.nn.sigmoid(slot + token @ self.gate[-token.shape[-1] :]) * token


@struct.dataclass
class Rnn(Markov):
    """A gated recurrent cell; its three outputs [gate, cand, out] are one matrix."""

    joint: jax.Array  # [2r + D, 3r] rows: state, token, h
    joint_bias: jax.Array  # [3r]

    def prepare(self, hidden):
        return hidden @ self.joint[-hidden.shape[-1] :] + self.joint_bias

    def step(self, state, previous, slot):
        inputs = jnp.concatenate([state, self.w1[previous]], axis=-1)
        joint = slot + inputs @ self.joint[: inputs.shape[-1]]
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(gate)
        return keep * state + (1 - keep) * jnp.tanh(candidate), jnp.tanh(out)


def specs(cfg: DrafterConfig) -> Markov | None:
    """Parameter specs of the configured head, None for `head="none"`."""
    v, r, d = cfg.vocab_size, cfg.markov_rank, cfg.hidden_size
    token = {
        "w1": spec((v, r), ("vocab", "rank")),
        "w2": spec((r, cfg.output_size), ("rank", "vocab")),
    }
    match cfg.head:
        case "vanilla":
            return Markov(**token)
        case "gated":
            return Gated(
                **token,
                gate=spec((d + r, r), (None, None)),
                gate_bias=spec((r,), (None,), zeros),
            )
        case "rnn":
            return Rnn(
                **token,
                joint=spec((2 * r + d, 3 * r), (None, None)),
                joint_bias=spec((3 * r,), (None,), zeros),
            )
        case "none":
            return None


def initial_state(head: Markov | None, hidden: jax.Array) -> jax.Array:
    """s_0 for the blocks of `hidden` [..., K, D]: zeros [..., r]."""
    rank = head.w1.shape[1] if head is not None else 0
    return jnp.zeros((*hidden.shape[:-2], rank), hidden.dtype)


def teacher_forced(head: Markov, hidden: jax.Array, previous: jax.Array) -> jax.Array:
    """B of all slots when the tokens before them are known.

    Args:
      head: parameters of any sequential head.
      hidden: [..., K, D] final hidden states of the slots.
      previous: [..., K] tokens x_0 .. x_{K-1}.
    Returns:
      [..., K, V].
    """
    slots = head.prepare(hidden)
    state = initial_state(head, hidden)
    if isinstance(head, Rnn):

        def step(state, inputs):
            return head.step(state, *inputs)

        by_slot = (jnp.moveaxis(previous, -1, 0), jnp.moveaxis(slots, -2, 0))
        codes = jnp.moveaxis(jax.lax.scan(step, state, by_slot)[1], 0, -2)
    else:
        codes = head.step(state, previous, slots)[1]
    return codes @ head.w2
