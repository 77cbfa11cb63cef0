//! Model on one thread, and several copies of it at once.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use brimful::{Loss, MicroBatcher, MicroBatches};
use brimful_cli::setting::{LossModel, clear_gradients};
use brimful_torch::threads;
use tch::Device;
use tch::nn::VarStore;

use crate::timed::{share, timed};
use crate::work::{Samples, Workload};

/// Model run in the same micro-batches as the pipelines.
pub(super) struct OneThread {
    pub(super) store: VarStore,
    model: LossModel,
    micro: MicroBatcher,
}

impl OneThread {
    pub(super) fn new(work: &Workload, device: Device) -> Result<Self> {
        let store = VarStore::new(device);
        let model = work.build(&store)?;
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(work.micro_batch));
        Ok(Self { store, model, micro })
    }

    /// Runs one step; returns its seconds and its loss.
    pub(super) fn step(&mut self, batch: &Samples) -> Result<(f64, f64)> {
        clear_gradients(&self.store)?;
        let Self { store, model, micro } = self;
        // Uses full logits, as the compared pipelines do.
        let backward = || Ok(micro.backward(batch, |(x, y)| Loss::mean(model.plain_loss(&x, &y)))?);
        let (step, seconds) = timed(store.device(), backward)?;
        Ok((seconds, step.loss))
    }
}

/// One model per stage, each on its own thread, without communication.
pub(super) struct ThreadCopies(Vec<OneThread>);

impl ThreadCopies {
    pub(super) fn new(work: &Workload, count: usize) -> Result<Self> {
        (0..count).map(|_| OneThread::new(work, Device::Cpu)).collect::<Result<_>>().map(Self)
    }

    /// Runs one step of all copies at once; returns the seconds from the common start until the last one ends.
    pub(super) fn step(&mut self, batch: &Samples) -> Result<f64> {
        let begin = Barrier::new(self.0.len() + 1);
        thread::scope(|scope| {
            let threads: Vec<_> = (self.0.iter_mut())
                .map(|copy| {
                    let (batch, begin) = (share(batch), &begin);
                    scope.spawn(move || {
                        let _one = threads::limit_threads(1);
                        begin.wait();
                        copy.step(&batch)
                    })
                })
                .collect();
            begin.wait();
            let start = Instant::now();
            for thread in threads {
                thread.join().map_err(|_| anyhow::anyhow!("a copy panicked"))??;
            }
            Ok(start.elapsed().as_secs_f64())
        })
    }
}
