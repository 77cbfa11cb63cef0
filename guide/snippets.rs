#![forbid(unsafe_code)]
//! Every Rust snippet of the guide and of the README as a doc test: see `build.rs`.

include!(concat!(env!("OUT_DIR"), "/pages.rs"));
