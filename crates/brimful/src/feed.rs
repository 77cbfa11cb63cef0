//! Prefetches micro-batches to the device, at most two at a time.
//!
//! ```text
//!   feeder thread    pin 1 → copy 1 │ pin 2 → copy 2 │ wait until 1 is used │ pin 3 → copy 3 …
//!   this thread                     │ use 1          │ use 2                │ use 3 …
//! ```
//!
//! The copies go through pinned memory on copy streams ([`CopyStreams`]), so neither the host nor the device waits
//! for them. A batch that is on the device already is cut in place; one that another accelerator is still
//! computing is copied once it is complete.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use crate::batch::{self, Batch, Lender};
use crate::copy_streams::CopyStreams;
use crate::stream_fence::StreamFence;
use crate::{Error, Result};

/// Interval at which the feeder polls for a released micro-batch.
const GLANCE: Duration = Duration::from_micros(100);

/// Calls `f` with each micro-batch in order, on the device of the copies.
pub(crate) fn each<B: Batch, F: FnMut(usize, B) -> Result<()>>(
    batch: &B,
    ranges: &[Range<usize>],
    streams: &CopyStreams,
    mut f: F,
) -> Result<()> {
    // The closure may change copies. Tensors that are on the device already belong to the caller and are lent.
    if !batch::devices(batch).contains(&streams.device()) {
        return brought(batch, ranges, streams, f);
    }
    let mut lender = Lender::to(streams.borrowers.knows::<F>());
    brought(batch, ranges, streams, |i, part| lender.lend(part, |part| f(i, part)))?;
    streams.borrowers.trust::<F>();
    Ok(())
}

/// Calls `f` with each micro-batch in order. A micro-batch may be a view of the batch.
fn brought<B: Batch>(
    batch: &B,
    ranges: &[Range<usize>],
    streams: &CopyStreams,
    mut f: impl FnMut(usize, B) -> Result<()>,
) -> Result<()> {
    let device = streams.device();
    if batch::devices(batch).iter().all(|on| *on == device) {
        let mut slices = ranges.iter().cloned().enumerate();
        return slices.try_for_each(|(i, range)| f(i, batch::slice(batch, range)?));
    }
    let slices = ranges.iter().cloned().map(|range| batch::slice(batch, range));
    let slices = slices.collect::<Result<Vec<B>>>()?;
    if device == Device::Cpu {
        let mut slices = slices.iter().enumerate();
        return slices.try_for_each(|(i, slice)| f(i, moved(slice, device)?));
    }
    let (compute, fence) =
        (Stream::current(device)?, StreamFence::behind(batch::tensors(batch).into_iter())?);
    let fed = thread::scope(|scope| {
        let (arrivals, arrived) = sync_channel(0);
        let (releases, released) = channel();
        thread::Builder::new()
            .spawn_scoped(scope, move || feed(slices, streams, &fence, &arrivals, &released))
            .map_err(|cause| Error::no_thread("copies of micro-batches", &cause))?;
        for i in 0..ranges.len() {
            let (micro_batch, copied) = arrived.recv().map_err(|_| gone())??;
            if let Some(copied) = copied {
                compute.wait(&copied)?;
            }
            // The copies' memory lives until the compute stream is done with it.
            batch::tensors(&micro_batch)
                .into_iter()
                .try_for_each(|tensor| compute.record_stream(tensor))?;
            f(i, micro_batch)?;
            // The feeder stops listening once it has sent the last micro-batch.
            let _ = releases.send(Event::after(compute)?);
        }
        Ok(())
    });
    // Later changes of the batch wait for the copies that still read it.
    streams.release(batch::tensors(batch).into_iter())?;
    fed
}

/// A micro-batch whose copy is in flight, with the event of its completion.
type Arrival<B> = (B, Option<Event>);

/// Sends all micro-batches in order; stops if the receiver is gone.
fn feed<B: Batch>(
    slices: Vec<B>,
    streams: &CopyStreams,
    fence: &StreamFence,
    arrivals: &SyncSender<Result<Arrival<B>>>,
    released: &Receiver<Event>,
) {
    for (i, slice) in slices.into_iter().enumerate() {
        // Two are on the device: the one in use and the next one. A third waits until one is released.
        if i >= 2 && !released.recv().is_ok_and(|used| wait(&used).is_ok()) {
            return;
        }
        if arrivals.send(send(&slice, streams, fence)).is_err() {
            return;
        }
    }
}

fn send<B: Batch>(slice: &B, streams: &CopyStreams, fence: &StreamFence) -> Result<Arrival<B>> {
    let micro_batch = with_others(slice, streams.device(), |tensor| {
        streams.begin(tensor, fence.on(tensor.device()))
    })?;
    Ok((micro_batch, streams.completion()?))
}

/// Polls the event: waiting inside CUDA would hold locks that the launching thread needs.
fn wait(event: &Event) -> Result<()> {
    while !event.is_reached()? {
        thread::sleep(GLANCE);
    }
    Ok(())
}

/// Copies the batch's tensors to the device through pinned memory, on this thread's current streams.
pub(crate) fn moved<B: Batch>(batch: &B, device: Device) -> Result<B> {
    with_others(batch, device, |tensor| Ok(transfer::send(&transfer::pin(tensor)?, device)?))
}

/// Applies `bring` to each of the batch's tensors that belongs on the device and is elsewhere.
fn with_others<B: Batch>(
    batch: &B,
    device: Device,
    bring: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<B> {
    batch.map(&mut |leaf| match leaf.tensor() {
        here if here.device() == device || leaf.stays_on_the_host() => Ok(here.shallow_clone()),
        other => bring(other),
    })
}

fn gone() -> Error {
    Error::Torch("the thread that copies micro-batches to the device has ended".into())
}
