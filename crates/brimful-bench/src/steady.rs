//! Steps that follow each other, their updates included, however late these run.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::times::StepTimes;
use crate::turns::TurnProgress;

/// The first makes gradients and the optimizer's state; a host may take some more to have memory for what an
/// optimizer at home computes ahead.
const WARM_UP: usize = 5;

/// What a step is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepPart {
    /// Forward and backward, until the loss is read.
    Backward,
    /// The update, or its beginning.
    Update,
    /// The rest of the last update, which has no next step to hide behind.
    LastUpdate,
}

/// What such steps took.
#[derive(Debug, Serialize)]
pub(crate) struct SteadySteps {
    /// The mean of a step: the update of one may run within the next.
    pub(crate) seconds: f64,
    pub(crate) seconds_backward: f64,
    pub(crate) seconds_last_update: f64,
}

impl SteadySteps {
    /// Lets a contestant of this name run so many steps, after some to warm up.
    pub(crate) fn measure<T>(
        contestant: &mut T,
        repeats: usize,
        (name, progress): (&str, &TurnProgress),
        mut run: impl FnMut(&mut T, StepPart) -> Result<()>,
    ) -> Result<Self> {
        let (mut times, mut backwards) = (StepTimes::default(), StepTimes::default());
        for turn in 0..WARM_UP + repeats {
            progress.turn(name, "steps", turn, WARM_UP, repeats);
            let start = Instant::now();
            run(contestant, StepPart::Backward)?;
            backwards.push_if(turn >= WARM_UP, start.elapsed().as_secs_f64());
            run(contestant, StepPart::Update)?;
            times.push_if(turn >= WARM_UP, start.elapsed().as_secs_f64());
        }
        let start = Instant::now();
        run(contestant, StepPart::LastUpdate)?;
        Ok(Self {
            seconds: times.0.iter().sum::<f64>() / times.0.len() as f64,
            seconds_backward: backwards.median(),
            seconds_last_update: start.elapsed().as_secs_f64(),
        })
    }
}
