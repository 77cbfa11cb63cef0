//! A head's loss in chunks against a linear layer and the cross-entropy of its logits, which are whole.
//!
//! All compute the mean loss and the gradients of hidden states and weight, by libtorch's autograd. Ours is
//! what [`brimful::nn::linear_cross_entropy`] runs, outside of a step and its sums.

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

/// The target of places that do not count; here all do.
const IGNORED: i64 = -100;
/// What the logits of a chunk may take in [`brimful::nn::linear_cross_entropy`] where memory is not short.
const CHUNK: Bytes = Bytes(256 << 20);

/// How large the head is, and in which numbers it is computed.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct LossWork {
    pub(super) dtype: NumberType,
    pub(super) places: i64,
    pub(super) words: i64,
    pub(super) width: i64,
}

/// Who computes the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LossContestant {
    /// In chunks, whose logits become their gradients at once.
    Ours,
    /// From logits that are turned into f32, as a careful user of halves writes it.
    LogitsInF32,
    /// From logits as they are.
    Logits,
}

impl LossContestant {
    /// Ours first; the next is who the others' gradients are compared with.
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

/// A contestant's figures.
#[derive(Debug, Serialize)]
pub(super) struct LossRow {
    part: &'static str,
    contestant: &'static str,
    #[serde(flatten)]
    work: LossWork,
    repeats: usize,
    /// The median of its turns: forward, backward and the reading of the loss.
    seconds: f64,
    /// (Longest − shortest) / median of the turns.
    spread: f64,
    /// The seconds of brimful over its own.
    time_ratio: f64,
    /// The most memory beside hidden states, weight and targets; the gradients are in it.
    peak_bytes: Bytes,
    /// The peak of brimful over its own.
    peak_ratio: f64,
    loss: f64,
    /// The length of the difference of both gradients, from the careful contestant's, over that of these.
    gradient_difference: f64,
    /// Why libtorch's operations ran where a kernel of ours could have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refusals: Vec<String>,
}

/// Lets all take turns; a row for each.
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

/// Hidden states, the weight of a head, and which word follows each place.
struct MeasuredHead {
    dtype: NumberType,
    device: Device,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
}

impl MeasuredHead {
    /// Random, with logits of about one.
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

    /// How far the contestants' gradients are apart. It is also the first use of each.
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

    /// The most memory that a turn takes beside what it is given. Not in the timed turns: counting costs
    /// on a CPU.
    fn peak(&mut self, contestant: LossContestant) -> Result<Bytes> {
        self.clear()?;
        let memory = Memory::of(self.device)?;
        let _inside = memory.enter();
        memory.reset_peak()?;
        let before = memory.usage()?.current;
        self.step(contestant)?;
        Ok(Bytes(memory.usage()?.peak.0.saturating_sub(before.0)))
    }

    /// A turn whose memory is not counted.
    fn turn(&mut self, contestant: LossContestant) -> Result<MeasuredTurn> {
        self.clear()?;
        let (loss, seconds) = timed(self.device, || Ok(self.step(contestant)?))?;
        Ok(MeasuredTurn { seconds, loss, peak: None })
    }

    /// Forward, backward and the reading of the loss.
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
