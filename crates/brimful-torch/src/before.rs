//! What a program does before libtorch starts.
//!
//! libtorch registers its operations when it is loaded, which takes a quarter of a second. Whoever
//! only wants to print `--help` need not wait for that: the loader runs an executable's
//! `.preinit_array` before the constructors of any library.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

/// Lets a function see the command line before libtorch starts, and end the program with the exit
/// code that it answers. It must not touch libtorch, nor `std::env::args`, which is not there yet.
///
/// For programs alone, at the root of their crate, once; without effect where the loader is not
/// glibc's.
///
/// ```no_run,standalone_crate
/// brimful_torch::before_libtorch!(|words| (words.len() < 2).then_some(2));
///
/// fn main() {}
/// ```
#[macro_export]
macro_rules! before_libtorch {
    ($answer:expr) => {
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        #[allow(unsafe_code)]
        const _: () = {
            use ::std::ffi::{OsString, c_char, c_int};

            extern "C" fn early(
                count: c_int,
                words: *const *const c_char,
                environment: *const *const c_char,
            ) {
                let answer: fn(::std::vec::Vec<OsString>) -> ::std::option::Option<u8> = $answer;
                // SAFETY: the loader passes what it passes to `main`, before anything else runs.
                let words = unsafe { $crate::before::command_line(count, words, environment) };
                if let Some(code) = answer(words) {
                    ::std::process::exit(code.into());
                }
            }

            // SAFETY: the loader calls what stands in this section, with these arguments.
            #[used]
            #[unsafe(link_section = ".preinit_array")]
            static EARLY: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = early;
        };
    };
}

/// The words of the command line. Gives the C library its environment too, which it would get only
/// later.
///
/// # Safety
/// `words` must hold `count` strings that live as long as the process, `environment` the process's
/// own environment; no other thread may run.
#[doc(hidden)]
pub unsafe fn command_line(
    count: c_int,
    words: *const *const c_char,
    environment: *const *const c_char,
) -> Vec<OsString> {
    unsafe extern "C" {
        static mut environ: *const *const c_char;
    }
    // SAFETY: by the caller's promise nobody else reads or writes it now.
    unsafe { environ = environment };
    let word = |index| {
        // SAFETY: by the caller's promise there are so many strings.
        let word = unsafe { CStr::from_ptr(*words.add(index)) };
        OsStr::from_bytes(word.to_bytes()).to_owned()
    };
    (0..usize::try_from(count).unwrap_or(0)).map(word).collect()
}
