"""config.json of a drafter as several engines want it. The tensors are the same in all.

`deepspec`     what the released checkpoints say: everything side by side
`speculators`  what vLLM's speculators say: the layers in a part of their own, and taps that count
               from 1, as hidden states of Hugging Face models do
`sglang`       DeepSpec's, with what SGLang reads of a drafter in `dflash_config` once more

Each is translated to and from DeepSpec's, which `model_config` reads and writes.
"""

from __future__ import annotations

from typing import Any, Literal

from dspark_jax.config import require

Layout = Literal["deepspec", "speculators", "sglang"]

QWEN3, QWEN3_DRAFTER = "qwen3", "Qwen3DSparkModel"
QWEN3_VERIFIERS = ("Qwen3ForCausalLM", "LlamaForCausalLM")
"""Targets whose drafters have layers of Qwen3."""

HEAD_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
DRAFT_KEYS = ("block_size", "mask_token_id", "num_target_layers", *HEAD_KEYS)
INNER_KEYS = ("target_layer_ids", *DRAFT_KEYS)
"""What `sglang` has in `dflash_config`."""
OUTER_KEYS = (*DRAFT_KEYS, "num_anchors", "tie_word_embeddings", "dtype")
"""What `speculators` keeps beside the layers; its readers let pass what they do not know."""


def from_deepspec(
    config: dict[str, Any],
    layout: Layout,
    *,
    target_architecture: str,
    target_name: str | None = None,
) -> dict[str, Any]:
    """DeepSpec's config.json in another layout.

    Args:
      config: of a DSpark drafter, as `config_json.drafter_json` makes it.
      target_architecture: class of the target, as its own config.json has it.
      target_name: folder or repository id of the target, from where vLLM may load it.
    Raises:
      InputError: the engines that read this layout know no such drafter.
    """
    match layout:
        case "deepspec":
            return config
        case "speculators":
            return _speculators(config, target_architecture, target_name)
        case "sglang":
            require(
                config.get("markov_rank", 0) > 0,
                "layout='sglang': expected a drafter with a sequential head",
            )
            inner = {name: config[name] for name in INNER_KEYS if name in config}
            return {**config, "dflash_config": {"projector_type": "dspark", **inner}}


def _speculators(
    config: dict[str, Any], target_architecture: str, target_name: str | None
) -> dict[str, Any]:
    said = config["architectures"]
    require(
        said == [QWEN3_DRAFTER],
        f"layout='speculators': expected a {QWEN3_DRAFTER}, this is a {said[0]}: write it as"
        " 'deepspec'",
    )
    outer = {name: config[name] for name in OUTER_KEYS if name in config}
    apart = {"architectures", "target_layer_ids", "draft_vocab_size", *outer}
    size = config["block_size"]
    return {
        **outer,
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": size}],
            "verifier": {"name_or_path": target_name, "architectures": [target_architecture]},
        },
        "transformer_layer_config": {k: v for k, v in config.items() if k not in apart},
        "draft_vocab_size": config.get("draft_vocab_size", config["vocab_size"]),
        "target_hidden_size": config["hidden_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config["target_layer_ids"]],
        "sample_from_anchor": True,
    }


def to_deepspec(values: dict[str, Any], where: str) -> dict[str, Any]:
    """config.json in any of the layouts, as DeepSpec has it.

    Args:
      where: the file, for what is said of errors.
    Raises:
      InputError: it contradicts itself, or describes another kind of drafter.
    """
    if "speculators_model_type" in values:
        return _from_speculators(values, where)
    if "dflash_config" in values:
        return _from_sglang(values, where)
    return values


def _from_speculators(values: dict[str, Any], where: str) -> dict[str, Any]:
    kind = values["speculators_model_type"]
    require(kind == "dspark", f"{where}: speculators_model_type={kind!r}, expected 'dspark'")
    layers = values.get("transformer_layer_config", {})
    require(
        isinstance(layers, dict) and layers.get("model_type") == QWEN3,
        f"{where}: transformer_layer_config: expected layers with model_type {QWEN3!r}",
    )
    anchored = values.get("sample_from_anchor", True)
    require(
        anchored is True,
        f"{where}: sample_from_anchor={anchored!r}, expected true: the anchor's slot drafts too",
    )
    for name in ("markov_rank", "enable_confidence_head", "num_target_layers"):
        require(values.get(name) is not None, f"{where}: {name} is missing")
    width, found = layers.get("hidden_size"), values.get("target_hidden_size")
    require(
        found in (None, width),
        f"{where}: target_hidden_size={found!r}, expected {width}, as of the layers",
    )
    _check_proposals(values, layers, f"{where}: speculators_config")
    drafted = values.get("draft_vocab_size")
    pruned = drafted not in (None, layers.get("vocab_size"))
    taps = values.get("aux_hidden_state_layer_ids", [])
    require(
        isinstance(taps, list) and all(type(i) is int for i in taps),
        f"{where}: aux_hidden_state_layer_ids={taps!r}, expected a list of whole numbers",
    )
    return {
        **layers,
        **{name: values[name] for name in OUTER_KEYS if name in values},
        "architectures": [QWEN3_DRAFTER],
        "target_layer_ids": [i - 1 for i in taps],
        **({"draft_vocab_size": drafted} if pruned else {}),
    }


def _check_proposals(values: dict[str, Any], layers: dict[str, Any], where: str) -> None:
    """Raises `InputError` where `speculators_config`, if it is there, contradicts the rest.

    It may propose fewer tokens than a block has.
    """
    said = values.get("speculators_config")
    if said is None:
        return
    require(isinstance(said, dict), f"{where}={said!r}, expected dict")
    algorithm = said.get("algorithm", "dspark")
    require(algorithm == "dspark", f"{where}: algorithm={algorithm!r}, expected 'dspark'")
    methods, verifier = said.get("proposal_methods", []), said.get("verifier", {})
    require(
        isinstance(methods, list) and all(isinstance(m, dict) for m in methods),
        f"{where}: proposal_methods={methods!r}, expected a list of dicts",
    )
    kinds = [m.get("proposal_type") for m in methods]
    default = said.get("default_proposal_method")
    require(
        default is None or default in kinds,
        f"{where}: default_proposal_method={default!r}, expected one of the proposal_methods,"
        f" {kinds}",
    )
    size = values.get("block_size")
    for tokens in (m.get("speculative_tokens", size) for m in methods):
        require(
            type(size) is not int or (type(tokens) is int and 1 <= tokens <= size),
            f"{where}: speculative_tokens={tokens!r}, expected a number in 1..{size}, as of"
            " block_size",
        )
    require(isinstance(verifier, dict), f"{where}: verifier={verifier!r}, expected dict")
    names = verifier.get("architectures") or [QWEN3_VERIFIERS[0]]
    require(
        isinstance(names, list) and all(name in QWEN3_VERIFIERS for name in names),
        f"{where}: verifier: architectures={names!r}, expected {' or '.join(QWEN3_VERIFIERS)}, as"
        f" the layers are of {QWEN3!r}",
    )
    for name in ("hidden_size", "vocab_size"):
        width, found = layers.get(name), verifier.get(name)
        require(
            found in (None, width),
            f"{where}: verifier: {name}={found!r}, expected {width}, as of the layers",
        )


def _from_sglang(values: dict[str, Any], where: str) -> dict[str, Any]:
    inner = values["dflash_config"]
    require(isinstance(inner, dict), f"{where}: dflash_config={inner!r}, expected dict")
    kind = inner.get("projector_type", "dspark")
    require(kind == "dspark", f"{where}: projector_type={kind!r}, expected 'dspark'")
    shared = {name: inner[name] for name in INNER_KEYS if name in inner}
    for name, value in shared.items():
        found = values.get(name, value)
        require(
            found == value,
            f"{where}: {name} is {found!r}, and {value!r} in dflash_config: expected one value",
        )
    rest = {k: v for k, v in values.items() if k != "dflash_config"} | shared
    if values.get("architectures") == ["DSparkDraftModel"] and values.get("model_type") == QWEN3:
        rest["architectures"] = [QWEN3_DRAFTER]
    return rest
