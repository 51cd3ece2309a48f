"""Small random models from transformers configurations, for looking at their graphs: nothing is downloaded.

A configuration is shrunk by the meaning of its attributes (widths, depths, expert counts), which transformers names in
a few dozen ways. What depends on other attributes (lists with an entry per layer, rotary sections) is dropped or cut.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

#: How configurations call the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
# meaning -> (small value, the attribute names that transformers uses for it)
_SIZES: tuple[tuple[Any, str], ...] = (
    (64, "hidden_size d_model n_embd"),
    (2, "num_hidden_layers num_layers n_layers"),
    (4, "num_attention_heads n_heads num_heads swa_num_attention_heads"),
    (2, "num_key_value_heads swa_num_key_value_heads num_global_key_value_heads"),
    (16, "head_dim swa_head_dim swa_v_head_dim v_head_dim kv_channels global_head_dim index_head_dim"),
    (96, "intermediate_size ffn_dim d_ff ffn_hidden_size intermediate_size_mlp"),
    (32, "moe_intermediate_size expert_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
         "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    (128, "vocab_size vocab_size_per_layer_input max_position_embeddings"),
    (0, "hidden_size_per_layer_input first_k_dense_replace num_dense_layers moe_layer_start_index pad_token_id dropout "
        "num_nextn_predict_layers mtp_num_hidden_layers"),
    (8, " ".join(EXPERT_COUNTS)),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts moe_top_k num_experts_per_token moe_router_topk router_topk "
        "num_selected_experts"),
    (2, "n_group num_expert_group n_groups eos_token_id mamba_expand linear_num_key_heads index_n_heads "
        "zero_expert_num"),
    (1, "topk_group decoder_sparse_step num_experts_shared mamba_n_groups bos_token_id"),
    (24, "q_lora_rank qk_head_dim"),
    (16, "kv_lora_rank qk_nope_head_dim mamba_d_head mamba_d_state mamba_head_dim ssm_state_size linear_key_head_dim "
         "linear_value_head_dim"),
    (8, "qk_rope_head_dim sliding_window attention_chunk_size mamba_n_heads mamba_num_heads mamba_chunk_size "
        "chunk_size"),
    (4, "index_topk mamba_d_conv mamba_dt_rank linear_num_value_heads linear_conv_kernel_dim"),
    (True, "enable_moe_block"),
    (False, "tie_word_embeddings use_mamba_kernels use_cache"),
)  # fmt: skip
# Left as they are when the configuration has them as None: None means "not in this model".
_OPTIONAL = frozenset({"n_group", "topk_group", "q_lora_rank", "num_global_key_value_heads"})
# Above this a model is not tiny: a part with a configuration of its own (a vision tower) was not shrunk.
_LARGEST = 100_000_000
# Of a checkpoint, or of where it runs, not of what it computes.
_NO_CHOICE = frozenset({"model_type", "transformers_version", "dtype", "torch_dtype", "name_or_path"})
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types")
_FULL_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
_GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
# What a family needs beyond the sizes above, to be made at all and to have only MoE layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"},
        },
    },
    "deepseek_ocr2": {"mlp_layer_types": ["sparse", "sparse"]},
    "diffusion_gemma": {"layer_types": _GEMMA["layer_types"]},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": _GEMMA,
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2],
        }
    },
    "glm5_next": {
        "index_topk": 16, "qk_rope_head_dim": 0, "qk_head_dim": 16, "num_key_value_heads": 4, "layer_types": None,
    },
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": _FULL_ATTENTION,
    "lfm2_moe": _FULL_ATTENTION,
    "nemotron_h": {"layers_block_type": ["attention", "moe"], "n_group": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

#: Families that run in bf16 only with the modules in fp32 that from_pretrained keeps so.
IN_FP32 = frozenset({"inkling2", "inkling2_loop"})


def tiny_config(config_class: type, overrides: Mapping[str, Any] | None = None, base: Any = None) -> Any:
    """An instance of ``config_class`` with small sizes; ``base`` makes the choices (default: the class's defaults)."""
    settings = {} if base is None else _choices(base)
    base = config_class() if base is None else base
    for value, names in _SIZES:
        for name in names.split():
            present = _present(base, name)
            unwanted = (
                present is _MISSING or isinstance(present, list | tuple) or (name in _OPTIONAL and present is None)
            )
            if not unwanted:
                settings[name] = value
    if "qk_rope_head_dim" in settings:  # multi-head latent attention: every head has its own key
        settings.update({name: 4 for name in ("num_key_value_heads",) if name in settings})
        settings.update({name: 8 for name in ("head_dim",) if name in settings})
    settings.update(overrides or {})
    return _cut_layer_lists(_construct(config_class, settings))


def _choices(config: Any) -> dict[str, Any]:
    """What a configuration chooses in other ways than its class does, apart from sizes: names, switches and factors."""
    values = {name: value for name, value in config.to_diff_dict().items() if isinstance(value, bool | str | float)}
    return {name: value for name, value in values.items() if name not in _NO_CHOICE and not name.startswith("_")}


def tiny_model(
    config: Any,
    model_class: type[Any],
    *,
    dtype: torch.dtype = torch.float32,
    experts: str | None = None,
    seed: int = 0,
) -> Any:
    """A model in eval mode with random weights large enough that routing is spread over the experts.

    Args:
        experts: transformers' ``experts_implementation``; None leaves the default.

    Raises:
        ValueError: the model cannot be made from a small configuration, or is large all the same.
    """
    torch.manual_seed(seed)
    model = _construct_model(config, model_class)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            elif parameter.numel() and (not parameter.isfinite().all() or parameter.abs().max() > 50):
                parameter.zero_()
        for name, buffer in model.named_buffers():
            if "correction_bias" in name or name.endswith("expert_bias"):
                buffer.normal_(0, 0.05)
            elif "tid2eid" in name:
                buffer.copy_(torch.randint(0, 8, buffer.shape))
    model = model.to(dtype).requires_grad_(False)
    return model if experts is None else use_experts(model, experts)


def _construct_model(config: Any, model_class: type[Any]) -> Any:
    """The model in eval mode, after a look at its size on the meta device.

    Configurations check and derive in ways that differ for every family; whatever one raises for small sizes says the
    same, that there is no such model.
    """
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in model_class(copy.deepcopy(config)).parameters())
    except Exception:  # some models compute with their weights while they are made
        size = 0
    if size > _LARGEST:
        raise ValueError(
            f"{model_class.__name__} cannot be made tiny: {size / 1e6:.0f} million parameters are left. Give a "
            "function that returns a small model and its inputs, as module:factory."
        )
    try:
        return model_class(copy.deepcopy(config)).eval()
    except Exception as error:
        raise ValueError(f"{model_class.__name__} cannot be made tiny: {said(error)}") from error


def said(error: Exception) -> str:
    """An error in one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def use_experts(model: Any, experts: str) -> Any:
    """Switch every module of ``model`` to an experts implementation of transformers."""
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config._experts_implementation = experts
    return model


def model_of(family: str, given: Any = None) -> tuple[Any, type[Any]]:
    """(tiny configuration, model class) of a transformers model type.

    Args:
        given: the values of a config.json, or a configuration of the family, whose choices (activation, scoring,
            scales) the tiny one makes, too.

    Raises:
        ValueError: no such model type, or no text model for it.
    """
    try:
        configurations = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{family!r} must be a transformers model type, got one that transformers does not have. ({error})"
        ) from None
    except ImportError as error:  # transformers names the package that this type needs
        raise ValueError(f"{family!r} cannot be imported: {said(error)}") from None
    config_class, model_class = text_classes(configurations, modeling)
    try:
        base = given if given is None or isinstance(given, config_class) else _text_part(config_class, given)
        return tiny_config(config_class, FAMILIES.get(family), base), model_class
    except Exception as error:  # as in _construct_model
        raise ValueError(f"{config_class.__name__} cannot be made tiny: {said(error)}") from error


def _text_part(config_class: type[Any], given: Any) -> Any:
    """The configuration of the text model in a config.json, or in a configuration with several parts."""
    if isinstance(given, Mapping):
        return config_class.from_dict(given.get("text_config", given))
    part = given.get_text_config()
    return part if isinstance(part, config_class) else None


def text_classes(configurations: Any, modeling: Any) -> tuple[type[Any], type[Any]]:
    """The text configuration of a family and the largest text model that takes it."""
    own = [
        value
        for value in vars(configurations).values()
        if inspect.isclass(value) and value.__module__ == configurations.__name__
    ]
    candidates = sorted(
        (c for c in own if c.__name__.endswith("Config")), key=lambda c: not c.__name__.endswith("TextConfig")
    )
    models = [value for value in vars(modeling).values() if inspect.isclass(value) and hasattr(value, "_from_config")]
    for suffix in ("ForCausalLM", "TextModel", "Model"):
        for config_class in candidates:
            for model in models:
                takes = getattr(model, "config_class", None) or model.__init__.__annotations__.get("config")
                named = takes if isinstance(takes, str) else getattr(takes, "__name__", "")
                if (
                    model.__name__.endswith(suffix)
                    and "PreTrained" not in model.__name__
                    and named == config_class.__name__
                ):
                    return config_class, model
    raise ValueError(f"{modeling.__name__} has no text model.")


_MISSING = object()


def _present(config: Any, name: str) -> Any:
    """The attribute, or _MISSING; an attribute that varies by layer (which raises) counts as present."""
    try:
        return getattr(config, name, _MISSING)
    except Exception:
        return 0


def _construct(config_class: type, settings: dict[str, Any]) -> Any:
    try:
        return config_class(**settings)
    except (TypeError, ValueError, AttributeError):  # some families derive their head sizes
        return config_class(
            **{name: value for name, value in settings.items() if name not in ("head_dim", "qk_head_dim")}
        )


def _cut_layer_lists(config: Any) -> Any:
    layers = getattr(config, "num_hidden_layers", 2)
    for name in _PER_LAYER:
        entries = config.__dict__.get(name)
        if isinstance(entries, list):
            if name == "mlp_layer_types":  # every layer is an MoE layer
                entries = ["sparse" if entry == "dense" else entry for entry in entries]
            setattr(config, name, entries[:layers])
    return config
