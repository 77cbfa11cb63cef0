//! Losses over the whole mini-batch: outputs from all replicas, the loss on the first, and back.
//!
//! ```text
//!   1. every replica   its part forward, without a graph           → the mini-batch's outputs
//!   2. the first one   the loss on all of them, and its backward   → a gradient for each output
//!   3. every replica   its part forward again, with the same random numbers, and backward
//! ```

use std::ops::Range;
use std::panic;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::Replicas;
use super::attempt::{Joined, errands};
use super::replica::{Errand, Replica};
use super::report::Step;
use crate::auto::Use;
use crate::batch::{self, Batch};
use crate::crew::drawing;
use crate::micro::Window;
use crate::micro::attempt::OwnDraws;
use crate::micro::whole::RowGradients;
use crate::micro::world::{Opening, aside};
use crate::oom::{self, Caught};
use crate::{Error, Result};

/// Each replica's part; none where it has no sample.
type Parts<B> = Vec<Option<Errand<B>>>;

impl<M: 'static> Replicas<M> {
    /// Runs forward on every micro-batch, the loss on all outputs at once, and backward, as
    /// [`MicroBatcher::backward_whole`](crate::MicroBatcher::backward_whole) does. `loss` gets the
    /// first replica's model, and the outputs on its device.
    ///
    /// # Errors
    /// As [`Replicas::backward`]; and where there are other ranks, because all outputs must be in
    /// one process.
    pub fn backward_whole<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        batch: &B,
        forward: impl Fn(&M, B) -> O + Send + Sync + 'static,
        loss: impl Fn(&M, &O) -> Tensor + Send + Sync + 'static,
    ) -> Result<Step<O>> {
        self.check_no_window()?;
        if let Some(world) = &self.world {
            return Err(Error::NotOverRanks { ranks: world.size() });
        }
        let (start, devices, mut thrown) = (Instant::now(), self.devices.clone(), None);
        self.crew.involve(batch::devices(batch).into_iter());
        let (forward, loss) = (Arc::new(forward), Arc::new(loss));
        let step = drawing(&devices, |seed| {
            let opening = Opening::open(None, Use::TrainWhole, batch, self.size, seed, None)?;
            let shares = self.speeds.shares(opening.own());
            let (step, story) = self.sized(None, &opening, &shares, |this, size| {
                let parts = || errands(batch, &shares, size, |replica| opening.scale(replica));
                let attempted = this.outputs(parts()?, Arc::clone(&forward)).and_then(|outputs| {
                    let draws = OwnDraws { seed, place: shares.len() };
                    let (window, gradients) = this.weighed(&outputs, draws, Arc::clone(&loss))?;
                    let parts = parts().and_then(|parts| with_rows(parts, &shares, &gradients));
                    let joined = this.returned(parts, Arc::clone(&forward), window)?;
                    Ok(joined.with_outputs(outputs))
                });
                let joined = attempted.map_err(|caught| aside(caught, &mut thrown))?;
                let peaks = joined.peaks();
                Ok((this.settle(joined, None, start)?, peaks))
            })?;
            Ok(Step { seed, ..step }.with_story(story))
        });
        if let Some(payload) = thrown {
            panic::resume_unwind(payload);
        }
        self.reserved = 0;
        step
    }

    /// All outputs, on the first replica's device.
    fn outputs<B: Batch + 'static, O: Batch + 'static>(
        &self,
        parts: Parts<B>,
        forward: Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
    ) -> Result<O, Caught<Error>> {
        let rehearse = move |replica: &mut Replica<M>, part: Option<Errand<B>>| {
            Ok(part.map(|part| oom::catch(|| replica.rehearse(part, &*forward))))
        };
        let outputs = self
            .crew
            .all(Replica::take_over)
            .and_then(|_| self.crew.each_or_error(parts, rehearse));
        let outputs = outputs.map_err(Caught::Error)?.into_iter().flatten();
        let outputs = outputs.collect::<Result<Vec<O>, _>>()?;
        oom::catch(|| batch::join(outputs))
    }

    /// What the loss adds to the step itself, and each output's gradient.
    fn weighed<O: Batch + 'static>(
        &self,
        outputs: &O,
        draws: OwnDraws,
        loss: Arc<impl Fn(&M, &O) -> Tensor + Send + Sync + 'static>,
    ) -> Result<(Window, RowGradients), Caught<Error>> {
        let outputs = outputs.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()));
        let weighed = outputs.and_then(|outputs| {
            self.crew.one(0, move |first| Ok(oom::catch(|| first.weigh(&outputs, draws, &*loss))))
        });
        weighed.map_err(Caught::Error)?
    }

    /// All replicas' parts, backward from their outputs' gradients, and the loss's own; undone where
    /// that fails.
    fn returned<B: Batch + 'static, O: Batch + 'static>(
        &self,
        parts: Result<Parts<(B, RowGradients)>>,
        forward: Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
        mut whole: Window,
    ) -> Result<Joined<()>, Caught<Error>> {
        let back = move |replica: &mut Replica<M>, part: Errand<(B, RowGradients)>| {
            replica.back(part, &*forward)
        };
        let attempted = parts.map_err(Caught::Error).and_then(|parts| self.attempt(parts, &back));
        let added = attempted.and_then(|Joined { window: mut parts, told, .. }| {
            // The loss was counted before: these parts have nothing to add to it.
            parts.tally = whole.tally.following();
            whole.extend(parts).map_err(Caught::Error)?;
            Ok(told)
        });
        match added {
            Ok(told) => Ok(Joined { window: whole, outputs: (), told }),
            Err(caught) => {
                whole.undo.run().map_err(Caught::Error)?;
                Err(caught)
            }
        }
    }
}

/// Each part with its rows of the gradients.
fn with_rows<B>(
    parts: Parts<B>,
    shares: &[Range<usize>],
    gradients: &RowGradients,
) -> Result<Parts<(B, RowGradients)>> {
    let with_rows = |(part, share): (Option<Errand<B>>, &Range<usize>)| {
        let Some(Errand { batch, ranges, scale }) = part else { return Ok(None) };
        Ok(Some(Errand { batch: (batch, gradients.rows(share)?), ranges, scale }))
    };
    parts.into_iter().zip(shares).map(with_rows).collect()
}
