#![forbid(unsafe_code)]
//! The models of the papers and of the examples, as lists of named layers.
//!
//! | model | layers | names and shapes of |
//! | --- | --- | --- |
//! | [`mlp`] | each linear layer and each activation | – |
//! | [`resnet18`], [`resnet50`], [`resnet101`], [`ResNet`] | stem, each residual block, head | torchvision |
//! | [`UNet`] | each convolution with what follows it, each pool, up and end of a skip | – |
//! | [`AmoebaNet`] | stem, each cell, head | – |
//! | [`gpt`], [`gpt_body`], [`Gpt`] | embeddings, each transformer block, head | GPT-2 |
//!
//! Each is a [`brimful::Layers`], so it can be built whole, built in parts on several devices, or
//! counted without being built:
//!
//! ```
//! let layers = brimful_models::resnet50(1000);
//! assert_eq!(layers.parameter_count()?, 25_557_032);
//! # Ok::<(), brimful::Error>(())
//! ```

mod amoebanet;
mod conv;
mod error;
mod gpt;
mod mlp;
mod norm;
mod resnet;
mod unet;

pub use amoebanet::AmoebaNet;
pub use error::ShapeError;
pub use gpt::{GPT_HEAD, Gpt, gpt, gpt_body, gpt_head_weight};
pub use mlp::mlp;
pub use resnet::{ResNet, Stem, resnet18, resnet50, resnet101};
pub use unet::UNet;
