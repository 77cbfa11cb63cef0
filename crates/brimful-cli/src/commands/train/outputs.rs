//! The files that a training reads and writes, each with its flag.

use std::path::Path;

use super::TrainOptions;
use crate::files::{self, FileUse, FlagFile};

/// Those that were given.
pub(crate) fn files(options: &TrainOptions) -> Vec<FlagFile<'_>> {
    let data = Path::new(&options.data);
    let mut files = options.files.flag_files();
    // A folder is no file, and is looked at when its model is known.
    files.retain(|file| Some(file.path) != options.saved_folder());
    files.extend(files::written("--trace", options.stages.trace.as_ref()));
    // A name of shipped or made-up data is no file, and so is in nobody's way.
    if data.is_file() {
        files.push(FlagFile { flag: "--data", path: data, purpose: FileUse::Reads });
    }
    files
}
