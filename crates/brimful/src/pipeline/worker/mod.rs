//! Worker: a thread with its own stages, their variables, and the step that it runs.

mod attempt;
mod commit;
mod variables;

pub(crate) use attempt::{Idle, ReportOptions, WorkerDone};
use std::collections::BTreeMap;
pub(crate) use variables::{Variable, Variables};

use tch::nn::VarStore;

use crate::Result;
use crate::memory::Memory;
use crate::memory_format::convert_convolutions;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::OffloadedStages;
use crate::pipeline::run::WorkerRun;
use crate::pipeline::site::{Blueprint, Site};
use crate::step::{StoreAttempt, Undo, UnmanagedStatistics};
use crate::update::{EmaPart, OptimizerPlan};
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{HostLinkUse, Span};

/// Part of the pipeline that one thread owns.
pub(crate) struct Worker {
    /// Number of the worker in its pipeline.
    pub(crate) number: usize,
    pub(crate) site: Site,
    pub(crate) variables: Variables,
    pub(crate) memory: Option<Memory>,
    pub(crate) ema: Option<EmaPart>,
    /// BatchNorm layers that update their statistics at every run, such as tch's own.
    pub(crate) unmanaged: UnmanagedStatistics,
    pub(crate) store: VarStore,
    /// Forward that waits for its backward.
    pub(crate) open: Option<(WorkerRun, Undo)>,
    /// Mini-batch that ran and is not committed.
    pub(crate) attempt: Option<StoreAttempt>,
    /// Earlier mini-batches of the accumulation window, not yet committed.
    pub(crate) window: Option<StoreAttempt>,
    /// Number of stages that the optimizer updated in the last backward.
    pub(crate) updated: usize,
    /// Timed actions of the last mini-batch, and its peak memory.
    pub(crate) spans: Vec<Span>,
    pub(crate) peak: Option<Bytes>,
    /// Timed transfers of the last mini-batch; empty unless the caller asked for them.
    pub(crate) host_link: HostLinkUse,
}

/// Prepared step of a worker's part of the optimizer.
#[derive(Debug, Default)]
pub(crate) struct UpdatePlan {
    here: OptimizerPlan,
    /// By place of an offloaded stage.
    offloaded_parts: BTreeMap<usize, OptimizerPlan>,
}

impl Worker {
    /// Builds the worker's stages, on its own thread.
    pub(crate) fn build(blueprint: &Blueprint) -> Result<Self> {
        let Blueprint { layout, number, replica, device, .. } = blueprint;
        let store = VarStore::new(device.device);
        let site = blueprint.site(&store)?;
        Ok(Self {
            number: *number,
            site,
            variables: Variables::of(&store, layout, *number, *replica),
            memory: device.memory(),
            ema: None,
            unmanaged: UnmanagedStatistics::default(),
            store,
            open: None,
            attempt: None,
            window: None,
            updated: 0,
            spans: Vec::new(),
            peak: None,
            host_link: HostLinkUse::default(),
        })
    }

    /// Changes the parameters' memory format for the next run.
    fn convert(&mut self, channels_last: bool) -> Result<()> {
        // The format stays within an accumulation window, whose sums have the format of its first mini-batch. It
        // also stays with offloaded stages, whose host buffers have a fixed format.
        let stays = self.window.is_some() || self.site.offloaded.is_some();
        if stays || self.site.channels_last == channels_last {
            return Ok(());
        }
        convert_convolutions(self.variables.all().map(|v| &v.tensor), channels_last)?;
        self.site.channels_last = channels_last;
        Ok(())
    }

    /// Finishes the last step's updates, before parameters or state are read.
    ///
    /// # Errors
    /// When an update fails.
    pub(crate) fn finish_updates(&mut self) -> Result<()> {
        let Site { offloaded, optimizer, .. } = &mut self.site;
        offloaded.as_mut().map_or(Ok(()), |stages| stages.finish_updates(optimizer.as_mut()))
    }

    /// Finishes the last step's updates and drops the copies that the step left on the device, before parameters
    /// or state are handed out or replaced.
    ///
    /// # Errors
    /// When an update fails.
    pub(crate) fn offload_all(&mut self) -> Result<()> {
        let finished = self.finish_updates();
        finished.and(self.site.offloaded.as_mut().map_or(Ok(()), OffloadedStages::offload_all))
    }

    /// Prepares a step of the optimizer: for parameters on the device, and for each offloaded stage.
    pub(crate) fn prepare_update(&mut self) -> Result<UpdatePlan> {
        if self.site.offloaded.as_ref().is_some_and(|offloaded| offloaded.in_backward) {
            let optimizer = self.site.optimizer.as_ref().expect("it was made on every worker");
            let left = optimizer.parameters().filter(|(_, tensor)| tensor.grad().defined());
            return match left.count() {
                0 => Ok(UpdatePlan::default()),
                parameters => Err(PipelineError::NotUpdatedInBackward { parameters }.into()),
            };
        }
        self.finish_updates()?;
        let Site { offloaded, optimizer, .. } = &mut self.site;
        let optimizer = optimizer.as_mut().expect("it was made on every worker");
        if let Some(offloaded) = offloaded {
            offloaded.reserve_updates(optimizer)?;
        }
        let (here, offloaded_parts) = optimizer.prepare()?.split();
        if let Some(offloaded) = offloaded {
            offloaded.reserve_for(&offloaded_parts)?;
        }
        Ok(UpdatePlan { here, offloaded_parts })
    }

    /// Applies the optimizer's prepared step: at once for parameters on the device, at their next fetch for
    /// offloaded ones.
    pub(crate) fn update(&mut self, plan: UpdatePlan) -> Result<()> {
        let UpdatePlan { mut here, offloaded_parts } = plan;
        let optimizer = self.site.optimizer.as_mut().expect("it has prepared this");
        optimizer.commit(&mut here)?;
        if let Some(offloaded) = &mut self.site.offloaded {
            offloaded.put_off(offloaded_parts);
        }
        Ok(())
    }
}
