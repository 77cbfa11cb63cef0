//! Implementation of the program `brimful`. It is not meant to be built on: the library is [`brimful`].
//!
//! Only this project's benchmarks use the public items. The benchmarks are a separate program, `brimful-bench`,
//! which shares flags, models and data with `brimful`.

#![deny(unsafe_code)]

#[doc(hidden)]
pub mod args;
mod calendar;
mod chat_message;
#[doc(hidden)]
pub mod command_line;
#[doc(hidden)]
pub mod commands;
mod config;
#[doc(hidden)]
pub mod data;
#[doc(hidden)]
pub mod exit;
mod files;
mod folder_tokenizer;
mod generation_config;
mod jinja_template;
mod log_files;
#[doc(hidden)]
pub mod model;
mod named;
#[doc(hidden)]
pub mod output;
#[doc(hidden)]
pub mod progress;
mod saved_weights;
#[doc(hidden)]
pub mod setting;
mod shell;
mod tokenizer;
