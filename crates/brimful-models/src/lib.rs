#![forbid(unsafe_code)]
//! The models of the papers and of the examples, as lists of named layers.
//!
//! | model | layers | names and shapes of |
//! | --- | --- | --- |
//! | [`mlp`] | each linear layer and each activation | – |
//! | [`resnet18`], [`resnet50`], [`resnet101`], [`ResNet`] | stem, each residual block, head | torchvision |
//! | [`gpt`], [`Gpt`] | embeddings, each transformer block, head | GPT-2 |
//!
//! Each is a [`brimful::Layers`], so it can be built whole, built in parts on several devices, or
//! counted without being built:
//!
//! ```
//! let layers = brimful_models::resnet50(1000);
//! assert_eq!(layers.parameter_count()?, 25_557_032);
//! # Ok::<(), brimful::Error>(())
//! ```

mod gpt;
mod mlp;
mod norm;
mod resnet;

pub use gpt::{Gpt, gpt};
pub use mlp::mlp;
pub use resnet::{ResNet, Stem, resnet18, resnet50, resnet101};
