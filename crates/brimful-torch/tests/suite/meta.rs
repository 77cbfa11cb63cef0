//! Meta tensors beside tensors with memory.

use brimful_torch::arena::Account;
use brimful_torch::meta;
use tch::nn::Init;
use tch::{Device, Kind, Tensor, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

const INITS: [Init; 6] = [
    Init::Const(0.0),
    Init::Const(0.5),
    Init::Randn { mean: 1.0, stdev: 0.02 },
    Init::Uniform { lo: -1.0, up: 1.0 },
    nn::init::DEFAULT_KAIMING_NORMAL,
    Init::Orthogonal { gain: 1.0 },
];

#[test]
fn a_large_tensor_needs_no_memory() {
    let arena = Account::new("nothing");
    let _inside = arena.enter();
    let shapeless = meta::enter();
    let large = Tensor::randn([1 << 20, 1 << 20], CPU);
    let sum = (&large * 2.0 + 1.0).matmul(&Tensor::ones([1 << 20, 3], CPU));
    assert_eq!((large.numel(), sum.size()), (1 << 40, vec![1 << 20, 3]));
    drop(shapeless);
    assert!(arena.peak() < 1024, "{} bytes", arena.peak());
}

#[test]
fn every_way_to_initialise_a_variable_works() {
    let _shapeless = meta::enter();
    let vs = nn::VarStore::new(Device::Cpu);
    for (i, init) in INITS.into_iter().enumerate() {
        let variable = vs.root().var(&format!("v{i}"), &[8, 4], init);
        assert_eq!((variable.size(), variable.requires_grad()), (vec![8, 4], true));
    }
}

#[test]
fn the_hosts_data_stays_and_reading_a_shape_is_an_error() {
    let _shapeless = meta::enter();
    assert_eq!(Tensor::from_slice(&[1.0_f64, 2.0]).sum(Kind::Double).double_value(&[]), 3.0);
    assert!(Tensor::zeros([2], CPU).f_double_value(&[0]).is_err());
}

#[test]
fn guards_nest_and_other_threads_do_not_notice() {
    let outer = meta::enter();
    drop(meta::enter());
    let elsewhere = std::thread::spawn(|| Tensor::ones([3], CPU).sum(Kind::Float));
    assert_eq!(elsewhere.join().expect("it ends").f_double_value(&[]).ok(), Some(3.0));
    assert!(Tensor::ones([3], CPU).f_double_value(&[0]).is_err());
    drop(outer);
    assert_eq!(Tensor::ones([3], CPU).double_value(&[2]), 1.0);
}

#[test]
fn guards_may_be_dropped_in_any_order() {
    let has_memory = || Tensor::ones([3], CPU).f_double_value(&[0]).is_ok();
    let [first, second, third] = [(); 3].map(|()| meta::enter());
    drop(first);
    assert!(!has_memory(), "two are left");
    drop(third);
    assert!(!has_memory(), "one is left");
    drop(second);
    assert!(has_memory());
}
