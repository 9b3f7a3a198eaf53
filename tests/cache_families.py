"""Tiny random models of the architectures whose caches matter: `build("mamba2")` gives one, made in some milliseconds.

FAMILIES says of each what mlx-lm 0.32.2 does with its caches' counters: LEAKS (a chain of operations for each of some
caches, longer with every step), CHURNS (longer with every row that comes or goes), or HOLDS (what there is, is read).
"""

from importlib import import_module

import mlx.core as mx

VOCAB = 64

DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
GATED_DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
LFM2 = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "use_expert_bias": True,
    "num_dense_layers": 1,
}
SSM = {  # the names that different families give to the same sizes
    "num_heads": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": (0.001, 100.0),
    "time_step_rank": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mlp_bias": False,
}
GRANITE = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "position_embedding_type": "nope",
}
JAMBA = {
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_dt_rank": 4,
}
PLAMO = {"hidden_size_per_head": 16, "mamba_step": 2, "full_attention_idx": [1, 3]}
BAILING = {"layer_group_size": 2, "group_norm_size": 2, "partial_rotary_factor": 0.5}
KIMI = {
    "linear_attn_config": {"kda_layers": [1, 3], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4},
    "model_max_length": 4096,
    "mla_use_nope": True,
}
# Windows are short so that replies cross them.
SLIDING = {"sliding_window": 16, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 1.0}
AFMOE = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_dense_layers": 1, "score_func": "sigmoid"}
GEMMA3N = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2,
    "num_hidden_layers": 8,
    "activation_sparsity_pattern": [0.0] * 8,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 4,
}
GEMMA4 = {
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
RWKV = {"norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8}
GRIFFIN = {
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "attention_window_size": 16,
    "block_types": ["recurrent", "recurrent", "attention"],
    "num_key_value_heads": 1,
}
GPT_OSS = {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEAR = {"layer_types": ["conv_mixer", "full_attention", "conv_mixer", "sliding_attention"]}
INDEXED = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 16, "q_lora_rank": 16}

LEAKS, CHURNS, HOLDS = "leaks", "churns", "holds"
FAMILIES = {  # name: (module of mlx_lm.models, what the counters do, config)
    "Qwen3-Next": ("qwen3_next", LEAKS, DENSE | GATED_DELTA | EXPERTS),
    "Qwen3.5": ("qwen3_5", LEAKS, DENSE | GATED_DELTA),
    "Qwen3.5 MoE": ("qwen3_5_moe", LEAKS, DENSE | GATED_DELTA | EXPERTS),
    "Mamba 2": ("mamba2", LEAKS, DENSE | SSM | {"head_dim": 8}),
    "LFM2": ("lfm2", LEAKS, DENSE | LFM2),
    "LFM2 MoE": ("lfm2_moe", LEAKS, DENSE | EXPERTS | LFM2),
    "Falcon-H1": ("falcon_h1", LEAKS, DENSE | SSM | {"lm_head_multiplier": 1.0}),
    "Granite hybrid": ("granitemoehybrid", LEAKS, DENSE | SSM | GRANITE),
    "Nemotron-H": ("nemotron_h", LEAKS, DENSE | SSM | {"hybrid_override_pattern": list("M*-M*")}),
    "Plamo 2": ("plamo2", LEAKS, DENSE | SSM | PLAMO),
    "OLMo hybrid": ("olmo_hybrid", LEAKS, DENSE | GATED_DELTA | {"linear_allow_neg_eigval": True}),
    "Bailing hybrid": ("bailing_hybrid", LEAKS, DENSE | EXPERTS | LATENT | BAILING),
    "Bailing MoE v3": ("bailing_moe_v3", LEAKS, DENSE | EXPERTS | LATENT | BAILING | {"model_type": "bailing_hybrid"}),
    "Jamba": ("jamba", LEAKS, DENSE | EXPERTS | SSM | JAMBA),
    "Kimi Linear": ("kimi_linear", LEAKS, DENSE | EXPERTS | LATENT | KIMI),
    "Kimi K3": ("kimi_k3", LEAKS, DENSE | EXPERTS | LATENT | KIMI | {"q_lora_rank": 16}),
    "Cohere 2": ("cohere2", LEAKS, DENSE | SLIDING),
    "EXAONE 4": ("exaone4", LEAKS, DENSE | SLIDING | {"sliding_window_pattern": "LG", "rope_scaling": None}),
    "SmolLM3": ("smollm3", LEAKS, DENSE | {"no_rope_layer_interval": 2}),
    "AFMoE": ("afmoe", LEAKS, DENSE | EXPERTS | SLIDING | AFMOE),
    "Gemma 3n": ("gemma3n", LEAKS, {"text_config": DENSE | SLIDING | GEMMA3N | {"model_type": "gemma3n"}}),
    "Gear": ("gear", LEAKS, DENSE | SLIDING | GEAR),
    "Llama": ("llama", HOLDS, DENSE),
    "Qwen3": ("qwen3", HOLDS, DENSE),
    "Gemma 3": ("gemma3_text", HOLDS, DENSE | SLIDING),
    "Gemma 4": ("gemma4_text", HOLDS, DENSE | SLIDING | GEMMA4),
    "gpt-oss": ("gpt_oss", HOLDS, DENSE | EXPERTS | SLIDING | GPT_OSS),
    "DeepSeek V3": ("deepseek_v3", HOLDS, DENSE | EXPERTS | LATENT),
    "DeepSeek V3.2": ("deepseek_v32", HOLDS, DENSE | EXPERTS | LATENT | INDEXED),
    "Mamba 1": ("mamba", CHURNS, DENSE | SSM),
    "RWKV 7": ("rwkv7", CHURNS, DENSE | RWKV),
    "RecurrentGemma": ("recurrent_gemma", CHURNS, DENSE | GRIFFIN),
}


def build(name: str):
    """The family's model with its own random initial weights, the same at every call."""
    module, _, config = FAMILIES[name]
    module = import_module(f"mlx_lm.models.{module}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict({"model_type": FAMILIES[name][0]} | config))
    model.eval()
    mx.eval(model.parameters())
    return model
