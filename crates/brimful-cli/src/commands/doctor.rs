//! `brimful doctor`: reports what this machine has, what is wrong with its set-up, and how to fix it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fmt, fs, thread};

use anyhow::Result;
use brimful::internal::{DeviceInfo, devices};
use brimful::nn::kernels;
use brimful::{Bytes, libtorch};
use clap::Args;
use serde::Serialize;

use crate::exit::Exit;
use crate::output;
use crate::setting::words;

/// Options of `brimful doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful doctor
  brimful doctor --json | jq '.devices[].free_bytes'")]
pub struct DoctorOptions {
    #[arg(long, help = words::JSON)]
    json: bool,
}

/// Prints the report, and returns a fault if anything needs fixing.
pub fn run(options: &DoctorOptions) -> Result<Exit> {
    let report = Diagnosis::of_this_machine()?;
    output::report(&report, options.json)?;
    Ok(if report.problems.is_empty() { Exit::Done } else { Exit::Fault })
}

#[derive(Debug, Serialize)]
struct Diagnosis {
    brimful: &'static str,
    libtorch: String,
    library: Option<PathBuf>,
    /// Libraries loaded into this process, except the system's own.
    loaded: Vec<PathBuf>,
    /// Value of `LIBTORCH` for building another crate against the same libtorch.
    libtorch_folder: Option<PathBuf>,
    cuda: Cuda,
    cpu_capability: Option<String>,
    cores: usize,
    threads: usize,
    features: Vec<&'static str>,
    devices: Vec<DeviceRow>,
    problems: Vec<SetupProblem>,
}

#[derive(Debug, Default, Serialize)]
struct Cuda {
    /// Newest CUDA version that the driver supports; none without a driver.
    driver: Option<String>,
    loaded: bool,
    /// The loader's error, if the CUDA libraries could not be loaded.
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct DeviceRow {
    name: String,
    model: String,
    total_bytes: Bytes,
    free_bytes: Bytes,
    /// Kernels that a GPU runs, brimful's or libtorch's, and the reason; none for a CPU.
    kernels: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct SetupProblem {
    what: String,
    remedy: String,
}

impl Diagnosis {
    fn of_this_machine() -> Result<Self> {
        let cuda = Cuda::of_this_machine();
        let libtorch = libtorch::version().unwrap_or_else(|| "unknown".into());
        let rows = devices()?.into_iter().map(DeviceRow::from).collect::<Vec<_>>();
        let problems = diagnose(&libtorch, &cuda, rows.len() - 1);
        let library = libtorch::library_path();
        Ok(Self {
            brimful: env!("CARGO_PKG_VERSION"),
            libtorch,
            libtorch_folder: library.as_deref().and_then(libtorch_folder),
            library,
            loaded: loaded(&fs::read_to_string("/proc/self/maps").unwrap_or_default()),
            features: if cuda.loaded { vec!["cpu", "cuda"] } else { vec!["cpu"] },
            cuda,
            cpu_capability: libtorch::cpu_capability(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            threads: libtorch::threads(),
            devices: rows,
            problems,
        })
    }
}

impl Cuda {
    fn of_this_machine() -> Self {
        let driver = libtorch::cuda_driver().ok();
        let error = libtorch::load_cuda().err().map(|error| error.to_string());
        Self { driver, loaded: error.is_none(), error }
    }
}

impl From<DeviceInfo> for DeviceRow {
    fn from(info: DeviceInfo) -> Self {
        let (total_bytes, free_bytes) = (info.total, info.free);
        let kernels = info.device.is_cuda().then(|| kernels::state(info.device));
        Self { name: info.name, model: info.model, total_bytes, free_bytes, kernels }
    }
}

/// Name prefixes of the C library's and the compiler's own libraries, which every program loads.
const OF_EVERY_PROGRAM: [&str; 9] = [
    "ld-linux",
    "libc.",
    "libm.",
    "libdl.",
    "librt.",
    "libpthread.",
    "libgcc_s.",
    "libstdc++.",
    "libutil.",
];

/// Lists the shared libraries in the text of `/proc/self/maps`, except the libraries of every program.
fn loaded(maps: &str) -> Vec<PathBuf> {
    // The path of a mapped file follows five columns and ends the line.
    let file = |line: &str| line.find('/').map(|start| PathBuf::from(&line[start..]));
    let is_library = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_of_all = OF_EVERY_PROGRAM.iter().any(|known| name.starts_with(known));
        name.contains(".so") && !is_of_all
    };
    let found: BTreeSet<PathBuf> = maps.lines().filter_map(file).filter(is_library).collect();
    found.into_iter().collect()
}

/// Returns the libtorch folder that holds this library, if a crate can be built with the folder. Such a folder has
/// the headers and every library that tch links, even the empty `libtorch.so`.
fn libtorch_folder(library: &Path) -> Option<PathBuf> {
    let around = [library.to_owned(), library.canonicalize().ok()?];
    let mut folders = around.iter().filter_map(|file| file.parent()?.parent()?.canonicalize().ok());
    let needed = ["include/ATen/ATen.h", "lib/libtorch.so", "lib/libtorch_cpu.so"];
    folders.find(|folder| needed.iter().all(|file| folder.join(file).exists()))
}

/// Lists the problems of the set-up. A missing GPU is not a problem.
fn diagnose(libtorch: &str, cuda: &Cuda, accelerators: usize) -> Vec<SetupProblem> {
    let problem = |what: String, remedy: &str| SetupProblem { what, remedy: remedy.to_owned() };
    let mut problems = Vec::new();
    if libtorch != libtorch::EXPECTED_VERSION {
        problems.push(problem(
            format!("libtorch is {libtorch}, but brimful is built for {}", libtorch::EXPECTED_VERSION),
            "unset LD_LIBRARY_PATH and LIBTORCH, remove .libtorch, run scripts/libtorch and build again",
        ));
    }
    match (&cuda.driver, cuda.loaded, accelerators) {
        (Some(driver), false, _) => problems.push(problem(
            format!(
                "there is an NVIDIA driver (CUDA {driver}), but libtorch's CUDA libraries cannot be loaded: {}",
                cuda.error.as_deref().unwrap_or("no reason was given")
            ),
            "remove .libtorch and run scripts/libtorch, which brings the CUDA libraries where there is a driver",
        )),
        (Some(driver), true, 0) => problems.push(problem(
            format!("there is an NVIDIA driver (CUDA {driver}), but no usable GPU"),
            "see whether nvidia-smi lists one, whether CUDA_VISIBLE_DEVICES hides it, and whether the \
             driver serves CUDA 13.0 or newer",
        )),
        _ => {}
    }
    problems
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "brimful   {}", self.brimful)?;
        let library = self.library.as_deref().map_or_else(String::new, |p| p.display().to_string());
        writeln!(f, "libtorch  {}  {library}", self.libtorch)?;
        if let Some(folder) = &self.libtorch_folder {
            writeln!(
                f,
                "          to build a crate of yours: export LIBTORCH={}",
                folder.display()
            )?;
        }
        writeln!(f, "cuda      {}", self.cuda)?;
        let vectors = self.cpu_capability.as_deref().unwrap_or("no vector instructions");
        writeln!(f, "threads   {} per operation, {} cores, {vectors}", self.threads, self.cores)?;
        writeln!(f, "features  {}\n", self.features.join(", "))?;
        writeln!(f, "{:<8}  {:>9}  {:>9}  model", "device", "total", "free")?;
        for row in &self.devices {
            let DeviceRow { name, model, total_bytes, free_bytes, kernels } = row;
            writeln!(f, "{name:<8}  {total_bytes:>9}  {free_bytes:>9}  {model}")?;
            if let Some(kernels) = kernels {
                writeln!(f, "          {kernels}")?;
            }
        }
        writeln!(f, "\nloaded")?;
        for library in &self.loaded {
            writeln!(f, "          {}", library.display())?;
        }
        if self.problems.is_empty() {
            return writeln!(f, "\nNothing is wrong.");
        }
        self.problems.iter().try_for_each(|SetupProblem { what, remedy }| {
            writeln!(f, "\nproblem: {what}\n remedy: {remedy}")
        })
    }
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.driver, self.loaded) {
            (None, false) => write!(f, "none (no NVIDIA driver)"),
            (None, true) => write!(f, "loaded, but there is no NVIDIA driver"),
            (Some(driver), true) => write!(f, "loaded; the driver serves CUDA {driver}"),
            (Some(driver), false) => write!(f, "not loaded; the driver serves CUDA {driver}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cuda(driver: Option<&str>, loaded: bool) -> Cuda {
        let error = (!loaded).then(|| "libcudnn.so.9: not found".to_owned());
        Cuda { driver: driver.map(str::to_owned), loaded, error }
    }

    #[test]
    fn a_good_set_up_has_no_problem() {
        assert_eq!(diagnose("2.11.0", &cuda(None, false), 0), []);
        assert_eq!(diagnose("2.11.0", &cuda(Some("13.0"), true), 1), []);
    }

    #[test]
    fn libraries_are_named_once_and_without_those_of_every_program() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 12   /opt/my torch/lib/libtorch_cpu.so\n\
                    7f01-7f02 rw-p 00001000 08:01 12   /opt/my torch/lib/libtorch_cpu.so\n\
                    7f02-7f03 r-xp 00000000 08:01 13   /usr/lib/libgomp-98b21ff3.so.1\n\
                    7f03-7f04 r-xp 00000000 08:01 14   /usr/lib/libc.so.6\n\
                    7f04-7f05 r-xp 00000000 08:01 15   /usr/bin/brimful\n\
                    7ffc-7ffd rw-p 00000000 00:00 0    [stack]\n";
        let found = ["/opt/my torch/lib/libtorch_cpu.so", "/usr/lib/libgomp-98b21ff3.so.1"];
        assert_eq!(loaded(maps), found.map(PathBuf::from));
    }

    #[test]
    fn a_crate_elsewhere_is_built_with_the_folder_that_has_all_it_needs() {
        let temporary = tempfile::tempdir().expect("a folder");
        let root = temporary.path().canonicalize().expect("a folder");
        for folder in ["whole/include/ATen", "whole/lib", "whole/runtime", "loaded/lib"] {
            fs::create_dir_all(root.join(folder)).expect("a folder");
        }
        let files = [
            "include/ATen/ATen.h",
            "lib/libtorch.so",
            "lib/libtorch_cpu.so",
            "runtime/libtorch_cpu.so",
        ];
        for file in files {
            fs::write(root.join("whole").join(file), "").expect("written");
        }
        fs::write(root.join("loaded/lib/libtorch_cpu.so"), "").expect("written");
        let whole = Some(root.join("whole"));
        let by_runtime = root.join("loaded/../whole/runtime/libtorch_cpu.so");
        assert_eq!(libtorch_folder(&by_runtime), whole);
        assert_eq!(libtorch_folder(&root.join("whole/lib/libtorch_cpu.so")), whole);
        assert_eq!(libtorch_folder(&root.join("loaded/lib/libtorch_cpu.so")), None);
    }

    #[test]
    fn each_fault_has_its_remedy() {
        for (libtorch, cuda, what, remedy) in [
            ("2.9.1", cuda(None, false), "built for 2.11.0", "scripts/libtorch"),
            ("2.11.0", cuda(Some("13.0"), false), "libcudnn.so.9", "scripts/libtorch"),
            ("2.11.0", cuda(Some("12.2"), true), "no usable GPU", "CUDA 13.0 or newer"),
        ] {
            let problems = diagnose(libtorch, &cuda, 0);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].what.contains(what), "{problems:?}");
            assert!(problems[0].remedy.contains(remedy), "{problems:?}");
        }
    }
}
