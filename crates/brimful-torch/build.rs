//! Compiles the C++ bridge against the libtorch that torch-sys links.
//!
//! In this repository that is the one which `scripts/libtorch` has put in place; elsewhere it is
//! that of `LIBTORCH`, of an installed PyTorch, or a downloaded one, as torch-sys has it.
//!
//! `cuda/` becomes a shared object of its own, because it needs symbols that are there only where
//! CUDA is. The library carries it as bytes and loads it at run time. `kernels/` goes into both as text,
//! to be compiled for the card at hand.

use std::fmt::Display;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::exit;
use std::{env, fs};

/// The bridge's layers and optimizers, which are one unit; the rest of it is another, compiled beside it: libtorch's
/// headers take longer to read than our files to compile. Files of one unit cannot each have a thing of the same name.
const LAYERS: [&str; 14] = [
    "bridge/activation.cpp",
    "bridge/batch_norm.cpp",
    "bridge/embedding.cpp",
    "bridge/foreach.cpp",
    "bridge/kernels.cpp",
    "bridge/layout.cpp",
    "bridge/linear_cross_entropy.cpp",
    "bridge/norm.cpp",
    "bridge/optim.cpp",
    "bridge/own_generator.cpp",
    "bridge/projection.cpp",
    "bridge/rotary.cpp",
    // Neither needs CUDA to be there: the compiler serves on machines without a card too.
    "cuda/kernels/cache.cpp",
    "cuda/kernels/compiler.cpp",
];

/// Loops over the host's memory, which are compiled by themselves.
const HOST_KERNELS: &str = "bridge/host_adam.cpp";

/// The units of `cuda/`: what works with tensors, and what finds and loads kernels. What launches a family is
/// compiled by itself, with its own threads and family; those files read few headers.
const CUDA_TENSORS: [&str; 4] =
    ["cuda/graph.cpp", "cuda/memory.cpp", "cuda/object.cpp", "cuda/kernels/batch_norm.cpp"];
const CUDA_LOADING: [&str; 5] = [
    "cuda/kernels/cache.cpp",
    "cuda/kernels/card.cpp",
    "cuda/kernels/compiler.cpp",
    "cuda/kernels/driver.cpp",
    "cuda/kernels/kernel.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=bridge");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if cfg!(feature = "doc-only") {
        // Pages can be written without libtorch; the object is named by the source all the same.
        fs::write(cuda_object_path(), []).expect("cargo's folder can be written to");
        return;
    }
    let include = headers();
    show_libraries_to_cargo();
    write_kernel_sources();
    let runtime = files("bridge", ".cpp", &[&LAYERS[..], &[HOST_KERNELS]].concat());
    let units = [write_unit("layers.cpp", &LAYERS), write_unit("runtime.cpp", &runtime)];
    compiler(&include).files(units).compile("brimful_bridge");
    host_kernels();
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    cuda_object(&include);
}

/// The files of a folder whose names end so, but for some, in their order. Editors' own begin with a dot.
fn files(folder: &str, ending: &str, others: &[&str]) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .expect("it is a folder of this package")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(ending) && !name.starts_with('.'))
        .map(|name| format!("{folder}/{name}"))
        .filter(|path| !others.contains(&path.as_str()))
        .collect();
    names.sort();
    names
}

/// Writes a unit: a file that includes its own.
fn write_unit(name: &str, files: &[impl Display]) -> PathBuf {
    let path = out_folder().join(name);
    let text: String = files.iter().map(|file| format!("#include \"{file}\"\n")).collect();
    fs::write(&path, text).expect("cargo's folder can be written to");
    path
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
        // What a debugger would read of libtorch's headers takes as long again to compile, and stands in
        // every program that is linked. `CXXFLAGS=-g` brings it back.
        .debug(false)
        // As system headers, so that libtorch's own warnings do not drown ours.
        .flag("-isystem")
        .flag(include)
        .include(".")
        .include(out_folder());
    build
}

/// Compiles the loops over the host's memory, for wide registers: they round as they are written.
fn host_kernels() {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").pic(true).opt_level(3).debug(false).include(".");
    build.flag("-ffp-contract=off").flag("-fno-math-errno");
    build.file(HOST_KERNELS).compile("brimful_host");
}

/// Links `cuda/` with its symbols left open, and without what a debugger would read.
fn cuda_object(include: &Path) {
    let mut build = compiler(include);
    build.flag("-isystem").flag("cuda/headers");
    build.file(write_unit("tensors.cpp", &CUDA_TENSORS));
    build.file(write_unit("loading.cpp", &CUDA_LOADING));
    build.files(files("cuda/kernels", ".cpp", &[&CUDA_TENSORS[..], &CUDA_LOADING].concat()));
    let objects = build.compile_intermediates();
    let mut command = build.get_compiler().to_command();
    command.args(["-shared", "-s", "-Wl,-z,undefs"]).args(objects);
    command.arg("-o").arg(cuda_object_path());
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{command:?} ended with {status}")),
        Err(error) => fail(&format!("cannot run {command:?}: {error}")),
    }
}

fn cuda_object_path() -> PathBuf {
    out_folder().join("brimful_cuda.so")
}

fn out_folder() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"))
}

/// Writes `kernel_sources.h`: each `kernels/*.cu` as a raw string, with what it includes in it.
fn write_kernel_sources() {
    let mut header = String::from(
        "#pragma once\n#include \"cuda/kernels/source.h\"\nnamespace brimful::kernels {\n",
    );
    let mut list = String::new();
    for file in files("kernels", ".cu", &[]) {
        let name = file.trim_start_matches("kernels/");
        let constant = name.trim_end_matches(".cu");
        let text = with_includes(Path::new("kernels"), name, &mut Vec::new());
        header += &format!(
            "inline constexpr Source {constant}_source{{\"{name}\", R\"KERNEL({text})KERNEL\"}};\n"
        );
        list += &format!("{constant}_source, ");
    }
    header += &format!("inline constexpr Source kSources[] = {{{list}}};\n}}\n");
    fs::write(out_folder().join("kernel_sources.h"), header)
        .expect("cargo's folder can be written to");
}

/// A file's text with its `#include "…"` lines replaced by those files, each once.
fn with_includes(folder: &Path, name: &str, seen: &mut Vec<String>) -> String {
    if seen.iter().any(|other| other == name) {
        return String::new();
    }
    seen.push(name.to_owned());
    let text = fs::read_to_string(folder.join(name))
        .unwrap_or_else(|error| fail(&format!("kernels/{name}: {error}")));
    let line = |line: &str| match line.strip_prefix("#include \"") {
        Some(rest) => with_includes(folder, rest.trim_end_matches('"'), seen),
        None if line == "#pragma once" => String::new(),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
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
    let shown = out_folder().join("libtorch");
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
