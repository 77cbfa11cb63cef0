//! Compiles the C++ bridge against the libtorch that torch-sys links.
//!
//! In this repository that is the libtorch installed by `scripts/libtorch`; elsewhere torch-sys uses `LIBTORCH`,
//! an installed PyTorch, or a download.
//!
//! `cuda/` becomes a separate shared object, because it needs symbols that exist only with CUDA. The library
//! embeds its bytes and loads it at run time. `kernels/` is embedded as text and compiled at run time for the GPU
//! in use.

use std::fmt::Display;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::exit;
use std::{env, fs};

/// Layers and optimizers of the bridge, compiled as one unit; the remaining files form a second unit, compiled in
/// parallel. Parsing libtorch's headers takes longer than compiling our files. Files of one unit must not define
/// the same name.
const LAYERS: [&str; 15] = [
    "bridge/activation.cpp",
    "bridge/batch_norm.cpp",
    "bridge/embedding.cpp",
    "bridge/foreach.cpp",
    "bridge/kernels.cpp",
    "bridge/memory_format.cpp",
    "bridge/linear_cross_entropy.cpp",
    "bridge/norm.cpp",
    "bridge/optim.cpp",
    "bridge/own_generator.cpp",
    "bridge/projection.cpp",
    "bridge/rotary.cpp",
    "bridge/whole.cpp",
    // These two files work without CUDA, because kernels can be compiled on machines without a GPU.
    "cuda/kernels/cache.cpp",
    "cuda/kernels/compiler.cpp",
];

/// Loops over host memory, compiled separately.
const HOST_KERNELS: &str = "bridge/host_update.cpp";

/// Units of `cuda/`: one works with tensors, one finds and loads kernels. The files that launch a kernel family
/// are compiled separately and in parallel; they include few headers.
const CUDA_TENSORS: [&str; 4] =
    ["cuda/graph.cpp", "cuda/memory.cpp", "cuda/object.cpp", "cuda/kernels/batch_norm.cpp"];
const CUDA_LOADING: [&str; 5] = [
    "cuda/kernels/cache.cpp",
    "cuda/kernels/gpu.cpp",
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
        // Documentation can be built without libtorch; the source still includes the object file.
        fs::write(cuda_object_path(), []).expect("cargo's folder can be written to");
        return;
    }
    let include = headers();
    show_libraries_to_cargo();
    write_kernel_sources();
    let runtime = files("bridge", ".cpp", &[&LAYERS[..], &[HOST_KERNELS]].concat());
    let units = [write_unit("layers.cpp", &LAYERS), write_unit("runtime.cpp", &runtime)];
    compiler(&include).files(units).compile("brimful_bridge");
    host_kernels(&include);
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    cuda_object(&include);
}

/// Lists the files of a folder with this ending, without `others`, in sorted order. Editors' temporary files
/// begin with a dot and are skipped.
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

/// Writes a unit: a file that includes the given files.
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
        // libtorch itself is built with NDEBUG. Without it, some classes of libtorch's headers have more fields.
        .define("NDEBUG", None)
        // The arena allocator is on the hot path of debug builds too.
        .opt_level(2)
        // Debug information of libtorch's headers doubles the compile time and is linked into every program.
        // `CXXFLAGS=-g` restores it.
        .debug(false)
        // libtorch's headers are included as system headers, so that their warnings do not drown ours.
        .flag("-isystem")
        .flag(include)
        .include(".")
        .include(out_folder());
    build
}

/// Compiles the loops over host memory for wide vector registers. The flags keep floating-point rounding as
/// written.
fn host_kernels(include: &Path) {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").pic(true).opt_level(3).debug(false).include(".");
    build.flag("-isystem").flag(include);
    build.flag("-ffp-contract=off").flag("-fno-math-errno");
    build.file(HOST_KERNELS).compile("brimful_host");
}

/// Links `cuda/` with unresolved symbols allowed and without debug information.
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

/// Writes `kernel_sources.h`: each `kernels/*.cu` as a raw string with its includes inlined.
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

/// Returns a file's text with each `#include "…"` line replaced by that file, once per file.
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

/// Lets `cargo run` and `cargo test` of every dependent crate load libtorch without exported variables. cargo adds
/// the folders that build scripts name to the library path, but only folders inside its own target directory; so a
/// link in the target directory points to the libraries.
fn show_libraries_to_cargo() {
    let linked = env::var_os("LIBTORCH").map(|root| Path::new(&root).join("lib"));
    let linked = linked.or_else(|| env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from));
    // The libraries find each other by relative paths, which links to single files would break.
    let file = linked.and_then(|folder| folder.join("libtorch_cpu.so").canonicalize().ok());
    let Some(libraries) = file.as_deref().and_then(Path::parent) else { return };
    let shown = out_folder().join("libtorch");
    let _ = fs::remove_file(&shown);
    if symlink(libraries, &shown).is_ok() {
        // Listed as a folder of Rust dependencies, which the linker does not search.
        println!("cargo:rustc-link-search=dependency={}", shown.display());
    }
}

fn fail(message: &str) -> ! {
    println!("cargo:warning={message}");
    exit(1);
}

/// Returns the header folder in `LIBTORCH`, or else beside the libraries that torch-sys links.
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
