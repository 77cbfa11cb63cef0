//! Makes a doc test of every Rust snippet in the guide and in the README.
//!
//! Setup that a snippet does not show is in a comment above it, and also holds for the snippets
//! after it, until the next such comment of the page:
//!
//! ```text
//! <!-- setup
//! let store = nn::VarStore::new(Device::Cpu);
//! -->
//! ```

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=../README.md");
    let mut pages: Vec<PathBuf> = vec!["../README.md".into()];
    for entry in fs::read_dir("src")? {
        pages.push(entry?.path());
    }
    pages.sort();
    let mut source = String::new();
    for page in pages.iter().filter(|page| page.extension().is_some_and(|end| end == "md")) {
        let tests = doc_tests(&fs::read_to_string(page)?);
        if tests.is_empty() {
            continue;
        }
        writeln!(source, "#[doc = {tests:?}]\npub mod {} {{}}", module(page)).expect("a string");
    }
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(folder.join("pages.rs"), source)
}

/// `src/first-steps.md` is `first_steps`.
fn module(page: &Path) -> String {
    let stem = page.file_stem().unwrap_or_default().to_string_lossy();
    stem.to_lowercase().replace('-', "_")
}

/// The page's Rust snippets alone, each with its setup as hidden lines.
fn doc_tests(page: &str) -> String {
    let mut tests = String::new();
    let mut setup: Vec<&str> = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if line == "<!-- setup" {
            setup = lines.by_ref().take_while(|line| *line != "-->").collect();
        } else if line.starts_with("```rust") {
            let hidden = setup.iter().map(|line| format!("# {line}\n"));
            tests.extend([line, "\n"]);
            tests.extend(hidden);
            let shown: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
            shown.iter().for_each(|line| tests.extend([line, "\n"]));
            if !shown.iter().any(|line| line.starts_with("fn main")) {
                // A snippet may use `?`.
                tests += "# Ok::<(), Box<dyn std::error::Error>>(())\n";
            }
            tests += "```\n";
        }
    }
    tests
}
