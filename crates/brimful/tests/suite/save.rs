//! Tensors read from a file equal those written, or the file is refused.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::support::{Named, assert_fails, test_device};
use brimful::Error;
use brimful::internal::OpenedFile;
use brimful::memory::Arena;
use brimful::save::{self, Metadata};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn files(folder: &TempDir) -> usize {
    fs::read_dir(folder.path()).expect("the folder").count()
}

fn named(tensors: Vec<(&str, Tensor)>) -> Named {
    tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
}

fn one(value: f64) -> Named {
    named(vec![("x", Tensor::from_slice(&[value]))])
}

#[test]
fn every_kind_shape_and_memory_format_comes_back_as_it_was() {
    let folder = folder();
    let kinds = [
        Kind::Double,
        Kind::Float,
        Kind::Half,
        Kind::BFloat16,
        Kind::Float8e5m2,
        Kind::Float8e4m3fn,
        Kind::ComplexFloat,
        Kind::Int64,
        Kind::Int,
        Kind::Int16,
        Kind::Int8,
        Kind::Uint8,
        Kind::Bool,
    ];
    let numbers = Tensor::arange(24, (Kind::Float, test_device())).reshape([2, 3, 4]);
    let mut tensors: Vec<_> =
        kinds.iter().map(|kind| (format!("kind {kind:?}"), numbers.to_kind(*kind))).collect();
    tensors.extend(named(vec![
        ("empty", Tensor::zeros([0, 5], (Kind::Float, test_device()))),
        ("scalar", Tensor::from(2.5)),
        ("turned", numbers.permute([2, 0, 1])),
        ("with gaps", numbers.slice(2, 0, 4, 2)),
        ("parameter", numbers.copy().set_requires_grad(true)),
        ("naïve \"quoted\" 名", Tensor::from(1_i64)),
    ]));
    let metadata = Metadata::from([("note".into(), "two\nlines \"and quotes\"".into())]);
    let path = folder.path().join("all.safetensors");
    save::write(&path, &tensors, &metadata).expect("written");

    let (back, texts) = save::read(&path).expect("read");
    assert_eq!((back.len(), texts), (tensors.len(), metadata.clone()));
    assert!(back.is_sorted_by(|(a, _), (b, _)| a < b));
    for (name, tensor) in &tensors {
        let (_, same) = back.iter().find(|(other, _)| other == name).expect(name);
        assert_eq!((same.size(), same.kind()), (tensor.size(), tensor.kind()), "{name}");
        let bits = |t: &Tensor| {
            let mut bytes = vec![0_u8; t.numel() * t.kind().elt_size_in_bytes()];
            t.copy_data_u8(&mut bytes, t.numel());
            bytes
        };
        assert_eq!(bits(same), bits(tensor), "{name}");
    }
    // tch reads the file too; the same tensors in another order make the same file.
    let tchs: Vec<_> = tensors.iter().filter(|(name, _)| !name.starts_with("kind ")).collect();
    let plain: Vec<_> = tchs.iter().map(|(name, t)| (name.clone(), t.shallow_clone())).collect();
    save::write(&path, &plain, &Metadata::new()).expect("written");
    assert_eq!(Tensor::read_safetensors(&path).expect("tch reads it").len(), plain.len());
    let bytes = fs::read(&path).expect("the file");
    let reversed: Vec<_> = plain.iter().rev().map(|(n, t)| (n.clone(), t.copy())).collect();
    save::write(&path, &reversed, &Metadata::new()).expect("written");
    assert_eq!(fs::read(&path).expect("the file"), bytes);
    assert_eq!(files(&folder), 1);
}

#[test]
fn a_file_of_tch_and_an_empty_one_can_be_read() {
    let folder = folder();
    let path = folder.path().join("tch.safetensors");
    Tensor::write_safetensors(&[("x", Tensor::from_slice(&[1.0, 2.0]))], &path).expect("tch");
    let (tensors, metadata) = save::read(&path).expect("read");
    assert_eq!(tensors, named(vec![("x", Tensor::from_slice(&[1.0, 2.0]))]));
    assert!(metadata.is_empty());
    save::write(&path, &[], &Metadata::new()).expect("nothing to write");
    assert_eq!(save::read(&path).expect("read").0.len(), 0);
}

#[test]
fn a_file_cut_off_anywhere_or_changed_in_its_header_is_refused() {
    let folder = folder();
    let path = folder.path().join("damaged.safetensors");
    let tensors = named(vec![
        ("a", Tensor::from_slice(&[1.0, 2.0])),
        ("b", Tensor::from_slice(&[1_u8, 2, 3])),
    ]);
    save::write(&path, &tensors, &Metadata::from([("k".into(), "v".into())])).expect("written");
    let whole = fs::read(&path).expect("the file");
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).expect("cut");
        let error = save::read(&path).expect_err("cut off");
        assert!(matches!(error, Error::NotTensors { .. }), "{length}: {error}");
        assert!(error.to_string().contains(&format!("it has {length} bytes")), "{error}");
    }
    let header = whole.len() - 19;
    for place in 0..header {
        for change in [0x01, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[place] ^= change;
            fs::write(&path, &damaged).expect("changed");
            // A changed name is another name; any other change must be detected, and nothing may panic.
            if let Err(error) = save::read(&path) {
                assert!(matches!(error, Error::NotTensors { .. }), "{place}: {error}");
            }
        }
    }
    let mut longer = whole.clone();
    longer.push(0);
    fs::write(&path, &longer).expect("longer");
    assert!(save::read(&path).is_err());
    for foreign in [&b"PK\x03\x04 this is a zip file, say"[..], &[0xff; 64], b"{}", b""] {
        fs::write(&path, foreign).expect("foreign");
        assert_fails(save::read(&path), &["is damaged, or not a safetensors file: "]);
    }
}

#[test]
fn what_cannot_be_written_leaves_the_old_file_and_nothing_else() {
    let folder = folder();
    let path = folder.path().join("x.safetensors");
    save::write(&path, &one(1.0), &Metadata::new()).expect("written");
    let old = fs::read(&path).expect("the file");

    let float = || Tensor::from_slice(&[1.0]);
    let sparse = Tensor::eye(3, (Kind::Float, Device::Cpu)).to_sparse(None, None::<&[i64]>, None);
    for (tensors, words) in [
        (named(vec![("x", float()), ("x", float())]), "'x' names two tensors"),
        (named(vec![("__metadata__", float())]), "'__metadata__' names two tensors"),
        (named(vec![("x", float().to_kind(Kind::ComplexDouble))]), "'x' is of kind ComplexDouble"),
        (named(vec![("x", sparse)]), "'x' is sparse"),
    ] {
        let error = save::write(&path, &tensors, &Metadata::new()).expect_err(words).to_string();
        assert!(error.starts_with("cannot write ") && error.contains(words), "{error}");
        assert_eq!(fs::read(&path).expect("the file"), old);
        assert_eq!(files(&folder), 1);
    }
    let nowhere = folder.path().join("no such folder/x.safetensors");
    let error = save::write(&nowhere, &one(1.0), &Metadata::new()).expect_err("no folder");
    assert!(matches!(error, Error::File { action: "write", .. }), "{error}");
    assert!(save::write("/", &one(1.0), &Metadata::new()).is_err());
    let error = save::read(&nowhere).expect_err("no file").to_string();
    assert!(error.starts_with("cannot read ") && error.contains("No such file"), "{error}");
    assert!(matches!(
        save::read(folder.path()),
        Err(Error::File { .. } | Error::NotTensors { .. })
    ));
}

/// Variable with the file that the process with few file descriptors writes.
const WRITES: &str = "BRIMFUL_TEST_WRITES";

/// Writes with this many file descriptors left: the file is the old one and the call fails, or it is the new one
/// and the call succeeds.
fn write_with_few_descriptors(path: &Path, left: usize) {
    fs::write(path, b"old").expect("written");
    let mut all: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    all.truncate(all.len() - left);
    let written = save::replace(path, b"new");
    drop(all);
    let found = fs::read(path).expect("a file");
    let expected: &[u8] = if written.is_ok() { b"new" } else { b"old" };
    assert_eq!(found, expected, "{left} left: {written:?}");
    let beside = fs::read_dir(path.parent().expect("a folder")).expect("a folder").count();
    assert_eq!(beside, 1, "{left} left");
    assert!(written.is_ok() || left < 2, "{left} left: {written:?}");
}

#[test]
fn a_write_that_is_told_to_have_failed_has_left_the_old_file() {
    if let Some(path) = std::env::var_os(WRITES) {
        return (0..4).for_each(|left| write_with_few_descriptors(Path::new(&path), left));
    }
    let folder = folder();
    let name = "save::a_write_that_is_told_to_have_failed_has_left_the_old_file";
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 64; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().expect("the test's own program"))
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(WRITES, folder.path().join("file"))
        .output()
        .expect("a shell");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_folder_is_replaced_whole_or_stays_as_it_was() {
    let folder = folder();
    let target = folder.path().join("model");
    let fill = |text: &'static str, then: Result<(), brimful::Error>| {
        save::replace_folder(&target, |new| {
            save::replace(new.join(text), text.as_bytes())?;
            then
        })
    };
    let names = || {
        let entries = fs::read_dir(&target).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name()).collect::<Vec<_>>()
    };
    fill("one", Ok(())).expect("written");
    let refused = save::read(folder.path().join("none")).map(drop);
    assert_eq!(fill("two", refused.clone()), refused);
    assert_eq!((names(), files(&folder)), (vec!["one".into()], 1));
    fill("three", Ok(())).expect("written");
    assert_eq!((names(), files(&folder)), (vec!["three".into()], 1));
    let nowhere =
        save::replace_folder(folder.path().join("no/model"), |_| Ok::<_, brimful::Error>(()));
    let error = nowhere.expect_err("no such folder").to_string();
    assert!(error.ends_with("make its folder first"), "{error}");
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("it is there").permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
}

#[test]
fn links_and_permissions_stay() {
    let folder = folder();
    let place = |name: &str| folder.path().join(name);
    fs::write(place("file"), "old").expect("written");
    set_mode(&place("file"), 0o640);
    fs::create_dir(place("sub")).expect("a folder");
    symlink("../file", place("sub/second")).expect("a link");
    symlink(place("sub/second"), place("first")).expect("a link");
    symlink("new", place("to nothing")).expect("a link");
    for (link, file) in [("first", "file"), ("to nothing", "new")] {
        save::replace(place(link), b"new").expect("written");
        assert!(place(link).is_symlink(), "{link}");
        assert!(!place(file).is_symlink(), "{file}");
        assert_eq!(fs::read(place(file)).expect("a file"), b"new");
    }
    assert!(place("sub/second").is_symlink());
    assert_eq!(mode(&place("file")), 0o640);

    fs::create_dir(place("model")).expect("a folder");
    set_mode(&place("model"), 0o700);
    symlink("model", place("newest")).expect("a link");
    let fill = |new: &Path| save::replace(new.join("weights"), b"new");
    save::replace_folder(place("newest"), fill).expect("written");
    assert!(place("newest").is_symlink() && !place("model").is_symlink());
    assert_eq!(fs::read(place("model/weights")).expect("a file"), b"new");
    assert_eq!(mode(&place("model")), 0o700);
    assert_fails(save::replace_folder(place("file"), fill), &["ot a directory"]);
    assert_eq!(fs::read(place("file")).expect("a file"), b"new");
}

/// A killed process left them, and this process has its id.
#[test]
fn what_others_have_left_beside_is_in_nobodys_way() {
    let folder = folder();
    let place = |name: &str| folder.path().join(name);
    fs::write(place("victim"), "as it was").expect("written");
    for number in 0..500 {
        let left = |name: &str| place(&format!(".{name}.{}-{number}.part", std::process::id()));
        symlink("victim", left("file")).expect("a link");
        fs::create_dir(left("model")).expect("a folder");
        fs::write(left("model").join("weights"), "old").expect("written");
    }
    let before = files(&folder);
    save::replace(place("file"), b"new").expect("written");
    for text in ["one", "two"] {
        let fill = |new: &Path| save::replace(new.join(text), text.as_bytes());
        save::replace_folder(place("model"), fill).expect("written");
        assert!(place("model").join(text).is_file());
    }
    assert_eq!(files(&folder), before + 2);
    assert_eq!(fs::read(place("victim")).expect("a file"), b"as it was");
}

#[test]
fn there_is_a_folder_at_every_moment() {
    let folder = folder();
    let target = folder.path().join("model");
    let fill = |new: &Path| save::replace(new.join("weights"), b"new");
    save::replace_folder(&target, fill).expect("written");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            (0..100).for_each(|_| save::replace_folder(&target, fill).expect("written"));
        });
        while !writer.is_finished() {
            assert!(target.is_dir());
        }
    });
    assert_eq!(files(&folder), 1);
}

#[test]
fn readers_see_the_old_file_or_the_new_one_while_it_is_written() {
    let folder = folder();
    let path = folder.path().join("x.safetensors");
    let tensors =
        |value: f64| named(vec![("x", Tensor::full([10_000], value, (Kind::Double, Device::Cpu)))]);
    save::write(&path, &tensors(0.0), &Metadata::new()).expect("written");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for value in 1..=30 {
                save::write(&path, &tensors(f64::from(value)), &Metadata::new()).expect("written");
            }
        });
        while !writer.is_finished() {
            let (read, _) = save::read(&path).expect("a whole file");
            let (least, most) = (read[0].1.min(), read[0].1.max());
            assert_eq!(least, most);
        }
    });
    assert_eq!(save::read(&path).expect("read").0, tensors(30.0));
    assert_eq!(files(&folder), 1);
}

#[test]
fn an_open_file_gives_its_tensors_one_by_one_in_the_kind_that_is_wanted() {
    let folder = folder();
    let path = folder.path().join("x.safetensors");
    let numbers = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    let tensors = named(vec![
        ("bytes", Tensor::from_slice(&[1_u8, 2, 3])),
        ("half", numbers.to_kind(Kind::BFloat16)),
        ("none", Tensor::empty([0, 4], (Kind::Float, Device::Cpu))),
        ("numbers", numbers.shallow_clone()),
    ]);
    save::write(&path, &tensors, &Metadata::from([("a".into(), "b".into())])).expect("written");
    let opened = OpenedFile::open(&path).expect("open");
    assert_eq!(opened.metadata()["a"], "b");
    assert_eq!((opened.shape("half"), opened.shape("other")), (Some(vec![2, 3]), None));
    let mut names = opened.names();
    names.sort();
    assert_eq!(names, ["bytes", "half", "none", "numbers"]);
    for (name, kind) in [("half", Kind::Float), ("numbers", Kind::Half), ("numbers", Kind::Float)] {
        let into = Tensor::zeros([2, 3], (kind, test_device())).set_requires_grad(true);
        opened.copy(name, &into).expect("copied");
        assert_eq!(into.detach().to_device(Device::Cpu).to_kind(Kind::Float), numbers, "{name}");
    }
    opened.copy("none", &Tensor::empty([0, 4], (Kind::Float, test_device()))).expect("nothing");
    let wrong = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu));
    let error = opened.copy("numbers", &wrong).expect_err("another shape").to_string();
    assert!(error.ends_with("'numbers' is of shape [2, 3], not [3, 2]"), "{error}");
    let error = opened.copy("other", &wrong).expect_err("not there").to_string();
    assert!(error.ends_with("'other' is not in it"), "{error}");
}

#[test]
fn an_open_file_whose_header_ends_anywhere_is_read_all_the_same() {
    let folder = folder();
    let path = folder.path().join("x.safetensors");
    let header = r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    assert!(!header.len().is_multiple_of(4));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([1.5_f32, -2.0].iter().flat_map(|number| number.to_le_bytes()));
    fs::write(&path, bytes).expect("written");
    let into = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    OpenedFile::open(&path).expect("open").copy("x", &into).expect("copied");
    assert_eq!(into, Tensor::from_slice(&[1.5_f32, -2.0]));
    let file = File::options().write(true).open(&path).expect("open");
    let opened = OpenedFile::open(&path).expect("open");
    file.set_len(64).expect("cut off");
    assert_fails(opened.copy("x", &into), &["cannot read", "but the numbers end at byte"]);
}

#[test]
fn neither_writing_nor_reading_takes_memory_for_a_second_copy() {
    const NUMBERS: i64 = 24 << 20;
    let folder = folder();
    let path = folder.path().join("large.safetensors");
    let large = Tensor::arange(NUMBERS, (Kind::Int, Device::Cpu)).view([NUMBERS / 4, 4]);
    let tensors = named(vec![("large", large), ("small", Tensor::from_slice(&[1.0, 2.0]))]);
    let arena = Arena::limited("spare", 4096).expect("a limit");
    let inside = arena.enter();
    save::write(&path, &tensors, &Metadata::new()).expect("written, piece by piece");
    let (back, _) = save::read(&path).expect("read, page by page");
    drop(inside);
    assert_eq!(back, tensors);
    // Changes of a tensor do not change the file.
    let mut read = back[0].1.shallow_clone();
    let _changed = read.fill_(0);
    assert_eq!(save::read(&path).expect("read").0, tensors);
    // A replaced file stays complete for a reader that has it mapped.
    let (before, _) = save::read(&path).expect("read");
    save::write(&path, &one(1.0), &Metadata::new()).expect("written");
    assert_eq!(before, tensors);
}

#[test]
fn a_file_that_was_written_beside_its_place_gets_there_later_or_never() {
    let folder = folder();
    let path = folder.path().join("x.safetensors");
    save::write(&path, &one(1.0), &Metadata::new()).expect("written");
    let tensors = one(2.0);
    let written = save::write_beside(&path, &tensors, &Metadata::new()).expect("written");
    // The tensor may be changed now.
    let mut tensor = tensors[0].1.shallow_clone();
    let _changed = tensor.fill_(3.0);
    assert_eq!(save::read(&path).expect("read").0, one(1.0));
    std::thread::spawn(|| written.replace()).join().expect("a thread").expect("in its place");
    assert_eq!(save::read(&path).expect("read").0, one(2.0));
    drop(save::write_beside(&path, &one(4.0), &Metadata::new()).expect("written"));
    assert_eq!(save::read(&path).expect("read").0, one(2.0));
    assert_eq!(files(&folder), 1);
}

#[test]
fn what_is_made_as_it_is_written_is_there_one_after_the_other() {
    const EACH: u64 = 1 << 20;
    let folder = folder();
    let path = folder.path().join("made.safetensors");
    let arena = Arena::new("made");
    let _inside = arena.enter();
    let tensors: Vec<_> = (0..8)
        .map(|number| {
            let ones = Tensor::ones([EACH as i64 / 4], (Kind::Float, Device::Cpu));
            (format!("weight{number}"), ones * f64::from(number))
        })
        .collect();
    arena.reset_peak();
    let twice = |_: &str, tensor: &Tensor| Ok(tensor.f_add(tensor)?);
    save::write_made(&path, &tensors, &Metadata::new(), twice).expect("written");
    assert!(arena.peak() <= 9 * EACH, "{}", arena.peak());
    for ((_, read), (_, given)) in save::read(&path).expect("read").0.iter().zip(&tensors) {
        assert_eq!(*read, given * 2.0);
    }
    let other = |_: &str, tensor: &Tensor| Ok(tensor.narrow(0, 0, 1));
    let error = save::write_made(&path, &tensors, &Metadata::new(), other).expect_err("too short");
    assert!(error.to_string().contains("'weight0' has another shape or dtype"), "{error}");
}
