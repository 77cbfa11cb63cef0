//! DESIGN.md's walk of a step names functions and types where they are.

use std::fs;
use std::path::Path;

/// Heading of the walk; its numbered items follow.
const HEADING: &str = "## One step, from `backward` to committed gradients";

/// Returns the numbered items of the walk, each with its lines joined.
fn items() -> Vec<String> {
    let design = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../DESIGN.md");
    let design = fs::read_to_string(design).expect("DESIGN.md is at the workspace's root");
    let walk = design.split_once(HEADING).expect("the walk").1;
    let walk = walk.split("\n## ").next().expect("a section");
    let mut items: Vec<String> = Vec::new();
    for line in walk.lines() {
        if line.starts_with(|first: char| first.is_ascii_digit()) {
            items.push(line.to_owned());
        } else if let (true, Some(item)) = (line.starts_with("   "), items.last_mut()) {
            item.push_str(line);
        }
    }
    items
}

/// Returns whether a file defines the function or type.
fn defines(code: &str, name: &str) -> bool {
    let ways = ["fn", "struct", "enum", "trait"];
    ways.iter().any(|way| {
        let defined = format!("{way} {name}");
        code.match_indices(&defined).any(|(at, _)| {
            let next = code[at + defined.len()..].chars().next();
            next.is_some_and(|next| !next.is_alphanumeric() && next != '_')
        })
    })
}

#[test]
fn every_name_of_the_walk_is_in_a_file_that_its_item_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let items = items();
    assert!(items.len() >= 5, "the walk has items: {items:?}");
    for item in items {
        let quoted: Vec<&str> = item.split('`').skip(1).step_by(2).collect();
        let (files, names): (Vec<_>, Vec<_>) =
            quoted.into_iter().partition(|quoted| quoted.ends_with(".rs"));
        let files = files.into_iter().map(|file| {
            fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
        });
        let code = files.collect::<String>();
        for name in names {
            let last = name.rsplit("::").next().expect("a name");
            assert!(defines(&code, last), "{name} is in none of the files of: {item}");
        }
    }
}
