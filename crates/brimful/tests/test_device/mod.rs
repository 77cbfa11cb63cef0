//! The device that the tests run on: the CPU, or the one that `BRIMFUL_TEST_DEVICE` asks for.

use brimful::device;
use tch::Device;

pub fn test_device() -> Device {
    match std::env::var("BRIMFUL_TEST_DEVICE") {
        Ok(name) => device::find(&name).expect("the device asked for"),
        Err(_) => Device::Cpu,
    }
}
