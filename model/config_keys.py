"""The meaning of Hugging Face config keys for a training step. Data only, no torch.

Sources: the configuration classes of transformers 4.37 to 5.23 for the families read here, and keys
of neighbouring families that are copied into such files.
"""

# Names of activations to the function of model.layers that computes them.
ACTIVATIONS = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
ACTIVATIONS |= dict(gelu="gelu", silu="silu", swish="silu", relu="relu", relu2="relu2")
# Transformer Engine's names for a plain and a gated MLP, which activates the first half of its rows; its
# gelu is the tanh approximation.
TE_ACTIVATIONS = dict(gelu_tanh=("gelu", "geglu"), relu=("relu", "reglu"), silu=("silu", "swiglu"))

# Metadata, generation settings and switches that leave the training computation as it is.
IGNORED = frozenset(
    """
    architectures name_or_path transformers_version dtype torch_dtype return_dict use_return_dict
    output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
    is_decoder cross_attention_hidden_size tie_encoder_decoder finetuning_task id2label label2id
    num_labels problem_type task_specific_params tokenizer_class prefix bos_token_id eos_token_id
    sep_token_id pad_token_id decoder_start_token_id use_cache gradient_checkpointing xla_device
    attn_implementation experts_implementation pretraining_tp keys_to_ignore_at_inference attribute_map
    base_model_tp_plan base_model_pp_plan base_model_fsdp_plan distributed_config tie_last_hidden_states
    classifier_dropout reorder_and_upcast_attn max_length min_length max_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    encoder_repetition_penalty bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens epsilon_cutoff eta_cutoff num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind
    max_window_layers n_ctx n_special predict_special_tokens output_past original_max_position_embeddings
    unsloth_fixed unsloth_version is_llama_config transformers.js_config max_sequence_length
    aux_loss_alpha seq_aux ep_size experts_per_token initial_context_length base_model_ep_plan
    output_router_logits model_max_length tokenizer_model_max_length tokenizer_padding_side task_names
    license qk_head_dim use_mtp mtp_transformer_layers mtp_use_dedicated_embeddings mamba_ssm_dtype
    enable_moe_fp32_combine
    """.split()
)

# Keys that a run names in a remark: what a file means by them is not done, or is done anyway.
WITHOUT_EFFECT = dict.fromkeys(
    ("quantization_config", "quantization", "compression_config"), "the weights are not quantised"
) | dict(
    auto_map="no code of the Hub is run",
    attn_factor="transformers does not read it",
    finetuned="positions are stretched in any case",
)

# Keys that change the computation unless they are null, false, 0, empty or, for factors, 1.
FACTORS = """
    logit_scale logits_scaling embedding_multiplier residual_multiplier scale_emb mlp_alpha_factor
    mlp_beta_factor attn_alpha_factor attn_beta_factor rotary_pct partial_rotary_factor
    """.split()
UNSUPPORTED = frozenset(
    """
    use_bidirectional_attention is_encoder_decoder add_cross_attention prefix_lm per_layer_config
    pruned_heads transformers_weights configuration_files text_config vision_config dflash_config
    dual_chunk_attention_config attn_logit_softcapping final_logit_softcapping softmax_scale
    query_pre_attn_scalar attention_chunk_size sliding_window_pattern clip_qkv attention_multiplier
    scale_depth dim_model_base scale_embedding mup_enabled rotary_dim rotary_emb_base rope_local_base_freq
    rope_interleaved rope_interleave use_mrope alibi no_rope_layer_interval num_local_experts num_experts
    n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts
    shared_expert_intermediate_size decoder_sparse_step mlp_only_layers mlp_layer_types
    first_k_dense_replace router_aux_loss_coef router_jitter_noise q_lora_rank kv_lora_rank
    qk_rope_head_dim qk_nope_head_dim v_head_dim use_qk_norm qk_norm qk_layernorm attention_sink_bias
    parallel_attn use_parallel_residual multi_query bias use_bias qkv_bias use_qkv_bias attention_bias
    mlp_bias swiglu_limit hidden_dropout resid_pdrop embd_pdrop embedding_dropout attn_pdrop
    residual_dropout layerdrop norm_type hidden_activation num_mtp_layers num_nextn_predict_layers
    sliding_window layer_types use_sliding_window no_rope_layers rope_theta rope_scaling rope_parameters
    head_dim num_key_value_heads intermediate_size
    """.split()
).union(FACTORS)
