//! The library's modules follow the order of DESIGN.md's table: each uses only those above it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Heading of the table; its rows follow.
const HEADING: &str = "| module, lowest level first | its one duty |";

/// Modules outside the order: all fail with `error`, and `lib` re-exports all.
const ASIDE: [&str; 2] = ["error", "lib"];

/// Returns the modules in the order of the table.
fn order() -> Vec<String> {
    let design = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../DESIGN.md");
    let design = fs::read_to_string(design).expect("DESIGN.md is at the workspace's root");
    let rows = design.split_once(HEADING).expect("the table of modules").1.lines().skip(2);
    let rows = rows.take_while(|row| row.starts_with('|'));
    let names = rows.map(|row| row.split('|').nth(1).expect("a first column"));
    names
        .flat_map(|names| names.split(','))
        .map(|name| name.trim().trim_matches(['`', '/']).to_owned())
        .collect()
}

/// Adds the sources below this folder.
pub fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path())
    {
        if entry.is_dir() {
            sources(&entry, all);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            all.push(entry);
        }
    }
}

/// Returns the names after each `crate::` of a file's own code, without comments and tests.
fn used(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code: Vec<&str> =
        code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let mut names = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let list = match rest.strip_prefix('{') {
            // `use crate::{a, b::c}` names two modules.
            Some(list) => list.split('}').next().unwrap_or_default(),
            None => {
                rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default()
            }
        };
        let firsts = list.split(',').map(|name| name.trim().split("::").next().unwrap_or_default());
        names.extend(firsts.map(str::to_owned));
    }
    names
}

/// Returns the module of each name that `lib.rs` re-exports.
fn reexported(library: &str) -> HashMap<String, String> {
    let mut found = HashMap::new();
    for line in library.lines().filter_map(|line| line.strip_prefix("pub use ")) {
        let Some((module, names)) = line.trim_end_matches(';').split_once("::") else { continue };
        for name in names.trim_matches(['{', '}']).split(',') {
            found.insert(name.trim().to_owned(), module.to_owned());
        }
    }
    found
}

#[test]
fn every_module_uses_those_above_it_alone() {
    let order = order();
    let place = |name: &str| order.iter().position(|other| other == name);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let reexported = reexported(&fs::read_to_string(root.join("lib.rs")).expect("lib.rs"));
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut wrong = Vec::new();
    for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
        let path = file.strip_prefix(&root).expect("below src");
        let first = path.components().next().expect("a module").as_os_str().to_string_lossy();
        let module = first.trim_end_matches(".rs").to_owned();
        if ASIDE.contains(&module.as_str()) {
            continue;
        }
        let Some(here) = place(&module) else {
            wrong.push(format!("{module} is not in the table"));
            continue;
        };
        for name in used(&fs::read_to_string(file).expect("a source")) {
            let name = reexported.get(&name).unwrap_or(&name);
            if let Some(there) = place(name).filter(|there| *there > here) {
                wrong.push(format!(
                    "{}: {module} (row {here}) uses {name} (row {there})",
                    path.display()
                ));
            }
        }
    }
    wrong.sort();
    wrong.dedup();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_row_is_a_module() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for module in order() {
        let is_there = root.join(&module).is_dir() || root.join(format!("{module}.rs")).is_file();
        assert!(is_there, "{module} is in DESIGN.md's table, and not in src");
    }
}
