//! State of a default generator; alone in its process, because all threads of a device share it.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU.

use crate::test_device::test_device;
use brimful_torch::random;
use tch::{Kind, Tensor};

#[test]
fn a_generator_draws_the_same_again_from_its_state() {
    let device = test_device();
    let draw = || Tensor::randn([64], (Kind::Double, device));
    let _skipped = draw();
    let state = random::generator_state(device).expect("state");
    let (first, second) = (draw(), draw());
    assert_ne!(first, second);
    random::set_generator_state(device, &state).expect("set");
    assert_eq!((draw(), draw()), (first, second));
}
