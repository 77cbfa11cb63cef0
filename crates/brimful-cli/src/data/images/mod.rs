//! Folders of images with one subfolder per class, and their split into training and test images.

mod decoded;
mod loader;
mod samples;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::{Dataset, Sample, SampleSet, portions};
use crate::exit::wrong_use;
use crate::progress::{self, Progress};
use samples::{ImageFile, ImageSamples};

pub use loader::ImageLoader;
/// File extensions of images.
const ENDINGS: [&str; 3] = ["jpg", "jpeg", "png"];
/// Limit on the number of broken images whose paths are printed. Further broken images are only counted.
const NAMED: usize = 10;
/// Number of images checked between two updates of the progress line.
const AT_A_LOOK: usize = 1024;

/// Classes by name, each with the paths of its images, sorted by name.
type Classes = BTreeMap<String, Vec<PathBuf>>;

/// Returns whether a folder has subfolders, as a folder of image classes does.
pub(super) fn has_classes(folder: &Path) -> Result<bool> {
    Ok(entries(folder)?.iter().any(|path| path.is_dir()))
}

/// Loads the images of a folder as squares with `side` pixels per side.
pub(super) fn load(folder: &Path, side: i64) -> Result<Dataset> {
    let (train, given) = splits(folder)?;
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
        "{shown} has one image in each class, and none to test on: add an image to a class, or split it into \
         folders train and val"
    );
    let class_names: Vec<String> = train.keys().cloned().collect();
    let classes = class_names.len();
    let left_out = match broken {
        0 => String::new(),
        _ => format!("; {broken} that cannot be read are left out"),
    };
    Ok(Dataset {
        train: streamed(train, side, portions::cores()),
        test: streamed(test, side, portions::cores()),
        sample: Sample::Image { shape: [3, side, side], classes: classes as i64 },
        description: format!(
            "{shown}, images of {side}×{side} pixels, {classes} classes{left_out}"
        ),
        class_names,
        pixels: None,
    })
}

/// Images to predict.
#[derive(Debug)]
pub(crate) struct NewImages {
    pub(crate) samples: SampleSet,
    /// Path of each image.
    pub(crate) files: Vec<PathBuf>,
    /// Names of the classes: the model's, or else the folder's.
    pub(crate) class_names: Vec<String>,
    pub(crate) side: i64,
}

/// Returns whether a path is an image, or a folder with images.
pub(crate) fn are_images(path: &Path) -> Result<bool> {
    if !path.is_dir() {
        return Ok(path.is_file() && is_image(path));
    }
    Ok(entries(path)?.iter().any(|entry| entry.is_dir() || is_image(entry)))
}

/// Opens image files, or all images of a folder. Images in a folder with one subfolder per class have targets;
/// other images have -1. Fails if `known` lacks a class of the folder.
pub(crate) fn open_new(
    paths: &[PathBuf],
    side: Option<usize>,
    known: Option<Vec<String>>,
) -> Result<NewImages> {
    let (files, class_names) = match paths {
        [folder] if folder.is_dir() && has_classes(folder)? => labelled(folder, known)?,
        [folder] if folder.is_dir() => {
            let mut images = entries(folder)?;
            images.retain(|path| is_image(path));
            (unlabelled(images)?, known.unwrap_or_default())
        }
        files => (unlabelled(files.to_vec())?, known.unwrap_or_default()),
    };
    let side = side.map_or(super::SIDE, |pixels| pixels as i64);
    let paths = files.iter().map(|file| file.path.clone()).collect();
    let samples = SampleSet::streamed(ImageSamples::new(files, side, portions::cores()));
    Ok(NewImages { samples, files: paths, class_names, side })
}

fn unlabelled(paths: Vec<PathBuf>) -> Result<Vec<ImageFile>> {
    let file = |path: PathBuf| {
        ensure!(
            path.is_file() && is_image(&path),
            "{} is no .jpg, .jpeg or .png file: give images, or one folder of them",
            path.display()
        );
        Ok(ImageFile { path, class: -1 })
    };
    paths.into_iter().map(file).collect()
}

/// Lists the images of a folder's classes. If the folder is split, lists only the test images. Fails if `known`
/// lacks a class.
fn labelled(folder: &Path, known: Option<Vec<String>>) -> Result<(Vec<ImageFile>, Vec<String>)> {
    let classes = match splits_of(folder) {
        Some([_, test]) => subfolders(&test)?,
        None => subfolders(folder)?,
    };
    let names = known.unwrap_or_else(|| classes.keys().cloned().collect());
    let mut files = Vec::new();
    for (name, images) in &classes {
        let class = names.iter().position(|known| known == name);
        let class = class.ok_or_else(|| {
            let had: Vec<_> = classes.keys().map(String::as_str).collect();
            let (names, had) = (names.join(", "), had.join(", "));
            wrong_use(format!(
                "the model has the classes {names}, but the data {had}: name subfolders after its classes, or \
                 give images without subfolders"
            ))
        })?;
        let file = |path: &PathBuf| ImageFile { path: path.clone(), class: class as i64 };
        files.extend(images.iter().map(file));
    }
    Ok((files, names))
}

/// Makes samples of the images of these classes, decoded by this many threads.
fn streamed(classes: Classes, side: i64, threads: usize) -> SampleSet {
    let of_class = |(class, images): (i64, Vec<PathBuf>)| {
        images.into_iter().map(move |path| ImageFile { path, class })
    };
    let files = (0..).zip(classes.into_values()).flat_map(of_class).collect();
    SampleSet::streamed(ImageSamples::new(files, side, threads))
}

/// Returns the folders of the training and the test split, if there are both.
fn splits_of(folder: &Path) -> Option<[PathBuf; 2]> {
    let train = folder.join("train");
    let test = ["val", "test"].map(|name| folder.join(name)).into_iter().find(|path| path.is_dir());
    test.filter(|_| train.is_dir()).map(|test| [train, test])
}

/// Returns the classes with their training images, and the classes with their test images if the folder is split.
fn splits(folder: &Path) -> Result<(Classes, Option<Classes>)> {
    let Some([train, test]) = splits_of(folder) else {
        return Ok((classes(folder)?, None));
    };
    let [trained, tested] = [classes(&train)?, classes(&test)?];
    let lacks = |folder: &Path, has: &Classes, other: &Classes| {
        let missing = other.keys().find(|class| !has.contains_key(*class));
        missing.map(|class| format!("{} lacks the class {class}", folder.display()))
    };
    match lacks(&test, &tested, &trained).or_else(|| lacks(&train, &trained, &tested)) {
        Some(reason) => bail!("{reason}: give both splits the same classes"),
        None => Ok((trained, Some(tested))),
    }
}

/// Lists the classes of a folder to train on. Fails with fewer than two.
fn classes(folder: &Path) -> Result<Classes> {
    let classes = subfolders(folder)?;
    ensure!(
        classes.len() > 1,
        "{} has {} subfolders with images, but at least 2 are needed: give one for each class",
        folder.display(),
        classes.len()
    );
    Ok(classes)
}

/// Lists the classes of a folder, each with at least one image.
fn subfolders(folder: &Path) -> Result<Classes> {
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
    Ok(classes)
}

/// Lists the entries of a folder by name, without hidden ones.
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

/// Removes files that do not begin like an image. Prints the first of them, and returns their number.
fn readable(mut classes: Classes) -> Result<(Classes, usize)> {
    let all = classes.values().map(Vec::len).sum();
    let progress = (all > AT_A_LOOK).then(|| Progress::new(all, "images checked"));
    let mut broken = 0;
    for (class, images) in &mut classes {
        let mut kept = Vec::with_capacity(images.len());
        for some in images.chunks(AT_A_LOOK) {
            let checked = portions::in_parallel(some.to_vec(), portions::cores(), |path| {
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
        ensure!(!kept.is_empty(), "no image of the class {class} can be read: see the lines above");
        *images = kept;
    }
    Ok((classes, broken))
}

/// Prints the path of an unreadable image, if it is among the first `NAMED` such images.
fn name_broken(path: &Path, error: &anyhow::Error, count: usize) {
    if count <= NAMED {
        let path = path.display();
        progress::say(&format!("brimful: {path} cannot be read and is left out: {error}"));
    } else if count == NAMED + 1 {
        progress::say("brimful: more images that cannot be read are left out, and not named");
    }
}

/// Takes out the last tenth of each class, but at least one image if the class has two or more.
fn last_tenths(classes: &mut Classes) -> Classes {
    let tenth = |(name, images): (&String, &mut Vec<PathBuf>)| {
        let count = (images.len() / 10).max(1).min(images.len() - 1);
        (name.clone(), images.split_off(images.len() - count))
    };
    classes.iter_mut().map(tenth).collect()
}
