//! Compiles the C++ bridge against the libtorch that torch-sys links.
//!
//! In this repository that is the one which `scripts/libtorch` has put in place; elsewhere it is
//! that of `LIBTORCH`, of an installed PyTorch, or a downloaded one, as torch-sys has it.
//!
//! `cuda/` becomes a shared object of its own, because it needs symbols that are there only where
//! CUDA is. The library carries it as bytes and loads it at run time.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::exit;
use std::{env, fs};

const SOURCES: [&str; 20] = [
    "bridge/arena.cpp",
    "bridge/autograd.cpp",
    "bridge/cuda.cpp",
    "bridge/cuda_object.cpp",
    "bridge/events.cpp",
    "bridge/foreach.cpp",
    "bridge/generator.cpp",
    "bridge/gradients.cpp",
    "bridge/layout.cpp",
    "bridge/libtorch.cpp",
    "bridge/linear_cross_entropy.cpp",
    "bridge/memory.cpp",
    "bridge/meta.cpp",
    "bridge/optim.cpp",
    "bridge/own_generator.cpp",
    "bridge/refusals.cpp",
    "bridge/start.cpp",
    "bridge/streams.cpp",
    "bridge/touched.cpp",
    "bridge/transfer.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=bridge");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if cfg!(feature = "doc-only") {
        // Pages can be written without libtorch; the object is named by the source all the same.
        fs::write(cuda_object_path(), []).expect("cargo's folder can be written to");
        return;
    }
    let include = headers();
    show_libraries_to_cargo();
    compiler(&include).files(SOURCES).compile("brimful_bridge");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    cuda_object(&include);
}

fn compiler(include: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .pic(true)
        // As libtorch itself was compiled: without it some classes of its headers have more fields.
        .define("NDEBUG", None)
        // The arena allocator is on the hot path of debug builds too.
        .opt_level(2)
        // As system headers, so that libtorch's own warnings do not drown ours.
        .flag("-isystem")
        .flag(include);
    build
}

/// Links `cuda/` with its symbols left open, and without what a debugger would read.
fn cuda_object(include: &Path) {
    let mut command = compiler(include).get_compiler().to_command();
    command.args(["-isystem", "cuda/headers", "-shared", "-s", "-Wl,-z,undefs"]);
    command.args(["cuda/graph.cpp", "cuda/memory.cpp", "cuda/object.cpp"]);
    command.arg("-o").arg(cuda_object_path());
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{command:?} ended with {status}")),
        Err(error) => fail(&format!("cannot run {command:?}: {error}")),
    }
}

fn cuda_object_path() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("brimful_cuda.so")
}

/// Lets `cargo run` and `cargo test` of every crate that uses this one load libtorch with nothing
/// exported: cargo has programs look in the folders that build scripts name, where those are inside its
/// own. So a link in there leads to the libraries, wherever these are.
fn show_libraries_to_cargo() {
    let linked = env::var_os("LIBTORCH").map(|root| Path::new(&root).join("lib"));
    let linked = linked.or_else(|| env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from));
    // The files themselves know their neighbours by relative paths, links to them do not.
    let file = linked.and_then(|folder| folder.join("libtorch_cpu.so").canonicalize().ok());
    let Some(libraries) = file.as_deref().and_then(Path::parent) else { return };
    let shown = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("libtorch");
    let _ = fs::remove_file(&shown);
    if symlink(libraries, &shown).is_ok() {
        // As a folder of Rust's own libraries, where the linker does not look.
        println!("cargo:rustc-link-search=dependency={}", shown.display());
    }
}

fn fail(message: &str) -> ! {
    println!("cargo:warning={message}");
    exit(1);
}

/// The headers in `LIBTORCH`, or else beside the libraries that torch-sys says it links.
fn headers() -> PathBuf {
    let root = env::var_os("LIBTORCH").map(PathBuf::from);
    let lib = env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from);
    let beside = lib.as_deref().and_then(Path::parent).map(Path::to_owned);
    let places: Vec<_> = [root, beside].into_iter().flatten().map(|p| p.join("include")).collect();
    let found = places.iter().find(|include| include.join("ATen/ATen.h").exists());
    found.cloned().unwrap_or_else(|| {
        fail(&format!(
            "no libtorch headers in {places:?}: run scripts/libtorch in brimful's repository; \
             elsewhere set LIBTORCH, or use the feature download-libtorch"
        ))
    })
}
