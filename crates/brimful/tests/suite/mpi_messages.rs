//! MPI messages between processes under a real `mpirun`: nothing waits for a process that does not send, and one
//! sender's messages arrive in order.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::support::ranks::{SOCKETS, as_process_or, reported, text};
use brimful_torch::mpi::{Buffer, Mpi, MpiLine, MpiMessage};

const LIMIT: Duration = Duration::from_secs(60);
/// Size of a message that no MPI sends before its receiver asks for it.
const LARGE: usize = 1 << 24;

fn arrives(mpi: &mut Mpi, mut pending: MpiMessage) {
    while !mpi.is_done(&mut pending).expect("a message") {
        thread::yield_now();
    }
}

fn send(mpi: &mut Mpi, line: MpiLine, bytes: Vec<u8>, to: usize) -> MpiMessage {
    mpi.send(line, Buffer::Bytes(bytes), to, 0).expect("a message")
}

fn next(mpi: &mut Mpi) -> (usize, Vec<u8>) {
    loop {
        match mpi.incoming().expect("messages") {
            Some(message) => return message,
            None => thread::yield_now(),
        }
    }
}

/// Exchanges a byte in both directions, so that the connection exists.
fn greet(mpi: &mut Mpi, other: usize) {
    let there = send(mpi, MpiLine::Data, vec![0], other);
    let back = mpi.receive(MpiLine::Data, Buffer::Bytes(vec![0]), other, 0).expect("asked");
    [there, back].into_iter().for_each(|pending| arrives(mpi, pending));
}

/// Announces a large message, and makes no MPI call until the file exists.
fn halting_sender(mpi: &mut Mpi, seen: &Path) {
    greet(mpi, 0);
    let large = send(mpi, MpiLine::Control, vec![7; LARGE], 0);
    let small = send(mpi, MpiLine::Control, vec![8], 0);
    // Over one socket this comes after the announcement.
    let after = send(mpi, MpiLine::Data, vec![9], 0);
    while !seen.exists() {
        thread::sleep(Duration::from_millis(1));
    }
    [large, small, after].into_iter().for_each(|pending| arrives(mpi, pending));
}

/// Does not wait for the large message, receives the third process's meanwhile, and gets all in order.
fn receiver(mpi: &mut Mpi, seen: &Path) {
    greet(mpi, 1);
    let after = mpi.receive(MpiLine::Data, Buffer::Bytes(vec![0]), 1, 0).expect("asked");
    arrives(mpi, after);
    let go = send(mpi, MpiLine::Data, vec![1], 2);
    arrives(mpi, go);
    assert_eq!(next(mpi), (2, vec![2]));
    assert_eq!(mpi.incoming(), Ok(None), "the large message is not there");
    fs::write(seen, []).expect("reported");
    let (from, bytes) = next(mpi);
    assert_eq!((from, bytes.len(), bytes.iter().all(|byte| *byte == 7)), (1, LARGE, true));
    assert_eq!(next(mpi), (1, vec![8]));
}

fn third(mpi: &mut Mpi) {
    let go = mpi.receive(MpiLine::Data, Buffer::Bytes(vec![0]), 0, 0).expect("asked");
    arrives(mpi, go);
    let reported = send(mpi, MpiLine::Control, vec![2], 0);
    arrives(mpi, reported);
}

#[test]
fn a_sender_that_halts_after_its_announcement_makes_nobody_wait() {
    as_process_or(
        || {
            let mut mpi = Mpi::start(LIMIT).expect("MPI");
            let seen = PathBuf::from(reported());
            match mpi.rank() {
                0 => receiver(&mut mpi, &seen),
                1 => halting_sender(&mut mpi, &seen),
                _ => third(&mut mpi),
            }
            mpi.end();
        },
        |launcher| {
            let folder = tempfile::tempdir().expect("a folder");
            let seen = folder.path().join("seen").display().to_string();
            let output = launcher.start(3, &SOCKETS, &seen).wait(LIMIT);
            assert!(output.status.success(), "{}", text(&output));
        },
    );
}
