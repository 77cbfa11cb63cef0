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
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use crate::batch::{self, Batch, Borrower, Leaf, Lender};
use crate::streams::{CopyStreams, StreamFence};
use crate::{Error, Result};

/// Interval at which the feeder polls for a released micro-batch.
const GLANCE: Duration = Duration::from_micros(100);

/// Micro-batches of a mini-batch in order, each on the device of the copies.
///
/// Call [`Feed::next`] and [`Feed::done`] by turns. Dropping the feed ends the copies.
#[derive(Debug)]
pub(crate) struct Feed<'a, B: Batch> {
    batch: &'a B,
    /// Samples of the micro-batches that are not handed out yet.
    ranges: std::vec::IntoIter<Range<usize>>,
    streams: &'a CopyStreams,
    /// Checks that the caller's own tensors stay unchanged; `None` if all micro-batches are copies.
    lender: Option<(Lender, Borrower)>,
    /// Copies ahead of their use; `None` if there is nothing to copy ahead.
    ahead: Option<Ahead<B>>,
}

impl<'a, B: Batch> Feed<'a, B> {
    /// Starts to bring these parts of the mini-batch to the device, for a borrower.
    pub(crate) fn new(
        batch: &'a B,
        ranges: Vec<Range<usize>>,
        streams: &'a CopyStreams,
        borrower: Borrower,
    ) -> Result<Self> {
        let (device, devices) = (streams.device, batch::devices(batch));
        // The closure may change copies. Tensors that are on the device already belong to the caller and are lent.
        let lender = devices.contains(&device).then(|| {
            let is_known = streams.borrowers.knows(borrower);
            (Lender::to(is_known), borrower)
        });
        let is_copied = device != Device::Cpu && devices.iter().any(|on| *on != device);
        let ahead = is_copied.then(|| Ahead::start(batch, &ranges, streams)).transpose()?;
        Ok(Self { batch, ranges: ranges.into_iter(), streams, lender, ahead })
    }

    /// Returns the next micro-batch with its samples; `None` after the last one. The micro-batch may be a view of
    /// the mini-batch.
    pub(crate) fn next(&mut self) -> Result<Option<(Range<usize>, B)>> {
        let Some(range) = self.ranges.next() else {
            if let Some((_, borrower)) = self.lender {
                self.streams.borrowers.trust(borrower);
            }
            // Later changes of the batch wait for the copies that still read it.
            return match self.ahead.take() {
                Some(ahead) => ahead.end(self.batch, self.streams).map(|()| None),
                None => Ok(None),
            };
        };
        let device = self.streams.device;
        let micro_batch = match &mut self.ahead {
            Some(ahead) => ahead.take(device)?,
            None => moved(&batch::slice(self.batch, range.clone())?, device)?,
        };
        let micro_batch = match &mut self.lender {
            Some((lender, _)) => lender.lend(micro_batch)?,
            None => micro_batch,
        };
        Ok(Some((range, micro_batch)))
    }

    /// Takes the micro-batch back, with the result of the work on it.
    ///
    /// # Errors
    /// When the work has changed the mini-batch. Otherwise with the work's own error.
    pub(crate) fn done<T>(&mut self, result: Result<T>) -> Result<T> {
        let value = match &mut self.lender {
            Some((lender, _)) => lender.take_back(result)?,
            None => result?,
        };
        self.ahead.as_ref().map_or(Ok(()), Ahead::release)?;
        Ok(value)
    }
}

impl<B: Batch> Drop for Feed<'_, B> {
    fn drop(&mut self) {
        if let Some(ahead) = self.ahead.take() {
            // A feed is dropped before its end only after another error, which is the one to report.
            let _ = ahead.end(self.batch, self.streams);
        }
    }
}

/// Thread that copies micro-batches ahead of their use.
#[derive(Debug)]
struct Ahead<B> {
    /// Micro-batches that have not arrived yet, as views of the mini-batch.
    slices: std::vec::IntoIter<B>,
    arrived: Receiver<Result<Arrival>>,
    releases: Sender<Event>,
    compute: Stream,
    thread: JoinHandle<()>,
}

/// Copies of a micro-batch's tensors in flight, with the event of their completion.
type Arrival = (Vec<Tensor>, Option<Event>);

impl<B: Batch> Ahead<B> {
    fn start(batch: &B, ranges: &[Range<usize>], streams: &CopyStreams) -> Result<Self> {
        let compute = Stream::current(streams.device)?;
        let slices = ranges.iter().cloned().map(|range| batch::slice(batch, range));
        let slices = slices.collect::<Result<Vec<B>>>()?;
        // The fence comes after the cut, because the cut may compute on the source's device: it trims sequences.
        let fence = StreamFence::behind(batch::tensors(batch).into_iter())?;
        let sources = slices.iter().map(|slice| elsewhere(slice, streams.device));
        let sources = sources.collect::<Result<_>>()?;
        let (arrivals, arrived) = sync_channel(0);
        let (releases, released) = channel();
        let streams = streams.clone();
        let thread = thread::Builder::new()
            .spawn(move || feed(sources, &streams, &fence, &arrivals, &released))
            .map_err(|cause| Error::no_thread("copies of micro-batches", &cause))?;
        Ok(Self { slices: slices.into_iter(), arrived, releases, compute, thread })
    }

    /// Returns the next micro-batch, when its copies have begun.
    fn take(&mut self, device: Device) -> Result<B> {
        let slice = self.slices.next().ok_or_else(gone)?;
        let (copies, copied) = self.arrived.recv().map_err(|_| gone())??;
        if let Some(copied) = copied {
            self.compute.wait(&copied)?;
        }
        let mut copies = copies.into_iter();
        let micro_batch = slice.map(&mut |leaf| match is_there(leaf, device) {
            true => Ok(leaf.tensor().shallow_clone()),
            false => copies.next().ok_or_else(gone),
        })?;
        // The copies' memory lives until the compute stream is done with it.
        batch::tensors(&micro_batch)
            .into_iter()
            .try_for_each(|tensor| self.compute.record_stream(tensor))?;
        Ok(micro_batch)
    }

    /// Lets the memory of the last micro-batch be reused after the work on it.
    fn release(&self) -> Result<()> {
        // The thread stops listening once it has sent the last micro-batch.
        let _ = self.releases.send(Event::after(self.compute)?);
        Ok(())
    }

    /// Ends the thread, and makes later changes of the batch wait for the copies that still read it.
    fn end(self, batch: &B, streams: &CopyStreams) -> Result<()> {
        let Self { arrived, releases, thread, .. } = self;
        drop((arrived, releases));
        let ended = thread.join().map_err(|_| gone());
        streams.release(batch::tensors(batch).into_iter())?;
        ended
    }
}

/// Sends copies of all micro-batches' tensors in order; stops if the receiver is gone.
fn feed(
    sources: Vec<Vec<Tensor>>,
    streams: &CopyStreams,
    fence: &StreamFence,
    arrivals: &SyncSender<Result<Arrival>>,
    released: &Receiver<Event>,
) {
    for (i, tensors) in sources.into_iter().enumerate() {
        // Two micro-batches are on the device: the one in use and the next one. A third waits until one is
        // released.
        if i >= 2 && !released.recv().is_ok_and(|used| wait(&used).is_ok()) {
            return;
        }
        if arrivals.send(send(&tensors, streams, fence)).is_err() {
            return;
        }
    }
}

fn send(tensors: &[Tensor], streams: &CopyStreams, fence: &StreamFence) -> Result<Arrival> {
    let copy = |tensor: &Tensor| streams.begin(tensor, fence.on(tensor.device()));
    let copies = tensors.iter().map(copy).collect::<Result<_>>()?;
    Ok((copies, streams.completion()?))
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
    batch.map(&mut |leaf| match leaf.tensor() {
        here if is_there(leaf, device) => Ok(here.shallow_clone()),
        other => Ok(transfer::send(&transfer::pin(other)?, device)?),
    })
}

/// Returns the tensors that must be copied to the device, in the order of [`Batch::map`].
fn elsewhere<B: Batch>(slice: &B, device: Device) -> Result<Vec<Tensor>> {
    let mut found = Vec::new();
    slice.map(&mut |leaf| {
        if !is_there(leaf, device) {
            found.push(leaf.tensor().shallow_clone());
        }
        Ok(leaf.tensor().shallow_clone())
    })?;
    Ok(found)
}

/// Returns whether the leaf need not be copied to the device.
fn is_there(leaf: Leaf<'_>, device: Device) -> bool {
    // A rank without a sample has undefined outputs.
    let tensor = leaf.tensor();
    !tensor.defined() || tensor.device() == device || leaf.stays_on_the_host()
}

fn gone() -> Error {
    Error::Torch("the thread that copies micro-batches to the device has ended".into())
}
