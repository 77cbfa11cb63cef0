//! UCI handwritten digits, which come with the program; data/README.md has their licence.

use std::io::Read;

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use tch::{Kind, Tensor};

use super::{Dataset, Examples, PixelScale, of_images};

const FILE: &[u8] = include_bytes!("../../data/digits.csv.gz");
const PIXELS: usize = 64;
const CLASSES: i64 = 10;
/// Interval of test digits: one line in `TEST_EVERY` is for testing.
const TEST_EVERY: i64 = 5;

/// Loads all digits as 8×8 pixels in one channel, normalised with `told`, or else with the scale of the training
/// digits. Every fifth digit is for testing, beginning with the first: 360 of 1,797.
pub(crate) fn load(told: Option<PixelScale>) -> Result<Dataset> {
    let table = read(FILE).context("the digits inside the program are damaged")?;
    let line = Tensor::arange(table.size()[0], (Kind::Int64, table.device()));
    let is_test = line.remainder(TEST_EVERY).eq(0);
    let [train, test] = [is_test.logical_not(), is_test].map(|rows| pick(&table, &rows));
    of_images(train, test, CLASSES, "UCI handwritten digits (CC BY 4.0)", told)
}

fn pick(table: &Tensor, rows: &Tensor) -> Examples {
    let chosen = table.index(&[Some(rows)]);
    let pixels = PIXELS as i64;
    let inputs = chosen.narrow(1, 0, pixels).reshape([-1, 1, 8, 8]).to_kind(Kind::Float);
    Examples::whole(inputs, chosen.select(1, pixels).contiguous())
}

/// Parses lines of 64 pixels and a class into a table of integers.
fn read(compressed: &[u8]) -> Result<Tensor> {
    let mut text = String::new();
    GzDecoder::new(compressed).read_to_string(&mut text)?;
    let mut numbers = Vec::with_capacity(text.len() / 2);
    for (line, number) in text.lines().zip(1..) {
        let before = numbers.len();
        for field in line.split(',') {
            numbers
                .push(field.parse::<i64>().with_context(|| format!("line {number}: '{field}'"))?);
        }
        let fields = numbers.len() - before;
        ensure!(fields == PIXELS + 1, "line {number} has {fields} fields, not {}", PIXELS + 1);
    }
    Ok(Tensor::from_slice(&numbers).view([-1, PIXELS as i64 + 1]))
}

#[cfg(test)]
mod tests {
    use super::super::Sample;
    use super::super::tests::gz;
    use super::*;
    use tch::nn::{self, ModuleT, OptimizerConfig};

    fn loaded() -> (Sample, [Examples; 2]) {
        let Dataset { train, test, sample, .. } = load(None).expect("digits");
        (sample, [train, test].map(|mut half| half.all().expect("samples")))
    }

    #[test]
    fn the_digits_are_the_published_ones() {
        let (sample, [train, test]) = loaded();
        assert_eq!((train.len(), test.len()), (1437, 360));
        assert_eq!(sample, Sample::Image { shape: [1, 8, 8], classes: 10 });
        assert_eq!(train.inputs.size(), [1437, 1, 8, 8]);
        let targets = Tensor::cat(&[&train.targets, &test.targets], 0);
        let counts: Vec<i64> = targets.bincount(None::<Tensor>, 10).try_into().expect("counts");
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        // The first line is a 0 and the sixth a 5; both are for testing.
        assert_eq!((test.targets.int64_value(&[0]), test.targets.int64_value(&[1])), (0, 5));
    }

    #[test]
    fn pixels_have_mean_0_and_deviation_1() {
        let (_, [Examples { inputs: images, .. }, _]) = loaded();
        assert!(images.mean(Kind::Double).double_value(&[]).abs() < 1e-4);
        assert!((images.std(true).double_value(&[]) - 1.0).abs() < 1e-4);
    }

    #[test]
    fn a_small_network_learns_them() {
        let (_, [train, test]) = loaded();
        let vs = nn::VarStore::new(tch::Device::Cpu);
        let model = brimful_models::mlp(64, &[64], 10).build(&vs.root()).expect("a model");
        let mut adam = nn::Adam::default().build(&vs, 0.01).expect("an optimizer");
        for _ in 0..60 {
            let logits = model.forward_t(&train.inputs, true);
            adam.backward_step(&logits.cross_entropy_for_logits(&train.targets));
        }
        let accuracy = model.forward_t(&test.inputs, false).accuracy_for_logits(&test.targets);
        assert!(accuracy.double_value(&[]) > 0.93, "{accuracy:?}");
    }

    #[test]
    fn a_damaged_table_is_refused_with_its_line() {
        for (text, expected) in [("1,2,3", "line 1 has 3 fields"), ("1,x", "line 1: 'x'")] {
            let error = read(&gz(text.as_bytes())).expect_err(text);
            assert!(format!("{error:#}").starts_with(expected), "{error:#}");
        }
        assert!(read(&FILE[..1000]).is_err());
    }
}
