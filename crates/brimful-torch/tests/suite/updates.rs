//! Optimizer steps: dtypes of parameters, gradients and state, in place and beside the present numbers.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU, whose kernel is compared with the loops for CPUs.

use crate::test_device::test_device;
use brimful_torch::kernels;
use brimful_torch::optim::{
    GROUP, Moment, Options, Rule, Update, fits, pack_moment, unpack_moment, update,
};
use tch::{Device, Kind, Tensor};

const ADAMW: Options = Options {
    rule: Rule::Adam,
    rate: 0.01,
    weight_decay: 0.1,
    decoupled: true,
    betas: (0.9, 0.99),
    eps: 1e-8,
    nesterov: false,
};

/// Options of every rule and branch.
fn all_options() -> Vec<Options> {
    let sgd = Options { rule: Rule::Sgd, betas: (0.9, 0.0), decoupled: false, ..ADAMW };
    vec![
        ADAMW,
        Options { decoupled: false, ..ADAMW },
        Options { weight_decay: 0.0, ..ADAMW },
        sgd,
        Options { decoupled: true, nesterov: true, ..sgd },
        Options { betas: (0.9, 0.3), weight_decay: 0.0, ..sgd },
        Options { rule: Rule::Direction, weight_decay: 0.0, ..sgd },
        Options { rule: Rule::Direction, weight_decay: 0.0, nesterov: true, ..sgd },
    ]
}

fn numbers(count: i64, seed: f64, kind: Kind) -> Tensor {
    let ramp = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.37 + seed;
    let sizes = (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.11).cos() * 3.0;
    (ramp.sin() * sizes.exp()).to_kind(kind)
}

/// Parameter with a state.
struct Case {
    parameter: Tensor,
    gradient: Tensor,
    master: Option<Tensor>,
    step: Tensor,
    moments: Vec<(Tensor, Option<Tensor>)>,
}

impl Case {
    /// Creates a parameter of so many numbers, with so many moments of this dtype (any 8-bit one for all).
    fn new(count: i64, kinds: [Kind; 3], moments: usize, rule: Rule) -> Self {
        let [kind, gradient, moment] = kinds;
        let moment = if kind == Kind::Double { Kind::Double } else { moment };
        let master = match kind {
            Kind::BFloat16 => {
                Some((numbers(count, 7.0, Kind::Double) * 300.0).to_kind(Kind::Int16))
            }
            Kind::Half => Some(numbers(count, 7.0, Kind::Float)),
            _ => None,
        };
        let moments = (0..moments).map(|at| {
            let values = numbers(count, 2.0 + at as f64, Kind::Float) * 0.1;
            let values = if at == 0 { values } else { values.square() };
            if moment != Kind::Int8 {
                return (values.to_kind(moment), None);
            }
            let codes = if at == 0 { Kind::Int8 } else { Kind::Uint8 };
            let codes = Tensor::zeros([count], (codes, Device::Cpu));
            let scales = Tensor::zeros([(count as usize).div_ceil(GROUP) as i64], FLOAT);
            pack_moment(&values, &codes, &scales).expect("packed");
            (codes, Some(scales))
        });
        Self {
            parameter: numbers(count, 1.0, kind),
            gradient: numbers(count, 3.0, gradient),
            master: master.filter(|_| rule != Rule::Direction),
            step: Tensor::from(4.0_f32),
            moments: moments.collect(),
        }
    }

    fn map(&self, each: impl Fn(&Tensor) -> Tensor) -> Self {
        Self {
            parameter: each(&self.parameter),
            gradient: each(&self.gradient),
            master: self.master.as_ref().map(&each),
            step: each(&self.step),
            moments: (self.moments.iter())
                .map(|(elements, scales)| (each(elements), scales.as_ref().map(&each)))
                .collect(),
        }
    }

    /// Calls `then` with the update of this parameter.
    fn lend<T>(&self, options: &Options, then: impl FnOnce(&Update<'_>) -> T) -> T {
        let moments: Vec<_> = (self.moments.iter())
            .map(|(elements, scales)| Moment { elements, scales: scales.as_ref() })
            .collect();
        then(&Update {
            parameter: &self.parameter,
            gradient: &self.gradient,
            master: self.master.as_ref(),
            step: (options.rule == Rule::Adam).then_some(&self.step),
            moments: &moments,
            first: false,
        })
    }

    fn update(&self, options: &Options, rate: Option<&Tensor>) {
        self.lend(options, |one| update(&[*one], options, rate)).expect("a step");
    }

    fn tensors(&self) -> Vec<&Tensor> {
        let moments =
            self.moments.iter().flat_map(|(elements, scales)| [elements].into_iter().chain(scales));
        [&self.parameter].into_iter().chain(&self.master).chain(moments).collect()
    }

    /// Returns the numbers that the parameter stands for.
    fn values(&self) -> Tensor {
        match &self.master {
            Some(low) if low.kind() == Kind::Int16 => join(&self.parameter, low),
            Some(master) => master.to_kind(Kind::Double),
            None => self.parameter.to_kind(Kind::Double),
        }
    }
}

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn join(weight: &Tensor, remainder: &Tensor) -> Tensor {
    let high = weight.to_kind(Kind::Float).view_dtype(Kind::Int);
    (high + remainder.to_kind(Kind::Int)).view_dtype(Kind::Float).to_kind(Kind::Double)
}

/// Cases of every rule, dtype and number of moments.
fn cases(count: i64) -> Vec<(String, Options, Case)> {
    let mut all = Vec::new();
    for options in all_options() {
        let moments: &[usize] = match options.rule {
            Rule::Sgd => &[0, 1],
            Rule::Adam => &[2, 3],
            Rule::Direction => &[1],
        };
        for &moments in moments {
            for kind in [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half] {
                if options.rule == Rule::Direction && kind == Kind::Half {
                    continue;
                }
                for gradient in [kind, Kind::Float] {
                    if (kind == Kind::Double) != (gradient == Kind::Double) {
                        continue;
                    }
                    for moment in [Kind::Float, Kind::BFloat16, Kind::Int8] {
                        let kinds = [kind, gradient, moment];
                        let name = format!("{options:?}, {kinds:?}, {moments} moments");
                        all.push((name, options, Case::new(count, kinds, moments, options.rule)));
                    }
                }
            }
        }
    }
    all
}

#[test]
fn a_step_in_half_precision_is_that_of_its_master() {
    for (name, options, case) in cases(1024 + 77) {
        let is_plain = case.moments.iter().all(|(elements, _)| elements.kind() == Kind::Float);
        if case.master.is_none() || !is_plain {
            continue;
        }
        let wide = Case {
            parameter: case.values().to_kind(Kind::Float),
            master: None,
            ..case.map(Tensor::copy)
        };
        for _ in 0..5 {
            case.update(&options, None);
            wide.update(&options, None);
        }
        assert!(case.values().equal(&wide.values()), "{name}");
        let same = case.moments.iter().zip(&wide.moments).all(|((a, _), (b, _))| a.equal(b));
        assert!(same, "{name}: moments");
        let rounded = match case.parameter.kind() {
            // Ties round away from zero.
            Kind::BFloat16 => {
                let bits = wide.parameter.view_dtype(Kind::Int) + 0x8000;
                bits.bitwise_right_shift_tensor_scalar(16).to_kind(Kind::Int16)
            }
            kind => wide.parameter.to_kind(kind).view_dtype(Kind::Int16),
        };
        assert!(case.parameter.view_dtype(Kind::Int16).equal(&rounded), "{name}: weights");
    }
}

/// The GPU's kernel and the loops for CPUs have the same arithmetic in the same order.
#[test]
fn a_device_takes_the_steps_of_a_host() {
    let device = test_device();
    if device == Device::Cpu {
        return;
    }
    let mut wrong = Vec::new();
    for enabled in [true, false] {
        let before = kernels::enabled();
        kernels::set_enabled(enabled);
        for (name, options, case) in cases(5 * 1024 + 77) {
            let there = case.map(|tensor| tensor.to_device(device));
            let rate = Tensor::from(0.02_f32);
            for rate in [None, Some(&rate)] {
                let there_rate = rate.map(|rate| rate.to_device(device));
                case.update(
                    &Options { rate: if rate.is_some() { 1.0 } else { 0.01 }, ..options },
                    rate,
                );
                there.update(
                    &Options { rate: if rate.is_some() { 1.0 } else { 0.01 }, ..options },
                    there_rate.as_ref(),
                );
            }
            for (at, (here, there)) in case.tensors().into_iter().zip(there.tensors()).enumerate() {
                let there = there.to_device(Device::Cpu);
                if enabled && !here.equal(&there) {
                    let first = here.ne_tensor(&there).to_kind(Kind::Int).argmax(None, false);
                    let index = first.int64_value(&[]);
                    let [here, there] = [here, &there].map(|tensor| tensor.double_value(&[index]));
                    wrong.push(format!("{name}, tensor {at}, number {index}: {here:e} {there:e}"));
                }
            }
            let (here, there) = (case.values(), there.map(|t| t.to_device(Device::Cpu)).values());
            let difference = ((&here - there).abs() / (here.abs() + 1.0)).max().double_value(&[]);
            // Without the kernel, 8-bit averages are rounded to nearest.
            let most = if !enabled && name.contains("Int8") { 0.5 } else { 2e-2 };
            if difference > most {
                wrong.push(format!("{name}, kernels {enabled}: {difference}"));
            }
        }
        kernels::set_enabled(before);
    }
    wrong.extend(kernels::refusals());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_split_master_loses_no_bit() {
    let bits: Vec<i32> = [
        0,
        1,
        0x7fff,
        0x8000,
        0xffff,
        0x0080_0000,
        0x3f80_7fff,
        0x3f80_8000,
        0x3f80_8001,
        0x3f81_8000,
        0x7f7f_7fff,
        0x7f7f_8000,
        0x7f7f_ffff,
        0x7f80_0000,
    ]
    .into_iter()
    .flat_map(|bits: i32| [bits, bits | i32::MIN])
    .collect();
    let count = bits.len() as i64;
    let masters = Tensor::from_slice(&bits).view_dtype(Kind::Float);
    let case = Case::new(count, [Kind::BFloat16, Kind::Float, Kind::Float], 0, Rule::Sgd);
    // A step of this size from zero goes to the master.
    let options =
        Options { rule: Rule::Sgd, rate: 1.0, weight_decay: 0.0, decoupled: true, ..ADAMW };
    let zero = Case {
        parameter: case.parameter.zeros_like().to_device(test_device()),
        gradient: -masters.to_device(test_device()),
        master: case.master.as_ref().map(|master| master.zeros_like().to_device(test_device())),
        ..case
    };
    zero.update(&options, None);
    let still = Options { rate: 0.0, ..options };
    let finite = Case { gradient: zero.gradient.zeros_like(), ..zero };
    for _ in 0..2 {
        let here = finite.map(|tensor| tensor.to_device(Device::Cpu));
        let (joined, masters) = (here.values().to_kind(Kind::Float), masters.to_kind(Kind::Float));
        let same = joined.view_dtype(Kind::Int).eq_tensor(&masters.view_dtype(Kind::Int));
        // -0 becomes 0 by the addition to zero.
        let same = same.logical_or(&masters.eq(0.0));
        assert!(bool::try_from(same.all()).expect("a truth"), "{joined} {masters}");
        finite.update(&still, None);
    }
}

#[test]
fn a_weight_set_to_zero_infinity_or_nan_takes_no_remainder_beyond_it() {
    let set = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let options = Options { rule: Rule::Sgd, rate: 0.0, weight_decay: 0.0, ..ADAMW };
    for remainder in [-5_i64, 5] {
        let parameter = Tensor::from_slice(&set).to_kind(Kind::BFloat16).to_device(test_device());
        let master = Tensor::full([5], remainder, (Kind::Int16, test_device()));
        let case = Case {
            gradient: parameter.zeros_like(),
            parameter,
            master: Some(master),
            step: Tensor::from(0.0_f32),
            moments: Vec::new(),
        };
        case.update(&options, None);
        let after =
            Vec::<f32>::try_from(case.parameter.to_kind(Kind::Float).to_device(Device::Cpu));
        let after = after.expect("numbers");
        for (set, after) in set.into_iter().zip(after) {
            assert!(set == after || (set.is_nan() && after.is_nan()), "{set} {after}");
        }
    }
}

#[test]
fn an_eight_bit_moment_is_close_and_its_largest_exact() {
    let values = numbers(1000, 1.0, Kind::Float).to_device(test_device());
    for kind in [Kind::Int8, Kind::Uint8] {
        let values = if kind == Kind::Int8 { values.copy() } else { values.square() };
        let codes = values.zeros_like().to_kind(kind);
        let scales = Tensor::zeros([8], (Kind::Float, test_device()));
        pack_moment(&values, &codes, &scales).expect("packed");
        let back = unpack_moment(&codes, &scales).expect("unpacked");
        let worst = ((back - &values).abs() / values.abs().max()).max().double_value(&[]);
        assert!(worst < 0.01, "{kind:?}: {worst}");
        let largest = values.abs().narrow(0, 0, 128).max();
        assert_eq!(scales.double_value(&[0]), largest.double_value(&[]));
        assert!(
            bool::try_from(codes.ne(0).eq_tensor(&values.ne(0.0)).all()).expect("a truth")
                || kind == Kind::Int8
        );
    }
}

#[test]
fn a_learning_rate_may_be_a_tensor() {
    let step = |rate: Option<&Tensor>| {
        let case = Case::new(200, [Kind::Float; 3], 2, Rule::Adam);
        let case = case.map(|tensor| tensor.to_device(test_device()));
        let options = Options { rate: if rate.is_some() { 1.0 } else { 0.125 }, ..ADAMW };
        case.update(&options, rate);
        assert_eq!(case.step.double_value(&[]), 5.0);
        case.parameter
    };
    let tensor = Tensor::from(0.125_f32).to_device(test_device());
    assert!((step(None) - step(Some(&tensor))).abs().max().double_value(&[]) < 1e-6);
}

#[test]
fn what_a_kernel_would_misread_is_refused() {
    let ones = |shape: &[i64], kind| Tensor::ones(shape, (kind, test_device()));
    let options = Options { rule: Rule::Sgd, ..ADAMW };
    let parameter = ones(&[4, 6], Kind::Float);
    let refused = |gradient: &Tensor, moment: &Tensor, rate: Option<&Tensor>| {
        let moments = [Moment { elements: moment, scales: None }];
        let one = Update {
            parameter: &parameter,
            gradient,
            master: None,
            step: None,
            moments: &moments,
            first: false,
        };
        update(&[one], &options, rate).expect_err("refused").message
    };
    for wrong in [
        ones(&[4, 5], Kind::Float),
        ones(&[6, 4], Kind::Float).tr(),
        ones(&[4, 12], Kind::Float).slice(1, 0, 12, 2),
        ones(&[1, 6], Kind::Float).expand([4, 6], false),
        ones(&[4, 6], Kind::Float).to_sparse(None, None::<&[i64]>, None),
    ] {
        assert!(!fits(&parameter, &wrong));
        assert!(refused(&wrong, &parameter, None).contains("gradient ("));
        assert!(refused(&parameter, &wrong, None).contains("moment ("));
    }
    let double = ones(&[4, 6], Kind::Double);
    assert!(refused(&double, &parameter, None).contains("cannot update"));
    assert!(refused(&parameter, &double, None).contains("a moment of"));
    let rates = ones(&[2], Kind::Float);
    assert!(refused(&parameter, &parameter, Some(&rates)).contains("a learning rate must be"));
    assert_eq!(parameter, ones(&[4, 6], Kind::Float));
}
