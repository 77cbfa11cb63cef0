//! Freed memory stays with the process: the system does not clear the next tensor's pages again.

use brimful_torch::host;
use brimful_torch::host_buffer::HostBuffer;
use tch::{Device, Kind, Tensor};

/// Returns the number of pages that the system has given this process so far: the tenth field of its statistics.
fn pages() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("Linux says so");
    let after_the_name = text.rsplit_once(')').expect("a name in brackets").1;
    after_the_name.split_whitespace().nth(7).expect("a field").parse().expect("a number")
}

/// Returns how many pages it takes to allocate, fill and free a large tensor several times.
fn taken() -> u64 {
    let before = pages();
    for _ in 0..8 {
        drop(Tensor::ones([4 << 20], (Kind::Float, Device::Cpu)));
    }
    pages() - before
}

#[test]
fn freed_blocks_are_used_again() {
    let each_time = taken();
    assert!(host::keep_freed_blocks());
    let first = taken();
    let then = taken();
    assert!(then * 10 < each_time && then <= first, "{each_time}, {first}, then {then} pages");
}

#[test]
fn a_host_buffer_is_free_when_no_view_of_it_is_left() {
    let host_buffer = HostBuffer::new(5000).expect("memory");
    assert_eq!(host_buffer.bytes().numel(), 8192, "whole pages");
    assert_eq!(host_buffer.bytes().data_ptr() as usize % 4096, 0);
    assert!(host_buffer.is_free());
    let view = host_buffer.bytes().narrow(0, 256, 80).view_dtype(Kind::Double).view([2, 5]);
    assert!(!host_buffer.is_free());
    drop(view);
    assert!(host_buffer.is_free() && !host_buffer.is_pinned());
}
