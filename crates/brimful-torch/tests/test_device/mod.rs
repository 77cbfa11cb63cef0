//! The device that the tests run on: the CPU, or the GPU that `BRIMFUL_TEST_DEVICE` asks for.

use brimful_torch::cuda;
use tch::Device;

pub fn test_device() -> Device {
    match std::env::var("BRIMFUL_TEST_DEVICE").as_deref() {
        Ok(name) if name.starts_with("cuda") => {
            cuda::load().expect("CUDA was asked for");
            Device::Cuda(0)
        }
        _ => Device::Cpu,
    }
}
