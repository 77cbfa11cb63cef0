//! Lets the fuzz targets find libtorch, which lies deeper below them than below the workspace, and
//! says again what cargo-fuzz's own flags drop from `.cargo/config.toml`.

fn main() {
    let root = env!("CARGO_MANIFEST_DIR");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{root}/../.libtorch/lib");
    println!("cargo::rustc-link-arg=-Wl,--allow-shlib-undefined");
}
