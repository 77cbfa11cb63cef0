//! Model described by a folder's config.json.

use brimful::Layers;

use super::PretrainedError;
use super::fields::Fields;
use super::keys;
use crate::gpt::{SPREAD, gpt_under};
use crate::llama::llama_keeping;
use crate::{Gpt, KeyValueCache, Llama, LlamaBiases, RotaryScaling};

/// Supported types of models, as in config.json.
pub(super) const MODEL_TYPES: [&str; 4] = ["gpt2", "llama", "mistral", "qwen2"];
/// Prefix of all of GPT-2's layers but its head.
const GPT2_BODY: &str = "transformer";
/// Limit on the number of blocks: ten times the deepest models.
const MOST_LAYERS: i64 = 10_000;
/// Limit on the length of a sequence.
const LONGEST: i64 = i32::MAX as i64;

/// A model, as described by its config.json.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Config {
    /// A GPT-2.
    Gpt2(Gpt),
    /// A Llama, Mistral or Qwen2.
    Llama(Llama),
}

impl Config {
    /// Reads a config.json. The model's type decides which table applies to its fields.
    pub(super) fn of(fields: Fields<'_>) -> Result<Self, PretrainedError> {
        let found = fields.held_to(keys::LLAMA_CONFIG).text("model_type")?;
        let table = match found {
            "gpt2" => keys::GPT2_CONFIG,
            "llama" => keys::LLAMA_CONFIG,
            "mistral" => keys::MISTRAL_CONFIG,
            "qwen2" => keys::QWEN2_CONFIG,
            _ => {
                let (path, found) = (fields.path(), found.to_owned());
                return Err(PretrainedError::ModelType { path, found });
            }
        };
        let fields = fields.held_to(table);
        fields
            .off("quantization_config", "give the folder of the model before it was quantized")?;
        fields.whole_numbers("eos_token_id")?;
        let config = match found {
            "gpt2" => Self::Gpt2(gpt2(&fields)?),
            _ => Self::Llama(llama_of(&fields, found)?),
        };
        // Checked last, so that a known key with a wrong value is reported first.
        fields.check_known().map(|()| config)
    }

    /// Returns the model as a list of layers, under the names of its published weights.
    pub fn layers(&self) -> Layers {
        self.layers_keeping(None)
    }

    /// Returns the model as a list of layers with a cache: see [`KeyValueCache`].
    pub fn layers_with_cache(&self, cache: &KeyValueCache) -> Layers {
        self.layers_keeping(Some(cache))
    }

    fn layers_keeping(&self, cache: Option<&KeyValueCache>) -> Layers {
        match self {
            Self::Gpt2(config) => gpt_under(GPT2_BODY, config, cache),
            Self::Llama(config) => llama_keeping(config, cache),
        }
    }

    /// Returns the longest sequence that the model takes.
    pub fn context(&self) -> i64 {
        match self {
            Self::Gpt2(config) => config.context,
            Self::Llama(config) => config.context,
        }
    }

    /// Returns the width of a token's hidden state: one side of every projection in its blocks.
    pub fn width(&self) -> i64 {
        match self {
            Self::Gpt2(config) => config.width,
            Self::Llama(config) => config.width,
        }
    }

    /// Returns the number of different tokens.
    pub fn vocabulary(&self) -> i64 {
        match self {
            Self::Gpt2(config) => config.vocabulary,
            Self::Llama(config) => config.vocabulary,
        }
    }

    /// Returns whether the weights of its projections are inputs × outputs.
    pub fn inputs_first(&self) -> bool {
        matches!(self, Self::Gpt2(_))
    }

    /// Returns the projections of its blocks, by the last part of their names.
    pub fn projections(&self) -> Vec<String> {
        let names: &[&str] = match self {
            Self::Gpt2(_) => &["c_attn", "c_proj", "c_fc"],
            Self::Llama(_) => {
                &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            }
        };
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Refuses unsupported settings that matter only for a training from scratch.
    pub(super) fn check_beginning(&self, fields: &Fields<'_>) -> Result<(), PretrainedError> {
        let Self::Gpt2(_) = self else { return Ok(()) };
        let field = "initializer_range";
        let spread = fields.held_to(keys::GPT2_CONFIG).number_or(field, SPREAD)?;
        fields.check(field, spread == SPREAD, || {
            format!("is {spread}: random weights of a GPT-2 have standard deviation {SPREAD}")
        })
    }

    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.layers,
            Self::Llama(config) => config.layers,
        }
    }

    /// Returns whether the head shares the token embedding.
    pub(super) fn is_tied(&self) -> bool {
        match self {
            Self::Gpt2(config) => config.tied,
            Self::Llama(config) => config.tied,
        }
    }

    /// Gives the head a weight of its own.
    pub(super) fn untie(&mut self) {
        match self {
            Self::Gpt2(config) => config.tied = false,
            Self::Llama(config) => config.tied = false,
        }
    }

    /// Returns the name of the token embedding.
    pub(super) fn token_table(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "transformer.wte.weight",
            Self::Llama(_) => "model.embed_tokens.weight",
        }
    }

    /// Returns the prefix of names that some files leave out.
    pub(super) fn prefix(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "transformer.",
            Self::Llama(_) => "model.",
        }
    }

    /// Returns the suffixes of tensors in older files that are no weights: masks and angles.
    pub(super) fn passed_over(&self) -> &'static [&'static str] {
        match self {
            Self::Gpt2(_) => &[".attn.bias", ".attn.masked_bias"],
            Self::Llama(_) => &[".rotary_emb.inv_freq"],
        }
    }
}

fn gpt2(fields: &Fields<'_>) -> Result<Gpt, PretrainedError> {
    fields.only("activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
    let width = fields.size("n_embd")?;
    let inner = if fields.is_given("n_inner") { fields.size("n_inner")? } else { 4 * width };
    fields.check("n_inner", inner == 4 * width, || {
        format!("is {inner}, but four times n_embd, {}, is what there is", 4 * width)
    })?;
    let eps = fields.number_or("layer_norm_epsilon", 1e-5)?;
    fields
        .check("layer_norm_epsilon", eps == 1e-5, || format!("is {eps}: only 1e-5 is supported"))?;
    fields.usual("scale_attn_weights", true)?;
    fields.usual("scale_attn_by_inverse_layer_idx", false)?;
    fields.usual("add_cross_attention", false)?;
    let dropout = fields.number_below("resid_pdrop", 1.0, 0.1)?;
    for field in ["embd_pdrop", "attn_pdrop"] {
        let other = fields.number_below(field, 1.0, 0.1)?;
        fields.check(field, other == dropout, || {
            format!("is {other} where resid_pdrop is {dropout}: one number is for both")
        })?;
    }
    fields.number_below("initializer_range", 10.0, SPREAD)?;
    Ok(Gpt {
        layers: fields.positive("n_layer", MOST_LAYERS)? as usize,
        width,
        heads: fields.divisor_of("n_head", width)?,
        context: fields.size("n_positions")?,
        vocabulary: fields.size("vocab_size")?,
        dropout,
        tied: fields.flag_or("tie_word_embeddings", true)?,
    })
}

fn biases(fields: &Fields<'_>, of_type: &str) -> Result<LlamaBiases, PretrainedError> {
    if of_type != "llama" {
        return Ok(LlamaBiases { queries_keys_values: of_type == "qwen2", ..Default::default() });
    }
    let attention = fields.flag_or("attention_bias", false)?;
    let network = fields.flag_or("mlp_bias", false)?;
    Ok(LlamaBiases { queries_keys_values: attention, output: attention, network })
}

fn llama_of(fields: &Fields<'_>, of_type: &str) -> Result<Llama, PretrainedError> {
    fields.only("hidden_act", &["silu"])?;
    let width = fields.size("hidden_size")?;
    let heads = fields.size("num_attention_heads")?;
    let key_value_heads = match fields.has("num_key_value_heads") || of_type == "llama" {
        // As in transformers, `null` means as many heads of keys and values as of queries.
        true if !fields.is_given("num_key_value_heads") => heads,
        _ => fields.divisor_of("num_key_value_heads", heads)?,
    };
    let (rotary_base, rotary_scaling) = rotary(fields)?;
    Ok(Llama {
        layers: fields.positive("num_hidden_layers", MOST_LAYERS)? as usize,
        width,
        inner: fields.size("intermediate_size")?,
        heads,
        key_value_heads,
        head_width: head_width(fields, width, heads)?,
        context: context(fields, of_type)?,
        vocabulary: fields.size("vocab_size")?,
        eps: fields.number_below("rms_norm_eps", 1.0, 1e-6)?,
        rotary_base,
        rotary_scaling,
        biases: biases(fields, of_type)?,
        tied: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.number_below("attention_dropout", 1.0, 0.0)?,
        spread: fields.number_below("initializer_range", 10.0, 0.02)?,
    })
}

/// Returns the width of a head, which is even because positions rotate pairs.
fn head_width(fields: &Fields<'_>, width: i64, heads: i64) -> Result<i64, PretrainedError> {
    let head_width = match fields.is_given("head_dim") {
        true => fields.positive("head_dim", (1 << 24) / heads)?,
        false => width / fields.divisor_of("num_attention_heads", width)?,
    };
    let field = if fields.is_given("head_dim") { "head_dim" } else { "num_attention_heads" };
    fields.check(field, head_width % 2 == 0, || {
        format!("makes heads of {head_width} numbers, which cannot turn in pairs")
    })?;
    Ok(head_width)
}

/// Returns the length of the longest sequence in which every token attends to all tokens before it. In a longer
/// sequence, a sliding window would hide some of them.
fn context(fields: &Fields<'_>, of_type: &str) -> Result<i64, PretrainedError> {
    let usual = match of_type {
        "mistral" => 131_072,
        "qwen2" => 32_768,
        _ => 2048,
    };
    let context = positive_or(fields, "max_position_embeddings", usual)?;
    let slides = match of_type {
        "mistral" => true,
        "qwen2" => slides_in_a_layer(fields)?,
        _ => false,
    };
    match slides {
        // As in transformers, `null` means no window, and a missing field means a window of 4096.
        true if fields.is_given("sliding_window") || !fields.has("sliding_window") => {
            Ok(context.min(positive_or(fields, "sliding_window", 4096)?))
        }
        _ => Ok(context),
    }
}

fn positive_or(fields: &Fields<'_>, field: &str, usual: i64) -> Result<i64, PretrainedError> {
    if fields.is_given(field) { fields.positive(field, LONGEST) } else { Ok(usual) }
}

/// Returns whether any of a Qwen2's layers has a sliding window.
fn slides_in_a_layer(fields: &Fields<'_>) -> Result<bool, PretrainedError> {
    let slides = fields.flag_or("use_sliding_window", false)?;
    let layers = fields.positive("num_hidden_layers", MOST_LAYERS)?;
    if !fields.is_given("layer_types") {
        let whole = positive_or(fields, "max_window_layers", 28)?;
        return Ok(slides && layers > whole);
    }
    let types = fields.texts("layer_types")?;
    fields.check("layer_types", types.len() as i64 == layers, || {
        format!("has {} entries for {layers} layers", types.len())
    })?;
    let known: &[&str] = match slides {
        true => &["full_attention", "sliding_attention"],
        false => &["full_attention"],
    };
    let other = types.iter().find(|kind| !known.contains(kind));
    match other {
        Some(other) => Err(fields.wrong(
            "layer_types",
            format!(
                "has '{other}': those known, with this use_sliding_window, are {}",
                known.join(", ")
            ),
        )),
        None => Ok(types.contains(&"sliding_attention")),
    }
}

/// Reads the base and the scaling of rotary positions, which older files keep in different places.
fn rotary(fields: &Fields<'_>) -> Result<(f64, RotaryScaling), PretrainedError> {
    whole_heads(fields)?;
    fields.off("original_max_position_embeddings", "give it only in rope_parameters")?;
    let base = fields.above_0_or("rope_theta", 10_000.0)?;
    let inner = |field| fields.inner(field, keys::ROPE_SCALED_LLAMA3);
    // As in transformers, the older name takes precedence unless it is empty.
    let older = inner("rope_scaling")?.filter(|inner| !inner.is_empty());
    let newer = inner("rope_parameters")?;
    let Some(inner) = older.or(newer) else { return Ok((base, RotaryScaling::Unscaled)) };
    whole_heads(&inner)?;
    let base = inner.above_0_or("rope_theta", base)?;
    let kind = if inner.is_given("rope_type") { "rope_type" } else { "type" };
    let found = if inner.is_given(kind) { inner.text(kind)? } else { "default" };
    let (table, scaling) = match found {
        "default" => (keys::ROPE_UNSCALED, RotaryScaling::Unscaled),
        "linear" => {
            let factor = inner.above_0("factor")?;
            (keys::ROPE_SCALED_LINEAR, RotaryScaling::Linear { factor })
        }
        "llama3" => (keys::ROPE_SCALED_LLAMA3, llama3(&inner)?),
        other => {
            let reason = format!("is '{other}': supported are default, linear, llama3");
            return Err(inner.wrong(kind, reason));
        }
    };
    inner.held_to(table).check_known()?;
    Ok((base, scaling))
}

fn llama3(inner: &Fields<'_>) -> Result<RotaryScaling, PretrainedError> {
    let low_turns = inner.above_0("low_freq_factor")?;
    let high_turns = inner.above_0("high_freq_factor")?;
    inner.check("high_freq_factor", high_turns > low_turns, || {
        format!("is {high_turns}, and low_freq_factor {low_turns}: it must be above")
    })?;
    let factor = inner.above_0("factor")?;
    let first_context = inner.above_0("original_max_position_embeddings")?;
    Ok(RotaryScaling::Llama3 { factor, low_turns, high_turns, first_context })
}

/// Refuses heads that rotate only in part.
fn whole_heads(fields: &Fields<'_>) -> Result<(), PretrainedError> {
    let field = "partial_rotary_factor";
    let part = fields.number_or(field, 1.0)?;
    fields.check(field, part == 1.0, || format!("is {part}: only 1 is supported"))
}
