//! Compiles the C++ bridge against the libtorch that `scripts/libtorch` has put in place.
//!
//! `graph/` becomes a shared object of its own, because it needs symbols that are there only where
//! CUDA is. The library carries it as bytes and loads it at run time.

use std::env;
use std::path::{Path, PathBuf};
use std::process::exit;

const SOURCES: [&str; 10] = [
    "bridge/arena.cpp",
    "bridge/autograd.cpp",
    "bridge/device.cpp",
    "bridge/foreach.cpp",
    "bridge/gradients.cpp",
    "bridge/graph_object.cpp",
    "bridge/layout.cpp",
    "bridge/meta.cpp",
    "bridge/optim.cpp",
    "bridge/random.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=bridge");
    println!("cargo:rerun-if-changed=graph");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let include = headers();
    compiler(&include).files(SOURCES).compile("brimful_bridge");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    graph_object(&include);
}

fn compiler(include: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .pic(true)
        // The arena allocator is on the hot path of debug builds too.
        .opt_level(2)
        // As system headers, so that libtorch's own warnings do not drown ours.
        .flag("-isystem")
        .flag(include);
    build
}

/// Links `graph/graph.cpp` with its symbols left open, and without what a debugger would read.
fn graph_object(include: &Path) {
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut command = compiler(include).get_compiler().to_command();
    command.args(["-isystem", "graph/cuda", "-shared", "-s", "-Wl,-z,undefs", "graph/graph.cpp"]);
    command.arg("-o").arg(folder.join("brimful_graph.so"));
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{command:?} ended with {status}")),
        Err(error) => fail(&format!("cannot run {command:?}: {error}")),
    }
}

fn fail(message: &str) -> ! {
    println!("cargo:warning={message}");
    exit(1);
}

fn headers() -> PathBuf {
    let root = env::var("LIBTORCH").unwrap_or_default();
    let include = Path::new(&root).join("include");
    if !include.join("ATen/ATen.h").exists() {
        fail(&format!("no libtorch headers in {include:?}: run scripts/libtorch first"));
    }
    include
}
