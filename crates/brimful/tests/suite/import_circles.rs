//! Files of one module do not import each other in a circle, so that each can be read after those it uses.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};

use crate::order_of_modules::sources;

/// Names of modules from the library's root, such as `micro`, `graphs`; none for `lib.rs`.
type Module = Vec<String>;

/// Paths that a file's own code names, without tests and the tokens of macros.
#[derive(Default)]
struct Named {
    imports: Vec<Vec<String>>,
    /// Imports that the file passes on to its users.
    reexports: Vec<Vec<String>>,
    paths: Vec<Vec<String>>,
}

impl<'a> Visit<'a> for Named {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if item.ident != "tests" {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        let is_private = matches!(item.vis, syn::Visibility::Inherited);
        let list = if is_private { &mut self.imports } else { &mut self.reexports };
        flatten(&item.tree, &mut Vec::new(), list);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    /// `pub(in crate::micro)` names a module without using it.
    fn visit_visibility(&mut self, _: &'a syn::Visibility) {}
}

/// Adds the path of each leaf of a `use`.
fn flatten(tree: &syn::UseTree, path: &mut Vec<String>, all: &mut Vec<Vec<String>>) {
    let leaf = |name: &syn::Ident| path.iter().cloned().chain([name.to_string()]).collect();
    match tree {
        syn::UseTree::Path(part) => {
            path.push(part.ident.to_string());
            flatten(&part.tree, path, all);
            path.pop();
        }
        syn::UseTree::Group(group) => {
            group.items.iter().for_each(|tree| flatten(tree, path, all));
        }
        syn::UseTree::Name(name) => all.push(leaf(&name.ident)),
        syn::UseTree::Rename(renamed) => all.push(leaf(&renamed.ident)),
        syn::UseTree::Glob(_) => all.push(path.clone()),
    }
}

/// The library's files, by module.
struct Files(BTreeMap<Module, Named>);

impl Files {
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = Vec::new();
        sources(&root, &mut files);
        let own = files.iter().filter(|file| !file.ends_with("tests.rs"));
        let read = own.map(|file| {
            let place = file.strip_prefix(&root).expect("below src").with_extension("");
            let names = place.iter().map(|name| name.to_string_lossy().into_owned());
            let module = names.filter(|name| name != "mod" && name != "lib").collect();
            let code = fs::read_to_string(file).expect("a source");
            let mut named = Named::default();
            named.visit_file(&syn::parse_file(&code).expect("Rust"));
            (module, named)
        });
        Self(read.collect())
    }

    /// Returns the file in which a path of `module` leads to its item, through re-exports; `None` if it leads
    /// out of the library.
    fn file_of(&self, module: &Module, path: &[String]) -> Option<Module> {
        let parents = path.iter().take_while(|name| *name == "super").count();
        let (mut at, mut rest) = match path.first()?.as_str() {
            "crate" => (Module::new(), &path[1..]),
            "self" => (module.clone(), &path[1..]),
            "super" => (module[..module.len() - parents].to_vec(), &path[parents..]),
            _ => (module.clone(), path),
        };
        let is_named_alone = rest.len() == path.len();
        let start = rest.len();
        while let Some((name, after)) = rest.split_first() {
            let below: Module = at.iter().chain([name]).cloned().collect();
            if !self.0.contains_key(&below) {
                break;
            }
            (at, rest) = (below, after);
        }
        // A lone name may be a variable's; a path's first name may be a type's or another crate's.
        if is_named_alone && (path.len() == 1 || rest.len() == start) {
            return None;
        }
        let Some(item) = rest.first() else { return Some(at) };
        let named = &self.0[&at];
        let passed_on = named.reexports.iter().chain(&named.imports);
        let mut passed_on = passed_on.filter(|path| path.last() == Some(item) && path.len() > 1);
        passed_on.find_map(|path| self.file_of(&at, path)).or(Some(at))
    }

    /// Returns the files of the same module that this file uses. What it only re-exports, it does not use.
    fn used_by(&self, module: &Module) -> BTreeSet<Module> {
        let named = &self.0[module];
        let used = named.imports.iter().chain(&named.paths);
        let used = used.filter_map(|path| self.file_of(module, path));
        used.filter(|used| used != module && used.first() == module.first()).collect()
    }
}

#[test]
fn no_files_of_one_module_import_each_other_in_a_circle() {
    let files = Files::read();
    let mut left: BTreeMap<_, _> =
        files.0.keys().map(|module| (module.clone(), files.used_by(module))).collect();
    let imports: usize = left.values().map(BTreeSet::len).sum();
    assert!(imports > 300, "{imports} imports were found");
    // Removes files that use no other remaining file, until only circles remain, or nothing.
    loop {
        let before = left.len();
        let modules: BTreeSet<Module> = left.keys().cloned().collect();
        left.retain(|_, used| used.iter().any(|used| modules.contains(used)));
        if left.len() == before {
            break;
        }
    }
    let circles = left.iter().map(|(module, used)| format!("{} uses {used:?}", module.join("::")));
    assert!(left.is_empty(), "{}", circles.collect::<Vec<_>>().join("\n"));
}
