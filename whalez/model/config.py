"""What a Kimi Linear `config.json` says, checked once, with the published keys turned into plain numbers.

Rule 1: every key that changes the mathematics is read or refused here by name, so that a checkpoint of a feature
whalez lacks never loads as something else.   Rule 2: nothing here looks at tensors; `checkpoint.py` compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from whalez.errors import CheckpointError

CONFIG_FILE = "config.json"
ARCHITECTURE = "KimiLinearForCausalLM"

CONV_WIDTH = 4

# The reference builds the norm of the MLA latent with its class default and not with rms_norm_eps. No published key
# carries it, so `latent_norm_eps` is read as an optional key of our own.
LATENT_NORM_EPS = 1e-6

# A number above its limit is a damaged file; without limits such a file would cost minutes instead of an error.
_LIMIT = 1 << 24
_LAYERS_LIMIT = 4096
_EXPERTS_LIMIT = 1 << 16

# Keys that switch on mathematics whalez does not have, with the values that leave it off. A missing key leaves it off.
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "q_lora_rank": (None,),
    "rope_scaling": (None,),
    "tie_word_embeddings": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc", None),
    "num_nextn_predict_layers": (0, None),
    "quantization_config": (None,),
    "routed_expert_hidden_size": (None,),
    "latent_moe_use_norm": (False, None),
    "attn_res_block_size": (None,),
    "mla_use_output_gate": (False, None),
}
_LINEAR_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "use_full_rank_gate": (False, None),
    "gate_lower_bound": (None,),
    "num_v_heads": (None,),
    "allow_neg_eigval": (False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig:
    """The numbers of one Kimi Linear model. Layer numbers count from 0, unlike in the file."""

    vocab_size: int
    hidden_size: int  # D
    num_hidden_layers: int
    rms_norm_eps: float  # every norm but the latent one
    latent_norm_eps: float  # kv_a_layernorm

    kda_layers: tuple[int, ...]  # with mla_layers: every layer exactly once
    mla_layers: tuple[int, ...]
    kda_heads: int  # H of the KDA layers; key and value heads are the same
    kda_head_dim: int  # K = V, and the rank of both low-rank gates
    conv_width: int  # W; the tail kept between spans is W - 1 rows

    num_attention_heads: int  # H of the MLA layers
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # channels shared by all heads on the key side; never rotated
    v_head_dim: int
    kv_lora_rank: int  # R

    intermediate_size: int  # width of a dense layer's MLP
    moe_intermediate_size: int  # width of one expert
    num_experts: int  # E
    num_experts_per_token: int  # top-k
    num_shared_experts: int  # stored as one MLP of this many times moe_intermediate_size; 0 means none
    first_k_dense_replace: int  # so many first layers are dense
    moe_layer_freq: int
    routed_scaling_factor: float
    moe_renormalize: bool
    num_expert_group: int
    topk_group: int

    eos_token_ids: tuple[int, ...]  # generation stops on any of them; may be empty
    bos_token_id: int | None
    max_position_embeddings: int  # tokens

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe(layer))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense MLP."""
        return tuple(layer for layer in range(self.num_hidden_layers) if not self.is_moe(layer))

    @property
    def kda_inner(self) -> int:
        """Width of q, k and v each in a KDA layer: heads times head dim."""
        return self.kda_heads * self.kda_head_dim

    @property
    def latent_width(self) -> int:
        """Values that one token leaves in an MLA layer's cache: normed latent, then the shared key channels."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one MLA query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_scale(self) -> float:
        """What multiplies a KDA query after its normalisation."""
        return float(self.kda_head_dim**-0.5)

    @property
    def mla_scale(self) -> float:
        """What multiplies an MLA score."""
        return float(self.qk_head_dim**-0.5)

    @property
    def shared_size(self) -> int:
        """Width of the shared experts' one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    def is_kda(self, layer: int) -> bool:
        """Whether `layer` is a KDA layer; otherwise it is an MLA layer."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has routed experts; otherwise its MLP is dense."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def from_dir(cls, directory: str | Path) -> KimiLinearConfig:
        """Read `directory`/config.json.

        Raises: CheckpointError naming the file and, where one is at fault, the key.
        """
        path = Path(directory) / CONFIG_FILE
        return cls.from_json(read_json(path), str(path))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = CONFIG_FILE) -> KimiLinearConfig:
        """Check the published keys in `data`; `where` is the file's name in error messages.

        Raises: CheckpointError naming `where` and the key.
        """
        keys = _Keys(data, where)
        keys.check_architecture()
        keys.check_off(_OFF_VALUES)
        linear = keys.section("linear_attn_config")
        linear.check_off(_LINEAR_OFF_VALUES)

        layers_count = keys.integer("num_hidden_layers", maximum=_LAYERS_LIMIT)
        kda_layers, mla_layers = linear.layer_kinds(layers_count)
        heads = keys.integer("num_attention_heads")
        if keys.integer("num_key_value_heads", default=heads) != heads:
            keys.refuse("num_key_value_heads", f"{heads} (as num_attention_heads)")
        if not keys.flag("mla_use_nope", default=False):
            keys.refuse("mla_use_nope", "true (rotary embeddings are not supported)")
        vocab_size = keys.integer("vocab_size")
        experts = keys.integer("num_experts", maximum=_EXPERTS_LIMIT)
        conv_width = linear.integer("short_conv_kernel_size")
        if conv_width != CONV_WIDTH:
            linear.refuse("short_conv_kernel_size", f"{CONV_WIDTH} (the convolution kernels have no other)")
        groups = keys.integer("num_expert_group", default=1)
        config = cls(
            vocab_size=vocab_size,
            hidden_size=keys.integer("hidden_size"),
            num_hidden_layers=layers_count,
            rms_norm_eps=keys.number("rms_norm_eps"),
            latent_norm_eps=keys.number("latent_norm_eps", default=LATENT_NORM_EPS),
            kda_layers=kda_layers,
            mla_layers=mla_layers,
            kda_heads=linear.integer("num_heads"),
            kda_head_dim=linear.integer("head_dim"),
            conv_width=conv_width,
            num_attention_heads=heads,
            qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
            qk_rope_head_dim=keys.integer("qk_rope_head_dim"),
            v_head_dim=keys.integer("v_head_dim"),
            kv_lora_rank=keys.integer("kv_lora_rank"),
            intermediate_size=keys.integer("intermediate_size"),
            moe_intermediate_size=keys.integer("moe_intermediate_size"),
            num_experts=experts,
            num_experts_per_token=keys.integer("num_experts_per_token", maximum=experts),
            num_shared_experts=keys.integer("num_shared_experts", default=0, minimum=0),
            first_k_dense_replace=keys.integer("first_k_dense_replace", minimum=0, maximum=layers_count),
            moe_layer_freq=keys.integer("moe_layer_freq", default=1),
            routed_scaling_factor=keys.number("routed_scaling_factor"),
            moe_renormalize=keys.flag("moe_renormalize"),
            num_expert_group=groups,
            topk_group=keys.integer("topk_group", default=1, maximum=groups),
            eos_token_ids=keys.token_ids("eos_token_id", vocab_size),
            bos_token_id=next(iter(keys.token_ids("bos_token_id", vocab_size)), None),
            max_position_embeddings=keys.integer(
                "model_max_length" if "model_max_length" in data else "max_position_embeddings", maximum=1 << 31
            ),
        )
        if experts % groups or experts // groups * config.topk_group < config.num_experts_per_token:
            keys.refuse("num_expert_group", f"a divisor of num_experts {experts} that leaves enough experts to choose")
        return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises: CheckpointError naming the file if it cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


class _Keys:
    """Typed access to one JSON object; every failure names the file and the key."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._data = data
        self._where = where
        self._prefix = prefix

    def refuse(self, key: str, expected: str) -> NoReturn:
        got = repr(self._data[key]) if key in self._data else "nothing"
        raise CheckpointError(f"{self._where}: {self._prefix}{key}: expected {expected}, got {got[:80]}")

    def section(self, key: str) -> _Keys:
        value = self._data.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return _Keys(value, self._where, f"{self._prefix}{key}.")

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = _LIMIT) -> int:
        value = self._data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.refuse(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self._data.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        value = self._data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                self.refuse(key, f"token ids below vocab_size {vocab_size}")
        return tuple(ids)

    def check_architecture(self) -> None:
        names = self._data.get("architectures")
        if names != [ARCHITECTURE]:
            self.refuse("architectures", f"[{ARCHITECTURE!r}]")
        if self._data.get("model_type", "kimi_linear") != "kimi_linear":
            self.refuse("model_type", "'kimi_linear'")

    def check_off(self, off_values: Mapping[str, tuple[Any, ...]]) -> None:
        for key, allowed in off_values.items():
            if key in self._data and not any(self._data[key] is v or self._data[key] == v for v in allowed):
                self.refuse(key, f"{' or '.join(json.dumps(v) for v in allowed)} (the rest is not supported)")

    def layer_kinds(self, layers_count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """KDA and MLA layers counted from 0; in the file they count from 1."""
        kinds = []
        for key in ("kda_layers", "full_attn_layers"):
            value = self._data.get(key)
            if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
                self.refuse(key, "a list of layer numbers counted from 1")
            kinds.append(tuple(sorted(n - 1 for n in value)))
        kda, mla = kinds
        if sorted(kda + mla) != list(range(layers_count)):
            self.refuse("kda_layers", f"with full_attn_layers each layer from 1 to {layers_count} exactly once")
        return kda, mla
