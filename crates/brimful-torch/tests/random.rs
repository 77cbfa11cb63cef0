//! A generator's state, alone in its process because all of a device's threads share it.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same body on a GPU.

use brimful_torch::{cuda, random};
use tch::{Device, Kind, Tensor};

#[test]
fn a_generator_draws_the_same_again_from_its_state() {
    let gpu = std::env::var("BRIMFUL_TEST_DEVICE").is_ok_and(|name| name.starts_with("cuda"));
    let device = if gpu { Device::Cuda(0) } else { Device::Cpu };
    assert!(!gpu || cuda::load().is_ok());
    let draw = || Tensor::randn([64], (Kind::Double, device));
    let _skipped = draw();
    let state = random::generator_state(device).expect("state");
    let (first, second) = (draw(), draw());
    assert_ne!(first, second);
    random::set_generator_state(device, &state).expect("set");
    assert_eq!((draw(), draw()), (first, second));
}
