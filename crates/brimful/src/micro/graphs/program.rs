//! One captured micro-batch: its CUDA graph, and the tensors that the graph reads and writes.

use std::any::Any;
use std::collections::HashSet;
use std::mem;

use brimful_torch::autograd::backward;
use brimful_torch::grad_mode::GradMode;
use brimful_torch::graph::{Graph, Pool, record};
use brimful_torch::stream::Stream;
use brimful_torch::touched::{Frozen, Touched, touched, untold};
use tch::{Device, Kind, Tensor};

use super::blocks::{Blocks, address};
use super::readout::Readout;
use super::room::stock_up;
use crate::accumulate::Sum;
use crate::batch::{self, Batch};
use crate::loss::{IntoLoss, MicroBatchWeight, Term};
use crate::micro::pass::BatchPass;
use crate::oom::catch_unseen;
use crate::random::Randomness;
use crate::statistics::{Collecting, GraphStatistics, Pending};
use crate::{Error, Result};

/// A captured micro-batch.
#[derive(Debug)]
pub(super) struct Program {
    graph: Graph,
    inputs: Vec<Tensor>,
    /// Root gradients of each term's backward, and the numbers last written there.
    roots: Tensor,
    written: Vec<f64>,
    pub(super) readout: Readout,
    pub(super) sums: Vec<Sum>,
    statistics: GraphStatistics,
    /// Outputs of the closure, of its own type.
    outputs: Box<dyn Any + Send>,
    /// Operations of the closure at the capture, in words.
    pub(super) operations: Vec<String>,
    /// Tensors that the capture touched; `own_memory` takes them.
    touched: Touched,
    /// Memory that the graph shares with others, and the part of it that the graph writes.
    pub(super) blocks: Vec<Tensor>,
    pub(super) effects: Vec<Tensor>,
    /// Frozen tensors that the closure used, which its backward did not reach.
    frozen: Frozen,
}

/// Device and stream of a capture.
#[derive(Debug)]
pub(super) struct Setting {
    pub(super) device: Device,
    pub(super) stream: Stream,
    /// Bytes that the graph is expected to need.
    pub(super) need: u64,
}

/// Creates a stream for captures. cuBLAS allocates its workspace on it, and on the stream beside it, here: if it
/// were allocated during a capture, the workspace would occupy the graph's memory permanently.
pub(super) fn stream(device: Device) -> Result<Stream> {
    let stream = Stream::urgent(device)?;
    for used in [Stream::beside(device)?, stream] {
        let _inside = used.enter()?;
        // Both threads that launch kernels allocate a workspace: this thread in forward, and autograd's in
        // backward.
        let x = Tensor::f_ones([16, 16], (Kind::Float, device))?.set_requires_grad(true);
        backward(&[&x.f_mm(&x)?.f_sum(Kind::Float)?], &[None], false)?;
    }
    Ok(stream)
}

impl Program {
    /// Captures forward and backward of a micro-batch like this one, with gradients added to these sums. Records
    /// the kernels without running them.
    pub(super) fn capture<B: Batch, R: IntoLoss>(
        setting: &Setting,
        sums: Vec<Sum>,
        pool: &mut Pool,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: &B,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<Self, String> {
        // The graph adds to sums of its own at fixed addresses, not to this mini-batch's.
        let groups = pass.accumulator.exchange(sums);
        let captured = catch_unseen(|| Self::recorded(setting, pool, pass, micro_batch, f));
        let sums = pass.accumulator.exchange(groups);
        if captured.is_err() {
            // A failed backward has left gradients that no kernel has computed: the next one would add to them.
            pass.accumulator.clear().map_err(|error| error.to_string())?;
        }
        Ok(Self { sums, ..captured? })
    }

    /// Keeps the memory that the graph shares with other work: the blocks that an eager run has touched too. The
    /// graph's own inputs, sums and rows are not among them, because no eager run touches them.
    pub(super) fn own_memory(&mut self, blocks: &mut Blocks, eager: &Touched) {
        let Touched { read, written, frozen, .. } = mem::take(&mut self.touched);
        self.frozen = frozen;
        let among = |list: &[Tensor]| list.iter().map(address).collect::<HashSet<_>>();
        let eager_read = among(&eager.read);
        let eager_written = among(&eager.written);
        for block in read.iter().chain(&written) {
            let is_written = eager_written.contains(&address(block));
            if is_written || eager_read.contains(&address(block)) {
                let block = blocks.keep(block);
                self.effects.extend(is_written.then(|| block.shallow_clone()));
                self.blocks.push(block);
            }
        }
    }

    /// Returns whether the closure used a tensor in one of these blocks.
    pub(super) fn uses(&self, addresses: &[usize]) -> bool {
        self.blocks.iter().any(|block| addresses.contains(&address(block)))
    }

    /// Returns whether a tensor that the closure used was frozen at the capture and is trained now.
    pub(super) fn is_thawed(&self) -> bool {
        self.frozen.any_is_thawed()
    }

    fn recorded<B: Batch, R: IntoLoss>(
        setting: &Setting,
        pool: &mut Pool,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: &B,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<Self> {
        let (statics, inputs) = statics_like(micro_batch)?;
        let roots = Tensor::f_zeros([pass.groups().len() as i64], (Kind::Double, setting.device))?;
        // Made before the capture, because captured zeros would be written at every replay.
        let rows = Pending::for_the_same_layers()?;
        let host = Randomness::of(vec![Device::Cpu])?;

        let (graph, (statistics, ((readout, outputs), mut touched))) =
            record(setting.stream, pool, || {
                stock_up(setting.device, setting.need)?;
                let collecting = Collecting::after(rows);
                let ran = run_on_statics(pass, statics, f, &roots)?;
                Ok::<_, Error>((collecting.end(), ran))
            })?;

        if touched.draws_on_host {
            // Every replay would use these numbers again. The generator returns to its earlier state, because no
            // micro-batch uses the numbers of this run.
            host.restore()?;
            return Err(Error::Torch("it draws random numbers on the host".into()));
        }
        Ok(Self {
            graph,
            inputs,
            roots,
            written: vec![0.0; readout.terms.len()],
            readout,
            sums: Vec::new(),
            statistics: statistics.into_graph_statistics(),
            outputs: Box::new(outputs),
            operations: mem::take(&mut touched.operations),
            touched,
            blocks: Vec::new(),
            effects: Vec::new(),
            frozen: Frozen::default(),
        })
    }

    /// Replays the graph on this micro-batch, and adds the results to its mini-batch.
    pub(super) fn run<B: Batch, O: Batch + 'static>(
        &mut self,
        pass: &mut BatchPass<O>,
        micro_batch: &B,
        part: &MicroBatchWeight,
    ) -> Result<()> {
        // The graph adds to its own sums, so the mini-batch's sums move there first.
        pass.accumulator.adopt(&self.sums)?;
        self.statistics.before()?;
        self.launch(micro_batch, part)?;
        self.statistics.after()?;
        // Loss and outputs are copied out: the next replay overwrites them.
        pass.tally.count(&self.readout.copied()?.terms, part)?;
        let outputs = self.outputs.downcast_ref::<O>().expect("a closure has one type of outputs");
        pass.outputs.push(outputs.map(&mut |leaf| Ok(leaf.tensor().f_detach_copy()?))?);
        Ok(())
    }

    /// Replays the graph on this micro-batch from empty sums, as a trial.
    pub(super) fn try_on(
        &mut self,
        micro_batch: &impl Batch,
        part: &MicroBatchWeight,
    ) -> Result<()> {
        let all = self.sums.iter().flatten().flatten();
        brimful_torch::foreach::zero(&all.map(Tensor::shallow_clone).collect::<Vec<_>>())?;
        self.launch(micro_batch, part)
    }

    /// Copies the samples in and launches the graph.
    fn launch(&mut self, micro_batch: &impl Batch, part: &MicroBatchWeight) -> Result<()> {
        for (input, leaf) in self.inputs.iter_mut().zip(batch::leaves(micro_batch)) {
            input.f_copy_(leaf.tensor())?;
        }
        for (number, term) in self.readout.terms.iter().enumerate() {
            // A term without a part in this micro-batch runs backward from 0, which adds nothing: a graph
            // cannot skip it.
            let root = term.root_number(part).unwrap_or(0.0);
            if root != self.written[number] {
                let _ = self.roots.f_select(0, number as i64)?.f_fill_(root)?;
                self.written[number] = root;
            }
        }
        Ok(self.graph.replay()?)
    }
}

/// Returns the graph's static inputs in place of a micro-batch, and the tensors in them.
fn statics_like<B: Batch>(micro_batch: &B) -> Result<(B, Vec<Tensor>)> {
    // Zeros, not the samples, so that a result which is computed outside the capture differs from that of a
    // replay.
    let statics = micro_batch.map(&mut |leaf| Ok(leaf.tensor().f_zeros_like()?))?;
    let inputs = batch::leaves(&statics).iter().map(|leaf| leaf.tensor().shallow_clone()).collect();
    Ok((statics, inputs))
}

/// Runs forward and backward on static inputs, from root gradients that are read from the device, because a number
/// from the host would be fixed in the graph.
fn run_on_statics<B: Batch, R: IntoLoss>(
    pass: &mut BatchPass<R::Outputs>,
    statics: B,
    f: &mut impl FnMut(B) -> R,
    roots: &Tensor,
) -> Result<((Readout, R::Outputs), Touched)> {
    watched(statics, f, |terms, output| {
        let readout = Readout::of(terms)?;
        pass.backward(terms, |number, term| {
            Ok(Some(term.root_gradient_of(&roots.f_select(0, number as i64)?)?))
        })?;
        Ok((readout, batch::detached(&output)?))
    })
}

/// Runs the closure, and `then` with its results; also returns the closure's operations, including the numbers
/// of its loss.
pub(super) fn watched<B: Batch, R: IntoLoss, T>(
    micro_batch: B,
    f: &mut impl FnMut(B) -> R,
    then: impl FnOnce(&[Term], R::Outputs) -> Result<T>,
) -> Result<(T, Touched)> {
    let mut numbers = Vec::new();
    let (ran, mut touched) = touched(|| {
        let graphs = GradMode::set(true);
        let returned = f(micro_batch);
        drop(graphs);
        let (loss, output) = returned.into_parts()?;
        let terms = loss.into_terms(true)?;
        numbers.extend(terms.iter().map(Term::in_words));
        // `then` owns the terms, so their autograd graph is freed before the record ends. Otherwise the record
        // would include tensors that only the autograd graph keeps.
        untold(move || then(&terms, output))
    })?;
    touched.operations.append(&mut numbers);
    Ok((ran?, touched))
}
