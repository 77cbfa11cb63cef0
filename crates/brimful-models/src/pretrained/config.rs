//! What a folder's config.json says of its model.

use brimful::Layers;
use brimful::nn::WeightOrder;
use serde_json::Value;

use super::PretrainedError;
use super::fields::Fields;
use crate::gpt::gpt_under;
use crate::llama::llama_keeping;
use crate::{Gpt, KeyValueCache, Llama, LlamaBiases, RotaryScaling};

/// The types of models that are known, as config.json has them.
pub(super) const MODEL_TYPES: [&str; 4] = ["gpt2", "llama", "mistral", "qwen2"];
/// The name that all layers of a GPT-2 but its head stand under.
const GPT2_BODY: &str = "transformer";

/// A model, as its config.json tells of it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Config {
    /// A GPT-2.
    Gpt2(Gpt),
    /// A Llama, Mistral or Qwen2.
    Llama(Llama),
}

impl Config {
    pub(super) fn of(fields: &Fields<'_>) -> Result<Self, PretrainedError> {
        let found = fields.text("model_type")?;
        match found.as_str() {
            "gpt2" => gpt2(fields).map(Self::Gpt2),
            "llama" => llama_of(fields, llama_biases(fields)?).map(Self::Llama),
            "mistral" => llama_of(fields, LlamaBiases::default()).map(Self::Llama),
            "qwen2" => {
                let biases = LlamaBiases { queries_keys_values: true, ..LlamaBiases::default() };
                llama_of(fields, biases).map(Self::Llama)
            }
            _ => Err(PretrainedError::ModelType { path: fields.path(), found }),
        }
    }

    /// The model as a list of layers, under the names of its published weights.
    pub fn layers(&self) -> Layers {
        self.layers_keeping(None)
    }

    /// The same, keeping what it has seen: see [`KeyValueCache`].
    pub fn layers_with_cache(&self, cache: &KeyValueCache) -> Layers {
        self.layers_keeping(Some(cache))
    }

    fn layers_keeping(&self, cache: Option<&KeyValueCache>) -> Layers {
        match self {
            Self::Gpt2(config) => gpt_under(GPT2_BODY, config, cache),
            Self::Llama(config) => llama_keeping(config, cache),
        }
    }

    /// The longest sequence that it takes.
    pub fn context(&self) -> i64 {
        match self {
            Self::Gpt2(config) => config.context,
            Self::Llama(config) => config.context,
        }
    }

    /// The numbers of each token within it: one side of every projection of its blocks.
    pub fn width(&self) -> i64 {
        match self {
            Self::Gpt2(config) => config.width,
            Self::Llama(config) => config.width,
        }
    }

    /// How many different tokens there are.
    pub fn vocabulary(&self) -> i64 {
        match self {
            Self::Gpt2(config) => config.vocabulary,
            Self::Llama(config) => config.vocabulary,
        }
    }

    /// What the rows of its projections' weights stand for.
    pub fn weight_order(&self) -> WeightOrder {
        match self {
            Self::Gpt2(_) => WeightOrder::InputsFirst,
            Self::Llama(_) => WeightOrder::OutputsFirst,
        }
    }

    /// The projections of its blocks, by the last part of their names.
    pub fn projections(&self) -> Vec<String> {
        let names: &[&str] = match self {
            Self::Gpt2(_) => &["c_attn", "c_proj", "c_fc"],
            Self::Llama(_) => {
                &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            }
        };
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// What some files leave out at the beginning of names.
    pub(super) fn prefix(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "transformer.",
            Self::Llama(_) => "model.",
        }
    }
}

fn gpt2(fields: &Fields<'_>) -> Result<Gpt, PretrainedError> {
    fields.only("activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
    let width = fields.positive("n_embd")?;
    let inner = fields.positive_or("n_inner", 4 * width)?;
    fields.check("n_inner", inner == 4 * width, || {
        format!("is {inner}, but four times n_embd, {}, is what there is", 4 * width)
    })?;
    let eps = fields.number_or("layer_norm_epsilon", 1e-5)?;
    fields
        .check("layer_norm_epsilon", eps == 1e-5, || format!("is {eps}: it can be 1e-5 alone"))?;
    for (field, usual) in [
        ("scale_attn_weights", true),
        ("scale_attn_by_inverse_layer_idx", false),
        ("add_cross_attention", false),
    ] {
        let set = fields.flag_or(field, usual)?;
        fields.check(field, set == usual, || format!("is {set}: it can be {usual} alone"))?;
    }
    Ok(Gpt {
        layers: fields.positive("n_layer")? as usize,
        width,
        heads: fields.divisor_of("n_head", width)?,
        context: fields.positive("n_positions")?,
        vocabulary: fields.positive("vocab_size")?,
        dropout: fields.number_or("resid_pdrop", 0.1)?,
        tied: fields.flag_or("tie_word_embeddings", true)?,
    })
}

fn llama_biases(fields: &Fields<'_>) -> Result<LlamaBiases, PretrainedError> {
    let attention = fields.flag_or("attention_bias", false)?;
    let network = fields.flag_or("mlp_bias", false)?;
    Ok(LlamaBiases { queries_keys_values: attention, output: attention, network })
}

fn llama_of(fields: &Fields<'_>, biases: LlamaBiases) -> Result<Llama, PretrainedError> {
    fields.only("hidden_act", &["silu"])?;
    let width = fields.positive("hidden_size")?;
    let heads = fields.positive("num_attention_heads")?;
    let key_value_heads = match fields.is_given("num_key_value_heads") {
        true => fields.divisor_of("num_key_value_heads", heads)?,
        false => heads,
    };
    let head_width = match fields.is_given("head_dim") {
        true => fields.positive("head_dim")?,
        false => width / fields.divisor_of("num_attention_heads", width)?,
    };
    let (rotary_base, rotary_scaling) = rotary(fields)?;
    Ok(Llama {
        layers: fields.positive("num_hidden_layers")? as usize,
        width,
        inner: fields.positive("intermediate_size")?,
        heads,
        key_value_heads,
        head_width,
        context: context(fields)?,
        vocabulary: fields.positive("vocab_size")?,
        eps: fields.number_or("rms_norm_eps", 1e-6)?,
        rotary_base,
        rotary_scaling,
        biases,
        tied: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.number_or("attention_dropout", 0.0)?,
        spread: fields.number_or("initializer_range", 0.02)?,
    })
}

/// The longest sequence in which every token sees all before it: a window that slides would hide some of a
/// longer one's.
fn context(fields: &Fields<'_>) -> Result<i64, PretrainedError> {
    let context = fields.positive_or("max_position_embeddings", 2048)?;
    let slides = fields.flag_or("use_sliding_window", true)?;
    let window = if slides { fields.positive_or("sliding_window", context)? } else { context };
    Ok(context.min(window))
}

/// The base of rotary positions, and how they were stretched: older files say both at different places.
fn rotary(fields: &Fields<'_>) -> Result<(f64, RotaryScaling), PretrainedError> {
    let inner = fields.inner("rope_parameters").or_else(|| fields.inner("rope_scaling"));
    let base = fields.number_or("rope_theta", 10_000.0)?;
    let Some(inner) = inner else { return Ok((base, RotaryScaling::Unscaled)) };
    let base = inner.number_or("rope_theta", base)?;
    let kind = inner.value("rope_type").or_else(|| inner.value("type"));
    let scaling = match kind.and_then(Value::as_str).unwrap_or("default") {
        "default" => RotaryScaling::Unscaled,
        "linear" => RotaryScaling::Linear { factor: inner.above_0("factor")? },
        "llama3" => RotaryScaling::Llama3 {
            factor: inner.above_0("factor")?,
            low_turns: inner.above_0("low_freq_factor")?,
            high_turns: inner.above_0("high_freq_factor")?,
            first_context: inner.above_0("original_max_position_embeddings")?,
        },
        other => {
            let reason = format!("is '{other}': those known are default, linear, llama3");
            return Err(inner.wrong("rope_type", reason));
        }
    };
    Ok((base, scaling))
}
