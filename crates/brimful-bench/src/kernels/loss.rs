//! Chunked loss of a model's head, compared with a linear layer and the cross-entropy of its full logits.
//!
//! All contestants compute the mean loss and the gradients of hidden states and weight with libtorch's autograd.
//! Ours is [`brimful::nn::linear_cross_entropy`], outside of a step and its sums.

use anyhow::Result;
use brimful::Bytes;
use brimful::memory::Memory;
use brimful_cli::setting::NumberType;
use brimful_torch::autograd::set_gradient;
use brimful_torch::kernels::refusals;
use brimful_torch::linear_cross_entropy::{LossHead, linear_cross_entropy};
use serde::Serialize;
use tch::{Device, Kind, Reduction, Tensor};

use crate::gradients::relative_difference;
use crate::timed::{MeasuredTurn, TurnFigures, compute_the_same, take_turns, timed};
use crate::turns::TurnProgress;

/// Ignored target; here no position has it.
const IGNORED: i64 = -100;
/// Bytes of a chunk's logits in [`brimful::nn::linear_cross_entropy`] when memory is plentiful.
const CHUNK: Bytes = Bytes(256 << 20);

/// Size and dtype of the head.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct LossWork {
    pub(super) dtype: NumberType,
    pub(super) places: i64,
    pub(super) words: i64,
    pub(super) width: i64,
}

/// Implementation of the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LossContestant {
    /// Chunked; logits become their gradients in place.
    Ours,
    /// Logits converted to f32, as a careful user of half precision does.
    LogitsInF32,
    /// Logits without conversion.
    Logits,
}

impl LossContestant {
    /// Returns the contestants: ours first, then the reference for the gradients.
    fn all(dtype: NumberType) -> Vec<Self> {
        match dtype {
            NumberType::Bf16 => vec![Self::Ours, Self::LogitsInF32, Self::Logits],
            _ => vec![Self::Ours, Self::Logits],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Ours => "brimful",
            Self::LogitsInF32 => "libtorch, logits in f32",
            Self::Logits => "libtorch",
        }
    }
}

/// Figures of a contestant.
#[derive(Debug, Serialize)]
pub(super) struct LossRow {
    part: &'static str,
    contestant: &'static str,
    #[serde(flatten)]
    work: LossWork,
    repeats: usize,
    /// Median of its turns: forward, backward and the reading of the loss.
    seconds: f64,
    /// (Longest − shortest) / median of the turns.
    spread: f64,
    /// Seconds of brimful, divided by this contestant's.
    time_ratio: f64,
    /// Peak memory beyond hidden states, weight and targets; includes the gradients.
    peak_bytes: Bytes,
    /// Peak of brimful, divided by this contestant's.
    peak_ratio: f64,
    loss: f64,
    /// Norm of the difference of both gradients from the reference's, divided by the norm of the reference's.
    gradient_difference: f64,
    /// Reasons why libtorch's operations ran instead of a custom kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refusals: Vec<String>,
}

/// Alternates all contestants; returns a row for each.
pub(super) fn measure(
    work: LossWork,
    device: Device,
    repeats: usize,
    progress: &TurnProgress,
) -> Result<Vec<LossRow>> {
    let title = format!("loss {} {}×{}×{}", work.dtype, work.places, work.words, work.width);
    progress.row(&title);
    let mut head = MeasuredHead::new(work, device)?;
    let apart = head.compared()?;
    let refusals = refusals();
    let contestants = LossContestant::all(work.dtype).into_iter().map(|who| (who, who.name()));
    let mut all = take_turns(&title, contestants, repeats, progress, |who| head.turn(who))?;
    progress.done();
    for (who, shown) in &mut all {
        shown.peak = Some(head.peak(*who)?);
    }
    compute_the_same(all.iter().map(|(_, shown)| shown.loss), work.dtype)?;
    let (ours, our_peak) = (&all[0].1, all[0].1.peak.unwrap_or_default());
    let row = |((contestant, shown), apart): (&(LossContestant, TurnFigures), f64)| {
        let (seconds, peak) = (shown.times.median(), shown.peak.unwrap_or_default());
        let is_ours = *contestant == LossContestant::Ours;
        LossRow {
            part: "loss",
            contestant: contestant.name(),
            work,
            repeats,
            seconds,
            spread: shown.times.spread(),
            time_ratio: ours.times.median() / seconds,
            peak_bytes: peak,
            peak_ratio: our_peak.0 as f64 / peak.0 as f64,
            loss: shown.loss,
            gradient_difference: apart,
            refusals: if is_ours { refusals.clone() } else { Vec::new() },
        }
    };
    Ok(all.iter().zip(apart).map(row).collect())
}

/// Hidden states, the weight of a head, and the target word of each position.
struct MeasuredHead {
    dtype: NumberType,
    device: Device,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
}

impl MeasuredHead {
    /// Creates random tensors with logits of about 1.
    fn new(work: LossWork, device: Device) -> brimful::Result<Self> {
        tch::manual_seed(7);
        let LossWork { dtype, places, words, width } = work;
        let leaf = |rows: i64, scale: f64| -> brimful::Result<Tensor> {
            let numbers = Tensor::f_randn([rows, width], (Kind::Float, device))?;
            let numbers = numbers.f_mul_scalar(scale)?.f_to_kind(dtype.kind())?;
            Ok(numbers.f_set_requires_grad(true)?)
        };
        Ok(Self {
            dtype,
            device,
            hidden: leaf(places, 1.0)?,
            weight: leaf(words, (width as f64).sqrt().recip())?,
            targets: Tensor::f_randint(words, [places], (Kind::Int64, device))?,
        })
    }

    /// Returns the relative differences of the contestants' gradients. This is also the first use of each.
    fn compared(&mut self) -> Result<Vec<f64>> {
        let contestants = LossContestant::all(self.dtype);
        let expected = self.gradients(contestants[1])?;
        let apart = |who| relative_difference(&expected, &self.gradients(who)?, self.dtype);
        contestants.into_iter().map(apart).collect()
    }

    fn gradients(&mut self, contestant: LossContestant) -> Result<[Tensor; 2]> {
        self.clear()?;
        self.step(contestant)?;
        Ok([self.hidden.grad(), self.weight.grad()])
    }

    fn clear(&mut self) -> Result<()> {
        set_gradient(&mut self.hidden, None)?;
        Ok(set_gradient(&mut self.weight, None)?)
    }

    /// Returns the peak memory of a turn beyond its inputs. The timed turns run without memory accounting, which
    /// costs time on a CPU.
    fn peak(&mut self, contestant: LossContestant) -> Result<Bytes> {
        self.clear()?;
        let memory = Memory::of(self.device)?;
        let _inside = memory.enter();
        memory.reset_peak()?;
        let before = memory.usage()?.current;
        self.step(contestant)?;
        Ok(Bytes(memory.usage()?.peak.0.saturating_sub(before.0)))
    }

    /// Runs a turn without memory accounting.
    fn turn(&mut self, contestant: LossContestant) -> Result<MeasuredTurn> {
        self.clear()?;
        let (loss, seconds) = timed(self.device, || Ok(self.step(contestant)?))?;
        Ok(MeasuredTurn { seconds, loss, peak: None })
    }

    /// Runs forward, backward and the reading of the loss.
    fn step(&self, contestant: LossContestant) -> brimful::Result<f64> {
        let loss = match contestant {
            LossContestant::Ours => self.loss_in_chunks()?,
            LossContestant::LogitsInF32 => self.loss_of(&self.logits()?.f_to_kind(Kind::Float)?)?,
            LossContestant::Logits => self.loss_of(&self.logits()?)?,
        };
        loss.f_backward()?;
        Ok(loss.f_double_value(&[])?)
    }

    fn loss_in_chunks(&self) -> brimful::Result<Tensor> {
        let head = LossHead {
            weight: &self.weight,
            bias: None,
            class_weights: None,
            smoothing: 0.0,
            ignored: IGNORED,
            chunk_bytes: CHUNK.0,
        };
        let done = linear_cross_entropy(&self.hidden, &self.targets, head)?;
        Ok(done.sum.f_div(&done.divisor)?)
    }

    fn logits(&self) -> brimful::Result<Tensor> {
        Ok(self.hidden.f_linear(&self.weight, None::<Tensor>)?)
    }

    fn loss_of(&self, logits: &Tensor) -> brimful::Result<Tensor> {
        let (targets, weights) = (&self.targets, None::<Tensor>);
        Ok(logits.f_cross_entropy_loss(targets, weights, Reduction::Mean, IGNORED, 0.0)?)
    }
}
