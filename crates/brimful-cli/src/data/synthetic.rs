//! Synthetic samples for any model: random, and reproducible from a seed.

use anyhow::{Result, ensure};
use tch::kind::Element;
use tch::{Kind, Tensor};

use super::samples::{NumberStream, scaled};
use super::{Dataset, Examples, Sample, SampleSet};

/// Kind and number of synthetic samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Synthetic {
    pub(crate) sample: Sample,
    pub(crate) train: usize,
    pub(crate) test: usize,
    pub(crate) seed: u64,
}

impl Synthetic {
    /// Describes the usual numbers of samples: 512 to train on, and 128 to test on.
    pub(crate) fn usual(sample: Sample, seed: u64) -> Self {
        Self { sample, train: 512, test: 128, seed }
    }
}

/// Makes images of noise with random classes or masks, or random tokens with the next tokens as targets.
pub(crate) fn generate(config: &Synthetic) -> Result<Dataset> {
    let Synthetic { sample, train, test, seed } = config;
    ensure!(
        *train > 0 && *test > 0,
        "{train} samples to train on and {test} to test on: make at least 1 of each"
    );
    sample.check_room(train.saturating_add(*test))?;
    let mut numbers = NumberStream::new(*seed);
    let halves =
        [*train, *test].map(|count| SampleSet::Held(examples(sample, count, &mut numbers)));
    let description = format!("made-up {}, seed {seed}", describe(sample));
    Ok(Dataset::of(halves, sample.clone(), description))
}

fn describe(sample: &Sample) -> String {
    match sample {
        Sample::Image { shape: [c, h, w], classes } => {
            format!("images, {c}×{h}×{w}, {classes} classes")
        }
        Sample::Mask { shape: [c, h, w] } => format!("images with masks, {c}×{h}×{w}"),
        Sample::Sequence { length, vocabulary } => {
            format!("sequences of {length}, {vocabulary} tokens")
        }
    }
}

fn examples(sample: &Sample, count: usize, numbers: &mut NumberStream) -> Examples {
    let count = count as i64;
    match *sample {
        Sample::Image { shape: [channels, height, width], classes } => Examples::whole(
            numbers.noise(&[count, channels, height, width]),
            numbers.all_below(classes, &[count]),
        ),
        Sample::Mask { shape: [channels, height, width] } => Examples::whole(
            numbers.noise(&[count, channels, height, width]),
            numbers.all_below(2, &[count, 1, height, width]).to_kind(Kind::Float),
        ),
        Sample::Sequence { length, vocabulary } => {
            let tokens = numbers.all_below(vocabulary, &[count, length + 1]);
            let [inputs, targets] =
                [0, 1].map(|start| tokens.narrow(1, start, length).contiguous());
            Examples::whole(inputs, targets)
        }
    }
}

impl NumberStream {
    /// Draws integers from 0 to below the limit.
    fn all_below(&mut self, limit: i64, shape: &[i64]) -> Tensor {
        self.tensor(shape, |bits| scaled(bits, limit as u64) as i64)
    }

    /// Draws uniform noise with mean 0 and deviation 1.
    fn noise(&mut self, shape: &[i64]) -> Tensor {
        let (unit, width) = (f32::powi(2.0, -24), 12_f32.sqrt());
        self.tensor(shape, |bits| ((bits >> 40) as f32 * unit - 0.5) * width)
    }

    fn tensor<T: Element>(&mut self, shape: &[i64], number: impl Fn(u64) -> T) -> Tensor {
        let count = shape.iter().product::<i64>();
        let numbers: Vec<T> = (0..count).map(|_| number(self.next())).collect();
        Tensor::from_slice(&numbers).view(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: Sample = Sample::Image { shape: [3, 16, 16], classes: 7 };
    const MASK: Sample = Sample::Mask { shape: [3, 16, 8] };
    const SEQUENCE: Sample = Sample::Sequence { length: 9, vocabulary: 50 };

    /// Makes examples to train on and to test on.
    fn made_up(sample: Sample, seed: u64) -> [Examples; 2] {
        let data = generate(&Synthetic { sample, train: 40, test: 20, seed }).expect("data");
        [data.train, data.test].map(|mut half| half.all().expect("samples"))
    }

    #[test]
    fn images_are_noise_with_classes() {
        let [train, test] = made_up(IMAGE, 1);
        assert_eq!(train.inputs.size(), [40, 3, 16, 16]);
        assert!(train.inputs.mean(Kind::Double).double_value(&[]).abs() < 0.05);
        assert!((train.inputs.std(true).double_value(&[]) - 1.0).abs() < 0.05);
        let (low, high) = (train.targets.min(), train.targets.max());
        assert_eq!((low.int64_value(&[]), high.int64_value(&[])), (0, 6));
        assert_eq!((train.targets.size(), test.len()), (vec![40], 20));
    }

    #[test]
    fn masks_mark_each_pixel() {
        let [Examples { inputs, targets, .. }, _] = made_up(MASK, 1);
        assert_eq!((inputs.size(), targets.size()), (vec![40, 3, 16, 8], vec![40, 1, 16, 8]));
        let marked = targets.mean(Kind::Double).double_value(&[]);
        assert!((marked - 0.5).abs() < 0.05, "{marked}");
    }

    #[test]
    fn sequences_are_followed_by_themselves() {
        let [Examples { inputs, targets, .. }, _] = made_up(SEQUENCE, 1);
        assert_eq!((inputs.size(), inputs.kind()), (vec![40, 9], Kind::Int64));
        assert_eq!(inputs.narrow(1, 1, 8), targets.narrow(1, 0, 8));
        assert!(inputs.max().int64_value(&[]) < 50);
    }

    #[test]
    fn the_seed_decides_and_the_halves_differ() {
        for sample in [IMAGE, SEQUENCE] {
            let [a, same, other] = [1, 1, 2].map(|seed| made_up(sample.clone(), seed));
            assert_eq!((&a[0].inputs, &a[1].targets), (&same[0].inputs, &same[1].targets));
            assert_ne!(a[0].inputs, other[0].inputs);
            assert_ne!(a[0].inputs.narrow(0, 0, 20), a[1].inputs);
        }
    }

    #[test]
    fn no_samples_are_refused() {
        let none = Synthetic { sample: IMAGE, train: 0, test: 5, seed: 0 };
        let error = generate(&none).expect_err("nothing to train on").to_string();
        assert!(error.starts_with("0 samples to train on and 5 to test on"), "{error}");
    }
}
