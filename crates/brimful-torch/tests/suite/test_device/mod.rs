//! Device of the tests: the CPU, or the GPU named by `BRIMFUL_TEST_DEVICE`.

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
