//! Recognises out-of-memory errors from every allocator, as errors or as panics.
//!
//! libtorch has an exception type for out-of-memory errors, but tch passes on only the text: as an `Err` from its
//! `f_` methods, as a panic from the plain ones. So this file, and no other, recognises them by their text. All
//! other errors are returned unchanged.
//!
//! An arena's numbers are not parsed, because the bridge keeps the numbers of its last refusals. CUDA's and the
//! host's numbers are parsed from libtorch's message. libtorch could also report CUDA's numbers to an observer,
//! which we do not register, for two reasons. In a backward, the observer would run on one of autograd's threads,
//! so its numbers could not be matched with the error. And libtorch registers observers without a lock, while
//! other threads may be running out of memory.

use std::any::Any;
use std::cell::Cell;
use std::fmt::Display;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use brimful_torch::{ErrorKind, TorchError, arena};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use brimful_plan::bytes::Bytes;

/// Out-of-memory error: the memory, the requested bytes, and the bytes in use, as far as the message contains
/// them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}; {}", self.place.remedy())]
#[non_exhaustive]
pub struct OutOfMemory {
    pub(crate) place: Place,
    /// Requested bytes.
    pub asked: Option<Bytes>,
    /// Bytes in use at the time of the request.
    pub in_use: Option<Bytes>,
    /// Limit that the request exceeded.
    pub limit: Option<Bytes>,
    /// Original message, without a backtrace and without a remedy.
    pub message: String,
}

impl OutOfMemory {
    /// Returns the name of the CPU arena that ran out; `None` if a GPU or the host did.
    pub fn arena(&self) -> Option<&str> {
        match &self.place {
            Place::Arena(name) => Some(name),
            Place::Cuda | Place::Host => None,
        }
    }

    /// Returns whether the host ran out of memory, pinned memory included.
    pub fn is_host(&self) -> bool {
        self.place == Place::Host
    }

    /// Returns the bytes by which the request was too large, if all numbers are known.
    pub(crate) fn lacking(&self) -> Option<Bytes> {
        let wanted = self.in_use?.0.saturating_add(self.asked?.0);
        Some(Bytes(wanted.saturating_sub(self.limit?.0)))
    }
}

/// Memory that ran out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// CPU arena, by name.
    Arena(String),
    /// CUDA device, or a CUDA library's workspace on it.
    Cuda,
    /// Host memory, including pinned memory.
    Host,
}

/// Remedies for memory of a device, and of the host.
const REMEDIES: [&str; 2] = [
    "let `MicroBatches::Auto` find micro-batches that fit, recompute activations, or offload layers to the host",
    "end other programs on this machine, or keep less in its memory: smaller batches, fewer offloaded layers",
];

impl Place {
    /// Returns the remedy to recommend when this memory has run out.
    fn remedy(&self) -> &'static str {
        match self {
            Self::Arena(_) | Self::Cuda => REMEDIES[0],
            Self::Host => REMEDIES[1],
        }
    }
}

/// Removes the remedies with which out-of-memory errors of this library end, for callers with remedies of their
/// own.
pub fn without_remedy(text: &str) -> String {
    REMEDIES.iter().fold(text.to_owned(), |text, remedy| text.replace(&format!("; {remedy}"), ""))
}

/// Messages of each allocator. They are whole phrases, because a user's own error may well mention memory.
const PHRASES: [(&str, Place); 13] = [
    ("CUDA out of memory", Place::Cuda),
    ("CUDA error: out of memory", Place::Cuda),
    ("CUDA driver error: out of memory", Place::Cuda),
    ("CUBLAS_STATUS_ALLOC_FAILED", Place::Cuda),
    ("CUDNN_STATUS_ALLOC_FAILED", Place::Cuda),
    ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", Place::Cuda),
    ("CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", Place::Host),
    ("CUSOLVER_STATUS_ALLOC_FAILED", Place::Cuda),
    ("CUSPARSE_STATUS_ALLOC_FAILED", Place::Cuda),
    ("CUFFT_ALLOC_FAILED", Place::Cuda),
    ("DefaultCPUAllocator: can't allocate memory", Place::Host),
    ("C10 Out of Memory. Trying to allocate", Place::Host),
    ("std::bad_alloc", Place::Host),
];

/// Beginning of an arena's message in `arena.cpp`; the arena's name follows.
const ARENA: &str = "out of memory in arena '";

/// Beginning of the advice in CUDA's message, which is cut off: brimful's remedies replace it.
const ADVICE: &str = " If reserved but unallocated memory is large";

/// Phrase of an error after which nothing can be retried, though its message may mention out of memory.
const INCONSISTENT: &str = "so the parameters are inconsistent";

/// Failure of a call that [`catch`] has run.
#[derive(Debug)]
pub enum Caught<E> {
    /// Memory ran out, reported by an error or a panic.
    OutOfMemory(OutOfMemory),
    /// Another error, unchanged.
    Error(E),
    /// Another panic, unchanged.
    Panic(Box<dyn Any + Send>),
}

/// Wraps an error without inspecting it: calls that may run out of memory go through [`catch`].
impl<E> From<E> for Caught<E> {
    fn from(error: E) -> Self {
        Self::Error(error)
    }
}

/// Runs `f` and distinguishes running out of memory from other failures.
///
/// An out-of-memory panic is not printed to standard error, because the caller is about to handle it; any
/// other is printed as usual.
pub fn catch<T, E: Display>(f: impl FnOnce() -> Result<T, E>) -> Result<T, Caught<E>> {
    let unseen = UnseenGuard::set(Unseen::OutOfMemory);
    let caught = panic::catch_unwind(AssertUnwindSafe(f));
    drop(unseen);
    match caught {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(match recognise(&error.to_string()) {
            Some(oom) => Caught::OutOfMemory(oom),
            None => Caught::Error(error),
        }),
        Err(payload) => Err(match panic_text(&*payload).and_then(recognise) {
            Some(oom) => Caught::OutOfMemory(oom),
            None => Caught::Panic(payload),
        }),
    }
}

/// Parses an out-of-memory message; `None` for any other text.
pub fn recognise(text: &str) -> Option<OutOfMemory> {
    if text.contains(INCONSISTENT) {
        return None;
    }
    let text = &without_remedy(text);
    of_arena(text).or_else(|| {
        let (phrase, place) = PHRASES.iter().find(|(phrase, _)| text.contains(phrase))?;
        let message = own_words(text, phrase);
        let message = message.split(ADVICE).next().unwrap_or_default().trim_end().to_owned();
        Some(OutOfMemory {
            place: place.clone(),
            asked: bytes_after(&message, "ried to allocate ")
                .or_else(|| bytes_after(&message, "rying to allocate ")),
            in_use: None,
            limit: bytes_before(&message, " allowed;")
                .or_else(|| bytes_after(&message, "total capacity of ")),
            message,
        })
    })
}

/// Returns the text of a panic; `None` if its payload is not a text.
pub fn panic_text(payload: &(dyn Any + Send)) -> Option<&str> {
    payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied())
}

/// Returns a panic's text without tch's wrapping and backtrace.
pub(crate) fn panic_words(payload: &(dyn Any + Send)) -> Option<String> {
    panic_text(payload).map(|text| {
        let start = text.find("Torch(\"").map_or(0, |start| start + "Torch(\"".len());
        own_words(&text[start..], "")
    })
}

pub(crate) fn from_torch(error: &TorchError) -> Option<OutOfMemory> {
    recognise(&error.message).or_else(|| {
        let message = error.message.clone();
        let unknown =
            OutOfMemory { place: Place::Host, asked: None, in_use: None, limit: None, message };
        (error.kind == ErrorKind::OutOfMemory).then_some(unknown)
    })
}

/// Parses an arena's message, with the numbers that the bridge has kept.
fn of_arena(text: &str) -> Option<OutOfMemory> {
    let message = own_words(text, ARENA);
    let name = message.strip_prefix(ARENA)?.rsplit_once("': asked for ")?.0;
    let refused = arena::refusal_told_in(&message);
    Some(OutOfMemory {
        // The bridge does not know the numbers of an old refusal, or of one in another process. The message still
        // has the arena's name.
        place: Place::Arena(refused.as_ref().map_or(name, |refused| &refused.arena).to_owned()),
        asked: refused.as_ref().map(|refused| Bytes(refused.asked)),
        in_use: refused.as_ref().map(|refused| Bytes(refused.in_use)),
        limit: refused.and_then(|refused| refused.limit).map(Bytes),
        message,
    })
}

/// Returns the first line of the message, from `phrase` on. In a panic's text newlines and quotes are
/// escaped, because tch panics with the error's debug form.
fn own_words(text: &str, phrase: &str) -> String {
    let start = text.find(phrase).unwrap_or(0);
    let line = text[start..].lines().next().unwrap_or_default();
    let line = line.split("\\n").next().unwrap_or_default();
    line.trim_end_matches("\")").replace("\\\"", "\"")
}

fn bytes_after(text: &str, phrase: &str) -> Option<Bytes> {
    let (_, rest) = text.split_once(phrase)?;
    let mut words = rest.split_whitespace();
    bytes(words.next()?, words.next()?)
}

fn bytes_before(text: &str, phrase: &str) -> Option<Bytes> {
    let (rest, _) = text.split_once(phrase)?;
    let mut words = rest.split_whitespace().rev();
    let unit = words.next()?;
    bytes(words.next()?, unit)
}

fn bytes(number: &str, unit: &str) -> Option<Bytes> {
    let unit = unit.trim_end_matches(['.', ',']).replace("bytes", "B");
    format!("{number} {unit}").parse().ok()
}

/// Runs `f` without printing its panics, because the caller handles every failure. Returns the first line of
/// the error.
pub(crate) fn catch_unseen<T, E: Display>(f: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    let unseen = UnseenGuard::set(Unseen::All);
    let caught = panic::catch_unwind(AssertUnwindSafe(f));
    drop(unseen);
    let text = match caught {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(payload) => panic_text(&*payload).unwrap_or("a panic without words").to_owned(),
    };
    Err(recognise(&text).map_or_else(|| own_words(&text, ""), |oom| oom.message))
}

/// Panics of a thread that are not printed to standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unseen {
    None,
    OutOfMemory,
    All,
}

thread_local! {
    static UNSEEN: Cell<Unseen> = const { Cell::new(Unseen::None) };
}

/// Guard during which these panics of this thread are not printed.
struct UnseenGuard {
    before: Unseen,
}

impl UnseenGuard {
    fn set(which: Unseen) -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let others = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                let expected = match UNSEEN.get() {
                    Unseen::None => false,
                    Unseen::OutOfMemory => {
                        panic_text(info.payload()).is_some_and(|t| recognise(t).is_some())
                    }
                    Unseen::All => true,
                };
                if !expected {
                    others(info);
                }
            }));
        });
        Self { before: UNSEEN.replace(which) }
    }
}

impl Drop for UnseenGuard {
    fn drop(&mut self) {
        UNSEEN.set(self.before);
    }
}

/// Converts a caught failure to an error. tch panics if memory runs out when it converts a number to a tensor,
/// so a panic may be out of memory.
pub(crate) fn into_error(caught: Caught<Error>) -> Error {
    match caught {
        Caught::OutOfMemory(oom) => oom.into(),
        Caught::Error(error) => error,
        Caught::Panic(payload) => Error::Panicked { message: panic_message(&*payload) },
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    panic_words(payload).unwrap_or_else(|| "without a word".to_owned())
}

/// Returns the error; resumes a panic that is not out-of-memory.
pub(crate) fn into_error_or_panic(caught: Caught<Error>) -> Error {
    match caught {
        Caught::Panic(payload) => panic::resume_unwind(payload),
        other => into_error(other),
    }
}

/// Runs `f`; a panic becomes an error, which can be reported to other ranks.
pub(crate) fn caught<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch(f).map_err(into_error)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, TchError, Tensor};

    use super::*;
    use crate::memory::Arena;

    /// Returns tch's error of an arena with this name and 1000 bytes, 900 of them in use, asked for 512.
    fn refused(name: &str) -> TchError {
        let arena = Arena::limited(name, 1000).expect("a limit");
        let _inside = arena.enter();
        let _in_use = Tensor::zeros([900], (Kind::Uint8, Device::Cpu));
        Tensor::f_zeros([512], (Kind::Uint8, Device::Cpu)).expect_err("no more than 1000")
    }

    #[test]
    fn an_arena_is_reported_with_its_numbers() {
        for name in ["stage 'two'", "limit 7", "': asked for 3 bytes, 4 in use, limit 5"] {
            let oom = recognise(&refused(name).to_string()).expect("an arena's report");
            assert_eq!(oom.place, Place::Arena(name.into()));
            assert_eq!(oom.asked, Some(Bytes(512)));
            assert_eq!(oom.in_use, Some(Bytes(900)));
            assert_eq!(oom.limit, Some(Bytes(1000)));
            let sentence = format!(
                "out of memory in arena '{name}': asked for 512 bytes, 900 in use, limit 1000"
            );
            assert_eq!(oom.message, sentence);
            assert_eq!(oom.to_string(), format!("{sentence}; {}", REMEDIES[0]));
            assert_eq!(recognise(&oom.to_string()), Some(oom));
        }
    }

    #[test]
    fn numbers_come_along_whatever_is_said_around_them_and_on_whatever_thread() {
        let plain = recognise(&refused("around").to_string()).expect("an arena's report");
        let text = std::thread::spawn(|| refused("around").to_string()).join().expect("a text");
        let around = recognise(&format!("while training: {text} (second try)"));
        let around = around.expect("an arena's report");
        assert_eq!((around.asked, around.in_use), (plain.asked, plain.in_use));
        assert_eq!((around.limit, around.place), (plain.limit, plain.place));
    }

    #[test]
    fn an_arena_of_another_process_is_known_without_numbers() {
        let oom = recognise("out of memory in arena 'far': asked for 1 bytes, 2 in use, limit 2");
        let oom = oom.expect("an arena's report");
        assert_eq!(oom.place, Place::Arena("far".into()));
        assert_eq!((oom.asked, oom.in_use, oom.limit), (None, None, None));
    }

    #[test]
    fn a_panic_of_tch_is_read_like_an_error() {
        let TchError::Torch(text) = refused("a \"quoted\" name") else { panic!("of libtorch") };
        let plain = recognise(&text);
        assert_eq!(plain.as_ref().and_then(|oom| oom.asked), Some(Bytes(512)));
        let text = format!("{text}\nException raised from refuse at arena.cpp:46\nframe #0");
        assert_eq!(recognise(&format!("{:?}", TchError::Torch(text.clone()))), plain);
        assert_eq!(recognise(&TchError::Torch(text).to_string()), plain);
    }

    #[test]
    fn cuda_is_read_with_its_numbers() {
        let oom = recognise(
            "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.80 \
             GiB of which 17.81 MiB is free.",
        )
        .expect("CUDA's report");
        assert_eq!(oom.place, Place::Cuda);
        assert_eq!(oom.asked, Some(Bytes(41 << 29)));
        assert_eq!(oom.limit.map(|b| b.to_string()), Some("140 GiB".into()));
        let oom = recognise(
            "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.80 \
             GiB of which 17.81 MiB is free. 2.00 GiB allowed; Of the allocated memory 1 GiB is \
             allocated by PyTorch. If reserved but unallocated memory is large try setting",
        )
        .expect("CUDA's report");
        assert_eq!(oom.limit, Some(Bytes(2 << 30)));
        assert!(oom.message.ends_with("is allocated by PyTorch."), "{oom}");
    }

    #[test]
    fn each_allocator_is_known() {
        let reports = [
            ("CUDA error: out of memory", Place::Cuda),
            (
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
                Place::Cuda,
            ),
            ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Place::Cuda),
            (
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate \
              memory: you tried to allocate 4000 bytes. Error code 12",
                Place::Host,
            ),
            ("std::bad_alloc", Place::Host),
        ];
        for (text, place) in &reports {
            assert_eq!(recognise(text).map(|oom| oom.place).as_ref(), Some(place), "{text}");
        }
        let host = recognise(reports[3].0).and_then(|oom| oom.asked);
        assert_eq!(host, Some(Bytes(4000)));
    }

    #[test]
    fn other_ends_are_handed_back_untouched() {
        let result: Result<(), _> = catch(|| Err("my notes on being out of memory"));
        assert!(matches!(result, Err(Caught::Error("my notes on being out of memory"))));

        let result: Result<(), Caught<String>> = catch(|| panic::resume_unwind(Box::new(42_i32)));
        let Err(Caught::Panic(payload)) = result else { panic!("{result:?}") };
        assert_eq!(payload.downcast_ref::<i32>(), Some(&42));
    }
}
