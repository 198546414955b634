"""Llama models in GGUF files, the format of llama.cpp: sizes and weights.

Weights are dequantised by the gguf package, tensor by tensor, and get the names that they have in a
Hugging Face folder, so that both are loaded alike.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.config import InputError, Rope, TargetConfig, require

if TYPE_CHECKING:
    from gguf import ReaderField, ReaderTensor

ARCHITECTURE = "llama"
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Names of the tensors outside the layers, in GGUF and in a Hugging Face folder."""
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The same of those of a layer."""
STOPS = ("eos", "eot", "eom")
"""Ends of a sequence, a turn and a message: an answer stops at each."""


def is_gguf(path: Path) -> bool:
    """Whether a name is that of a GGUF file rather than of a folder."""
    return path.suffix == ".gguf"


def open_file(path: Path) -> GgufFile:
    """Opens a GGUF file; its weights stay on the disk.

    Raises:
      InputError: no such file, a part of one, another architecture, or tensors that no Llama has.
    """
    require(path.is_file(), f"{path}: no such file")
    return _open(path, path.stat().st_mtime_ns)


# A command asks for sizes, weights and tokenizer in turn, and parsing a vocabulary takes seconds.
@functools.lru_cache(maxsize=1)
def _open(path: Path, _modified: int) -> GgufFile:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise InputError(f"{path}: to read GGUF files install dspark_jax[gguf]") from error
    try:
        found = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise InputError(f"{path}: not a whole GGUF file ({error})") from error
    tensors = {_hf_name(t.name): t for t in found.tensors}
    file = GgufFile(path, found.fields, tensors, header=bytes(found.data[: found.data_offset]))
    kind = file.get("general.architecture", str)
    require(
        kind == ARCHITECTURE,
        f"{path}: architecture {kind!r} is not known, expected {ARCHITECTURE!r}",
    )
    # Scaled RoPE, biases and experts are tensors: a model without its own is another model.
    unknown = sorted(t.name for name, t in tensors.items() if name == t.name)
    require(not unknown, f"{path}: not supported: tensors {', '.join(unknown)}")
    return file


def _hf_name(name: str) -> str:
    """Name of a tensor in a Hugging Face folder; its own where that is not known."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in LAYER_TENSORS:
        return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"
    return TENSORS.get(name, name)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open GGUF file."""

    path: Path
    fields: Mapping[str, ReaderField]
    tensors: Mapping[str, ReaderTensor]
    """By their names in a Hugging Face folder."""
    header: bytes
    """Everything in front of the weights."""

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """A value of the metadata; what is missing or of another kind is an `InputError`."""
        field = self.fields.get(key)
        require(field is not None or default is not ..., f"{self.path}: {key} is missing")
        try:
            value = default if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: {key} is not UTF-8 ({error})") from error
        require(
            isinstance(value, kind) or value is default,
            f"{self.path}: {key}={value!r}, expected {kind.__name__}",
        )
        return value

    def _size(self, name: str, default: Any = ...) -> int:
        return self.get(f"{ARCHITECTURE}.{name}", int, default)

    @property
    def head_dim(self) -> int:
        """H; without a key of its own the width is divided among the heads."""
        heads = max(1, self._size("attention.head_count"))
        return self._size("attention.key_length", self._size("embedding_length") // heads)

    def config(self) -> TargetConfig:
        """Sizes of the target; raises `InputError` for what is missing or not supported."""
        for name in ("attention.value_length", "rope.dimension_count"):
            found = self._size(name, self.head_dim)
            require(
                found == self.head_dim,
                f"{self.path}: {ARCHITECTURE}.{name}={found}, expected {self.head_dim} as of keys",
            )
        scaling = self.get(f"{ARCHITECTURE}.rope.scaling.type", str, "none")
        require(
            scaling == "none",
            f"{self.path}: {ARCHITECTURE}.rope.scaling.type={scaling!r}, expected 'none'",
        )
        theta = self.get(f"{ARCHITECTURE}.rope.freq_base", float, 10_000.0)
        norm_eps = self.get(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float)
        stops = [self.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in STOPS]
        try:
            return TargetConfig(
                vocab_size=len(self.get("tokenizer.ggml.tokens", list)),
                hidden_size=self._size("embedding_length"),
                intermediate_size=self._size("feed_forward_length"),
                num_layers=self._size("block_count"),
                num_heads=self._size("attention.head_count"),
                num_kv_heads=self._size(
                    "attention.head_count_kv", self._size("attention.head_count")
                ),
                head_dim=self.head_dim,
                rope=Rope(theta=_decimal(theta)),
                norm_eps=_decimal(norm_eps),
                model_type="llama",
                tie_embeddings="lm_head.weight" not in self,
                max_position=self._size("context_length"),
                stop_token_ids=tuple(dict.fromkeys(i for i in stops if i is not None)),
            )
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor in float32, which must have this shape."""
        from gguf import dequantize

        require(name in self, f"{self.path}: tensor {name} is missing")
        tensor = self.tensors[name]
        found = tuple(int(n) for n in reversed(tensor.shape))
        require(
            found == shape,
            f"{self.path}: tensor {tensor.name} has shape {list(found)}, expected {list(shape)}",
        )
        try:
            value = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(f"{self.path}: tensor {tensor.name}: {error}") from error
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        return _to_halves(value, self.head_dim) if rotated else value


def _decimal(value: float) -> float:
    """The shortest decimal of a number that was stored in 32 bits: 1e-05, not 9.99999975e-06."""
    return float(str(np.float32(value)))


def _to_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k [heads * H, D], ordered for rotation by halves.

    Llama files hold them for rotation of neighbours: rows 2i and 2i + 1 of a head are what rows i
    and i + H/2 are here.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
