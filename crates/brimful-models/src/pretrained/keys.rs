//! Treatment of every key in a folder's files: used, checked, or without effect.
//!
//! A key in no row is refused unless it is switched off (`null`, `false`, 0 or empty), because its effect is unknown.
//! [`Fields`](super::fields::Fields) checks every file against its table.

/// Treatment of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Treatment {
    /// The model depends on the key.
    Used,
    /// The key must have the value, or one of the values, that this implementation assumes; others are refused.
    Checked,
    /// The key has no effect here, for the given reason.
    WithoutEffect,
}

use Treatment::{Checked, Used, WithoutEffect};

/// Keys with the same treatment, and the reason.
pub(super) struct Row {
    pub(super) keys: &'static [&'static str],
    pub(super) treatment: Treatment,
    /// Reason, unless it is plain from the names.
    #[allow(dead_code, reason = "it is read by people, and by the test of the table")]
    pub(super) why: &'static str,
}

const fn row(keys: &'static [&'static str], treatment: Treatment, why: &'static str) -> Row {
    Row { keys, treatment, why }
}

/// Rows of a file.
pub(super) type Table = &'static [&'static [Row]];

/// Keys of config.json for every model.
const COMMON: &[Row] = &[
    row(&["model_type", "vocab_size", "eos_token_id"], Used, ""),
    row(
        &["tie_word_embeddings"],
        Used,
        "unless the file has two unlike tensors, as in transformers",
    ),
    row(&["initializer_range"], Used, "by a training from random numbers"),
    row(&["quantization_config"], Checked, "quantized weights cannot be read"),
    row(
        &["dtype", "torch_dtype"],
        WithoutEffect,
        "each tensor's own is in its file; a saved folder gets that of its tensors",
    ),
    row(
        &["_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures"],
        WithoutEffect,
        "they tell where a model comes from; its causal language model is meant",
    ),
    row(
        &[
            "unsloth_version",
            "unsloth_fixed",
            "unsloth_tokenized",
            "transformers.js_config",
            "mlx",
            "is_llama_config",
        ],
        WithoutEffect,
        "notes of other programs",
    ),
    row(
        &["auto_map", "custom_pipelines"],
        WithoutEffect,
        "code of the folder's own, which transformers does not run unasked either",
    ),
    row(
        &[
            "bos_token_id",
            "pad_token_id",
            "unk_token_id",
            "sep_token_id",
            "decoder_start_token_id",
            "tokenizer_class",
        ],
        WithoutEffect,
        "the tokenizer's files and generation_config.json say these",
    ),
    row(
        &[
            "id2label",
            "label2id",
            "num_labels",
            "_num_labels",
            "problem_type",
            "classifier_dropout",
        ],
        WithoutEffect,
        "of classifiers; their heads would be left-over tensors",
    ),
    row(
        &["finetuning_task", "task_specific_params", "prefix", "keys_to_ignore_at_inference"],
        WithoutEffect,
        "of pipelines of transformers",
    ),
    row(
        &["is_decoder", "is_encoder_decoder", "cross_attention_hidden_size", "tie_encoder_decoder"],
        WithoutEffect,
        "these types are decoders alone; tensors of an encoder would be left over",
    ),
    row(
        &[
            "use_cache",
            "use_return_dict",
            "return_dict",
            "return_dict_in_generate",
            "output_attentions",
            "output_hidden_states",
            "output_past",
            "torchscript",
        ],
        WithoutEffect,
        "they say what a call of transformers hands back",
    ),
    row(
        &[
            "_attn_implementation",
            "attn_implementation",
            "_attn_implementation_autoset",
            "_flash_attn_2_enabled",
            "_experts_implementation",
            "gradient_checkpointing",
            "chunk_size_feed_forward",
            "pruned_heads",
            "use_bfloat16",
            "tf_legacy_loss",
        ],
        WithoutEffect,
        "other ways to the same numbers, or of older versions: transformers reads none of them for these types",
    ),
    row(
        &[
            "max_length",
            "min_length",
            "do_sample",
            "early_stopping",
            "num_beams",
            "num_beam_groups",
            "diversity_penalty",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "encoder_repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "num_return_sequences",
            "output_scores",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "remove_invalid_values",
            "exponential_decay_length_penalty",
            "suppress_tokens",
            "begin_suppress_tokens",
            "epsilon_cutoff",
            "eta_cutoff",
        ],
        WithoutEffect,
        "of generation: transformers reads them from generation_config.json alone",
    ),
];

const GPT2: &[Row] = &[
    row(&["n_embd", "n_layer", "n_head", "n_positions"], Used, ""),
    row(&["resid_pdrop"], Used, "in training"),
    row(&["embd_pdrop", "attn_pdrop"], Checked, "one number stands for all three"),
    row(
        &["activation_function", "n_inner", "layer_norm_epsilon", "scale_attn_weights"],
        Checked,
        "",
    ),
    row(&["scale_attn_by_inverse_layer_idx", "add_cross_attention"], Checked, ""),
    row(&["n_ctx"], WithoutEffect, "older files say n_positions twice"),
    row(&["n_special", "predict_special_tokens"], WithoutEffect, "of the first published files"),
    row(&["reorder_and_upcast_attn"], WithoutEffect, "another order of the same product"),
    row(
        &[
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ],
        WithoutEffect,
        "of heads that its causal language model has not",
    ),
];

/// Keys for Llama, Mistral and Qwen2.
const LLAMAS: &[Row] = &[
    row(&["hidden_size", "intermediate_size", "num_hidden_layers"], Used, ""),
    row(&["num_attention_heads", "num_key_value_heads", "head_dim"], Used, ""),
    row(&["max_position_embeddings", "rms_norm_eps", "attention_dropout"], Used, ""),
    row(&["rope_theta", "rope_scaling", "rope_parameters"], Used, "with a table of their own"),
    row(&["hidden_act", "partial_rotary_factor"], Checked, ""),
    row(&["original_max_position_embeddings"], Checked, "it would go before that of the scaling"),
    row(&["pretraining_tp"], WithoutEffect, "parts of one product"),
    row(&["max_sequence_length"], WithoutEffect, "older files say max_position_embeddings twice"),
];

const LLAMA: &[Row] = &[
    row(&["attention_bias", "mlp_bias"], Used, ""),
    row(
        &["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"],
        WithoutEffect,
        "a Llama's attention has no window in transformers",
    ),
];

const MISTRAL: &[Row] = &[
    row(&["sliding_window"], Used, "as the longest sequence"),
    row(&["layer_types"], WithoutEffect, "transformers does not read it for this type"),
];

const QWEN2: &[Row] = &[
    row(&["sliding_window", "use_sliding_window"], Used, "as the longest sequence"),
    row(&["max_window_layers", "layer_types"], Checked, "where a window slides in any layer"),
];

/// Keys of `rope_parameters` and `rope_scaling` in config.json.
const ROPE: &[Row] = &[
    row(&["rope_type", "type", "rope_theta"], Used, ""),
    row(&["partial_rotary_factor"], Checked, ""),
];
const ROPE_LINEAR: &[Row] = &[row(&["factor"], Used, "")];
const ROPE_LLAMA3: &[Row] = &[row(
    &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
    Used,
    "",
)];

/// Keys of adapter_config.json.
const ADAPTER_ROWS: &[Row] = &[
    row(&["r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"], Used, ""),
    row(&["target_modules", "exclude_modules"], Used, ""),
    row(&["layers_to_transform", "layers_pattern"], Used, ""),
    row(&["peft_type", "task_type"], Checked, ""),
    row(&["init_lora_weights"], Checked, "some ways to begin change the weights of the model"),
    row(&["use_dora", "use_qalora", "use_bdlora", "lora_bias", "bias"], Checked, ""),
    row(&["modules_to_save", "trainable_token_indices", "target_parameters"], Checked, ""),
    row(&["layer_replication", "megatron_config", "alora_invocation_tokens"], Checked, ""),
    row(
        &["arrow_config", "kasa_config", "velora_config", "monteclora_config"],
        Checked,
        "other methods",
    ),
    row(&["lora_dropout"], Used, ""),
    row(
        &["corda_config", "eva_config", "loftq_config", "lora_ga_config"],
        WithoutEffect,
        "how weights begin, for init_lora_weights, which is checked",
    ),
    row(&["fan_in_fan_out"], WithoutEffect, "PEFT too goes by the layer's kind"),
    row(&["ensure_weight_tying"], WithoutEffect, "heads and tables with adapters are refused"),
    row(&["qalora_group_size", "megatron_core"], WithoutEffect, "without their methods"),
    row(&["runtime_config"], WithoutEffect, "where PEFT computes"),
    row(
        &["auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"],
        WithoutEffect,
        "they tell where the weights come from; names and shapes are compared with the model's",
    ),
];

/// Keys of model.safetensors.index.json.
const INDEX_ROWS: &[Row] =
    &[row(&["weight_map"], Used, ""), row(&["metadata"], WithoutEffect, "sums of sizes")];

pub(super) const GPT2_CONFIG: Table = &[COMMON, GPT2];
pub(super) const LLAMA_CONFIG: Table = &[COMMON, LLAMAS, LLAMA];
pub(super) const MISTRAL_CONFIG: Table = &[COMMON, LLAMAS, MISTRAL];
pub(super) const QWEN2_CONFIG: Table = &[COMMON, LLAMAS, QWEN2];
pub(super) const ROPE_UNSCALED: Table = &[ROPE];
pub(super) const ROPE_SCALED_LINEAR: Table = &[ROPE, ROPE_LINEAR];
pub(super) const ROPE_SCALED_LLAMA3: Table = &[ROPE, ROPE_LLAMA3];
pub(super) const ADAPTER: Table = &[ADAPTER_ROWS];
pub(super) const INDEX: Table = &[INDEX_ROWS];

/// Returns the treatment of a key.
pub(super) fn treatment(table: Table, key: &str) -> Option<Treatment> {
    let mut rows = table.iter().flat_map(|rows| rows.iter());
    rows.find(|row| row.keys.contains(&key)).map(|row| row.treatment)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_key_stands_once_in_a_table_and_what_is_without_effect_says_why() {
        let configs = [GPT2_CONFIG, LLAMA_CONFIG, MISTRAL_CONFIG, QWEN2_CONFIG];
        let others = [ROPE_UNSCALED, ROPE_SCALED_LINEAR, ROPE_SCALED_LLAMA3, ADAPTER, INDEX];
        for table in configs.into_iter().chain(others) {
            let mut seen = BTreeSet::new();
            for row in table.iter().flat_map(|rows| rows.iter()) {
                assert!(row.treatment != WithoutEffect || !row.why.is_empty(), "{:?}", row.keys);
                for key in row.keys {
                    assert!(seen.insert(key), "{key} stands twice");
                }
            }
        }
    }
}
