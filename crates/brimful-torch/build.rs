//! Compiles the C++ bridge against the libtorch that `scripts/libtorch` has put in place.

use std::env;
use std::path::{Path, PathBuf};
use std::process::exit;

const SOURCES: [&str; 8] = [
    "bridge/arena.cpp",
    "bridge/autograd.cpp",
    "bridge/device.cpp",
    "bridge/foreach.cpp",
    "bridge/gradients.cpp",
    "bridge/meta.cpp",
    "bridge/optim.cpp",
    "bridge/random.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=bridge");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let include = headers();
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // The arena allocator is on the hot path of debug builds too.
        .opt_level(2)
        // As system headers, so that libtorch's own warnings do not drown ours.
        .flag("-isystem")
        .flag(&include)
        .files(SOURCES)
        .compile("brimful_bridge");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
}

fn headers() -> PathBuf {
    let root = env::var("LIBTORCH").unwrap_or_default();
    let include = Path::new(&root).join("include");
    if !include.join("ATen/ATen.h").exists() {
        println!("cargo:warning=no libtorch headers in {include:?}: run scripts/libtorch first");
        exit(1);
    }
    include
}
