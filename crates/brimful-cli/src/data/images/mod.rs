//! Folders of images with a subfolder a class: which there are, and which of them are for testing.

mod decoded;
mod loader;
mod samples;
mod view;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::side_by_side;
use super::{Dataset, Sample, SampleSet};
use crate::progress::{self, Progress};
pub use loader::ImageLoader;
use samples::{ImageFile, ImageSamples};

/// What images are called, after the point.
const ENDINGS: [&str; 3] = ["jpg", "jpeg", "png"];
/// As many broken ones are named; the others are counted.
const NAMED: usize = 10;
/// Images that are looked at between two signs of life.
const AT_A_LOOK: usize = 1024;

/// The classes by their names, and the images of each, in the order of their names.
type Classes = BTreeMap<String, Vec<PathBuf>>;

/// Whether a folder is to be read as one of images.
pub(super) fn has_classes(folder: &Path) -> Result<bool> {
    Ok(entries(folder)?.iter().any(|path| path.is_dir()))
}

/// The images of a folder as squares of this side.
pub(super) fn load(folder: &Path, side: i64) -> Result<Dataset> {
    let (train, given) = halves(folder)?;
    let (mut train, broken) = readable(train)?;
    let (test, broken) = match given {
        Some(test) => {
            let (test, more) = readable(test)?;
            (test, broken + more)
        }
        None => (last_tenths(&mut train), broken),
    };
    let shown = folder.display();
    ensure!(
        test.values().any(|images| !images.is_empty()),
        "{shown} has one image in each class, so that none is left for testing: put another one into one of \
         them, or make two halves of it, train and val"
    );
    let class_names: Vec<String> = train.keys().cloned().collect();
    let classes = class_names.len();
    let left_out = match broken {
        0 => String::new(),
        _ => format!("; {broken} that cannot be read are left out"),
    };
    Ok(Dataset {
        train: streamed(train, side, side_by_side::cores()),
        test: streamed(test, side, side_by_side::cores()),
        sample: Sample::Image { shape: [3, side, side], classes: classes as i64 },
        description: format!(
            "{shown}, images of {side}×{side} pixels, {classes} classes{left_out}"
        ),
        class_names,
    })
}

/// The images of these classes, decoded by so many threads.
fn streamed(classes: Classes, side: i64, threads: usize) -> SampleSet {
    let of_class = |(class, images): (i64, Vec<PathBuf>)| {
        images.into_iter().map(move |path| ImageFile { path, class })
    };
    let files = (0..).zip(classes.into_values()).flat_map(of_class).collect();
    SampleSet::streamed(ImageSamples::new(files, side, threads))
}

/// The classes to train on, and those to test on where they have a folder of their own.
fn halves(folder: &Path) -> Result<(Classes, Option<Classes>)> {
    let train = folder.join("train");
    let test = ["val", "test"].map(|name| folder.join(name)).into_iter().find(|path| path.is_dir());
    let Some(test) = test.filter(|_| train.is_dir()) else {
        return Ok((classes(folder)?, None));
    };
    let [trained, tested] = [classes(&train)?, classes(&test)?];
    let lacks = |folder: &Path, has: &Classes, other: &Classes| {
        let missing = other.keys().find(|class| !has.contains_key(*class));
        missing.map(|class| format!("{} lacks the class {class}", folder.display()))
    };
    match lacks(&test, &tested, &trained).or_else(|| lacks(&train, &trained, &tested)) {
        Some(reason) => bail!("{reason}: give both halves the same classes"),
        None => Ok((trained, Some(tested))),
    }
}

/// The classes of a folder, each with an image.
fn classes(folder: &Path) -> Result<Classes> {
    let mut classes = Classes::new();
    for class in entries(folder)?.into_iter().filter(|path| path.is_dir()) {
        let mut images = entries(&class)?;
        images.retain(|path| is_image(path));
        ensure!(
            !images.is_empty(),
            "the class {} has no image: put .jpg, .jpeg or .png files into it, or remove it",
            class.display()
        );
        let name = name_of(&class);
        ensure!(
            classes.insert(name.clone(), images).is_none(),
            "two classes of {} read as {name}, because their names are not UTF-8: rename one",
            folder.display()
        );
    }
    ensure!(
        classes.len() > 1,
        "{} has {} subfolders with images, but 2 are needed: give it one for each class",
        folder.display(),
        classes.len()
    );
    Ok(classes)
}

/// What a folder holds, by name; what is hidden stays so.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let read: std::io::Result<Vec<PathBuf>> = read();
    let mut paths = read.with_context(|| format!("cannot read {}", folder.display()))?;
    paths.retain(|path| !name_of(path).starts_with('.'));
    paths.sort();
    Ok(paths)
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn is_image(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    ENDINGS.contains(&ending.as_str())
}

/// Without those that do not begin as an image does, which are named; and how many they were.
fn readable(mut classes: Classes) -> Result<(Classes, usize)> {
    let all = classes.values().map(Vec::len).sum();
    let progress = (all > AT_A_LOOK).then(|| Progress::new(all, "images looked at"));
    let mut broken = 0;
    for (class, images) in &mut classes {
        let mut kept = Vec::with_capacity(images.len());
        for some in images.chunks(AT_A_LOOK) {
            let checked = side_by_side::each(some.to_vec(), side_by_side::cores(), |path| {
                decoded::check(&path).map_err(|error| (path.clone(), error)).map(|()| path)
            });
            for image in checked {
                match image {
                    Ok(path) => kept.push(path),
                    Err((path, error)) => {
                        broken += 1;
                        name_broken(&path, &error, broken);
                    }
                }
            }
            progress.iter().for_each(|progress| progress.advance(some.len()));
        }
        ensure!(
            !kept.is_empty(),
            "no image of the class {class} can be read: see what is said above"
        );
        *images = kept;
    }
    Ok((classes, broken))
}

/// Says which cannot be read, where it is among the first.
fn name_broken(path: &Path, error: &anyhow::Error, count: usize) {
    if count <= NAMED {
        let path = path.display();
        progress::say(&format!("brimful: {path} cannot be read and is left out: {error}"));
    } else if count == NAMED + 1 {
        progress::say("brimful: more images that cannot be read are left out, and not named");
    }
}

/// Takes the last tenth of each class out, at least one where there are two.
fn last_tenths(classes: &mut Classes) -> Classes {
    let tenth = |(name, images): (&String, &mut Vec<PathBuf>)| {
        let count = (images.len() / 10).max(1).min(images.len() - 1);
        (name.clone(), images.split_off(images.len() - count))
    };
    classes.iter_mut().map(tenth).collect()
}
