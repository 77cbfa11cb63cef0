//! Every relative link in the project's Markdown leads to a file, and to a heading where it names one.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// Links of a page, and anchors of its headings.
#[derive(Default)]
struct Page {
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

#[test]
fn every_link_leads_somewhere() {
    let root = root();
    let pages: HashMap<PathBuf, Page> =
        pages(&root).into_iter().map(|path| (path.clone(), read(&path))).collect();
    assert!(pages.len() > 15, "only {} pages were found", pages.len());
    let mut broken = Vec::new();
    for (path, page) in &pages {
        for link in page.links.iter().filter(|link| !link.contains("://")) {
            if let Err(why) = follow(path, link, &pages) {
                broken.push(format!("{}: {link}: {why}", path.display()));
            }
        }
    }
    broken.sort();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn the_summary_has_every_page_once() {
    let folder = root().join("guide/src");
    let mut listed = read(&folder.join("SUMMARY.md")).links;
    listed.sort();
    let files = fs::read_dir(&folder).expect("the guide").map(|entry| entry.expect("a file"));
    let names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    let mut there: Vec<_> = names.filter(|name| name != "SUMMARY.md").collect();
    there.sort();
    assert_eq!(listed, there);
}

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("the guide is in the repository").canonicalize().expect("a folder")
}

/// All Markdown but what is built or fetched, and what is hidden.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') || ["target", "build", "book"].contains(&&*name) {
            continue;
        } else if path.is_dir() {
            found.extend(pages(&path));
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
    found
}

fn read(path: &Path) -> Page {
    let text = fs::read_to_string(path).expect("a readable page");
    let mut page = Page::default();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                page.links.push(dest_url.to_string());
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(text) | Event::Code(text) => {
                heading.as_mut().map(|heading| heading.push_str(&text)).unwrap_or_default();
            }
            Event::End(TagEnd::Heading(_)) => {
                page.anchors.extend(heading.take().map(|heading| anchor(&heading)));
            }
            _ => {}
        }
    }
    page
}

/// As forges and mdBook make it of a heading.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn follow(from: &Path, link: &str, pages: &HashMap<PathBuf, Page>) -> Result<(), String> {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match file {
        "" => from.to_owned(),
        file => from.parent().expect("a folder").join(file),
    };
    let target = target.canonicalize().map_err(|error| error.to_string())?;
    match pages.get(&target) {
        Some(page) if !anchor.is_empty() && !page.anchors.contains(anchor) => {
            Err(format!("no heading '{anchor}' among {:?}", page.anchors))
        }
        _ => Ok(()),
    }
}
