#![forbid(unsafe_code)]
//! Models of the papers and of the examples, as lists of named layers.
//!
//! | model | layers | names and shapes of |
//! | --- | --- | --- |
//! | [`mlp`] | each linear layer and each activation | – |
//! | [`resnet18`], [`resnet50`], [`resnet101`], [`ResNet`] | stem, each residual block, head | torchvision |
//! | [`UNet`] | each convolution with its normalisation, each pool, up and end of a skip | – |
//! | [`AmoebaNet`] | stem, each cell, head | – |
//! | [`gpt`], [`gpt_body`], [`Gpt`] | embeddings, each transformer block, head | GPT-2 |
//! | [`llama`], [`Llama`] | embedding, each transformer block, norm, head | Llama, Mistral, Qwen2 |
//!
//! Each is a [`brimful::Layers`], which can be built as a whole, built in parts on several devices, or counted
//! without being built:
//!
//! ```
//! let layers = brimful_models::resnet50(1000);
//! assert_eq!(layers.parameter_count()?, 25_557_032);
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! [`pretrained`] reads and writes folders of pretrained weights.

mod amoebanet;
mod attention;
mod conv;
mod error;
mod gpt;
mod key_value_cache;
mod llama;
mod mlp;
mod norm;
pub mod pretrained;
mod resnet;
mod rotary;
mod stem;
mod tokens;
mod unet;

pub use amoebanet::AmoebaNet;
pub use error::ShapeError;
pub use gpt::{Gpt, gpt, gpt_body, gpt_with_cache};
pub use key_value_cache::KeyValueCache;
pub use llama::{Llama, LlamaBiases, llama, llama_with_cache};
pub use mlp::mlp;
pub use resnet::{ResNet, Stem, resnet18, resnet50, resnet101};
pub use rotary::RotaryScaling;
pub use tokens::{LANGUAGE_HEAD, language_head_weight};
pub use unet::UNet;
