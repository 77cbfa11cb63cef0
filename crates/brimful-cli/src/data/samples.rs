//! Samples to train or test on, which can be requested in any order. They are held in memory, or a thread loads
//! them ahead of their use. An engine takes them as rows of one size, or as sequences that are cut by tokens.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::ops::Deref;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use anyhow::{Result, anyhow};
use brimful::Error;
use brimful::batch::{Batch, Leaf, Sequences};
use brimful_torch::threads::limit_threads;
use tch::{Kind, Tensor};

use super::Examples;
use crate::setting::{MeanOver, typed};

/// Samples, loaded on request.
#[derive(Debug)]
pub(crate) enum SampleSet {
    Held(Examples),
    Streamed(StreamedSamples),
}

/// Request for samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SampleRequest {
    /// Indices of the samples, in the requested order.
    pub(crate) numbers: Vec<usize>,
    /// Seed of random augmentation in training; none in a test.
    pub(crate) seed: Option<u64>,
}

impl SampleRequest {
    /// Requests samples without augmentation, as in a test.
    pub(crate) fn plain(numbers: impl IntoIterator<Item = usize>) -> Self {
        Self { numbers: numbers.into_iter().collect(), seed: None }
    }
}

impl SampleSet {
    /// Makes a set of samples that are loaded on demand.
    pub(super) fn streamed(source: impl SampleSource) -> Self {
        Self::Streamed(StreamedSamples::new(source))
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Held(examples) => examples.len(),
            Self::Streamed(streamed) => streamed.len,
        }
    }

    /// Returns whether samples are loaded on demand.
    pub(crate) fn is_streamed(&self) -> bool {
        matches!(self, Self::Streamed(_))
    }

    /// Returns whether the loss is a mean over samples or over targets.
    pub(crate) fn mean_over(&self) -> MeanOver {
        match self {
            Self::Held(_) => MeanOver::Samples,
            Self::Streamed(streamed) => streamed.mean_over,
        }
    }

    /// Returns how many samples to load at once in a pass over the set: all samples if they are in memory, else
    /// `streamed`.
    pub(crate) fn at_once(&self, streamed: usize) -> usize {
        match self {
            Self::Held(examples) => examples.len().max(1),
            Self::Streamed(_) => streamed,
        }
    }

    /// Loads the requested samples.
    pub(crate) fn bring(&mut self, request: &SampleRequest) -> Result<Examples> {
        match self {
            Self::Held(examples) => {
                let numbers: Vec<i64> = request.numbers.iter().map(|n| *n as i64).collect();
                let numbers = Tensor::from_slice(&numbers);
                let chosen = |tensor: &Tensor| tensor.index_select(0, &numbers);
                Ok(Examples::whole(chosen(&examples.inputs), chosen(&examples.targets)))
            }
            Self::Streamed(streamed) => streamed.bring(request),
        }
    }

    /// Starts to prepare the samples of the next request.
    pub(crate) fn prepare(&mut self, request: SampleRequest) {
        if let Self::Streamed(streamed) = self {
            streamed.prepare(request);
        }
    }

    /// Loads all samples in order.
    pub(crate) fn all(&mut self) -> Result<Examples> {
        self.bring(&SampleRequest::plain(0..self.len()))
    }
}

/// Source of samples.
pub(super) trait SampleSource: Debug + Send + 'static {
    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Returns whether the loss is a mean over samples or over targets.
    fn mean_over(&self) -> MeanOver {
        MeanOver::Samples
    }

    /// Loads the requested samples.
    fn bring(&mut self, request: &SampleRequest) -> Result<Examples>;
}

/// Samples of a source, loaded by a thread that owns the source.
#[derive(Debug)]
pub(crate) struct StreamedSamples {
    pub(super) len: usize,
    pub(super) mean_over: MeanOver,
    /// Requests sent to the thread, in order, until their samples are taken.
    asked: VecDeque<SampleRequest>,
    requests: Option<Sender<SampleRequest>>,
    brought: Receiver<Result<Examples>>,
    /// Loader thread: none once it has been joined, an error if it could not be started.
    thread: Option<io::Result<JoinHandle<()>>>,
}

impl StreamedSamples {
    pub(super) fn new(source: impl SampleSource) -> Self {
        Self::start(Builder::new(), source)
    }

    fn start(thread: Builder, mut source: impl SampleSource) -> Self {
        let (len, mean_over) = (source.len(), source.mean_over());
        let (requests, received) = channel::<SampleRequest>();
        let (answers, brought) = channel();
        let thread = thread.spawn(move || {
            // The other cores belong to the training, or to the source's own threads.
            let _alone = limit_threads(1);
            for request in received {
                if answers.send(source.bring(&request)).is_err() {
                    break;
                }
            }
        });
        let (requests, thread) = (Some(requests), Some(thread));
        Self { len, mean_over, asked: VecDeque::new(), requests, brought, thread }
    }

    /// Loads the requested samples, which may be prepared already.
    pub(super) fn bring(&mut self, request: &SampleRequest) -> Result<Examples> {
        while self.asked.front().is_some_and(|first| first != request) {
            // Drops prepared samples that are not requested after all, such as the samples prepared after the last
            // step.
            drop(self.take());
        }
        if self.asked.is_empty() {
            self.prepare(request.clone());
        }
        self.take()
    }

    /// Sends a request to the thread, which loads the samples while the caller continues.
    pub(super) fn prepare(&mut self, request: SampleRequest) {
        // If the thread is gone, `take` reports it.
        let _ = self.requests.as_ref().map(|requests| requests.send(request.clone()));
        self.asked.push_back(request);
    }

    fn take(&mut self) -> Result<Examples> {
        self.asked.pop_front();
        self.brought.recv().unwrap_or_else(|_| match self.thread.take() {
            Some(Ok(thread)) => {
                thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                Err(anyhow!("the loader thread has ended"))
            }
            Some(Err(cause)) => {
                let (what, cause) = ("data loading".to_owned(), cause.to_string());
                Err(Error::NoThread { what, cause }.into())
            }
            None => Err(anyhow!("there is no loader thread")),
        })
    }
}

impl Drop for StreamedSamples {
    fn drop(&mut self) {
        self.requests = None;
        // Waits for the thread. Its last samples and any panic over them no longer matter.
        let _ = self.thread.take().and_then(Result::ok).map(JoinHandle::join);
    }
}

/// Number of tokens of which the widths of micro-batches are multiples. With few widths, CUDA graphs are reused
/// more often. If the limit on a sample's length is no such multiple, the next smaller divisor of the limit is
/// used.
const STEP: i64 = 64;

/// Inputs or targets of a mini-batch.
#[derive(Debug)]
pub(crate) enum Rows {
    /// Rows of one size.
    Alike(Tensor),
    /// Sequences, cut by tokens; each micro-batch is as wide as its own longest sequence needs.
    Unlike(Sequences),
}

impl Rows {
    /// Makes a sequence of each row: its first positions, as many as `lengths` says. Micro-batches are padded with
    /// `padding`, to at most `most` positions.
    pub(super) fn unlike(
        rows: &Tensor,
        lengths: &[i64],
        most: i64,
        padding: i64,
    ) -> brimful::Result<Self> {
        if lengths.is_empty() {
            return Ok(Self::Alike(rows.shallow_clone()));
        }
        let row = |(number, length): (usize, &i64)| {
            Ok(rows.f_get(number as i64)?.f_narrow(0, 0, *length)?)
        };
        let rows = lengths.iter().enumerate().map(row).collect::<brimful::Result<Vec<_>>>()?;
        // Keeps widths within `most`, the number of a model's positions.
        let step = (1..=STEP).rev().find(|step| most % step == 0).unwrap_or(1);
        Ok(Self::Unlike(Sequences::in_steps_of(step as usize, &rows, padding as f64)?))
    }

    /// Converts rows to the model's dtype, unless they are tokens.
    pub(crate) fn typed(self, kind: Kind) -> Self {
        match self {
            Self::Alike(rows) => Self::Alike(typed(&rows, kind)),
            unlike => unlike,
        }
    }
}

impl Deref for Rows {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Self::Alike(rows) => rows,
            Self::Unlike(rows) => rows,
        }
    }
}

impl Batch for Rows {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(Leaf<'a>)) {
        match self {
            Self::Alike(rows) => rows.visit(f),
            Self::Unlike(rows) => rows.visit(f),
        }
    }

    fn map(&self, f: &mut dyn FnMut(Leaf<'_>) -> brimful::Result<Tensor>) -> brimful::Result<Self> {
        Ok(match self {
            Self::Alike(rows) => Self::Alike(rows.map(f)?),
            Self::Unlike(rows) => Self::Unlike(rows.map(f)?),
        })
    }
}

/// Number of rounds of the network, enough to leave nothing of the original order.
const ROUNDS: usize = 8;
/// Smallest number of bits in half a number; fewer bits would give too few orders.
const LEAST_HALF: u32 = 4;

/// Permutation of the numbers below a count, determined by a seed.
///
/// A Feistel network permutes the numbers with an even number of bits. A result that is not below the count goes
/// through the network again, until a result is below the count. The repetition ends, because a cycle of a
/// permutation returns to its start, which is below the count.
#[derive(Debug)]
pub(crate) struct Shuffle {
    count: u64,
    /// Number of bits in half a number.
    half: u32,
    keys: [u64; ROUNDS],
}

impl Shuffle {
    pub(crate) fn new(count: usize, seed: u64) -> Self {
        let count = count as u64;
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let mut numbers = NumberStream::new(seed);
        let keys = [(); ROUNDS].map(|()| numbers.next());
        Self { count, half: bits.div_ceil(2).max(LEAST_HALF), keys }
    }

    /// Returns the number at a position, which must be below the count.
    pub(crate) fn at(&self, place: usize) -> usize {
        let mut number = self.permuted(place as u64);
        while number >= self.count {
            number = self.permuted(number);
        }
        number as usize
    }

    fn permuted(&self, number: u64) -> u64 {
        let low = (1 << self.half) - 1;
        let halves = (number >> self.half, number & low);
        let (left, right) = self.keys.iter().fold(halves, |(left, right), key| {
            (right, left ^ (mixed(right.wrapping_add(*key)) & low))
        });
        left << self.half | right
    }
}

/// Stream of random numbers, determined by its seed.
#[derive(Debug)]
pub(super) struct NumberStream(u64);

impl NumberStream {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// Returns an integer from 0 to below the limit.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        scaled(self.next(), limit)
    }
}

/// Mixes the bits, so that each bit of the result depends on all bits.
pub(super) fn mixed(bits: u64) -> u64 {
    let mixed = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Scales random bits to an integer from 0 to below the limit.
pub(super) fn scaled(bits: u64, limit: u64) -> u64 {
    ((u128::from(bits) * u128::from(limit)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;
    use brimful::{MicroBatcher, MicroBatches};
    use tch::nn::VarStore;
    use tch::{Device, Tensor};

    use super::*;

    /// Source of samples that equal their indices, with one broken sample.
    #[derive(Debug)]
    struct Counting;

    impl SampleSource for Counting {
        fn len(&self) -> usize {
            10
        }

        fn bring(&mut self, SampleRequest { numbers, .. }: &SampleRequest) -> Result<Examples> {
            ensure!(!numbers.contains(&7), "sample 7 is broken");
            let own: Vec<i64> = numbers.iter().map(|number| *number as i64).collect();
            Ok(Examples::whole(Tensor::from_slice(&own), Tensor::from_slice(&own)))
        }
    }

    fn numbers(streamed: &mut StreamedSamples, wanted: &[usize]) -> Vec<i64> {
        let brought = streamed.bring(&SampleRequest::plain(wanted.iter().copied()));
        brought.expect("samples").inputs.try_into().expect("numbers")
    }

    #[test]
    fn what_is_asked_for_comes_whatever_was_prepared() {
        let mut streamed = StreamedSamples::new(Counting);
        assert_eq!(numbers(&mut streamed, &[3, 1]), [3, 1]);
        for prepared in [vec![5, 6], vec![2]] {
            streamed.prepare(SampleRequest::plain(prepared));
        }
        assert_eq!(numbers(&mut streamed, &[5, 6]), [5, 6]);
        // Drops the other prepared request.
        assert_eq!(numbers(&mut streamed, &[0]), [0]);
    }

    #[test]
    fn a_source_that_fails_says_so_and_goes_on() {
        let mut streamed = StreamedSamples::new(Counting);
        let broken = streamed.bring(&SampleRequest::plain([7])).expect_err("broken").to_string();
        assert_eq!(broken, "sample 7 is broken");
        assert_eq!(numbers(&mut streamed, &[8]), [8]);
    }

    #[test]
    fn a_source_without_a_thread_says_so() {
        // No machine has memory for such a stack, so the thread cannot be started.
        let mut streamed = StreamedSamples::start(Builder::new().stack_size(1 << 60), Counting);
        streamed.prepare(SampleRequest::plain([1]));
        let error = streamed.bring(&SampleRequest::plain([1])).expect_err("no thread").to_string();
        assert!(error.starts_with("no thread could be started for data loading"), "{error}");
    }

    #[test]
    fn micro_batches_are_as_wide_as_their_own_longest_and_no_wider_than_a_sample_may_be() {
        let tokens = Tensor::ones([3, 90], (Kind::Int64, Device::Cpu));
        let rows = Rows::unlike(&tokens, &[3, 90, 60], 100, 0).expect("rows");
        assert_eq!(rows.size(), [3, 100]);
        let store = VarStore::new(Device::Cpu);
        let mut widths = Vec::new();
        let sums = MicroBatcher::new(&store, MicroBatches::Samples(1)).map(&rows, |part: Rows| {
            widths.push(part.size()[1]);
            part.sum_dim_intlist([1_i64].as_slice(), false, Kind::Int64)
        });
        assert_eq!(widths, [100, 100, 50]);
        assert_eq!(sums.expect("sums"), Tensor::from_slice(&[3_i64, 90, 60]));
    }

    fn order(count: usize, seed: u64) -> Vec<usize> {
        let shuffle = Shuffle::new(count, seed);
        (0..count).map(|place| shuffle.at(place)).collect()
    }

    #[test]
    fn each_number_comes_once() {
        for count in [1, 2, 3, 15, 16, 17, 256, 257, 1000, 5000] {
            let mut numbers = order(count, 7);
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn the_seed_decides_and_nothing_stays_where_it_was() {
        assert_eq!(order(1000, 3), order(1000, 3));
        for (one, other) in
            [(order(1000, 3), order(1000, 4)), (order(1000, 3), (0..1000).collect())]
        {
            let same = one.iter().zip(&other).filter(|(one, other)| one == other).count();
            assert!(same < 10, "{same}");
        }
    }

    /// Each of the six orders of three samples occurs about equally often.
    #[test]
    fn all_orders_are_as_likely() {
        let mut found = std::collections::BTreeMap::new();
        for seed in 0..6000 {
            *found.entry(order(3, seed)).or_insert(0) += 1;
        }
        assert_eq!(found.len(), 6);
        assert!(found.values().all(|count| (800..1200).contains(count)), "{found:?}");
    }
}
